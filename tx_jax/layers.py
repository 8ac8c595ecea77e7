"""Norms, feed-forward non-linearities, dropout and initialisers: pure functions."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from tx_jax import letters

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    # Written with erf: jax.nn.gelu's erfc form costs 1.5 times as much on a CPU.
    "gelu_exact": lambda x: 0.5 * x * (1.0 + jax.lax.erf(x * 2**-0.5)),
    "silu": jax.nn.silu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "swiglu": jax.nn.silu,
    "geglu": lambda x: jax.nn.gelu(x, approximate=True),
    "reglu": jax.nn.relu,
}
GATED = ("swiglu", "geglu", "reglu")


def rms_norm(x_BTD: jax.Array, gain_D: jax.Array, eps: float = 1e-6) -> jax.Array:
    """x / rms(x) * gain, computed in float32 (Zhang & Sennrich 2019, eq. 4)."""
    x = x_BTD.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x * inverse * gain_D[None, None, :]).astype(x_BTD.dtype)


def layer_norm(x_BTD: jax.Array, gain_D: jax.Array, bias_D: jax.Array,
               eps: float = 1e-5) -> jax.Array:
    """(x - mean) / std * gain + bias, computed in float32 (Ba et al. 2016, eq. 4)."""
    x = x_BTD.astype(jnp.float32)
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x * inverse * gain_D[None, None, :] + bias_D[None, None, :]).astype(x_BTD.dtype)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zero entries with probability `rate` and rescale the rest; the identity without a key."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros((), x.dtype)).astype(x.dtype)


def positions_of(segments_BT: jax.Array) -> jax.Array:
    """Positions that restart with each segment, int32 [B, T]: for packing and left padding."""
    index_T = jnp.arange(segments_BT.shape[1], dtype=jnp.int32)
    start_BT = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)),
                       constant_values=True)
    begin_BT = jax.lax.cummax(jnp.where(start_BT, index_T[None, :], 0), axis=1)
    return index_T[None, :] - begin_BT


def fan_in_init(name: str, size: Mapping[str, int], gain: float = 1.0):
    """Initialiser of variance gain^2 / fan-in, so that unit-variance inputs give such outputs."""
    std = gain * letters.fan_in(name, size) ** -0.5

    def init(key: jax.Array) -> jax.Array:
        return std * jax.random.normal(key, letters.shape_of(name, size), jnp.float32)

    return init
