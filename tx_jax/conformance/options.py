"""Options of the attention contract, their combinations, and random calls that use them."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.attention import Bias, Capabilities, Dropout, make_score, request_of
from tx_jax.masks import Causal, Dilated, Explicit, Global, Mask, Prefix, Window

# Every value of every option; `make_call` says what a word stands for.
OPTIONS: dict[str, list[Any]] = {
    "rule": [None, Causal(), Causal() & Window(2), Causal() | Prefix(2),
             Window(4) & Dilated(2) | Global(1), Explicit("10110 01000 11111 00000 10011"),
             ~Causal()],
    "examples": [None, "segments", "prefixes", "lengths"],
    "bias": [None, "BNTS", "N1S", "B1T1", "TS", "pair", "rows"],
    "softcap": [None, 0.7],
    "sink": [None, True],
    "dropout": [None, 0.4],
    "scale": [None, 0.3, "traced", "1/d", "log_n(2)"],
    "score": ["scaled_dot", "bilinear", "additive", "cosine", "dot"],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "lengths": [(3, 3), (2, 5), (5, 3)],
    "v_width": [4, 3],
    "q_start": [None, 1, "traced", "examples"],
    "dtype": ["float32", "bfloat16"],
}
PLAIN = {name: values[0] for name, values in OPTIONS.items()}
BATCH, WIDTH = 2, 4

Choice = Mapping[str, Any]
Call = tuple[tuple[np.ndarray, ...], dict[str, Any]]


def distance_bias(params: Any, head: Any, q_pos: Any, k_pos: Any) -> Any:
    """A pair bias that bends in its parameters; works on NumPy numbers and JAX arrays."""
    slope, offset = params["slope_N"][head], params["offset_N"][head]
    return offset - slope * slope * (q_pos - k_pos).astype(slope.dtype)


def gate_bias(params: Any, q_BTNH: jax.Array, logits_BNTS: jax.Array) -> jax.Array:
    """A row bias like CoPE: counts soft gates from the right, and reads the query."""
    gates = jax.nn.sigmoid(logits_BNTS)
    counts = jnp.flip(jnp.cumsum(jnp.flip(gates, -1), axis=-1), -1)
    lead_BNT1 = jnp.swapaxes(q_BTNH[..., :1].astype(gates.dtype), 1, 2)
    return params["gain_N"].astype(gates.dtype)[None, :, None, None] * lead_BNT1 * counts


def _slow_gate_bias(params: Any, n: int, q_H: np.ndarray, logits_S: np.ndarray) -> np.ndarray:
    gates = [0.0 if x == -np.inf else 1 / (1 + np.exp(-x)) for x in logits_S]
    return np.array([float(params["gain_N"][n]) * q_H[0] * sum(gates[s:])
                     for s in range(len(gates))])


gate_bias.slow = _slow_gate_bias


def make_call(choice: Choice, seed: int = 0, *, batch: int = BATCH, width: int = WIDTH,
              spread: float = 1.0, forbid: float = 0.0) -> Call:
    """Random arrays and keywords of one combination of OPTIONS, floats as float32 NumPy arrays.

    Args:
      choice: option -> value, as in OPTIONS; what it leaves out is plain.
      batch, width: number of examples, and width of queries and keys (v_width is cut to it).
      spread: standard deviation of queries and keys.
      forbid: share of the entries of a dense bias that are minus infinity.
    """
    choice = PLAIN | dict(choice)
    rng = np.random.default_rng(seed)
    (N, K), (T, S), B = choice["heads"], choice["lengths"], batch
    v_width = width if choice["v_width"] == WIDTH else max(1, width - 1)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    args = tuple(x.astype(jnp.dtype(choice["dtype"])).astype(np.float32) for x in
                 (spread * normal(B, T, N, width), spread * normal(B, S, K, width),
                  normal(B, S, K, v_width)))
    score = make_score(choice["score"])
    params = {name: np.asarray(p) + np.float32(0.1) * normal(*p.shape) for name, p in
              score.init(jax.random.key(0), {"N": N, "H": width}).items()}
    starts = {"traced": lambda: jnp.int32(rng.integers(0, S)),
              "examples": lambda: jnp.asarray(rng.integers(0, S, B), jnp.int32)}
    dropout = choice["dropout"] and Dropout(choice["dropout"], jnp.uint32(rng.integers(2**32)))
    scale = np.float32(rng.uniform(0.2, 0.6)) if choice["scale"] == "traced" else choice["scale"]
    start = choice["q_start"]
    return args, {
        "mask": _make_mask(choice, rng, B, T, S), "score": score, "score_params": params,
        "bias": _make_bias(choice["bias"], rng, (B, N, T, S), forbid), "dropout": dropout,
        "softcap": choice["softcap"], "scale": scale, "sink": normal(N) if choice["sink"] else None,
        "q_start": starts[start]() if isinstance(start, str) else start}


def _make_mask(choice: Choice, rng: Any, B: int, T: int, S: int) -> Mask | None:
    rule, kind = choice["rule"], choice["examples"]
    if rule is None and kind is None:
        return None
    mask = Mask() if rule is None else Mask(rule)
    if kind is None:
        return mask
    if kind == "segments":  # documents 1 and 2 in order, padding anywhere
        keys = np.sort(rng.integers(1, 3, (B, max(S, T))), axis=1)
        keys = keys * (rng.random(keys.shape) < 0.8)
        cut = lambda n: jnp.asarray(keys[:, keys.shape[1] - n:], jnp.int32)  # noqa: E731
        return replace(mask, q_segments_BT=cut(T), k_segments_BS=cut(S))
    counts = jnp.asarray(rng.integers(0, S + 1, B), jnp.int32)
    return replace(mask, **{"prefix_B" if kind == "prefixes" else "k_lengths_B": counts})


def _make_bias(kind: str | None, rng: Any, shape_BNTS: tuple[int, ...], forbid: float) -> Any:
    B, N, T, S = shape_BNTS
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    match kind:
        case None:
            return None
        case "pair":  # positions that are no indices: every second key, of each example its own
            places = jnp.asarray(np.cumsum(rng.integers(0, 3, (B, S)), axis=1), jnp.int32)
            return Bias(distance_bias, {"slope_N": normal(N), "offset_N": normal(N)},
                        k_pos_BS=places if rng.random() < 0.5 else None)
        case "rows":
            return Bias(gate_bias, {"gain_N": normal(N)}, kind="rows")
    shape = {"BNTS": (B, N, T, S), "N1S": (N, 1, S), "B1T1": (B, 1, T, 1), "TS": (T, S)}[kind]
    return np.where(rng.random(shape) < forbid, np.float32(-np.inf), normal(*shape))


def covers(choice: Choice, capabilities: Capabilities) -> bool:
    """Whether an implementation with these capabilities declares to do the combination."""
    choice = {"dtype": first_dtype(capabilities)} | dict(choice)
    args, options = make_call(choice)
    args = [jax.ShapeDtypeStruct(x.shape, jnp.dtype(choice["dtype"])) for x in args]
    options = {n: o for n, o in options.items() if n != "score_params"}
    if isinstance(options["scale"], np.floating):
        options["scale"] = jnp.asarray(options["scale"])
    return not capabilities.lacks(request_of(*args, **options))


def first_dtype(capabilities: Capabilities) -> str:
    """The dtype to compare in: the most exact one that the implementation takes."""
    names = ("float32", "float16", "bfloat16")
    return next(n for n in names if capabilities.dtypes is None or n in capabilities.dtypes)


def all_pairs(capabilities: Capabilities) -> list[dict[str, Any]]:
    """Combinations in which every pair of declared option values occurs."""
    return cover_pairs(OPTIONS, {n: [i for i, value in enumerate(values)
                                     if covers({n: value}, capabilities)]
                                 for n, values in OPTIONS.items()})


def cover_pairs(options: Mapping[str, Sequence[Any]], able: Mapping[str, Sequence[int]]
                ) -> list[dict[str, Any]]:
    """Combinations in which every sensible pair of option values occurs (greedy cover).

    Args:
      able: for each option, the indices of the values to take.
    """
    names = list(options)
    todo = {((a, i), (b, j)) for a, b in itertools.combinations(names, 2)
            for i in able[a] for j in able[b]
            if sensible({a: options[a][i], b: options[b][j]})}
    rng, rows = np.random.default_rng(0), []
    while todo:
        first = min(todo)
        best, covered = None, set()
        for _ in range(60):
            row = {n: able[n][rng.integers(len(able[n]))] for n in names} | dict(first)
            if not sensible({n: options[n][i] for n, i in row.items()}):
                continue
            hits = {p for p in itertools.combinations(row.items(), 2) if p in todo}
            if best is None or len(hits) > len(covered):
                best, covered = row, hits
        rows.append({n: options[n][i] for n, i in best.items()})
        todo -= covered
    return rows


def sensible(choice: Choice) -> bool:
    """Dot and cosine refuse the scale rules."""
    return not (choice.get("score") in ("dot", "cosine")
                and choice.get("scale") in ("1/d", "log_n(2)"))


def split(call: Call, dtype: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What is differentiated, what is traced besides, and what is static, of one call."""
    args, options = call
    high = jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32
    bias = options["bias"]
    slopes = {"args": tuple(jnp.asarray(x, dtype) for x in args)}
    for name in ("sink", "score_params", "scale", "bias"):
        value = options[name].params if isinstance(options[name], Bias) else options[name]
        if value is not None and not isinstance(value, (str, float)):
            slopes[name] = jax.tree.map(lambda x: jnp.asarray(x, high), value)
    traced = {"mask": options["mask"], "dropout": options["dropout"]}
    if isinstance(bias, Bias):
        traced["bias"] = replace(bias, params=None)
    if isinstance(options["q_start"], jax.Array):
        traced["q_start"] = options["q_start"]
    static = {n: o for n, o in options.items() if n not in slopes and n not in traced}
    return slopes, traced, static


def join(slopes: dict[str, Any], traced: dict[str, Any], static: dict[str, Any]) -> Call:
    """The call that `split` took apart."""
    options = static | traced | {n: o for n, o in slopes.items() if n != "args"}
    if isinstance(traced.get("bias"), Bias):
        options["bias"] = replace(traced["bias"], params=slopes["bias"])
    return slopes["args"], options
