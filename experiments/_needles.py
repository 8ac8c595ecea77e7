"""Look a key up among n items by a causal decoder: the prompts, the model, training, evaluation.

A prompt is n items, each one token that stands for a key and a value, and then the query, a token
that stands for a key alone; the answer is the value of the item with that key, the needle. Keys of
a prompt are distinct. Liu et al. 2023 (section 3) ask the same of language models with pairs of
identifiers as text. A token for the whole item spares the model the step from key to value, and so
the hundreds of steps until that emerges.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tx_jax import blocks, models
from tx_jax.config import ModelConfig, OptimConfig
from tx_jax.letters import place, sizes
from tx_jax.masks import Mask, parse_mask
from tx_jax.positions import make_encoding
from tx_jax.study.replicas import Program
from tx_jax.train import Batch, init_state, train_step

# What stands in the prompt besides items: the query behind them, or before and behind them.
LAYOUTS = ("last", "first_and_last")
# name -> weight of depth i among n, 0 = first; brought to sum 1 by `depth_weights`.
REGIMES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "uniform": lambda i, n: np.ones(n),
    "ends": lambda i, n: 0.5**i + 0.5 ** (n - 1 - i),
    "recent": lambda i, n: 0.7 ** (n - 1 - i),
}


@dataclass(frozen=True)
class Task:
    """What is compiled once: the architecture and every size.

    Attributes:
      model: its `mask` may hold {n}, which stands for the tokens before the last query.
      vocab: how many keys there are, and how many values.
      items: n in training; longest: the largest n of any evaluation.
      layout: see `LAYOUTS`.
    """

    model: ModelConfig
    optim: OptimConfig
    vocab: int
    items: int
    longest: int
    batch: int
    steps: int
    layout: str = "last"

    def build(self, items: int) -> "Reader":
        """The model for prompts of `items` items; parameters fit any number of them."""
        before = items + self.layout.startswith("first")
        cfg = replace(self.model, mask=self.model.mask.replace("{n}", str(before)))
        return Reader(cfg, self.vocab, self.longest + 2)


class Reader(models.DecoderLM):
    """The decoder with items for tokens: token = key + V * (value + 1), a query = key.

    An item is embedded as the sum of a key and a value vector, and a query by a table of its own;
    logits are over values. Were queries embedded as keys are, a query would match itself best; a
    model that keeps away from that by position keeps away from the item beside it too, which then
    is answered worse than any other. `models.init` and `models.apply` take it as any decoder, but
    for whole prompts alone: no segments, positions of their own or dropout.
    """

    @nn.compact
    def __call__(self, tokens_BT, segments_BT=None, positions_BT=None, dropout_key=None,
                 scale=None, trace=False):
        if segments_BT is not None or positions_BT is not None:
            raise ValueError("a Reader takes whole prompts alone; leave segments and positions "
                             "out.")
        cfg, V = self.cfg, self.vocab
        size = nn.FrozenDict(sizes(cfg, V, self.context))
        encoding = make_encoding(cfg.positions)
        key_VD, value_VD, query_VD = (
            self.param(name, nn.initializers.normal(1.0), (V, cfg.d_model), jnp.float32)
            for name in ("key_VD", "value_VD", "query_VD"))
        head_DV = self.param("head_DV", nn.initializers.normal(cfg.d_model**-0.5),
                             (cfg.d_model, V), jnp.float32)
        shared = blocks.shared_positions(self, encoding, size)
        positions_BT = models.default_positions(tokens_BT, None)
        key_BT, value_BT = tokens_BT % V, tokens_BT // V - 1
        x_BTD = jnp.where((value_BT >= 0)[..., None], key_VD[key_BT] + value_VD[value_BT],
                          query_VD[key_BT])
        x_BTD = encoding.embed(shared, place("BTD", x_BTD.astype(cfg.dtype)), positions_BT)
        x_BTD, aux = blocks.run_stack(
            cfg, size, encoding, x_BTD,
            blocks.context_of(Mask(parse_mask(cfg.mask)), positions_BT, shared, scale=scale),
            trace=trace)
        return jnp.einsum("BTD,DV->BTV", x_BTD, head_DV.astype(x_BTD.dtype)).astype(
            jnp.float32), aux


def depth_weights(regime: str, items: int) -> np.ndarray:
    """The probability of each depth in training, float32 [items]."""
    weights = REGIMES[regime](np.arange(items), items)
    return (weights / weights.sum()).astype(np.float32)


def draw(key: jax.Array, count: int, items: int, vocab: int) -> tuple[jax.Array, jax.Array]:
    """`count` rows of items: distinct keys and free values, int32 [count, items] each."""
    for_keys, for_values = jax.random.split(key)
    order_BV = jnp.argsort(jax.random.uniform(for_keys, (count, vocab)), axis=-1)
    values_BN = jax.random.randint(for_values, (count, items), 0, vocab, jnp.int32)
    return order_BV[:, :items].astype(jnp.int32), values_BN


def prompt(keys_BN: jax.Array, values_BN: jax.Array, query_B: jax.Array, vocab: int,
           layout: str = "last") -> jax.Array:
    """The tokens of a prompt, int32 [B, T]."""
    query_B1 = query_B[:, None]
    items = [keys_BN + vocab * (values_BN + 1), query_B1]
    return jnp.concatenate([query_B1, *items] if layout == "first_and_last" else items, axis=1)


def moved(x_BN: jax.Array, depth: jax.Array | int) -> jax.Array:
    """The first column moved to column `depth`, traced or not; the others keep their order."""
    column_N = jnp.arange(x_BN.shape[1], dtype=jnp.int32)
    before_N = jnp.where(column_N == depth, 0, column_N)
    return x_BN[:, jnp.where(column_N < depth, column_N + 1, before_N)]


def batch_of(task: Task, key: jax.Array, weights_N: jax.Array) -> Batch:
    """A training batch: the depth asked for is drawn apart from the items, and they for all
    weights alike.
    """
    for_items, for_depth = jax.random.split(key)
    keys_BN, values_BN = draw(for_items, task.batch, task.items, task.vocab)
    uniform_B = jax.random.uniform(for_depth, (task.batch,))
    depth_B = jnp.searchsorted(jnp.cumsum(weights_N)[:-1], uniform_B, side="right")
    query_B, answer_B = (jnp.take_along_axis(x, depth_B[:, None], axis=1)[:, 0]
                         for x in (keys_BN, values_BN))
    tokens_BT = prompt(keys_BN, values_BN, query_B, task.vocab, task.layout)
    return {"tokens_BT": tokens_BT,
            "targets_BT": jnp.full_like(tokens_BT, -1).at[:, -1].set(answer_B)}


def depths(items: int, count: int) -> list[int]:
    """`count` depths, or as many as there are, evenly from the first to the last."""
    return sorted({round(float(d)) for d in np.linspace(0, items - 1, count)})


def accuracy(task: Task, params: Any, key: jax.Array, items: int, count: int, prompts: int
             ) -> dict[str, jax.Array]:
    """Accuracy with the needle at each of `depths(items, count)`, the same questions at all.

    Returns:
      float32 "depth" [P], and "without", the share right when another item, whose key is not asked
      for, takes the needle's place (Liu et al.'s closed book: chance is 1 / vocab).
    """
    keys_QM, values_QM = draw(key, prompts, items + 1, task.vocab)

    def at(depth):
        # The item in column n is left out; with the needle moved there, the prompt has none.
        return _right(task, params, keys_QM[:, 0], values_QM[:, 0],
                      moved(keys_QM, depth)[:, :items], moved(values_QM, depth)[:, :items])

    found = jax.lax.map(at, jnp.asarray([*depths(items, count), items], jnp.int32))
    return {"depth": found[:-1], "without": found[-1]}


def alone(task: Task, params: Any, key: jax.Array, prompts: int) -> jax.Array:
    """Accuracy when the needle is the only item (Liu et al.'s oracle)."""
    keys_Q1, values_Q1 = draw(key, prompts, 1, task.vocab)
    return _right(task, params, keys_Q1[:, 0], values_Q1[:, 0], keys_Q1, values_Q1)


def _right(task: Task, params: Any, query_Q: jax.Array, answer_Q: jax.Array, keys_QN: jax.Array,
           values_QN: jax.Array) -> jax.Array:
    """The share of prompts answered right."""
    model = task.build(keys_QN.shape[1])
    tokens_QT = prompt(keys_QN, values_QN, query_Q, task.vocab, task.layout)
    logits_QTV, _ = models.apply(model, params, tokens_QT)
    hits_Q = jnp.argmax(logits_QTV[:, -1], axis=-1).astype(jnp.int32) == answer_Q
    return jnp.mean(hits_Q.astype(jnp.float32))


def program(task: Task, chunk: int, count: int, prompts: int) -> Program:
    """The trainer's own step, `chunk` steps at a time, with an evaluation after each chunk.

    replica: {"key", "lr", "weights" [n]}: equal keys share parameters, items and the numbers that
    depths are drawn with. Record: loss in nats per answer [chunk], and `accuracy` at n items.
    """
    model = task.build(task.items)

    def start(replica, shared):
        return init_state(model, task.optim, replica["key"])

    def step(replica, state, shared):
        train_key, test_key = keys_of(replica["key"])

        def one(state, _):
            batch = batch_of(task, jax.random.fold_in(train_key, state.step), replica["weights"])
            state, metrics = train_step(model, task.optim, task.steps, state, batch,
                                        lr=replica["lr"])
            return state, metrics["loss"]

        state, nats = jax.lax.scan(one, state, length=chunk)
        found = accuracy(task, state.params, test_key, task.items, count, prompts)
        return state, {"loss": nats, **found}

    return Program(start, step)


def evaluation(task: Task, others: tuple[int, ...], count: int, prompts: int) -> Program:
    """`accuracy` at each number of items in `others`, and `alone`, in one chunk.

    replica: {"key", "params"}. Record: {"n": accuracy of n items, "alone": float32}.
    """

    def step(replica, carry, shared):
        test_key = keys_of(replica["key"])[1]
        found = {str(n): accuracy(task, replica["params"], test_key, n, count, prompts)
                 for n in others}
        return carry, found | {"alone": alone(task, replica["params"], test_key, prompts)}

    return Program(lambda replica, shared: jnp.zeros(()), step)


def keys_of(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys of training batches and of test prompts, apart from that of the parameters."""
    return jax.random.fold_in(key, 1), jax.random.fold_in(key, 2)


def shape_of_curve(accuracy_P: np.ndarray) -> dict[str, float]:
    """A curve over depth in a few numbers: its mean and worst, its first and last point, the mean
    of its middle third, and three differences: middle - ends, first - middle, last - middle.
    """
    places_P = np.linspace(0.0, 1.0, len(accuracy_P))
    middle = float(accuracy_P[(places_P > 0.33) & (places_P < 0.67)].mean())
    first, last = float(accuracy_P[0]), float(accuracy_P[-1])
    return {"accuracy": float(accuracy_P.mean()), "worst": float(accuracy_P.min()),
            "first": first, "middle": middle, "last": last,
            "middle_against_ends": middle - (first + last) / 2, "primacy": first - middle,
            "recency": last - middle}
