"""Combinations of a few options on tiny arrays; the oracle is that of `tx_jax.conformance`."""

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.attention import Dropout, make_score
from tx_jax.conformance import slow_attend, slow_keep
from tx_jax.conformance.options import cover_pairs
from tx_jax.masks import Causal, Mask, Window

__all__ = ["OPTIONS", "PAIRS", "make_call", "slow_attend", "slow_keep", "split"]

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


PAIRS = cover_pairs(OPTIONS, {name: range(len(values)) for name, values in OPTIONS.items()})


def split(args, options, dtype):
    """What is differentiated or traced (as JAX arrays of `dtype`), and the other options."""
    names = [n for n in ("bias", "sink", "score_params") if options[n] is not None]
    arrays = {"args": args, "options": {n: options[n] for n in names}}
    arrays = jax.tree.map(lambda x: jnp.asarray(x, dtype), arrays)
    return arrays, {n: o for n, o in options.items() if n not in names}
