"""Tables, figures and the report: pure functions of rows, escaped, self-contained."""

import csv
import io
import math
import re
from html.parser import HTMLParser

import pytest
from matplotlib.axes import Axes

from tx_jax.errors import UserError
from tx_jax.study.figures import _canvas, _dress, curves, heat_map, lines
from tx_jax.study.report import Report, render, write_report
from tx_jax.study.tables import Bold, Table, ablation_table, number, p_value, times_table, tune
from tx_jax.study.verdicts import Verdict


def rows(arms=("scaled", "none"), d_ks=(16, 64), lrs=(1e-3, 1e-2), seeds=5):
    out = []
    for i, arm in enumerate(arms):
        for d_k in d_ks:
            for lr in lrs:
                for seed in range(seeds):
                    bad = arm == "none" and lr == 1e-2 and d_k == 64
                    loss = math.nan if bad else 1 + i + 0.01 * seed + 0.003 * ((seed * 7 + i) % 5)
                    out.append({
                        "arm": arm, "axes": {"d_k": d_k, "lr": lr}, "seed": seed,
                        "status": "diverged" if bad else "ok", "command": f"run --cell={arm}{seed}",
                        "metrics": {"loss": loss + 10 * (lr - 1e-3),
                                    "steps": math.inf if bad else (1 + i) * d_k + seed}})
    return out


@pytest.mark.parametrize(("value", "half", "text"), [
    (1.23456, 0.0123, "1.235"), (1.23456, 0.5, "1.23"), (1234.5, 120.0, "1230"),
    (0.5, 0.0996, "0.50"), (2.0, None, "2"), (math.inf, None, "∞"), (math.nan, 1.0, "nan"),
    (None, None, "–"), (3.14159, 0.0, "3.142"), (1e-7, None, "1.000e-07"), (-0.25, 0.1, "-0.25")])
def test_numbers_end_at_the_second_digit_of_their_interval(value, half, text):
    assert number(value, half) == text


def test_p_values():
    assert (p_value(0.0312), p_value(1e-5), p_value(None)) == ("0.031", "< 0.001", "–")


def test_ablation_table_compares_within_groups_and_counts_diverged_seeds():
    table = ablation_table(rows(), "loss", "scaled", title="Loss", by=("d_k", "lr"))
    assert table.columns == ("arm", "d_k", "lr", "loss", "difference to scaled", "p (Holm)",
                             "seeds")
    by_line = {tuple(r[:3]): r for r in table.rows}
    best = by_line["scaled", "16", "0.001"]
    assert isinstance(best[3], Bold) and "±" in best[3].text and best[4] == "–"
    worse = by_line["none", "16", "0.001"]
    assert isinstance(worse[3], str) and worse[4].startswith("+1.0") and worse[5] == "< 0.001"
    assert by_line["none", "64", "0.01"][3] == "all diverged"
    assert by_line["none", "64", "0.01"][6] == "5"
    assert len(table.commands) == 40 and table.commands[0][1] == "run --cell=scaled0"


def test_one_seed_says_that_there_is_no_interval():
    table = ablation_table(rows(seeds=1), "loss", "scaled", title="Loss", by=("d_k", "lr"))
    assert table.rows[0][3] == "1 (no CI, n=1)"
    assert not any(isinstance(e, Bold) for r in table.rows for e in r)


def test_unknown_metric_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'loss'"):
        ablation_table(rows(), "los", "scaled", title="Loss")


def test_tune_picks_per_arm_and_tells_when_the_optimum_is_at_the_edge():
    kept, notes = tune(rows(lrs=(1e-4, 1e-3, 1e-2)), "loss", over="lr", by=("d_k",))
    assert {r["axes"]["lr"] for r in kept} == {1e-4} and len(notes) == 4
    assert "edge of the grid" in notes[0]
    kept, _ = tune(rows(), "loss", over="lr", by=("d_k",), lower_is_better=False)
    assert {r["axes"]["lr"] for r in kept if r["arm"] == "none" and r["axes"]["d_k"] == 64} == {
        1e-3}, "a value at which seeds diverge is never the best"


def test_times_table_shows_censoring():
    table = times_table(rows(), "steps", 2000, "scaled", title="Steps", by=("d_k", "lr"))
    by_line = {tuple(r[:3]): r for r in table.rows}
    assert by_line["none", "64", "0.01"][3:5] == ("> 2000 [> 2000, > 2000]", "0/5 [0.00, 0.43]")
    assert by_line["none", "64", "0.01"][5] == "+∞"
    assert by_line["scaled", "16", "0.001"][3] == "18 [16, 20]"


def test_renderings_escape_and_agree():
    table = Table("A|B", ("a_b", "50 %"),
                  ((Bold("x|y"), "1 & 2"), ("<i>", "√d ± 1")), "cap", ("n",))
    md = table.markdown()
    assert "**x\\|y**" in md and "| --- | --- |" in md and "&lt;i>" in md
    assert list(csv.reader(io.StringIO(table.csv()))) == [
        ["a_b", "50 %"], ["x|y", "1 & 2"], ["<i>", "√d ± 1"]]
    tex = table.latex()
    assert r"a\_b & 50 \%" in tex and r"1 \& 2" in tex and r"\textbf{x\textbar{}y}" in tex
    assert r"$\pm$" in tex
    with pytest.raises(ValueError, match="columns"):
        Table("t", ("a",), (("1", "2"),))


def _figures():
    return (
        lines(rows(("scaled", "none", "additive")), "steps", "lr", name="steps", title="Steps",
              arms=("scaled", "none", "additive"), panel="d_k", budget=200, log_y=True),
        lines(rows(), "loss", "lr", name="loss", title="Loss", arms=("scaled", "none"),
              reference={"chance": 4.16}),
        curves({"d_k 64": {"scaled": [[3, 2, 1], [3.1, 2.2, 1.1]]}}, name="curve", title="Curve",
               x=(0, 50, 100), arms=("scaled",), xlabel="step", ylabel="loss"),
        heat_map({"a": {"64": 0.0, "128": 2.0}, "b": {"64": -0.001}}, name="heat", title="Heat",
                 xlabel="length", label="nats", top=1.0))


def test_figures_are_png_and_the_same_twice():
    first, second = _figures(), _figures()
    for a, b in zip(first, second, strict=True):
        assert a.png.startswith(b"\x89PNG") and a.png == b.png


def test_a_heat_map_prints_its_numbers_where_they_belong(monkeypatch):
    seen = {}
    monkeypatch.setattr(Axes, "text", lambda self, x, y, s, **_: seen.setdefault((y, x), s))
    heat_map({"a": {"64": 0.0, "128": 2.0}, "b": {"128": -0.001, "64": math.nan},
              "c": {"256": -0.5}}, name="h", title="H", xlabel="x", label="y", top=1.0)
    assert seen == {(0, 0): "+0.00", (0, 1): "+2.00", (1, 1): "+0.00", (2, 2): "-0.50"}


@pytest.mark.parametrize(("low", "high", "labels"), [
    (70, 400, {"100", "200"}), (12, 900, {"20", "50", "100", "200", "500"}),
    (1e-6, 1e2, {"1e-6", "1e-4", "0.01", "1", "100"})])
def test_log_axes_carry_labels_that_can_be_read(low, high, labels):
    canvas, (ax,) = _canvas(1)
    ax.plot([1, 10], [low, high])
    _dress(ax, [1, 10], "", "x", True, True)
    canvas.draw_without_rendering()
    shown = {t.label1.get_text() for t in ax.yaxis.get_major_ticks()}
    assert labels <= shown and len(shown) <= 12 and not any("$" in t for t in shown)
    assert not any(t.label1.get_text() for t in ax.yaxis.get_minor_ticks())


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.ids, self.links, self.sources = [], [], [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        self.ids += [attrs["id"]] if "id" in attrs else []
        self.links += [attrs["href"]] if "href" in attrs else []
        self.sources += [attrs["src"]] if "src" in attrs else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_report_is_one_page_that_loads_nothing(tmp_path):
    table = ablation_table(rows(), "loss", "scaled", title="Loss <final>", by=("d_k", "lr"))
    report = Report("T & U", ("one",), (Verdict("c", "agrees", "d"),
                                        Verdict("e", "not resolvable with these seeds", "f", 12)),
                    (table,), _figures()[:1], ("n",), (("commit", "abc"),))
    path = write_report(report, tmp_path / "out")
    text = path.read_text()
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert all(link[1:] in page.ids for link in page.links) and len(page.links) >= 6
    assert len(set(page.ids)) == len(page.ids)
    assert all(s.startswith("data:image/png;base64,") for s in page.sources) and page.sources
    assert not re.search(r"https?://|@import|<script|url\(", text)
    assert "T &amp; U" in text and "Loss &lt;final&gt;" in text
    assert "40 commands that reproduce" in text and "run --cell=none4" in text
    assert (tmp_path / "out/figures/steps.png").read_bytes() == report.figures[0].png
    assert "12" in (tmp_path / "out/table.md").read_text()
    assert "corrected over the claims of this table" in (tmp_path / "out/table.md").read_text()
    assert "corrected over the claims of this table" in text
    assert "\\begin{tabular}" in (tmp_path / "out/table.tex").read_text()
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "figures", "report.html", "table.csv", "table.md", "table.tex"]
    assert render(report) == text


def test_unwritable_folder_is_one_sentence(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(UserError, match="choose another --workdir"):
        write_report(Report("t", ()), tmp_path / "x")
