"""What the mask study says: verdicts, tables and figures from ledger rows alone."""

import io
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.image import imread
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from tx_jax.masks import Mask
from tx_jax.masks.picture import draw_mask
from tx_jax.study import statistics as st
from tx_jax.study.figures import Figure, looks
from tx_jax.study.report import Report
from tx_jax.study.tables import Bold, Table, factor, number, ratio
from tx_jax.study.verdicts import Claim, Verdict, judge_all

Row = dict[str, Any]
ARMS = {"tiles": ("add", "tiles_all", "tiles_branch", "tiles_skip", "blockwise"),
        "pairs": ("add", "select", "loop_add", "loop_branch")}
BASELINE = "add"
WORDS = {"add": "add: whole matrix, minus infinity added", "tiles_all": "tiles, all computed",
         "tiles_branch": "tiles, branch at run time", "tiles_skip": "tiles, empty ones skipped",
         "blockwise": "blockwise of the project"}
_CLAIM = "Causal masks add minus infinity because branching is slower"


def make_report(rows: list[Row], *, masks: Mapping[str, tuple[str, Mask]], length: int,
                tile: int) -> Report:
    """The report over the parts that have rows.

    Args:
      masks: name -> (rule, mask at `length`), for the pictures.
    """
    found, first = _index(rows), rows[0]
    tiles = [r for r in rows if r["part"] == "tiles"]
    pairs = [r for r in rows if r["part"] == "pairs"]
    tables, drawn = [], []
    for pass_ in ("gradients", "forward"):
        if some := [r for r in tiles if r["axes"]["pass"] == pass_]:
            tables.append(_ratio_table(some, pass_))
            drawn.append(_lines(some, "ratio", f"time_{pass_}", f"Time against adding minus "
                                f"infinity, {_said(pass_)}", "time / time of add"))
    if some := [r for r in tiles if r["axes"]["pass"] == "gradients"]:
        tables.append(_memory_table(some))
        drawn.append(_lines(some, "temp_bytes", "memory", "Temporary memory, forward and backward",
                            "MB"))
    if pairs:
        tables.append(_pair_table(pairs))
    drawn.append(_pictures(masks, length, tile))
    where = first["device"]
    return Report(
        "Adding minus infinity, skipping empty tiles, or branching",
        ("Attention under a mask can compute every logit and add minus infinity where a pair is "
         "forbidden, or leave forbidden pairs out. Leaving out single pairs needs a branch per "
         "pair, which vector units cannot take. Leaving out whole tiles needs one decision per "
         "tile: by a branch at run time, or by a list of tiles made before the loop starts.",
         f"Everything here was timed on {where}. On another device the answer may differ: a "
         "branch that costs a CPU core nothing may make a GPU wait, and a GPU hides work that a "
         "CPU pays for. Run the same command there."),
        verdicts=_verdicts(found), tables=tuple(tables), figures=tuple(drawn),
        notes=("A ratio is the time of an arm over that of add in the same round; entries are "
               "medians over rounds with the exact 95 % interval of the median (open below 6 "
               "rounds). Rounds stand where other studies have seeds; verdicts compare the "
               "logarithms of paired ratios by a t-test, corrected by Holm over the claims.",
               "Before any timing, values and gradients of every arm were compared with the "
               f"reference; the largest relative difference was "
               f"{max(r['metrics']['max_error'] for r in rows):.1g}.",
               "tiles_all, tiles_branch and tiles_skip are one program but for the choice of "
               "tiles; blockwise chooses its own size of tiles, from the shapes.",
               "Memory is what the compiler plans for temporaries; arguments and results are "
               "the same for all arms."),
        facts=(("device", where),
               ("versions", ", ".join(f"{k} {v}" for k, v in first["versions"].items() if v)),
               ("shape", ", ".join(f"{k} {v}" for k, v in first["settings"].items())),
               ("code", first["code"][:12]), ("cells", str(len(rows))),
               ("cell seconds in all", f"{sum(r['seconds'] for r in rows):.0f}")))


def _said(pass_: str) -> str:
    return {"forward": "forward", "gradients": "forward and backward"}[pass_]


def _index(rows: Sequence[Row]) -> dict[tuple, Row]:
    return {(r["part"], r["arm"], *_axes(r)): r for r in rows}


def _axes(row: Row) -> tuple[str, int, str]:
    return row["axes"]["mask"], row["axes"]["length"], row["axes"]["pass"]


def _logs(row: Row) -> dict[int, float]:
    return {i: math.log(x) for i, x in enumerate(row["metrics"]["ratios"])}


def _verdicts(found: Mapping[tuple, Row]) -> tuple[Verdict, ...]:
    """The claim at three sizes of what is branched over, and what skipping is worth."""
    lengths = {part: max((key[3] for key in found if key[:3] == (part, BASELINE, "causal")),
                         default=0) for part in ("tiles", "pairs")}
    claims = []

    def compare(part: str, mask: str, pass_: str, arm: str, other: str, text: str, expected: str,
                margin: float = 0.0) -> None:
        a, b = (found.get((part, name, mask, lengths[part], pass_)) for name in (arm, other))
        if a and b:
            said = f"{text}: {mask}, length {lengths[part]}, {_said(pass_)}"
            claims.append(Claim(said, st.paired(_logs(a), _logs(b)), expected, margin))

    compare("tiles", "causal", "gradients", "tiles_branch", "add", f"{_CLAIM}: a branch per tile "
            "against adding over the whole matrix", "higher")
    compare("tiles", "causal", "gradients", "tiles_branch", "tiles_all", f"{_CLAIM}: a branch per "
            "tile against adding in every tile", "higher")
    compare("pairs", "causal", "forward", "loop_branch", "add", f"{_CLAIM}: a loop over pairs with "
            "a branch in it against adding over the whole matrix", "higher")
    compare("pairs", "causal", "forward", "loop_branch", "loop_add", f"{_CLAIM}: a branch per pair "
            "against adding per pair in the same loop", "higher")
    compare("tiles", "causal", "gradients", "tiles_skip", "tiles_all", "Skipping the empty half of "
            "the tiles saves time (Dao 2023, section 3.1)", "lower")
    compare("tiles", "causal", "gradients", "tiles_skip", "tiles_branch", "Our expectation: a list "
            "of tiles made beforehand takes as long as a branch per tile (10 % allowed)", "equal",
            math.log(1.1))
    compare("tiles", "full", "gradients", "tiles_skip", "tiles_all", "Our expectation: where no "
            "tile is empty, the list costs nothing (10 % allowed)", "equal", math.log(1.1))
    verdicts = judge_all(claims)
    return tuple(replace(v, detail=f"time x {factor(c.comparison)}; in logarithms: {v.detail}")
                 for v, c in zip(verdicts, claims, strict=True))


def _groups(rows: Sequence[Row]) -> dict[tuple[str, int], dict[str, Row]]:
    groups: dict[tuple[str, int], dict[str, Row]] = {}
    for row in rows:
        key = row["axes"]["mask"], row["axes"]["length"]
        groups.setdefault(key, {})[row["arm"]] = row
    return groups


def _milliseconds(row: Row) -> str:
    return number(1e3 * st.times(row["metrics"]["seconds"], math.inf).median, digits=3)


def _commands(rows: Sequence[Row]) -> tuple[tuple[str, str], ...]:
    return tuple((f"{r['arm']} {' '.join(map(str, _axes(r)))}", r["command"])
                 for r in rows if "command" in r)


def _ratio_table(rows: Sequence[Row], pass_: str) -> Table:
    arms, lines = [a for a in ARMS["tiles"] if a != BASELINE], []
    for (mask, length), group in _groups(rows).items():
        best = st.winners({a: _logs(r) for a, r in group.items()}, lower_is_better=True)
        base = group.get(BASELINE)
        any_row = next(iter(group.values()))["metrics"]
        lines.append((mask, str(length), f"{any_row['allowed']:.0%}", f"{any_row['skipped']:.0%}",
                      _milliseconds(base) if base else "–",
                      *(("–" if a not in group else Bold(ratio(group[a])) if a in best else
                         ratio(group[a])) for a in arms)))
    return Table(f"Time, {_said(pass_)}", ("mask", "length", "pairs allowed", "tiles empty",
                                           "add (ms)", *arms), tuple(lines),
                 caption="Time over that of add, median over rounds with 95 % CI; bold: the "
                         "fastest, where it beats every other arm after Holm's correction.",
                 commands=_commands(rows))


def _memory_table(rows: Sequence[Row]) -> Table:
    lines = [(mask, str(length), *(_megabytes(group.get(a)) for a in ARMS["tiles"]))
             for (mask, length), group in _groups(rows).items()]
    return Table("Temporary memory, forward and backward (MB)",
                 ("mask", "length", *ARMS["tiles"]), tuple(lines),
                 caption="Of the compiled program; it does not depend on the machine's load.")


def _megabytes(row: Row | None) -> str:
    size = row and row["metrics"]["temp_bytes"]
    return "–" if size is None else number(size / 1e6, digits=3)


def _pair_table(rows: Sequence[Row]) -> Table:
    lines = [(str(length), *(_milliseconds(group[a]) for a in ARMS["pairs"] if a in group),
              *(ratio(group[a]) for a in ARMS["pairs"] if a in group and a != BASELINE))
             for (_, length), group in _groups(rows).items()
             if all(a in group for a in ARMS["pairs"])]
    return Table("Pair by pair: causal, forward", (
        "length", *(f"{a} (ms)" for a in ARMS["pairs"]),
        *(f"{a} / add" for a in ARMS["pairs"] if a != BASELINE)), tuple(lines),
        caption="add and select work on the whole matrix; the loops take one pair after the "
                "other, loop_branch with a branch that leaves out forbidden pairs.",
        commands=_commands(rows))


def _lines(rows: Sequence[Row], metric: str, name: str, title: str, ylabel: str) -> Figure:
    """One panel per mask, one line per arm, against length."""
    masks = list(dict.fromkeys(r["axes"]["mask"] for r in rows))
    lengths = sorted({r["axes"]["length"] for r in rows})
    columns = min(4, len(masks))
    down = math.ceil(len(masks) / columns)
    canvas = Canvas(figsize=(max(6.5, 2.6 * columns), 2.6 * down + 1.1), dpi=130,
                    layout="constrained")
    FigureCanvasAgg(canvas)
    grid = canvas.subplots(down, columns, sharey=True, sharex=True, squeeze=False)
    known = looks(ARMS["tiles"])
    for ax, mask in zip(grid.flat, masks, strict=False):
        for arm in ARMS["tiles"]:
            own = sorted((r for r in rows if r["arm"] == arm and r["axes"]["mask"] == mask
                          and r["metrics"][metric] is not None), key=lambda r: r["axes"]["length"])
            x, look = [r["axes"]["length"] for r in own], known[arm]
            scale = 1e-6 if metric == "temp_bytes" else 1.0
            y = [scale * r["metrics"][metric] for r in own]
            ax.plot(x, y, color=look.color, marker=look.marker, lw=1.5, ms=4.5, label=WORDS[arm])
            if metric == "ratio" and all(math.isfinite(r["metrics"]["ratio_high"]) for r in own):
                ax.fill_between(x, [r["metrics"]["ratio_low"] for r in own],
                                [r["metrics"]["ratio_high"] for r in own], color=look.color,
                                alpha=0.16, lw=0)
        ax.set_title(mask, fontsize=10)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xticks(lengths, [str(n) for n in lengths])
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=14))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.tick_params(labelsize=8.5, labelbottom=True)
        ax.grid(True, color="#DDDDDD", lw=0.6)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    for ax in list(grid.flat)[len(masks):]:
        ax.set_axis_off()
    for ax in list(grid.flat)[max(0, len(masks) - columns):len(masks)]:
        ax.set_xlabel("length", fontsize=9.5)
    canvas.supylabel(ylabel, fontsize=9.5)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    canvas.suptitle(title, fontsize=11)
    out = io.BytesIO()
    canvas.savefig(out, format="png", facecolor="white", metadata={"Software": None})
    caption = ("Median over rounds; bands are its 95 % interval." if metric == "ratio" else
               "Planned by the compiler, so the same in every run; the three tile arms coincide.")
    return Figure(name, title, caption, out.getvalue())


def _pictures(masks: Mapping[str, tuple[str, Mask]], length: int, tile: int) -> Figure:
    """The pictures of all masks, three in a row, pixel for pixel."""
    with tempfile.TemporaryDirectory() as folder:
        found = [imread(draw_mask(mask, length, length, Path(folder) / "mask.png", tile=tile))
                 for _, mask in masks.values()]
    height, width = found[0].shape[:2]
    columns = min(3, len(found))
    down = math.ceil(len(found) / columns)
    canvas = Canvas(figsize=(columns * width / 100, down * height / 100), dpi=100)
    FigureCanvasAgg(canvas)
    for i, image in enumerate(found):
        canvas.figimage(image, i % columns * width, (down - 1 - i // columns) * height)
    out = io.BytesIO()
    canvas.savefig(out, format="png", facecolor="white", metadata={"Software": None})
    names = "; ".join(
        f"{name} ({rule}{'' if mask.q_segments_BT is None else ', in packed documents'})"
        for name, (rule, mask) in masks.items())
    return Figure("masks", "The masks", f"In order: {names}. Length {length}, tiles of {tile}: "
                  "grey ones are skipped, green ones need no mask, the others compute and mask.",
                  out.getvalue())
