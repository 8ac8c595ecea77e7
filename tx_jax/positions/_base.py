"""The interface of a position scheme. Every hook is the identity unless a scheme overrides it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from tx_jax.errors import UserError

Params = Mapping[str, Any]


@dataclass(frozen=True)
class Encoding:
    """Three places where position may enter: the embedding, queries and keys, the logits.

    Positions are explicit integer arrays `pos_BT`, so that packed documents restart at 0 and
    left-padded rows start where their text does. A padding token takes any valid position, say 0.
    """

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

    def rotate(self, params: Params, x_BTNH: jax.Array, pos_BT: jax.Array) -> jax.Array:
        """Turn queries or keys by their positions."""
        return x_BTNH

    def bias(self, params: Params) -> Callable[..., jax.Array] | None:
        """A function (head, q_idx, k_idx) -> bias on the logits, or None."""
        return None


def check_positions(pos_BT: jax.Array, shape: tuple[int, ...]) -> None:
    """Raise UserError unless positions are integers that broadcast to the tokens' [B, T]."""
    if not jnp.issubdtype(pos_BT.dtype, jnp.integer):
        raise UserError(f"positions have dtype {pos_BT.dtype}; give integers, as bfloat16 or float "
                        "positions lose exactness.")
    if pos_BT.ndim != 2 or pos_BT.shape[1] != shape[1] or pos_BT.shape[0] not in (1, shape[0]):
        raise UserError(f"positions have shape {tuple(pos_BT.shape)} but the tokens have "
                        f"{tuple(shape)}; give (B, T) or (1, T).")
