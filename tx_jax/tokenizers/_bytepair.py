"""Byte-level byte-pair encoding through `tiktoken.Encoding`, without its panics and slow cases.

tiktoken panics (a Rust panic is no `Exception`) when a byte has no rank or when a run of whitespace
is so long that its regular expression overflows the stack, and some versions are quadratic in the
length of a run. So the ranks are checked here, and runs of more than `LONGEST_RUN` characters are
cut, for training and for encoding alike. Text without such runs gets exactly tiktoken's own ids.
"""

import re
from collections.abc import Iterator, Sequence

import numpy as np
import tiktoken

from tx_jax.errors import UserError
from tx_jax.tokenizers._base import END_OF_TEXT, Tokenizer

LONGEST_RUN = 4096
_RUN = re.compile(rf"\S{{{LONGEST_RUN + 1},}}|\s{{{LONGEST_RUN + 1},}}")

# GPT-2's rule for cutting text into the pieces inside which bytes may merge (Radford et al. 2019,
# section 2.2), as tiktoken writes it.
GPT2_PATTERN = (r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|"""
                r"""\s+(?!\S)|\s""")


def cut_runs(text: str) -> Iterator[str]:
    """Yield parts that concatenate to `text`, cut only inside runs beyond `LONGEST_RUN`."""
    start = 0
    for run in _RUN.finditer(text):
        for cut in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
            yield text[start:cut]
            start = cut
    yield text[start:]


class BytePairs(Tokenizer):
    """Ids 0..n-1 are byte strings by rank, n is eos; every text can be written."""

    def __init__(self, name: str, tokens: Sequence[bytes], pattern: str = GPT2_PATTERN):
        """Build from the byte string of each rank.

        Raises:
          UserError: a single byte is missing, or a byte string occurs twice.
        """
        ranks = {token: rank for rank, token in enumerate(tokens)}
        missing = [b for b in range(256) if bytes([b]) not in ranks]
        if missing or len(ranks) != len(tokens):
            fault = (f"has no token for byte {missing[0]}" if missing
                     else "holds a token twice")
            raise UserError(f"the vocabulary of {name} {fault}; train it again.")
        self.name = name
        self.tokens = list(tokens)
        self.pattern = pattern
        self.eos_id = len(tokens)
        self.vocab_size = len(tokens) + 1
        self._encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks,
                                           special_tokens={END_OF_TEXT: self.eos_id})
        self._lengths = np.array([len(token) for token in tokens], np.int64)

    def _encode(self, text: str) -> np.ndarray:
        try:
            parts = [self._encoding.encode_ordinary(part) for part in cut_runs(text)]
        except BaseException as e:
            if type(e).__name__ != "PanicException":
                raise
            raise UserError(f"tiktoken could not encode a text of {len(text)} characters ({e}); "
                            "cut it into smaller documents.") from e
        return np.concatenate([np.array(part, np.int32) for part in parts])

    def _decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids, errors="replace")

    def byte_lengths(self, text: str) -> np.ndarray:
        return self._lengths[self.encode(text)]

    def unknown(self, text: str) -> list[str]:
        """Return []: bytes write every text."""
        return []
