"""Linear attention (Katharopoulos et al. 2020): weights phi(q) . phi(k), phi = elu + 1."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.attention._rows import attend_by_rows
from tx_jax.attention.scores import DotProduct
from tx_jax.attention.variants import _base
from tx_jax.dtypes import wide
from tx_jax.masks import Causal, Full, Mask

# Queries and keys whose weights are held at once under a causal mask.
CHUNK = 64
NO_LOGITS = "its weights are products of features, without logits"


@dataclass(frozen=True)
class Variant(_base.Variant):
    """Weights phi(q) . phi(k) over their sum, in memory that grows with T + S.

    Time grows with T + S too where the mask is full or causal, with or without key lengths, and
    q_start is not traced: sums over keys are carried from chunk to chunk. Other masks (segments,
    windows, prefixes) are as exact and take time T S, because no sum serves all their rows.
    """

    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("bias", "score", "scale", "softcap", "sink", "score_params", "head_width"), NO_LOGITS) | {
            "dropout": "its weights are never formed",
            "implementation": "it is no softmax, which the implementations compute"}

    def compute(self, params: Mapping[str, Any], q_BTNH: jax.Array, k_BSKH: jax.Array,
                v_BSKH: jax.Array, *, mask: Mask | None, q_start: Any) -> jax.Array:
        options = _base.checked(q_BTNH, k_BSKH, v_BSKH, mask=mask, q_start=q_start)
        out = _base.empty(q_BTNH, k_BSKH, v_BSKH)
        if out is not None:
            return out
        mask = Mask() if mask is None else mask
        S, T = k_BSKH.shape[1], q_BTNH.shape[1]
        start = S - T if q_start is None else q_start
        if (mask.rule not in (Full(), Causal()) or not isinstance(start, (int, np.integer))
                or mask.prefix_B is not None or mask.q_segments_BT is not None):
            options |= {"score": _Features(), "scale": 1.0}
            return attend_by_rows(_weigh, q_BTNH, k_BSKH, v_BSKH, **options)
        causal = mask.rule == Causal()
        out = _sums(q_BTNH, k_BSKH, v_BSKH, causal, int(start), mask.k_lengths_B)
        return out.astype(v_BSKH.dtype)

    def slow(self, params, q_BTNH, k_BSKH, v_BSKH, *, allowed_BNTS, logits_BNTS, sink=None):
        (B, T, N, _), K = q_BTNH.shape, k_BSKH.shape[2]
        phi = np.vectorize(lambda x: x + 1 if x > 0 else np.exp(x))
        out = np.zeros((B, T, N, v_BSKH.shape[3]))
        for b, t, n in np.ndindex(B, T, N):
            g = n // (N // K)
            weights = {s: sum(phi(q_BTNH[b, t, n]) * phi(k_BSKH[b, s, g]))
                       for s in np.flatnonzero(allowed_BNTS[b, n, t])}
            for s, weight in weights.items():
                out[b, t, n] += weight / sum(weights.values()) * v_BSKH[b, s, g]
        return out


def features(x: jax.Array) -> jax.Array:
    """elu(x) + 1, written so that it stays above 0 where expm1(x) rounds to -1."""
    x = x.astype(wide(x.dtype))
    return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


class _Features(DotProduct):
    """The products of features as logits."""

    def project(self, params, q_BTNH, k_BSKH):
        return features(q_BTNH), features(k_BSKH)


def _weigh(products_BNTS: jax.Array, sink: None) -> jax.Array:
    products_BNTS = jnp.where(products_BNTS > -jnp.inf, products_BNTS, 0)
    total_BNT1 = jnp.sum(products_BNTS, axis=-1, keepdims=True)
    return products_BNTS / jnp.where(total_BNT1 > 0, total_BNT1, 1)


def _sums(q_BTNH, k_BSKH, v_BSKH, causal, start, lengths_B):
    """Output [B, T, N, W] from sums over keys; a query or key that meets nothing is zeroed."""
    (B, T, N, H), (S, K) = q_BTNH.shape, k_BSKH.shape[1:3]
    high = wide(q_BTNH.dtype)
    last_B1 = jnp.full((1, 1), S) if lengths_B is None else lengths_B[:, None]
    end_1T = start + jnp.arange(T)[None] + 1 if causal else jnp.full((1, T), S)
    sees = (jnp.minimum(end_1T, last_B1) > 0)[:, :, None, None]
    seen = ((jnp.arange(S)[None] < last_B1)
            & (jnp.arange(S)[None] < (start + T if causal else S)))[:, :, None, None]
    q = features(jnp.where(sees, q_BTNH, 0)).reshape(B, T, K, N // K, H)
    k = jnp.where(seen, features(jnp.where(seen, k_BSKH, 0)), 0)
    v = jnp.where(seen, v_BSKH, 0).astype(high)
    v = jnp.concatenate([v, jnp.ones((*v.shape[:3], 1), high)], axis=3)  # the sum of weights
    if causal:
        low, stop = (int(np.clip(x, 0, S)) for x in (start, start + T))
        front = min(T, max(0, -start))
        ends = [(0, 0), (front, T - front - (stop - low)), (0, 0), (0, 0)]
        near_k, near_v = (jnp.pad(x[:, low:stop], ends) for x in (k, v))
        mixed = _causal(q, near_k, near_v, _total(k[:, :low], v[:, :low]))
    else:
        mixed = jnp.einsum("BTKGH,BKHW->BTKGW", q, _total(k, v))
    mixed = mixed.reshape(B, T, N, -1)
    some = sees & (mixed[..., -1:] > 0)
    return jnp.where(some, mixed[..., :-1] / jnp.where(some, mixed[..., -1:], 1), 0)


def _total(k, v):
    return jnp.einsum("BSKH,BSKW->BKHW", k, v)


def _causal(q, k, v, before):
    """[B, T, K, G, W] where query t meets key t and those before; chunk after chunk."""
    B, T = q.shape[:2]
    c = min(T, CHUNK)
    q, k, v = (jnp.moveaxis(jnp.pad(x, [(0, 0), (0, -T % c)] + [(0, 0)] * (x.ndim - 2)).reshape(
        B, -1, c, *x.shape[2:]), 1, 0) for x in (q, k, v))
    upto = jnp.tril(jnp.ones((c, c), bool))

    @jax.checkpoint
    def chunk(total, x):
        q, k, v = x
        weights = jnp.where(upto, jnp.einsum("BTKGH,BSKH->BKGTS", q, k), 0)
        out = (jnp.einsum("BKGTS,BSKW->BTKGW", weights, v)
               + jnp.einsum("BTKGH,BKHW->BTKGW", q, total))
        return total + _total(k, v), out

    _, out = jax.lax.scan(chunk, before, (q, k, v))
    return jnp.moveaxis(out, 0, 1).reshape(B, -1, *out.shape[3:])[:, :T]
