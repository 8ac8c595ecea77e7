"""A mask over tiles of queries and keys: which tiles are empty, full, or need the rule itself."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tx_jax.masks.mask import Mask, as_mask
from tx_jax.masks.rules import Rule

EMPTY, PARTIAL, FULL = 0, 1, 2


def tile_kinds(mask: Mask | Rule | None, T: int, S: int, q_start: ArrayLike | None = None, *,
               q_tile: int, k_tile: int) -> Any:
    """Kind of each tile, int8 [1|B, ceil(T / q_tile), ceil(S / k_tile)].

    EMPTY: no pair of the tile is allowed. FULL: all are. PARTIAL: neither is certain, as an empty
    or a full tile may be called partial, never the other way round. The last tiles may be ragged;
    pairs outside T x S do not count.

    Returns:
      A NumPy array where neither the mask nor q_start holds JAX arrays, so that a loop over tiles
      can be planned while tracing; otherwise a JAX array.
    """
    mask = Mask() if mask is None else as_mask(mask)
    start = S - T if q_start is None else q_start
    xp = jnp if isinstance(start, jax.Array) or jax.tree.leaves(mask) else np
    q_first, k_first = (xp.arange(0, n, tile, dtype=np.int32) for n, tile in ((T, q_tile),
                                                                              (S, k_tile)))
    q_last, k_last = xp.minimum(q_first + q_tile, T) - 1, xp.minimum(k_first + k_tile, S) - 1
    start_B11 = xp.reshape(xp.asarray(start, dtype=np.int32), (-1, 1, 1))
    q_lo, q_hi = (start_B11 + edge[None, :, None] for edge in (q_first, q_last))
    k_lo, k_hi = k_first[None, None, :], k_last[None, None, :]
    some, every = mask.rule.tile(q_lo, q_hi, k_lo, k_hi)
    if mask.prefix_B is not None:
        prefix = mask.prefix_B[:, None, None]
        some, every = some | (k_lo < prefix), every | (k_hi < prefix)
    if mask.k_lengths_B is not None:
        length = mask.k_lengths_B[:, None, None]
        some, every = some & (k_lo < length), every & (k_hi < length)
    if mask.q_segments_BT is not None:
        q_min, q_max = _extremes(mask.q_segments_BT, q_tile)
        k_min, k_max = _extremes(mask.k_segments_BS, k_tile)
        q_min, q_max, k_min, k_max = (q_min[:, :, None], q_max[:, :, None], k_min[:, None],
                                      k_max[:, None])
        meet = (q_min <= k_max) & (k_min <= q_max) & ((q_max != 0) | (q_min != 0)) & (
            (k_max != 0) | (k_min != 0))
        same = (q_min == q_max) & (k_min == k_max) & (q_min == k_min) & (q_min != 0)
        some, every = some & meet, every & same
    return xp.where(some, xp.where(every, FULL, PARTIAL), EMPTY).astype(xp.int8)


def _extremes(segments_BT: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
    """Smallest and largest segment id of each tile, both [B, tiles]."""
    B, T = segments_BT.shape
    tiled = jnp.pad(segments_BT, ((0, 0), (0, -T % tile)), mode="edge").reshape(B, -1, tile)
    return jnp.min(tiled, axis=2), jnp.max(tiled, axis=2)
