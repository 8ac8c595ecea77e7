"""Token loss: values and gradients against float64, ignored targets, partial batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tx_jax.loss import token_loss


def reference(logits, targets, label_smoothing=0.0, z_loss=0.0):
    """(sum, count, gradient) in float64 NumPy, written out position by position."""
    logits = np.asarray(logits, np.float64)
    total, count, grad = 0.0, 0, np.zeros_like(logits)
    for index in np.ndindex(targets.shape):
        if targets[index] < 0:
            continue
        row = logits[index]
        log_z = np.log(np.sum(np.exp(row - row.max()))) + row.max()
        goal = np.full_like(row, label_smoothing / row.size)
        goal[targets[index]] += 1 - label_smoothing
        p = np.exp(row - log_z)
        total += -(goal * (row - log_z)).sum() + z_loss * log_z**2
        grad[index] = p - goal + 2 * z_loss * log_z * p
        count += 1
    return total, count, grad


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"z_loss": 1e-2},
                                     {"label_smoothing": 0.3, "z_loss": 1e-3}])
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-6), (jnp.bfloat16, 4e-3)])
def test_value_and_gradient_against_float64(key, options, dtype, tolerance):
    logits = (3 * jax.random.normal(key, (2, 5, 11))).astype(dtype)
    targets = np.array([[0, 10, -1, 3, 4], [-1, -100, 7, 7, 2]], np.int32)
    want, want_count, want_grad = reference(logits, targets, **options)
    (nats, count), grad = jax.jit(jax.value_and_grad(
        lambda x: token_loss(x, jnp.asarray(targets), **options), has_aux=True))(logits)
    assert nats.dtype == count.dtype == jnp.float32 and grad.dtype == dtype
    assert count == want_count
    np.testing.assert_allclose(nats, want, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(grad, np.float64), want_grad, atol=tolerance)


def test_large_logits_lose_no_digits():
    logits = jnp.asarray([[[1e4, 1e4 + 1, 1e4 - 2]]], jnp.float32)
    targets = np.array([[0]], np.int32)
    nats, _ = token_loss(logits, jnp.asarray(targets))
    np.testing.assert_allclose(nats, reference(logits, targets)[0], rtol=1e-6)


def test_no_target_gives_zero_and_zero_gradients(key):
    logits = jax.random.normal(key, (2, 3, 7))
    targets = jnp.full((2, 3), -100, jnp.int32)
    (nats, count), grad = jax.value_and_grad(lambda x: token_loss(x, targets), has_aux=True)(logits)
    assert nats == 0 and count == 0
    np.testing.assert_array_equal(grad, 0)


def test_ignored_rows_may_hold_anything(key):
    """NaN and infinite logits without a target reach neither the loss nor other gradients."""
    logits = jax.random.normal(key, (1, 3, 4))
    targets = jnp.asarray([[1, -100, 2]], jnp.int32)
    dirty = logits.at[0, 1].set(jnp.asarray([jnp.nan, jnp.inf, -jnp.inf, 0.0]))
    loss = jax.value_and_grad(lambda x: token_loss(x, targets)[0])
    (want, want_grad), (got, got_grad) = loss(logits), loss(dirty)
    assert got == want
    np.testing.assert_array_equal(got_grad[0, ::2], want_grad[0, ::2])


def test_target_outside_the_vocabulary_is_loud(key):
    nats, _ = token_loss(jax.random.normal(key, (1, 2, 5)), jnp.asarray([[1, 5]], jnp.int32))
    assert jnp.isnan(nats)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**31 - 1))
def test_sums_and_counts_add_over_any_split(rows, cut, seed):
    """T5: the mean over a set does not depend on where its batches end."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, 4, 6)).astype(np.float32)
    targets = rng.integers(-1, 6, size=(rows, 4)).astype(np.int32)
    whole = token_loss(jnp.asarray(logits), jnp.asarray(targets))
    parts = [token_loss(jnp.asarray(logits[i:i + cut]), jnp.asarray(targets[i:i + cut]))
             for i in range(0, rows, cut)]
    np.testing.assert_allclose(sum(float(nats) for nats, _ in parts), whole[0], rtol=1e-5)
    assert sum(float(count) for _, count in parts) == whole[1]
