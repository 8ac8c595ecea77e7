"""The command line: what it lists, explains and refuses, and a study from flag to report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import launch
from tx_jax.study.cells import canonical

ROOT = Path(launch.__file__).parent
SCALING = "--experiment=scaling_ablation"


def run(capsys, *argv):
    status = launch.main(list(argv))
    out, err = capsys.readouterr()
    return status, out, err


def test_list_names_every_study(capsys):
    status, out, _ = run(capsys, "--list")
    assert status == 0
    assert "scaling_ablation" in out and "language_model" in out and "throughput" not in out


def test_help_shows_flags_with_defaults(capsys):
    status, out, _ = run(capsys, SCALING, "--help")
    assert status == 0 and "--retrieval.lrs" in out and "0.001,0.003,0.01" in out


def test_explain_runs_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys, SCALING, "--preset=smoke", "--explain", "--cpu_devices=8")
    assert status == 0 and "cells" in out and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("argv", "words"), [
    ([], "no experiment is named"),
    (["--experiment=scaling_abblation"], "did you mean 'scaling_ablation'"),
    (["--experiment"], "no experiment is named"),
    ([SCALING, "--preset=smal"], "did you mean 'small'"),
    ([SCALING, "--seed=5"], "did you mean 'seeds'"),
    ([SCALING, "--retreival.steps=100"], "did you mean 'retrieval.steps'"),
    ([SCALING, "--retrieval.steps=120"], "not a multiple of 50; try 150"),
    ([SCALING, "--arms=dot"], "lacks 'scaled_dot'"),
    ([SCALING, "--arms=scaled_dot,doot"], "did you mean 'dot'"),
    ([SCALING, "--model.d_model=4"], "no flag --model.d_model"),
    ([SCALING, "--table", "--cell=abc"], "contradict"),
    ([SCALING, "--parts=initial", "--lm.steps=100"], "--lm.steps=100 has no effect"),
    (["--experiment=language_model", "--model.mlp=none", "--model.d_ff=8"], "there is no MLP"),
    (["--experiment=language_model", "--data.field=body"], "this text has no fields"),
    ([SCALING, "--cpu_devices=-1"], "--cpu_devices=-1"),
    ([SCALING, "--workdir=/proc/x"], "cannot be written"),
    (["--experiment=language_model", "--mesh=dta:2"], "did you mean 'data'"),
    (["--experiment=language_model", "--optim.accumulate=3"], "does not divide"),
    (["--experiment=language_model", "--parts=initial"], "no flag --parts"),
    (["--experiment=language_model", "--model.mask=causal | full"], "has to predict"),
    (["--experiment=language_model", "--model.mask=full"], "write it as 'causal & full'."),
    (["--experiment=language_model", "--model.mask=causal | full"], "'causal & (causal | full)'"),
    (["--experiment=language_model", "--model.mask=casual"], "did you mean 'causal'"),
    (["--experiment=language_model", "--data.tokenizer=chr"], "did you mean 'char'"),
    (["--experiment=language_model", "--model.attention=jax_nn", "--model.dropout=0.1"], "cannot"),
    (["--experiment=language_model", "--seeds=0"], "--seeds=0 is too small"),
    ([SCALING, "--attention=nosuch"], "no attention implementation named 'nosuch'"),
    (["--list", "--foo"], "--list stands alone; drop '--foo'"),
    ([SCALING, "--list"], "--list stands alone"),
    ([SCALING, "--retrieval.lrs=-1"], "--retrieval.lrs=-1.0 is too small"),
    ([SCALING, "--initial.d_k=16,16"], "names a value twice"),
])
def test_a_mistake_is_one_sentence_and_status_2(argv, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *argv)
    assert status == 2 and words in err
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in out + err


def test_a_foreign_workdir_is_refused(capsys, tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    status, _, err = run(capsys, SCALING, "--preset=smoke", f"--workdir={tmp_path}",
                         "--cpu_devices=8")
    assert status == 2 and "not empty" in err


SMALL = ("--preset=smoke", "--parts=initial", "--initial.d_k=4,64", "--cpu_devices=8")


def test_a_study_from_flag_to_report_and_again(capsys, tmp_path):
    """The whole way: run, skip what is finished, rebuild the table, reproduce a cell."""
    where = f"--workdir={tmp_path / 'run'}"
    status, out, _ = run(capsys, SCALING, *SMALL, where)
    assert status == 0 and "8 to run" in out
    report = (tmp_path / "run" / "report.html").read_text()
    assert "http://" not in report.replace("http://www.w3.org", "") and "data:image/png" in report
    table = (tmp_path / "run" / "table.md").read_text()
    assert table.count("(Holm) |") == 2 and "corrected by Holm over these 2 claims" in table
    ledger = (tmp_path / "run" / "results.jsonl").read_text()
    rows = [json.loads(line) for line in ledger.splitlines()]
    assert len(rows) == 8 and all(r["status"] == "ok" for r in rows)

    status, out, _ = run(capsys, SCALING, *SMALL, where)
    assert status == 0 and "8 finished before, 0 to run" in out
    status, out, _ = run(capsys, SCALING, *SMALL, where, "--table")
    assert status == 0 and (tmp_path / "run" / "table.md").read_text() == table
    status, out, _ = run(capsys, SCALING, *SMALL, where, "--initial.rows=100", "--table")
    assert status == 0 and "8 of 8 cells are missing" in out
    again = rows[3]["fingerprint"][:10]
    status, out, _ = run(capsys, SCALING, *SMALL, where, f"--cell={again}")
    assert status == 0 and canonical(rows[3]["metrics"]["entropy"]) in out
    assert "4 cell(s), strategy 'none'" in out and "is reproduced bit for bit" in out
    assert "--cpu_devices=8" in report, "the number of devices decides rounding"
    status, _, err = run(capsys, SCALING, *SMALL, where, "--cell=feedfacade")
    assert status == 2 and "feedfacade" in err


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sharded", "queue"])
def test_a_trained_cell_is_reproduced_bit_for_bit(strategy, capsys, tmp_path):
    """A lone cell would be compiled and split otherwise; its whole program runs again."""
    flags = (SCALING, "--preset=smoke", "--parts=retrieval", "--retrieval.d_k=16",
             "--retrieval.lrs=0.01", "--retrieval.steps=50", "--cpu_devices=8",
             f"--workdir={tmp_path / 'run'}")
    assert run(capsys, *flags, f"--strategy={strategy}")[0] == 0
    before = (tmp_path / "run" / "results.jsonl").read_bytes()
    row = json.loads(before.splitlines()[2])
    assert row["strategy"] == strategy and len(row["together"]) == 4
    status, out, _ = run(capsys, *flags, f"--cell={row['fingerprint'][:10]}")
    assert status == 0 and f"4 cell(s), strategy '{strategy}'" in out
    assert "is reproduced bit for bit" in out
    assert (tmp_path / "run" / "results.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_language_model_cell(capsys, tmp_path):
    """Its costs are recorded, a derived default written out is the same cell, and it runs again."""
    (tmp_path / "owl.txt").write_text("the owl and the pussy-cat went to sea. " * 60)
    flags = ("--experiment=language_model", "--preset=smoke", f"--data.text={tmp_path / 'owl.txt'}",
             "--model.layers=1", "--train.steps=4", "--train.save_every=2", "--train.eval_every=0",
             "--cpu_devices=8", f"--workdir={tmp_path / 'run'}")
    status, _, err = run(capsys, *flags)
    assert status == 0, err
    ledger = (tmp_path / "run" / "results.jsonl").read_bytes()
    row = json.loads(ledger)
    per_token = row["flops"] / (4 * 16 * 32)  # at least 6 per parameter that multiplies
    parameters = row["metrics"]["parameters_without_embedding"]
    assert 6 * parameters < per_token < 20 * row["metrics"]["parameters"]
    assert row["compile_seconds"] > 0 and row["seconds"] > 0 and row["kernel"] == "reference"
    status, out, _ = run(capsys, *flags, "--model.kv_heads=2", "--model.head_dim=16",
                         "--model.d_ff=128")
    assert status == 0 and "1 finished before, 0 to run" in out
    status, out, _ = run(capsys, *flags, f"--cell={row['fingerprint'][:10]}")
    assert status == 0 and "is reproduced bit for bit" in out and "resuming" not in out
    assert not list((tmp_path / "run" / "again").iterdir())
    assert (tmp_path / "run" / "results.jsonl").read_bytes() == ledger


@pytest.mark.slow
def test_the_smoke_preset_runs_from_another_directory(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), SCALING, "--preset=smoke", "--workdir=run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "report.html").exists()
    assert "Character language model" in (tmp_path / "run" / "table.md").read_text()
