"""Characters: one id per character of the training text, then unk and eos."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tx_jax.errors import UserError
from tx_jax.tokenizers._base import END_OF_TEXT, UNKNOWN, Tokenizer, check_unicode, dump


@dataclass(frozen=True)
class Trainer:
    """Collects the characters of the training text, in code-point order."""

    def train(self, texts: Iterable[str]) -> "Characters":
        """Return the tokenizer of all characters in `texts`."""
        found: set[str] = set()
        for text in texts:
            check_unicode(text)
            found.update(text)
        return Characters("".join(sorted(found)))


def restore(data: dict[str, Any]) -> "Characters":
    """Rebuild from the fields of `to_json`."""
    return Characters(data["characters"])


class Characters(Tokenizer):
    """Ids 0..n-1 are the characters, n is unk, n+1 is eos."""

    def __init__(self, characters: str):
        if list(characters) != sorted(set(characters)):
            raise UserError("the characters of a char tokenizer must be distinct and sorted.")
        self.name = "char"
        self.characters = characters
        self.unk_id = len(characters)
        self.eos_id = len(characters) + 1
        self.vocab_size = len(characters) + 2
        codes = _code_points(characters)
        # One row more than the largest code point: everything beyond lands there and is unknown.
        self._table = np.full(int(codes.max(initial=0)) + 2, self.unk_id, np.int32)
        self._table[codes] = np.arange(len(characters), dtype=np.int32)
        self._symbols = [*characters, UNKNOWN, END_OF_TEXT]

    def _encode(self, text: str) -> np.ndarray:
        return self._table[np.minimum(_code_points(text), len(self._table) - 1)]

    def _decode(self, ids: list[int]) -> str:
        return "".join([self._symbols[i] for i in ids])

    def byte_lengths(self, text: str) -> np.ndarray:
        """UTF-8 takes 1 byte below U+0080, 2 below U+0800, 3 below U+10000, else 4."""
        return 1 + np.searchsorted([0x80, 0x800, 0x10000], _code_points(text), side="right")

    def unknown(self, text: str) -> list[str]:
        known = set(self.characters)
        return [c for c in dict.fromkeys(text) if c not in known]

    def to_json(self) -> str:
        return dump("char", characters=self.characters)


def _code_points(text: str) -> np.ndarray:
    """Unicode code points, uint32 [n]."""
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)
