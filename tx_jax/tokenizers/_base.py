"""The interface of every tokenizer."""

import abc
import hashlib
import json
from typing import Any

import numpy as np

from tx_jax.errors import UserError

END_OF_TEXT = "<|endoftext|>"
UNKNOWN = "\ufffd"


class Tokenizer(abc.ABC):
    """Text to token ids and back.

    `encode` never yields `eos_id`: text that spells "<|endoftext|>" is ordinary text. Only code may
    put `eos_id` between documents. `unk_id` stands for pieces outside a closed vocabulary and is
    None where every text can be written.

    Attributes:
      name: the call string, as in "bpe(vocab=2048)".
      vocab_size: number of ids, those of eos and unk included; it may be smaller than asked for.
      eos_id: id that closes a document.
      unk_id: id of unknown pieces, or None.
    """

    name: str
    vocab_size: int
    eos_id: int | None
    unk_id: int | None = None

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, int32 [n].

        Raises:
          UserError: `text` holds half of a surrogate pair, which is no character.
        """
        check_unicode(text)
        return self._encode(text)

    def decode(self, ids: Any) -> str:
        """Return the text of ids (any integer sequence); the inverse of `encode` for known pieces.

        eos reads as "<|endoftext|>"; an unknown piece, or bytes that are no UTF-8, as U+FFFD.

        Raises:
          UserError: an id outside [0, vocab_size), or ids that are not integers.
        """
        ids = np.asarray(ids)
        if ids.size == 0:
            return ""
        if ids.dtype.kind not in "iu":
            raise UserError(f"token ids must be integers, not {ids.dtype}; pass what encode gave.")
        bad = ids[(ids < 0) | (ids >= self.vocab_size)]
        if bad.size:
            raise UserError(f"token id {bad.flat[0]} is outside the vocabulary of "
                            f"{self.vocab_size} tokens; ids run from 0 to {self.vocab_size - 1}.")
        return self._decode(ids.reshape(-1).tolist())

    @abc.abstractmethod
    def _encode(self, text: str) -> np.ndarray:
        """`encode` of valid Unicode."""

    @abc.abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """`decode` of ids in range."""

    @abc.abstractmethod
    def byte_lengths(self, text: str) -> np.ndarray:
        """Return the UTF-8 bytes of `text` that each token of `encode(text)` covers, int64 [n]."""

    @abc.abstractmethod
    def unknown(self, text: str) -> list[str]:
        """Return the distinct pieces of `text` that become `unk_id`, in order of appearance."""

    @abc.abstractmethod
    def to_json(self) -> str:
        """Return a description from which `from_json` rebuilds the same tokenizer."""

    @property
    def fingerprint(self) -> str:
        """sha256 of the description: equal exactly when the ids mean the same."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"Tokenizer({self.name}, {self.vocab_size} tokens)"


def dump(kind: str, **fields: Any) -> str:
    """Write the description of a tokenizer; equal fields give equal strings."""
    return json.dumps({"kind": kind, **fields}, sort_keys=True)


def check_unicode(text: str) -> None:
    """Raise UserError at a lone surrogate, which no UTF-8 file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise UserError(f"character {e.start} of the text is half of a surrogate pair "
                        f"({text[e.start]!r}), which is no Unicode character; remove it.") from e


def check_vocab(kind: str, vocab: Any, low: int, why: str) -> None:
    """Raise UserError unless `vocab` is an integer of at least `low`."""
    if not isinstance(vocab, int) or isinstance(vocab, bool):
        raise UserError(f"the vocabulary of {kind}(vocab={vocab!r}) must be a whole number.")
    if vocab < low:
        raise UserError(f"{kind}(vocab={vocab}) is too small; {why} need at least {low}.")
