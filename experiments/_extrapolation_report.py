"""What the length study says: claims, tables and figures from ledger rows alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import _extrapolation_claims as claims
from experiments._extrapolation_models import ARMS, METHODS
from experiments._extrapolation_settings import Settings
from experiments._probes_report import NOTES as PROBE_NOTES
from experiments._probes_report import probes
from tx_jax.study import figures, tables
from tx_jax.study import statistics as st
from tx_jax.study.figures import Figure
from tx_jax.study.report import Report, run_facts
from tx_jax.study.tables import Table
from tx_jax.study.verdicts import Claim, judge_all

Row = dict[str, Any]
Found = tuple[list[Claim], list[Table], list[Figure]]
_WORDS = {"windows": "non-overlapping windows", "sliding": "sliding window with full context"}
_NATS = "nats per token"


def make_report(settings: Settings, rows: list[Row]) -> Report:
    """The report over the parts that have rows."""
    found: Found = ([], [], [])
    for part, make in REPORTS.items():
        own = [row for row in rows if row["part"] == part]
        for total, new in zip(found, make(settings, own) if own else ([], [], []), strict=True):
            total += new
    return Report(
        "Length extrapolation",
        ("Models are trained on rows of L tokens and read longer ones. Every claim is a comparison "
         "over paired seeds: equal seeds share initial parameters where shapes allow, and the "
         "order of all batches.",
         "Two protocols score the same target tokens at every length. In non-overlapping windows "
         "the tokens at the start of a window have little context, and longer windows have fewer "
         "of them: a loss that falls there need not mean that context is used. In the sliding "
         "window every scored token has nearly the whole window before it; what falls there is "
         "gained from context."),
        verdicts=judge_all(found[0]), tables=tuple(found[1]), figures=tuple(found[2]),
        notes=(*NOTES, *(PROBE_NOTES if "probes" in settings.parts else ()),
               f"The p-values of the published claims are corrected by Holm over these "
               f"{len(found[0])} claims; intervals are of single comparisons."),
        facts=run_facts(rows))


NOTES = (
    "Intervals are 95 % t-intervals over seeds; they hold what training varies, not which text is "
    "scored: that is the same for all arms, seeds and lengths.",
    "A run of this size cannot show perplexities of large models, nor how far a scheme reaches "
    "with thousands of tokens in training. Models of 0.1 M parameters use hardly more than some "
    "dozens of characters, so that little can be gained from a longer context by any scheme.",
    "With a single value in --lrs the learning rate is not tuned per arm, and differences between "
    "schemes at L hold for that value only. With several the best of an arm is taken, by the loss "
    "at L on the half of the held-out text that the tables by length do not read.",
    "Learned positions: the rows of the table past L are as they were drawn; nothing else can be "
    "said of a table beyond its training.",
    "Sinusoids have amplitude 1 and are added to token embeddings that start at a standard "
    "deviation of 0.02, without the factor sqrt(d) of Vaswani et al. 2017 (3.4): that scheme "
    "starts slowly, and a short run shows how it breaks beyond L better than how good it is at L.",
    "Extension: dynamic_ntk is the form that Hugging Face runs (s = 2 l / L - 1 at length l); the "
    "form of the paper is that of ntk wherever l = s L. It is plain RoPE up to L.",
    "Extension: with the published alpha:beta of 1:32 no pair of a head is left alone below "
    "L = 202, and by_parts and yarn are nearly PI (Peng et al. 2023, section 3.2); so alpha:beta "
    "is chosen among the given ones, on text that no other table shows. PI and NTK have no such "
    "choice. The temperature of yarn was fitted on LLaMA and is not fitted here.",
    "Fine-tuning runs at a constant learning rate with a fresh optimizer: every point of a curve "
    "is a whole fine-tuning of that many steps.")


def by_length(rows: Sequence[Row], protocol: str) -> list[Row]:
    """A row per length, with `length` among its axes and its loss as the only metric."""
    return [row | {"axes": {"length": int(T), **row["axes"]}, "metrics": {"loss": nats}}
            for row in rows
            # A ledger sorts its keys as text: 1024 would come before 128.
            for T, nats in sorted(row["metrics"][protocol].items(), key=lambda item: int(item[0]))]


def _mean(rows: Sequence[Row], metric: str = "loss") -> str:
    return tables.interval(st.summarize(list(tables.values(rows, metric).values()), bootstrap=0))


def _order(rows: Sequence[Row], known: Sequence[str]) -> list[str]:
    here = {row["arm"] for row in rows}
    return [arm for arm in known if arm in here]


def schemes(settings: Settings, rows: list[Row]) -> Found:
    """Claims, tables and figures of the part `schemes`."""
    tuned, notes = tables.tune(rows, "tuning", over="lr", by=())
    arms = _order(rows, tuple(ARMS))
    made = [_length_table(tuned, arms, protocol) for protocol in _WORDS]
    made += [_rise_table(tuned, arms, settings.context)]
    if "rope" in arms:
        made.append(tables.ablation_table(
            by_length(tuned, "sliding"), "loss", "rope", by=("length",), show=("lr",), arms=arms,
            title="Schemes against rope, sliding window", label=f"loss ({_NATS})", notes=notes))
    made.append(tables.ablation_table(
        rows, "tuning", "rope" if "rope" in arms else arms[0], by=("lr",), arms=arms,
        title="Loss at L by learning rate, tuning half", label=f"loss ({_NATS})"))
    drawn = [_heat(tuned, arms, settings.context, protocol) for protocol in _WORDS]
    drawn += [figures.lines(
        by_length(tuned, protocol), "loss", "length", name=f"schemes_{protocol}", arms=arms,
        ylabel=_NATS, xlabel="length of the window", title=f"Loss by length: {words}",
        caption=f"Trained at {settings.context}; mean over seeds with 95 % CI.")
        for protocol, words in _WORDS.items()]
    return claims.schemes(tuned, settings), made, [*drawn, _positions(tuned, arms, settings)]


def _length_table(rows: Sequence[Row], arms: Sequence[str], protocol: str) -> Table:
    groups = tables.split(by_length(rows, protocol), ("length",))
    lines = [(arm, *(_mean(g[arm]) for g in groups.values())) for arm in arms]
    scored = {"windows": "every token of a window counts",
              "sliding": "the last tokens of a window count, each with full context"}[protocol]
    return Table(f"Loss by length: {_WORDS[protocol]}",
                 ("scheme", *(str(g[0][1]) for g in groups)), tuple(lines),
                 caption=f"Nats per token, mean over seeds with 95 % CI; {scored}. The same "
                         "targets at every length.",
                 commands=tuple((f"{r['arm']} lr={r['axes']['lr']:g} seed={r['seed']}",
                                 r["command"]) for r in rows if "command" in r))


def _rise_table(rows: Sequence[Row], arms: Sequence[str], base: int) -> Table:
    """What a window longer than L costs, paired by seed."""
    lines = []
    for arm in arms:
        for protocol in _WORDS:
            own = {g[0][1]: tables.values(found[arm], "loss") for g, found in tables.split(
                by_length(rows, protocol), ("length",)).items() if arm in found}
            rises = [st.paired(seen, own[base]) for T, seen in own.items() if T != base]
            lines.append((arm, protocol, *(_signed(c) for c in rises)))
    lengths = [T for T in sorted(map(int, rows[0]["metrics"]["windows"])) if T != base]
    return Table(f"Loss minus that at {base}", ("scheme", "protocol", *map(str, lengths)),
                 tuple(lines), caption="Nats per token, paired by seed, with 95 % CI.")


def _signed(c: st.Paired) -> str:
    if c.high is None:
        return tables.number(c.difference) + " (no CI)"
    half = c.high - c.difference
    return f"{c.difference:+.3f} ± {half:.3f}"


def _heat(rows: Sequence[Row], arms: Sequence[str], base: int, protocol: str) -> Figure:
    cells: dict[str, dict[str, float]] = {arm: {} for arm in arms}
    for ((_, length),), found in tables.split(by_length(rows, protocol), ("length",)).items():
        for arm in arms:
            at = [r["metrics"][protocol] for r in rows if r["arm"] == arm]
            cells[arm][str(length)] = (float(np.mean([m[str(length)] - m[str(base)] for m in at]))
                                       if arm in found else float("nan"))
    return figures.heat_map(
        cells, name=f"heat_{protocol}", title=f"Loss minus that at {base}: {_WORDS[protocol]}",
        xlabel="length of the window", label=_NATS, top=1.0,
        caption="Mean over seeds. Colours end at 1 nat.")


def _positions(rows: Sequence[Row], arms: Sequence[str], settings: Settings) -> Figure:
    longest, stride = settings.lengths[-1], settings.stride
    series: dict[str, list] = {arm: [r["metrics"]["position"] for r in rows if r["arm"] == arm]
                               for arm in arms}
    return figures.curves(
        {f"windows of {longest}": series}, name="positions", arms=arms, log_x=True,
        x=[longest % stride + stride * (i + 0.5) for i in range(longest // stride)],
        xlabel="place in the window", ylabel=_NATS, mark=settings.context,
        title="Loss by position in the longest window",
        caption=f"Bins of {stride} places; dotted: L. Mean over seeds with 95 % CI. Every bin "
                "reads other text, the same for all curves: what moves all of them is the text.")


def extension(settings: Settings, rows: list[Row]) -> Found:
    """Claims, tables and figures of the part `extension`."""
    methods = _order(rows, tuple(METHODS))
    made = [_zero_shot(rows, methods, settings.context), *_tuned_tables(rows, methods)]
    ramped = [r for r in rows if "ramps" in r["metrics"] and r["arm"] == "by_parts"]
    if ramped:
        made.append(_ramp_table(ramped, settings))
    return claims.extension(rows, settings), made, _tuning_curves(rows, methods, settings)


def _zero_shot(rows: Sequence[Row], methods: Sequence[str], base: int) -> Table:
    lines = []
    for ((_, factor),), found in tables.split(rows, ("factor",)).items():
        for method in [m for m in methods if m in found]:
            own = [by_length(found[method], p) for p in ("windows", "sliding")]
            lines.append((method, str(factor), *(
                _mean([r for r in some if r["axes"]["length"] == T])
                for T in (base, factor * base) for some in own)))
    return Table("One checkpoint under other positions, zero-shot",
                 ("method", "s", "windows at L", "sliding at L", "windows at s L",
                  "sliding at s L"), tuple(lines),
                 caption="Nats per token, mean over seeds with 95 % CI. The columns at L are the "
                         "price of a stretch where none is needed.",
                 commands=tuple((f"{r['arm']} s={r['axes']['factor']} seed={r['seed']}",
                                 r["command"]) for r in rows if "command" in r))


def _tuned_tables(rows: Sequence[Row], methods: Sequence[str]) -> list[Table]:
    tuned = [r for r in rows if "tuned" in r["metrics"]]
    if not tuned:
        return []
    return [tables.ablation_table(
        tuned, "tuned", "none" if "none" in methods else methods[0], by=("factor",), arms=methods,
        title="After fine-tuning at s L, sliding window", label=f"loss ({_NATS})")]


def _ramp_table(rows: Sequence[Row], settings: Settings) -> Table:
    last = max(r["axes"]["factor"] for r in rows)
    own = [r for r in rows if r["axes"]["factor"] == last]
    # In the order of the flag: rows just measured and rows read back differ in theirs.
    names = [name for name in settings.extend.ramps if name in own[0]["metrics"]["ramps"]]
    lines = [(name, tables.interval(st.summarize([r["metrics"]["ramps"][name] for r in own],
                                                 bootstrap=0)),
              "chosen" if name == own[0]["metrics"]["ramp"] else "") for name in names]
    return Table(f"Choice of alpha:beta, by_parts at s={last}, tuning half",
                 ("alpha:beta", f"sliding loss ({_NATS})", ""), tuple(lines),
                 caption="Mean over seeds with 95 % CI. Chosen by the mean.")


def _tuning_curves(rows: Sequence[Row], methods: Sequence[str], settings: Settings) -> list[Figure]:
    tuned = [r for r in rows if "curve" in r["metrics"]]
    if not tuned:
        return []
    factor, every = tuned[0]["axes"]["factor"], settings.extend.every
    series = {f"s = {factor}": {m: [r["metrics"]["curve"] for r in tuned if r["arm"] == m]
                                for m in _order(tuned, methods)}}
    return [figures.curves(
        series, name="fine_tuning", arms=methods, ylabel=_NATS,
        x=[every * i for i in range(len(tuned[0]["metrics"]["curve"]))],
        xlabel="steps of fine-tuning", title=f"Fine-tuned and read at {factor} L",
        caption="Step 0 is zero-shot. Mean over seeds with 95 % CI.")]


REPORTS = {"schemes": schemes, "extension": extension, "probes": probes}
