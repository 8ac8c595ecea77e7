"""Byte-pair encoding trained on the user's text (Sennrich et al. 2016, on bytes as in GPT-2).

Training runs in rustbpe, use in tiktoken. Ids: 256 bytes, the merges in order, eos.
"""

import base64
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import rustbpe

from tx_jax.tokenizers._base import check_unicode, check_vocab, dump
from tx_jax.tokenizers._bytepair import GPT2_PATTERN, BytePairs, cut_runs

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trainer:
    """Learns `vocab - 257` merges; the other ids are the 256 bytes and end of text."""

    vocab: int = 2048

    def __post_init__(self) -> None:
        check_vocab("bpe", self.vocab, 257, "256 bytes and end of text")

    def train(self, texts: Iterable[str]) -> "TrainedPairs":
        """Return the tokenizer; `vocab_size` is smaller than `vocab`, with a warning in the log, if
        the texts hold too few different pairs. Deterministic, whatever the order of the texts.
        """
        def parts():
            for text in texts:
                check_unicode(text)
                yield from cut_runs(text)

        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(parts(), self.vocab - 1, pattern=GPT2_PATTERN)
        ranks = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
        made = TrainedPairs([bytes(token) for token, _ in ranks])
        if made.vocab_size < self.vocab:
            _log.warning("bpe(vocab=%d): the training text gives only %d tokens.", self.vocab,
                         made.vocab_size)
        return made


def restore(data: dict[str, Any]) -> "TrainedPairs":
    """Rebuild from the fields of `to_json`."""
    tokens = [base64.b64decode(token, validate=True) for token in data["tokens"]]
    return TrainedPairs(tokens, data["pattern"])


class TrainedPairs(BytePairs):
    """A trained byte-pair vocabulary."""

    def __init__(self, tokens: list[bytes], pattern: str = GPT2_PATTERN):
        super().__init__(f"bpe(vocab={len(tokens) + 1})", tokens, pattern)

    def to_json(self) -> str:
        tokens = [base64.b64encode(token).decode() for token in self.tokens]
        return dump("bpe", pattern=self.pattern, tokens=tokens)
