"""A small language model on real text, one replica per (scale, learning rate, seed)."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tx_jax import models
from tx_jax.config import ModelConfig, OptimConfig
from tx_jax.study.replicas import Program
from tx_jax.train import Batch, init_state, loss_and_grads, train_step


@dataclass(frozen=True)
class Task:
    """What is compiled once: the architecture, the optimizer and every size.

    Attributes:
      context: length of a training row.
      steps: of the whole run, for the schedule.
    """

    model: ModelConfig
    optim: OptimConfig
    vocab: int
    context: int
    steps: int

    def build(self) -> models.DecoderLM:
        """The model."""
        return models.build(self.model, self.vocab, self.context)


def windows(tokens: jax.Array, starts_B: jax.Array, context: int) -> Batch:
    """Rows of `context` tokens and the tokens that follow them."""
    index_BT = starts_B[:, None] + jnp.arange(context + 1, dtype=starts_B.dtype)[None, :]
    rows = tokens.at[index_BT].get(mode="promise_in_bounds").astype(jnp.int32)
    return {"tokens_BT": rows[:, :-1], "targets_BT": rows[:, 1:]}


def program(task: Task, chunk: int) -> Program:
    """The trainer's own step, `chunk` steps at a time.

    replica: {"key", "lr", "stream"} and, where it is swept, "scale". shared: {"tokens" [n],
    "starts" [streams, steps, B]}.
    Record: loss in nats per token and gradient norm, [chunk].
    """
    model = task.build()

    def start(replica, shared):
        return init_state(model, task.optim, replica["key"])

    def step(replica, state, shared):
        starts = jax.lax.dynamic_slice_in_dim(
            shared["starts"][replica["stream"]], state.step, chunk)

        def one(state, starts_B):
            batch = windows(shared["tokens"], starts_B, task.context)
            state, metrics = train_step(model, task.optim, task.steps, state, batch,
                                        lr=replica["lr"], scale=replica.get("scale"))
            return state, {"loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}

        return jax.lax.scan(one, state, starts)

    return Program(start, step)


@partial(jax.jit, static_argnames=("task",))
def inspect(task: Task, params: Any, batch: Batch, scale: jax.Array) -> dict[str, jax.Array]:
    """Loss on held-out rows and, per layer [L], attention statistics and gradient norm of W_q."""
    model = task.build()
    _, aux = models.apply(model, params, batch["tokens_BT"], scale=scale, trace=True)
    nats, grads, _ = loss_and_grads(model, params, batch, jax.random.key(0), scale=scale)
    q_LDNH = grads["blocks"]["attention"]["q_DNH"]
    return {"loss": nats, **aux,
            "gradient_q": jnp.sqrt(jnp.sum(q_LDNH * q_LDNH, axis=(1, 2, 3)))}
