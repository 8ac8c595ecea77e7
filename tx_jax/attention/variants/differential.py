"""Differential attention (Ye et al. 2024): the difference of two softmax maps over shared values.

Heads come in pairs, as in the published code: query heads 2m and 2m + 1 (and key heads alike) are
the two maps of head m of the values, so position schemes and every option see common heads.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.attention._contract import attend
from tx_jax.attention.variants import _base
from tx_jax.dtypes import wide
from tx_jax.errors import UserError

EPSILON = 1e-5


def lambda_of_layer(layer: int) -> float:
    """The start of lambda in layer 1, 2, ... (section 2.1)."""
    return 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))


@dataclass(frozen=True)
class Variant(_base.Variant):
    """(map 1 - lambda map 2) V for each pair of heads, RMS-normalised per head, times 1 - start.

    Takes every option of `attend`, by any implementation, as both maps are heads of one call.
    Queries are [B, T, N, H] and keys [B, S, K, H] with N and K even, values [B, S, K / 2, W] (the
    paper has W = 2 H), the output [B, T, N / 2, W].

    Attributes:
      start: lambda before training, see `lambda_of_layer`.
    """

    paired_heads: ClassVar[bool] = True
    start: float = 0.8

    def __post_init__(self) -> None:
        if not isinstance(self.start, (int, float)) or not 0 <= self.start < 1:
            raise UserError(f"differential(start={self.start!r}) needs a number in [0, 1), such as "
                            "0.8.")

    def init(self, key: jax.Array, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
        """Four vectors normal with deviation 0.1, of which lambda is made, and the gain of the
        norm; all heads share them."""
        draws = 0.1 * jax.random.normal(key, (4, sizes["H"]), jnp.float32)
        names = ("lambda_q1_H", "lambda_k1_H", "lambda_q2_H", "lambda_k2_H")
        width = sizes.get("W", 2 * sizes["H"])
        return dict(zip(names, draws, strict=True)) | {"gain_W": jnp.ones((width,), jnp.float32)}

    def compute(self, params: Mapping[str, Any], q_BTNH: jax.Array, k_BSKH: jax.Array,
                v_BSKH: jax.Array, **options: Any) -> jax.Array:
        (B, T, N, _), K = q_BTNH.shape, k_BSKH.shape[2]
        if N % 2 or K != 2 * v_BSKH.shape[2]:
            raise UserError(f"differential attention pairs heads: {N} query heads must be even, "
                            f"and {K} key heads twice the {v_BSKH.shape[2]} heads of values.")
        v = jnp.repeat(v_BSKH, 2, axis=2)
        maps = attend(q_BTNH, k_BSKH, v, **options).reshape(B, T, N // 2, 2, v.shape[3])
        maps = maps.astype(wide(maps.dtype))
        out = maps[..., 0, :] - self.weight(params).astype(maps.dtype) * maps[..., 1, :]
        size = jnp.mean(out * out, axis=-1, keepdims=True)
        gain_W = (1 - self.start) * params["gain_W"].astype(out.dtype)
        return (out * jax.lax.rsqrt(size + EPSILON) * gain_W[None, None, None]).astype(v.dtype)

    def weight(self, params: Mapping[str, Any]) -> jax.Array:
        """Lambda, a scalar (equation 2 of the paper)."""
        q1, k1, q2, k2 = (params[f"lambda_{name}_H"] for name in ("q1", "k1", "q2", "k2"))
        return jnp.exp(jnp.sum(q1 * k1)) - jnp.exp(jnp.sum(q2 * k2)) + self.start

    def slow(self, params, q_BTNH, k_BSKH, v_BSKH, *, allowed_BNTS, logits_BNTS, sink=None):
        (B, T, N, _), K = q_BTNH.shape, k_BSKH.shape[2]
        q1, k1, q2, k2 = (np.float64(params[f"lambda_{n}_H"]) for n in ("q1", "k1", "q2", "k2"))
        factor = np.exp(sum(q1 * k1)) - np.exp(sum(q2 * k2)) + self.start
        out = np.zeros((B, T, N // 2, v_BSKH.shape[3]))
        for b, t, m in np.ndindex(B, T, N // 2):
            for n, sign in ((2 * m, 1.0), (2 * m + 1, -factor)):
                seen = np.flatnonzero(allowed_BNTS[b, n, t])
                total = sum(np.exp(logits_BNTS[b, n, t, s]) for s in seen)
                total += 0 if sink is None else np.exp(np.float64(sink[n]))
                for s in seen:
                    weight = np.exp(logits_BNTS[b, n, t, s]) / total
                    out[b, t, m] += sign * weight * v_BSKH[b, s, n // (N // K) // 2]
            out[b, t, m] /= np.sqrt(np.mean(out[b, t, m] ** 2) + EPSILON)
            out[b, t, m] *= (1 - self.start) * np.float64(params["gain_W"])
        return out
