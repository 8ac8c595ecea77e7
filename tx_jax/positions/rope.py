"""Rotary positions (Su et al. 2021, RoFormer, section 3.2)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tx_jax.dtypes import wide
from tx_jax.errors import UserError
from tx_jax.positions import _base
from tx_jax.positions._angles import angles, frequencies

LAYOUTS = ("half", "interleaved")


@dataclass(frozen=True)
class Encoding(_base.Encoding):
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

    def __post_init__(self) -> None:
        if not self.base > 0:
            raise UserError(f"rope(base={self.base}) needs a base above 0.")
        if self.layout not in LAYOUTS:
            raise UserError(f"rope(layout='{self.layout}') is unknown; choose one of: "
                            f"{', '.join(LAYOUTS)}.")
        if not 0 < self.fraction <= 1:
            raise UserError(f"rope(fraction={self.fraction}) must lie in (0, 1].")

    def rotate(self, params: _base.Params, x_BTNH: jax.Array, pos_BT: jax.Array,
               length_B: jax.Array | None = None) -> jax.Array:
        _base.check_positions(pos_BT, x_BTNH.shape[:2])
        width = int(x_BTNH.shape[-1] * self.fraction)
        if width % 2 or not width:
            raise UserError(f"rope turns pairs, but head width {x_BTNH.shape[-1]} times fraction "
                            f"{self.fraction} gives {width} columns; choose an even number.")
        frequency_F = frequencies(self.base, width)
        angle_BT1F = angles(pos_BT, frequency_F, wide(x_BTNH.dtype))[:, :, None, :]
        turned = turn(x_BTNH[..., :width], angle_BT1F, self.layout)
        return jnp.concatenate([turned, x_BTNH[..., width:]], axis=-1)


def turn(x_BTNH: jax.Array, angle_BT1F: jax.Array, layout: str) -> jax.Array:
    """Turn the pairs of the last axis by the angles, in their dtype; keeps the dtype of x."""
    x = x_BTNH.astype(angle_BT1F.dtype)
    if layout == "half":
        first, second = jnp.split(x, 2, axis=-1)
    else:
        first, second = x[..., 0::2], x[..., 1::2]
    cos, sin = jnp.cos(angle_BT1F), jnp.sin(angle_BT1F)
    pair = (first * cos - second * sin, first * sin + second * cos)
    if layout == "half":
        out = jnp.concatenate(pair, axis=-1)
    else:
        out = jnp.stack(pair, axis=-1).reshape(x.shape)
    return out.astype(x_BTNH.dtype)
