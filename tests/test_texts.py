"""Shipped texts, and text from files, directories, JSONL, parquet and the hub."""

import gzip
import json
import lzma
import sys
import types
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tx_jax.data import load_parallel, load_text
from tx_jax.errors import UserError


def refuses(*words: str):
    """Expect a one-sentence UserError with all `words` in it."""
    pattern = "(?s)" + "".join(f"(?=.*{word})" for word in words) + r"(?!.*\. [A-Z])"
    return pytest.raises(UserError, match=pattern)


# ---- shipped

@pytest.mark.parametrize("name, documents, size, start, end", [
    ("shakespeare", 38, 4_955_713 - 37, "A Midsummer Night's Dream\n", "Two Gentlemen of Verona\n"),
    ("austen", 6, 4_025_034 - 5, "EMMA\n", "SENSE AND SENSIBILITY\n"),
    ("bible_en", 66, 4_032_560 - 65, "In the beginning God", "This is the Revelation of Jesus"),
    ("bible_fr", 66, 4_229_279 - 65, "Au commencement, Dieu cr\u00e9a", "R\u00e9v\u00e9lation"),
    ("bible_es", 66, 3_935_430 - 65, "EN el principio cri\u00f3 Dios", "LA revelaci\u00f3n"),
])
def test_shipped_texts(name, documents, size, start, end):
    corpus = load_text(name)
    assert corpus.name == name and len(corpus.documents) == documents
    assert sum(len(text.encode()) for text in corpus.documents) == size
    assert corpus.documents[0].startswith(start) and corpus.documents[-1].startswith(end)
    whole = "".join(corpus.documents)
    assert not set(whole) & set("\f\r\t\ufeff") and all(t.endswith("\n") for t in corpus.documents)


def test_shakespeare_has_no_markup_left():
    whole = "".join(load_text("shakespeare").documents)
    assert not set(whole) & set("#*_\\") and "&amp;" not in whole
    assert "To be, or not to be: that is the question:\n" in whole


def test_parallel_verses_are_aligned():
    pair = load_parallel("en", "fr")
    assert len(pair.first) == len(pair.second) == 31_102
    assert all(pair.first) and all(pair.second)
    assert pair.first[26136].startswith("For God so loved the world")
    assert pair.second[26136].startswith("Car Dieu a tant aim\u00e9 le monde")
    assert load_parallel("en", "es").second[0].startswith("EN el principio")
    assert load_parallel("fr", "en").sha256 != pair.sha256
    with refuses("no parallel text 'de'"):
        load_parallel("en", "de")


def test_books_of_the_bibles_break_at_the_same_verse():
    counts = [[text.count("\n") for text in load_text(f"bible_{code}").documents]
              for code in ("en", "fr", "es")]
    assert counts[0] == counts[1] == counts[2] and sum(counts[0]) == 31_102


def test_licences_name_every_file():
    root = Path(__file__).parent.parent
    licences = (root / "LICENSES.md").read_text(encoding="utf-8")
    assert all(f"`{file.name}`" in licences for file in (root / "tx_jax/texts").glob("*.xz"))


# ---- files

def test_file_by_relative_path_home_and_spaces(tmp_path, monkeypatch):
    folder = tmp_path / "my texts"
    folder.mkdir()
    (folder / "a b.txt").write_text("hello", encoding="utf-8")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    for spec in ("a b.txt", "./a b.txt", "~/my texts/a b.txt", str(folder / "a b.txt")):
        assert load_text(spec).documents == ("hello",)
    assert load_text("austen").documents[0].startswith("EMMA")  # from any working directory
    (folder / "austen").write_text("mine", encoding="utf-8")
    assert load_text("./austen").documents == ("mine",)


@pytest.mark.parametrize("suffix, pack", [(".xz", lzma.compress), (".gz", gzip.compress)])
def test_compressed_file(tmp_path, suffix, pack):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(pack("héllo\r\n".encode()))
    (tmp_path / "plain").write_text("héllo\n", encoding="utf-8")
    assert load_text(str(path)).documents == ("héllo\n",)
    assert load_text(str(path)).sha256 == load_text(str(tmp_path / "plain")).sha256
    path.write_bytes(path.read_bytes()[:-3])
    with refuses("a.txt", "cannot be read", "complete"):
        load_text(str(path))
    path.write_bytes(b"not compressed")
    with refuses("cannot be read"):
        load_text(str(path))


@pytest.mark.parametrize("raw, text", [
    (b"\xef\xbb\xbfabc", "abc"), (b"a\r\nb\rc\n", "a\nb\nc\n"), (b"a\x0cb", "a\x0cb"),
    (b"x" * 5_000_000, "x" * 5_000_000), (b"a\xef\xbb\xbfb", "a\ufeffb"),
])
def test_marks_line_ends_and_gigantic_lines(tmp_path, raw, text):
    (tmp_path / "a.txt").write_bytes(raw)
    assert load_text(str(tmp_path / "a.txt")).documents == (text,)


@pytest.mark.parametrize("raw, words", [
    (b"", ("empty",)), (b"\xef\xbb\xbf", ("empty",)),
    (b"abc\xff\xfe", ("not UTF-8", "0xff", "offset 3")),
    ("é".encode("utf-16"), ("not UTF-8", "offset 0")), (b"ab\xc3", ("0xc3", "offset 2")),
])
def test_bad_files(tmp_path, raw, words):
    (tmp_path / "a.txt").write_bytes(raw)
    with refuses("a.txt", *words):
        load_text(str(tmp_path / "a.txt"))


@pytest.mark.parametrize("spec, words", [
    ("shakespere", ("no text, file or directory 'shakespere'", "did you mean 'shakespeare'")),
    ("./nothing.txt", ("no text, file or directory './nothing.txt'",)), ("", ("no name",)),
    ("x" * 5000, ("no text",)), ("a\0b", ("no text",)),
])
def test_nothing_there(spec, words):
    with refuses(*words):
        load_text(spec)


def test_directory(tmp_path):
    (tmp_path / "sub").mkdir()
    files = {"b.txt": "2", "a.txt": "1", "sub/c.txt": "3", "d.md": "no", "e.txt": ""}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "f.txt.gz").write_bytes(gzip.compress(b"4"))
    assert load_text(str(tmp_path)).documents == ("1", "2", "4", "3")
    (tmp_path / "none").mkdir()
    with refuses("none", r"no \*.txt"):
        load_text(str(tmp_path / "none"))


def test_fingerprint_tells_where_documents_end(tmp_path):
    for name, rows in {"a": ["ab", "c"], "b": ["a", "bc"]}.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": r}) for r in rows),
                                                encoding="utf-8")
    one, other = (load_text(str(tmp_path / name)) for name in ("a.jsonl", "b.jsonl"))
    assert one.sha256 != other.sha256


# ---- rows

def test_jsonl(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"body": "one\\r\\n"}\r\n'
                     b'\r\n{"n": 1, "body": "\\u00e9\xc3\xa9"}')
    assert load_text(str(path), field="body").documents == ("one\n", "éé")
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert load_text(str(packed), field="body").documents == ("one\n", "éé")


@pytest.mark.parametrize("line, words", [
    (b'{"text": "b"', ("line 2 of", "not valid JSON")),
    (b'[1]', ("line 2 of", "not a JSON object")),
    (b'{"txt": "b"}', ("line 2 of", "no field 'text'", "did you mean 'txt'")),
    (b'{"text": 3}', ("line 2 of", "int, not text", "--data.field")),
    (b'{"text": "a\\ud800"}', ("line 2 of", "surrogate", "character 1")),
    (b'{"text": "\xff"}', ("line 2 of", "not UTF-8", "0xff", "offset 24")),
    (b"[" * 100_000, ("line 2 of", "not valid JSON")),
])
def test_bad_jsonl_names_the_line(tmp_path, line, words):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + line + b"\n")
    with refuses(*words):
        load_text(str(tmp_path / "a.jsonl"))


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", "two\r\n"], "n": [1, 2]}), path)
    assert load_text(str(path)).documents == ("one", "two\n")
    with refuses("no field 'txt'", "did you mean 'text'"):
        load_text(str(path), field="txt")
    with refuses("row 0 of", "int, not text"):
        load_text(str(path), field="n")
    pq.write_table(pa.table({"text": ["one", None]}), path)
    with refuses("row 1 of", "not text"):
        load_text(str(path))
    path.write_bytes(path.read_bytes()[:-9])
    with refuses("a.parquet", "not a readable parquet"):
        load_text(str(path))


def test_hub(monkeypatch):
    calls = []

    def load_dataset(name, config, split):
        calls.append((name, config, split))
        if name == "missing":
            raise FileNotFoundError("no such data set\nlong advice")
        return [{"text": "one"}, {"text": "two"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert load_text("hf:a/b").documents == ("one", "two")
    load_text("hf:a/b:test")
    load_text("hf:a/b:small:test")
    assert calls == [("a/b", None, "train"), ("a/b", None, "test"), ("a/b", "small", "test")]
    with refuses("hf:missing", r"\(no such data set\)"):
        load_text("hf:missing")
    with refuses("no field 'x'"):
        load_text("hf:a/b", field="x")
    for spec in ("hf:", "hf:a:b:c:d"):
        with refuses("not of the form hf:NAME"):
            load_text(spec)
    monkeypatch.setitem(sys.modules, "datasets", None)  # what import finds when it is not installed
    with refuses("pip install datasets"):
        load_text("hf:a/b")
