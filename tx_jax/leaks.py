"""Leak detector: change what a token must not see, and its logits must not move.

Run by the trainer before the first step, through the attention implementation that trains. A leak
makes the loss look better than it is, and nothing else shows it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax import models
from tx_jax.errors import UserError

# Logits that stand for the same sum may differ by rounding; a leak is far larger.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


class LeakError(UserError):
    """A token sees what it must not; the message names the token and what it sees."""


def check_leaks(model: models.DecoderLM, params: Any, batch: dict[str, jax.Array],
                dropout_key: jax.Array | None = None) -> int:
    """Raise LeakError if a token's logits depend on a later token, another document or padding.

    Args:
      batch: `tokens_BT` and, optionally, `segments_BT` and `positions_BT`, as for training.
      dropout_key: as for training, so that the implementation that runs is the same.

    Returns:
      The number of changes tried.
    """
    tokens_BT = batch["tokens_BT"]
    segments_BT = np.asarray(batch["segments_BT"]) if "segments_BT" in batch else None

    def logits(changed_BT: np.ndarray) -> np.ndarray:
        # Neighbouring ids are unlike tokens; another id is all that counts.
        other_BT = jnp.where(changed_BT, (tokens_BT + 1) % model.vocab, tokens_BT)
        return np.asarray(_logits(model, params, batch | {"tokens_BT": other_BT}, dropout_key))

    shape = tokens_BT.shape
    before = logits(np.zeros(shape, bool))
    limit = TOLERANCE[model.cfg.dtype] * max(1.0, float(np.nanmax(np.abs(before), initial=0.0)))
    tried = _changes(shape, segments_BT)
    for what, changed_BT, still_BT in tried:
        after = logits(changed_BT)
        # Logits that are NaN before and after, as those of a token outside a table, did not move.
        moved = np.where(np.isnan(after) & np.isnan(before), 0, np.abs(after - before))
        moved_BT = np.max(np.nan_to_num(moved, nan=np.inf), axis=-1, where=still_BT[..., None],
                          initial=0)
        b, t = np.unravel_index(np.argmax(moved_BT), shape)
        if moved_BT[b, t] > limit:
            raise LeakError(
                f"token {t} of row {b} sees {what}: changing it moves the token's logits by "
                f"{moved_BT[b, t]:.2g}; --model.attention={model.cfg.attention} with "
                f"--model.mask={model.cfg.mask} would train on the answers.")
    return len(tried)


@functools.partial(jax.jit, static_argnames=("model",))
def _logits(model, params, batch, dropout_key):
    return models.apply(model, params, batch["tokens_BT"], segments_BT=batch.get("segments_BT"),
                        positions_BT=batch.get("positions_BT"), dropout_key=dropout_key)[0]


def _changes(shape: tuple[int, int], segments_BT: np.ndarray | None
             ) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(what is changed, where, which tokens must not move), one for each forward pass."""
    index_BT = np.broadcast_to(np.arange(shape[1]), shape)
    changes = [(f"the future (tokens from {cut} on)", index_BT >= cut, index_BT < cut)
               for cut in sorted({1, shape[1] // 2, shape[1] - 1}) if cut >= 1]
    if segments_BT is None:
        return changes
    first_B1 = segments_BT[:, :1]
    for name, chosen in (("another document", (segments_BT == first_B1) & (segments_BT != 0)),
                         ("another document", (segments_BT != first_B1) & (segments_BT != 0)),
                         ("padding", segments_BT == 0)):
        others = ~chosen & (segments_BT != 0)
        if chosen.any() and others.any():
            changes.append((name, chosen, others))
    return changes
