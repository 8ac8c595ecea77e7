"""What the length study trains: position schemes by name, and one checkpoint under other positions.

A scheme is written as in `--model.positions`, with three blanks: {trained} is the length L of
training, {longest} the longest evaluation, {factor} how many times longer than L a context is.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from experiments._char_lm import Task, windows
from tx_jax import models
from tx_jax.study.replicas import Program
from tx_jax.train import Batch, TrainState, init_state, train_step

# Trained from scratch at L. The rows of the learned table past L are never trained.
ARMS = {
    "none": "none", "sinusoidal": "sinusoidal", "learned": "learned(length={longest})",
    "rope": "rope", "t5": "t5", "alibi": "alibi", "kerple": "kerple", "fire": "fire",
    "xpos": "xpos", "transformer_xl": "transformer_xl", "cope": "cope",
    "rope_pi": "rope_pi(factor={factor})", "rope_ntk": "rope_ntk(factor={factor})",
    "rope_dynamic_ntk": "rope_dynamic_ntk(trained={trained})",
    "rope_by_parts": "rope_by_parts(factor={factor}, trained={trained})",
    "yarn": "yarn(factor={factor}, trained={trained})",
    "llama3": "llama3(factor={factor}, original={trained})",
    "longrope": "longrope(factor={factor}, original={trained})",
}
# Other forms of a trained `rope`: they share its parameters, which are only read differently.
METHODS = {
    "none": "rope",
    "pi": "rope_pi(factor={factor})",
    "ntk": "rope_ntk(factor={factor})",
    # As Hugging Face runs it, s = 2 l / L - 1. The form of the paper is that of `ntk` at l = s L.
    "dynamic_ntk": "rope_dynamic_ntk(trained={trained}, factor=2)",
    "by_parts": "rope_by_parts(factor={factor}, trained={trained}, alpha={alpha}, beta={beta})",
    "yarn": "yarn(factor={factor}, trained={trained}, alpha={alpha}, beta={beta})",
    # Its published low and high, 1 and 4, on the base of the checkpoint.
    "llama3": "llama3(factor={factor}, original={trained}, base=10000)",
}


def rows(tokens: jax.Array, starts_B: jax.Array, length: int) -> Batch:
    """Rows of `length` inputs and the tokens that follow them; their positions count from 0."""
    # One row of positions serves all: a bias is then computed once, not once per row.
    return {**windows(tokens, starts_B, length),
            "positions_BT": jnp.arange(length, dtype=jnp.int32)[None]}


def training(task: Task, chunk: int) -> Program:
    """Training from scratch, `chunk` steps at a time.

    replica: {"key", "lr", "stream"}. shared: {"tokens" [n], "starts" [streams, steps, B]}.
    Record: loss in nats per token, [chunk].
    """
    model = task.build()

    def start(replica: Mapping[str, Any], shared: Mapping[str, Any]) -> TrainState:
        return init_state(model, task.optim, replica["key"])

    return Program(start, _steps(task, chunk))


def _steps(task: Task, chunk: int):
    model = task.build()

    def step(replica, state, shared):
        starts = jax.lax.dynamic_slice_in_dim(
            shared["starts"][replica["stream"]], state.step, chunk)

        def one(state, starts_B):
            state, metrics = train_step(model, task.optim, task.steps, state,
                                        rows(shared["tokens"], starts_B, task.context),
                                        lr=replica["lr"])
            return state, metrics["loss"]

        return jax.lax.scan(one, state, starts)

    return step


def fine_tuning(task: Task, chunk: int, held_out: Callable[[models.DecoderLM, Any, Any], Any]
                ) -> Program:
    """Training on from given parameters, `chunk` steps at a time, with a fresh optimizer.

    Args:
      held_out: (model, parameters, shared) -> what is recorded after each chunk.

    replica: {"params", "lr", "stream", "key"}. shared: as in `training`, and what `held_out` reads.
    """
    model, steps = task.build(), _steps(task, chunk)

    def start(replica: Mapping[str, Any], shared: Mapping[str, Any]) -> TrainState:
        fresh = init_state(model, task.optim, replica["key"])
        return dataclasses.replace(fresh, params=replica["params"])

    def step(replica, state, shared):
        state, _ = steps(replica, state, shared)
        return state, held_out(model, state.params, shared)

    return Program(start, step)
