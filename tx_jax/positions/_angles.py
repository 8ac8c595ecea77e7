"""Angles position * frequency that stay exact at position 10^6 and beyond."""

import jax
import jax.numpy as jnp
import numpy as np

# Turns per position as a 64-bit fraction of one turn: its upper and its lower 32 bits.
Turns = tuple[jax.Array | np.ndarray, jax.Array | np.ndarray]


def frequencies(base: float, width: int) -> np.ndarray:
    """base^(-2i/width) for each pair i of `width` (odd: the last lone column too), float64."""
    return float(base) ** (-2.0 * np.arange((width + 1) // 2) / max(width, 1))


def angles(pos_BT: jax.Array, frequency_F: np.ndarray, dtype=jnp.float32) -> jax.Array:
    """position * frequency modulo 2 pi, in [-pi, pi], in `dtype` [B, T, F].

    A float32 product at position 10^6 is off by up to 0.03 rad, as float32 numbers near 10^6 lie
    1/16 apart. Here a turn is a fixed-point number of 64 bits and the product is taken in integers,
    where whole turns fall away by overflow: |error| < 1e-6 rad for |position| < 2^31.

    Args:
      pos_BT: integers.
      frequency_F: radians per position, static.
      dtype: float32, or float64 for references.
    """
    return angles_of(pos_BT, turns(frequency_F), dtype)


def turns(frequency_F: np.ndarray) -> Turns:
    """Radians per position, static, as turns [F]."""
    turns_F = (np.asarray(frequency_F, np.float64) / (2 * np.pi) % 1.0 * 2.0**64).astype(np.uint64)
    return ((turns_F >> np.uint64(32)).astype(np.uint32),
            (turns_F & np.uint64(0xFFFFFFFF)).astype(np.uint32))


def traced_turns(frequency: jax.Array) -> Turns:
    """Radians per position that are known at run time only, as turns.

    The frequency is as good as its dtype (relative error 1e-7 in float32), which queries and keys
    share: their relative angle (m - n) * frequency stays exact however far out m and n are.
    """
    turn = frequency / (2 * np.pi)
    scaled = (turn - jnp.floor(turn)) * 2.0**32
    high = jnp.floor(scaled)
    return high.astype(jnp.uint32), ((scaled - high) * 2.0**32).astype(jnp.uint32)


def angles_of(pos_BT: jax.Array, turn: Turns, dtype=jnp.float32) -> jax.Array:
    """The angles [B, T, F] at `turns` that are [F], or [B, 1, F] where examples differ."""
    high, low = (jnp.asarray(word).reshape((1,) * (3 - word.ndim) + word.shape) for word in turn)
    shape = jnp.broadcast_shapes((*pos_BT.shape, 1), high.shape)
    high, low = jnp.broadcast_to(high, shape), jnp.broadcast_to(low, shape)
    distance = jnp.abs(pos_BT.astype(jnp.int32)).astype(jnp.uint32)[..., None]
    distance = jnp.broadcast_to(distance, shape)
    # As a signed number the fraction of a turn lies in [-1/2, 1/2), where float32 is finest.
    fraction = distance * high + _high_word(distance, low)
    angle = jax.lax.bitcast_convert_type(fraction, jnp.int32).astype(dtype) * (2 * np.pi / 2**32)
    return jnp.where(pos_BT[..., None] < 0, -angle, angle)


def _high_word(a: jax.Array, b: jax.Array) -> jax.Array:
    """The upper 32 bits of the 64-bit product of two uint32 arrays."""
    half, low = np.uint32(16), np.uint32(0xFFFF)
    a1, a0, b1, b0 = a >> half, a & low, b >> half, b & low
    middle = a1 * b0 + ((a0 * b0) >> half)
    carry = a0 * b1 + (middle & low)
    return a1 * b1 + (middle >> half) + (carry >> half)
