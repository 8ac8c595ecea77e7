"""NTK-aware rotary positions (bloc97 2023; Peng et al. 2023, YaRN, section 3.1, definition 1)."""

from dataclasses import dataclass

import numpy as np

from tx_jax.options import check_number
from tx_jax.positions._angles import frequencies
from tx_jax.positions._rope import Rope


@dataclass(frozen=True)
class Encoding(Rope):
    """`rope` with base' = base * s^(R / (R - 2)), R = the rotated part of the head.

    The highest frequency stays as it is, the lowest is divided by exactly s.

    Attributes:
      factor: s, how many times longer the context becomes.
      base, layout, fraction: as in `rope`.
    """

    factor: float = 4.0
    base: float = 10000.0
    layout: str = "half"
    fraction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "factor", low=1)

    def frequency(self, width: int) -> np.ndarray:
        return frequencies(self.base, width) * self.factor ** stretch(width)


def stretch(width: int) -> np.ndarray:
    """The power of s in the frequency of each pair, -2i / (R - 2): from 0 to -1."""
    return -2.0 * np.arange(width // 2) / max(width - 2, 1)
