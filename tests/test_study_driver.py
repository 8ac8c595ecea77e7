"""The driver: resume, --table, --cell, failures that lose nothing."""

import io
import math
import re
import shlex
from dataclasses import dataclass

import pytest
from rich.console import Console

from tx_jax.errors import UserError
from tx_jax.study.cells import Cell, canonical
from tx_jax.study.contract import Study
from tx_jax.study.driver import reproduce_command, run_study
from tx_jax.study.ledger import Measured, read
from tx_jax.study.report import Report
from tx_jax.study.rerun import agreement
from tx_jax.study.tables import ablation_table

COMMAND = ["python", "launch.py", "--experiment=toy", "--workdir=a b"]


@dataclass(frozen=True)
class Settings:
    seeds: int = 3
    arms: tuple[str, ...] = ("a", "b")
    scale: float = 1.0


def cells(settings):
    return [Cell("toy", "p", arm, (("lr", 0.1),), seed, canonical({"scale": settings.scale}))
            for arm in settings.arms for seed in range(settings.seeds)]


def make_study(ran, fail=lambda cell: False):
    def run(settings, group, context):
        for cell in group:
            if fail(cell):
                raise RuntimeError(f"bad {cell.arm}{cell.seed}\nsecond line")
            ran.append((cell.arm, cell.seed))
            context.advance(0.5)
            yield cell, Measured({"loss": settings.scale + cell.seed + (cell.arm == "b")}, 0.1)

    def report(settings, rows):
        return Report("Toy", (), tables=(ablation_table(rows, "loss", "a", title="Loss"),))

    return Study("toy", "A toy study", Settings, {"smoke": {"seeds": 1}}, cells, run, report,
                 swept={"arm": "arms"})


def go(study, tmp_path, settings=None, **options):
    out = io.StringIO()
    outcome = run_study(study, settings or Settings(), tmp_path, command=COMMAND,
                        console=Console(file=out, width=300), **options)
    return outcome, out.getvalue()


def test_a_second_run_does_nothing_and_a_wider_one_runs_what_is_new(tmp_path):
    ran = []
    first, text = go(make_study(ran), tmp_path)
    assert len(ran) == 6 and first.ran == 6 and "6 to run" in text
    assert first.report == tmp_path / "report.html" and first.report.exists()
    before = (tmp_path / "table.md").read_text()
    again, text = go(make_study(ran), tmp_path)
    assert len(ran) == 6 and again.skipped == 6 and "6 finished before, 0 to run" in text
    assert (tmp_path / "table.md").read_text() == before
    wider, _ = go(make_study(ran), tmp_path, Settings(seeds=4))
    assert wider.skipped == 6 and ran[6:] == [("a", 3), ("b", 3)]
    go(make_study(ran), tmp_path, Settings(scale=2.0))
    assert len(ran) == 14, "other settings are other cells"


def test_one_bad_cell_loses_nothing_and_is_reported_with_its_command(tmp_path):
    ran = []
    outcome, text = go(make_study(ran, lambda c: (c.arm, c.seed) == ("a", 1)), tmp_path)
    assert sorted(ran) == [("a", 0), ("a", 2), ("b", 0), ("b", 1), ("b", 2)]
    assert [f.error for f in outcome.failures] == ["RuntimeError: bad a1"]
    assert "second line" in outcome.failures[0].trace
    assert outcome.failures[0].command in text and outcome.report.exists()
    assert outcome.ran == 5 and len(read(tmp_path / "results.jsonl")) == 5
    mended, _ = go(make_study(ran), tmp_path)
    assert not mended.failures and ran[-1] == ("a", 1)


def test_a_killed_run_keeps_the_rows_it_had(tmp_path):
    ran = []

    def kill(cell):
        if (cell.arm, cell.seed) == ("b", 1):
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        go(make_study(ran, kill), tmp_path)
    assert len(read(tmp_path / "results.jsonl")) == 4
    outcome, _ = go(make_study(ran), tmp_path)
    assert outcome.skipped == 4 and outcome.ran == 2


def test_table_runs_nothing_and_names_what_is_missing(tmp_path):
    ran = []
    empty, text = go(make_study(ran), tmp_path, only_table=True)
    assert empty.report is None and "6 of 6 cells are missing" in text and not ran
    go(make_study(ran), tmp_path, Settings(seeds=2))
    ran.clear()
    outcome, text = go(make_study(ran), tmp_path, only_table=True)
    assert not ran and len(outcome.missing) == 2 and "2 of 6 cells are missing" in text
    assert shlex.join(COMMAND) in text and outcome.report.exists()
    for name in re.findall(r"--cell=(\w+)", text):
        go(make_study(ran), tmp_path, cell=name)
    assert ran == [("a", 2), ("b", 2)], "the commands shown fill the gaps"
    full, _ = go(make_study(ran), tmp_path, only_table=True)
    assert not full.missing


def test_every_table_cell_carries_a_command_that_reproduces_it(tmp_path):
    ran = []
    go(make_study(ran), tmp_path)
    commands = re.findall(r"--cell=(\w{10})", (tmp_path / "report.html").read_text())
    assert len(set(commands)) == 6
    ran.clear()
    _, text = go(make_study(ran), tmp_path, cell=commands[4])
    assert ran == [("b", 0), ("b", 1), ("b", 2)] and "loss: 3.0   before: 3.0" in text
    assert "3 cell(s), strategy 'none'" in text and "is reproduced bit for bit" in text
    with pytest.raises(UserError, match="names 0 of the 6"):
        go(make_study(ran), tmp_path, cell="zz")


def test_running_a_finished_cell_again_never_replaces_its_row(tmp_path):
    go(make_study([]), tmp_path, Settings(seeds=1))
    table = (tmp_path / "table.md").read_bytes()
    rows = (tmp_path / "results.jsonl").read_bytes()

    def drifting(settings, group, context):
        for cell in group:
            yield cell, Measured({"loss": 1.1}, 0.1, strategy="sequential")

    other = Study(**{**make_study([]).__dict__, "run": drifting})
    name = re.search(r"--cell=(\w{10})", (tmp_path / "report.html").read_text())[1]
    outcome, text = go(other, tmp_path, Settings(seeds=1), cell=name)
    assert outcome.ran == 1 and "loss: 1.1   before: 1.0" in text
    assert "largest relative difference is 0.091, of loss" in text
    assert "recorded with strategy 'none', now 'sequential'" in text
    assert (tmp_path / "results.jsonl").read_bytes() == rows
    go(make_study([]), tmp_path, Settings(seeds=1), only_table=True)
    assert (tmp_path / "table.md").read_bytes() == table


def test_a_cell_runs_again_with_those_it_trained_with_and_their_strategy(tmp_path):
    """Seeds 0 and 1 first, then 2: only the former make up the program of seed 1."""
    calls = []

    def run(settings, group, context):
        recorded = context.recorded and context.recorded["strategy"]
        calls.append(([c.seed for c in group], recorded))
        for cell in group:
            yield cell, Measured({"loss": float(len(group))}, 0.1, strategy=recorded or "vmap")

    study = Study(**{**make_study([]).__dict__, "run": run})
    one_arm = {"arms": ("a",)}
    go(study, tmp_path, Settings(seeds=2, **one_arm))
    go(study, tmp_path, Settings(seeds=3, **one_arm))
    rows = read(tmp_path / "results.jsonl")
    assert [len(row["together"]) for row in rows] == [2, 2, 1]
    name = rows[1]["fingerprint"][:10]
    assert rows[1]["together"][1] == name
    calls.clear()
    outcome, text = go(study, tmp_path, Settings(seeds=3, **one_arm), cell=name)
    assert calls == [([0, 1], "vmap")] and outcome.ran == 1
    assert "2 cell(s), strategy 'vmap'" in text and "is reproduced bit for bit" in text
    _, text = go(study, tmp_path, Settings(seeds=1, **one_arm), cell=rows[0]["fingerprint"][:10])
    assert "1 more are not planned by these settings, so rounding may differ" in text
    assert "cells in one program '2', now '1'" in text
    assert read(tmp_path / "results.jsonl") == rows


@pytest.mark.parametrize(("before", "now", "word"), [
    (1.0, 1.00005, "agrees"), (1.0, 1.0002, "is 0.0002, of m"), (math.nan, math.nan, "bit for bit"),
    (math.inf, math.inf, "bit for bit"), (1.0, math.nan, "not a number"), (1, 1.0, "agrees"),
    ([1.0, 2.0], [1.0, 3.0], "is 0.33, of m"), ([1.0], [1.0, 2.0], "not a number"),
    ("a", "a", "bit for bit"), ("a", "b", "not a number"), (1.0, None, "not a number")])
def test_agreement_of_two_rows(before, now, word):
    assert word in agreement({"metrics": {"m": before}}, {"metrics": {"m": now}})


def test_a_difference_is_explained_by_what_rounding_depends_on():
    was = {"metrics": {"m": 1.0}, "strategy": "vmap", "device": "cpu x2", "together": ["a", "b"],
           "versions": {"jax": "1", "commit": "x"}}
    now = {**was, "metrics": {"m": 2.0}, "device": "cpu x8", "versions": {"jax": "2"}}
    assert ("of m, recorded with device 'cpu x2', now 'cpu x8'; jax '1', now '2'; unstable"
            in agreement(was, now))
    assert "though strategy, device and versions" in agreement(was, {**was, "metrics": {"m": 3.0}})


def test_a_mistake_of_the_user_fails_its_group_at_once_and_is_printed_once(tmp_path):
    calls = []

    def run(settings, group, context):
        calls.append(len(group))
        if group[0].arm == "b":
            raise UserError("no attention is called nosuch.")
        for cell in group:
            yield cell, Measured({"loss": 1.0}, 0.1)

    study = Study(**{**make_study([]).__dict__, "run": run})
    outcome, text = go(study, tmp_path)
    assert calls == [3, 3] and outcome.ran == 3 and len(outcome.failures) == 3
    assert text.count("nosuch") == 1 and "failed: 3 cells, the first p b" in text
    assert outcome.failures[0].command in text and "one by one" not in text
    assert study.check(Settings()) is None


def test_rows_of_other_code_are_kept_but_not_counted(tmp_path):
    extra = tmp_path / "experiment.py"
    extra.write_text("x = 1")
    ran = []
    study = make_study(ran)
    one = Study(**{**study.__dict__, "files": (extra,)})
    go(one, tmp_path / "run")
    extra.write_text("x = 2")
    outcome, text = go(one, tmp_path / "run", only_table=True)
    assert len(outcome.missing) == 6 and "6 rows are from other versions of the code" in text
    go(one, tmp_path / "run")
    assert len(ran) == 12 and len(read(tmp_path / "run" / "results.jsonl")) == 12


def test_a_study_that_breaks_its_contract_is_told(tmp_path):
    def silent(settings, group, context):
        return iter(())

    study = Study(**{**make_study([]).__dict__, "run": silent})
    outcome, _ = go(study, tmp_path)
    assert len(outcome.failures) == 6 and "without a result" in outcome.failures[0].error
    with pytest.raises(UserError, match="twice"):
        go(make_study([]), tmp_path, Settings(arms=("a", "a")))


def test_reproduce_command():
    got = reproduce_command("0123456789abcdef", ["python", "launch.py", "--table", "--x=a b",
                                                 "--cell=old"])
    assert got == "python launch.py '--x=a b' --cell=0123456789"
