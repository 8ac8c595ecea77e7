"""The dtype that exact parts of the computation run in."""

from typing import Any

import jax.numpy as jnp


def wide(dtype: Any) -> Any:
    """Float32, or float64 for float64: the dtype of logits, softmax, angles and norms."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
