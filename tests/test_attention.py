"""Attention numerics: cases that broke elsewhere, on every implementation."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention_loops import slow_attend
from tx_jax.attention import (
    Bias,
    attend,
    implementations,
)
from tx_jax.masks import Causal, Full, Mask, Prefix, Window

NAMES = sorted(name for name, can in implementations().items() if not can.platforms)


def with_gradients(fn):
    """The output of `fn` and the gradients of its sum, compiled as one."""
    def both(*args):
        out, pull = jax.vjp(fn, *args)
        return out, *pull(jnp.ones_like(out))
    return jax.jit(both)


@pytest.fixture(params=NAMES)
def name(request):
    """Every implementation that comes with the project and runs anywhere."""
    return request.param


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_empty_rows_are_zero_with_zero_gradients(name, dtype):
    """A1 of the case list (pytorch #41508)."""
    q = jnp.ones((1, 2, 1, 2), dtype)
    k = jnp.array([[0, 0.25], [0.5, 0.75]], dtype).reshape(1, 2, 1, 2)
    v = jnp.eye(2, dtype=dtype).reshape(1, 2, 1, 2)
    segments = Mask(Full(), jnp.array([[1, 0]]), jnp.array([[1, 1]]))
    minus_inf = jnp.array([[0.0, 0.0], [-jnp.inf, -jnp.inf]]).reshape(1, 1, 2, 2)
    for extra in ({"mask": segments}, {"bias": minus_inf}, {"mask": segments, "bias": minus_inf}):
        def loss(q, k, v, bias, extra=extra):
            rest = {n: o for n, o in extra.items() if n != "bias"}
            out = attend(q, k, v, scale=1.0, bias=bias, implementation=name, **rest)
            return out[0, 0, 0, 0].astype(jnp.float32), out
        bias = extra.get("bias", jnp.zeros((1, 1, 2, 2)))
        (value, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(
            q, k, v, bias)
        np.testing.assert_allclose(value, 0.268941, atol=1e-6 if dtype == jnp.float32 else 2e-3)
        assert not out[0, 1].any() and out.dtype == dtype
        assert all(bool(jnp.isfinite(g).all()) for g in grads)
        assert not grads[0][0, 1].any() and not grads[3][0, 0, 1].any()


def test_end_aligned_causality(name):
    """A2 of the case list (pytorch #108108)."""
    def mean_seen(T, S):
        v = jnp.arange(S, dtype=jnp.float32).reshape(1, S, 1, 1)
        call = jax.jit(lambda *a: attend(*a, mask=Causal(), implementation=name))
        return call(jnp.zeros((1, T, 1, 1)), jnp.zeros((1, S, 1, 1)), v).ravel()
    np.testing.assert_allclose(mean_seen(2, 5), [1.5, 2.0], atol=1e-6)
    np.testing.assert_allclose(mean_seen(5, 2), [0, 0, 0, 0, 0.5], atol=1e-6)
    np.testing.assert_allclose(mean_seen(1, 5), [2.0], atol=1e-6)


def test_window_counts(name):
    """A4 of the case list (transformers #39408), in one pass and token by token."""
    v = jnp.eye(8).reshape(1, 8, 1, 8)
    q = k = jnp.zeros((1, 8, 1, 8))
    mask = Causal() & Window(4)
    full = attend(q, k, v, mask=mask, implementation=name)
    assert (full[0, :, 0] > 0).sum(axis=1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4]
    step = jax.jit(lambda t: attend(q[:, :1], k, v, mask=mask, q_start=t, implementation=name))
    for t in range(8):
        np.testing.assert_allclose(step(jnp.int32(t))[0, 0], full[0, t], atol=1e-6)


@pytest.mark.parametrize("D", [1, 3, 40, 96])
def test_scale_uses_the_true_width(name, D, key):
    """A7 of the case list (pytorch #133321)."""
    q, k, v = jax.random.normal(key, (3, 1, 5, 1, D))
    out = attend(q, k, v, implementation=name)
    np.testing.assert_allclose(out, slow_attend(*map(np.asarray, (q, k, v))), atol=2e-6)


def test_heads_are_grouped_not_tiled(name):
    """A11 of the case list (jax-js #180); dK and dV sum over the group."""
    q, k = jnp.ones((1, 2, 4, 2)), jnp.ones((1, 3, 2, 2))
    v = jnp.broadcast_to(jnp.arange(2.0)[None, None, :, None], (1, 3, 2, 2))
    out = attend(q, k, v, implementation=name)
    np.testing.assert_allclose(out[0, 0, :, 0], [0, 0, 1, 1], atol=1e-6)
    dv = jax.grad(lambda v: attend(q, k, v, implementation=name).sum())(v)
    np.testing.assert_allclose(dv, 2 * 2 / 3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (2, 1, 8, 8), (1, 1, 8, 8), (2, 4, 1, 8),
                                   (4, 8, 8), (8, 8), (1,)])
def test_bias_gradients_have_the_shape_of_the_bias(name, shape, key):
    """A12 of the case list (jax #27184)."""
    q, k, v = jax.random.normal(key, (3, 2, 8, 4, 4))
    @jax.jit
    @jax.grad
    def slope(bias):
        return jnp.sum(attend(q, k, v, bias=bias, implementation=name) ** 2)
    bias = jax.random.normal(key, shape)
    grad = slope(bias)
    full = slope(jnp.broadcast_to(bias.reshape((1,) * (4 - bias.ndim) + shape),
                                           (2, 4, 8, 8)))
    padded = (1,) * (4 - len(shape)) + shape
    axes = tuple(i for i in range(4) if padded[i] == 1)
    assert grad.shape == shape and (shape == (1,) or float(jnp.abs(grad).max()) > 1e-3)
    np.testing.assert_allclose(grad, full.sum(axis=axes, keepdims=True).reshape(shape), atol=2e-5)


@pytest.mark.parametrize("B, T, S", [(0, 2, 2), (1, 0, 2), (1, 2, 0), (0, 0, 0)])
def test_empty_sizes(name, B, T, S):
    """A15 of the case list (pytorch #81077)."""
    q, k, v = jnp.ones((B, T, 2, 3)), jnp.ones((B, S, 2, 3)), jnp.ones((B, S, 2, 3))
    run = jax.jit(jax.value_and_grad(lambda q, k, v: attend(
        q, k, v, mask=Causal(), implementation=name).sum(), (0, 1, 2)))
    value, grads = run(q, k, v)
    assert attend(q, k, v, implementation=name).shape == (B, T, 2, 3) and value == 0
    assert not any(g.any() for g in grads)


def test_length_zero_in_a_batch(name, key):
    """A15: key lengths [3, 0]."""
    q, k, v = jax.random.normal(key, (3, 2, 3, 1, 4))
    mask = Mask(Full(), jnp.ones((2, 3), int), jnp.array([[1, 1, 1], [0, 0, 0]]))
    out, *grads = with_gradients(
        lambda *a: jnp.sin(attend(*a, mask=mask, implementation=name)))(q, k, v)
    assert out[0].all() and not out[1].any()
    assert all(g[0].any() and not g[1].any() for g in grads)


def test_packed_documents_do_not_meet(name, key):
    """A18 of the case list (profam #495): a document in a pack equals the document alone."""
    q, k, v = jax.random.normal(key, (3, 1, 8, 2, 4))
    seg = jnp.array([[1, 1, 1, 2, 2, 2, 0, 0]])
    @jax.jit
    def pack(q, k, v):
        return attend(q, k, v, mask=Mask(Causal(), seg, seg), implementation=name)
    out = pack(q, k, v)
    alone = jax.jit(lambda *a: attend(*a, mask=Causal(), implementation=name))(
        q[:, 3:6], k[:, 3:6], v[:, 3:6])
    np.testing.assert_allclose(out[:, 3:6], alone, atol=1e-6)
    moved = pack(*(x.at[:, :3].add(5.0) for x in (q, k, v)))
    np.testing.assert_array_equal(moved[:, 3:6], out[:, 3:6])
    assert not out[:, 6:].any()


@pytest.mark.slow
@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_poison_in_padding_reaches_nothing(name, poison, key):
    q, k, v = jax.random.normal(key, (3, 2, 5, 2, 4))
    seg = jnp.array([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    mask = Mask(Causal(), seg, seg)
    bad = jnp.where(seg[..., None, None] == 0, poison, 0.0)
    def call(q, k, v):
        return attend(q, k, v, mask=mask, implementation=name)
    both = with_gradients(call)
    for a, b in zip(both(q, k, v), both(q + bad, k + bad, v + bad), strict=True):
        np.testing.assert_array_equal(a, b)
    cache = jnp.where(jnp.arange(5)[None, :, None, None] > 2, poison, 0.0)
    early = attend(q[:, :1], k + cache, v + cache, mask=Causal(), q_start=2, implementation=name)
    late = attend(q[:, :1], k[:, :3], v[:, :3], mask=Causal(), implementation=name)
    np.testing.assert_allclose(early, late, atol=1e-6)


def test_transformations(name, key):
    """A19 of the case list (jax #38495)."""
    q, k, v = jax.random.normal(key, (3, 2, 4, 2, 8))
    def eager(q, k, v):
        return attend(q, k, v, mask=Causal(), implementation=name)
    call = jax.jit(eager)
    @jax.jit
    def loss(q):
        return jnp.sum(call(q, k, v) ** 2)
    slope = jax.jit(jax.grad(loss))
    grad, out = slope(q), call(q, k, v)
    np.testing.assert_allclose(eager(q, k, v), out, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(call)(q[:, None], k[:, None], v[:, None])[:, 0], out,
                               atol=1e-6)
    jacobian = jax.jit(jax.jacobian(lambda q: call(q, k, v)))(q)
    np.testing.assert_allclose(jnp.tensordot(2 * out, jacobian, 4), grad, atol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(jax.checkpoint(loss)))(q), grad, atol=5e-6)
    _, scanned = jax.lax.scan(lambda c, x: (c, jax.grad(loss)(x)), 0, jnp.stack([q, q]))
    np.testing.assert_allclose(scanned[1], grad, atol=5e-6)
    if not implementations()[name].jvp:
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(loss, (q,), (v,))
        return
    tangent = jax.jit(lambda v: jax.jvp(loss, (q,), (v,))[1])(v)
    np.testing.assert_allclose(tangent, jnp.sum(grad * v), rtol=1e-4)
    hvp = jax.jit(lambda v: jax.jvp(jax.grad(loss), (q,), (v,))[1])(v)
    np.testing.assert_allclose(hvp, (slope(q + 1e-2 * v) - slope(q - 1e-2 * v)) / 2e-2, atol=5e-3)


def test_decoding_token_by_token_equals_the_full_pass(name, key):
    q, k, v = jax.random.normal(key, (3, 2, 6, 2, 4))
    mask = Causal() & Window(4) | Prefix(1)
    full = jax.jit(lambda *a: attend(*a, mask=mask, scale="log_n(2)", implementation=name))(q, k, v)
    step = jax.jit(lambda x, t: attend(x, k, v, mask=mask, scale="log_n(2)", q_start=t,
                                       implementation=name))
    starts = jnp.array([3, 5])
    rows = step(jnp.stack([q[0, 3:4], q[1, 5:6]]), starts)
    np.testing.assert_allclose(rows[:, 0], jnp.stack([full[0, 3], full[1, 5]]), atol=1e-6)


def test_half_precision_is_as_good_as_its_inputs(name, key):
    q, k, v = jax.random.normal(key, (3, 1, 16, 2, 8))
    for dtype, atol in ((jnp.bfloat16, 2e-2), (jnp.float16, 3e-3)):
        low = [x.astype(dtype) for x in (q, k, v)]
        call = jax.jit(lambda *a: attend(*a, mask=Causal(), implementation=name))
        exact, out = call(*(x.astype(jnp.float32) for x in low)), call(*low)
        assert out.dtype == dtype
        np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=atol)


def test_large_logits_stay_finite(name):
    q = jnp.full((1, 2, 1, 4), 1e4)
    out, pull = jax.vjp(lambda q: attend(q, q, q, scale=1.0, implementation=name), q)
    np.testing.assert_allclose(out, q, rtol=1e-6)
    assert bool(jnp.isfinite(pull(q)[0]).all())


def test_no_sink_in_one_head_and_rows_without_keys(name):
    """A sink of minus infinity is none; together with an empty row it is no NaN."""
    if not implementations()[name].sink:
        return
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 3, 2, 4))

    @jax.jit
    def both(q, sink):
        out, pull = jax.vjp(lambda q, s: attend(q, k, v, mask=Causal(), q_start=-1, sink=s,
                                                implementation=name), q, sink)
        return out, pull(jnp.ones_like(out))

    out, (dq, d_sink) = both(q, jnp.array([-jnp.inf, 0.5]))
    assert not out[0, 0].any() and bool(jnp.isfinite(out).all() & jnp.isfinite(dq).all())
    np.testing.assert_allclose(out[0, 1, 0], v[0, 0, 0], atol=1e-6)
    assert float(d_sink[0]) == 0 and float(d_sink[1]) != 0


def test_nan_in_a_bias_is_not_hidden(name):
    q = jnp.ones((1, 2, 1, 2))
    for bias in (jnp.array([jnp.nan, 0.0]), Bias(lambda p, n, q, k: p + (0 * k).astype(p.dtype),
                                                 jnp.float32(jnp.nan))):
        assert bool(jnp.isnan(attend(q, q, q, bias=bias, implementation=name)).any())


@pytest.mark.slow
def test_bias_functions_of_few_arguments_and_whole_numbers(name):
    """One that ignores the head, and one with an integer among its parameters."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 5, 4, 4))
    near = Bias(lambda p, n, i, j: -p["slope"] * (jnp.abs(i - j) // p["step"]).astype(jnp.float32),
                {"slope": jnp.float32(0.7), "step": jnp.array(1)})

    def loss(q, slope, bias, implementation):
        if isinstance(bias, Bias):
            bias = Bias(bias.function, bias.params | {"slope": slope})
        return jnp.sum(attend(q, k, v, bias=bias, implementation=implementation) ** 2)

    dense = -0.7 * jnp.abs(jnp.arange(5.0)[:, None] - jnp.arange(5.0)[None])
    np.testing.assert_allclose(jax.grad(loss)(q, jnp.float32(0.7), near, name),
                               jax.grad(loss)(q, jnp.float32(0.7), dense, "reference"), atol=1e-5)


@pytest.mark.slow
def test_a_start_given_as_numpy(name):
    q = jax.random.normal(jax.random.key(0), (2, 2, 1, 4))
    for start in (np.array([0, 1]), np.int64(1)):
        np.testing.assert_array_equal(
            attend(q, q, q, mask=Causal(), q_start=start, implementation=name),
            attend(q, q, q, mask=Causal(), q_start=jnp.asarray(start, jnp.int32),
                   implementation=name))
