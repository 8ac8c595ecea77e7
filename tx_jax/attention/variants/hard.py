"""Hard attention: each query looks up the key with the largest logit, as in a dictionary."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.attention._rows import attend_by_rows
from tx_jax.attention.reference import softmax
from tx_jax.attention.variants import _base
from tx_jax.errors import UserError


@dataclass(frozen=True)
class Variant(_base.Variant):
    """The value of the best key; ties share the weight equally, in memory that grows with T + S.

    Sharing is the limit of softmax(logits / temperature) as the temperature goes to 0. At 0 no
    gradient reaches queries, keys, bias and sink, and values get that of what was looked up.

    Attributes:
      temperature: above 0 it is that softmax, 1 being attention as usual.
    """

    temperature: float = 0.0

    refuses: ClassVar[Mapping[str, str]] = {
        "implementation": "the implementations compute a softmax, and this is its limit"}

    def __post_init__(self) -> None:
        t = self.temperature
        if isinstance(t, bool) or not isinstance(t, (int, float)) or not 0 <= t < math.inf:
            raise UserError(f"hard(temperature={t!r}) needs a finite number of at least 0.")

    def compute(self, params: Mapping[str, Any], q_BTNH: jax.Array, k_BSKH: jax.Array,
                v_BSKH: jax.Array, **options: Any) -> jax.Array:
        options = _base.checked(q_BTNH, k_BSKH, v_BSKH, **options)
        out = _base.empty(q_BTNH, k_BSKH, v_BSKH)
        if out is not None:
            return out
        weigh = partial(_soft, self.temperature) if self.temperature else _look_up
        return attend_by_rows(weigh, q_BTNH, k_BSKH, v_BSKH, **options)

    def slow(self, params, q_BTNH, k_BSKH, v_BSKH, *, allowed_BNTS, logits_BNTS, sink=None):
        (B, T, N, _), K = q_BTNH.shape, k_BSKH.shape[2]
        out = np.zeros((B, T, N, v_BSKH.shape[3]))
        for b, t, n in np.ndindex(B, T, N):
            logits = {s: logits_BNTS[b, n, t, s] for s in np.flatnonzero(allowed_BNTS[b, n, t])}
            if not logits:
                continue
            joint = logits | ({} if sink is None else {"sink": float(sink[n])})
            peak = max(joint.values())
            for s in logits:
                if self.temperature:
                    total = sum(np.exp((x - peak) / self.temperature) for x in joint.values())
                    weight = np.exp((logits[s] - peak) / self.temperature) / total
                else:
                    weight = (logits[s] == peak) / sum(x == peak for x in joint.values())
                out[b, t, n] += weight * v_BSKH[b, s, n // (N // K)]
        return out


def _soft(temperature: float, logits_BNTS: jax.Array, sink: jax.Array | None) -> jax.Array:
    return softmax(logits_BNTS / temperature, None if sink is None else sink / temperature)


def _look_up(logits_BNTS: jax.Array, sink: jax.Array | None) -> jax.Array:
    """Equal weights for the best keys; a sink that is better than all takes everything."""
    logits_BNTS = jax.lax.stop_gradient(logits_BNTS)
    peak_BNT1 = jnp.max(logits_BNTS, axis=-1, keepdims=True)
    rivals = 0.0
    if sink is not None:
        sink_N11 = sink.astype(logits_BNTS.dtype)[None, :, None, None]
        peak_BNT1 = jnp.maximum(peak_BNT1, sink_N11)
        rivals = (sink_N11 == peak_BNT1).astype(logits_BNTS.dtype)
    best = (logits_BNTS == peak_BNT1) & (logits_BNTS > -jnp.inf)
    count = jnp.sum(best, axis=-1, keepdims=True).astype(logits_BNTS.dtype) + rivals
    return best.astype(count.dtype) / jnp.maximum(count, 1)
