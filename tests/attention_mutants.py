"""Attention that is wrong in one way each, and the check that has to find it."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from tx_jax.attention import Bias, Capabilities, make_score, reference
from tx_jax.masks import Mask, Window, hide_unseen
from tx_jax.masks.rules import And, Not, Or


def rewrite(rule, change):
    """A rule with `change` applied to its elementary rules."""
    if isinstance(rule, (And, Or)):
        return type(rule)(rewrite(rule.left, change), rewrite(rule.right, change))
    return Not(rewrite(rule.rule, change)) if isinstance(rule, Not) else change(rule)


def window_off_by_one(*a, mask, **o):
    def wider(rule):
        return Window(rule.width + 1) if isinstance(rule, Window) else rule
    return reference.attend(*a, mask=mask and replace(mask, rule=rewrite(mask.rule, wider)), **o)


def top_left_causal(*a, q_start, **o):
    return reference.attend(*a, q_start=0 if q_start is None else q_start, **o)


def future_leak(q, k, v, *, q_start, **o):
    start = k.shape[1] - q.shape[1] if q_start is None else q_start
    return reference.attend(q, k, v, q_start=start + 1, **o)


def by_parts(q, k, v, *, dropout, sink, softmax=reference.softmax, change=None, softcap, **o):
    """The reference with another softmax, or with a change of the logits instead of the cap."""
    q, k, v = hide_unseen(o["mask"], q, k, v, o["q_start"])
    logits = reference.masked_logits(q, k, softcap=None if change else softcap, **o)
    logits = change(logits, softcap) if change else logits
    return reference.weighted_sum(softmax(logits, sink), v).astype(v.dtype)


def softcap_after_mask(*a, **o):
    def cap_all(logits, cap):
        return logits if cap is None else cap * jnp.tanh(logits / cap)
    return by_parts(*a, change=cap_all, **o)


def softcap_after_bias(*a, **o):
    def cap_seen(logits, cap):
        capped = logits if cap is None else cap * jnp.tanh(logits / cap)
        return jnp.where(logits == -jnp.inf, -jnp.inf, capped)
    return by_parts(*a, change=cap_seen, **o)


def nan_on_empty_rows(*a, **o):
    return by_parts(*a, **o,
                    softmax=lambda x, sink: jnp.exp(x - jax.nn.logsumexp(x, -1, keepdims=True)))


def mean_on_empty_rows(*a, **o):
    return by_parts(*a, **o,
                    softmax=lambda x, sink: jax.nn.softmax(jnp.maximum(x, -1e30), axis=-1))


def softmax_in_half_precision(*a, **o):
    return by_parts(*a, **o, softmax=lambda x, sink: reference.softmax(
        x.astype(jnp.bfloat16), sink).astype(x.dtype))


def no_peak_subtracted(*a, **o):
    def softmax(x, sink):
        weights = jnp.exp(x)
        return weights / jnp.sum(weights, axis=-1, keepdims=True)
    return by_parts(*a, softmax=softmax, **o)


def nan_of_padding_leaks(q, k, v, *, dropout, sink, **o):
    logits = reference.masked_logits(q, k, **o)
    return reference.weighted_sum(reference.softmax(logits, sink), v).astype(v.dtype)


def nan_of_the_cache_leaks(q, k, v, **o):
    """Clean in training, not in decoding."""
    return (nan_of_padding_leaks if q.shape[1] == 1 else reference.attend)(q, k, v, **o)


def no_segments(*a, mask, **o):
    mask = mask and replace(mask, q_segments_BT=None, k_segments_BS=None)
    return reference.attend(*a, mask=mask, **o)


def padding_is_a_document(*a, mask, **o):
    if mask is not None and mask.q_segments_BT is not None:
        mask = replace(mask, q_segments_BT=mask.q_segments_BT + 1,
                       k_segments_BS=mask.k_segments_BS + 1)
    return reference.attend(*a, mask=mask, **o)


def no_key_lengths(*a, mask, **o):
    return reference.attend(*a, mask=mask and replace(mask, k_lengths_B=None), **o)


def no_prefix_lengths(*a, mask, **o):
    return reference.attend(*a, mask=mask and replace(mask, prefix_B=None), **o)


def no_q_start(*a, q_start, **o):
    return reference.attend(*a, q_start=None, **o)


def mask_dropped_for_one_query(q, k, v, *, mask, **o):
    return reference.attend(q, k, v, mask=None if q.shape[1] == 1 else mask, **o)


def no_bias_gradient(*a, bias, **o):
    bias = bias if isinstance(bias, Bias) else jax.lax.stop_gradient(bias)
    return reference.attend(*a, bias=bias, **o)


def no_bias_function_gradient(*a, bias, **o):
    if isinstance(bias, Bias):
        bias = replace(bias, params=jax.lax.stop_gradient(bias.params))
    return reference.attend(*a, bias=bias, **o)


def bias_of_the_first_head(*a, bias, **o):
    bias = bias[:, :1] if isinstance(bias, jax.Array) else bias
    return reference.attend(*a, bias=bias, **o)


def row_bias_before_the_mask(*a, bias, **o):
    if isinstance(bias, Bias) and bias.kind == "rows":
        bias = replace(bias, function=partial(_unmasked, bias.function))
    return reference.attend(*a, bias=bias, **o)


def _unmasked(function, params, q, logits):
    return function(params, q, jnp.where(logits == -jnp.inf, 0, logits))


def bias_dropped_beside_a_sink(*a, bias, sink, **o):
    return reference.attend(*a, bias=None if sink is not None else bias, sink=sink, **o)


def other_dropout(*a, dropout, **o):
    dropout = dropout and replace(dropout, seed=dropout.seed + 1)
    return reference.attend(*a, dropout=dropout, **o)


def no_dropout_in_backward(*a, dropout, **o):
    plain = reference.attend(*a, dropout=None, **o)
    return plain + jax.lax.stop_gradient(reference.attend(*a, dropout=dropout, **o) - plain)


def tiled_heads(q, k, v, **o):
    count = q.shape[2] // k.shape[2]
    return reference.attend(q, *(jnp.tile(x, (1, 1, count, 1)) for x in (k, v)), **o)


def gradient_of_one_head_in_the_group(q, k, v, **o):
    def repeat(x):
        count, still = q.shape[2] // x.shape[2], jax.lax.stop_gradient(x)
        first = (jnp.arange(q.shape[2]) % count == 0)[None, None, :, None]
        return jnp.repeat(still, count, 2) + jnp.where(first, jnp.repeat(x - still, count, 2), 0)
    return reference.attend(q, repeat(k), repeat(v), **o)


def scale_of_the_padded_width(q, k, v, *, scale, **o):
    padded = 1 << (q.shape[3] - 1).bit_length()
    return reference.attend(q, k, v, scale=scale * (q.shape[3] / padded) ** 0.5, **o)


def one_scale_for_all_rows(*a, scale, **o):
    return reference.attend(*a, scale=jnp.mean(scale) if jnp.ndim(scale) else scale, **o)


def plain_score(*a, score, score_params, **o):
    return reference.attend(*a, score=make_score("dot"), score_params={}, **o)


def values_cut_to_the_width_of_keys(q, k, v, **o):
    out = reference.attend(q, k, v[..., :q.shape[3]], **o)
    return jnp.pad(out, [(0, 0)] * 3 + [(0, v.shape[3] - out.shape[3])])


def no_sink(*a, sink, **o):
    return reference.attend(*a, sink=None, **o)


def _padded(x, S):
    return jnp.pad(x, ((0, 0), (0, -S % 16), (0, 0), (0, 0))) if S > 16 else x


def reads_past_the_last_block(q, k, v, *, mask, q_start, **o):
    T, S = q.shape[1], k.shape[1]
    if mask is not None and mask != Mask(mask.rule):
        return reference.attend(q, k, v, mask=mask, q_start=q_start, **o)
    return reference.attend(q, _padded(k, S), _padded(v, S), mask=mask,
                            q_start=S - T if q_start is None else q_start, **o)


def no_gradient_in_the_last_block(q, k, v, **o):
    S = k.shape[1]
    inside = (jnp.arange(S) < max(16, S // 16 * 16))[None, :, None, None]
    k, v = (jnp.where(inside, x, jax.lax.stop_gradient(x)) for x in (k, v))
    return reference.attend(q, k, v, **o)


def quadratic_memory(*a, **o):
    return reference.attend(*a, **o)


quadratic_memory.CAPABILITIES = Capabilities.everything(memory="T + S")


def single_precision(q, k, v, **o):
    low = [x.astype(jnp.float32) if x.dtype == jnp.float64 else x for x in (q, k, v)]
    return reference.attend(*low, **o).astype(v.dtype)


def needs_concrete_values(q, k, v, **o):
    return reference.attend(q * (1 if float(jnp.sum(q)) else 1), k, v, **o)


@jax.custom_vjp
def _identity(x):
    return x


_identity.defvjp(lambda x: (x, None), lambda _, d: (d,))


def no_forward_mode(q, k, v, **o):
    return reference.attend(_identity(q), k, v, **o)


def silent_forward_mode(*a, **o):
    return reference.attend(*a, **o)


silent_forward_mode.CAPABILITIES = Capabilities.everything(jvp=False)

# Mutant -> the check meant for it.
MUTANTS = {
    window_off_by_one: "window_width", top_left_causal: "end_alignment", future_leak: "future",
    softcap_after_mask: "softcap_order", softcap_after_bias: "softcap_order",
    nan_on_empty_rows: "empty_rows", mean_on_empty_rows: "empty_rows",
    softmax_in_half_precision: "error_budget", no_peak_subtracted: "large_logits",
    nan_of_padding_leaks: "padding", nan_of_the_cache_leaks: "cache_poison",
    no_segments: "documents", padding_is_a_document: "padding",
    no_key_lengths: "key_lengths", no_prefix_lengths: "prefix_lengths",
    no_q_start: "cached_decoding", mask_dropped_for_one_query: "decoding",
    no_bias_gradient: "bias_shapes", no_bias_function_gradient: "bias_functions",
    bias_of_the_first_head: "bias_values", row_bias_before_the_mask: "row_biases",
    bias_dropped_beside_a_sink: "option_pairs", other_dropout: "dropout_decisions",
    no_dropout_in_backward: "dropout_gradients", tiled_heads: "head_groups",
    gradient_of_one_head_in_the_group: "head_groups", scale_of_the_padded_width: "head_width",
    one_scale_for_all_rows: "scales", plain_score: "scores",
    values_cut_to_the_width_of_keys: "value_width", no_sink: "sinks",
    reads_past_the_last_block: "odd_lengths", no_gradient_in_the_last_block: "block_edges",
    quadratic_memory: "memory_growth", single_precision: "double_precision",
    needs_concrete_values: "transformations", no_forward_mode: "forward_mode",
    silent_forward_mode: "forward_mode",
}
