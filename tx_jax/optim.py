"""AdamW with clipping and a schedule, as one optax transformation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tx_jax.config import OptimConfig
from tx_jax.letters import decay_mask


def schedule_shape(cfg: OptimConfig, steps: int) -> Callable[[jax.Array], jax.Array]:
    """The schedule for a peak of 1: linear warm-up, then cosine, linear, constant or inverse_sqrt.

    The peak is reached at the last warm-up step, and `cfg.floor` at the last step of the run by
    cosine and linear. inverse_sqrt falls like 1 / sqrt(step) (Vaswani et al. 2017, eq. 3). A run
    of any length works, also one that is all warm-up or a single step.

    Returns:
      A function from the int32 step, counted from 0, to a float32 factor of the same shape.
    """
    peak_step = max(min(round(cfg.warmup * steps), steps), 1) - 1
    decay_steps = max(steps - 1 - peak_step, 1)

    def shape(step: jax.Array) -> jax.Array:
        step = jnp.asarray(step).astype(jnp.float32)
        warm = jnp.minimum((step + 1.0) / (peak_step + 1), 1.0)
        if cfg.schedule == "inverse_sqrt":
            return jnp.minimum(warm, jnp.sqrt((peak_step + 1) / (step + 1.0)))
        done = jnp.clip((step - peak_step) / decay_steps, 0.0, 1.0)
        left = {"cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * done)), "linear": 1.0 - done,
                "constant": jnp.ones_like(done)}[cfg.schedule]
        return warm * (1.0 - (1.0 - cfg.floor) * (1.0 - left))

    return shape


def learning_rate(cfg: OptimConfig, steps: int, step: jax.Array,
                  lr: jax.Array | float | None = None) -> jax.Array:
    """The learning rate of a step, float32; `lr` replaces the peak `cfg.lr` and may be traced."""
    return schedule_shape(cfg, steps)(step) * (cfg.lr if lr is None else lr)


def _adam(cfg: OptimConfig) -> optax.GradientTransformation:
    """Adam's direction; optax raises a float to an int32, which strict promotion refuses."""
    adam = optax.scale_by_adam(b1=cfg.b1, b2=cfg.b2, eps=cfg.eps)

    def update(updates, state, params=None):
        with jax.numpy_dtype_promotion("standard"):
            return adam.update(updates, state, params)

    return optax.GradientTransformation(adam.init, update)


def make_optimizer(cfg: OptimConfig, steps: int, params: Any, *,
                   lr: jax.Array | float | None = None) -> optax.GradientTransformation:
    """Clip the global norm, then AdamW (Loshchilov & Hutter 2019, algorithm 2).

    Args:
      steps: length of the run, which the schedule needs.
      params: parameter tree, arrays or shapes; the names of its leaves say what is decayed.
      lr: peak learning rate in place of `cfg.lr`; a traced scalar lets one program train a sweep.
    """
    clip = optax.clip_by_global_norm(cfg.clip) if cfg.clip else optax.identity()
    return optax.chain(
        clip,
        _adam(cfg),
        optax.add_decayed_weights(cfg.weight_decay, mask=decay_mask(params)),
        optax.scale_by_schedule(lambda step: -learning_rate(cfg, steps, step, lr)),
    )
