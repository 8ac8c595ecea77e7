"""Batches of rows from prepared tokens, as grain data sets. Imports no jax.

A batch is a dict of int32 arrays [B, T], T = `context`:
  tokens_BT: the inputs.
  targets_BT: the token that follows each input; -1 = no target.
  segments_BT: number of the document in its row, from 1; 0 = padding. In windows mode all 1: there
    the model reads across the end-of-text tokens.
  positions_BT: position in the segment.

**Windows.** Row i of an epoch starts at `offset + T * permutation[i]`; offset and permutation are
drawn anew each epoch from (seed, epoch). An epoch has floor((n - T) / T) rows, at least one. It
sees no target twice and leaves out fewer than 2 T tokens at the two ends, others each epoch; every
one of the n - T possible windows can occur.

**Documents.** A document of n tokens gives n - 1 (input, target) pairs, so its last token is only
ever a target; longer ones are cut into pieces of T pairs. The pieces of an epoch are shuffled and
packed into rows, first fit; each piece is a segment with its own positions from 0.
"""

import functools
import sys
from collections.abc import Callable, Iterable

import grain
import numpy as np
from grain.experimental import FirstFitPackIterDataset

from tx_jax.config import DataConfig
from tx_jax.data.prepare import Part, Prepared, check_length
from tx_jax.errors import UserError

Batch = dict[str, np.ndarray]
_READ_INLINE = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
_OPEN_ROWS = 32  # rows that first fit fills at the same time


def train_iterator(prepared: Prepared, cfg: DataConfig, batch: int, seed: int,
                   process_index: int = 0, process_count: int = 1) -> grain.DatasetIterator:
    """Return the endless iterator of training batches, shuffled anew each epoch.

    Args:
      batch: rows per step over all processes; each yields `batch / process_count` of them.
      seed: of the order.
      process_index, process_count: in windows mode the rows of all processes, one after the other,
        are those of a single process. In documents mode process p packs pieces p,
        p + process_count, ... of the shuffled order. Within an epoch none comes twice; every
        process can always take a step.

    Returns:
      A grain iterator of `Batch`; `get_state` and `set_state` continue it exactly.

    Raises:
      UserError: too short a text, or a batch that does not divide.
    """
    check_length(prepared, cfg)
    rows = _rows_of(batch, process_index, process_count)
    if cfg.packing == "windows":
        order = _window_order(prepared.train.n_tokens, cfg.context, seed)
        tokens = prepared.train.tokens()

        def read(step: int) -> Batch:
            starts = order.items(step * batch, (step + 1) * batch)
            return _windows(tokens, starts[rows], cfg.context)

        return iter(grain.MapDataset.range(sys.maxsize).map(read).to_iter_dataset(_READ_INLINE))
    pieces = _Pieces(prepared.train, cfg.context)
    order = _Order(lambda epoch: np.random.default_rng([seed, epoch]).permutation(len(pieces)))
    numbers = grain.MapDataset.range(sys.maxsize)[process_index::process_count]
    packed = _pack(numbers.map(lambda i: pieces.read(order.items(i, i + 1)[0])), cfg.context,
                   seed=int(np.random.SeedSequence(seed).generate_state(1)[0]), shuffle=True)
    return iter(packed.batch(rows.stop - rows.start, drop_remainder=True))


def eval_batches(prepared: Prepared, cfg: DataConfig, batch: int, process_index: int = 0,
                 process_count: int = 1) -> Iterable[Batch]:
    """Return the validation batches, an iterable that may be read again and again.

    Every validation token that has one before it (in its document, in documents mode) is a target
    exactly once, whatever the batch. Rows are cut one after the other; where they end, and in the
    last batch, rows are padded with segment 0 and target -1, so that every process gets the same
    number of batches of the same shape.

    Raises:
      UserError: nothing to predict in the validation part, or a batch that does not divide.
    """
    part = prepared.validation
    rows = _rows_of(batch, process_index, process_count)
    if part.n_tokens - (1 if cfg.packing == "windows" else part.n_documents) < 1:
        raise UserError(f"the validation part of '{cfg.text}' has {part.n_tokens} tokens, which "
                        "gives nothing to predict; raise --data.validation or take a longer text.")
    if cfg.packing == "windows":
        starts = np.arange(0, part.n_tokens - 1, cfg.context)
        tokens = part.tokens()

        def read(step: int) -> Batch:
            return _windows(tokens, starts[step * batch:(step + 1) * batch], cfg.context)

        batches = grain.MapDataset.range(-(-len(starts) // batch)).map(read).to_iter_dataset(
            _READ_INLINE)
    else:
        pieces = _Pieces(part, cfg.context)
        order = grain.MapDataset.range(len(pieces)).map(pieces.read)
        batches = _pack(order, cfg.context, seed=0, shuffle=False).batch(batch)
    return batches.map(lambda full: {k: _pad_rows(v, batch, _PADDING[k])[rows]
                                     for k, v in full.items()})


def window_starts(prepared: Prepared, context: int, batch: int, steps: int, seed: int
                  ) -> np.ndarray:
    """Return where the rows of the first `steps` training batches start, int32 [steps, batch].

    The order is that of `train_iterator` in windows mode: row r of step t holds the inputs
    `tokens[s:s + context]` and the targets one further, s = starts[t, r].

    Raises:
      UserError: the training part is shorter than one row.
    """
    check_length(prepared, DataConfig(text="the text", context=context))
    return token_starts(prepared.train.n_tokens, context, batch, steps, seed)


def token_starts(n_tokens: int, context: int, batch: int, steps: int, seed: int) -> np.ndarray:
    """`window_starts` of a stream of so many tokens, which hold at least one row."""
    starts = _window_order(n_tokens, context, seed).items(0, steps * batch)
    return starts.reshape(steps, batch).astype(np.int32)


def epoch_starts(n_tokens: int, context: int, seed: int, epoch: int) -> np.ndarray:
    """Return the window starts of one epoch in their order, int64 [max(1, (n - T) // T)]."""
    possible = n_tokens - context  # a window holds T inputs and one more token, the last target
    rows = max(possible // context, 1)
    rng = np.random.default_rng([seed, epoch])
    offset = rng.integers(possible - (rows - 1) * context)
    return offset + context * rng.permutation(rows)


class _Order:
    """An endless order, epoch after epoch, that can be entered anywhere.

    `draw(epoch)` gives the items of an epoch, equally many each time and a pure function of its
    number; the latest two are kept.
    """

    def __init__(self, draw: Callable[[int], np.ndarray]):
        self._epoch = functools.lru_cache(maxsize=2)(draw)
        self._size = len(self._epoch(0))

    def items(self, first: int, last: int) -> np.ndarray:
        """Return the items numbered first ... last - 1."""
        parts = []
        while first < last:
            epoch, i = divmod(first, self._size)
            part = self._epoch(epoch)[i:i + last - first]
            parts.append(part)
            first += len(part)
        return np.concatenate(parts)


def _window_order(n_tokens: int, context: int, seed: int) -> _Order:
    return _Order(functools.partial(epoch_starts, n_tokens, context, seed))


def _windows(tokens: np.ndarray, starts: np.ndarray, context: int) -> Batch:
    """Cut rows out of the stream; what lies beyond its end is padding."""
    index = starts[:, None] + np.arange(context + 1)[None, :]
    inside = index[:, 1:] < len(tokens)
    rows = tokens[np.minimum(index, len(tokens) - 1)].astype(np.int32)
    positions = np.broadcast_to(np.arange(context, dtype=np.int32), inside.shape)
    return {"tokens_BT": np.where(inside, rows[:, :-1], 0),
            "targets_BT": np.where(inside, rows[:, 1:], -1),
            "segments_BT": inside.astype(np.int32),
            "positions_BT": np.where(inside, positions, 0)}


class _Pieces:
    """The documents of a part, cut into pieces of at most `context` (input, target) pairs."""

    def __init__(self, part: Part, context: int):
        ends = part.ends()
        begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        pairs = ends - begins - 1
        count = -(-np.maximum(pairs, 0) // context)
        number = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        self._tokens = part.tokens()
        self._starts = np.repeat(begins, count) + number * context
        self._stops = np.minimum(self._starts + context, np.repeat(ends - 1, count))

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, i: int) -> Batch:
        """Return piece i: {"tokens": int32 [n], "targets": int32 [n]}, n <= context."""
        piece = self._tokens[self._starts[i]:self._stops[i] + 1].astype(np.int32)
        return {"tokens": piece[:-1], "targets": piece[1:]}


_PADDING = {"tokens_BT": 0, "targets_BT": -1, "segments_BT": 0, "positions_BT": 0}


def _pack(pieces: grain.MapDataset, context: int, *, seed: int, shuffle: bool) -> grain.IterDataset:
    """Pack pieces into rows of `context`, first fit; yields rows with the keys of `Batch`."""
    rows = FirstFitPackIterDataset(
        pieces.to_iter_dataset(_READ_INLINE), num_packing_bins=_OPEN_ROWS, seed=seed,
        shuffle_bins=shuffle, length_struct={"tokens": context, "targets": context},
        padding_struct={"tokens": 0, "targets": -1})
    return rows.map(lambda row: {
        "tokens_BT": row["tokens"], "targets_BT": row["targets"],
        "segments_BT": row["tokens_segment_ids"].astype(np.int32),
        "positions_BT": row["tokens_positions"].astype(np.int32)})


def _pad_rows(array: np.ndarray, rows: int, value: int) -> np.ndarray:
    return np.pad(array, ((0, rows - len(array)), (0, 0)), constant_values=value)


def _rows_of(batch: int, process_index: int, process_count: int) -> slice:
    """Return the rows of the global batch that belong to this process."""
    if not 0 <= process_index < process_count:
        raise UserError(f"process {process_index} of {process_count} does not exist; processes are "
                        "counted from 0.")
    if batch < 1 or batch % process_count:
        raise UserError(f"a batch of {batch} rows cannot be shared by {process_count} processes; "
                        "make it a positive multiple.")
    share = batch // process_count
    return slice(process_index * share, (process_index + 1) * share)
