"""Sines and cosines added to the embedding (Vaswani et al. 2017, section 3.5)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tx_jax.dtypes import wide
from tx_jax.options import check_number
from tx_jax.positions import _base
from tx_jax.positions._angles import angles, frequencies


@dataclass(frozen=True)
class Encoding(_base.Encoding):
    """PE(p, 2i) = sin(p / base^(2i/D)), PE(p, 2i+1) = cos(the same angle)."""

    base: float = 10000.0

    def __post_init__(self) -> None:
        check_number(self, "base", above=0)

    def embed(self, params: _base.Params, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        _base.check_positions(pos_BT, x_BTD.shape[:2])
        table_BTD = sinusoids(pos_BT, x_BTD.shape[-1], self.base, wide(x_BTD.dtype))
        return x_BTD + table_BTD.astype(x_BTD.dtype)


def sinusoids(pos_BT: jax.Array, width: int, base: float = 10000.0,
              dtype=jnp.float32) -> jax.Array:
    """The table [B, T, width]; a pair shares its frequency, an odd width ends in a lone sine."""
    angle_BTF = angles(pos_BT, frequencies(base, width), dtype)
    pairs = jnp.stack([jnp.sin(angle_BTF), jnp.cos(angle_BTF)], axis=-1)
    return pairs.reshape(*pos_BT.shape, 2 * angle_BTF.shape[-1])[..., :width]
