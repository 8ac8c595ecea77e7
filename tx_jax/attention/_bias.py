"""Biases that are functions of positions: evaluated where they are needed, never stored whole."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tx_jax.errors import UserError
from tx_jax.masks import index_arrays


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bias:
    """A bias on the logits as a function, with parameters that get gradients.

    Attributes:
      function: static. Kind "pair": (params, head, q_pos, k_pos) -> bias, elementwise over the
        broadcast of integer arrays of rank 4, so that any tile can be computed alone (ALiBi, T5,
        KERPLE, FIRE). Kind "rows": (params, q_BTNH, logits_BNTS) -> bias [B, N, T, S], from the
        logits after scale and softcap, minus infinity where the mask forbids (CoPE).
      params: pytree of arrays.
      q_pos_BT, k_pos_BS: integer positions, [B, T] or [1, T]; default: the absolute indices. Give
        them where positions are not indices: left padding, packed documents.
      kind: "pair" or "rows".
    """

    function: Callable[..., jax.Array] = field(metadata={"static": True})
    params: Any = None
    q_pos_BT: jax.Array | None = None
    k_pos_BS: jax.Array | None = None
    kind: str = field(default="pair", metadata={"static": True})

    def check(self, B: int, T: int, S: int) -> None:
        """Raise UserError unless the positions fit the call."""
        if self.kind not in ("pair", "rows") or not callable(self.function):
            raise UserError(f"Bias({self.function!r}, kind={self.kind!r}) needs a function and the "
                            "kind 'pair' or 'rows'.")
        for name, length in (("q_pos_BT", T), ("k_pos_BS", S)):
            array = getattr(self, name)
            if array is None:
                continue
            if (not jnp.issubdtype(array.dtype, jnp.integer) or array.ndim != 2
                    or array.shape[0] not in (1, B) or array.shape[1] != length):
                raise UserError(f"{name} of the bias has shape {tuple(array.shape)} and dtype "
                                f"{array.dtype}; give integers ({B}, {length}) or (1, {length}).")


def bias_positions(bias: Bias, T: int, S: int, q_start: ArrayLike | None
                   ) -> tuple[jax.Array, jax.Array]:
    """Positions of queries [1|B, T] and keys [1|B, S] that a pair bias is evaluated at."""
    q_idx, k_idx = index_arrays(T, S, q_start)
    return (q_idx[:, :, 0] if bias.q_pos_BT is None else bias.q_pos_BT,
            k_idx[:, 0, :] if bias.k_pos_BS is None else bias.k_pos_BS)


def dense_bias(bias: Bias, N: int, T: int, S: int, q_start: ArrayLike | None) -> jax.Array:
    """A pair bias as an array [1|B, N, T, S]: what it means, in O(N T S) memory."""
    q_pos, k_pos = bias_positions(bias, T, S, q_start)
    return bias.function(bias.params, jnp.arange(N)[None, :, None, None], q_pos[:, None, :, None],
                         k_pos[:, None, None, :])
