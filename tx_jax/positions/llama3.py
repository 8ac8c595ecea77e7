"""The rotary scaling of Llama 3.1 (Llama team 2024; function `apply_scaling` of its code)."""

from dataclasses import dataclass

import numpy as np

from tx_jax.errors import UserError
from tx_jax.options import check_number
from tx_jax.positions._angles import frequencies
from tx_jax.positions._rope import Rope, interpolate, rotations
from tx_jax.positions.rope_by_parts import ramp


@dataclass(frozen=True)
class Encoding(Rope):
    """Wavelengths below original / high are kept, those above original / low are slowed by s.

    Between them the frequency (not the wavelength) is blended by (original / wavelength - low) /
    (high - low). This is `rope_by_parts` with alpha = low and beta = high.

    Attributes:
      factor: s, how many times longer the context becomes.
      low, high: see above.
      original: the length the frequencies were trained for.
      base, layout, fraction: as in `rope`; released Llama checkpoints in their original form need
        layout="interleaved", in Hugging Face form "half".
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    base: float = 500000.0
    layout: str = "half"
    fraction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "factor", low=1)
        check_number(self, "original", low=1, whole=True)
        check_number(self, "low", above=0)
        check_number(self, "high", above=0)
        if self.high <= self.low:
            raise UserError(f"llama3(low={self.low}, high={self.high}) needs low below high.")

    def frequency(self, width: int) -> np.ndarray:
        frequency_F = frequencies(self.base, width)
        keep_F = ramp(rotations(frequency_F, self.original), self.low, self.high)
        return interpolate(frequency_F, self.factor, keep_F)
