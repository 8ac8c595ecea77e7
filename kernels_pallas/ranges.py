"""Which blocks of keys a tile of queries visits, computed outside the kernel."""

import jax
import jax.numpy as jnp

# Kinds of a tile of pairs: none may meet, unknown, all may meet.
EMPTY, PARTIAL, FULL = 0, 1, 2
# Columns of the table.
FIRST, FULL_FIRST, FULL_LAST, LAST, LENGTH, PREFIX, START = range(7)
COLUMNS = 8


def block_ranges(kinds_BIJ: jax.Array, lengths_B: jax.Array | int, block_kv: int,
                 prefix_B: jax.Array | int = 0, start_B: jax.Array | int = 0) -> jax.Array:
    """The table that the kernel reads: block bounds per tile of queries, and numbers per example.

    Blocks run from the first to the last that is not empty; of these, one run of full blocks needs
    no comparison in the kernel. Empty blocks in between are visited and masked.

    Args:
      kinds_BIJ: int8 [1|B, tiles of queries, blocks of keys], 0 empty, 1 partial, 2 full.
      lengths_B: number of keys that exist, one or one per example; a block that reaches beyond is
        never full.
      prefix_B: number of keys that every query sees. start_B: absolute index of the first query.

    Returns:
      int32 [1|B, tiles, 8]: first, first full, last full (exclusive), last (exclusive), length,
      prefix, start, 0.
    """
    B = max(kinds_BIJ.shape[0], *(jnp.size(x) for x in (lengths_B, prefix_B, start_B)))
    tiles, blocks = kinds_BIJ.shape[1:]
    numbers = [jnp.broadcast_to(jnp.reshape(jnp.asarray(x, jnp.int32), (-1, 1)), (B, tiles))
               for x in (lengths_B, prefix_B, start_B)]
    block = jnp.arange(blocks, dtype=jnp.int32)[None, None]
    inside = (block + 1) * block_kv <= numbers[0][..., None]
    kinds = jnp.broadcast_to(kinds_BIJ, (B, tiles, blocks))
    some, full = kinds != EMPTY, (kinds == FULL) & inside

    def smallest(where, otherwise):
        return jnp.min(jnp.where(where, block, otherwise), axis=-1)

    last = jnp.max(jnp.where(some, block + 1, 0), axis=-1)
    first = jnp.minimum(smallest(some, blocks), last)
    full_first = jnp.minimum(smallest(full, blocks), last)
    full_last = jnp.minimum(smallest(~full & (block > full_first[..., None]), blocks), last)
    full_last = jnp.maximum(full_first, full_last)
    columns = [first, full_first, full_last, last, *numbers, jnp.zeros_like(first)]
    return jnp.stack(columns, axis=-1).astype(jnp.int32)
