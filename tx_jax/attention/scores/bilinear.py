"""Bilinear score q^T W k, one matrix per head (Luong et al. 2015, `general`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.attention.scores._base import DotProduct, Params


@dataclass(frozen=True)
class Score(DotProduct):
    """q^T W_n k over sqrt(d). W folds into the query projection: same function class as `dot`."""

    default_scale: ClassVar[str] = "1/sqrt(d)"

    def init(self, key: jax.Array, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
        """W_n normal with variance 1/H, which keeps the variance of a query."""
        N, H = sizes["N"], sizes["H"]
        return {"bilinear_NHH": H**-0.5 * jax.random.normal(key, (N, H, H), jnp.float32)}

    def project(self, params: Params, q_BTNH: jax.Array, k_BSKH: jax.Array
                ) -> tuple[jax.Array, jax.Array]:
        w_NHC = params["bilinear_NHH"].astype(q_BTNH.dtype)
        return jnp.einsum("BTNH,NHC->BTNC", q_BTNH, w_NHC), k_BSKH

    def slow_logit(self, params: Params, n: int, q_H: np.ndarray, k_H: np.ndarray) -> float:
        w_HC = np.float64(params["bilinear_NHH"][n])
        return sum(q_H[i] * w_HC[i, j] * k_H[j] for i, j in np.ndindex(w_HC.shape))
