"""Three protocols on the same target tokens at every length.

Scored regions are cut out of held-out documents, each as long as the least common multiple of all
lengths, with a whole longest window of the same document before it:

  windows   a region is cut into windows of the length T, every token is scored. Early tokens of a
            window have little context, and the longer the windows the fewer of them there are: the
            loss falls with T though no more context is used (Press et al. 2022).
  sliding   a window of T slides on by a stride S and only its last S tokens are scored, so that
            every prediction has at least T - S tokens of context. Of all steps evenly spread ones
            are taken, the same at every length.
  position  the loss at each place of the sliding windows, all of whose tokens are scored.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments._char_lm import Task
from experiments._extrapolation_models import rows
from tx_jax import models
from tx_jax.data import Part
from tx_jax.errors import UserError
from tx_jax.study.replicas import Program

PROTOCOLS = ("windows", "sliding")
Plan = Mapping[str, Mapping[int, np.ndarray]]
_AT_ONCE = 2048  # tokens of a batch: enough to fill a core, small enough for its cache


def regions(part: Part, share: tuple[float, float], lengths: Sequence[int], tokens: int
            ) -> np.ndarray:
    """First target of each scored region, int64 [regions], evenly spread over the candidates.

    Args:
      share: from where to where of the part, (0, 0.5) is its first half; a region and its context
        stay inside, and inside of one document.
      tokens: as many regions as fit in, at least one.

    Raises:
      UserError: no document holds a region and its context.
    """
    first, last = (int(s * part.n_tokens) for s in share)
    size, longest = math.lcm(*lengths), max(lengths)
    ends = np.asarray(part.ends())
    begins = np.concatenate([[0], ends[:-1]])
    found: list[int] = []
    for begin, end in zip(np.maximum(begins, first), np.minimum(ends, last), strict=True):
        found += range(int(begin) + longest, int(end) - size + 1, size)
    if not found:
        raise UserError(f"no held-out document has {longest + size} tokens in a row, for which "
                        f"the lengths {','.join(map(str, lengths))} of --factors and "
                        "--extend.factors ask (the longest and the least common multiple of all); "
                        "choose other factors or a longer --text.")
    count = min(max(tokens // size, 1), len(found))
    return np.asarray(found)[np.linspace(0, len(found) - 1, count).round().astype(int)]


def window_starts(region_R: np.ndarray, size: int, length: int) -> np.ndarray:
    """Where the windows of `length` start that cover the targets of all regions, int32 [rows]."""
    # A row's first target is one after its first input.
    offset = np.arange(0, size, length) - 1
    return (region_R[:, None] + offset[None]).reshape(-1).astype(np.int32)


def sliding_starts(region_R: np.ndarray, size: int, length: int, stride: int, count: int
                   ) -> np.ndarray:
    """Where `count` windows start whose last `stride` targets are the same for every length."""
    ends = (region_R[:, None] + np.arange(stride, size + 1, stride)[None]).reshape(-1)
    taken = np.linspace(0, ends.size - 1, min(count, ends.size)).round().astype(int)
    return (ends[taken] - 1 - length).astype(np.int32)


def plan(region_R: np.ndarray, size: int, lengths: Sequence[int], stride: int, count: int,
         protocols: Sequence[str] = PROTOCOLS) -> Plan:
    """What to score: protocol -> length -> starts."""
    made = {"windows": lambda T: window_starts(region_R, size, T),
            "sliding": lambda T: sliding_starts(region_R, size, T, stride, count)}
    return {name: {T: made[name](T) for T in lengths} for name in protocols}


def widths(lengths: Sequence[int]) -> dict[int, int]:
    """Length -> width of the rows it is computed in, at most twice as long.

    A causal model does not see what comes after a window, so windows of nearly equal length share
    rows of one width: a program with few shapes compiles in seconds, one with all lengths does not.
    """
    found: dict[int, int] = {}
    left = sorted(set(lengths))
    while left:
        group = [T for T in left if T <= 2 * left[0]]
        found |= dict.fromkeys(group, group[-1])
        left = left[len(group):]
    return found


def batches(plans: Mapping[str, Plan]) -> tuple[dict[str, Any], dict[str, list[tuple]]]:
    """The rows of all plans in batches, by width.

    Returns:
      width -> {"starts" [n, B], "weight" [n, B], "length" [n]}: each batch holds windows of one
      length; the last one of a length is filled up with rows of weight 0. And width -> the (plan,
      protocol, length) of each of the n batches.
    """
    entries = [(name, protocol, T, starts) for name, made in plans.items()
               for protocol, by_length in made.items() for T, starts in by_length.items()]
    width = widths([T for _, _, T, _ in entries])
    arrays: dict[str, Any] = {}
    labels: dict[str, list[tuple]] = {}
    for wide in sorted(set(width.values())):
        B = max(1, _AT_ONCE // wide)
        parts, labels[str(wide)] = [], []
        for name, protocol, T, starts in entries:
            if width[T] != wide:
                continue
            for first in range(0, len(starts), B):
                some = starts[first:first + B]
                parts.append((np.pad(some, (0, B - len(some)), mode="edge"),
                              (np.arange(B) < len(some)).astype(np.float32), np.int32(T)))
                labels[str(wide)].append((name, protocol, T))
        arrays[str(wide)] = {key: np.stack(column) for key, column in
                             zip(("starts", "weight", "length"), zip(*parts, strict=True),
                                 strict=True)}
    return arrays, labels


def loss_sums(model: models.DecoderLM, params: Any, tokens: jax.Array, batch: Mapping[str, Any],
              width: int) -> jax.Array:
    """Weighted sum over the rows of a batch of the loss at each place, nats, float32 [width].

    Places from the length of the windows on say nothing. Their positions stay at the last one, so
    that schemes which follow the length of a row see that of the window.
    """
    made = rows(tokens, batch["starts"], width)
    positions_BT = jnp.minimum(made["positions_BT"], batch["length"] - 1)
    logits_BTV, _ = models.apply(model, params, made["tokens_BT"], positions_BT=positions_BT)
    log_p_BTV = jax.nn.log_softmax(logits_BTV, axis=-1)
    picked_BT = jnp.take_along_axis(log_p_BTV, made["targets_BT"][..., None], axis=-1)[..., 0]
    return -jnp.sum(picked_BT * batch["weight"][:, None], axis=0)


def scoring(task: Task) -> Program:
    """One chunk that scores all batches.

    replica: {"params"}. shared: {"tokens" [n], "batches": as from `batches`}. Record: width -> sums
    by place [n, width].
    """
    model = task.build()

    def step(replica, carry, shared):
        return carry, {width: jax.lax.map(
            lambda one, T=int(width): loss_sums(model, replica["params"], shared["tokens"], one, T),
            some) for width, some in shared["batches"].items()}

    return Program(lambda replica, shared: jnp.zeros(()), step)


def by_place(record: Mapping[str, np.ndarray], labels: Mapping[str, list[tuple]],
             plans: Mapping[str, Plan]) -> dict[str, dict[str, dict[int, np.ndarray]]]:
    """Plan -> protocol -> length -> mean loss at each place, float64 [T]."""
    total: dict[tuple, np.ndarray] = {}
    for width, sums in record.items():
        for label, sum_T in zip(labels[width], np.asarray(sums, np.float64), strict=True):
            total[label] = total.get(label, 0.0) + sum_T[:label[2]]
    return {name: {protocol: {T: total[name, protocol, T] / len(starts)
                              for T, starts in by_length.items()}
                   for protocol, by_length in made.items()} for name, made in plans.items()}


def losses(seen: Mapping[str, Mapping[int, np.ndarray]], stride: int
           ) -> dict[str, dict[str, float]]:
    """Protocol -> length -> nats per token, from the losses by place of a plan."""
    part = {"windows": slice(None), "sliding": slice(-stride, None)}
    return {name: {str(T): float(nats_T[part[name]].mean()) for T, nats_T in by_length.items()}
            for name, by_length in seen.items()}


def bins(nats_T: np.ndarray, size: int) -> np.ndarray:
    """Means over `size` places each, [T // size]; places left over are dropped in front."""
    return nats_T[len(nats_T) % size:].reshape(-1, size).mean(axis=1)
