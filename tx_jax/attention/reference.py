"""The specification of attention: every other implementation is compared with this file.

Order: score -> scale -> softcap -> + bias -> mask -> softmax -> dropout -> weighted sum, in float32
(float64 for float64 inputs). It supports the whole contract in O(N T S) memory. Products run at
JAX's current matmul precision; where that is below float32 (GPUs), raise it to compare.
"""

import jax
import jax.numpy as jnp

from tx_jax.attention._bias import Bias, dense_bias
from tx_jax.attention._capabilities import Capabilities
from tx_jax.attention._dropout import drop
from tx_jax.dtypes import wide
from tx_jax.masks import dense_mask, hide_unseen, index_arrays

CAPABILITIES = Capabilities.everything(memory="N T S")


def attend(q_BTNH, k_BSKH, v_BSKH, *, mask, bias, score, score_params, scale, softcap, dropout,
           sink, q_start):
    """Attention [B, T, N, H of v] in the dtype of v; arguments as `tx_jax.attention.attend` gives
    them to implementations."""
    q, k, v = hide_unseen(mask, q_BTNH, k_BSKH, v_BSKH, q_start)
    logits_BNTS = masked_logits(q, k, mask=mask, bias=bias, score=score, score_params=score_params,
                                scale=scale, softcap=softcap, q_start=q_start)
    weights_BNTS = softmax(logits_BNTS, sink)
    weights_BNTS = drop(weights_BNTS, dropout, *index_arrays(q.shape[1], k.shape[1], q_start))
    return weighted_sum(weights_BNTS, v).astype(v_BSKH.dtype)


def softmax(logits_BNTS, sink=None):
    """Softmax over keys; a row of minus infinities gives zeros, with zero gradients."""
    empty_BNT1 = jnp.max(logits_BNTS, axis=-1, keepdims=True, initial=-jnp.inf) == -jnp.inf
    # The inner `where` keeps 0 / 0 out of the backward pass, the outer one sets the result.
    safe_BNTS = jnp.where(empty_BNT1, 0, logits_BNTS)
    if sink is None:
        weights_BNTS = jax.nn.softmax(safe_BNTS, axis=-1)
    else:
        sink_BNT1 = jnp.broadcast_to(sink.astype(safe_BNTS.dtype)[None, :, None, None],
                                     empty_BNT1.shape)
        joint = jnp.concatenate([safe_BNTS, sink_BNT1], axis=-1)
        weights_BNTS = jax.nn.softmax(joint, axis=-1)[..., :-1]
    return jnp.where(empty_BNT1, 0, weights_BNTS)


def masked_logits(q_BTNH, k_BSKH, *, mask, bias, score, score_params, scale, softcap, q_start):
    """Logits as they enter the softmax [B, N, T, S]; minus infinity where the mask forbids."""
    logits = score.logits(score_params, q_BTNH, k_BSKH)
    return finish_logits(logits, q_BTNH, mask=mask, bias=bias, scale=scale, softcap=softcap,
                         q_start=q_start)


def finish_logits(logits, q_BTNH, *, mask, bias, scale, softcap, q_start):
    """What comes after the score: scale, soft cap, bias and mask, on logits [B, N, T, S]."""
    logits = logits * jnp.asarray(scale, logits.dtype)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    (T, N), S = q_BTNH.shape[1:3], logits.shape[-1]
    allowed = True if mask is None else dense_mask(mask, T, S, q_start)[:, None]
    if isinstance(bias, Bias):
        bias = (dense_bias(bias, N, T, S, q_start) if bias.kind == "pair" else
                bias.function(bias.params, q_BTNH, jnp.where(allowed, logits, -jnp.inf)))
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    return jnp.where(allowed, logits, -jnp.inf)


def weighted_sum(weights_BNTS, v_BSKH):
    """Sum of values [B, T, N, H] in the dtype of the weights."""
    B, N, T, S = weights_BNTS.shape
    K, v = v_BSKH.shape[2], v_BSKH.astype(wide(v_BSKH.dtype))
    if N == K:
        return jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v)
    grouped = weights_BNTS.reshape(B, K, N // K, T, S)
    return jnp.einsum("BKGTS,BSKH->BTKGH", grouped, v).reshape(B, T, N, v.shape[-1])
