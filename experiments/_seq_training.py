"""Training on a sequence task, one replica per (learning rate, seed)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from experiments import _seq_tasks
from tx_jax import forms
from tx_jax.config import EncoderConfig, ModelConfig, OptimConfig
from tx_jax.study.replicas import Program
from tx_jax.train import init_state, train_step


@dataclass(frozen=True)
class Task:
    """What is compiled once: the shape, the task, the optimizer and every size.

    Attributes:
      encoder: None = a decoder alone, which sees the whole source if `prefix`.
      steps: of the whole run, for the schedule.
    """

    name: str
    model: ModelConfig
    encoder: EncoderConfig | None
    prefix: bool
    optim: OptimConfig
    length: int
    symbols: int
    batch: int
    steps: int

    def build(self) -> forms.Model:
        """The model; the last token of the vocabulary opens targets."""
        return forms.build(self.model, self.encoder, self.symbols + 1, 2 * self.length)


def program(task: Task, chunk: int) -> Program:
    """The trainer's own step, `chunk` steps at a time.

    replica: {"key", "lr", "data"}; rows of step s come from fold_in(data, s), so that equal seeds
    see the same rows whatever the arm. Record: loss in nats per target token [chunk], the share of
    exact rows in a freshly drawn batch, and the steps so far.
    """
    model = task.build()

    def rows(key):
        x_BS, y_BT = _seq_tasks.draw(task.name, key, task.batch, task.length, task.symbols)
        return _seq_tasks.make_batch(model, task.prefix, x_BS, y_BT, task.symbols)

    def start(replica, shared):
        return init_state(model, task.optim, replica["key"])

    def step(replica, state, shared):
        def one(state, _):
            batch = rows(jax.random.fold_in(replica["data"], state.step))
            state, metrics = train_step(model, task.optim, task.steps, state, batch,
                                        lr=replica["lr"])
            return state, metrics["loss"]

        state, loss = jax.lax.scan(one, state, None, length=chunk)
        fresh = rows(jax.random.fold_in(replica["data"], -1 - state.step))
        right_B = _seq_tasks.exact(model, state.params, fresh)
        return state, {"loss": loss, "exact": jnp.mean(right_B.astype(jnp.float32)),
                       "step": state.step}

    return Program(start, step)
