"""Dropout of attention weights as a pure function of (seed, example, head, query, key).

A counter-based hash decides each weight alone, so every implementation drops the same ones however
it tiles the work, and the backward pass recomputes the decision instead of storing it.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.errors import UserError


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dropout:
    """Drop a weight with probability `rate`, and divide the others by 1 - rate.

    Attributes:
      rate: static, in [0, 1); 0 is the same as no dropout.
      seed: scalar uint32 array, for instance `jax.random.bits(key, dtype=jnp.uint32)`.
    """

    rate: float = field(metadata={"static": True})
    seed: jax.Array | None = None

    def __post_init__(self) -> None:
        rate = self.rate
        if isinstance(rate, bool) or not isinstance(rate, (int, float, np.number)) or not (
                0 <= rate < 1):
            raise UserError(f"dropout rate {rate!r} must be a number in [0, 1).")
        object.__setattr__(self, "rate", float(rate))

    def check(self) -> None:
        """Raise UserError unless the seed can be used."""
        if self.rate and self.seed is None:
            raise UserError(f"dropout rate {self.rate} needs a seed; give Dropout(rate, "
                            "jax.random.bits(key, dtype=jnp.uint32)), or no dropout.")
        if self.rate and (jnp.shape(self.seed) != ()
                          or getattr(self.seed, "dtype", None) != jnp.uint32):
            raise UserError(f"the dropout seed has shape {jnp.shape(self.seed)} and dtype "
                            f"{getattr(self.seed, 'dtype', type(self.seed).__name__)}; give one "
                            "uint32, as jnp.uint32(7).")


def keep(rate: float, seed: Any, b: Any, n: Any, q_idx: Any, k_idx: Any) -> Any:
    """Whether the weight survives: bool over the broadcast of the integer arrays.

    The arguments after `rate` have equal rank (or are scalars): b is the example, n the query head,
    q_idx and k_idx absolute indices. Arithmetic is uint32 with wrap-around: each coordinate is
    multiplied by an odd constant, added, and mixed by the finaliser of MurmurHash3 (Appleby).
    """
    word = _mix(seed ^ np.uint32(0x9E3779B9))
    steps = ((b, 0x85EBCA77), (n, 0xC2B2AE3D), (q_idx, 0x27D4EB2F), (k_idx, 0x165667B1))
    for index, odd in steps:
        word = _mix(word + (index.astype(jnp.uint32) + np.uint32(1)) * np.uint32(odd))
    return word >= np.uint32(round(rate * 2**32))


def _mix(word: Any) -> Any:
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return word ^ (word >> np.uint32(16))


def drop(weights_BNTS: jax.Array, dropout: Dropout | None, q_idx: jax.Array, k_idx: jax.Array
         ) -> jax.Array:
    """Apply dropout to weights; `q_idx` [1|B, T, 1] and `k_idx` [1, 1, S] are absolute."""
    if dropout is None or not dropout.rate:
        return weights_BNTS
    B, N = weights_BNTS.shape[:2]
    kept = keep(dropout.rate, dropout.seed, jnp.arange(B)[:, None, None, None],
                jnp.arange(N)[None, :, None, None], q_idx[:, None], k_idx[:, None])
    return jnp.where(kept, weights_BNTS / (1 - dropout.rate), 0)
