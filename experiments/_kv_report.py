"""What the cache study says: summary, verdicts and figures, from ledger rows alone."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from experiments import _kv_tables as tables
from experiments._decoding import ARMS, BASELINE, VOCAB, kind_of, model_of
from tx_jax import limits
from tx_jax.study import statistics as st
from tx_jax.study.figures import Figure, lines, looks
from tx_jax.study.report import Report
from tx_jax.study.tables import factor
from tx_jax.study.verdicts import Claim, Verdict, judge_all

Row = dict[str, Any]
FLOPS_ERROR, FITS_ERROR = 0.15, 0.10  # what is allowed to the closed forms
FLAT = 1.25  # factor by which a step may get slower and still counts as flat


def make_report(settings: Any, rows: list[Row]) -> Report:
    """The report over the parts that have rows."""
    parts = _parts(rows)
    makers = {"decode": (tables.time_table, tables.flops_table), "memory": (tables.memory_table,),
              "fits": (tables.fits_table,), "rounding": (tables.rounding_table,)}
    made = [maker(parts[part]) for part in makers if part in parts for maker in makers[part]]
    here = next((r["metrics"]["device_bytes"] for r in parts.get("fits", [])), None)
    devices = ({} if here is None else {"this": here}) | limits.DEVICES
    own = model_of(settings, BASELINE, max(settings.lengths))
    made.append(tables.device_table(
        devices, {"this study's": (own.cfg, VOCAB, own.context)} | tables.KNOWN))
    drawn = _timings(parts["decode"]) if "decode" in parts else []
    if "memory" in parts:
        drawn.append(_bytes(settings, parts["memory"], here))
    first = rows[0]
    return Report(
        "Decoding with a cache of keys and values, and without", _summary(first["device"]),
        verdicts=verdicts(rows), tables=tuple(made),
        figures=tuple(drawn), notes=_NOTES,
        facts=(("device", first["device"]),
               ("versions", ", ".join(f"{k} {v}" for k, v in first["versions"].items() if v)),
               ("shape", ", ".join(f"{k} {v}" for k, v in first["settings"].items())),
               ("code", first["code"][:12]), ("cells", str(len(rows))),
               ("seconds of timing and compiling in all",
                f"{sum(r['seconds'] + r['compile_seconds'] for r in rows):.0f}")))


def verdicts(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """Claims on time, which vary from round to round, and exact ones on bytes and operations."""
    parts = _parts(rows)
    return (*_timed(parts.get("decode", [])), *_exact(parts))


def _parts(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["part"], []).append(row)
    return found


def _summary(device: str) -> tuple[str, ...]:
    return (
        "A decoder that keeps the keys and values of the text so far reads one token for the next; "
        "one that keeps nothing reads the whole text again. What it keeps is memory that grows "
        "with the context, and fewer key heads, a window or int8 make it smaller.",
        f"Everything here was timed on {device}. Fewer key heads were published as a speed-up of "
        "decoding that waits for memory (Shazeer 2019; Ainslie et al. 2023: T5-XXL 1.51 s a sample "
        "with all heads, 0.28 s with 8, 0.24 s with 1). A small model on a CPU, which lies in its "
        "caches, waits for arithmetic and for the start of operations: it shows the bytes, and of "
        "the time what the rows below say. Run --preset=full on a GPU for the published factor.")


_NOTES = (
    "A ratio is the time of an arm over that of mha in the same round; entries are medians over "
    "rounds with the exact 95 % interval of the median (open below 6 rounds). Rounds stand where "
    "other studies have seeds; verdicts compare logarithms of ratios by a paired t-test, corrected "
    "by Holm over the claims that were timed. Rounds are of one process on one machine: what "
    "differs between machines is not in the interval.",
    "A timing draws tokens in one compiled loop at a full context, argmax included, after a "
    "warm-up and until the device is done; compiling is left out. no_cache runs the attention that "
    "the project picks for a whole text, which skips tiles that the mask empties.",
    "Verdicts without a p are exact: they compare whole numbers, or what a compiler plans, which "
    "does not vary.",
    "XLA's plan was made for this device. In bfloat16 on a CPU it also holds copies in float32, "
    "which the predictor, meant for devices that have bfloat16, leaves out.")


def _timed(rows: Sequence[Row]) -> tuple[Verdict, ...]:
    """Claims on time, at the largest context at which all arms ran."""
    found = {(r["arm"], r["axes"]["length"]): r for r in rows}
    common = sorted(n for arm, n in found if arm == "no_cache")
    longest = max((n for _, n in found), default=0)
    claims: list[Claim] = []

    def compare(text: str, a: Mapping[int, float], b: Mapping[int, float], expected: str,
                margin: float = 0.0) -> None:
        claims.append(Claim(text, st.paired(a, b), expected, margin))

    def against(arm: str, length: int, text: str) -> None:
        if (arm, length) in found and (BASELINE, length) in found:
            compare(f"{text}: against {BASELINE}, context {length}",
                    tables.logs(found[arm, length]), tables.logs(found[BASELINE, length]), "lower")

    if common:
        low, high = common[0], common[-1]
        if (BASELINE, high) in found:
            compare(f"A cache saves time: no_cache against {BASELINE}, context {high}",
                    tables.logs(found["no_cache", high]), tables.logs(found[BASELINE, high]),
                    "higher")
        if high > low:
            compare("What it saves grows with the context (operations: n^2 against n): ratio at "
                    f"{high} against {low}", tables.logs(found["no_cache", high]),
                    tables.logs(found["no_cache", low]), "higher")
    against("mqa", longest, "One key head makes decoding faster (Shazeer 2019)")
    against("gqa", longest, "Groups of key heads make decoding faster (Ainslie et al. 2023)")
    against("window", longest, "Our expectation: a window makes decoding faster")
    against("int8", longest, "Our expectation: int8, a quarter of the bytes, makes decoding faster")
    for arm, low in ((BASELINE, common[0] if common else 0),
                     ("window", min((n for a, n in found if a == "window" and n >= found[a, n][
                         "settings"]["window"]), default=0))):
        if (arm, low) in found and (arm, longest) in found and longest > low:
            compare(f"Our expectation: a step of {arm} takes the same at context {longest} and at "
                    f"{low} ({FLAT - 1:.0%} allowed)", _log_seconds(found[arm, longest]),
                    _log_seconds(found[arm, low]), "equal", math.log(FLAT))
    return tuple(replace(v, detail=f"time x {factor(c.comparison)}; in logarithms: {v.detail}")
                 for v, c in zip(judge_all(claims), claims, strict=True))


def _log_seconds(row: Row) -> dict[int, float]:
    return {i: math.log(x) for i, x in enumerate(row["metrics"]["seconds"])}


def _exact(parts: Mapping[str, list[Row]]) -> list[Verdict]:
    """Claims on bytes and operations, true or not."""
    made: list[Verdict] = []

    def judge(text: str, cases: Sequence[bool], detail: str = "") -> None:
        if cases:
            made.append(Verdict(text, "agrees" if all(cases) else "differs",
                                f"{sum(cases)} of {len(cases)} cases{detail}"))

    memory = [(r["arm"], r["metrics"], r["settings"]) for r in parts.get("memory", [])]
    by_arm = tables.groups(parts.get("memory", []))
    judge("A cache holds 2 L K H S B numbers, to the byte", [
        m["cache"] == m["formula"] for _, m, _ in memory])
    judge("Memory is linear in the context, to the byte (Pope et al. 2022)", [
        m["cache"] * least == group0["metrics"]["cache"] * size
        for size, group in by_arm.items() for arm, row in group.items() if arm != "window"
        for least in [min(by_arm)] if size > least and arm in by_arm[least]
        for m, group0 in [(row["metrics"], by_arm[least][arm])]])
    for arm, text, share in (
            ("gqa", "GQA divides it by N / K", lambda s: s["groups"] / s["heads"]),
            ("mqa", "MQA divides it by N", lambda s: 1 / s["heads"])):
        judge(f"{text}, to the byte", [
            group[arm]["metrics"]["cache"] == group[BASELINE]["metrics"]["cache"]
            * share(group[arm]["settings"]) for group in by_arm.values()
            if arm in group and BASELINE in group])
    judge("A window bounds it", [m["places"] <= s["window"] for a, m, s in memory
                                 if a == "window"])
    judge("int8 takes a byte for each number and four for each head, instead of four (bfloat16: "
          "two) for each number", [
              group["int8"]["metrics"]["cache"] * _head_bytes(row["settings"], "model")
              == row["metrics"]["cache"] * _head_bytes(row["settings"], "int8")
              for group in by_arm.values() if {"int8", BASELINE} <= set(group)
              for row in [group[BASELINE]]])
    judge("A step copies no cache: all of it is written in place, and from one size to the next "
          "its temporaries grow, beside the logits, by less than half of a layer's keys",
          _in_place(by_arm))
    errors = [r["metrics"]["error"] for r in parts.get("fits", [])]
    judge(f"The predictor, whose work bytes were fitted to plans like these, is within "
          f"{FITS_ERROR:.0%} of what XLA plans for a generation", [
        abs(e) <= FITS_ERROR for e in errors],
        f", errors {min(errors):+.1%} to {max(errors):+.1%}" if errors else "")
    shares = [r["metrics"]["flops"] / r["metrics"]["counted"] - 1 for r in parts.get("decode", [])
              if r["arm"] != "int8"]
    judge(f"Closed forms of the operations are within {FLOPS_ERROR:.0%} of XLA's count (int8 "
          "aside, which also turns every number back)", [
        abs(e) <= FLOPS_ERROR for e in shares],
        f", errors {min(shares):+.1%} to {max(shares):+.1%}" if shares else "")
    return made


def _head_bytes(shape: Mapping[str, Any], kind: str) -> int:
    """Bytes of one head of one token."""
    width = shape["d_model"] // shape["heads"]
    return width + 4 if kind == "int8" else width * (2 if shape["dtype"] == "bfloat16" else 4)


def _in_place(by_arm: Mapping[int, Mapping[str, Row]]) -> list[bool]:
    """For each arm and pair of neighbouring sizes."""
    cases, sizes = [], sorted(by_arm)
    for low, high in zip(sizes, sizes[1:], strict=False):
        for arm in set(by_arm[low]) & set(by_arm[high]):
            (a, b), shape = (by_arm[n][arm]["metrics"] for n in (low, high)), by_arm[low][arm][
                "settings"]
            # Four numbers in float32 for a head and a place: logits and weights, masked or not.
            logits = 16 * shape["batch"] * shape["heads"] * (b["places"] - a["places"])
            half = (b["cache"] - a["cache"]) / shape["layers"] / 2
            cases.append(b["alias"] >= b["cache"] and b["temp"] - a["temp"] <= logits + half / 2)
    return cases


def _timings(rows: Sequence[Row]) -> list[Figure]:
    """Milliseconds and tokens per second, a point for every round."""
    spread = [{**r, "seed": i, "status": "ok",
               "metrics": {"ms": 1e3 * s, "rate": r["settings"]["batch"] / s}}
              for r in rows for i, s in enumerate(r["metrics"]["seconds"])]
    caption = "At a full context. Mean over rounds with 95 % CI, rounds as dots."
    return [lines(spread, "ms", "length", name="time", title="Time of a token", arms=ARMS,
                  ylabel="ms", xlabel="context (tokens)", caption=caption, log_y=True),
            lines(spread, "rate", "length", name="tokens", title="Tokens per second, all rows",
                  arms=ARMS, ylabel="tokens / s", xlabel="context (tokens)", caption=caption,
                  log_y=True)]


def _bytes(settings: Any, rows: Sequence[Row], device: int | None) -> Figure:
    """Measured caches on the lines of the closed form, up to the memory of the device."""
    canvas = Canvas(figsize=(7.2, 4.4), dpi=130, layout="constrained")
    FigureCanvasAgg(canvas)
    ax, known = canvas.subplots(), looks(ARMS)
    longest = max(r["axes"]["length"] for r in rows)
    for arm in ARMS[1:]:
        cfg = model_of(settings, arm, longest).cfg
        at = [2 ** i for i in range(4, 26)]
        ax.plot(at, [limits.cache_bytes(cfg, settings.batch, n, kind_of(arm)) for n in at], lw=1.2,
                color=known[arm].color)
        own = [r for r in rows if r["arm"] == arm]
        ax.plot([r["axes"]["length"] for r in own], [r["metrics"]["cache"] for r in own], ls="",
                color=known[arm].color, marker=known[arm].marker, ms=6, label=arm)
    if device:
        ax.axhline(device, color="#999999", lw=1, ls="--")
        ax.annotate("memory of this device", (0.01, device), fontsize=8, color="#666666",
                    xycoords=("axes fraction", "data"), va="bottom")
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xlabel("context (tokens)", fontsize=9.5)
    ax.set_ylabel("bytes of the cache", fontsize=9.5)
    ax.grid(True, color="#DDDDDD", lw=0.6)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.legend(frameon=False, fontsize=9)
    ax.set_title("Bytes of the cache", fontsize=11)
    out = io.BytesIO()
    canvas.savefig(out, format="png", facecolor="white", metadata={"Software": None})
    return Figure("bytes", "Bytes of the cache", "Points: caches that were made; lines: the closed "
                  f"form, {settings.batch} row(s).", out.getvalue())
