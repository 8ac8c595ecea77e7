"""xPos: rotary positions with a decay (Sun et al. 2022, LeX, section 3.1, equation 14)."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.dtypes import wide
from tx_jax.positions import _base
from tx_jax.positions._angles import frequencies
from tx_jax.positions._options import check_number, check_switch
from tx_jax.positions._rope import Rope, current_length

GAMMA = 0.4
# Factors stay within e^-40 .. e^40, so that no product of two leaves the range of float32.
LIMIT = 40.0


@dataclass(frozen=True)
class Encoding(Rope):
    """A turned query is times zeta_i^((m - c)/S), a turned key times zeta_i^-((n - c)/S).

    zeta_i = (2i/R + 0.4) / 1.4 for pair i, R = the rotated part of the head. The centre c cancels
    in the logits, which decay as zeta_i^((m - n)/S). It keeps the factors small: those of position
    m need |m - c| <= 32 S (16 000 positions at S = 512; further out they stop growing). With
    `centred`, c is the middle of the current length, or 32 S before its end if that is later: a
    full pass is right up to 64 S positions, decoding at any length. Future keys, which grow
    instead of decaying, stay finite; the scheme is meant for causal attention.

    Attributes:
      scale_base: S.
      centred: whether c follows the current length. A cache must then hold keys that are not
        turned yet, as in `rope_dynamic_ntk` (but decoding equals the full pass); with False, c is
        0, turned keys can be cached, and positions up to 32 S are right.
      base, layout, fraction: as in `rope`.
    """

    scale_base: float = 512.0
    centred: bool = True
    base: float = 10000.0
    layout: str = "half"
    fraction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "scale_base", above=0)
        check_switch(self, "centred")

    def frequency(self, width: int) -> np.ndarray:
        return frequencies(self.base, width)

    def rotate_q(self, params: _base.Params, q_BTNH: jax.Array, pos_BT: jax.Array,
                 length_B: jax.Array | None = None) -> jax.Array:
        return self.turn(q_BTNH, pos_BT, length_B, self._gain(q_BTNH, pos_BT, length_B, 1))

    def rotate_k(self, params: _base.Params, k_BSKH: jax.Array, pos_BS: jax.Array,
                 length_B: jax.Array | None = None) -> jax.Array:
        return self.turn(k_BSKH, pos_BS, length_B, self._gain(k_BSKH, pos_BS, length_B, -1))

    def _gain(self, x_BTNH: jax.Array, pos_BT: jax.Array, length_B: jax.Array | None, sign: int
              ) -> jax.Array:
        """The factors [B, T, 1, F]."""
        _base.check_positions(pos_BT, x_BTNH.shape[:2])
        width, dtype = self.width(x_BTNH.shape[-1]), wide(x_BTNH.dtype)
        zeta_F = (2 * np.arange(width // 2) / width + GAMMA) / (1 + GAMMA)
        pos_BT = pos_BT.astype(jnp.int32)
        if self.centred:
            length_B = current_length(pos_BT, length_B)
            reach = int(LIMIT * self.scale_base / math.log((1 + GAMMA) / GAMMA))
            pos_BT = pos_BT - jnp.maximum(length_B // 2, length_B - reach)[:, None]
        rate_F = jnp.asarray(sign * np.log(zeta_F) / self.scale_base, dtype)
        power = pos_BT.astype(dtype)[:, :, None, None] * rate_F[None, None, None, :]
        return jnp.exp(jnp.clip(power, -LIMIT, LIMIT))
