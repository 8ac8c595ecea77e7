"""YaRN: NTK-by-parts and a temperature (Peng et al. 2023, section 3.4, definition 3)."""

import math
from dataclasses import dataclass

import numpy as np

from tx_jax.errors import UserError
from tx_jax.options import check_choice
from tx_jax.positions._angles import frequencies
from tx_jax.positions._rope import Rope, interpolate, rotations
from tx_jax.positions.rope_by_parts import check_parts, ramp


@dataclass(frozen=True)
class Encoding(Rope):
    """`rope_by_parts`, with cos and sin times 0.1 ln s + 1, so logits times its square.

    Columns that a `fraction` leaves unturned do not get the factor. As there, no pair is left
    alone unless `trained` > 2 pi beta.

    Attributes:
      factor: s, how many times longer the context becomes.
      trained: L, the length the frequencies were trained for; set it.
      alpha, beta: turns within L at or below which a pair is slowed, at or above which it is kept.
      ramp: what the blend between them is linear in: "paper": the number of turns (equation 13);
        "code": the index of the pair, between the whole indices around those of beta and alpha,
        as in the authors' repository and Hugging Face, which released checkpoints need.
      base, layout, fraction: as in `rope`.
    """

    factor: float = 4.0
    trained: int = 4096
    alpha: float = 1.0
    beta: float = 32.0
    ramp: str = "paper"
    base: float = 10000.0
    layout: str = "half"
    fraction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self)
        check_choice(self, "ramp", ("paper", "code"))
        if self.ramp == "code" and self.base <= 1:
            raise UserError(f"yarn(ramp='code', base={self.base}) needs a base above 1; choose "
                            "ramp='paper' or another base.")

    @property
    def attention_factor(self) -> float:
        return 0.1 * math.log(self.factor) + 1

    def frequency(self, width: int) -> np.ndarray:
        frequency_F = frequencies(self.base, width)
        if self.ramp == "paper":
            keep_F = ramp(rotations(frequency_F, self.trained), self.alpha, self.beta)
        else:
            keep_F = 1 - ramp(np.arange(width // 2), *self._indices(width))
        return interpolate(frequency_F, self.factor, keep_F)

    def _indices(self, width: int) -> tuple[float, float]:
        """Pair indices at which the ramp of the code starts and ends."""
        first, last = (width * math.log(self.trained / (2 * math.pi * turns))
                       / (2 * math.log(self.base)) for turns in (self.beta, self.alpha))
        low = max(math.floor(first), 0)
        return low, max(min(math.ceil(last), width - 1), low + 0.001)
