"""Cells and the ledger: fingerprints, torn lines, foreign files, one writer."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tx_jax.config import ModelConfig
from tx_jax.errors import UserError
from tx_jax.study import cells
from tx_jax.study.cells import Cell, canonical, code_hash, data_hash, fingerprint, restore, short
from tx_jax.study.ledger import Ledger, Measured, find, finished, make_row, read, versions

CELL = Cell("scaling", "retrieval", "scaled", (("d_k", 64), ("lr", 1e-3)), 2, canonical({"n": 16}))


def _row(cell=CELL, code="c", **metrics):
    return make_row(cell, Measured(metrics or {"loss": 1.5}, 2.0), code=code, data="d",
                    versions={"jax": "1"}, device="cpu x2")


def test_fingerprint_depends_on_cell_code_and_data_only():
    base = fingerprint(CELL, "code", "data")
    assert base == fingerprint(Cell(**CELL.__dict__), "code", "data") and len(base) == 64
    others = [fingerprint(Cell(**{**CELL.__dict__, **change}), "code", "data") for change in (
        {"seed": 3}, {"arm": "none"}, {"axes": (("d_k", 16), ("lr", 1e-3))}, {"part": "lm"},
        {"settings": canonical({"n": 17})}, {"study": "x"})]
    others += [fingerprint(CELL, "code2", "data"), fingerprint(CELL, "code", "data2")]
    assert len({base, *others}) == 9
    assert short(base) == base[:10]
    assert _row()["fingerprint"] == {**_row(), "device": "gpu"}["fingerprint"]


def test_canonical_json_is_ordered_strict_and_reads_back():
    assert canonical({"b": 1, "a": (1, np.float32(0.5))}) == '{"a":[1,0.5],"b":1}'
    values = {"x": math.nan, "y": [math.inf, -math.inf], "z": np.array([1, 2])}
    text = canonical(values)
    assert "NaN" not in text and "Infinity" not in text
    back = restore(json.loads(text))
    assert math.isnan(back["x"]) and back["y"] == [math.inf, -math.inf] and back["z"] == [1, 2]
    assert json.loads(canonical(ModelConfig()))["heads"] == 4


def test_code_hash_sees_sources_but_not_readouts(tmp_path):
    extra = tmp_path / "exp.py"
    extra.write_text("x = 1\n")
    one = code_hash(("tx_jax.study",), (extra,))
    assert one == code_hash(("tx_jax.study",), (extra,))
    extra.write_text("x = 2\n")
    assert one != code_hash(("tx_jax.study",), (extra,))
    assert data_hash("a", "b") != data_hash("ab")
    folder = {path.name for path in Path(cells.__file__).parent.glob("*.py")}
    assert cells.READOUTS < folder, "a read-out that was renamed would count as code"
    assert {"cells.py", "flops.py", "replicas.py", "runner.py"} <= folder - cells.READOUTS


def test_rows_survive_and_nan_reads_back(tmp_path):
    path = tmp_path / "run" / "results.jsonl"
    with Ledger(path) as ledger:
        ledger.append(_row(loss=math.nan, curve=[1.0, math.inf]))
        ledger.append(_row(code="other"))
    rows = read(path)
    assert math.isnan(rows[0]["metrics"]["loss"]) and rows[0]["metrics"]["curve"][1] == math.inf
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} is not strict JSON"))
    assert list(finished(rows, [CELL], "c", "d")) == [CELL]
    assert finished(rows, [CELL], "new code", "d") == {}
    assert find(rows, rows[0]["fingerprint"][:10])["code"] == "c"
    with pytest.raises(UserError, match="names 0 cells"):
        find(rows, "zzz")


@pytest.mark.parametrize("kept", [1, 7, 30, -2])
@pytest.mark.parametrize("before", [0, 1])
def test_a_torn_last_line_is_cut_and_writing_goes_on(tmp_path, kept, before):
    path = tmp_path / "results.jsonl"
    line = (canonical(_row()) + "\n").encode()
    path.write_bytes(line * before + line[:kept])
    assert len(read(path)) == before
    with Ledger(path) as ledger:
        assert len(ledger.rows) == before
        ledger.append(_row())
    assert len(read(path)) == before + 1
    assert path.read_bytes() == line * before + path.read_bytes()[len(line) * before:]


def test_a_missing_last_newline_is_added(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text(canonical(_row()))
    with Ledger(path) as ledger:
        assert len(ledger.rows) == 1
        ledger.append(_row())
    assert len(read(path)) == 2


@pytest.mark.parametrize("text", ["hello\n", '{"a": 1}\n', "[1]\n", "hello", "\x00\x01\n"])
def test_a_foreign_file_is_refused_and_left_alone(tmp_path, text):
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match="line 1 is not a result row"), Ledger(path):
        pass
    assert path.read_text() == text


def test_corruption_in_the_middle_names_the_line(tmp_path):
    path = tmp_path / "results.jsonl"
    line = canonical(_row())
    path.write_text(f"{line}\n{line[:40]}\n{line}\n")
    with pytest.raises(UserError, match="line 2"):
        read(path)


def test_one_writer_at_a_time(tmp_path):
    path = tmp_path / "results.jsonl"
    with Ledger(path), pytest.raises(UserError, match="written by another run"), Ledger(path):
        pass
    with Ledger(path):
        pass


def test_a_workdir_that_is_a_file_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another --workdir"), \
            Ledger(tmp_path / "file" / "results.jsonl"):
        pass


def test_kill_in_the_middle_of_writing_loses_no_finished_row(tmp_path):
    path = tmp_path / "results.jsonl"
    code = (
        "import sys; from pathlib import Path\n"
        "from tx_jax.study.cells import Cell\n"
        "from tx_jax.study.ledger import Ledger, Measured, make_row\n"
        "with Ledger(Path(sys.argv[1])) as ledger:\n"
        "    for i in range(10**6):\n"
        "        ledger.append(make_row(Cell('s', 'p', 'a', seed=i), Measured({'x': i}, 1.0),\n"
        "                      code='c', data='d', versions={}, device=''))\n"
        "        print(i, flush=True)\n")
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE,
                          text=True) as child:
        seen = [int(child.stdout.readline()) for _ in range(20)]
        time.sleep(0.02)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    with Ledger(path) as ledger:
        seeds = [row["seed"] for row in ledger.rows]
    assert seeds == list(range(len(seeds))) and len(seeds) > seen[-1]


def test_versions_name_the_libraries():
    found = versions()
    assert {"python", "jax", "jaxlib", "flax", "optax", "numpy", "tx_jax", "commit"} == set(found)
    assert found["jax"]
