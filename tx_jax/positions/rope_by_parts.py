"""NTK-by-parts rotary positions (Peng et al. 2023, YaRN, section 3.2, definition 2)."""

from dataclasses import dataclass

import numpy as np

from tx_jax.errors import UserError
from tx_jax.options import check_number, name_of
from tx_jax.positions._angles import frequencies
from tx_jax.positions._rope import Rope, interpolate, rotations


@dataclass(frozen=True)
class Encoding(Rope):
    """Pairs that turn often within the trained length are kept, those that turn rarely are slowed.

    A pair that makes r = L theta / (2 pi) turns keeps the share (r - alpha) / (beta - alpha) of
    its frequency, cut to [0, 1], and takes theta / s for the rest. No pair is left alone unless
    `trained` > 2 pi beta (201 at beta = 32); below that the scheme is nearly `rope_pi`, so small
    contexts need a smaller beta.

    Attributes:
      factor: s, how many times longer the context becomes.
      trained: L, the length the frequencies were trained for; set it.
      alpha, beta: turns at or below which a pair is slowed by s, at or above which it is kept.
      base, layout, fraction: as in `rope`.
    """

    factor: float = 4.0
    trained: int = 4096
    alpha: float = 1.0
    beta: float = 32.0
    base: float = 10000.0
    layout: str = "half"
    fraction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self)

    def frequency(self, width: int) -> np.ndarray:
        frequency_F = frequencies(self.base, width)
        turns_F = rotations(frequency_F, self.trained)
        return interpolate(frequency_F, self.factor, ramp(turns_F, self.alpha, self.beta))


def ramp(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """0 up to `low`, 1 from `high` on, linear between."""
    return np.clip((x - low) / (high - low), 0.0, 1.0)


def check_parts(encoding: Rope) -> None:
    """Check the options that `rope_by_parts` and `yarn` have in common."""
    check_number(encoding, "factor", low=1)
    check_number(encoding, "trained", low=1, whole=True)
    check_number(encoding, "alpha", above=0)
    check_number(encoding, "beta", above=0)
    if encoding.beta <= encoding.alpha:
        raise UserError(f"{name_of(encoding)}(alpha={encoding.alpha}, beta={encoding.beta}) needs "
                        "alpha below beta.")
