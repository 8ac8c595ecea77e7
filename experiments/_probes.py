"""Five algorithmic probes of length extrapolation as data: pure functions of a numpy generator.

A row is BEGIN, prompt, SEPARATOR, question, answer, END; the length n of a row counts what grows:

  copy      n symbols                   -> the same symbols
  reverse   n symbols                   -> the same from the last to the first
  passkey   n symbols, and somewhere between them KEY and three more; KEY is asked -> the three
  recall    n pairs of key and value; one of the keys is asked -> its value
  addition  two numbers of n digits     -> n + 1 digits of their sum, the lowest first: this order
            is learned, the usual one hardly (Lee et al. 2023; Zhou et al. 2024)

Copy, reverse and addition are tasks of Kazemnejad et al. 2023, with tokens in place of words.
Symbols may repeat within a row, so that looking one token back does not always find the place.
Only the answer and END are targets.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tx_jax.errors import UserError

BEGIN, SEPARATOR, END, KEY, PLUS, FIRST = range(6)  # symbols are FIRST and up
PASSKEY = 3  # symbols of a passkey

Parts = tuple[np.ndarray, np.ndarray, np.ndarray]  # prompt, question, answer, each [rows, ...]


@dataclass(frozen=True)
class Rows:
    """Rows of a task.

    Attributes:
      tokens_RT: int8; END again past the end of a row, which no earlier token sees.
      answer_RT: bool, the tokens to be predicted: the answer and its END.
    """

    tokens_RT: np.ndarray
    answer_RT: np.ndarray


def _copy(rng: np.random.Generator, rows: int, length: int, symbols: int) -> Parts:
    prompt = rng.integers(FIRST, FIRST + symbols, (rows, length))
    return prompt, prompt[:, :0], prompt


def _reverse(rng: np.random.Generator, rows: int, length: int, symbols: int) -> Parts:
    prompt, question, answer = _copy(rng, rows, length, symbols)
    return prompt, question, answer[:, ::-1]


def _passkey(rng: np.random.Generator, rows: int, length: int, symbols: int) -> Parts:
    filler = rng.integers(FIRST, FIRST + symbols, (rows, length))
    key = rng.integers(FIRST, FIRST + symbols, (rows, PASSKEY))
    depth_R1 = rng.integers(0, length + 1, (rows, 1))  # symbols before KEY
    at = np.arange(length + 1 + PASSKEY)[None]
    # Filler that stands behind the key is found 1 + PASSKEY places further on.
    source = np.where(at < depth_R1, at, np.maximum(at - 1 - PASSKEY, 0))
    prompt = np.take_along_axis(filler, np.minimum(source, length - 1), axis=1)
    inside = at - depth_R1
    prompt = np.where(inside == 0, KEY, prompt)
    within = np.take_along_axis(key, np.clip(inside - 1, 0, PASSKEY - 1), axis=1)
    prompt = np.where((inside > 0) & (inside <= PASSKEY), within, prompt)
    return prompt, np.full((rows, 1), KEY), key


def _recall(rng: np.random.Generator, rows: int, length: int, symbols: int) -> Parts:
    half = symbols // 2  # the lower half are keys, the upper half values
    keys = np.argsort(rng.random((rows, half)), axis=1)[:, :length] + FIRST
    values = rng.integers(FIRST + half, FIRST + symbols, (rows, length))
    asked_R1 = rng.integers(0, length, (rows, 1))
    prompt = np.stack([keys, values], axis=2).reshape(rows, 2 * length)
    return prompt, *(np.take_along_axis(x, asked_R1, axis=1) for x in (keys, values))


def _addition(rng: np.random.Generator, rows: int, length: int, symbols: int) -> Parts:
    digits = rng.integers(0, 10, (2, rows, length))
    digits[:, :, 0] = rng.integers(1, 10, (2, rows))  # without leading zeros
    answer, carry = np.zeros((rows, length + 1), np.int64), np.zeros(rows, np.int64)
    for place in range(length):
        total = digits[0, :, -1 - place] + digits[1, :, -1 - place] + carry
        answer[:, place], carry = total % 10, total // 10
    answer[:, length] = carry
    plus = np.full((rows, 1), PLUS)
    prompt = np.concatenate([digits[0] + FIRST, plus, digits[1] + FIRST], axis=1)
    return prompt, prompt[:, :0], answer + FIRST


TASKS: dict[str, Callable[[np.random.Generator, int, int, int], Parts]] = {
    "copy": _copy, "reverse": _reverse, "passkey": _passkey, "recall": _recall,
    "addition": _addition}


def width(task: str, length: int) -> int:
    """Tokens of a row of this length."""
    return {"copy": 2 * length, "reverse": 2 * length, "passkey": length + 2 + 2 * PASSKEY,
            "recall": 2 * length + 2, "addition": 3 * length + 2}[task] + 3


def draw(task: str, rng: np.random.Generator, rows: int, length: int, symbols: int) -> Rows:
    """Rows of one length.

    Raises:
      UserError: the alphabet is too small for the task.
    """
    least = {"recall": 2 * length, "addition": 10}.get(task, 2)
    if not least <= symbols <= 127 - FIRST:
        raise UserError(f"the task {task} at length {length} needs {least} to {127 - FIRST} "
                        f"symbols, not {symbols}; change the symbols or the lengths.")
    prompt, question, answer = TASKS[task](rng, rows, length, symbols)
    one = np.ones((rows, 1), np.int64)
    tokens = np.concatenate([BEGIN * one, prompt, SEPARATOR * one, question, answer, END * one], 1)
    asked = np.arange(tokens.shape[1]) >= tokens.shape[1] - answer.shape[1] - 1
    return Rows(tokens.astype(np.int8), np.broadcast_to(asked, tokens.shape))


def draw_padded(task: str, rng: np.random.Generator, lengths_R: np.ndarray, symbols: int,
                size: int) -> Rows:
    """Rows of the given lengths, filled up to `size` tokens at their ends."""
    tokens = np.full((len(lengths_R), size), END, np.int8)
    answer = np.zeros((len(lengths_R), size), bool)
    for length in np.unique(lengths_R):
        where = np.flatnonzero(lengths_R == length)
        found = draw(task, rng, len(where), int(length), symbols)
        tokens[where, :found.tokens_RT.shape[1]] = found.tokens_RT
        answer[where, :found.tokens_RT.shape[1]] = found.answer_RT
    return Rows(tokens, answer)
