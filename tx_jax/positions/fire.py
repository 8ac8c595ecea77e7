"""FIRE: a learned function of relative distance (Li et al. 2024, section 3.2, equation 5)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tx_jax.dtypes import wide
from tx_jax.options import check_number, check_switch
from tx_jax.positions import _base
from tx_jax.positions._pairs import distance, of_head


@dataclass(frozen=True)
class Encoding(_base.Encoding):
    """Logits get f(ln(1 + c d) / ln(1 + c max(L, i))) at distance d from query i.

    f is an MLP with one hidden layer and an output per head; c and L are learned too, as their
    logarithms, so that both stay positive. The input of f lies in [0, 1] at every length. Keys
    after the query are at distance |i - j| and count as max(L, i, j), which causal masks hide.
    Positions below 0 are not defined.

    Attributes:
      width: of the hidden layer, 32 in the paper.
      c: at the start.
      length: L at the start; 0 = a quarter of the context the model is built for.
      zero_init: whether the output layer starts at 0, so that the model starts as one without
        positions; else it starts normal with variance 1 / width.
    """

    bias_kind = "pair"
    per_layer = True
    width: int = 32
    c: float = 0.1
    length: float = 0.0
    zero_init: bool = True

    def __post_init__(self) -> None:
        check_number(self, "width", low=1, whole=True)
        check_number(self, "c", above=0)
        check_number(self, "length", low=0)
        check_switch(self, "zero_init")

    def init(self, key: jax.Array, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
        up, bias, down = jax.random.split(key, 3)
        E, N = self.width, sizes["N"]
        length = self.length or max(sizes["T"] / 4, 1.0)
        std = 0.0 if self.zero_init else E ** -0.5
        return {"log_c_U": jnp.full((1,), math.log(self.c), jnp.float32),
                "log_length_U": jnp.full((1,), math.log(length), jnp.float32),
                "up_E": jax.random.uniform(up, (E,), jnp.float32, -1.0, 1.0),
                "bias_E": jax.random.uniform(bias, (E,), jnp.float32, -1.0, 1.0),
                "down_EN": std * jax.random.normal(down, (E, N), jnp.float32),
                "bias_N": jnp.zeros((N,), jnp.float32)}

    def pair_bias(self, params: _base.Params, head: jax.Array, q_pos: jax.Array, k_pos: jax.Array
                  ) -> jax.Array:
        x = progress(params, q_pos, k_pos)[..., None]
        shape = (1,) * (x.ndim - 1) + (-1,)
        up, bias = (params[name].astype(x.dtype).reshape(shape) for name in ("up_E", "bias_E"))
        hidden = jax.nn.relu(x * up + bias)
        # A product and a sum, which compile to one loop without an array of [N, T, S, E].
        down = params["down_EN"].astype(x.dtype).T[head]
        return jnp.sum(hidden * down, axis=-1) + of_head(params["bias_N"], head)


def progress(params: _base.Params, q_pos: jax.Array, k_pos: jax.Array) -> jax.Array:
    """The input of f, between 0 and 1, of the shape of both positions together."""
    dtype = wide(params["log_c_U"].dtype)
    c, length = (jnp.exp(params[name].astype(dtype))[0] for name in ("log_c_U", "log_length_U"))
    furthest = jnp.maximum(q_pos.astype(jnp.int32), k_pos.astype(jnp.int32)).astype(dtype)
    # From 1, so that two tokens at position 0 do not divide 0 by 0 when L has become small.
    whole = jnp.maximum(jnp.maximum(length, furthest), 1)
    return jnp.log1p(c * distance(q_pos, k_pos, dtype)) / jnp.log1p(c * whole)
