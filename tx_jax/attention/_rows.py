"""One tile of queries after another against all keys, recomputed in the backward pass.

Memory grows with T + S for any function from the logits of a row to its weights, and any option of
the contract that gives logits.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from tx_jax.attention import _tiles
from tx_jax.attention._bias import Bias
from tx_jax.attention._dropout import drop
from tx_jax.attention._tiles import cut, pad
from tx_jax.attention.reference import masked_logits, weighted_sum
from tx_jax.attention.scores import DotProduct
from tx_jax.masks import hide_unseen, index_arrays


def attend_by_rows(weigh: Callable[[jax.Array, jax.Array | None], jax.Array], q_BTNH: jax.Array,
                   k_BSKH: jax.Array, v_BSKH: jax.Array, *, mask: Any, bias: Any, score: Any,
                   score_params: Any, scale: Any, softcap: Any, dropout: Any, sink: Any,
                   q_start: Any, size: int | None = None) -> jax.Array:
    """Attention [B, T, N, H of v] in the dtype of v.

    Args:
      weigh: (logits [B, N, t, S], sink) -> weights; logits are minus infinity where forbidden.
      size: queries of a tile, by default from the shapes.
    """
    (B, T, N, H), S = q_BTNH.shape, k_BSKH.shape[1]
    start = S - T if q_start is None else q_start
    per_pair = 1 if isinstance(score, DotProduct) else H
    size = min(T, size or max(1, _tiles.TILE_ELEMENTS * 2 // (B * N * S * per_pair)))
    q_padded, mask = pad(q_BTNH, 1, size), _tiles.pad_mask(mask, size, 1)
    scale = pad(scale, 2, size) if jnp.ndim(scale) else scale
    if isinstance(bias, Bias):
        bias = replace(bias, q_pos_BT=pad(bias.q_pos_BT, 1, size))
    else:
        bias = pad(bias, 2, size)

    @jax.checkpoint
    def rows(i):
        q_idx = start + i * size
        here = _tiles.cut_queries(mask, i, size)
        q, k, v = hide_unseen(here, cut(q_padded, 1, i, size), k_BSKH, v_BSKH, q_idx)
        near = (replace(bias, q_pos_BT=cut(bias.q_pos_BT, 1, i, size))
                if isinstance(bias, Bias) else cut(bias, 2, i, size))
        logits = masked_logits(q, k, mask=here, bias=near, score=score, score_params=score_params,
                               scale=cut(scale, 2, i, size) if jnp.ndim(scale) else scale,
                               softcap=softcap, q_start=q_idx)
        weights = drop(weigh(logits, sink), dropout, *index_arrays(q.shape[1], S, q_idx))
        return weighted_sum(weights, v).astype(v_BSKH.dtype)

    if size >= T:
        return rows(0)
    _, out = jax.lax.scan(lambda _, i: (None, rows(i)), None,
                          jnp.arange(q_padded.shape[1] // size, dtype=jnp.int32))
    return jnp.moveaxis(out, 0, 1).reshape(B, -1, N, v_BSKH.shape[3])[:, :T]
