"""Attention of this project inside Flax modules, Linen and NNX.

    nn.MultiHeadDotProductAttention(num_heads=8, attention_fn=attention_fn("blockwise"))
    nnx.MultiHeadAttention(8, 64, attention_fn=attention_fn(mask=Causal() & Window(128)), ...)

Values and gradients are Flax's own, with two differences, both deliberate: softmax runs in float32
whatever the dtype, and a row without any key gives zeros where Flax averages all values. A dense
mask or bias from Flax takes memory N T S; a rule given to `attention_fn` does not.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tx_jax.attention import Dropout, attend
from tx_jax.errors import UserError
from tx_jax.masks import Causal, Full, Mask, Rule, as_mask


def attention_fn(implementation: Any = None, *, mask: Mask | Rule | str | None = None,
                 score: Any = "scaled_dot", score_params: Mapping[str, Any] | None = None,
                 scale: Any = None, softcap: float | None = None, sink: jax.Array | None = None
                 ) -> Callable[..., jax.Array]:
    """A function for `attention_fn` of Flax's attention modules.

    Args:
      implementation, score, score_params, scale, softcap, sink: as in `tx_jax.attention.attend`.
      mask: allows what both it and Flax's own mask allow. Its indices count from the first query,
        so it is for T = S; Flax does not tell the position of a decoding step.

    Returns:
      A function of (query, key, value, ...) with the arguments of `flax.linen` and `flax.nnx`. What
      it cannot honour exactly raises UserError: a precision, einsums of one's own, sowing weights,
      dropout with one mask for all examples and heads. Dropout draws other weights than Flax does,
      at the same rate; rates outside [0, 1) are errors even where it is turned off.
    """
    given = None if mask is None else as_mask(mask)
    options = {"implementation": implementation, "score": score, "score_params": score_params,
               "scale": scale, "softcap": softcap, "sink": sink}

    def dot_product_attention(
            query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None = None,
            mask: jax.Array | None = None, broadcast_dropout: bool = True,
            dropout_rng: jax.Array | None = None, dropout_rate: float = 0.0,
            deterministic: bool = False, dtype: Any = None, precision: Any = None,
            module: Any = None, force_fp32_for_softmax: bool = False,
            einsum_dot_general: Any = None, qk_attn_weights_einsum: Any = None,
            attn_weights_value_einsum: Any = None, is_causal: bool = False) -> jax.Array:
        """Attention [batch..., T, N, H of value] of arrays [batch..., length, heads, width]."""
        _refuse(precision, module, einsum_dot_general, qk_attn_weights_einsum,
                attn_weights_value_einsum)
        dropout = _dropout(dropout_rate, dropout_rng, deterministic, broadcast_dropout)
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        q, k, v = (_flat(x).astype(dtype) for x in (query, key, value))
        T, S = q.shape[1], k.shape[1]
        rule = given
        if rule is not None and rule.rule != Full() and T != S:
            raise UserError(f"the mask '{rule.rule}' of attention_fn needs as many queries as "
                            f"keys, not {T} and {S}, as Flax does not tell where the queries "
                            "stand; give Flax a dense mask for this call.")
        if is_causal and T == S:
            rule = Mask(Causal()) if rule is None else rule & Causal()
        elif is_causal:  # Flax counts both from 0
            triangle = jnp.arange(T)[:, None] >= jnp.arange(S)[None]
            triangle = triangle.reshape((1,) * (query.ndim - 2) + (T, S))
            mask = triangle if mask is None else (mask != 0) & triangle
        out = attend(q, k, v, mask=rule, dropout=dropout, **options,
                     bias=_bias(bias, mask, query.shape[:-3], dtype))
        return out.reshape(*query.shape[:-1], value.shape[-1])

    return dot_product_attention


def _refuse(precision: Any, module: Any, *einsums: Any) -> None:
    """Raise UserError at what cannot be honoured exactly."""
    if precision not in (None, jax.lax.Precision.DEFAULT):
        raise UserError(f"attention_fn cannot take precision {precision}, as implementations "
                        "choose their own; wrap the whole step in jax.default_matmul_precision.")
    if module is not None:
        raise UserError("attention_fn forms no weights that could be sown; leave sow_weights out "
                        "and call tx_jax.attention.attention_weights.")
    if any(fn is not None for fn in einsums):
        raise UserError("attention_fn cannot take einsums of one's own, as implementations have "
                        "theirs; leave them out.")


def _dropout(rate: Any, rng: jax.Array | None, deterministic: bool, broadcast: bool
             ) -> Dropout | None:
    """Dropout of this call. Linen calls a rate of NaN or below 0 deterministic: refused as well."""
    rate = Dropout(rate).rate
    if deterministic or not rate:
        return None
    if rng is None:
        raise UserError(f"dropout_rate {rate} needs a dropout_rng; give one, or "
                        "deterministic=True.")
    if broadcast:
        raise UserError("attention_fn drops weights of each example and head for themselves; give "
                        "the module broadcast_dropout=False.")
    return Dropout(rate, jax.random.bits(rng, dtype=jnp.uint32))


def _flat(x: jax.Array) -> jax.Array:
    """[batch..., length, heads, width] -> [B, length, heads, width]."""
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def _bias(bias: jax.Array | None, mask: jax.Array | None, batch: tuple[int, ...], dtype: Any
          ) -> jax.Array | None:
    """One bias [B|1, N|1, T|1, S|1], minus infinity where the mask is False or 0."""
    rank = len(batch) + 3
    arrays = [None if x is None else jnp.reshape(x, (1,) * (rank - x.ndim) + x.shape)
              for x in (bias, mask)]
    bias, mask = arrays
    if mask is not None:
        bias = jnp.zeros((1,) * rank, dtype) if bias is None else bias
        bias = jnp.where(mask != 0, bias, -jnp.inf)
    if bias is None:
        return None
    if any(size != 1 for size in bias.shape[:-3]):
        bias = jnp.broadcast_to(bias, (*batch, *bias.shape[-3:]))
    return _flat(bias)
