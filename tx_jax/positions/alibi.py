"""ALiBi: a linear penalty on distance (Press et al. 2022, section 3)."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.options import check_switch
from tx_jax.positions import _base
from tx_jax.positions._pairs import distance, of_head


@dataclass(frozen=True)
class Encoding(_base.Encoding):
    """Logits get -slope * |query - key|, after their scale; each head has its slope.

    The bias is the same without a causal mask: both directions are penalised alike.

    Attributes:
      learned: whether slopes are trained. By default they are constants; they stand among the
        parameters with a gradient of zero, so that a trained model keeps its own.
    """

    bias_kind = "pair"
    learned: bool = False

    def __post_init__(self) -> None:
        check_switch(self, "learned")

    def init(self, key: jax.Array, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
        return {"slope_N": jnp.asarray(slopes(sizes["N"]), jnp.float32)}

    def pair_bias(self, params: _base.Params, head: jax.Array, q_pos: jax.Array, k_pos: jax.Array
                  ) -> jax.Array:
        slope = of_head(params["slope_N"], head)
        slope = slope if self.learned else jax.lax.stop_gradient(slope)
        return -slope * distance(q_pos, k_pos, slope.dtype)


def slopes(heads: int) -> np.ndarray:
    """2^(-8h/N) for h = 1 .. N; other than powers of two as the authors' code does, float64 [N].

    That is: the slopes of the next lower power of two, then every other one of the next higher.
    """
    lower = 2 ** (heads.bit_length() - 1)
    own = 2.0 ** (-8.0 * np.arange(1, lower + 1) / lower)
    between = 2.0 ** (-4.0 * np.arange(1, 2 * lower + 1, 2) / lower)
    return np.concatenate([own, between])[:heads]
