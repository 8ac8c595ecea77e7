"""Working directories: claimed once, never mixed, refused before anything is compiled."""

import os

import pytest

from tx_jax import metrics
from tx_jax.errors import UserError
from tx_jax.study import report
from tx_jax.workdir import MARKER, claim, write_atomic


def test_relative_home_spaces_and_slash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert claim("runs/x", "a") == tmp_path / "runs" / "x"
    assert claim("~/y", "a") == tmp_path / "y"
    assert claim("with space/", "a") == tmp_path / "with space"


def test_the_same_experiment_comes_back_and_another_is_refused(tmp_path):
    claim(str(tmp_path / "w"), "a")
    (tmp_path / "w" / "results.jsonl").write_text("")
    assert claim(str(tmp_path / "w"), "a") == tmp_path / "w"
    with pytest.raises(UserError, match="belongs to the experiment 'a', not 'b'"):
        claim(str(tmp_path / "w"), "b")


def test_a_foreign_directory_a_file_and_a_damaged_marker_are_refused(tmp_path):
    (tmp_path / "theirs.txt").write_text("keep me")
    with pytest.raises(UserError, match="not empty"):
        claim(str(tmp_path), "a")
    with pytest.raises(UserError, match="is a file"):
        claim(str(tmp_path / "theirs.txt"), "a")
    with pytest.raises(UserError, match="cannot be written"):
        claim(str(tmp_path / "theirs.txt" / "below"), "a")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / MARKER).write_text("{")
    with pytest.raises(UserError, match="damaged"):
        claim(str(tmp_path / "old"), "a")


def test_a_read_only_place_is_refused():
    with pytest.raises(UserError, match="cannot be written"):
        claim("/proc/nowhere/run", "a")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "f"
    write_atomic(path, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path], "no rest stays behind"


def test_one_function_writes_every_file_that_must_be_whole(tmp_path):
    write_atomic(tmp_path / "b", b"\x00\xff")
    assert (tmp_path / "b").read_bytes() == b"\x00\xff"
    for module in (metrics, report):
        assert module.write_atomic is write_atomic
