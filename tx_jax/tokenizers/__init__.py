"""Tokenizers behind one interface: `make_tokenizer("bpe(vocab=2048)", training_texts)`.

A file of this package is a kind of tokenizer: char, word, bpe, gpt2. Each defines `Trainer`, a
frozen dataclass of the options in the call string with `train(texts) -> Tokenizer`, and
`restore(data) -> Tokenizer` for what `to_json` wrote. Vocabularies are learnt from the training
part of a corpus only. The metric that compares tokenizers is `bits_per_byte`.
"""

import json
import math
from collections.abc import Iterable
from typing import Any

from tx_jax import plugins
from tx_jax.construct import construct
from tx_jax.errors import UserError
from tx_jax.tokenizers._base import END_OF_TEXT, Tokenizer

__all__ = ["END_OF_TEXT", "Tokenizer", "bits_per_byte", "from_json", "make_tokenizer",
           "make_trainer"]


def make_trainer(spec: str) -> Any:
    """Check a call string such as `word(vocab=8192)` and return its `Trainer`.

    Raises:
      UserError: no such tokenizer, unknown option, or a vocabulary that is too small.
    """
    return construct(__name__, spec, "Trainer", "tokenizer")


def make_tokenizer(spec: str, texts: Iterable[str]) -> Tokenizer:
    """Train the tokenizer `spec` on `texts`, the documents of the training part."""
    return make_trainer(spec).train(texts)


def from_json(text: str) -> Tokenizer:
    """Rebuild a tokenizer from the string that `Tokenizer.to_json` gave.

    Raises:
      UserError: the string is not such a description.
    """
    try:
        data = json.loads(text)
        return plugins.load(__name__, data["kind"], "tokenizer").restore(data)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        if isinstance(e, UserError):
            raise
        raise UserError(f"the saved tokenizer cannot be read ({type(e).__name__}: {e}); make it "
                        "again with to_json().") from e


def bits_per_byte(total_nats: float, total_bytes: int) -> float:
    """Cross entropy in bits per UTF-8 byte of the predicted text: nats / ln 2 / bytes.

    Unlike loss per token it does not depend on how the text was cut into tokens. A closed
    vocabulary (char, word) pays for an unknown piece only that it is unknown, so compare only where
    the share of unknowns (`Prepared.n_validation_unknown`) is negligible.

    Args:
      total_nats: sum of the token losses, in nats.
      total_bytes: bytes covered by those tokens, as in `Prepared.n_validation_bytes`.
    """
    if total_bytes < 1:
        raise UserError(f"bits per byte of {total_bytes} bytes is undefined; give the number of "
                        "bytes that the predicted tokens cover.")
    return total_nats / math.log(2.0) / total_bytes
