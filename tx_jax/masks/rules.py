"""Mask rules: which pair (query index, key index) may meet, closed under `&`, `|` and `~`.

A rule knows neither batch nor length, so the same object serves the dense mask, a kernel's tiles
and one row of cached decoding. Rules are hashable and static under `jax.jit`. Each rule is written
twice: `allowed` at single pairs, and `tile` as bounds over a rectangle of pairs.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tx_jax.errors import UserError

# Indices of tokens are 32-bit integers.
LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Rule:
    """Which pairs of absolute indices may meet. Subclasses define `allowed` and `tile`."""

    def allowed(self, q_idx: ArrayLike, k_idx: ArrayLike) -> Any:
        """Bool array over the broadcast of two integer arrays (NumPy, JAX or Pallas values)."""
        raise NotImplementedError

    def tile(self, q_lo: Any, q_hi: Any, k_lo: Any, k_hi: Any) -> tuple[Any, Any]:
        """Bounds over all pairs with q_lo <= q <= q_hi and k_lo <= k <= k_hi.

        Returns:
          (some, every): `some` is False only if no pair is allowed, `every` is True only if all
          are; either may err on the other side. Integers or integer arrays, NumPy or JAX.
        """
        return 0 * q_lo == 0 * k_lo, 0 * q_lo != 0 * k_lo

    def __and__(self, other: "Rule") -> "Rule":
        return And(self, _rule(other))

    def __or__(self, other: "Rule") -> "Rule":
        return Or(self, _rule(other))

    def __invert__(self) -> "Rule":
        return Not(self)

    def band(self) -> tuple[float, float] | None:
        """(low, high) such that every allowed pair has low <= q - k <= high, infinite where there
        is no bound; None for a rule that does not depend on q - k alone."""
        return None

    def names(self) -> frozenset[str]:
        """Names of the elementary rules inside; an implementation states which ones it takes."""
        return frozenset({type(self).__name__.lower()})


@dataclass(frozen=True)
class Full(Rule):
    """Every query sees every key."""

    def allowed(self, q_idx: ArrayLike, k_idx: ArrayLike) -> Any:
        return 0 * q_idx == 0 * k_idx

    def tile(self, q_lo: Any, q_hi: Any, k_lo: Any, k_hi: Any) -> tuple[Any, Any]:
        yes = 0 * q_lo == 0 * k_lo
        return yes, yes

    def band(self) -> tuple[float, float]:
        return -math.inf, math.inf

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True)
class Causal(Rule):
    """A query sees the keys up to and including its own index."""

    def allowed(self, q_idx: ArrayLike, k_idx: ArrayLike) -> Any:
        return q_idx >= k_idx

    def tile(self, q_lo: Any, q_hi: Any, k_lo: Any, k_hi: Any) -> tuple[Any, Any]:
        return q_hi >= k_lo, q_lo >= k_hi

    def band(self) -> tuple[float, float]:
        return 0, math.inf

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

    def tile(self, q_lo: Any, q_hi: Any, k_lo: Any, k_hi: Any) -> tuple[Any, Any]:
        return ((q_hi >= k_lo) & (q_lo - k_hi < self.width),
                (q_lo >= k_hi) & (q_hi - k_lo < self.width))

    def band(self) -> tuple[float, float]:
        return 0, self.width - 1

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

    def tile(self, q_lo: Any, q_hi: Any, k_lo: Any, k_hi: Any) -> tuple[Any, Any]:
        return k_lo < 0 * q_lo + self.length, k_hi < 0 * q_lo + self.length

    def __str__(self) -> str:
        return f"prefix({self.length})"


@dataclass(frozen=True)
class Dilated(Rule):
    """A query sees every `step`-th key, counted from its own index in both directions.

    With a window it is the dilated window of Beltagy et al. 2020 (Longformer, section 3.1):
    `window(256) & dilated(4)` keeps 64 keys.
    """

    step: int

    def __post_init__(self) -> None:
        _check_count("dilated", self.step, 1)

    def allowed(self, q_idx: ArrayLike, k_idx: ArrayLike) -> Any:
        return (q_idx - k_idx) % self.step == 0

    def tile(self, q_lo: Any, q_hi: Any, k_lo: Any, k_hi: Any) -> tuple[Any, Any]:
        low, high = q_lo - k_hi, q_hi - k_lo
        some = high // self.step * self.step >= low
        return some, some & ((self.step == 1) | (low == high))

    def band(self) -> tuple[float, float]:
        return -math.inf, math.inf

    def __str__(self) -> str:
        return f"dilated({self.step})"


@dataclass(frozen=True)
class Global(Rule):
    """The first `count` tokens see every key and are seen by every query (Longformer, 3.1)."""

    count: int

    def __post_init__(self) -> None:
        _check_count("global", self.count, 0)

    def allowed(self, q_idx: ArrayLike, k_idx: ArrayLike) -> Any:
        return (q_idx < self.count) | (k_idx < self.count)

    def tile(self, q_lo: Any, q_hi: Any, k_lo: Any, k_hi: Any) -> tuple[Any, Any]:
        return ((q_lo < self.count) | (k_lo < self.count),
                (q_hi < self.count) | (k_hi < self.count))

    def __str__(self) -> str:
        return f"global({self.count})"


@dataclass(frozen=True)
class Explicit(Rule):
    """A table of pairs: row q, column k; indices outside the table are forbidden.

    Attributes:
      rows: one word of 0 and 1 per query, as in "100 110 111". `Explicit.of(array)` writes it.
    """

    rows: str

    def __post_init__(self) -> None:
        words = self.rows.split() if isinstance(self.rows, str) else []
        if not words or set("".join(words)) - set("01") or len({len(w) for w in words}) > 1:
            raise UserError(f"explicit({str(self.rows)[:40]!r}) is not a table; give one word of 0 "
                            "and 1 per query, all of one length, as in explicit('100 110 111').")
        object.__setattr__(self, "rows", " ".join(words))

    @classmethod
    def of(cls, table_TS: ArrayLike) -> "Explicit":
        """The rule of a bool array [T, S]."""
        table = np.asarray(table_TS)
        if table.ndim != 2 or table.dtype != bool or not table.size:
            raise UserError(f"an explicit mask has dtype {table.dtype} and shape {table.shape}; "
                            "give a bool array [T, S] with at least one pair.")
        return cls(" ".join("".join(map(str, row)) for row in table.astype(int).tolist()))

    def table(self) -> np.ndarray:
        """The bool array [T, S]."""
        return np.array([[c == "1" for c in word] for word in self.rows.split()])

    def allowed(self, q_idx: ArrayLike, k_idx: ArrayLike) -> Any:
        table = self.table()
        inside = ((q_idx >= 0) & (q_idx < table.shape[0])
                  & (k_idx >= 0) & (k_idx < table.shape[1]))
        if isinstance(inside, jax.Array):
            return inside & jnp.asarray(table)[jnp.where(inside, q_idx, 0),
                                               jnp.where(inside, k_idx, 0)]
        found = inside & table[np.where(inside, q_idx, 0), np.where(inside, k_idx, 0)]
        return found if np.ndim(found) else bool(found)

    def tile(self, q_lo: Any, q_hi: Any, k_lo: Any, k_hi: Any) -> tuple[Any, Any]:
        table = self.table()
        xp = jnp if any(isinstance(x, jax.Array) for x in (q_lo, q_hi, k_lo, k_hi)) else np
        # sums[i, j] counts the allowed pairs with q < i and k < j.
        sums = table.cumsum(0, dtype=np.int32).cumsum(1, dtype=np.int32)
        sums = xp.asarray(np.pad(sums, ((1, 0), (1, 0))))
        q0, q1 = (xp.clip(x, 0, table.shape[0]) for x in (q_lo, q_hi + 1))
        k0, k1 = (xp.clip(x, 0, table.shape[1]) for x in (k_lo, k_hi + 1))
        count = sums[q1, k1] - sums[q0, k1] - sums[q1, k0] + sums[q0, k0]
        return count > 0, count == (q_hi - q_lo + 1) * (k_hi - k_lo + 1)

    def __str__(self) -> str:
        return f"explicit('{self.rows}')"


@dataclass(frozen=True)
class And(Rule):
    """Both rules allow the pair."""

    left: Rule
    right: Rule

    def allowed(self, q_idx: ArrayLike, k_idx: ArrayLike) -> Any:
        return self.left.allowed(q_idx, k_idx) & self.right.allowed(q_idx, k_idx)

    def tile(self, q_lo: Any, q_hi: Any, k_lo: Any, k_hi: Any) -> tuple[Any, Any]:
        some_l, every_l = self.left.tile(q_lo, q_hi, k_lo, k_hi)
        some_r, every_r = self.right.tile(q_lo, q_hi, k_lo, k_hi)
        return some_l & some_r, every_l & every_r

    def names(self) -> frozenset[str]:
        return self.left.names() | self.right.names()

    def band(self) -> tuple[float, float] | None:
        left, right = self.left.band(), self.right.band()
        if left is None or right is None:
            return None
        return max(left[0], right[0]), min(left[1], right[1])

    def __str__(self) -> str:
        return f"{_bracket(self.left, Or)} & {_bracket(self.right, And, Or)}"


@dataclass(frozen=True)
class Or(Rule):
    """At least one rule allows the pair."""

    left: Rule
    right: Rule

    def allowed(self, q_idx: ArrayLike, k_idx: ArrayLike) -> Any:
        return self.left.allowed(q_idx, k_idx) | self.right.allowed(q_idx, k_idx)

    def tile(self, q_lo: Any, q_hi: Any, k_lo: Any, k_hi: Any) -> tuple[Any, Any]:
        some_l, every_l = self.left.tile(q_lo, q_hi, k_lo, k_hi)
        some_r, every_r = self.right.tile(q_lo, q_hi, k_lo, k_hi)
        return some_l | some_r, every_l | every_r

    def names(self) -> frozenset[str]:
        return self.left.names() | self.right.names()

    def band(self) -> tuple[float, float] | None:
        left, right = self.left.band(), self.right.band()
        if left is None or right is None:
            return None
        return min(left[0], right[0]), max(left[1], right[1])

    def __str__(self) -> str:
        return f"{self.left} | {_bracket(self.right, Or)}"


@dataclass(frozen=True)
class Not(Rule):
    """The rule forbids the pair."""

    rule: Rule

    def allowed(self, q_idx: ArrayLike, k_idx: ArrayLike) -> Any:
        # `^ True`, because `~` on a Python bool (two plain ints as indices) is a number.
        return self.rule.allowed(q_idx, k_idx) ^ True

    def tile(self, q_lo: Any, q_hi: Any, k_lo: Any, k_hi: Any) -> tuple[Any, Any]:
        some, every = self.rule.tile(q_lo, q_hi, k_lo, k_hi)
        return every ^ True, some ^ True

    def names(self) -> frozenset[str]:
        return self.rule.names()

    def band(self) -> tuple[float, float] | None:
        return self.rule.band() and (-math.inf, math.inf)

    def __str__(self) -> str:
        return f"~{_bracket(self.rule, And, Or)}"


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
    if value > LARGEST:
        shown = value if value < 10**20 else f"2**{value.bit_length() - 1} or more"
        raise UserError(f"{name}({shown}) is too large for a mask, which counts keys in 32 bits; "
                        f"give a number up to {LARGEST}.")
