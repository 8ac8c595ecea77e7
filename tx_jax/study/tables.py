"""Tables of a study: pure functions of ledger rows, rendered as Markdown, CSV or LaTeX."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tx_jax.errors import UserError, nearest
from tx_jax.study import statistics as st

Row = Mapping[str, Any]
Group = tuple[tuple[str, Any], ...]
_LATEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
          "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
          "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "±": r"$\pm$",
          "∞": r"$\infty$", "≥": r"$\geq$", "≤": r"$\leq$", "−": r"$-$", "√": r"$\surd$"}


@dataclass(frozen=True)
class Bold:
    """A table entry to print bold."""

    text: str


@dataclass(frozen=True)
class Table:
    """Entries are strings or `Bold`; `commands` are (row label, command that reproduces it)."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | Bold, ...], ...]
    caption: str = ""
    notes: tuple[str, ...] = ()
    commands: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(row)} entries {row} for {len(self.columns)} columns "
                                 f"{self.columns} in table '{self.title}'.")

    def markdown(self) -> str:
        """GitHub Markdown, with title, caption and notes."""
        def line(entries: Iterable[str]) -> str:
            return "| " + " | ".join(entries) + " |"

        def entry(e: str | Bold) -> str:
            text = _text(e).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
            text = text.replace("*", "\\*").replace("<", "&lt;")
            return f"**{text}**" if isinstance(e, Bold) and text else text

        lines = [f"### {self.title}", ""]
        if self.caption:
            lines += [self.caption, ""]
        lines += [line(map(entry, self.columns)), line("---" for _ in self.columns)]
        lines += [line(map(entry, row)) for row in self.rows]
        lines += [""] + [f"- {note}" for note in self.notes]
        return "\n".join(lines).rstrip() + "\n"

    def csv(self) -> str:
        """Plain CSV with a header line."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_text(e) for e in row] for row in self.rows)
        return out.getvalue()

    def latex(self) -> str:
        """A booktabs table environment."""
        def entry(e: str | Bold) -> str:
            text = escape_latex(_text(e))
            return rf"\textbf{{{text}}}" if isinstance(e, Bold) and text else text

        body = [" & ".join(map(entry, row)) + r" \\" for row in self.rows]
        head = " & ".join(map(entry, self.columns)) + r" \\"
        caption = escape_latex(" ".join([f"{self.title}.", self.caption, *self.notes]).strip())
        return "\n".join([
            r"\begin{table}[t]", r"\centering", rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{{'l' * len(self.columns)}}}", r"\toprule", head, r"\midrule",
            *body, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def _text(e: str | Bold) -> str:
    return e.text if isinstance(e, Bold) else e


def escape_latex(text: str) -> str:
    """Escape the characters that LaTeX reads as commands."""
    return "".join(_LATEX.get(c, c) for c in text)


def number(value: float | None, half: float | None = None, digits: int = 4) -> str:
    """Write `value` to the second significant digit of its interval's half width.

    Without a (finite, positive) half width: `digits` significant digits. None gives "–".
    """
    if value is None or math.isnan(value):
        return "–" if value is None else "nan"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if half is not None and math.isfinite(half) and half > 0:
        places = 1 - math.floor(math.log10(half))
        # Rounding can lift the half width to the next power of ten (0.0996 -> 0.10).
        places = 1 - math.floor(math.log10(round(half, places)))
        if places > 8:
            return f"{value:.{digits}g}"
        return f"{round(value, places):.{max(0, places)}f}"
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{digits}g}"


def interval(summary: st.Summary) -> str:
    """"mean ± half width" of the 95 % t-interval; says so when there is none."""
    if summary.n == 0:
        return "all diverged" if summary.lost else "–"
    text = number(summary.mean, summary.half)
    text += " (no CI, n=1)" if summary.half is None else f" ± {number(summary.half, summary.half)}"
    return text + (f" ({summary.lost} diverged)" if summary.lost else "")


def ratio(row: Row) -> str:
    """A timing over that of the baseline: median over rounds with its interval, from the metrics
    `ratio`, `ratio_low`, `ratio_high` and `ratios` of a row."""
    m = row["metrics"]
    text = number(m["ratio"], digits=3)
    if not math.isfinite(m["ratio_high"]):
        return f"{text} (no CI, n={len(m['ratios'])})"
    return f"{text} [{number(m['ratio_low'], digits=3)}, {number(m['ratio_high'], digits=3)}]"


def factor(c: st.Paired) -> str:
    """A comparison of logarithms as the factor it means, with its interval."""
    text = number(math.exp(c.difference), digits=3)
    if c.low is None:
        return text
    return f"{text} [{number(math.exp(c.low), digits=3)}, {number(math.exp(c.high), digits=3)}]"


def p_value(p: float | None) -> str:
    """Two digits, or "< 0.001"."""
    if p is None:
        return "–"
    return "< 0.001" if p < 1e-3 else f"{p:.2g}"


def values(rows: Iterable[Row], metric: str) -> dict[int, float]:
    """seed -> metric; a diverged row, or one without the number, counts as NaN.

    Raises:
      UserError: no row has the metric.
    """
    rows = list(rows)
    known = {name for row in rows for name in row["metrics"]}
    if rows and metric not in known:
        raise UserError(f"no row has the metric '{metric}'{nearest(metric, known)}")
    found = {}
    for row in rows:
        value = row["metrics"].get(metric)
        good = isinstance(value, int | float) and row["status"] != "diverged"
        found[row["seed"]] = float(value) if good else math.nan
    return found


def split(rows: Iterable[Row], by: Sequence[str]) -> dict[Group, dict[str, list[Row]]]:
    """axes in `by` -> arm -> rows, in order of appearance."""
    out: dict[Group, dict[str, list[Row]]] = {}
    for row in rows:
        group = tuple((name, row["axes"].get(name)) for name in by)
        out.setdefault(group, {}).setdefault(row["arm"], []).append(row)
    return out


def tune(rows: Iterable[Row], metric: str, *, over: str, by: Sequence[str],
         lower_is_better: bool = True, rank: Callable[[list[float]], Any] | None = None,
         ) -> tuple[list[Row], list[str]]:
    """Keep for each arm and group the rows at its best value of the axis `over` ("lr").

    Args:
      metric: chosen by its mean over seeds (a diverged seed rules the value out unless all have
        one), or by `rank(values)`, smaller first.

    Returns:
      The kept rows, and a note for every optimum at the edge of the grid.
    """
    kept, notes = [], []
    for group, arms in split(rows, by).items():
        for arm, members in arms.items():
            grid: dict[Any, list[Row]] = {}
            for row in members:
                grid.setdefault(row["axes"][over], []).append(row)

            def score(x: Any, grid=grid) -> Any:
                found = list(values(grid[x], metric).values())
                if rank is not None:
                    return rank(found)
                s = st.summarize(found, bootstrap=0)
                if s.n == 0:
                    return math.inf, math.inf
                return s.lost, s.mean if lower_is_better else -s.mean

            best = min(grid, key=score)
            kept += grid[best]
            if len(grid) > 1 and best in (min(grid), max(grid)):
                where = ", ".join(f"{k}={v}" for k, v in group)
                notes.append(f"{arm}{' at ' + where if where else ''}: the best {over} {best:g} is "
                             "at the edge of the grid.")
    return kept, notes


def ablation_table(rows: Iterable[Row], metric: str, baseline: str, *, title: str,
                   by: Sequence[str] = (), label: str = "", lower_is_better: bool = True,
                   show: Sequence[str] = (), arms: Sequence[str] = (), caption: str = "",
                   notes: Sequence[str] = ()) -> Table:
    """One line per arm and group: mean with 95 % CI, paired difference to `baseline`, Holm's p.

    Args:
      by: axes that make the groups; arms compare within a group.
      show: axes to print though they make no groups (the tuned learning rate).
      arms: order of the lines, default order of appearance.

    Bold: the best mean, only if it beats every other arm of its group after correction.
    """
    lines, commands = [], []
    for group, found in split(rows, by).items():
        per_arm = {a: values(found[a], metric) for a in _order(found, arms)}
        base = per_arm.get(baseline, {})
        versus = st.holm({a: st.paired(v, base) for a, v in per_arm.items() if a != baseline})
        best = st.winners(per_arm, lower_is_better=lower_is_better)
        for arm, seen in per_arm.items():
            s, first = st.summarize(list(seen.values()), bootstrap=0), found[arm][0]
            text = interval(s)
            lines.append((arm, *(_axis(v) for _, v in group),
                          *(_axis(first["axes"].get(a)) for a in show),
                          Bold(text) if arm in best else text,
                          *_versus(versus.get(arm)), str(s.n + s.lost)))
            commands += _commands(found[arm], group)
    columns = ("arm", *by, *show, label or metric, f"difference to {baseline}", "p (Holm)", "seeds")
    return Table(title, columns, tuple(lines), caption, tuple(notes), tuple(commands))


def _versus(c: st.Paired | None) -> tuple[str, str]:
    if c is None or c.n == 0:
        return "–", "–"
    half = None if c.high is None else c.high - c.difference
    text = number(c.difference, half)
    if c.difference > 0:
        text = "+" + text
    if half:
        text += f" ± {number(half, half)}"
    if c.unpaired:
        text += f" ({c.unpaired} unpaired)"
    return text, p_value(c.adjusted)


def times_table(rows: Iterable[Row], metric: str, budget: float, baseline: str, *, title: str,
                by: Sequence[str] = (), label: str = "", show: Sequence[str] = (),
                arms: Sequence[str] = (), caption: str = "", notes: Sequence[str] = ()) -> Table:
    """Time to solve with censoring: median [min, max], seeds solved with Wilson's interval, p."""
    lines, commands = [], []
    for group, found in split(rows, by).items():
        per_arm = {a: values(found[a], metric) for a in _order(found, arms)}
        base = per_arm.get(baseline, {})
        versus = st.holm({a: st.paired_times(v, base, budget) for a, v in per_arm.items()
                          if a != baseline})
        for arm, seen in per_arm.items():
            t, c = st.times(list(seen.values()), budget), versus.get(arm)
            inside = [v if v <= budget else math.inf for v in seen.values()]
            finite = sorted(v if not math.isnan(v) else math.inf for v in inside)
            spread = f" [{_time(finite[0], budget)}, {_time(finite[-1], budget)}]"
            lines.append((arm, *(_axis(v) for _, v in group),
                          *(_axis(found[arm][0]["axes"].get(a)) for a in show),
                          _time(t.median, budget) + (spread if t.n > 1 else " (n=1)"),
                          f"{t.solved}/{t.n} [{t.fraction_low:.2f}, {t.fraction_high:.2f}]",
                          "–" if c is None or math.isnan(c.difference) else
                          ("+" if c.difference > 0 else "") + number(c.difference),
                          p_value(c.adjusted) if c else "–"))
            commands += _commands(found[arm], group)
    columns = ("arm", *by, *show, label or metric, "solved [95 % CI]",
               f"median difference to {baseline}", "p (Holm)")
    return Table(title, columns, tuple(lines), caption, tuple(notes), tuple(commands))


def _time(value: float, budget: float) -> str:
    return f"> {number(budget)}" if math.isinf(value) else number(value)


def _axis(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value is None else str(value)


def _order(found: Mapping[str, Any], arms: Sequence[str]) -> list[str]:
    return [a for a in arms if a in found] + [a for a in found if a not in arms]


def _commands(rows: Iterable[Row], group: Group) -> list[tuple[str, str]]:
    where = "".join(f" {k}={_axis(v)}" for k, v in group)
    return [(f"{row['arm']}{where} seed={row['seed']}", row["command"])
            for row in rows if "command" in row]
