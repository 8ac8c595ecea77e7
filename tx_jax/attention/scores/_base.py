"""The interface of a score function, and the dot product that most of them end in."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.dtypes import wide

Params = Mapping[str, Any]


@dataclass(frozen=True)
class ScoreFunction:
    """A logit for every query and key.

    Attributes:
      default_scale: the scale rule that `scale=None` stands for.
      refused_scales: scale rules that contradict the score, each with what to do instead.
    """

    default_scale: ClassVar[str] = "none"
    refused_scales: ClassVar[Mapping[str, str]] = {}

    @property
    def plain(self) -> bool:
        """Whether logits are q . k, so that columns may be added to both."""
        return False

    @property
    def name(self) -> str:
        """The name of its file."""
        return type(self).__module__.rsplit(".", 1)[-1]

    def init(self, key: jax.Array, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
        """Parameters, float32, named with their letters; `sizes` gives N and H."""
        return {}

    def logits(self, params: Params, q_BTNH: jax.Array, k_BSKH: jax.Array) -> jax.Array:
        """Unscaled logits [B, N, T, S], float32 or wider."""
        raise NotImplementedError

    def slow_logits(self, params: Params, q_BTNH: np.ndarray, k_BSKH: np.ndarray) -> np.ndarray:
        """The same written as loops over b, n, t, s in float64: the score's own reference."""
        B, T, N, _ = q_BTNH.shape
        S, K = k_BSKH.shape[1:3]
        out = np.zeros((B, N, T, S))
        for b, n, t, s in np.ndindex(out.shape):
            q_H, k_H = q_BTNH[b, t, n], k_BSKH[b, s, n // (N // K)]
            out[b, n, t, s] = self.slow_logit(params, n, np.float64(q_H), np.float64(k_H))
        return out

    def slow_logit(self, params: Params, n: int, q_H: np.ndarray, k_H: np.ndarray) -> float:
        """One logit of head n."""
        raise NotImplementedError


@dataclass(frozen=True)
class DotProduct(ScoreFunction):
    """A score that is the dot product of transformed queries and keys."""

    @property
    def plain(self) -> bool:
        return type(self).project is DotProduct.project

    def project(self, params: Params, q_BTNH: jax.Array, k_BSKH: jax.Array
                ) -> tuple[jax.Array, jax.Array]:
        """Queries and keys whose dot products are the logits."""
        return q_BTNH, k_BSKH

    def logits(self, params: Params, q_BTNH: jax.Array, k_BSKH: jax.Array) -> jax.Array:
        return dot_logits(*self.project(params, q_BTNH, k_BSKH))


def dot_logits(q_BTNH: jax.Array, k_BSKH: jax.Array) -> jax.Array:
    """Dot products [B, N, T, S]; query head n meets key head n // (N / K)."""
    (B, T, N, H), (_, S, K, _) = q_BTNH.shape, k_BSKH.shape
    dtype = wide(q_BTNH.dtype)
    if N == K:
        return jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSKH, preferred_element_type=dtype)
    grouped = q_BTNH.reshape(B, T, K, N // K, H)
    logits = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k_BSKH, preferred_element_type=dtype)
    return logits.reshape(B, N, T, S)


def repeat_heads(k_BSKH: jax.Array, N: int) -> jax.Array:
    """Key heads repeated (not tiled) to N query heads."""
    return jnp.repeat(k_BSKH, N // k_BSKH.shape[2], axis=2)
