"""A text cut by a tokenizer: what is trained on, what is scored, and the price of unknown words."""

import collections
import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from tx_jax.data import load_text
from tx_jax.data.prepare import split_tail
from tx_jax.errors import UserError
from tx_jax.tokenizers import Tokenizer, make_tokenizer

BREAK = "\n\n"  # between documents, written out so that every tokenizer has to spell it


@dataclass(frozen=True)
class Scored:
    """A stretch of held-out text.

    Attributes:
      tokens: int32 [n].
      bytes_: UTF-8 bytes of each, int64 [n].
      spelling: nats it would take to spell each unknown one, float64 [n], 0 for known ones.
      characters: of the whole stretch.
    """

    tokens: np.ndarray
    bytes_: np.ndarray
    spelling: np.ndarray
    characters: int


@dataclass(frozen=True)
class Cut:
    """One tokenizer on one text.

    Attributes:
      train: int32 [n] tokens of the training part; train_bytes: its UTF-8 bytes.
      tuning, test: stretches of equal size from the two halves of the held-out part, the same
        characters for every tokenizer.
    """

    tokenizer: Tokenizer
    train: np.ndarray
    train_bytes: int
    tuning: Scored
    test: Scored

    @property
    def bytes_per_token(self) -> float:
        """In the training part."""
        return self.train_bytes / len(self.train)


@lru_cache(maxsize=4)
def texts(name: str, share: float) -> tuple[str, str, str]:
    """(training text, held-out text, sha256 of all); documents at the end are held out."""
    corpus = load_text(name)
    parts = [BREAK.join(text for text, _ in part)
             for part in split_tail(corpus.documents, share)]
    return *parts, corpus.sha256


@lru_cache(maxsize=32)
def cut(name: str, spec: str, share: float, scored: int) -> Cut:
    """Train the tokenizer `spec` on the training part and cut both parts.

    Raises:
      UserError: the held-out part has fewer than twice `scored` characters.
    """
    train, held, _ = texts(name, share)
    half = len(held) // 2
    if half < scored:
        raise UserError(f"--scored={scored} is more than half of the {len(held)} held-out "
                        "characters; make it smaller or give more text.")
    tokenizer = make_tokenizer(spec, [train])
    tokens = tokenizer.encode(train)
    price = _spelling(_unknown(tokenizer, train, tokens).values())
    stretches = (_scored(tokenizer, price, held[at:at + scored]) for at in (0, half))
    return Cut(tokenizer, tokens, len(train.encode()), *stretches)


def _unknown(tokenizer: Tokenizer, text: str, tokens: np.ndarray) -> dict[int, str]:
    """The pieces of a text that are unknown, by the place of their token."""
    if tokenizer.unk_id is None:
        return {}
    raw, lengths = text.encode(), tokenizer.byte_lengths(text)
    ends = np.cumsum(lengths)
    return {int(i): raw[ends[i] - lengths[i]:ends[i]].decode()
            for i in np.flatnonzero(tokens == tokenizer.unk_id)}


def _scored(tokenizer: Tokenizer, price: dict[str, float], text: str) -> Scored:
    tokens = tokenizer.encode(text)
    spelling = np.zeros(len(tokens))
    for i, piece in _unknown(tokenizer, text, tokens).items():
        spelling[i] = sum(price.get(c, price[""]) for c in piece) + price["end"]
    return Scored(tokens, tokenizer.byte_lengths(text), spelling, len(text))


def _spelling(pieces: Collection[str]) -> dict[str, float]:
    """Nats of each character of an unknown piece: frequencies among those of the training text.

    "end" closes a piece and "" stands for characters never seen there; one is added to each count.
    """
    count = collections.Counter("".join(pieces))
    count["end"], count[""] = len(pieces), 0
    total = sum(count.values()) + len(count)
    return {c: -math.log((n + 1) / total) for c, n in count.items()}
