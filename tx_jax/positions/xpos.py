"""xPos: rotary positions with a decay (Sun et al. 2022, LeX, section 3.1, equation 14)."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.dtypes import wide
from tx_jax.errors import UserError
from tx_jax.options import check_number, check_switch
from tx_jax.positions import _base
from tx_jax.positions._angles import frequencies
from tx_jax.positions._rope import Rope, current_length

GAMMA = 0.4
# Factors stay below e^40, so that no product of two leaves the range of float32.
LIMIT = 40.0


@dataclass(frozen=True)
class Encoding(Rope):
    """A turned query is times zeta_i^((m - c)/S), a turned key times zeta_i^-((n - c)/S).

    zeta_i = (2i/R + 0.4) / 1.4 for pair i, R = the rotated part of the head. The centre c cancels
    in the logits, which decay as zeta_i^((m - n)/S). It keeps the factors small: a query at m needs
    |m - c| <= 32 S (16 000 positions at S = 512). With `centred`, c is the middle of the current
    length, or 32 S before its end if that is later: a full pass takes up to 64 S positions,
    decoding any length. A query further out is never given wrong factors: where positions are
    known, or the input is longer than that, it is a UserError; inside a compiled program it is
    NaN, which the training loop stops at. Future keys, which grow instead of decaying, stay finite;
    the scheme is meant for causal attention.

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

    @property
    def late(self) -> bool:
        return self.centred

    def frequency(self, width: int) -> np.ndarray:
        return frequencies(self.base, width)

    def rotate_q(self, params: _base.Params, q_BTNH: jax.Array, pos_BT: jax.Array,
                 length_B: jax.Array | None = None) -> jax.Array:
        gain, outside_BT = self._gain(q_BTNH, pos_BT, length_B, 1)
        tracing = isinstance(outside_BT, jax.core.Tracer)
        length, limit = q_BTNH.shape[1], 2 * self.reach if self.centred else self.reach + 1
        if length > limit if tracing else outside_BT.any():
            found = f"{length} tokens" if tracing else (
                f"positions {jnp.min(pos_BT)} to {jnp.max(pos_BT)}")
            raise UserError(f"the queries have {found} but xpos(scale_base={self.scale_base}, "
                            f"centred={self.centred}) is exact for {limit} positions at once; "
                            "shorten the input or raise scale_base.")
        gain = jnp.where(outside_BT[:, :, None, None], jnp.nan, gain)
        return self.turn(q_BTNH, pos_BT, length_B, gain)

    def rotate_k(self, params: _base.Params, k_BSKH: jax.Array, pos_BS: jax.Array,
                 length_B: jax.Array | None = None) -> jax.Array:
        # Keys far behind vanish, and those far ahead meet no query that is in the exact range.
        gain, _ = self._gain(k_BSKH, pos_BS, length_B, -1)
        return self.turn(k_BSKH, pos_BS, length_B, gain)

    @property
    def reach(self) -> int:
        """The largest distance from the centre at which no factor exceeds its limit."""
        return int(min(LIMIT * self.scale_base / math.log((1 + GAMMA) / GAMMA), 2**30))

    def _gain(self, x_BTNH: jax.Array, pos_BT: jax.Array, length_B: jax.Array | None, sign: int
              ) -> tuple[jax.Array, jax.Array]:
        """The factors [B, T, 1, F], and which positions are outside of the exact range [B, T]."""
        _base.check_positions(pos_BT, x_BTNH.shape[:2])
        width, dtype = self.width(x_BTNH.shape[-1]), wide(x_BTNH.dtype)
        zeta_F = (2 * np.arange(width // 2) / width + GAMMA) / (1 + GAMMA)
        pos_BT = pos_BT.astype(jnp.int32)
        if self.centred:
            length_B = current_length(pos_BT, length_B)
            pos_BT = pos_BT - jnp.maximum(length_B // 2, length_B - self.reach)[:, None]
        rate_F = jnp.asarray(sign * np.log(zeta_F) / self.scale_base, dtype)
        power = pos_BT.astype(dtype)[:, :, None, None] * rate_F[None, None, None, :]
        return jnp.exp(jnp.minimum(power, LIMIT)), jnp.abs(pos_BT) > self.reach
