"""Sigmoid attention (Ramapuram et al. 2024): every weight for itself, without a normaliser."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.attention._rows import attend_by_rows
from tx_jax.attention.variants import _base
from tx_jax.errors import UserError


@dataclass(frozen=True)
class Variant(_base.Variant):
    """Weights sigmoid(logit + b), in memory that grows with T + S.

    Attributes:
      bias: b. By default -log n, with n the keys that the row may see: all S without a mask, as in
        the paper; under a causal mask rows start near a sum of 1 each, and a cached decoding step
        equals the full pass.
      length: b = -log(length), the paper's rule for a fixed length, causal or not.
    """

    bias: float | None = None
    length: float | None = None

    refuses: ClassVar[Mapping[str, str]] = {
        "sink": "it has no normaliser that a sink could join",
        "implementation": "it is no softmax, which the implementations compute"}

    def __post_init__(self) -> None:
        if self.bias is not None and self.length is not None:
            raise UserError(f"sigmoid(bias={self.bias}, length={self.length}) gives b twice; give "
                            "bias or length.")
        if self.bias is not None and not _finite(self.bias):
            raise UserError(f"sigmoid(bias={self.bias!r}) needs a finite number, or none for the "
                            "rule -log n.")
        if self.length is not None and not (_finite(self.length) and self.length >= 1):
            raise UserError(f"sigmoid(length={self.length!r}) needs a length of at least 1.")

    def compute(self, params: Mapping[str, Any], q_BTNH: jax.Array, k_BSKH: jax.Array,
                v_BSKH: jax.Array, **options: Any) -> jax.Array:
        options = _base.checked(q_BTNH, k_BSKH, v_BSKH, **options)
        out = _base.empty(q_BTNH, k_BSKH, v_BSKH)
        if out is not None:
            return out
        return attend_by_rows(partial(_weigh, self._shift()), q_BTNH, k_BSKH, v_BSKH, **options)

    def _shift(self) -> float | None:
        return self.bias if self.length is None else -math.log(self.length)

    def slow(self, params, q_BTNH, k_BSKH, v_BSKH, *, allowed_BNTS, logits_BNTS, sink=None):
        (B, T, N, _), K = q_BTNH.shape, k_BSKH.shape[2]
        out = np.zeros((B, T, N, v_BSKH.shape[3]))
        for b, t, n in np.ndindex(B, T, N):
            seen = np.flatnonzero(allowed_BNTS[b, n, t])
            shift = self._shift()
            shift = -np.log(max(1, len(seen))) if shift is None else shift
            for s in seen:
                weight = 1 / (1 + np.exp(-logits_BNTS[b, n, t, s] - shift))
                out[b, t, n] += weight * v_BSKH[b, s, n // (N // K)]
        return out


def _weigh(shift: float | None, logits_BNTS: jax.Array, sink: None) -> jax.Array:
    """Weights; 0 at minus infinity."""
    seen = logits_BNTS > -jnp.inf
    if shift is None:
        n_BNT1 = jnp.sum(seen, axis=-1, keepdims=True).astype(logits_BNTS.dtype)
        logits_BNTS = logits_BNTS - jnp.log(jnp.maximum(n_BNT1, 1))
    else:
        logits_BNTS = logits_BNTS + shift
    return jax.nn.sigmoid(logits_BNTS)


def _finite(value: Any) -> bool:
    return (isinstance(value, (int, float)) and not isinstance(value, bool)
            and math.isfinite(value))
