"""Decoders trained on probes up to a length, one replica per (task, learning rate, seed).

Exact match is that of free-running greedy decoding, without decoding. A row is right if the argmax
after every true prefix of its answer is the next true token. By induction greedy decoding then
emits the answer and nothing else: its first token follows the prompt, and as long as all tokens so
far are right, the prefix it reads is the true one. Conversely its first wrong token is one such
argmax. `tests/test_probes.py` compares the two. It does not hold for schemes whose formula follows
the length of the row (`rope_dynamic_ntk`, `longrope`), which the probes refuse.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import _probes
from tx_jax import models
from tx_jax.config import ModelConfig, OptimConfig
from tx_jax.study.replicas import Program
from tx_jax.train import Batch, init_state, train_step


@dataclass(frozen=True)
class Task:
    """What is compiled once: the model, the optimizer, the length of a run.

    Attributes:
      context: longest row of all tests, to which learned tables are built.
    """

    model: ModelConfig
    optim: OptimConfig
    symbols: int
    context: int
    steps: int

    def build(self) -> models.DecoderLM:
        """The model."""
        return models.build(self.model, _probes.FIRST + self.symbols, self.context)


def training_rows(task: str, symbols: int, size: int, train_length: int, steps: int, batch: int,
                  seed: int) -> dict[str, np.ndarray]:
    """All batches of a run: tokens int8 and answer bool, [steps, batch, size]; lengths U(1, L)."""
    rng = np.random.default_rng((seed, 0))
    lengths = rng.integers(1, train_length + 1, steps * batch)
    rows = _probes.draw_padded(task, rng, lengths, symbols, size)
    return {"tokens": rows.tokens_RT.reshape(steps, batch, size),
            "answer": rows.answer_RT.reshape(steps, batch, size)}


def test_rows(task: str, symbols: int, size: int, lengths: tuple[int, ...], rows: int, seed: int
              ) -> dict[str, np.ndarray]:
    """Test rows of each length C: tokens and answer [C, rows, size], the tokens of a row [C].

    Drawn apart from the training rows; long rows are never among these, short ones may be.
    """
    found = [_probes.draw_padded(task, np.random.default_rng((seed, 1, n)),
                                 np.full(rows, n), symbols, size) for n in lengths]
    return {"tokens": np.stack([f.tokens_RT for f in found]),
            "answer": np.stack([f.answer_RT for f in found]),
            "width": np.array([_probes.width(task, n) for n in lengths], np.int32)}


def _batch(tokens: jax.Array, answer: jax.Array) -> Batch:
    tokens = tokens.astype(jnp.int32)
    return {"tokens_BT": tokens[:, :-1],
            "targets_BT": jnp.where(answer[:, 1:], tokens[:, 1:], -1)}


def row_positions(batch: Batch, width: jax.Array | int) -> jax.Array:
    """Positions [B, T] of rows of `width` tokens: padding repeats the last one.

    Schemes that follow the length of a row then do not see the padding behind it.
    """
    index_T = jnp.arange(batch["tokens_BT"].shape[1], dtype=jnp.int32)
    return jnp.broadcast_to(jnp.minimum(index_T, width - 2)[None], batch["tokens_BT"].shape)


def exact_match(model: models.DecoderLM, params: Any, batch: Batch,
                positions_BT: jax.Array | None = None) -> jax.Array:
    """Which rows greedy decoding would answer without a mistake, bool [B]."""
    logits_BTV, _ = models.apply(model, params, batch["tokens_BT"], positions_BT=positions_BT)
    right_BT = jnp.argmax(logits_BTV, axis=-1).astype(jnp.int32) == batch["targets_BT"]
    return jnp.all(right_BT | (batch["targets_BT"] < 0), axis=-1)


@partial(jax.jit, static_argnames=("task",))
def evaluate(task: Task, params: Any, tests: Any) -> jax.Array:
    """Share of rows answered exactly at each length, float32 [C]; see `test_rows`."""
    model = task.build()

    def one(test):
        batch = _batch(test["tokens"], test["answer"])
        right_B = exact_match(model, params, batch, row_positions(batch, test["width"]))
        return jnp.mean(right_B.astype(jnp.float32))

    return jax.lax.map(one, tests)


def program(task: Task, chunk: int) -> Program:
    """The trainer's own step, `chunk` steps at a time.

    replica: {"key", "lr", "stream"}. shared: {"tokens", "answer"} of `training_rows`, stacked on a
    leading axis. Record: loss in nats per answer token [chunk], and the exact match on the first
    batch of the chunk before it is trained on.
    """
    model = task.build()

    def start(replica, shared):
        return init_state(model, task.optim, replica["key"])

    def step(replica, state, shared):
        rows = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(
            x[replica["stream"]], state.step, chunk), shared)
        fresh = exact_match(model, state.params, _batch(rows["tokens"][0], rows["answer"][0]))

        def one(state, row):
            state, metrics = train_step(model, task.optim, task.steps, state,
                                        _batch(row["tokens"], row["answer"]), lr=replica["lr"])
            return state, metrics["loss"]

        state, loss = jax.lax.scan(one, state, rows)
        return state, {"loss": loss, "exact": jnp.mean(fresh.astype(jnp.float32))}

    return Program(start, step)
