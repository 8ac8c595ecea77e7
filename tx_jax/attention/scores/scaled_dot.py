"""Dot product over sqrt(d_k) (Vaswani et al. 2017, equation 1)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tx_jax.attention.scores._base import DotProduct, Params


@dataclass(frozen=True)
class Score(DotProduct):
    """q . k, scaled by 1/sqrt(d) unless another scale is given."""

    default_scale: ClassVar[str] = "1/sqrt(d)"

    def slow_logit(self, params: Params, n: int, q_H: np.ndarray, k_H: np.ndarray) -> float:
        return sum(a * b for a, b in zip(q_H, k_H, strict=True))
