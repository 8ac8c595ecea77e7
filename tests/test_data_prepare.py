"""Splitting, tokenising once, and a cache that survives kills, full disks, races and damage."""

import concurrent.futures
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tx_jax.config import DataConfig
from tx_jax.data import load_text, prepare, split_tail
from tx_jax.errors import UserError
from tx_jax.tokenizers import make_tokenizer

ROOT = Path(__file__).parent.parent


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcdefghi jklmnopqrstu wxyz " * 35 + "abcdefghi jklmnopqrs", encoding="utf-8")
    return path


def config(path, **options) -> DataConfig:
    return DataConfig(text=str(path), **{"context": 8, **options})


def jsonl(path: Path, documents) -> Path:
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents), encoding="utf-8")
    return path


def contents(prepared):
    return [part.tokens().tolist() + part.ends().tolist()
            for part in (prepared.train, prepared.validation)]


# ---- split

def test_split_of_one_document_is_its_exact_tail():
    assert split_tail(["abcdefghij"], 0.3) == ([("abcdefg", False)], [("hij", False)])
    assert split_tail(["abcdefghij"], 0.0) == ([("abcdefghij", False)], [])


def test_split_moves_to_a_near_document_boundary():
    documents = ["a" * 10] * 10
    train, validation = split_tail(documents, 0.22)  # 78 is near 80
    assert [len(text) for text, _ in train] == [10] * 8 and len(validation) == 2
    assert all(closed for _, closed in train + validation)


def test_split_cuts_inside_a_document_where_no_boundary_is_near():
    train, validation = split_tail(["a" * 50, "b" * 50], 0.2)
    assert train == [("a" * 50, True), ("b" * 30, False)] and validation == [("b" * 20, True)]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.5, 0.9])
def test_split_loses_nothing(share):
    documents = [chr(97 + i) * n for i, n in enumerate([1, 30, 2, 200, 1, 1, 7])]
    train, validation = split_tail(documents, share)
    assert "".join(text for text, _ in train + validation) == "".join(documents)
    assert all(text for text, _ in train + validation)
    held_out = sum(len(text) for text, _ in validation)
    assert abs(held_out - share * 242) <= 0.25 * round(share * 242) + 0.5 and train


# ---- contents

def test_tokens_and_counts_of_a_single_document(text_file, tmp_path):
    cfg = config(text_file)
    made = prepare(cfg, tmp_path / "cache")
    text = text_file.read_text(encoding="utf-8")
    assert made.tokenizer.decode(made.train.tokens()) == text[:900]
    assert made.tokenizer.decode(made.validation.tokens()) == text[900:]
    assert (made.n_train_tokens, made.n_validation_tokens) == (900, 100)
    assert made.n_validation_targets == 99 and made.n_validation_bytes == 99
    assert made.train.dtype == "uint16" and made.train.ends().tolist() == [900]
    assert made.train_path.stat().st_size == 1800


def test_documents_are_closed_by_end_of_text(tmp_path):
    documents = ["aé", "bcd", "é", "da"] * 5
    path = jsonl(tmp_path / "a.jsonl", documents)
    made = prepare(config(path, validation=0.2, packing="documents"), tmp_path / "cache")
    tok = made.tokenizer
    assert tok.decode(made.train.tokens()) == "".join(d + "<|endoftext|>" for d in documents[:16])
    ends = made.validation.ends().tolist()
    assert ends == [3, 7, 9, 12] and made.validation.tokens()[np.array(ends) - 1].tolist() == [
        tok.eos_id] * 4
    # "aé", "bcd", "é", "da": 3 + 3 + 2 + 2 bytes, of which first characters take 1 + 1 + 2 + 1.
    assert made.n_validation_targets == 8 and made.n_validation_bytes == 5
    windows = prepare(config(path, validation=0.2), tmp_path / "cache")
    assert windows.n_validation_targets == 11 and windows.n_validation_bytes == 9


@pytest.mark.parametrize("spec", ["char", "word(vocab=50)", "bpe(vocab=300)", "gpt2"])
def test_vocabulary_comes_from_the_training_part_only(tmp_path, spec):
    train, held_out = "the cat sat. " * 70, "Zebras quiz! " * 7
    (tmp_path / "a.txt").write_text(train + held_out, encoding="utf-8")
    made = prepare(config(tmp_path / "a.txt", tokenizer=spec, validation=len(held_out)
                          / len(train + held_out)), tmp_path / "cache")
    assert made.tokenizer == make_tokenizer(spec, [train])
    closed = made.tokenizer.unk_id is not None
    assert (made.n_validation_unknown > 0) == closed
    assert made.n_validation_bytes == len(held_out) - made.tokenizer.byte_lengths(held_out)[0]
    if not closed:
        assert made.tokenizer.decode(made.validation.tokens()) == held_out


def test_large_vocabularies_take_four_bytes(tmp_path):
    words = " ".join(f"w{i}" for i in range(70_000))
    (tmp_path / "a.txt").write_text(words, encoding="utf-8")
    made = prepare(config(tmp_path / "a.txt", tokenizer="word(vocab=100000)", validation=0.0),
                   tmp_path / "cache")
    assert made.train.dtype == "uint32" and made.train.tokens().max() > 2**16
    assert made.tokenizer.decode(made.train.tokens()) == words
    assert made.n_validation_tokens == made.n_validation_bytes == made.n_validation_targets == 0


@pytest.mark.parametrize("n", [1, 7, 8])
def test_shorter_than_a_row(tmp_path, n):
    """Case D8: the message names tokens and context."""
    (tmp_path / "a.txt").write_text("a" * n, encoding="utf-8")
    with pytest.raises(UserError, match=f"has {n} tokens, .*--data.context=8 needs 9"):
        prepare(config(tmp_path / "a.txt", validation=0.0), tmp_path / "cache")


def test_nothing_to_predict_in_documents(tmp_path):
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    with pytest.raises(UserError, match="no document .* two tokens"):
        prepare(config(tmp_path / "a.txt", validation=0.0, packing="documents"), tmp_path / "c")


def test_wrong_tokenizer_is_found_before_the_text_is_read(tmp_path):
    with pytest.raises(UserError, match="did you mean 'char'"):
        prepare(config(tmp_path / "missing.txt", tokenizer="chars"), tmp_path / "cache")


# ---- cache

def test_second_call_reads_the_cache(text_file, tmp_path, monkeypatch):
    cfg = config(text_file)
    first = prepare(cfg, tmp_path / "cache")
    monkeypatch.setattr("tx_jax.data._cache._rebuild", None)  # would fail if called
    second = prepare(cfg, tmp_path / "cache")
    assert second == first and contents(second) == contents(first)
    assert prepare(dataclasses.replace(cfg, context=16, packing="documents"), tmp_path / "cache"
                   ).fingerprint == first.fingerprint  # rows are not part of the key


def test_every_input_changes_the_fingerprint(text_file, tmp_path):
    made = [prepare(config(text_file, **options), tmp_path / "cache")
            for options in ({}, {"validation": 0.2}, {"tokenizer": "word"},
                            {"tokenizer": "bpe(vocab=258)"}, {"tokenizer": "bpe(vocab=260)"})]
    text_file.write_text(text_file.read_text(encoding="utf-8") + "!", encoding="utf-8")
    made.append(prepare(config(text_file), tmp_path / "cache"))
    assert len({m.fingerprint for m in made}) == len({m.train_path for m in made}) == len(made)
    again = prepare(config(text_file), tmp_path / "other")
    assert again.fingerprint == made[-1].fingerprint


def _damage_cut(file):
    file.write_bytes(file.read_bytes()[:-1])


def _damage_flip(file):
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(bytes(raw))


@pytest.mark.parametrize("damage", [_damage_cut, _damage_flip, Path.unlink])
@pytest.mark.parametrize("name", ["train.bin", "validation.ends.bin", "tokenizer.json",
                                  "index.json"])
def test_damaged_cache_is_rebuilt(text_file, tmp_path, name, damage):
    cfg = config(text_file)
    first = prepare(cfg, tmp_path / "cache")
    expected = contents(first)
    damage(first.train_path.parent / name)
    second = prepare(cfg, tmp_path / "cache")
    assert contents(second) == expected and second.tokenizer == first.tokenizer
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == [
        second.train_path.parent.name, second.train_path.parent.name + ".lock"]


KILLED = """
import os, signal, sys
from tx_jax.config import DataConfig
from tx_jax.data import _cache, prepare
left = 0
def dying(function):
    def wrapped(*args, **kwargs):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return wrapped
for module, name in ((_cache, "_to_disk"), (os, "rename"), (_cache, "_digest"), (os, "mkdir")):
    setattr(module, name, dying(getattr(module, name)))
for left in range(1, 100):
    place = os.path.join(sys.argv[2], "shared" if left % 2 else str(left))
    child = os.fork()
    if not child:
        prepare(DataConfig(text=sys.argv[1], context=8), place)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status):
        print(left)
        sys.exit(status)
"""


def run(code: str, *args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *map(str, args)], cwd=ROOT,
                          stdout=subprocess.PIPE, timeout=120)


def test_killed_at_any_call(text_file, tmp_path):
    """Kill -9 before each file operation of a build in turn, half of them on the remains of an
    earlier kill; the next call gives the right tokens and clears the left-overs.
    """
    expected = contents(prepare(config(text_file), tmp_path / "clean"))
    done = run(KILLED, text_file, tmp_path / "caches")
    assert done.returncode == 0 and int(done.stdout) > 12
    places = list((tmp_path / "caches").iterdir())
    assert len(places) > 6
    for place in places:
        assert contents(prepare(config(text_file), place)) == expected
        assert len(list(place.iterdir())) == 2


FULL = """
import resource, sys
from tx_jax.config import DataConfig
from tx_jax.data import prepare
from tx_jax.errors import UserError
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    prepare(DataConfig(text=sys.argv[1], context=8), sys.argv[2])
except UserError as e:
    assert "cannot be written" in str(e) and "free some space" in str(e), e
    sys.exit(7)
"""


def test_no_room_on_the_disk(text_file, tmp_path):
    assert run(FULL, text_file, tmp_path / "cache").returncode == 7
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]
    assert prepare(config(text_file), tmp_path / "cache").n_train_tokens == 900


def test_cache_that_cannot_be_written(text_file, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing")):
        with pytest.raises(UserError, match="cache directory .* cannot be written"):
            prepare(config(text_file), place)


def test_cache_path_may_be_relative_or_home(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    made = [prepare(config("text.txt"), place) for place in ("my cache", "./my cache/",
                                                             "~/my cache")]
    os.chdir("/")
    assert all(m.train_path == made[0].train_path and len(m.train.tokens()) == 900 for m in made)


def test_many_builders_at_once(text_file, tmp_path):
    """Threads hold separate file locks, as processes do; each sees one whole entry."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: prepare(config(text_file), tmp_path / "cache"),
                             range(8)))
    assert all(contents(m) == contents(made[0]) for m in made)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_two_processes_at_once(text_file, tmp_path):
    code = ("import sys; from tx_jax.config import DataConfig; from tx_jax.data import prepare;"
            "print(prepare(DataConfig(text=sys.argv[1], context=8), sys.argv[2]).fingerprint)")
    command = [sys.executable, "-c", code, str(text_file), str(tmp_path / "cache")]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(2)]
    printed = {process.communicate(timeout=120)[0] for process in running}
    assert printed == {prepare(config(text_file), tmp_path / "cache").fingerprint.encode() + b"\n"}


def test_importing_starts_no_backend():
    code = ("import tx_jax.data, tx_jax.tokenizers, sys\n"
            "from jax._src import xla_bridge\n"
            "sys.exit(3 if xla_bridge._backends else 0)")
    assert run(code).returncode == 0


# ---- the shipped texts

def test_preparing_shakespeare_is_quick(tmp_path):
    for spec, limit in (("char", 2.0), ("bpe(vocab=2048)", 8.0)):
        begin = time.process_time()
        made = prepare(DataConfig(tokenizer=spec), tmp_path)
        assert time.process_time() - begin < limit
    plays = load_text("shakespeare").documents
    text = made.tokenizer.decode(made.validation.tokens()).split("<|endoftext|>")
    assert text[-1] == "" and plays[-len(text) + 1:] == tuple(text[:-1])  # whole plays
    assert 0.09 < made.n_validation_bytes / sum(len(play.encode()) for play in plays) < 0.11
