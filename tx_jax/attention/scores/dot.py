"""Plain dot product, without a scale (Luong et al. 2015, `dot`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from tx_jax.attention.scores._base import DotProduct, Params


@dataclass(frozen=True)
class Score(DotProduct):
    """q . k; its variance grows with the head width."""

    default_scale: ClassVar[str] = "none"
    refused_scales: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("1/sqrt(d)", "1/d", "log_n"), "use the score scaled_dot, which is the scaled dot product")

    def slow_logit(self, params: Params, n: int, q_H: np.ndarray, k_H: np.ndarray) -> float:
        return sum(a * b for a, b in zip(q_H, k_H, strict=True))
