"""What the rotary schemes share: a member of the family gives frequencies, the rest is here."""

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.dtypes import wide
from tx_jax.errors import UserError
from tx_jax.options import check_choice, check_number, is_number, name_of
from tx_jax.positions import _base
from tx_jax.positions._angles import Turns, angles_of, turns

LAYOUTS = ("half", "interleaved")


class Rope(_base.Encoding):
    """Queries and keys turn pair by pair (Su et al. 2021, RoFormer, section 3.2).

    A member is a dataclass with the three fields below; it overrides `frequency`, or `turns` where
    frequencies depend on the current length. Every member takes either layout, part of a head and
    any base.

    Attributes:
      base: of the geometric series of frequencies.
      layout: which columns form a pair, see `rope`.
      fraction: the first `fraction * H` columns turn, the others pass (partial rotary).
    """

    base: float
    layout: str
    fraction: float

    def __post_init__(self) -> None:
        check_number(self, "base", above=0)
        check_choice(self, "layout", LAYOUTS)
        if not (is_number(self.fraction) and 0 < self.fraction <= 1):
            raise UserError(f"{name_of(self)}(fraction={self.fraction!r}) must lie in (0, 1].")

    @property
    def attention_factor(self) -> float:
        """Factor on cos and sin, so on turned queries and on turned keys: logits get its square."""
        return 1.0

    def frequency(self, width: int) -> np.ndarray:
        """Radians per position of each pair of `width` columns, float64 [width / 2]."""
        raise NotImplementedError

    def turns(self, width: int, pos_BT: jax.Array, length_B: jax.Array | None, dtype) -> Turns:
        """The frequencies as turns per position, [F], or [B, 1, F] where examples differ."""
        return turns(self.frequency(width))

    def rotate(self, params: _base.Params, x_BTNH: jax.Array, pos_BT: jax.Array,
               length_B: jax.Array | None = None) -> jax.Array:
        return self.turn(x_BTNH, pos_BT, length_B, self.attention_factor)

    def turn(self, x_BTNH: jax.Array, pos_BT: jax.Array, length_B: jax.Array | None,
             gain: float | jax.Array) -> jax.Array:
        """Turn the rotary columns and multiply them by `gain`, a number or [B, T, 1, F]."""
        _base.check_positions(pos_BT, x_BTNH.shape[:2])
        width, dtype = self.width(x_BTNH.shape[-1]), wide(x_BTNH.dtype)
        turns_F = self.turns(width, pos_BT, length_B, dtype)
        angle_BT1F = angles_of(pos_BT, turns_F, dtype)[:, :, None, :]
        turned = turn(x_BTNH[..., :width], angle_BT1F, self.layout, gain)
        return jnp.concatenate([turned, x_BTNH[..., width:]], axis=-1)

    def width(self, head_width: int) -> int:
        """The number of columns that turn, which is even."""
        width = int(head_width * self.fraction + 1e-9)
        if width % 2 or not width:
            raise UserError(f"{name_of(self)} turns pairs, but head width {head_width} times "
                            f"fraction {self.fraction} gives {width} columns; choose an even "
                            "number.")
        return width


def turn(x_BTNH: jax.Array, angle_BT1F: jax.Array, layout: str, gain: float | jax.Array = 1.0
         ) -> jax.Array:
    """Turn the pairs of the last axis by the angles, in their dtype; keeps the dtype of x."""
    x = x_BTNH.astype(angle_BT1F.dtype)
    if layout == "half":
        first, second = jnp.split(x, 2, axis=-1)
    else:
        first, second = x[..., 0::2], x[..., 1::2]
    cos, sin = jnp.cos(angle_BT1F) * gain, jnp.sin(angle_BT1F) * gain
    pair = (first * cos - second * sin, first * sin + second * cos)
    if layout == "half":
        out = jnp.concatenate(pair, axis=-1)
    else:
        out = jnp.stack(pair, axis=-1).reshape(x.shape)
    return out.astype(x_BTNH.dtype)


def current_length(pos_BT: jax.Array, length_B: jax.Array | None) -> jax.Array:
    """Positions of each example so far, int32 [B] or [1].

    Where nobody says, the largest position plus one; in a row of packed documents that is the
    longest document of the row.
    """
    if length_B is None:
        return jnp.max(pos_BT.astype(jnp.int32), axis=1, initial=-1) + 1
    if length_B.ndim != 1 or not jnp.issubdtype(length_B.dtype, jnp.integer):
        raise UserError(f"length_B has shape {tuple(length_B.shape)} and dtype {length_B.dtype}; "
                        "give one integer per example.")
    return length_B.astype(jnp.int32)


def rotations(frequency_F: np.ndarray, length: int) -> np.ndarray:
    """Whole turns that each pair makes within `length` positions."""
    return length * frequency_F / (2 * np.pi)


def interpolate(frequency_F: np.ndarray, factor: float, keep_F: np.ndarray) -> np.ndarray:
    """Frequencies divided by `factor` where `keep_F` is 0, kept where it is 1, blended between."""
    return (1 - keep_F) * frequency_F / factor + keep_F * frequency_F
