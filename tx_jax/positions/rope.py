"""Rotary positions (Su et al. 2021, RoFormer, section 3.2)."""

from dataclasses import dataclass

import numpy as np

from tx_jax.positions._angles import frequencies
from tx_jax.positions._rope import Rope


@dataclass(frozen=True)
class Encoding(Rope):
    """Pair i of a head turns by position * base^(-2i/R), R = the rotated part of the head.

    Attributes:
      base: of the geometric series of frequencies.
      layout: which columns form a pair: "half" (i, i + R/2), as in GPT-NeoX and Hugging Face, or
        "interleaved" (2i, 2i + 1), as in the paper and the original Llama. Position 0 cannot tell
        them apart; a permutation of the projection's columns maps one to the other.
      fraction: the first `fraction * H` columns turn, the others pass (partial rotary).
    """

    base: float = 10000.0
    layout: str = "half"
    fraction: float = 1.0

    def frequency(self, width: int) -> np.ndarray:
        return frequencies(self.base, width)
