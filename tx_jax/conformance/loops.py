"""The attention contract as loops in float64, written from its text and not from other code."""

from typing import Any

import numpy as np

from tx_jax.attention import Bias, Dropout, make_score
from tx_jax.masks import Mask


def slow_attend(q, k, v, *, mask=None, bias=None, score="scaled_dot", scale=None, softcap=None,
                dropout=None, sink=None, q_start=None, score_params=None) -> np.ndarray:
    """Attention [B, T, N, H of v] in float64; arguments as `tx_jax.attention.attend`.

    A bias function has to work on NumPy numbers (kind "pair"), or to carry its own loop as an
    attribute: `function.slow(params, n, q_H, logits_S) -> bias_S` (kind "rows").
    """
    (B, T, N, H), S, K = q.shape, k.shape[1], k.shape[2]
    score = make_score(score)
    scale = score.default_scale if scale is None else scale
    raw = score.slow_logits(score_params, q, k)
    starts = np.broadcast_to(np.asarray(S - T if q_start is None else q_start), (B,))
    out = np.zeros((B, T, N, v.shape[3]))
    for b, n, t in np.ndindex(B, N, T):
        q_idx = int(starts[b]) + t
        seen = [s for s in range(S) if slow_allowed(mask, b, t, q_idx, s)]
        logits = np.full(S, -np.inf)
        for s in seen:
            x = raw[b, n, t, s] * _factor(scale, H, len(seen))
            logits[s] = x if softcap is None else float(softcap) * np.tanh(x / float(softcap))
        logits = logits + _bias_row(bias, b, n, t, q_idx, q, logits, (B, N, T, S))
        peak = logits.max(initial=-np.inf)
        if peak == -np.inf:
            continue
        total = np.exp(logits - peak).sum()
        total += 0 if sink is None else np.exp(np.float64(sink[n]) - peak)
        for s in seen:
            weight = np.exp(logits[s] - peak) / total
            out[b, t, n] += (_kept(dropout, b, n, q_idx, s) * weight
                             * np.float64(v[b, s, n // (N // K)]))
    return out


def slow_allowed(mask: Any, b: int, t: int, q_idx: int, s: int) -> bool:
    """Whether query t of example b, at index q_idx, sees key s."""
    if mask is None:
        return True
    if not isinstance(mask, Mask):
        return bool(mask.allowed(q_idx, s))
    allowed = bool(mask.rule.allowed(q_idx, s))
    if mask.prefix_B is not None:
        allowed = allowed or s < int(mask.prefix_B[b])
    if mask.k_lengths_B is not None:
        allowed = allowed and s < int(mask.k_lengths_B[b])
    if mask.q_segments_BT is not None:
        allowed = allowed and int(mask.q_segments_BT[b, t]) == int(mask.k_segments_BS[b, s]) != 0
    return allowed


def slow_keep(rate: float, seed: int, b: int, n: int, q: int, k: int) -> bool:
    """The dropout decision in Python integers."""
    def mix(word):
        word = (word ^ (word >> 16)) * 0x85EBCA6B % 2**32
        word = (word ^ (word >> 13)) * 0xC2B2AE35 % 2**32
        return word ^ (word >> 16)
    word = mix(seed ^ 0x9E3779B9)
    for index, odd in ((b, 0x85EBCA77), (n, 0xC2B2AE3D), (q, 0x27D4EB2F), (k, 0x165667B1)):
        word = mix((word + (index + 1) * odd) % 2**32)
    return word >= round(rate * 2**32)


def _kept(dropout: Dropout | None, *indices: int) -> float:
    if dropout is None or not dropout.rate:
        return 1.0
    return slow_keep(dropout.rate, int(dropout.seed), *indices) / (1 - dropout.rate)


def _factor(scale: Any, H: int, seen: int) -> float:
    if not isinstance(scale, str):
        return float(scale)
    if scale.startswith("log_n("):
        length = float(scale[len("log_n("):-1])
        return H**-0.5 * max(1.0, np.log(max(seen, 1)) / np.log(length))
    return {"none": 1.0, "1/sqrt(d)": H**-0.5, "1/d": 1 / H}[scale]


def _bias_row(bias: Any, b: int, n: int, t: int, q_idx: int, q: np.ndarray, logits_S: np.ndarray,
              shape_BNTS: tuple[int, ...]) -> np.ndarray:
    """The bias on one row of logits [S], which hold minus infinity where the mask forbids."""
    S = len(logits_S)
    if bias is None:
        return np.zeros(S)
    if not isinstance(bias, Bias):
        return np.broadcast_to(np.asarray(bias, np.float64), shape_BNTS)[b, n, t]
    if bias.kind == "rows":
        return bias.function.slow(bias.params, n, np.float64(q[b, t, n]), logits_S)

    def place(positions, index, default):
        if positions is None:
            return np.int64(default)
        positions = np.asarray(positions)
        return np.int64(positions[min(b, len(positions) - 1), index])

    query = place(bias.q_pos_BT, t, q_idx)
    return np.array([float(bias.function(bias.params, n, query, place(bias.k_pos_BS, s, s)))
                     for s in range(S)])
