"""Additive score v^T tanh(q + k + b) (Bahdanau et al. 2015, appendix A.1.2).

The matrices W and U of the paper are the query and key projections of the layer. Memory is H times
that of a dot product on the pairs that are computed at once: all of them in the reference, one tile
in `blockwise`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.attention.scores._base import Params, ScoreFunction, repeat_heads
from tx_jax.dtypes import wide


@dataclass(frozen=True)
class Score(ScoreFunction):
    """v_n^T tanh(q + k + b_n), bounded by the 1-norm of v_n whatever the head width."""

    default_scale: ClassVar[str] = "none"

    def init(self, key: jax.Array, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
        """v_n normal with variance 1/H, so that logits start below variance 1; b_n zero."""
        N, H = sizes["N"], sizes["H"]
        return {"additive_NH": H**-0.5 * jax.random.normal(key, (N, H), jnp.float32),
                "bias_NH": jnp.zeros((N, H), jnp.float32)}

    def logits(self, params: Params, q_BTNH: jax.Array, k_BSKH: jax.Array) -> jax.Array:
        dtype = wide(q_BTNH.dtype)
        q = q_BTNH.astype(dtype) + params["bias_NH"].astype(dtype)[None, None]
        k = repeat_heads(k_BSKH, q_BTNH.shape[2]).astype(dtype)
        q_BNT1H, k_BN1SH = jnp.swapaxes(q, 1, 2)[:, :, :, None], jnp.swapaxes(k, 1, 2)[:, :, None]
        hidden_BNTSH = jnp.tanh(q_BNT1H + k_BN1SH)
        return jnp.einsum("BNTSH,NH->BNTS", hidden_BNTSH, params["additive_NH"].astype(dtype))

    def slow_logit(self, params: Params, n: int, q_H: np.ndarray, k_H: np.ndarray) -> float:
        v_H, b_H = np.float64(params["additive_NH"][n]), np.float64(params["bias_NH"][n])
        return sum(v_H[i] * np.tanh(q_H[i] + k_H[i] + b_H[i]) for i in range(len(q_H)))
