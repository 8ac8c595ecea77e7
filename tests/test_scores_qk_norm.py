"""Normalised queries and keys, and what other scores and scales promise at length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention_loops import make_call, slow_attend, split
from tx_jax.attention import attend, implementations, make_score
from tx_jax.errors import UserError
from tx_jax.masks import Causal

ANYWHERE = sorted(name for name, can in implementations().items() if not can.platforms)
CHOICE = {"mask": "segments", "bias": "N1S", "softcap": None, "sink": None, "dropout": None,
          "scale": None, "heads": (4, 2), "lengths": (4, 4), "v_width": 4, "q_start": None}


def call_with_gains(form, **changes):
    """A call whose gains have moved from 1."""
    args, options = make_call(CHOICE | {"score": f"qk_norm(form='{form}')"} | changes, seed=2)
    rng = np.random.default_rng(0)
    options["score_params"] = {name: np.float32(gain + 0.3 * rng.normal(size=gain.shape))
                               for name, gain in options["score_params"].items()}
    return args, options


@pytest.mark.parametrize("name", ANYWHERE)
@pytest.mark.parametrize("form", ["layer", "rms"])
def test_every_implementation_runs_it(form, name):
    args, options = call_with_gains(form)
    arrays, rest = split(args, options, jnp.float32)
    out = jax.jit(lambda arrays: attend(*arrays["args"], **arrays["options"], **rest,
                                        implementation=name))(arrays)
    np.testing.assert_allclose(out, slow_attend(*args, **options), atol=2e-6)


@pytest.mark.parametrize("form", ["layer", "rms"])
def test_values_and_gradients_are_the_loops_in_float64(form):
    args, options = call_with_gains(form, softcap=0.7, sink=True, v_width=3)
    with jax.enable_x64():
        arrays, rest = split(args, options, jnp.float64)

        @jax.jit
        def both(arrays):
            def loss(arrays):
                out = attend(*arrays["args"], **arrays["options"], **rest)
                return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out
            return jax.grad(loss, has_aux=True)(arrays)

        grads, out = jax.tree.map(np.asarray, both(arrays))
    np.testing.assert_allclose(out, slow_attend(*args, **options), atol=1e-12)
    leaves, tree = jax.tree.flatten(jax.tree.map(np.float64, arrays))
    rng = np.random.default_rng(1)
    for i, grad in enumerate(jax.tree.leaves(grads)):
        direction, sides = rng.normal(size=leaves[i].shape), []
        for step in (1e-6, -1e-6):
            moved = jax.tree.unflatten(tree, [x + step * direction if j == i else x
                                              for j, x in enumerate(leaves)])
            moved = slow_attend(*moved["args"], **moved["options"], **rest)
            sides.append(np.sum(moved * np.cos(np.arange(out.size)).reshape(out.shape)))
        np.testing.assert_allclose(np.sum(grad * direction), (sides[0] - sides[1]) / 2e-6,
                                   atol=1e-7)


def logits(form, q, k):
    score = make_score(f"qk_norm('{form}')")
    params = score.init(jax.random.key(0), {"N": q.shape[2], "H": q.shape[3]})
    return score.logits(params, q, k) / q.shape[3] ** 0.5


@pytest.mark.parametrize("form", ["layer", "rms"])
def test_logits_are_bounded_and_blind_to_length(form, key):
    """In [-sqrt(d), sqrt(d)], the ends at equal directions; variance 1 at random."""
    d = 64
    q = 50 * jax.random.normal(key, (1, 128, 1, d))
    k = jax.random.normal(jax.random.key(1), (1, 128, 1, d))
    own = logits(form, q, jnp.concatenate([q, -q], axis=1))[0, 0]
    assert float(jnp.abs(own).max()) <= d**0.5 * (1 + 1e-5)
    np.testing.assert_allclose(jnp.diag(own[:, :128]), d**0.5, rtol=1e-5)
    np.testing.assert_allclose(jnp.diag(own[:, 128:]), -(d**0.5), rtol=1e-5)
    random = logits(form, q, k)
    assert abs(float(random.var()) - 1) < 0.1
    np.testing.assert_allclose(logits(form, 1000 * q, k / 10), random, atol=1e-3)
    if form == "layer":
        np.testing.assert_allclose(logits(form, q + 7, k - 3), random, atol=1e-3)


def test_the_rms_form_is_cosine_with_gain_sqrt_d(key):
    q, k = jax.random.normal(key, (2, 2, 5, 4, 16))
    cosine = make_score("cosine(gain=4)")
    params = cosine.init(key, {"N": 4, "H": 16})
    np.testing.assert_allclose(logits("rms", q, k), cosine.logits(params, q, k), atol=1e-5)


@pytest.mark.parametrize("form", ["layer", "rms"])
def test_zero_vectors_and_half_precision(form, key):
    x = jax.random.normal(key, (1, 3, 2, 8)).at[:, 0].set(0)
    slope = jax.grad(lambda x: jnp.sum(logits(form, x, x) ** 2))(x)
    assert bool(jnp.isfinite(slope).all()) and not logits(form, x, x)[0, :, 0].any()
    low = logits(form, x.astype(jnp.bfloat16), x.astype(jnp.bfloat16))
    assert low.dtype == jnp.float32
    np.testing.assert_allclose(low, logits(form, x, x), atol=5e-2)


@pytest.mark.parametrize("spec, says", [
    ("qk_norm(form='l2')", "needs the form"), ("qk_norm(form=[])", "needs the form"),
    *((f"{option}={value})", f"{option}={value}) must be a finite number above 0")
      for option in ("qk_norm(epsilon", "cosine(gain") for value in ("'x'", "None", "[1]", "True",
                                                                     "0", "-1.0"))])
def test_what_cannot_be_meant(spec, says):
    with pytest.raises(UserError) as error:
        make_score(spec)
    assert says in str(error.value) and "\n" not in str(error.value)


# Other scores and scales.

def temporary_bytes(fn, T, heads, width):
    x = jax.ShapeDtypeStruct((1, T, heads, width), jnp.float32)
    step = jax.jit(jax.grad(lambda q, k, v: jnp.sum(fn(q, k, v) ** 2), (0, 1, 2)))
    return step.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_additive_attention_does_without_the_array_of_hidden_values():
    """The reference holds [N, T, S, H], blockwise one tile of it."""
    score, T, heads, width = make_score("additive"), 512, 2, 8
    params = score.init(jax.random.key(0), {"N": heads, "H": width})
    sizes = {"reference": (T, 2 * T, 4 * T), "blockwise": (4 * T, 16 * T)}
    used = {(name, size): temporary_bytes(
        lambda *a, name=name: attend(*a, mask=Causal(), score=score, score_params=params,
                                     implementation=name), size, heads, width)
        for name, lengths in sizes.items() for size in lengths}
    for size in (T, 2 * T):
        assert used["reference", size] > 4 * heads * width * size**2
        assert used["reference", 2 * size] > 3.5 * used["reference", size]
    assert used["blockwise", 16 * T] < 4.5 * used["blockwise", 4 * T]
    assert used["blockwise", 4 * T] < used["reference", 4 * T] / 20


@pytest.mark.parametrize("n, scaled, plain", [(128, 0.9963, 0.539), (1024, 0.9997, 0.127),
                                              (8192, 1.0, 0.018)])
def test_log_n_scale_does_not_fade(n, scaled, plain):
    """One key 5 above the others; the factor s ln n with s = 0.43 is log_n(e^(1/s))."""
    k = jnp.zeros((1, n, 1, 1)).at[0, 3].set(5.0)
    v = jnp.zeros((1, n, 1, 1)).at[0, 3].set(1.0)
    def peak(scale):
        return float(attend(jnp.ones((1, 1, 1, 1)), k, v, scale=scale)[0, 0, 0, 0])
    assert abs(peak(f"log_n({float(np.exp(1 / 0.43))})") - scaled) < 6e-5
    assert abs(peak(None) - plain) < 6e-4
    assert peak("log_n(8192)") == peak(None)  # exactly the identity up to the trained length
