"""Cosine similarity times a learned gain (Henry et al. 2020, Query-Key Normalization)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.attention.scores._base import DotProduct, Params
from tx_jax.dtypes import wide
from tx_jax.options import check_number


@dataclass(frozen=True)
class Score(DotProduct):
    """g_n * cos(q, k): bounded by g_n, and blind to the length of q and k.

    Attributes:
      gain: the value g_n starts from; the paper takes log2(L^2 - L) for sequences of length L.
    """

    gain: float = 10.0

    default_scale: ClassVar[str] = "none"
    refused_scales: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("1/sqrt(d)", "1/d", "log_n"),
        "leave the scale at its default, as normalised queries and keys divided by d once more "
        "give nearly uniform attention")

    def __post_init__(self) -> None:
        check_number(self, "gain", above=0)

    def init(self, key: jax.Array, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
        return {"gain_N": jnp.full((sizes["N"],), self.gain, jnp.float32)}

    def project(self, params: Params, q_BTNH: jax.Array, k_BSKH: jax.Array
                ) -> tuple[jax.Array, jax.Array]:
        gain_N = params["gain_N"].astype(wide(q_BTNH.dtype))
        return unit(q_BTNH) * gain_N[None, None, :, None], unit(k_BSKH)

    def slow_logit(self, params: Params, n: int, q_H: np.ndarray, k_H: np.ndarray) -> float:
        length = np.sqrt(np.sum(q_H**2) * np.sum(k_H**2))
        return float(params["gain_N"][n]) * np.sum(q_H * k_H) / length


def unit(x: jax.Array) -> jax.Array:
    """Vectors of length 1 along the last axis, float32 or wider; zero stays zero."""
    x = x.astype(wide(x.dtype))
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-12))
