"""Dot product of normalised queries and keys, over sqrt(d) (Dehghani et al. 2023, section 2).

The form with unit vectors and one gain per head (Henry et al. 2020) is `cosine`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.attention.scores._base import DotProduct, Params
from tx_jax.dtypes import wide
from tx_jax.errors import UserError
from tx_jax.options import check_number

FORMS = ("layer", "rms")


@dataclass(frozen=True)
class Score(DotProduct):
    """LN(q) . LN(k): with gains of 1 and 1/sqrt(d), logits lie in [-sqrt(d), sqrt(d)].

    Attributes:
      form: "layer", LayerNorm without an offset (ViT-22B), or "rms", RMSNorm (Qwen 3, Gemma 3),
        which with gains of 1 is `cosine(gain=sqrt(d))`.
      epsilon: added to the variance.
    """

    form: str = "layer"
    epsilon: float = 1e-6

    default_scale: ClassVar[str] = "1/sqrt(d)"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise UserError(f"qk_norm(form={self.form!r}) needs the form 'layer' or 'rms'.")
        check_number(self, "epsilon", above=0)

    def init(self, key: jax.Array, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
        """Gains of ones: one per head and width for queries, one per width for keys."""
        N, H = sizes["N"], sizes["H"]
        return {"gain_q_NH": jnp.ones((N, H), jnp.float32),
                "gain_k_H": jnp.ones((H,), jnp.float32)}

    def project(self, params: Params, q_BTNH: jax.Array, k_BSKH: jax.Array
                ) -> tuple[jax.Array, jax.Array]:
        dtype = wide(q_BTNH.dtype)
        return (self._norm(q_BTNH) * params["gain_q_NH"].astype(dtype)[None, None],
                self._norm(k_BSKH) * params["gain_k_H"].astype(dtype)[None, None, None])

    def _norm(self, x: jax.Array) -> jax.Array:
        """Mean 0 ("layer") and mean square 1 along the last axis, float32 or wider."""
        x = x.astype(wide(x.dtype))
        if self.form == "layer":
            x = x - jnp.mean(x, axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon)

    def slow_logit(self, params: Params, n: int, q_H: np.ndarray, k_H: np.ndarray) -> float:
        gains = (np.float64(params["gain_q_NH"][n]), np.float64(params["gain_k_H"]))
        normed = []
        for x_H, gain_H in zip((q_H, k_H), gains, strict=True):
            centre = sum(x_H) / len(x_H) if self.form == "layer" else 0.0
            square = sum((x - centre) ** 2 for x in x_H) / len(x_H)
            normed.append([g * (x - centre) / np.sqrt(square + self.epsilon)
                           for x, g in zip(x_H, gain_H, strict=True)])
        return sum(a * b for a, b in zip(*normed, strict=True))
