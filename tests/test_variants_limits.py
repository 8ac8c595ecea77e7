"""Variants of attention in their limits, and the memory they take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tx_jax.attention import attend
from tx_jax.attention.variants import differential, linear, make_variant
from tx_jax.errors import UserError
from tx_jax.masks import Causal, Mask

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("T, S, q_start", [(5, 5, None), (3, 9, None), (9, 3, None), (4, 9, 2),
                                           (4, 3, 7), (4, 3, -9), (130, 140, None)])
def test_linear_sums_are_its_weights(T, S, q_start, monkeypatch, key):
    """The two ways that linear attention is computed agree."""
    keys = jax.random.split(key, 3)
    q, k = jax.random.normal(keys[0], (2, T, 4, 3)), jax.random.normal(keys[1], (2, S, 2, 3))
    v = jax.random.normal(keys[2], (2, S, 2, 5))
    masks = (None, Causal(), Mask(Causal(), k_lengths_B=jnp.array([3, 7])))
    traced = jnp.int32(S - T if q_start is None else q_start)  # goes by weights

    def both(q, k, v, traced):
        return [[make_variant("linear").attend(q, k, v, mask=mask, q_start=start)
                 for start in (q_start, traced)] for mask in masks]

    for chunk in (64, 2) if T == 5 else (64,):
        monkeypatch.setattr(linear, "CHUNK", chunk)
        for by_sums, by_weights in jax.jit(lambda *a: both(*a))(q, k, v, traced):
            np.testing.assert_allclose(by_sums, by_weights, atol=1e-5)


def temporary_bytes(fn, T, heads=2, width=8):
    x = jax.ShapeDtypeStruct((1, T, heads, width), jnp.float32)
    step = jax.jit(jax.grad(lambda q, k, v: jnp.sum(fn(q, k, v) ** 2), (0, 1, 2)))
    return step.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("spec", ["sigmoid", "hard(temperature=1)", "linear"])
def test_memory_grows_linearly(spec):
    variant = make_variant(spec)
    small, large = (temporary_bytes(lambda *a: variant.attend(*a, mask=Causal()), T)
                    for T in (4096, 16384))
    assert large < 5 * small < 2 * 16384**2  # of 2 heads; one byte per pair would be more


# Each in its limits.

def test_hard_attention_is_a_dictionary(key):
    table = jnp.eye(8)[None, :, None]
    values = jax.random.normal(key, (1, 8, 1, 3))
    wanted = jnp.array([5, 0, 0, 7])
    found = make_variant("hard").attend(table[:, wanted], table, values)
    np.testing.assert_array_equal(found[0, :, 0], values[0, wanted, 0])
    with jax.enable_x64():
        arrays = np.random.default_rng(0).normal(size=(3, 2, 6, 2, 4))

        @jax.jit
        def outputs(q, k, v):
            return [make_variant(f"hard(temperature={t})").attend(q, k, v, mask=Causal())
                    for t in (0, 1, 0.1, 0.01, 1e-4)]

        limit, *soft = outputs(*arrays)
    errors = [float(np.abs(x - limit).max()) for x in soft]
    assert errors == sorted(errors, reverse=True) and errors[0] > 0.1 and errors[-1] < 1e-9


def test_hard_ties_share_and_gradients_reach_only_what_was_found():
    q, k = jnp.ones((1, 1, 1, 1)), jnp.array([1.0, 1, 0]).reshape(1, 3, 1, 1)
    v = jnp.array([2.0, 4, 100]).reshape(1, 3, 1, 1)
    def out(q, k, v, sink):
        return make_variant("hard").attend(q, k, v, sink=sink)[0, 0, 0, 0]
    low, high = jnp.array([-9.0]), jnp.array([9.0])
    value, grads = jax.value_and_grad(out, (0, 1, 2, 3))(q, k, v, low)
    assert value == 3 and out(q, k, v, high) == 0
    assert [float(x) for x in grads[2].ravel()] == [0.5, 0.5, 0]
    assert not any(g.any() for g in (grads[0], grads[1], grads[3]))


def test_sigmoid_of_equal_logits_sums_to_almost_one():
    q = jnp.zeros((1, 64, 1, 4))
    out = make_variant("sigmoid").attend(q, q, q + 1, mask=Causal())
    n = np.arange(1, 65)
    np.testing.assert_allclose(out[0, :, 0, 0], n / (n + 1), rtol=1e-6)  # n * sigmoid(-log n)
    fixed = make_variant("sigmoid(length=64)").attend(q, q, q + 1)
    np.testing.assert_allclose(fixed, 64 / 65, rtol=1e-6)


def test_differential_attention_cancels_common_maps(key):
    """Equal maps leave (1 - lambda) of one, which the norm undoes."""
    assert [round(differential.lambda_of_layer(n), 3) for n in (1, 2, 100)] == [0.2, 0.356, 0.8]
    variant = make_variant("differential(start=0.5)")
    params = variant.init(key, {"N": 4, "H": 4})
    assert abs(float(variant.weight(params)) - 0.5) < 0.1 and params["gain_W"].shape == (8,)
    x = jnp.repeat(jax.random.normal(key, (2, 5, 2, 4)), 2, axis=2)
    v = jax.random.normal(key, (2, 5, 2, 8))

    @jax.jit
    def outputs(x, v):
        plain = attend(x[:, :, ::2], x[:, :, ::2], v, mask=Causal())
        return plain, *(variant.attend(x, x, v, params=params, mask=Causal(), implementation=name)
                        for name in ("reference", "blockwise"))

    plain, out, tiled = outputs(x, v)
    normed = plain / jnp.sqrt(jnp.mean(plain**2, axis=-1, keepdims=True))
    np.testing.assert_allclose(out, 0.5 * normed, atol=2e-3)
    np.testing.assert_allclose(tiled, out, atol=1e-5)
    with pytest.raises(UserError, match="pairs heads"):
        variant.attend(x, x, x, params=params)
