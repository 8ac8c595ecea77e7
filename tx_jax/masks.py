"""Masks are rules on absolute indices, closed under `&`, `|` and `~`.

A `Rule` says which pair (query index, key index) may meet; it knows neither batch nor length, so
the same object serves the dense mask, a kernel's tiles and one row of cached decoding. `Mask` adds
what differs between examples: segment ids and prefix lengths. Rules are hashable and static under
`jax.jit`; a `Mask` is a pytree.
"""

import ast
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tx_jax.errors import UserError, nearest


@dataclass(frozen=True)
class Rule:
    """Which pairs of absolute indices may meet. Subclasses define `allowed`."""

    def allowed(self, q_idx: ArrayLike, k_idx: ArrayLike) -> Any:
        """Bool array over the broadcast of two integer arrays (NumPy, JAX or Pallas values)."""
        raise NotImplementedError

    def __and__(self, other: "Rule") -> "Rule":
        return And(self, _rule(other))

    def __or__(self, other: "Rule") -> "Rule":
        return Or(self, _rule(other))

    def __invert__(self) -> "Rule":
        return Not(self)

    def names(self) -> frozenset[str]:
        """Names of the elementary rules inside; an implementation states which ones it takes."""
        return frozenset({type(self).__name__.lower()})


@dataclass(frozen=True)
class Full(Rule):
    """Every query sees every key."""

    def allowed(self, q_idx: ArrayLike, k_idx: ArrayLike) -> Any:
        return 0 * q_idx == 0 * k_idx

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True)
class Causal(Rule):
    """A query sees the keys up to and including its own index."""

    def allowed(self, q_idx: ArrayLike, k_idx: ArrayLike) -> Any:
        return q_idx >= k_idx

    def __str__(self) -> str:
        return "causal"


@dataclass(frozen=True)
class Window(Rule):
    """A query sees `width` keys counting its own index: 0 <= q - k < width."""

    width: int

    def __post_init__(self) -> None:
        _check_count("window", self.width, 1)

    def allowed(self, q_idx: ArrayLike, k_idx: ArrayLike) -> Any:
        return (q_idx >= k_idx) & (q_idx - k_idx < self.width)

    def __str__(self) -> str:
        return f"window({self.width})"


@dataclass(frozen=True)
class Prefix(Rule):
    """Every query sees the first `length` keys, as in `causal | prefix(8)`.

    The length is the same for all examples; lengths that differ belong to `Mask.prefix_B`.
    """

    length: int

    def __post_init__(self) -> None:
        _check_count("prefix", self.length, 0)

    def allowed(self, q_idx: ArrayLike, k_idx: ArrayLike) -> Any:
        return k_idx < 0 * q_idx + self.length

    def __str__(self) -> str:
        return f"prefix({self.length})"


@dataclass(frozen=True)
class And(Rule):
    """Both rules allow the pair."""

    left: Rule
    right: Rule

    def allowed(self, q_idx: ArrayLike, k_idx: ArrayLike) -> Any:
        return self.left.allowed(q_idx, k_idx) & self.right.allowed(q_idx, k_idx)

    def names(self) -> frozenset[str]:
        return self.left.names() | self.right.names()

    def __str__(self) -> str:
        return f"{_bracket(self.left, Or)} & {_bracket(self.right, And, Or)}"


@dataclass(frozen=True)
class Or(Rule):
    """At least one rule allows the pair."""

    left: Rule
    right: Rule

    def allowed(self, q_idx: ArrayLike, k_idx: ArrayLike) -> Any:
        return self.left.allowed(q_idx, k_idx) | self.right.allowed(q_idx, k_idx)

    def names(self) -> frozenset[str]:
        return self.left.names() | self.right.names()

    def __str__(self) -> str:
        return f"{self.left} | {_bracket(self.right, Or)}"


@dataclass(frozen=True)
class Not(Rule):
    """The rule forbids the pair."""

    rule: Rule

    def allowed(self, q_idx: ArrayLike, k_idx: ArrayLike) -> Any:
        # `^ True`, because `~` on a Python bool (two plain ints as indices) is a number.
        return self.rule.allowed(q_idx, k_idx) ^ True

    def names(self) -> frozenset[str]:
        return self.rule.names()

    def __str__(self) -> str:
        return f"~{_bracket(self.rule, And, Or)}"


ELEMENTARY = {"full": Full, "causal": Causal, "window": Window, "prefix": Prefix}


def parse_mask(text: str) -> Rule:
    """Read a rule such as `causal & window(256)`; `str(rule)` is read back to an equal rule.

    Raises:
      UserError: a name is unknown, an argument is wrong, or the text is not built from names,
        calls with literal arguments, `&`, `|`, `~` and parentheses.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise UserError(f"the mask '{text}' cannot be read; write it like causal & window(256) "
                        "with &, |, ~ and parentheses.") from None
    return _read(tree, text)


def _read(node: ast.expr, text: str) -> Rule:
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _read(left, text) & _read(right, text)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _read(left, text) | _read(right, text)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_read(operand, text)
        case ast.Name(id=name):
            return _build(name, (), {}, text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            try:
                values = [ast.literal_eval(a) for a in args]
                named = {k.arg: ast.literal_eval(k.value) for k in keywords if k.arg}
            except ValueError:
                raise UserError(f"the arguments of '{ast.unparse(node)}' in the mask '{text}' must "
                                "be numbers, as in window(256).") from None
            return _build(name, values, named, text)
    raise UserError(f"'{ast.unparse(node)}' in the mask '{text}' is not a rule; use the rules "
                    f"{', '.join(sorted(ELEMENTARY))} with &, |, ~ and parentheses.")


def _build(name: str, args: Any, kwargs: Any, text: str) -> Rule:
    if name not in ELEMENTARY:
        raise UserError(f"there is no mask rule named '{name}' in '{text}'"
                        f"{nearest(name, ELEMENTARY)}")
    try:
        return ELEMENTARY[name](*args, **kwargs)
    except TypeError:
        fields = ", ".join(ELEMENTARY[name].__dataclass_fields__)
        raise UserError(f"the mask rule '{name}' in '{text}' must be written "
                        f"{name}({fields}).".replace("()", "")) from None


def _bracket(rule: Rule, *looser: type) -> str:
    return f"({rule})" if isinstance(rule, looser) else str(rule)


def _rule(other: Any) -> Rule:
    if not isinstance(other, Rule):
        raise UserError(f"a mask rule combines with another rule only, not with {other!r}; segment "
                        "ids go into Mask(rule, q_segments_BT, k_segments_BS).")
    return other


def _check_count(name: str, value: Any, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise UserError(f"{name}({value!r}) is not a mask; give a whole number of keys >= {low}.")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """A rule, and what differs between the examples of a batch.

    A pair is allowed when (rule or key index < prefix) and both segments are equal and not 0.

    Attributes:
      rule: static under jit.
      q_segments_BT, k_segments_BS: integer document numbers; 0 is padding, which neither attends
        nor is attended. Give both or none (lengths: `segments_from_lengths`).
      prefix_B: number of keys, counted from absolute index 0, that every query of the example sees
        besides those of the rule (prefix language models with one document per row).
    """

    rule: Rule = field(default=Full(), metadata={"static": True})
    q_segments_BT: jax.Array | None = None
    k_segments_BS: jax.Array | None = None
    prefix_B: jax.Array | None = None


def segments_from_lengths(lengths_B: ArrayLike, size: int) -> jax.Array:
    """Segment ids [B, size] of right-padded rows: 1 on the first `lengths_B` places, then 0."""
    return (jnp.arange(size)[None, :] < jnp.asarray(lengths_B)[:, None]).astype(jnp.int32)


def index_arrays(T: int, S: int, q_start: ArrayLike | None = None) -> tuple[jax.Array, jax.Array]:
    """Absolute indices of queries [1|B, T, 1] and keys [1, 1, S], int32.

    `q_start` is the index of the first query: a scalar or one per example [B], traced or not. The
    default is S - T: the last query stands on the last key, as in a forward pass over everything
    seen so far.
    """
    start_B = jnp.reshape(jnp.asarray(S - T if q_start is None else q_start, jnp.int32), (-1,))
    q_idx_BT = start_B[:, None] + jnp.arange(T, dtype=jnp.int32)[None, :]
    return q_idx_BT[:, :, None], jnp.arange(S, dtype=jnp.int32)[None, None, :]


def dense_mask(mask: Mask | Rule, T: int, S: int, q_start: ArrayLike | None = None) -> jax.Array:
    """The mask as a bool array [B, T, S], or [1, T, S] when all examples agree.

    Args:
      mask: a mask, or a rule alone.
      T, S: query and key length.
      q_start: index of the first query, see `index_arrays`.

    Raises:
      UserError: segment ids are incomplete or do not fit T and S.
    """
    mask = as_mask(mask)
    check_mask(mask, T, S)
    q_idx, k_idx = index_arrays(T, S, q_start)
    allowed_BTS = mask.rule.allowed(q_idx, k_idx)
    if mask.prefix_B is not None:
        allowed_BTS = allowed_BTS | (k_idx < mask.prefix_B[:, None, None] + 0 * q_idx)
    if mask.q_segments_BT is not None:
        q_seg, k_seg = mask.q_segments_BT[:, :, None], mask.k_segments_BS[:, None, :]
        allowed_BTS = allowed_BTS & (q_seg == k_seg) & (q_seg != 0)
    return allowed_BTS


def as_mask(mask: Any) -> Mask:
    """A mask from a mask, a rule, or the text of a rule."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, (Rule, str)):
        return Mask(parse_mask(mask) if isinstance(mask, str) else mask)
    raise UserError(f"a mask must be a Mask or a Rule, not {type(mask).__name__}; build one with "
                    "parse_mask('causal') and Mask(rule, q_segments_BT, k_segments_BS).")


def check_mask(mask: Mask, T: int, S: int) -> None:
    """Raise UserError unless the segment ids are complete and fit the lengths."""
    q_seg, k_seg = mask.q_segments_BT, mask.k_segments_BS
    if (q_seg is None) != (k_seg is None):
        raise UserError("a mask has segment ids for queries or for keys only; give both "
                        "q_segments_BT and k_segments_BS (ones where nothing is padded).")
    shapes = [] if q_seg is None else [("q_segments_BT", q_seg, T), ("k_segments_BS", k_seg, S)]
    for name, array, length in shapes:
        if array.ndim != 2 or array.shape[1] != length:
            raise UserError(f"{name} has shape {tuple(array.shape)} but must be (B, {length}) to "
                            f"fit T={T} and S={S}.")
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise UserError(f"{name} has dtype {array.dtype}; segment ids are integers, 0 = "
                            "padding.")


def hide_unseen(mask: Mask | None, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array,
                q_start: ArrayLike | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Zero the queries that see no key, and the keys and values that no query sees.

    Products with weight 0 would otherwise carry their NaN or infinity (padding, the unwritten part
    of a cache) into outputs and gradients, as 0 * NaN = NaN.
    """
    if mask is None:
        return q_BTNH, k_BSKH, v_BSKH
    allowed_BTS = dense_mask(mask, q_BTNH.shape[1], k_BSKH.shape[1], q_start)
    sees = jnp.any(allowed_BTS, axis=2)[:, :, None, None]
    seen = jnp.any(allowed_BTS, axis=1)[:, :, None, None]
    return jnp.where(sees, q_BTNH, 0), jnp.where(seen, k_BSKH, 0), jnp.where(seen, v_BSKH, 0)
