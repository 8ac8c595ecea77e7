"""The train step: accumulation, empty micro-batches, replicas, sharding, evaluation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tx_jax import letters, models, sharding, train
from tx_jax.config import ModelConfig, OptimConfig
from tx_jax.errors import UserError

MODEL = models.build(ModelConfig(layers=2, d_model=16, heads=2), vocab=11, context=8)
OPTIM = OptimConfig(lr=1e-2, warmup=0.0, clip=0.5)


def make_batch(seed=0, rows=8, ignored=0.5):
    """Random tokens; `ignored` of the targets are masked, and the rows differ in how many."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 11, size=(rows, 9)).astype(np.int32)
    keep = rng.random((rows, 8)) >= ignored * np.linspace(0, 2, rows)[:, None]
    return {"tokens_BT": tokens[:, :-1], "targets_BT": np.where(keep, tokens[:, 1:], -1),
            "segments_BT": np.ones((rows, 8), np.int32),
            "positions_BT": np.tile(np.arange(8, dtype=np.int32), (rows, 1))}


@jax.jit
def init(key):
    return train.init_state(MODEL, OPTIM, key)


@pytest.fixture(scope="module")
def state():
    return init(jax.random.key(1))


@jax.jit
def one_step(state, batch):
    return train.train_step(MODEL, OPTIM, 10, state, batch)


def assert_close(got, want, rtol=1e-6, atol=1e-6):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want),
                            strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def test_accumulation_equals_the_big_batch(state):
    """T1: loss, gradient and count, with uneven masks (one row has no target, as in T4)."""
    batch, key = make_batch(), jax.random.key(0)
    run = jax.jit(lambda params, batch, accumulate: train.loss_and_grads(
        MODEL, params, batch, key, accumulate=accumulate), static_argnums=2)
    want = run(state.params, batch, 1)
    counts = (batch["targets_BT"] >= 0).sum(axis=1)
    assert counts.min() == 0 < counts.max() and int(want[2]) == counts.sum()
    for accumulate in (2, 4):
        assert_close(run(state.params, batch, accumulate), want)


def test_gradient_is_of_the_mean_over_targets(state):
    """The slope of the loss along its gradient is the gradient's norm, by central differences."""
    batch, key = make_batch(), jax.random.key(0)
    grad = jax.jit(lambda params: train.loss_and_grads(MODEL, params, batch, key)[:2])
    grads = grad(state.params)[1]
    norm = np.sqrt(sum(np.vdot(g, g) for g in jax.tree.leaves(grads)))

    def along(h):
        return grad(jax.tree.map(lambda p, g: p + np.float32(h / norm) * g, state.params, grads))[0]

    np.testing.assert_allclose((along(1e-3) - along(-1e-3)) / 2e-3, norm, rtol=1e-2)


def test_batch_without_targets_is_a_valid_step(state):
    """T4: loss and gradients are 0, nothing is NaN; only weight decay moves the parameters."""
    batch = make_batch() | {"targets_BT": np.full((8, 8), -1, np.int32)}
    after, metrics = one_step(state, batch)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and metrics["tokens"] == 0
    assert metrics["finite"] and after.step == 1
    rate = 1 - OPTIM.lr * OPTIM.weight_decay
    np.testing.assert_allclose(after.params["embed_VD"], rate * state.params["embed_VD"], rtol=1e-6)


def test_metrics(state):
    batch = make_batch()
    _, metrics = one_step(state, batch)
    nats, count = train.eval_step(MODEL, state.params, batch)
    np.testing.assert_allclose(metrics["loss"], nats / count, rtol=1e-6)
    assert int(metrics["tokens"]) == (batch["targets_BT"] >= 0).sum()
    assert metrics["tokens"].dtype == jnp.int32 and metrics["finite"].dtype == bool
    np.testing.assert_allclose(metrics["lr"], OPTIM.lr, rtol=1e-6)


def test_label_smoothing_moves_training_and_not_evaluation(state):
    """The gradient is that of the smoothed loss; what evaluation reports stays plain."""
    batch, share = make_batch(), 0.2
    smoothed = dataclasses.replace(OPTIM, label_smoothing=share)
    after, metrics = jax.jit(lambda state: train.train_step(MODEL, smoothed, 10, state,
                                                            batch))(state)

    @jax.jit
    def want(params):
        logits_BTV, _ = models.apply(MODEL, params, batch["tokens_BT"],
                                     segments_BT=batch["segments_BT"])
        log_p = jax.nn.log_softmax(logits_BTV)
        goal = (1 - share) * jax.nn.one_hot(batch["targets_BT"], 11) + share / 11
        valid_BT = batch["targets_BT"] >= 0
        nats_BT = jnp.where(valid_BT, -jnp.sum(goal * log_p, -1), 0.0)
        return jnp.sum(nats_BT) / np.float32(valid_BT.sum())

    loss, grads = jax.value_and_grad(want)(state.params)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    norm = np.sqrt(sum(np.vdot(g, g) for g in jax.tree.leaves(grads)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    plain, count = train.eval_step(MODEL, after.params, batch)
    accumulated = jax.jit(lambda: train.loss_and_grads(
        MODEL, state.params, batch, jax.random.key(0), accumulate=4, label_smoothing=share))()
    np.testing.assert_allclose(accumulated[0], loss, rtol=1e-6)
    np.testing.assert_allclose(plain / count, train.loss_and_grads(
        MODEL, after.params, batch, jax.random.key(0))[0], rtol=1e-6)


def test_not_finite_is_reported(state):
    broken = dataclasses.replace(state, params=state.params | {
        "embed_VD": state.params["embed_VD"].at[0].set(jnp.nan)})
    assert not one_step(broken, make_batch())[1]["finite"]


def test_learns_and_is_deterministic(state):
    batch = make_batch(ignored=0.0)

    def run():
        now, losses = state, []
        for _ in range(10):
            now, metrics = one_step(now, batch)
            losses.append(metrics["loss"])
        return now, np.asarray(losses)

    (first, losses), (second, again) = run(), run()
    np.testing.assert_array_equal(losses, again)
    assert losses[-1] < losses[0] - 0.3
    assert first.step == 10
    for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(second.params), strict=True):
        np.testing.assert_array_equal(a, b)


def test_dropout_draws_depend_on_the_step_only(key):
    model = models.build(ModelConfig(layers=1, d_model=16, heads=2, dropout=0.5), 11, 8)
    state = jax.jit(lambda k: train.init_state(model, OPTIM, k))(key)
    step = jax.jit(lambda s: train.train_step(model, OPTIM, 10, s, make_batch())[1]["loss"])
    later = dataclasses.replace(state, step=state.step + 1)
    assert step(state) == step(state)
    assert step(state) != step(later)


@pytest.mark.slow
def test_replica_axis_equals_lone_runs():
    """Two seeds and two learning rates as one vmapped program."""
    keys = jax.random.split(jax.random.key(3), 2)
    rates = jnp.asarray([1e-3, 3e-2])
    batch = make_batch()
    states = jax.vmap(init)(keys)
    step = lambda s, lr: train.train_step(MODEL, OPTIM, 10, s, batch, lr=lr)  # noqa: E731
    together, metrics = jax.jit(jax.vmap(step))(states, rates)
    alone = jax.jit(step)
    for i in range(2):
        state, lone = alone(jax.tree.map(lambda x, i=i: x[i], states), rates[i])
        assert_close(jax.tree.map(lambda x, i=i: x[i], metrics), lone, rtol=1e-5, atol=1e-6)
        assert_close(jax.tree.map(lambda x, i=i: x[i], together.params), state.params,
                     rtol=1e-4, atol=1e-3 * float(rates[i]))


@pytest.mark.parametrize("spec, accumulate", [("data:8", 1), ("data:2,fsdp:2,tensor:2", 2)])
def test_sharded_step_equals_the_single_device(state, spec, accumulate):
    """T1 across devices: a global sum over targets, not a mean of per-device means."""
    mesh = sharding.make_mesh(spec)
    cfg = dataclasses.replace(OPTIM, accumulate=accumulate)
    batch = make_batch(rows=16)
    want_state, want = one_step(state, batch)
    params = sharding.shard(state.params, letters.param_specs(state.params, mesh), mesh)
    put = jax.device_put(batch, sharding.batch_spec(mesh))
    fresh = dataclasses.replace(state, params=params)
    with jax.set_mesh(mesh):
        got_state, got = jax.jit(
            lambda s, b: train.train_step(MODEL, cfg, 10, s, b))(fresh, put)
    assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert_close(got_state.params, want_state.params, rtol=1e-5, atol=1e-3 * OPTIM.lr)


def test_accumulation_must_divide(state):
    cfg = dataclasses.replace(OPTIM, accumulate=3)
    with pytest.raises(UserError, match="--optim.accumulate=3 does not divide the batch of 8 rows"):
        train.train_step(MODEL, cfg, 10, state, make_batch())


def test_evaluation_does_not_depend_on_the_batch_size(state):
    """T5: 10 rows cut into batches of 1, 4, 10 and 16, the last one padded."""
    rows = make_batch(seed=5, rows=10, ignored=0.4)

    def batches(size):
        for start in range(0, 10, size):
            part = {k: v[start:start + size] for k, v in rows.items()}
            pad = size - len(part["tokens_BT"])
            fill = {k: np.full((pad, 8), -1 if k == "targets_BT" else 0, np.int32) for k in part}
            yield {k: np.concatenate([part[k], fill[k]]) for k in part}

    want = train.evaluate(MODEL, state.params, batches(10))
    assert want["tokens"] == (rows["targets_BT"] >= 0).sum()
    for size in (1, 4, 16):
        got = train.evaluate(MODEL, state.params, batches(size))
        assert got["tokens"] == want["tokens"]
        np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-6)
    with pytest.raises(UserError, match="no target tokens"):
        train.evaluate(MODEL, state.params, [])
