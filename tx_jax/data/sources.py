"""Where text comes from: shipped texts, files, directories, JSONL, parquet, the Hugging Face hub.

Every text becomes documents of valid Unicode; a leading byte-order mark is dropped, CRLF and lone
CR become `\\n`. Text is read whole: a corpus must fit in memory.
"""

import functools
import gzip
import hashlib
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tx_jax.errors import UserError, nearest

_TEXTS = Path(__file__).parent.parent / "texts"
_SHIPPED = ("austen", "bible_en", "bible_es", "bible_fr", "shakespeare")
_DOCUMENT_BREAK = "\f"  # between documents of a shipped text; a user's form feed is a character
_OPENERS: dict[str, Callable] = {".xz": lzma.open, ".gz": gzip.open}


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order.

    Attributes:
      documents: the texts, none of them empty.
      name: what was asked for.
      sha256: fingerprint of the documents, equal wherever and however they were stored.
    """

    documents: tuple[str, ...]
    name: str
    sha256: str


@dataclass(frozen=True)
class ParallelCorpus:
    """Two texts in which item i of `first` translates item i of `second`."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    name: str
    sha256: str


def load_text(spec: str, field: str = "text") -> Corpus:
    """Read the corpus `spec`.

    Args:
      spec: the name of a shipped text (shakespeare, austen, bible_en, bible_fr, bible_es); a text
        file; a directory, whose *.txt files at any depth are documents in the order of their paths;
        a *.jsonl or *.parquet file, one document per row; or "hf:NAME", "hf:NAME:SPLIT",
        "hf:NAME:CONFIG:SPLIT". Files may be compressed (.xz, .gz) and paths may start with ~.
        A shipped name wins over a file of the same name: write "./austen" for the file.
      field: the field of JSONL, parquet or hub rows that holds the text.

    Raises:
      UserError: nothing there, no text in it, or text that is not valid; the message says where.
    """
    if not spec.strip():
        raise UserError("the text has no name; give one of "
                        f"{', '.join(_SHIPPED)}, a file, a directory or hf:NAME.")
    if spec in _SHIPPED:
        text = _read_utf8(_TEXTS / f"{spec}.txt.xz")
        return _corpus(spec, text.split(_DOCUMENT_BREAK))
    if spec.startswith("hf:"):
        return _corpus(spec, _from_hub(spec, field))
    path = Path(spec).expanduser()
    if not os.path.exists(path):
        hint = "." if {"/", "."} & set(spec) else nearest(spec, _SHIPPED)
        raise UserError(f"there is no text, file or directory '{spec}'{hint}")
    if path.is_dir():
        return _corpus(spec, _from_directory(path))
    stem = path.stem if path.suffix in _OPENERS else path.name
    if stem.endswith((".jsonl", ".ndjson")):
        return _corpus(spec, _from_jsonl(path, field))
    if stem.endswith(".parquet"):
        return _corpus(spec, _from_parquet(path, field))
    return _corpus(spec, [_read_utf8(path)])


@functools.lru_cache(maxsize=4)
def text_hash(spec: str, field: str = "text") -> str:
    """sha256 of the corpus that `load_text` reads; a text is read once for it in a process."""
    return load_text(spec, field).sha256


def load_parallel(first: str, second: str) -> ParallelCorpus:
    """Read two of the shipped Bibles ("en", "fr", "es"), aligned verse by verse: 31,102 pairs."""
    languages = [name.removeprefix("bible_") for name in _SHIPPED if name.startswith("bible_")]
    verses = []
    for language in (first, second):
        if language not in languages:
            raise UserError(f"there is no parallel text '{language}'{nearest(language, languages)}")
        lines = _read_utf8(_TEXTS / f"bible_{language}.txt.xz").split("\n")[:-1]
        verses.append(tuple(line.lstrip(_DOCUMENT_BREAK) for line in lines))
    return ParallelCorpus(*verses, f"bible_{first}-{second}", _sha256(verses[0] + verses[1]))


def _corpus(name: str, documents: Iterable[str]) -> Corpus:
    kept = tuple(text for text in documents if text)
    if not kept:
        raise UserError(f"the text '{name}' is empty; give one that has some characters in it.")
    return Corpus(kept, name, _sha256(kept))


def _sha256(documents: Iterable[str]) -> str:
    """Hash lengths and contents, so that no two lists of documents hash alike."""
    total = hashlib.sha256()
    for text in documents:
        raw = text.encode()
        total.update(len(raw).to_bytes(8, "little"))
        total.update(raw)
    return total.hexdigest()


def _read_bytes(path: Path) -> bytes:
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            return file.read()
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as e:
        raise UserError(f"the file {path} cannot be read: {getattr(e, 'strerror', None) or e}; "
                        "check that it is complete and that you may read it.") from e


def _read_utf8(path: Path) -> str:
    return _decode(_read_bytes(path), str(path))


def _decode(raw: bytes, where: str, start: int = 0) -> str:
    """Decode UTF-8 that begins at byte `start` of `where`, without byte-order mark and CR."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"{where} is not UTF-8: byte 0x{raw[e.start]:02x} at offset "
                        f"{start + e.start} ({e.reason}); convert the file to UTF-8.") from e
    return _normalise(text)


def _normalise(text: str) -> str:
    text = text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _from_directory(path: Path) -> list[str]:
    ends = ("", *_OPENERS)
    files = [file for end in ends for file in path.rglob(f"*.txt{end}") if file.is_file()]
    if not files:
        raise UserError(f"the directory {path} holds no *.txt file; put the documents there, one a "
                        "file.")
    return [_read_utf8(file) for file in sorted(files, key=lambda f: f.relative_to(path).parts)]


def _from_jsonl(path: Path, field: str) -> list[str]:
    documents, start = [], 0
    for number, line in enumerate(_read_bytes(path).split(b"\n"), 1):
        where = f"line {number} of {path}"
        text = _decode(line, where, start)
        start += len(line) + 1
        if text.strip():
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as e:
                raise UserError(f"{where} is not valid JSON ({e}); each line must be one JSON "
                                "object on its own.") from e
            documents.append(_text_of(row, field, where))
    return documents


def _text_of(row: Any, field: str, where: str) -> str:
    """Return the text in a row, normalised; errors name the row as `where`."""
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a JSON object; write it like {{\"{field}\": \"...\"}}.")
    if field not in row:
        raise UserError(f"{where} has no field '{field}'{nearest(field, map(str, row))}")
    if not isinstance(row[field], str):
        raise UserError(f"the field '{field}' in {where} is {type(row[field]).__name__}, not text; "
                        "name another with --data.field.")
    try:
        row[field].encode()
    except UnicodeEncodeError as e:
        raise UserError(f"the field '{field}' in {where} holds half of a surrogate pair at "
                        f"character {e.start}; remove it.") from e
    return _normalise(row[field])


def _from_parquet(path: Path, field: str) -> list[str]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as e:
        raise UserError(f"reading {path} needs pyarrow; install it with: pip install pyarrow"
                        ) from e
    try:
        columns = pq.read_schema(path).names
        if field not in columns:
            raise UserError(f"{path} has no field '{field}'{nearest(field, columns)}")
        rows = pq.read_table(path, columns=[field])[field].to_pylist()
    except (OSError, pa.ArrowException) as e:
        reason = str(e).split(". ")[0]
        raise UserError(f"{path} is not a readable parquet file ({reason}); write it again.") from e
    return [_text_of({field: row}, field, f"row {i} of {path}") for i, row in enumerate(rows)]


def _from_hub(spec: str, field: str) -> list[str]:
    parts = spec.removeprefix("hf:").split(":")
    if not parts[0] or len(parts) > 3:
        raise UserError(f"'{spec}' is not of the form hf:NAME, hf:NAME:SPLIT or "
                        "hf:NAME:CONFIG:SPLIT.")
    try:
        import datasets
    except ImportError as e:
        raise UserError(f"'{spec}' needs the package datasets; install it with: pip install "
                        "datasets") from e
    split = parts[-1] if len(parts) > 1 else "train"
    try:
        rows = datasets.load_dataset(parts[0], parts[1] if len(parts) == 3 else None, split=split)
    except Exception as e:  # the hub client raises many kinds: names, network, formats
        reason = str(e).strip().split("\n")[0]
        raise UserError(f"the data set '{spec}' cannot be loaded ({reason}); check its name, its "
                        "split and the network.") from e
    return [_text_of(row, field, f"row {i} of {spec}") for i, row in enumerate(rows)]
