"""Tables of the cache study, from ledger rows, and of what fits on which device."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments._decoding import ARMS, BASELINE
from tx_jax import limits, models
from tx_jax.config import ModelConfig
from tx_jax.study import statistics as st
from tx_jax.study.tables import Bold, Table, interval, number, ratio

Row = dict[str, Any]
BATCH_CONTEXT = 8192  # at which rows are counted

# name -> (configuration, vocabulary, context that it was trained on). Shapes only: GPT-2 (Radford
# et al. 2019, table 2) with its biases left out, Llama 3 (Grattafiori et al. 2024, table 3).
_LLAMA = {"kv_heads": 8, "mlp": "swiglu", "positions": "rope(base=500000)", "dtype": "bfloat16",
          "embeddings": "untied"}
KNOWN = {
    "GPT-2": (ModelConfig(layers=12, d_model=768, heads=12, norm="layer", positions="learned"),
              50257, 1024),
    "Llama 3 8B": (ModelConfig(layers=32, d_model=4096, heads=32, d_ff=14336, **_LLAMA), 128256,
                   8192),
    "Llama 3 70B": (ModelConfig(layers=80, d_model=8192, heads=64, d_ff=28672, **_LLAMA), 128256,
                    8192),
}


def groups(rows: Sequence[Row]) -> dict[int, dict[str, Row]]:
    """length -> arm -> row."""
    found: dict[int, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["axes"]["length"], {})[row["arm"]] = row
    return found


def logs(row: Row) -> dict[int, float]:
    """round -> logarithm of the time over that of the baseline."""
    return {i: math.log(x) for i, x in enumerate(row["metrics"]["ratios"])}


def commands(rows: Sequence[Row]) -> tuple[tuple[str, str], ...]:
    """Label and command of every row."""
    return tuple((f"{r['arm']} {' '.join(f'{k}={v}' for k, v in r['axes'].items())} "
                  f"seed={r['seed']}", r["command"]) for r in rows if "command" in r)


def time_table(rows: Sequence[Row]) -> Table:
    """Time of the baseline, and of the others over it."""
    arms, lines = [a for a in ARMS if a != BASELINE], []
    for length, group in groups(rows).items():
        best = st.winners({a: logs(r) for a, r in group.items()}, lower_is_better=True)
        base = group.get(BASELINE)
        lines.append((str(length), "–" if base is None else
                      number(1e3 * base["metrics"]["second"], digits=3),
                      *("–" if a not in group else Bold(ratio(group[a])) if a in best else
                        ratio(group[a]) for a in arms)))
    return Table("Time of a token at a full context", ("context", f"{BASELINE} (ms)", *arms),
                 tuple(lines), caption=f"Time over that of {BASELINE}, median over rounds with "
                 "95 % CI; bold: the fastest, where it beats every other arm after Holm's "
                 "correction.",
                 commands=commands(rows))


def flops_table(rows: Sequence[Row]) -> Table:
    """Operations of a token: closed form and XLA's count."""
    lines = []
    for length, group in groups(rows).items():
        for arm in [a for a in ARMS if a in group]:
            m = group[arm]["metrics"]
            lines.append((str(length), arm, number(m["flops"]), number(m["counted"]),
                          f"{m['flops'] / m['counted'] - 1:+.1%}"))
    return Table("Operations of a token", ("context", "arm", "closed form", "counted by XLA",
                                           "error"), tuple(lines),
                 caption="With a cache 2 N + 4 L d S for S keys, without one 2 N n + 4 L d n^2. "
                 "The rest is softmax, norms and, for int8, turning numbers back.")


def memory_table(rows: Sequence[Row]) -> Table:
    """Bytes of the caches, and of a step beside them."""
    lines = []
    for size, group in groups(rows).items():
        for arm in [a for a in ARMS if a in group]:
            m, layers = group[arm]["metrics"], group[arm]["settings"]["layers"]
            lines.append((str(size), arm, str(m["places"]), str(m["cache"]), str(m["formula"]),
                          str(m["alias"]), str(m["temp"]),
                          number(m["temp"] / (m["cache"] / layers), digits=3)))
    return Table("Memory of a step (bytes)", (
        "context", "arm", "places", "cache", "2 L K H S B x bytes", "written in place",
        "temporary", "temporary / a layer's cache"), tuple(lines),
        caption="A step that copied keys or values would hold at least half a layer's cache beside "
                "it, at every size. Planned by the compiler, so the same in every run.",
        commands=commands(rows))


def fits_table(rows: Sequence[Row]) -> Table:
    """The predictor against XLA."""
    lines = [(r["arm"], str(r["axes"]["length"]), str(r["axes"]["batch"]),
              *(number(r["metrics"][name] / 1e6, digits=4) for name in
                ("weights", "cache", "work", "predicted", "planned")),
              f"{r['metrics']['error']:+.1%}") for r in rows]
    return Table("Memory of a generation (MB)", (
        "arm", "context", "rows", "weights", "cache", "between", "predicted", "planned by XLA",
        "error"), tuple(lines), caption="Half of the context is the prompt, read in chunks. "
        "Weights and cache are exact, what lies between is an estimate.", commands=commands(rows))


def rounding_table(rows: Sequence[Row]) -> Table:
    """What an int8 cache does to logits."""
    def over(name):
        return interval(st.summarize([r["metrics"][name] for r in rows], bootstrap=0))

    return Table("Logits with an int8 cache against the model's own", (
        "context", "largest difference", "spread of the logits", "same likeliest token", "seeds"),
        ((str(rows[0]["axes"]["length"]), over("max_difference"), over("spread"),
          over("agreement"), str(len(rows))),),
        caption="Random weights and a random text: logits lie close together there, so that tokens "
                "change places more easily than in a trained model. Mean over seeds with 95 % CI.",
        commands=commands(rows))


def device_table(devices: Mapping[str, int], known: Mapping[str, tuple[ModelConfig, int, int]]
                 ) -> Table:
    """The largest context and batch by device and model, closed forms only."""
    lines = []
    for name, (cfg, vocab, context) in known.items():
        model = models.build(cfg, vocab, context)
        for device, size in devices.items():
            longest = limits.largest_context(model, size)
            rows = limits.largest_batch(model, size, BATCH_CONTEXT)
            defined = "any" if longest.defined is None else str(longest.defined)
            lines.append((name, device, number(limits.weight_bytes(model) / 1e9, digits=3),
                          number(limits.cache_bytes(cfg, 1, 1) / 1024, digits=4),
                          str(longest.holds), defined, str(context), longest.bound,
                          str(rows.holds)))
    return Table("What fits", (
        "model", "device", "weights (GB)", "cache (KiB per token)", "tokens the hardware holds",
        "positions defined", "trained on", "what ends a text first",
        f"rows of {BATCH_CONTEXT} tokens"), tuple(lines),
        caption="Predicted, not run: the whole memory of one device by its data sheet, prompts "
                f"read {limits.CHUNK} tokens at a time; 0: not even the weights and one token fit. "
                "What a model does beyond the context it was trained on is another question. "
                "Rows count what the hardware holds, whether or not a model knows that many "
                "positions. This study's model was built for its context and not trained.")
