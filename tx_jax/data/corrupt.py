"""Objectives that hide a part of a text: masked tokens, and spans behind sentinels."""

import numpy as np

from tx_jax.errors import UserError


def mask_tokens(rng: np.random.Generator, tokens_BT: np.ndarray, mask: int, vocab: int,
                rate: float = 0.15) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a masked language model (Devlin et al. 2019, 3.1).

    Of the tokens chosen, 80 % become `mask`, 10 % a random token and 10 % stay; only these have a
    target. Every row has at least one.

    Args:
      tokens_BT: int32 tokens below `vocab`.
      mask: the token that stands for a hidden one.
      rate: share of the tokens to predict.

    Returns:
      (inputs_BT, targets_BT), int32; targets -1 where nothing is to be predicted.

    Raises:
      UserError: a rate that is not between 0 and 1.
    """
    _check_rate(rate)
    draw_BT = rng.random(tokens_BT.shape)
    count = max(1, round(rate * tokens_BT.shape[1]))
    chosen_BT = np.zeros(tokens_BT.shape, bool)
    np.put_along_axis(chosen_BT, np.argsort(draw_BT, axis=1)[:, :count], True, axis=1)
    how_BT = rng.random(tokens_BT.shape)
    other_BT = rng.integers(0, vocab, tokens_BT.shape)
    inputs_BT = np.where(chosen_BT & (how_BT < 0.8), mask, tokens_BT)
    inputs_BT = np.where(chosen_BT & (how_BT >= 0.9), other_BT, inputs_BT)
    return inputs_BT.astype(np.int32), np.where(chosen_BT, tokens_BT, -1).astype(np.int32)


def corrupt_spans(rng: np.random.Generator, tokens: np.ndarray, sentinel: int, rate: float = 0.15,
                  mean: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    """Source and target of span denoising (Raffel et al. 2020, 3.3.4): nothing is lost.

    Hidden spans become one sentinel each in the source; the target is each sentinel with the tokens
    it stands for, and one more sentinel. Lengths are the same for every draw of the same n.

    Args:
      tokens: int32 [n], n of at least 2.
      sentinel: the first sentinel; the next ones count up.
      rate: share of the tokens to hide; mean: tokens of a span.

    Raises:
      UserError: a rate that is not between 0 and 1, a mean below 1 or fewer than 2 tokens.
    """
    _check_rate(rate)
    n = len(tokens)
    if n < 2 or not 1 <= mean < np.inf:
        raise UserError(f"spans of {mean:g} tokens in a text of {n} cannot be hidden; give at "
                        "least 2 tokens and a mean of at least 1.")
    if tokens.max() >= sentinel:
        raise UserError(f"token {tokens.max()} would be read as a sentinel, which start at "
                        f"{sentinel}; choose a first sentinel above all tokens.")
    hidden = min(max(1, round(n * rate)), n - 1)
    spans = min(max(1, round(hidden / mean)), n - hidden, hidden)
    seen_lengths, span_lengths = (_parts(rng, total, spans) for total in (n - hidden, hidden))
    source, target, at = [], [], 0
    for i, (seen, span) in enumerate(zip(seen_lengths, span_lengths, strict=True)):
        source += [*tokens[at:at + seen], sentinel + i]
        target += [sentinel + i, *tokens[at + seen:at + seen + span]]
        at += seen + span
    return np.asarray(source, np.int32), np.asarray([*target, sentinel + spans], np.int32)


def _parts(rng: np.random.Generator, total: int, parts: int) -> np.ndarray:
    """Lengths of at least 1 that sum to `total`, all such splits alike."""
    cuts = np.sort(rng.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff([0, *cuts, total])


def _check_rate(rate: float) -> None:
    if not 0 < rate < 1:
        raise UserError(f"rate={rate} is no share of the tokens; give a number between 0 and 1.")
