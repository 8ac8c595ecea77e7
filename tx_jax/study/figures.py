"""Figures of a study: pure functions of ledger rows, drawn with Matplotlib's Agg canvas."""

import io
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from tx_jax.study import statistics as st
from tx_jax.study.tables import split, values

# Okabe and Ito's colours, told apart with any common colour vision; markers say it a second time.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")
MARKERS = ("o", "s", "D", "v", "P", "X", "h", "*")
_STYLE = {"grid": "#DDDDDD", "text": "#222222"}


@dataclass(frozen=True)
class Figure:
    """A drawn figure: `name` becomes figures/NAME.png."""

    name: str
    title: str
    caption: str
    png: bytes


@dataclass(frozen=True)
class Look:
    """Colour and marker of an arm, the same in every figure of a study."""

    color: str
    marker: str


def looks(arms: Sequence[str]) -> dict[str, Look]:
    """Fixed colours by position in `arms`: give the study's full list, not one figure's arms."""
    return {a: Look(PALETTE[i % len(PALETTE)], MARKERS[i % len(MARKERS)])
            for i, a in enumerate(arms)}


def lines(rows: Iterable[Mapping[str, Any]], metric: str, x: str, *, name: str, title: str,
          arms: Sequence[str], panel: str | None = None, ylabel: str = "", xlabel: str = "",
          caption: str = "", log_x: bool = True, log_y: bool = False, budget: float | None = None,
          reference: Mapping[str, float] | None = None) -> Figure:
    """The metric against the axis `x`, one line per arm, small multiples over the axis `panel`.

    Mean with its 95 % t-interval as a band; single seeds as faint dots. With a `budget` the metric
    is a censored time: median and range, and points whose median never solved sit on the budget
    line as open triangles. Without one, open triangles mark points at which seeds diverged.

    Args:
      reference: label -> y of horizontal lines (chance level, noise floor).
    """
    rows = [r for r in rows if x in r["axes"]]
    groups = split(rows, (panel,) if panel else ())
    keys = sorted(groups, key=lambda g: g[0][1] if g else 0)
    canvas, axes = _canvas(max(1, len(keys)))
    known = looks(arms)
    with warnings.catch_warnings():
        # Every point of a short run may sit on the budget line.
        warnings.filterwarnings("ignore", "Attempting to set identical")
        for ax, key in zip(axes, keys, strict=False):
            for arm in [a for a in arms if a in groups[key]]:
                by_x = {g[0][1]: members[arm]
                        for g, members in split(groups[key][arm], (x,)).items()}
                points = [(at, list(values(by_x[at], metric).values())) for at in sorted(by_x)]
                _line(ax, points, known[arm], arm, budget)
            ticks = sorted({r["axes"][x] for r in rows})
            _dress(ax, ticks, f"{panel} = {key[0][1]:g}" if panel else "", xlabel or x, log_x,
                   log_y)
            if budget is not None:
                ax.axhline(budget, color="#999999", lw=0.9, ls=":", zorder=1)
            for label, y in (reference or {}).items():
                ax.axhline(y, color="#999999", lw=0.9, ls="--", zorder=1)
                ax.annotate(label, (0.01, y), xycoords=("axes fraction", "data"), fontsize=8,
                            color="#666666", va="bottom")
    axes[0].set_ylabel(ylabel or metric)
    return Figure(name, title, caption, _finish(canvas, axes, title))


def _line(ax: Axes, points: Sequence[tuple[float, list[float]]], look: Look, arm: str,
          budget: float | None) -> None:
    """One arm in one panel."""
    at, mid, low, high, lost = [], [], [], [], []
    for x, found in points:
        if budget is None:
            s = st.summarize(found, bootstrap=0)
            centre, lo, hi = s.mean, s.low, s.high
            shown = [v for v in found if math.isfinite(v)]
            lost.append(s.lost > 0)
        else:
            t = st.times(found, budget)
            shown = [v if math.isfinite(v) and v <= budget else budget for v in found]
            centre, lo, hi = min(t.median, budget), min(shown), max(shown)
            lost.append(math.isinf(t.median))
        at.append(x)
        mid.append(centre)
        low.append(centre if lo is None else lo)
        high.append(centre if hi is None else hi)
        ax.plot([x] * len(shown), shown, ls="", marker=".", ms=3.5, color=look.color, alpha=0.35,
                zorder=2)
    mid_x, lost_x = np.array(mid, float), np.array(lost, bool)
    ax.fill_between(at, low, high, color=look.color, alpha=0.14, lw=0, zorder=1)
    ax.plot(at, mid_x, color=look.color, lw=1.6, zorder=3)
    good = ~lost_x
    ax.plot(np.array(at)[good], mid_x[good], ls="", marker=look.marker, ms=5.5, color=look.color,
            zorder=4)
    # Open triangles: never solved (censored) or some seeds diverged; at the top: all diverged.
    gone = np.isnan(mid_x)
    ax.plot(np.array(at)[gone], np.full(gone.sum(), 0.97), ls="", marker="^", ms=8, mfc="white",
            mec=look.color, mew=1.6, zorder=5, transform=ax.get_xaxis_transform())
    ax.plot(np.array(at)[lost_x], mid_x[lost_x], ls="", marker="^", ms=8, mfc="white",
            mec=look.color, mew=1.6, zorder=5)
    ax.plot([], [], color=look.color, marker=look.marker, lw=1.6, ms=5.5, label=arm)


def curves(series: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], *, name: str, title: str,
           x: Sequence[float], arms: Sequence[str], xlabel: str, ylabel: str, caption: str = "",
           log_x: bool = False, log_y: bool = False, mark: float | None = None,
           ylim: tuple[float, float] | None = None) -> Figure:
    """Whole curves (training loss by step): panel -> arm -> one curve per seed, mean and band.

    Args:
      mark: x of a dotted vertical line (the training length).
      ylim: ends of the y axis, where bands reach beyond what the metric can be.
    """
    canvas, axes = _canvas(max(1, len(series)))
    known = looks(arms)
    for ax, (panel, by_arm) in zip(axes, series.items(), strict=False):
        for arm in [a for a in arms if a in by_arm]:
            y_RX = np.asarray(by_arm[arm], float)
            found = [st.summarize(column, bootstrap=0) for column in y_RX.T]
            mean = [s.mean for s in found]
            ax.plot(x, mean, color=known[arm].color, lw=1.6, label=arm, marker=known[arm].marker,
                    ms=4.5, markevery=max(1, len(x) // 6))
            ax.fill_between(x, [s.mean if s.low is None else s.low for s in found],
                            [s.mean if s.high is None else s.high for s in found],
                            color=known[arm].color, alpha=0.14, lw=0)
        if mark is not None:
            ax.axvline(mark, color="#999999", lw=0.9, ls=":", zorder=1)
        if ylim is not None:
            ax.set_ylim(*ylim)
        _dress(ax, None, panel, xlabel, log_x, log_y)
    axes[0].set_ylabel(ylabel)
    return Figure(name, title, caption, _finish(canvas, axes, title))


def _canvas(panels: int) -> tuple[Canvas, list[Axes]]:
    columns = min(panels, 3)
    lines_ = math.ceil(panels / columns)
    width = 9.0 if panels > 1 else 6.5
    canvas = Canvas(figsize=(width, 3.3 * lines_ + 0.9), dpi=130, layout="constrained")
    FigureCanvasAgg(canvas)
    grid = canvas.subplots(lines_, columns, sharey=True, squeeze=False)
    axes = list(grid.flat)
    for ax in axes[panels:]:
        ax.set_axis_off()
    return canvas, axes


def _dress(ax: Axes, ticks: Sequence[float] | None, title: str, xlabel: str, log_x: bool,
           log_y: bool) -> None:
    if log_x:
        ax.set_xscale("log")
    if log_y:
        ax.set_yscale("log")
        # Times to solve rarely span a decade: powers of ten alone would leave a single label.
        low, high = ax.get_ylim()
        subs = (1, 2, 5) if high / low < 1e3 else (1,)
        ax.yaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _short(v)))
        ax.yaxis.set_minor_formatter(NullFormatter())
    if ticks:
        ax.set_xticks(ticks)
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _short(v)))
        ax.xaxis.minorticks_off()
    ax.set_title(title, fontsize=10, color=_STYLE["text"])
    ax.set_xlabel(xlabel, fontsize=9.5)
    ax.tick_params(labelsize=8.5, colors=_STYLE["text"])
    ax.grid(True, color=_STYLE["grid"], lw=0.6)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _short(value: float) -> str:
    """0.0003 -> 3e-4, so that neighbouring tick labels do not touch."""
    if 0 < abs(value) < 0.01:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:g}"


def _finish(canvas: Canvas, axes: Sequence[Axes], title: str) -> bytes:
    handles: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        inches = 0.6 + 0.075 * max(map(len, handles))  # of an entry
        canvas.legend(list(handles.values()), list(handles), loc="outside lower center",
                      ncols=max(1, min(len(handles), 5, int(canvas.get_figwidth() / inches))),
                      frameon=False, fontsize=9)
    canvas.suptitle(title, fontsize=11, color=_STYLE["text"])
    out = io.BytesIO()
    canvas.savefig(out, format="png", facecolor="white", metadata={"Software": None})
    return out.getvalue()


def heat_map(cells: Mapping[str, Mapping[str, float]], *, name: str, title: str, xlabel: str,
             label: str, caption: str = "", top: float | None = None) -> Figure:
    """Numbers as a grid: line -> column -> number, NaN left white; columns are those of all lines.

    Args:
      label: of the colour bar. Colours are symmetric about 0, blue below and red above.
      top: where the colours end; larger numbers keep the last colour and their printed number.
    """
    columns = list(dict.fromkeys(c for line in cells.values() for c in line))
    grid = np.array([[line.get(c, math.nan) for c in columns] for line in cells.values()], float)
    finite = np.abs(grid[np.isfinite(grid)])
    top = top or max(float(finite.max(initial=0.0)), 1e-9)
    canvas = Canvas(figsize=(2.4 + 0.8 * len(columns), 1.7 + 0.38 * len(cells)), dpi=130,
                    layout="constrained")
    FigureCanvasAgg(canvas)
    ax = canvas.subplots()
    image = ax.imshow(grid, cmap="RdBu_r", vmin=-top, vmax=top, aspect="auto")
    for (i, j), value in np.ndenumerate(grid):
        if math.isfinite(value):
            # Dark ground takes white letters.
            ax.text(j, i, f"{round(value, 2) + 0.0:+.2f}", ha="center", va="center", fontsize=8.5,
                    color="white" if abs(value) > 0.65 * top else _STYLE["text"])
    ax.set_xticks(range(len(columns)), columns)
    ax.set_yticks(range(len(cells)), list(cells))
    ax.tick_params(labelsize=8.5, colors=_STYLE["text"], length=0)
    ax.set_xlabel(xlabel, fontsize=9.5)
    canvas.colorbar(image, ax=ax, label=label, extend="max" if finite.max(initial=0) > top else
                    "neither")
    canvas.suptitle(title, fontsize=11, color=_STYLE["text"])
    out = io.BytesIO()
    canvas.savefig(out, format="png", facecolor="white", metadata={"Software": None})
    return Figure(name, title, caption, out.getvalue())


def dots(series: Mapping[str, Mapping[str, Sequence[float]]], *, name: str, title: str, xlabel: str,
         caption: str = "", reference: str = "") -> Figure:
    """One number per arm, a panel per family: panel -> arm -> a value per seed; mean with its 95 %
    t-interval over faint dots of single seeds. `reference` labels a dashed line at 0."""
    columns, sizes = min(len(series), 2), [len(arms) for arms in series.values()]
    heights = [0.9 + 0.24 * max(sizes[i:i + columns]) for i in range(0, len(sizes), columns)]
    canvas = Canvas(figsize=(9.0, sum(heights) + 0.5), dpi=130, layout="constrained")
    FigureCanvasAgg(canvas)
    axes = list(canvas.subplots(len(heights), columns, squeeze=False,
                                height_ratios=heights).flat)
    for ax in axes[len(series):]:
        ax.set_axis_off()
    for ax, (panel, arms) in zip(axes, series.items(), strict=False):
        for y, found in enumerate(arms.values()):
            s = st.summarize(found, bootstrap=0)
            seen = [v for v in found if math.isfinite(v)]
            ax.plot(seen, [y] * len(seen), ls="", marker=".", ms=4, color=PALETTE[0], alpha=0.35)
            if s.low is not None:
                ax.plot([s.low, s.high], [y, y], color=PALETTE[0], lw=1.6)
            ax.plot([s.mean], [y], ls="", marker="o", ms=5.5, color=PALETTE[0])
        _dress(ax, None, panel, xlabel, False, False)
        ax.axvline(0, color="#999999", lw=0.9, ls="--", zorder=1, label=reference or None)
        ax.locator_params(axis="x", nbins=6)
        ax.set_yticks(range(len(arms)), list(arms))
        ax.set_ylim(len(arms) - 0.5, -0.5)
    return Figure(name, title, caption, _finish(canvas, axes, title))
