"""Few queries against many keys: the products are sums of elementwise products.

A decoding step is bound by reading the keys and values once. As matrix products they would first be
copied into the layout of a matrix, or from int8 to float32; sums of products are fused with the
conversion by the compiler and read what lies in the cache. Keys and values are best stored as
[B, K, S, H]: the transpositions here and in the cache cancel.
"""

import jax.numpy as jnp

from tx_jax.attention._capabilities import Capabilities
from tx_jax.attention._dropout import drop
from tx_jax.attention.reference import finish_logits, softmax
from tx_jax.attention.scores import DotProduct
from tx_jax.dtypes import wide
from tx_jax.masks import hide_unseen, index_arrays

CAPABILITIES = Capabilities.everything(memory="N T S, N T S H where not fused")


def attend(q_BTNH, k_BSKH, v_BSKH, *, mask, bias, score, score_params, scale, softcap, dropout,
           sink, q_start):
    """Attention [B, T, N, H of v] in the dtype of v; arguments as `tx_jax.attention.attend` gives
    them to implementations."""
    q, k, v = hide_unseen(mask, q_BTNH, k_BSKH, v_BSKH, q_start)
    if isinstance(score, DotProduct):
        logits_BNTS = _dots(*score.project(score_params, q, k))
    else:
        logits_BNTS = score.logits(score_params, q, k)
    logits_BNTS = finish_logits(logits_BNTS, q, mask=mask, bias=bias, scale=scale, softcap=softcap,
                                q_start=q_start)
    weights_BNTS = softmax(logits_BNTS, sink)
    weights_BNTS = drop(weights_BNTS, dropout, *index_arrays(q.shape[1], k.shape[1], q_start))
    return _weighted_sum(weights_BNTS, v).astype(v_BSKH.dtype)


def _dots(q_BTNH, k_BSKH):
    """Dot products [B, N, T, S], float32 or wider."""
    (B, T, N, H), (_, S, K, _) = q_BTNH.shape, k_BSKH.shape
    q_BKGTH = jnp.moveaxis(q_BTNH.reshape(B, T, K, N // K, H), 1, 3)
    k_BKSH = jnp.swapaxes(k_BSKH, 1, 2)
    dtype = wide(k_BSKH.dtype)
    dots = jnp.sum(q_BKGTH.astype(dtype)[..., None, :] * k_BKSH.astype(dtype)[:, :, None, None],
                   axis=-1)
    return dots.reshape(B, N, T, S)


def _weighted_sum(weights_BNTS, v_BSKH):
    """Sum of values [B, T, N, H] in the dtype of the weights."""
    (B, N, T, S), (K, H) = weights_BNTS.shape, v_BSKH.shape[2:]
    v_BKSH = jnp.swapaxes(v_BSKH, 1, 2).astype(weights_BNTS.dtype)
    weights_BKGTS1 = weights_BNTS.reshape(B, K, N // K, T, S, 1)
    out_BKGTH = jnp.sum(weights_BKGTS1 * v_BKSH[:, :, None, None], axis=4)
    return jnp.moveaxis(out_BKGTH, 3, 1).reshape(B, T, N, H)
