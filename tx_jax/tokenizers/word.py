"""Words: the most frequent pieces of the training text, then unk and eos.

A piece is a word or a run of punctuation, each with the one space before it, or a run of other
whitespace. The pieces of a text concatenate to the text, so decoding known pieces gives it back
exactly, whitespace included.
"""

import collections
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tx_jax.errors import UserError
from tx_jax.tokenizers._base import (
    END_OF_TEXT,
    UNKNOWN,
    Tokenizer,
    check_unicode,
    check_vocab,
    dump,
)

_PIECE = re.compile(r" ?\w+(?:'\w+)*| ?[^\w\s]+|\s+(?!\S)|\s")


@dataclass(frozen=True)
class Trainer:
    """Keeps the `vocab - 2` most frequent pieces; ties go to the smaller string."""

    vocab: int = 8192

    def __post_init__(self) -> None:
        check_vocab("word", self.vocab, 3, "one word, unknown and end of text")

    def train(self, texts: Iterable[str]) -> "Words":
        """Return the tokenizer; it has fewer than `vocab` ids if the texts have fewer pieces."""
        count: collections.Counter[str] = collections.Counter()
        for text in texts:
            check_unicode(text)
            count.update(_PIECE.findall(text))
        order = sorted(count, key=lambda piece: (-count[piece], piece))
        return Words(order[:self.vocab - 2])


def restore(data: dict[str, Any]) -> "Words":
    """Rebuild from the fields of `to_json`."""
    return Words(data["words"])


class Words(Tokenizer):
    """Ids 0..n-1 are the pieces by frequency, n is unk, n+1 is eos."""

    def __init__(self, words: list[str]):
        self.words = list(words)
        self.unk_id = len(words)
        self.eos_id = len(words) + 1
        self.vocab_size = len(words) + 2
        self.name = f"word(vocab={self.vocab_size})"
        self._ids = {piece: i for i, piece in enumerate(self.words)}
        if len(self._ids) != len(self.words):
            raise UserError("the words of a word tokenizer must be distinct.")
        self._symbols = [*self.words, UNKNOWN, END_OF_TEXT]

    def _encode(self, text: str) -> np.ndarray:
        ids, unk = self._ids, self.unk_id
        return np.array([ids.get(piece, unk) for piece in _PIECE.findall(text)], np.int32)

    def _decode(self, ids: list[int]) -> str:
        return "".join([self._symbols[i] for i in ids])

    def byte_lengths(self, text: str) -> np.ndarray:
        return np.array([len(piece.encode()) for piece in _PIECE.findall(text)], np.int64)

    def unknown(self, text: str) -> list[str]:
        return [p for p in dict.fromkeys(_PIECE.findall(text)) if p not in self._ids]

    def to_json(self) -> str:
        return dump("word", words=self.words)
