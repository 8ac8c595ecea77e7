"""Optimizer and schedules: against formulas, by parameter name, for runs of any length."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tx_jax import models
from tx_jax.config import ModelConfig, OptimConfig
from tx_jax.optim import learning_rate, make_optimizer, schedule_shape

PLAIN = OptimConfig(lr=0.1, schedule="constant", warmup=0.0, weight_decay=0.1, clip=0.0)


def factors(cfg, steps):
    return np.asarray(schedule_shape(cfg, steps)(jnp.arange(steps, dtype=jnp.int32)))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedule_shape(schedule):
    cfg = OptimConfig(schedule=schedule, warmup=0.1, floor=0.2)
    shape = factors(cfg, 100)
    np.testing.assert_allclose(shape[:10], np.arange(1, 11) / 10, rtol=1e-6)
    done = np.arange(0, 91) / 90
    want = {"cosine": 0.2 + 0.8 * 0.5 * (1 + np.cos(np.pi * done)),
            "linear": 1 - 0.8 * done, "constant": np.ones(91)}[schedule]
    np.testing.assert_allclose(shape[9:], want, rtol=1e-5)
    assert shape.dtype == np.float32


def test_inverse_sqrt_is_that_of_the_original_transformer():
    """Vaswani et al. 2017, eq. 3: min(s^-1/2, s w^-3/2) d^-1/2, over its value at s = w = 40."""
    s = np.arange(1, 401)
    want = np.minimum(s**-0.5, s * 40**-1.5) * 40**0.5
    np.testing.assert_allclose(factors(OptimConfig(schedule="inverse_sqrt", warmup=0.1), 400), want,
                               rtol=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "inverse_sqrt"])
@pytest.mark.parametrize("warmup", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
def test_runs_of_any_length(schedule, warmup, steps):
    shape = factors(OptimConfig(schedule=schedule, warmup=warmup, floor=0.0), steps)
    assert np.isfinite(shape).all() and (shape >= 0).all() and (shape <= 1).all()
    assert shape.max() == 1
    beyond = schedule_shape(OptimConfig(schedule=schedule, warmup=warmup), steps)(
        jnp.asarray(10 * steps, jnp.int32))
    assert 0 < beyond <= 1


def test_traced_peak_is_the_schedule_times_the_rate():
    cfg = OptimConfig(lr=0.5, warmup=0.2)
    step = jnp.asarray(3, jnp.int32)
    rates = jax.jit(jax.vmap(lambda lr: learning_rate(cfg, 10, step, lr)))(jnp.asarray([0.1, 0.5]))
    np.testing.assert_allclose(rates, [0.2 * learning_rate(cfg, 10, step),
                                       learning_rate(cfg, 10, step)], rtol=1e-6)


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("embeddings", ["tied", "untied"])
def test_decay_reaches_matrices_only(key, scan, norm, embeddings):
    """T13: one step on zero gradients is a factor of 1 - lr * decay, by name, stacked or not."""
    cfg = ModelConfig(layers=2, d_model=8, heads=2, norm=norm, embeddings=embeddings, scan=scan)
    params = models.init(models.build(cfg, 5, 4), key)
    params = jax.tree.map(lambda p: p + jnp.float32(1), params)
    optimizer = make_optimizer(PLAIN, 1, params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    seen = set()
    for (path, before), after in zip(jax.tree_util.tree_leaves_with_path(params),
                                     jax.tree.leaves(optax.apply_updates(params, updates)),
                                     strict=True):
        name = path[-1].key
        factor = 1.0 if name in ("gain_D", "bias_D") else 0.99
        np.testing.assert_allclose(after, factor * before, rtol=1e-6, err_msg=name)
        seen.add(name)
    assert {"embed_VD", "q_DNH", "o_NHD", "up_DF", "down_FD", "gain_D"} <= seen
    assert ("bias_D" in seen) == (norm == "layer")
    assert ("head_DV" in seen) == (embeddings == "untied")


def test_adamw_against_float64():
    """Three steps of algorithm 2 of Loshchilov & Hutter 2019, written out, with clipping."""
    cfg = OptimConfig(lr=0.01, schedule="linear", warmup=0.4, floor=0.1, b1=0.8, b2=0.95, eps=1e-6,
                      weight_decay=0.3, clip=1.5)
    rng = np.random.default_rng(0)
    params = {"w_DF": rng.normal(size=(3, 2)).astype(np.float32)}
    grads = [{"w_DF": scale * rng.normal(size=(3, 2)).astype(np.float32)}
             for scale in np.float32([0.1, 10, 1])]
    optimizer = make_optimizer(cfg, 5, params)
    state, got = optimizer.init(params), jax.tree.map(jnp.asarray, params)
    x = params["w_DF"].astype(np.float64)
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, grad in enumerate(grads, 1):
        updates, state = jax.jit(optimizer.update)(grad, state, got)
        got = optax.apply_updates(got, updates)
        g = grad["w_DF"].astype(np.float64)
        g = g * min(1, 1.5 / np.linalg.norm(g))
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        rate = 0.01 * [0.5, 1.0, 0.7][t - 1]
        x -= rate * (m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-6) + 0.3 * x)
    np.testing.assert_allclose(got["w_DF"], x, rtol=2e-5)


def test_state_is_two_moments_and_counters():
    params = {"w_DF": jnp.ones((4, 4))}
    state = make_optimizer(OptimConfig(), 10, params).init(params)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) <= 2 * 16 + 2
