"""Adapter to cuDNN's fused attention (`jax.nn.dot_product_attention(implementation="cudnn")`).

NVIDIA GPUs and half precision only. Where the words of cuDNN mean the same as the contract's
(causal and sliding windows, T = S, nothing per example) its own flags are set and memory grows with
T + S; every other mask is handed over as a table of pairs (so are odd key lengths without a mask).
A bias is refused: in half precision a distance of 300 at slope 0.5 would be off by half a logit,
and one in float32 is untried there.
"""

import jax
import jax.numpy as jnp

from tx_jax.attention._capabilities import Capabilities
from tx_jax.masks import Causal, Full, Mask, Window, dense_mask, hide_unseen
from tx_jax.masks.rules import And

# Wider heads need Hopper.
MAX_WIDTH = 128

CAPABILITIES = Capabilities.everything(
    bias=False, pair_bias=False, row_bias=False, softcap=False, sink=False, dropout=False,
    traced_scale=False, row_scale=False, other_score=False, projected_score=False, float64=False,
    jvp=False, dtypes=frozenset({"bfloat16", "float16"}), platforms=frozenset({"cuda"}),
    max_width=MAX_WIDTH, memory="T + S (causal, windows), else B T S")


def attend(q_BTNH, k_BSKH, v_BSKH, *, mask, bias, score, score_params, scale, softcap, dropout,
           sink, q_start):
    """Attention [B, T, N, H of v] in the dtype of v; arguments as `tx_jax.attention.attend` gives
    them to implementations."""
    dtype, (T, S) = v_BSKH.dtype, (q_BTNH.shape[1], k_BSKH.shape[1])
    flags, table = own_flags(mask, T, S, q_start), None
    if flags is None:
        q_BTNH, k_BSKH, v_BSKH = hide_unseen(mask, q_BTNH, k_BSKH, v_BSKH, q_start)
        flags, table = {}, dense_mask(mask, T, S, q_start)[:, None]
    elif not flags and S % 2:  # the key that is added below must not be seen
        table = jnp.ones((1, 1, T, S), bool)
    q, k = score.project(score_params, q_BTNH, k_BSKH)
    q, k, v = (x.astype(dtype) for x in (q, k, v_BSKH))
    # cuDNN takes widths that are multiples of 8 and, in its backward pass, even lengths.
    width = max(q.shape[3], v.shape[3])
    q, k, v = (_pad(x, 3, width + -width % 8 - x.shape[3]) for x in (q, k, v))
    q, k, v = _pad(q, 1, T % 2), _pad(k, 1, S % 2), _pad(v, 1, S % 2)
    if table is None:
        out_BTNH = jax.nn.dot_product_attention(q, k, v, scale=float(scale), implementation="cudnn",
                                                **flags)
    else:
        even = _pad(_pad(table, 2, T % 2), 3, S % 2)
        out_BTNH = jax.nn.dot_product_attention(q, k, v, mask=even, scale=float(scale),
                                                implementation="cudnn")
        # A row without keys averages all values there.
        some_BT11 = jnp.swapaxes(jnp.any(even, axis=-1, keepdims=True), 1, 2)
        out_BTNH = jnp.where(some_BT11, out_BTNH, 0)
    return out_BTNH[:, :T, :, :v_BSKH.shape[3]]


def own_flags(mask: Mask | None, T: int, S: int, q_start) -> dict | None:
    """The keywords that mean exactly this mask; None if it has to be a table of pairs.

    Its causal mask counts queries from key 0, so it is ours only where the first query stands
    there: T = S.
    """
    if mask is None:
        return {}
    per_example = (mask.q_segments_BT, mask.prefix_B, mask.k_lengths_B)
    if any(x is not None for x in per_example):
        return None
    if mask.rule == Full():
        return {}
    if T != S or isinstance(q_start, jax.Array) or q_start not in (None, 0):
        return None
    rules = (mask.rule.left, mask.rule.right) if isinstance(mask.rule, And) else (mask.rule,)
    if not all(isinstance(rule, (Causal, Window)) for rule in rules):
        return None
    width = min([rule.width for rule in rules if isinstance(rule, Window)], default=S)
    # A window of W keys counts the query itself, its (left, right) do not.
    return {"is_causal": True} | ({"local_window_size": (width - 1, 0)} if width < S else {})


def _pad(x: jax.Array, axis: int, count: int) -> jax.Array:
    """Zeros (False) at the end of an axis."""
    if not count:
        return x
    return jnp.pad(x, [(0, count if i == axis else 0) for i in range(x.ndim)])
