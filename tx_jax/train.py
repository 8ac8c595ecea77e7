"""One training step and one evaluation as pure functions; `fit.py` holds the loop around them."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tx_jax import forms
from tx_jax.config import OptimConfig
from tx_jax.errors import UserError
from tx_jax.forms import Model
from tx_jax.loss import token_loss
from tx_jax.optim import learning_rate, make_optimizer

Batch = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything a step changes, and the key it draws from.

    Attributes:
      step: int32 scalar, steps taken so far.
      params: nested dict of float32 arrays.
      opt_state: state of the optax transformation.
      key: PRNG key of the run; never changes, dropout of step s uses `fold_in(key, s)`.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    key: jax.Array


def init_state(model: Model, cfg: OptimConfig, key: jax.Array) -> TrainState:
    """State before the first step; parameters and dropout get independent halves of `key`."""
    params_key, dropout_key = jax.random.split(key)
    params = forms.init(model, params_key)
    # The shape of the optimizer state does not depend on the length of the run.
    opt_state = make_optimizer(cfg, 1, params).init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, dropout_key)


def _sum_loss(params: Any, model: Model, batch: Batch, dropout_key: jax.Array,
              scale: jax.Array | float | None, label_smoothing: float
              ) -> tuple[jax.Array, jax.Array]:
    logits_BTV = forms.logits(model, params, batch, dropout_key, scale)
    return token_loss(logits_BTV, batch["targets_BT"], label_smoothing)


def loss_and_grads(model: Model, params: Any, batch: Batch, dropout_key: jax.Array, *,
                   accumulate: int = 1, scale: jax.Array | float | None = None,
                   label_smoothing: float = 0.0) -> tuple[jax.Array, Any, jax.Array]:
    """Mean loss per target token of a batch, its gradient, and the number of targets.

    Sums over `accumulate` micro-batches are divided by the number of targets of the whole batch, so
    the split does not change the result, however unevenly the targets fall (a mean of means would).
    Dropout draws differ between splits.

    Args:
      batch: int32 `targets_BT` (negative = none) and what `forms.logits` takes; B is a multiple of
        `accumulate`.

    Returns:
      (loss in nats, gradient tree in float32, targets as a float32 scalar); without any target the
      loss and the gradients are 0.

    Raises:
      UserError: `accumulate` does not divide B.
    """
    rows = batch["tokens_BT"].shape[0]
    if rows % accumulate:
        raise UserError(f"--optim.accumulate={accumulate} does not divide the batch of {rows} "
                        "rows; change one of them.")
    total = jnp.maximum(jnp.sum(batch["targets_BT"] >= 0, dtype=jnp.float32), 1.0)

    def share(params: Any, micro: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        nats, count = _sum_loss(params, model, micro, key, scale, label_smoothing)
        return nats / total, count

    grad = jax.value_and_grad(share, has_aux=True)
    if accumulate == 1:
        (loss, count), grads = grad(params, batch, dropout_key)
        return loss, grads, count

    # Row b goes to micro-batch b % accumulate: rows sharded over devices stay where they are.
    micros = jax.tree.map(
        lambda x: x.reshape(rows // accumulate, accumulate, *x.shape[1:]).swapaxes(0, 1), batch)
    keys = jax.random.split(dropout_key, accumulate)

    def add(carry: Any, xs: Any) -> tuple[Any, None]:
        (loss, count), grads = grad(params, *xs)
        return jax.tree.map(jnp.add, carry, (loss, grads, count)), None

    zero = jnp.zeros((), jnp.float32)
    start = (zero, jax.tree.map(jnp.zeros_like, params), zero)
    return jax.lax.scan(add, start, (micros, keys))[0]


def train_step(model: Model, cfg: OptimConfig, steps: int, state: TrainState,
               batch: Batch, *, lr: jax.Array | float | None = None,
               scale: jax.Array | float | None = None) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step: pure, for use under jit, vmap (a replica axis) or on sharded arrays.

    Args:
      steps: length of the run, for the schedule.
      batch: see `loss_and_grads`.
      lr: peak learning rate in place of `cfg.lr`; may be traced.
      scale: attention scale in place of the model's; may be traced.

    Returns:
      (state, metrics): float32 scalars `loss` (nats per target, of smoothed targets where
      `cfg.label_smoothing` asks for them), `grad_norm` (before clipping) and `lr` (of this step),
      int32 `tokens` (targets seen), bool `finite` (loss and gradient are).
    """
    key = jax.random.fold_in(state.key, state.step)
    loss, grads, count = loss_and_grads(model, state.params, batch, key,
                                        accumulate=cfg.accumulate, scale=scale,
                                        label_smoothing=cfg.label_smoothing)
    optimizer = make_optimizer(cfg, steps, state.params, lr=lr)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    norm = optax.tree.norm(grads)
    metrics = {"loss": loss, "grad_norm": norm, "lr": learning_rate(cfg, steps, state.step, lr),
               "tokens": count.astype(jnp.int32), "finite": jnp.isfinite(loss) & jnp.isfinite(norm)}
    state = TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state,
                       state.key)
    return state, metrics


def eval_step(model: Model, params: Any, batch: Batch,
              scale: jax.Array | float | None = None) -> tuple[jax.Array, jax.Array]:
    """(sum of nats, number of targets) of one batch, without dropout; float32 scalars."""
    logits_BTV = forms.logits(model, params, batch, scale=scale)
    return token_loss(logits_BTV, batch["targets_BT"])


_jit_eval_step = jax.jit(eval_step, static_argnames=("model",))


def evaluate(model: Model, params: Any, batches: Iterable[Batch],
             scale: jax.Array | float | None = None) -> dict[str, float]:
    """Loss over a whole set: sums over batches, so independent of how they are cut and padded.

    Returns:
      `loss` (nats per target), `nats` (their sum) and `tokens` (targets), Python numbers.

    Raises:
      UserError: nothing in the set has a target.
    """
    # Two passes, so that the device is not waited for between batches.
    parts = [_jit_eval_step(model, params, batch, scale) for batch in batches]
    nats = sum(float(part) for part, _ in parts)
    tokens = sum(int(count) for _, count in parts)
    if not tokens:
        raise UserError("the validation set has no target tokens; give more text or a larger "
                        "--data.validation.")
    return {"loss": nats / tokens, "nats": nats, "tokens": tokens}
