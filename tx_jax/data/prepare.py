"""From a text to two files of token ids, training and validation, made once and cached."""

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tx_jax.config import DataConfig
from tx_jax.data import _cache
from tx_jax.data.sources import load_text
from tx_jax.errors import UserError
from tx_jax.tokenizers import Tokenizer, from_json, make_trainer

_FORMAT = 1  # part of the cache key: raise it when the files or the split change


@dataclass(frozen=True)
class Part:
    """Token ids on disk, one stream in which documents follow each other.

    Attributes:
      path: file of `n_tokens` ids of `dtype`.
      ends_path: file of int64, one past the last token of each document.
      dtype: "uint16" or "uint32", by the size of the vocabulary.
      n_tokens, n_documents: counts; end-of-text tokens are included.
      n_bytes: UTF-8 bytes of the text.
      n_unknown: tokens that are unk.
      first_bytes: bytes of the first token of the stream; 0 in the training part.
      document_first_bytes: bytes of the first tokens of all documents; 0 in the training part.
    """

    path: Path
    ends_path: Path
    dtype: str
    n_tokens: int
    n_documents: int
    n_bytes: int
    n_unknown: int
    first_bytes: int
    document_first_bytes: int

    def tokens(self) -> np.ndarray:
        """Map the ids from disk, [n_tokens]."""
        return _map(self.path, self.dtype, self.n_tokens)

    def ends(self) -> np.ndarray:
        """Map the document ends from disk, int64 [n_documents]."""
        return _map(self.ends_path, "int64", self.n_documents)


@dataclass(frozen=True)
class Prepared:
    """A tokenised corpus.

    Attributes:
      tokenizer: learnt from the training part only.
      train, validation: the two parts.
      packing: how rows are cut, which decides what the targets cover.
      fingerprint: sha256 of the tokens of both parts and of the tokenizer.
    """

    tokenizer: Tokenizer
    train: Part
    validation: Part
    packing: str
    fingerprint: str

    @property
    def train_path(self) -> Path:
        """File of the training tokens."""
        return self.train.path

    @property
    def validation_path(self) -> Path:
        """File of the validation tokens."""
        return self.validation.path

    @property
    def n_train_tokens(self) -> int:
        """Tokens of the training part, end-of-text tokens included."""
        return self.train.n_tokens

    @property
    def n_validation_tokens(self) -> int:
        """Tokens of the validation part, end-of-text tokens included."""
        return self.validation.n_tokens

    @property
    def n_validation_targets(self) -> int:
        """Targets that `eval_batches` gives: every token but the first, of the stream in windows
        mode, of each document in documents mode.
        """
        first = 1 if self.packing == "windows" else self.validation.n_documents
        return max(self.validation.n_tokens - first, 0)

    @property
    def n_validation_bytes(self) -> int:
        """UTF-8 bytes covered by the validation targets, for `bits_per_byte`."""
        part = self.validation
        first = part.first_bytes if self.packing == "windows" else part.document_first_bytes
        return part.n_bytes - first

    @property
    def n_validation_unknown(self) -> int:
        """Validation tokens outside a closed vocabulary."""
        return self.validation.n_unknown


def prepare(cfg: DataConfig, cache_dir: str | Path) -> Prepared:
    """Read, split and tokenise the text of `cfg`, or open what an earlier call left in `cache_dir`.

    The validation part is the tail of the corpus (`split_tail`). Documents follow each other in one
    stream; where a corpus has several, each complete one is closed by the tokenizer's end-of-text
    token. Safe against kills, a full disk and several processes at once; a damaged cache is made
    again.

    Raises:
      UserError: the text cannot be read, the call string of the tokenizer is wrong, the cache
        cannot be written, or the training part is shorter than one row.
    """
    trainer = make_trainer(cfg.tokenizer)
    corpus = load_text(cfg.text, cfg.field)
    inputs = [_FORMAT, corpus.sha256, type(trainer).__module__, repr(trainer), cfg.validation]
    key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:32]

    def build(directory: Path) -> dict[str, Any]:
        train, validation = split_tail(corpus.documents, cfg.validation)
        tokenizer = trainer.train([text for text, _ in train])
        (directory / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
        total = hashlib.sha256(tokenizer.fingerprint.encode())
        facts = {name: _write(directory, name, part, tokenizer, total)
                 for name, part in (("train", train), ("validation", validation))}
        return facts | {"fingerprint": total.hexdigest()}

    directory, facts = _cache.entry(Path(cache_dir).expanduser().absolute(), key, build)
    tokenizer = from_json((directory / "tokenizer.json").read_text(encoding="utf-8"))
    parts = {name: Part(path=directory / f"{name}.bin", ends_path=directory / f"{name}.ends.bin",
                        **facts[name]) for name in ("train", "validation")}
    prepared = Prepared(tokenizer=tokenizer, packing=cfg.packing, fingerprint=facts["fingerprint"],
                        **parts)
    check_length(prepared, cfg)
    return prepared


def check_length(prepared: Prepared, cfg: DataConfig) -> None:
    """Raise UserError if the training part holds no row of `cfg`."""
    part = prepared.train
    if cfg.packing == "windows" and part.n_tokens < cfg.context + 1:
        raise UserError(f"the training part of '{cfg.text}' has {part.n_tokens} tokens, but a row "
                        f"of --data.context={cfg.context} needs {cfg.context + 1}; take a longer "
                        "text or a shorter context.")
    if cfg.packing == "documents" and part.n_tokens <= part.n_documents:
        raise UserError(f"no document of the training part of '{cfg.text}' has two tokens, so "
                        "there is nothing to predict; take a longer text.")


def split_tail(documents: Sequence[str], share: float) -> tuple[list, list]:
    """Split a corpus into training and validation part, each a list of (text, closed).

    The validation part is the last `share` of the characters. The cut moves to the nearest document
    boundary if that changes the validation part by no more than a quarter; otherwise it falls
    inside a document, always so for a corpus of one. `closed` says whether an end-of-text token
    follows: the document ends here and is one of several.
    """
    several = len(documents) > 1
    ends = list(itertools.accumulate(len(text) for text in documents))
    total = ends[-1]
    held_out = round(total * share)
    cut = total - held_out
    nearest = min(ends[:-1], key=lambda end: abs(end - cut), default=0)
    if held_out and nearest and 4 * abs(nearest - cut) <= held_out:
        cut = nearest
    train, validation = [], []
    for text, end in zip(documents, ends, strict=True):
        head = min(max(cut - (end - len(text)), 0), len(text))
        if head:
            train.append((text[:head], several and head == len(text)))
        if head < len(text):
            validation.append((text[head:], several))
    return train, validation


def _write(directory: Path, name: str, part: list, tokenizer: Tokenizer, total: Any) -> dict:
    """Write the tokens and document ends of one part, add to `total`, return fields of `Part`."""
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    ends, firsts, n_unknown, n_tokens = [], [], 0, 0
    with open(directory / f"{name}.bin", "wb") as file:
        for text, closed in part:
            ids = tokenizer.encode(text)
            if name == "validation":  # encodes once more, and only here is it needed
                firsts.append(int(tokenizer.byte_lengths(text)[0]))
            n_unknown += 0 if tokenizer.unk_id is None else int((ids == tokenizer.unk_id).sum())
            if closed and tokenizer.eos_id is not None:
                ids = np.append(ids, np.int32(tokenizer.eos_id))
            n_tokens += len(ids)
            ends.append(n_tokens)
            raw = ids.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
            total.update(raw)
            file.write(raw)
    raw = np.array(ends, "<i8").tobytes()
    total.update(raw)
    (directory / f"{name}.ends.bin").write_bytes(raw)
    return {"dtype": dtype, "n_tokens": n_tokens, "n_documents": len(ends), "n_unknown": n_unknown,
            "n_bytes": sum(len(text.encode()) for text, _ in part),
            "first_bytes": sum(firsts[:1]), "document_first_bytes": sum(firsts)}


def _map(path: Path, dtype: str, size: int) -> np.ndarray:
    little = np.dtype(dtype).newbyteorder("<")
    if not size:
        return np.zeros(0, little)  # an empty file cannot be mapped
    return np.asarray(np.memmap(path, little, mode="r", shape=(size,)))
