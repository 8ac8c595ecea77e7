"""CoPE: positions that count what the query asks for (Golovneva et al. 2024, section 4)."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tx_jax.dtypes import wide
from tx_jax.options import check_number, check_switch
from tx_jax.positions import _base


@dataclass(frozen=True)
class Encoding(_base.Encoding):
    """Logits get q_i . e[p_ij] with the position p_ij = sum over k = j .. i of sigmoid(logit_ik).

    A fractional position takes the linear blend of the embeddings of its two neighbours. The gates
    are those of the logits after scale and mask, as in the paper: a forbidden key counts nothing,
    and the sum runs over all keys from j on, so the scheme is meant for causal attention. Heads of
    a layer share the embeddings, which start at 0, as in the authors' code: a model starts as one
    without positions.

    Attributes:
      p_max: the largest position; whatever is further counts as p_max.
      divide: q . e is divided by sqrt(H) as q . k is by default, which is what the authors' code
        does; False as in the listing of the paper.
    """

    bias_kind = "rows"
    per_layer = True
    p_max: int = 64
    divide: bool = True

    def __post_init__(self) -> None:
        check_number(self, "p_max", low=1, high=2**20, whole=True)
        check_switch(self, "divide")

    def init(self, key: jax.Array, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
        return {"table_CH": jnp.zeros((self.p_max + 1, sizes["H"]), jnp.float32)}

    def row_bias(self, params: _base.Params, q_BTNH: jax.Array, logits_BNTS: jax.Array
                 ) -> jax.Array:
        dtype = wide(q_BTNH.dtype)
        gates_BNTS = jax.nn.sigmoid(logits_BNTS.astype(dtype))
        counts_BNTS = jax.lax.cumsum(gates_BNTS, axis=3, reverse=True)
        table_CH = params["table_CH"].astype(dtype)
        at_whole_BNTC = jnp.einsum("BTNH,CH->BNTC", q_BTNH.astype(dtype), table_CH)
        if self.divide:
            at_whole_BNTC = at_whole_BNTC * q_BTNH.shape[-1] ** -0.5
        return interpolate(at_whole_BNTC, counts_BNTS)


def interpolate(at_whole_BNTC: jax.Array, position_BNTS: jax.Array) -> jax.Array:
    """Values at fractional positions [B, N, T, S] from those at 0 .. C - 1; beyond: the last."""
    last = at_whole_BNTC.shape[-1] - 1
    position_BNTS = jnp.minimum(position_BNTS, last)
    # The lower neighbour is never the last, so that the upper one exists.
    lower_BNTS = jnp.minimum(position_BNTS.astype(jnp.int32), last - 1)
    share_BNTS = position_BNTS - lower_BNTS.astype(position_BNTS.dtype)
    low = jnp.take_along_axis(at_whole_BNTC, lower_BNTS, axis=-1)
    high = jnp.take_along_axis(at_whole_BNTC, lower_BNTS + 1, axis=-1)
    return (1 - share_BNTS) * low + share_BNTS * high
