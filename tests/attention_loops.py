"""The attention contract written as loops in float64, and option combinations to try it on."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.attention import (
    Dropout,
    make_score,
)
from tx_jax.masks import Causal, Mask, Window

OPTIONS = {
    "mask": [None, Causal(), Causal() & Window(2), "segments", "prefix"],
    "bias": [None, "BNTS", "N1S"],
    "softcap": [None, 0.7],
    "sink": [None, True],
    "dropout": [None, 0.4],
    "scale": [None, 0.3, "1/d", "log_n(2)"],
    "score": ["scaled_dot", "bilinear", "additive", "cosine", "dot"],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "lengths": [(3, 3), (2, 4), (4, 2)],
    "v_width": [4, 3],
    "q_start": [None, 1],
}


def slow_keep(rate, seed, b, n, q, k):
    """The dropout decision in Python integers."""
    def mix(word):
        word = (word ^ (word >> 16)) * 0x85EBCA6B % 2**32
        word = (word ^ (word >> 13)) * 0xC2B2AE35 % 2**32
        return word ^ (word >> 16)
    word = mix(seed ^ 0x9E3779B9)
    for index, odd in ((b, 0x85EBCA77), (n, 0xC2B2AE3D), (q, 0x27D4EB2F), (k, 0x165667B1)):
        word = mix((word + (index + 1) * odd) % 2**32)
    return word >= round(rate * 2**32)


def slow_attend(q, k, v, *, mask=None, bias=None, score="scaled_dot", scale=None, softcap=None,
                dropout=None, sink=None, q_start=None, score_params=None):
    """Attention as loops in float64, from the text of the contract."""
    (B, T, N, H), S, K = q.shape, k.shape[1], k.shape[2]
    score = make_score(score)
    scale = score.default_scale if scale is None else scale
    raw = score.slow_logits(score_params, q, k)
    if bias is not None:
        bias = np.broadcast_to(np.float64(bias), (B, N, T, S))
    start = S - T if q_start is None else q_start
    out = np.zeros((B, T, N, v.shape[3]))
    for b, n, t in np.ndindex(B, N, T):
        seen = [s for s in range(S) if _allowed(mask, b, t, start + t, s)]
        factor = {"none": 1.0, "1/sqrt(d)": H**-0.5, "1/d": 1 / H,
                  "log_n(2)": H**-0.5 * max(1.0, np.log(max(len(seen), 1)) / np.log(2))}
        factor = factor[scale] if isinstance(scale, str) else float(scale)
        logits = {}
        for s in seen:
            x = raw[b, n, t, s] * factor
            x = x if softcap is None else softcap * np.tanh(x / softcap)
            logits[s] = x if bias is None else x + bias[b, n, t, s]
        total = sum(np.exp(x) for x in logits.values())
        total += 0 if sink is None else np.exp(np.float64(sink[n]))
        for s, x in logits.items():
            weight = np.exp(x) / total
            if dropout is not None:
                kept = slow_keep(dropout.rate, int(dropout.seed), b, n, start + t, s)
                weight = weight / (1 - dropout.rate) if kept else 0.0
            out[b, t, n] += weight * np.float64(v[b, s, n // (N // K)])
    return out


def _allowed(mask, b, t, q_idx, k_idx):
    if mask is None:
        return True
    rule = mask.rule if isinstance(mask, Mask) else mask
    allowed = bool(rule.allowed(q_idx, k_idx))
    if isinstance(mask, Mask) and mask.prefix_B is not None:
        allowed = allowed or k_idx < int(mask.prefix_B[b])
    if isinstance(mask, Mask) and mask.q_segments_BT is not None:
        q_seg, k_seg = int(mask.q_segments_BT[b, t]), int(mask.k_segments_BS[b, k_idx])
        allowed = allowed and q_seg == k_seg != 0
    return allowed


def make_call(choice, seed=0, dtype=np.float32):
    """Arrays and keywords of one combination of OPTIONS, as NumPy arrays."""
    rng = np.random.default_rng(seed)
    (N, K), (T, S), B, H = choice["heads"], choice["lengths"], 2, 4
    normal = lambda *shape: rng.normal(size=shape).astype(dtype)  # noqa: E731
    q, k, v = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, choice["v_width"])
    score = make_score(choice["score"])
    params = {name: np.asarray(p, dtype) for name, p in
              score.init(jax.random.key(seed), {"N": N, "H": H}).items()}
    mask = choice["mask"]
    if mask == "segments":
        mask = Mask(Causal(), jnp.array([[1, 1, 2, 2][4 - T:], [0, 1, 1, 0][4 - T:]]),
                    jnp.array([[1, 1, 2, 2][4 - S:], [0, 1, 1, 0][4 - S:]]))
    elif mask == "prefix":
        mask = Mask(Causal(), prefix_B=jnp.array([2, 0]))
    shape = {None: None, "BNTS": (B, N, T, S), "N1S": (N, 1, S)}[choice["bias"]]
    drop = choice["dropout"] and Dropout(choice["dropout"], jnp.uint32(seed + 7))
    options = {"mask": mask, "bias": None if shape is None else normal(*shape), "score": score,
               "softcap": choice["softcap"], "dropout": drop, "scale": choice["scale"],
               "sink": normal(N) if choice["sink"] else None, "q_start": choice["q_start"],
               "score_params": params}
    return (q, k, v), options


def all_pairs():
    """Combinations in which every pair of option values occurs (greedy cover)."""
    names = list(OPTIONS)
    todo = {((a, i), (b, j)) for a, b in itertools.combinations(names, 2)
            for i in range(len(OPTIONS[a])) for j in range(len(OPTIONS[b]))
            if _sensible({a: OPTIONS[a][i], b: OPTIONS[b][j]})}
    rng, rows = np.random.default_rng(0), []
    while todo:
        first = min(todo)
        best, covered = None, set()
        for _ in range(60):
            row = {n: int(rng.integers(len(OPTIONS[n]))) for n in names} | dict(first)
            if not _sensible({n: OPTIONS[n][i] for n, i in row.items()}):
                continue
            hits = {p for p in itertools.combinations(row.items(), 2) if p in todo}
            if best is None or len(hits) > len(covered):
                best, covered = row, hits
        rows.append({n: OPTIONS[n][i] for n, i in best.items()})
        todo -= covered
    return rows


def _sensible(choice):
    """Dot and cosine refuse the scale rules; a test of its own says so."""
    return not (choice.get("score") in ("dot", "cosine")
                and choice.get("scale") in ("1/d", "log_n(2)"))


PAIRS = all_pairs()


def split(args, options, dtype):
    """What is differentiated or traced (as JAX arrays of `dtype`), and the other options."""
    names = [n for n in ("bias", "sink", "score_params") if options[n] is not None]
    arrays = {"args": args, "options": {n: options[n] for n in names}}
    arrays = jax.tree.map(lambda x: jnp.asarray(x, dtype), arrays)
    return arrays, {n: o for n, o in options.items() if n not in names}
