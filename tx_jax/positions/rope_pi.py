"""Position interpolation (Chen et al. 2023, section 2.3): rotary positions m become m / s."""

from dataclasses import dataclass

import numpy as np

from tx_jax.options import check_number
from tx_jax.positions._angles import frequencies
from tx_jax.positions._rope import Rope


@dataclass(frozen=True)
class Encoding(Rope):
    """Every frequency of `rope` is divided by `factor`, which is the same as dividing positions.

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
        return frequencies(self.base, width) / self.factor
