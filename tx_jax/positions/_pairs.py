"""What the biases by pair share: distances and per-head parameters, in the dtype of the result."""

import jax
import jax.numpy as jnp

from tx_jax.dtypes import wide


def relative(q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    """Key minus query, int32: negative in the past."""
    return k_pos.astype(jnp.int32) - q_pos.astype(jnp.int32)


def distance(q_pos: jax.Array, k_pos: jax.Array, dtype) -> jax.Array:
    """|key - query| as a float."""
    return jnp.abs(relative(q_pos, k_pos)).astype(dtype)


def of_head(param_N: jax.Array, head: jax.Array) -> jax.Array:
    """A parameter of each head, float32 or float64, in the shape of `head`."""
    return param_N.astype(wide(param_N.dtype))[head]
