"""Look inside attention: weights and statistics, computed by the formulas of the reference."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tx_jax.attention import _check
from tx_jax.attention._bias import Bias
from tx_jax.attention._scale import resolve_scale
from tx_jax.attention.reference import masked_logits, weighted_sum
from tx_jax.attention.scores import ScoreFunction, make_score
from tx_jax.masks import Mask, Rule, as_mask, hide_unseen


def attention_weights(q_BTNH: jax.Array, k_BSKH: jax.Array, *, mask: Mask | Rule | None = None,
                      bias: jax.Array | Bias | None = None,
                      score: str | ScoreFunction = "scaled_dot", scale: Any = None,
                      softcap: float | None = None,
                      sink: jax.Array | None = None, q_start: Any = None,
                      score_params: Mapping[str, Any] | None = None,
                      head_width: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Weights before dropout [B, N, T, S] and log-sum-exp of the logits [B, N, T].

    Arguments as in `attend`. Both are float32 or wider; a row without keys has weights 0 and
    log-sum-exp minus infinity. With a sink the weights of a row sum to less than 1.
    """
    _check.check_sink(sink, q_BTNH.shape[2])
    logits = _logits(q_BTNH, k_BSKH, mask=mask, bias=bias, score=score, scale=scale,
                     softcap=softcap, q_start=q_start, score_params=score_params,
                     head_width=head_width)
    lse_BNT = _log_sum_exp(logits)
    if sink is not None:
        lse_BNT = jnp.logaddexp(lse_BNT, sink.astype(logits.dtype)[None, :, None])
    safe = jnp.where(lse_BNT == -jnp.inf, 0, lse_BNT)[..., None]
    return jnp.exp(logits - safe), lse_BNT


def trace_attention(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, **options: Any
                    ) -> dict[str, jax.Array]:
    """What any exact implementation of attention computes on the way, self- or cross-attention.

    Options as `attention_weights`.

    Returns:
      logits_BNTS: scores as they enter the softmax, minus infinity where the mask forbids.
      weights_BNTS: the softmax, before dropout.
      out_BTNH: what each head gives, in the dtype of v.
    """
    _check.check_qkv(q_BTNH, k_BSKH, v_BSKH)
    plain = {name: value for name, value in options.items() if name != "sink"}
    weights_BNTS, _ = attention_weights(q_BTNH, k_BSKH, **options)
    mask = options.get("mask")
    mask = None if mask is None else as_mask(mask)
    v = hide_unseen(mask, q_BTNH, k_BSKH, v_BSKH, options.get("q_start"))[2]
    return {"logits_BNTS": _logits(q_BTNH, k_BSKH, **plain), "weights_BNTS": weights_BNTS,
            "out_BTNH": weighted_sum(weights_BNTS, v).astype(v_BSKH.dtype)}


def attention_statistics(q_BTNH: jax.Array, k_BSKH: jax.Array, **options: Any
                         ) -> dict[str, jax.Array]:
    """How spread or saturated attention is; scalars, no gradient. Options as `attention_weights`.

    Returns:
      logit_variance: variance, over all allowed pairs, of the logits that enter the softmax.
      largest_logit: their largest magnitude.
      entropy: mean entropy of the softmax rows in nats, over rows with a key.
      saturated: share of those rows whose largest weight exceeds 0.99.
      All are 0 where no pair is allowed.
    """
    q, k = jax.lax.stop_gradient((q_BTNH, k_BSKH))
    sink = options.pop("sink", None)
    _check.check_sink(sink, q_BTNH.shape[2])
    logits = jax.lax.stop_gradient(_logits(q, k, **options))
    allowed = logits > -jnp.inf
    count = jnp.maximum(jnp.sum(allowed, dtype=logits.dtype), 1)
    known = jnp.where(allowed, logits, 0)
    mean = jnp.sum(known) / count
    variance = jnp.sum(jnp.where(allowed, (known - mean) ** 2, 0)) / count
    lse = _log_sum_exp(logits)
    if sink is not None:
        lse = jnp.logaddexp(lse, sink.astype(logits.dtype)[None, :, None])
    nonempty = jnp.any(allowed, axis=-1)
    rows = jnp.maximum(jnp.sum(nonempty, dtype=logits.dtype), 1)
    lse = jnp.where(nonempty, lse, 0)
    weights = jnp.where(allowed, jnp.exp(known - lse[..., None]), 0)
    entropy_BNT = lse - jnp.sum(weights * known, axis=-1)
    if sink is not None:
        sink_weight = jnp.exp(sink.astype(lse.dtype)[None, :, None] - lse)
        entropy_BNT = entropy_BNT - sink_weight * sink.astype(lse.dtype)[None, :, None]
    top_BNT = jnp.max(weights, axis=-1, initial=0)
    return {"logit_variance": variance,
            "largest_logit": jnp.max(jnp.abs(known), initial=0),
            "entropy": jnp.sum(jnp.where(nonempty, entropy_BNT, 0)) / rows,
            "saturated": jnp.sum(nonempty & (top_BNT > 0.99), dtype=logits.dtype) / rows}


def _logits(q_BTNH, k_BSKH, *, mask=None, bias=None, score="scaled_dot", scale=None, softcap=None,
            q_start=None, score_params=None, head_width=None):
    score = make_score(score)
    mask = None if mask is None else as_mask(mask)
    _check.check_qkv(q_BTNH, k_BSKH)
    (B, T, N, H), S = q_BTNH.shape, k_BSKH.shape[1]
    q_start, softcap = _check.check_start(q_start, B), _check.check_softcap(softcap)
    bias = _check.check_bias(bias, (B, N, T, S))
    _check.check_options(mask=mask, score=score, score_params=score_params, dropout=None,
                         sink=None, head_width=head_width, sizes=(B, N, T, S, H))
    q, k, _ = hide_unseen(mask, q_BTNH, k_BSKH, k_BSKH, q_start)
    return masked_logits(q, k, mask=mask, bias=bias, score=score, score_params=score_params or {},
                         scale=resolve_scale(scale, score, head_width or H, mask, T, S, q_start),
                         softcap=softcap, q_start=q_start)


def _log_sum_exp(logits: jax.Array) -> jax.Array:
    """Log-sum-exp over the last axis, minus infinity for empty rows, with finite gradients."""
    peak = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    peak = jax.lax.stop_gradient(jnp.where(peak == -jnp.inf, 0, peak))
    total = jnp.sum(jnp.exp(logits - peak), axis=-1)
    safe = jnp.log(jnp.where(total == 0, 1, total)) + peak[..., 0]
    return jnp.where(total == 0, -jnp.inf, safe)
