"""Adapter to `jax.nn.dot_product_attention` (XLA path), made exact where it is not.

jax.nn averages all values in a row without keys, and counts minus infinity in the bias as a number;
here such rows give zeros as the contract says. In half precision its backward pass mixes dtypes, so
everything runs in float32.
"""

import jax
import jax.numpy as jnp

from tx_jax.attention._bias import Bias, dense_bias
from tx_jax.attention._capabilities import Capabilities
from tx_jax.masks import dense_mask, hide_unseen

CAPABILITIES = Capabilities.everything(softcap=False, sink=False, dropout=False, v_width=False,
                                       other_score=False, float64=False, row_bias=False,
                                       memory="N T S")


def attend(q_BTNH, k_BSKH, v_BSKH, *, mask, bias, score, score_params, scale, softcap, dropout,
           sink, q_start):
    """Attention [B, T, N, H] in the dtype of v."""
    dtype, T, S = v_BSKH.dtype, q_BTNH.shape[1], k_BSKH.shape[1]
    q, k, v = hide_unseen(mask, q_BTNH, k_BSKH, v_BSKH, q_start)
    q, k, v = (x.astype(jnp.float32) for x in (*score.project(score_params, q, k), v))
    if jnp.ndim(scale):  # one factor per row, [1|B, 1, T, 1] -> [1|B, T, 1, 1]
        q, scale = q * jnp.swapaxes(scale, 1, 2), 1.0
    allowed = None if mask is None else dense_mask(mask, T, S, q_start)[:, None]
    if isinstance(bias, Bias):
        bias = dense_bias(bias, q.shape[2], T, S, q_start)
    if bias is not None:
        finite = bias != -jnp.inf
        bias = jnp.where(finite, bias, 0).astype(jnp.float32)
        allowed = finite if allowed is None else finite & allowed
        bias = bias if allowed is None else jnp.where(allowed, bias, 0)
    out_BTNH = jax.nn.dot_product_attention(q, k, v, bias=bias, mask=allowed, scale=scale,
                                            implementation="xla")
    if allowed is not None:
        some_BTN1 = jnp.swapaxes(jnp.any(allowed, axis=-1, keepdims=True), 1, 2)
        out_BTNH = jnp.where(some_BTN1, out_BTNH, 0)
    return out_BTNH.astype(dtype)
