"""A mask: a rule, and what differs between the examples of a batch; the dense array it means."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tx_jax.errors import UserError
from tx_jax.masks.rules import Full, Rule
from tx_jax.masks.text import parse_mask


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mask:
    """A rule, and what differs between the examples of a batch.

    A pair is allowed when (rule or key index < prefix), and key index < length, and both segments
    are equal and not 0. `mask & rule` narrows it.

    Attributes:
      rule: static under jit.
      q_segments_BT, k_segments_BS: integer document numbers; 0 is padding, which neither attends
        nor is attended. Give both or none (lengths: `segments_from_lengths`).
      prefix_B: number of keys, counted from absolute index 0, that every query of the example sees
        besides those of the rule (prefix language models with one document per row).
      k_lengths_B: number of keys of the example that exist (the filled part of a cache, the text of
        a right-padded row); the others are not attended.
      finite: a promise that no unseen key or value is NaN or infinite, so that nobody has to zero
        them. A cache keeps it, as it begins with zeros and takes no padding.
    """

    rule: Rule = field(default=Full(), metadata={"static": True})
    q_segments_BT: jax.Array | None = None
    k_segments_BS: jax.Array | None = None
    prefix_B: jax.Array | None = None
    k_lengths_B: jax.Array | None = None
    finite: bool = field(default=False, metadata={"static": True})

    def __post_init__(self) -> None:
        if isinstance(self.rule, str):
            object.__setattr__(self, "rule", parse_mask(self.rule))
        if not isinstance(self.rule, Rule):
            raise UserError(f"Mask({self.rule!r}) needs a rule, such as Causal() or the text "
                            "'causal & window(256)'.")

    def allowed(self, q_idx: jax.Array, k_idx: jax.Array) -> jax.Array:
        """Bool [1|B, T, S] at absolute indices q_idx [1|B, T, 1] and k_idx [1, 1, S], which segment
        ids fit."""
        allowed_BTS = self.rule.allowed(q_idx, k_idx)
        if self.prefix_B is not None:
            allowed_BTS = allowed_BTS | (k_idx < self.prefix_B[:, None, None] + 0 * q_idx)
        if self.k_lengths_B is not None:
            allowed_BTS = allowed_BTS & (k_idx < self.k_lengths_B[:, None, None])
        if self.q_segments_BT is not None:
            q_seg, k_seg = self.q_segments_BT[:, :, None], self.k_segments_BS[:, None, :]
            allowed_BTS = allowed_BTS & (q_seg == k_seg) & (q_seg != 0)
        return allowed_BTS

    def __and__(self, other: Rule) -> "Mask":
        if not isinstance(other, Rule) or self.prefix_B is not None:
            raise UserError("a Mask narrows by `mask & rule` only, and not with prefix lengths; "
                            "combine rules first and put them into Mask(rule, ...).")
        return replace(self, rule=self.rule & other)

    def __or__(self, other: Any) -> "Mask":
        raise UserError("a Mask cannot be widened by |, nor inverted by ~; combine rules first and "
                        "put them into Mask(rule, ...).")

    def __invert__(self) -> "Mask":
        return self | None


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
    return mask.allowed(*index_arrays(T, S, q_start))


def decode_row(mask: Mask | Rule, S: int, q_start: ArrayLike) -> jax.Array:
    """The keys that one query at `q_start` (scalar or [B]) sees among S cached ones: [1|B, S]."""
    return dense_mask(mask, 1, S, q_start)[:, 0]


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
    for name in ("q_segments_BT", "k_segments_BS", "prefix_B", "k_lengths_B"):
        array = getattr(mask, name)
        if array is not None and not isinstance(array, (jax.Array, np.ndarray)):
            raise UserError(f"{name} of the mask is a {type(array).__name__}; give an integer "
                            "array.")
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
    for name in ("prefix_B", "k_lengths_B"):
        array = getattr(mask, name)
        if array is not None and (array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.integer)):
            raise UserError(f"{name} has shape {tuple(array.shape)} and dtype {array.dtype}; give "
                            "one integer per example.")


def hide_unseen(mask: Mask | None, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array,
                q_start: ArrayLike | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Zero the queries that see no key, and the keys and values that no query sees.

    Products with weight 0 would otherwise carry their NaN or infinity (padding, the unwritten part
    of a cache) into outputs and gradients, as 0 * NaN = NaN.
    """
    if mask is None or mask.finite:
        return q_BTNH, k_BSKH, v_BSKH
    allowed_BTS = dense_mask(mask, q_BTNH.shape[1], k_BSKH.shape[1], q_start)
    sees = jnp.any(allowed_BTS, axis=2)[:, :, None, None]
    seen = jnp.any(allowed_BTS, axis=1)[:, :, None, None]
    return jnp.where(sees, q_BTNH, 0), jnp.where(seen, k_BSKH, 0), jnp.where(seen, v_BSKH, 0)
