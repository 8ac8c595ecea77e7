"""The interface of a position scheme. Every hook is the identity unless a scheme overrides it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from tx_jax.errors import UserError

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Encoding:
    """Three places where position may enter: the embedding, queries and keys, the logits.

    Positions are explicit integer arrays `pos_BT`, so that packed documents restart at 0 and
    left-padded rows start where their text does. A padding token takes any valid position, say 0.

    Attributes:
      bias_kind: how position enters the logits: "" (not at all), "pair" (`pair_bias`, elementwise
        in the positions of query and key) or "rows" (`row_bias`, from whole rows of logits).
      per_layer: whether every layer has parameters of its own.
      late: whether a cache keeps keys before `rotate_k`, which then turns all of them at each step,
        as they follow the current length or get wider.
    """

    bias_kind: ClassVar[str] = ""
    per_layer: ClassVar[bool] = False
    late: ClassVar[bool] = False

    @property
    def max_length(self) -> int | None:
        """Positions 0 .. max_length - 1 are defined; None = no limit known before `init`."""
        return None

    def init(self, key: jax.Array, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
        """Parameters, named with their letters; `sizes` gives the size of each letter."""
        return {}

    def embed(self, params: Params, x_BTD: jax.Array, pos_BT: jax.Array) -> jax.Array:
        """Add position to token embeddings."""
        return x_BTD

    def rotate(self, params: Params, x_BTNH: jax.Array, pos_BT: jax.Array,
               length_B: jax.Array | None = None) -> jax.Array:
        """Turn queries or keys by their positions, in schemes that treat both alike.

        `length_B` is the number of positions of each example so far; default: the largest of
        `pos_BT` plus one. Only schemes that depend on the current length read it.
        """
        return x_BTNH

    def rotate_q(self, params: Params, q_BTNH: jax.Array, pos_BT: jax.Array,
                 length_B: jax.Array | None = None) -> jax.Array:
        """Put positions into queries; a scheme may widen the head, `rotate_k` alike."""
        return self.rotate(params, q_BTNH, pos_BT, length_B)

    def rotate_k(self, params: Params, k_BSKH: jax.Array, pos_BS: jax.Array,
                 length_B: jax.Array | None = None) -> jax.Array:
        """Put positions into keys."""
        return self.rotate(params, k_BSKH, pos_BS, length_B)

    def pair_bias(self, params: Params, head: jax.Array, q_pos: jax.Array, k_pos: jax.Array
                  ) -> jax.Array:
        """Bias on the logits, float32, over the broadcast of three integer arrays of equal rank.

        Elementwise: an implementation calls it on any tile of heads, queries and keys, and
        differentiates it with respect to `params`.
        """
        raise NotImplementedError

    def row_bias(self, params: Params, q_BTNH: jax.Array, logits_BNTS: jax.Array) -> jax.Array:
        """Bias [B, N, T, S] from whole rows: queries as they meet the keys, and their logits after
        scale and softcap, minus infinity where the mask forbids."""
        raise NotImplementedError


def check_positions(pos_BT: jax.Array, shape: tuple[int, ...]) -> None:
    """Raise UserError unless positions are integers that broadcast to the tokens' [B, T]."""
    if not jnp.issubdtype(pos_BT.dtype, jnp.integer):
        raise UserError(f"positions have dtype {pos_BT.dtype}; give integers, as bfloat16 or float "
                        "positions lose exactness.")
    if pos_BT.ndim != 2 or pos_BT.shape[1] != shape[1] or pos_BT.shape[0] not in (1, shape[0]):
        raise UserError(f"positions have shape {tuple(pos_BT.shape)} but the tokens have "
                        f"{tuple(shape)}; give (B, T) or (1, T).")
