"""LongRoPE: a factor for each pair (Ding et al. 2024, section 3; as released with Phi-3)."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.errors import UserError
from tx_jax.options import check_number, is_number
from tx_jax.positions._angles import Turns, frequencies, turns
from tx_jax.positions._rope import Rope, current_length
from tx_jax.positions.rope_ntk import stretch


@dataclass(frozen=True)
class Encoding(Rope):
    """Pair i turns base^(-2i/R) / factor_i, by one list of factors up to `original`, else another.

    cos and sin are times sqrt(1 + ln s / ln original) at every length, logits times its square.
    Which list holds depends on the current length, so a cache must hold keys that are not turned
    yet; what `rope_dynamic_ntk` says of cached decoding and packing holds here too.

    Attributes:
      factor: s, how many times longer the context becomes.
      original: the length the frequencies were trained for; set it.
      short_factors: a number for each pair, used up to `original`; None = all 1, which is `rope`.
      long_factors: the same beyond `original`. The paper finds them by search; None = s^(2i/(R-2)),
        from 1 to s, which is `rope_ntk` and one of the starting points of the search.
      base, layout, fraction: as in `rope`.
    """

    late = True
    factor: float = 4.0
    original: int = 4096
    short_factors: tuple[float, ...] | None = None
    long_factors: tuple[float, ...] | None = None
    base: float = 10000.0
    layout: str = "half"
    fraction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "factor", low=1)
        check_number(self, "original", low=2, whole=True)
        for option in ("short_factors", "long_factors"):
            object.__setattr__(self, option, _factors(option, getattr(self, option)))

    @property
    def attention_factor(self) -> float:
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original))

    def frequency(self, width: int, long: bool = True) -> np.ndarray:
        option = "long_factors" if long else "short_factors"
        factors = getattr(self, option)
        if factors is None:
            factors = self.factor ** -stretch(width) if long else np.ones(width // 2)
        if len(factors) != width // 2:
            raise UserError(f"longrope({option}=...) has {len(factors)} factors, but {width} "
                            f"columns turn; give {width // 2}, one for each pair.")
        return frequencies(self.base, width) / np.asarray(factors, np.float64)

    def turns(self, width: int, pos_BT: jax.Array, length_B: jax.Array | None, dtype) -> Turns:
        beyond_B11 = current_length(pos_BT, length_B)[:, None, None] > self.original
        lists = zip(turns(self.frequency(width, True)), turns(self.frequency(width, False)),
                    strict=True)
        return tuple(jnp.where(beyond_B11, long[None, None, :], short[None, None, :])
                     for long, short in lists)


def _factors(option: str, value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    if not isinstance(value, tuple | list) or not all(is_number(v) and v > 0 for v in value):
        raise UserError(f"longrope({option}={value!r}) must be a tuple of numbers above 0, one for "
                        "each pair, or None.")
    return tuple(value)
