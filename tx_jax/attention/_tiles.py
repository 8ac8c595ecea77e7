"""Bookkeeping of tiles: sizes, which ones a row of tiles visits, cutting and adding."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.masks import EMPTY, FULL, PARTIAL, Mask, tile_kinds

# Elements of one tile of logits, over batch and heads: two megabytes in float32, which a
# processor's cache holds. Up to twice as many are quicker in one piece.
TILE_ELEMENTS = 2**19
# Fitted to a CPU: products of small tiles are slower, by (1 + SLOWER_BELOW / side) per element, and
# applying the mask costs half as much again.
SLOWER_BELOW, MASKED = 170, 1.5


def tile_sizes(heads: int, T: int, S: int, per_pair: int = 1, mask: Mask | None = None,
               start: Any = 0) -> tuple[int, int]:
    """Queries and keys of a tile: all there are, or powers of two near TILE_ELEMENTS in all.

    Where the mask is known while tracing, smaller tiles are taken if they skip enough; where it
    holds arrays (packed documents) there is probably much to skip.

    Args:
      heads: logits per pair, B * N.
      per_pair: numbers held per logit while it is computed.
    """
    work = heads * per_pair
    most = 128 if jax.tree.leaves(mask) or isinstance(start, jax.Array) else 512
    if work * T * S <= 2 * TILE_ELEMENTS and max(T, S) <= most:
        return T, S
    side = 2 ** round(0.5 * np.log2(TILE_ELEMENTS / max(1, work)))
    side = max(16, min(most, side))
    best, least = side, np.inf
    for size in (side, side // 2, side // 4):
        kinds = tile_kinds(mask, T, S, start, q_tile=size, k_tile=size)
        if not isinstance(kinds, np.ndarray) or size < 64:
            break
        cost = (np.sum(kinds == FULL) + MASKED * np.sum(kinds == PARTIAL)) * size * (
            size + SLOWER_BELOW)
        best, least = (size, cost) if cost < least else (best, least)
    return min(T, best), min(S, best)


def list_tiles(mask: Mask | None, T: int, S: int, start: Any, q_tile: int, k_tile: int
               ) -> tuple[dict[str, Any], bool, bool]:
    """The tiles of keys that each tile of queries has to visit.

    Returns:
      (visits, some_full, some_partial): visits holds `order`, int32 [q tiles, k tiles], each row
      the full tiles first, then the partial ones, then those to skip; `full` and `partial`, int32
      [q tiles], count them. A flag is False where it is known while tracing that there is none.
    """
    kinds = tile_kinds(mask, T, S, start, q_tile=q_tile, k_tile=k_tile)
    xp = np if isinstance(kinds, np.ndarray) else jnp
    # A tile serves all examples at once.
    kinds = xp.where(xp.all(kinds == FULL, axis=0), FULL,
                     xp.where(xp.all(kinds == EMPTY, axis=0), EMPTY, PARTIAL))
    if S % k_tile:  # the padding of the last tile has to be masked
        ragged = np.arange(kinds.shape[1]) == kinds.shape[1] - 1
        kinds = xp.where(ragged[None] & (kinds == FULL), PARTIAL, kinds)
    visits = {"order": xp.argsort(-kinds, axis=1, stable=True).astype(np.int32),
              "full": xp.sum(kinds == FULL, axis=1).astype(np.int32),
              "partial": xp.sum(kinds == PARTIAL, axis=1).astype(np.int32)}
    if xp is np:
        return visits, bool(visits["full"].any()), bool(visits["partial"].any())
    return visits, True, True


def cut(x: jax.Array | None, axis: int, tile: Any, size: int) -> jax.Array | None:
    """Tile number `tile` along an axis; an axis of length 1 is one that broadcasts."""
    if x is None or x.shape[axis] == 1:
        return x
    return jax.lax.dynamic_slice_in_dim(x, tile * size, size, axis)


def add(x: jax.Array, update: jax.Array, *places: tuple[int, Any]) -> jax.Array:
    """Add a tile where `cut` along the same (axis, tile) pairs took it from."""
    starts = [0] * x.ndim
    for axis, tile in places:
        starts[axis] = tile * update.shape[axis] if x.shape[axis] > 1 else 0
    starts = [jnp.asarray(s, jnp.int32) for s in starts]
    old = jax.lax.dynamic_slice(x, starts, update.shape)
    return jax.lax.dynamic_update_slice(x, old + update.astype(x.dtype), starts)


def pad(x: jax.Array | None, axis: int, size: int) -> jax.Array | None:
    """Zeros at the end of an axis up to a multiple of `size`; axes of length 1 stay."""
    if x is None or x.shape[axis] == 1 or not x.shape[axis] % size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(x, widths)


def pad_mask(mask: Mask | None, q_tile: int, k_tile: int) -> Mask | None:
    """Segment ids up to whole tiles; padding belongs to no document."""
    if mask is None or mask.q_segments_BT is None:
        return mask
    return replace(mask, q_segments_BT=pad(mask.q_segments_BT, 1, q_tile),
                   k_segments_BS=pad(mask.k_segments_BS, 1, k_tile))


def cut_queries(mask: Mask | None, tile: Any, size: int) -> Mask | None:
    """The mask of one tile of queries and all keys."""
    if mask is None or mask.q_segments_BT is None:
        return mask
    return replace(mask, q_segments_BT=cut(mask.q_segments_BT, 1, tile, size))


def visible(mask: Mask | None, q_idx: jax.Array, k_idx: jax.Array, q_tile: Any, k_tile: Any,
            S: int) -> jax.Array:
    """Which pairs of one tile may meet, bool [1|B, t, s].

    Args:
      mask: with padded segment ids.
      q_idx [1|B, t, 1], k_idx [1, 1, s]: absolute indices; keys from S on are padding.
      q_tile, k_tile: numbers of the tile.
    """
    t, s = q_idx.shape[1], k_idx.shape[2]
    allowed = (k_idx < S) & (0 * q_idx == 0)
    if mask is None:
        return allowed
    local = replace(mask, q_segments_BT=cut(mask.q_segments_BT, 1, q_tile, t),
                    k_segments_BS=cut(mask.k_segments_BS, 1, k_tile, s))
    return allowed & local.allowed(q_idx, k_idx)
