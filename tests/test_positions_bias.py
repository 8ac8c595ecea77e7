"""Biases by pair: published tables, limits, and gradients that are finite for every pair."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tx_jax.errors import UserError
from tx_jax.letters import decay_mask, letters_of
from tx_jax.positions import kerple, make_encoding
from tx_jax.positions.alibi import slopes
from tx_jax.positions.fire import progress
from tx_jax.positions.t5 import bucket_table

SCHEMES = ["alibi", "alibi(learned=True)", "t5", "t5(bidirectional=True)", "kerple",
           "kerple(form='power')", "fire", "fire(zero_init=False)"]
SIZES = {"N": 3, "D": 12, "H": 4, "T": 16, "K": 3, "L": 2}


@partial(jax.jit, static_argnums=(0, 2, 3, 4))
def bias(encoding, params, T, S, N=3):
    """The whole bias [N, T, S]."""
    return encoding.pair_bias(params, jnp.arange(N)[:, None, None], jnp.arange(T)[None, :, None],
                              jnp.arange(S)[None, None, :])


def random_params(encoding, dtype="float32", seed=3):
    """Parameters away from their special start: all normal."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda k: encoding.init(k, SIZES), jax.random.key(0))
    return {name: jnp.asarray(rng.standard_normal(leaf.shape), dtype)
            for name, leaf in shapes.items()}


def test_alibi_slopes():
    """P7 of the case list: the authors' rule for head counts that are not powers of two."""
    six = [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    eight = [2.0**-i for i in range(1, 9)]
    np.testing.assert_array_equal(slopes(6), six)
    np.testing.assert_array_equal(slopes(8), eight)
    np.testing.assert_allclose(slopes(12), eight + [0.707107, 0.353553, 0.176777, 0.088388],
                               atol=5e-7)
    assert slopes(1).tolist() == [2.0**-8] and slopes(16)[0] == 2**-0.5
    assert all(len(set(slopes(n))) == n for n in range(1, 70))


@pytest.mark.parametrize("heads", [1, 3, 8])
def test_alibi_bias(key, heads):
    encoding = make_encoding("alibi")
    got = bias(encoding, encoding.init(key, {"N": heads}), 5, 7, heads)
    i, j = np.mgrid[0:5, 0:7]
    np.testing.assert_array_equal(got, -np.float32(slopes(heads))[:, None, None] * abs(i - j))
    # Under a causal mask slope * j is the same after softmax: rows differ by a constant.
    np.testing.assert_allclose(np.diff(got[0, 4, :5]), np.float32(slopes(heads)[0]), rtol=1e-5)


def test_alibi_slopes_are_constants_unless_learned(key):
    for learned in (False, True):
        encoding = make_encoding(f"alibi(learned={learned})")
        params = encoding.init(key, SIZES)
        grads = jax.grad(lambda p, e=encoding: bias(e, p, 4, 4).sum())(params)
        assert (grads["slope_N"] != 0).all() == learned and not decay_mask(params)["slope_N"]


def test_t5_buckets_both_ways():
    """P9 of the case list, 32 buckets, distance 128; relative = key - query."""
    both = make_encoding("t5(bidirectional=True)").bucket
    relative = [0, -1, -7, -8, -128, 1, 7, 8, 128, 1000, -1000]
    assert both(jnp.array(relative)).tolist() == [0, 1, 7, 8, 15, 17, 23, 24, 31, 31, 15]
    i, j = np.mgrid[0:10, 0:10]
    corner = both(jnp.asarray(j - i))
    assert corner[0].tolist() == [0, 17, 18, 19, 20, 21, 22, 23, 24, 24]
    assert corner[9].tolist() == [8, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    table = {0: 0, 15: 15, 16: 16, 17: 16, 18: 16, 19: 17, 20: 17, 21: 18, 24: 19, 31: 21, 32: 21,
             46: 24, 64: 26, 91: 29, 112: 30, 113: 31, 128: 31, 10**6: 31, -1: 0, -500: 0}
    got = make_encoding("t5").bucket(-jnp.array(list(table)))
    assert got.tolist() == list(table.values())


@settings(max_examples=30, deadline=None)
@given(half=st.integers(1, 40), far=st.integers(1, 400))
def test_t5_buckets_follow_the_formula(half, far):
    distance = np.arange(2 * (half + far))
    growth = np.log(np.maximum(distance, 1) / half) / np.log((half + far) / half) * half
    coarse = np.minimum(half + growth.astype(int), 2 * half - 1)
    expected = np.where(distance < half, distance, coarse)
    got = bucket_table(2 * half, half + far)[np.minimum(distance, half + far)]
    whole = np.isclose(growth, growth.round(), atol=1e-8)  # a rounded logarithm may fall below
    np.testing.assert_array_equal(got[~whole], expected[~whole])
    assert (np.diff(got) >= 0).all() and got[-1] == 2 * half - 1


def test_t5_distances_on_a_boundary():
    """5 * 2^k begins bucket 5 + k, though ln 2 / ln 32 * 5 rounds to less than 1."""
    table = bucket_table(10, 160)
    assert table[[9, 10, 19, 20, 39, 40, 79, 80]].tolist() == [5, 6, 6, 7, 7, 8, 8, 9]


def test_t5_bias_reads_its_table(key):
    encoding = make_encoding("t5(buckets=4, max_distance=6)")
    params = encoding.init(key, SIZES)
    got, table = bias(encoding, params, 8, 8), params["bias_CN"]
    assert got[2, 0, 5] == table[0, 2] and got[1, 7, 6] == table[1, 1]
    np.testing.assert_array_equal(got[0, 7, :3], table[np.array([3, 3, 3]), 0])
    grads = jax.grad(lambda p: bias(encoding, p, 2, 2).sum())(params)["bias_CN"]
    assert grads.tolist() == [[3] * 3, [1] * 3, [0] * 3, [0] * 3]


@pytest.mark.parametrize("form", ["log", "power"])
def test_kerple_formula_and_start(key, form):
    encoding = make_encoding(f"kerple(form='{form}')")
    r1, r2 = np.array([0.02, 1.0, 7.5]), np.array([0.01, 1.0, 1.99])
    got = bias(encoding, kerple.raw(form, jnp.float32(r1), jnp.float32(r2)), 4, 6)
    i, j = np.mgrid[0:4, 0:6]
    d, r1, r2 = abs(i - j), r1[:, None, None], r2[:, None, None]
    exact = -r1 * np.log(1 + r2 * d) if form == "log" else -r1 * d**r2
    np.testing.assert_allclose(got, exact, rtol=2e-5, atol=1e-7)
    start = encoding.init(key, SIZES | {"N": 4000})
    one = np.asarray(bias(encoding, start, 2, 2, 4000))[:, 1, 0]
    first = np.log1p(np.exp(start["r1_N"]))
    assert 0 < first.min() < 0.05 and (2.0 if form == "log" else 1.0) - first.max() < 0.01
    assert (one < 0).all() and encoding.per_layer


def test_kerple_log_tends_to_alibi():
    """r2 -> 0 with r1 r2 fixed."""
    alibi = make_encoding("alibi")
    exact = bias(alibi, alibi.init(None, SIZES), 40, 40)
    errors = []
    for r2 in (1e-3, 1e-4, 1e-5):
        params = kerple.raw("log", jnp.asarray(slopes(3) / r2, jnp.float32), jnp.full(3, r2))
        errors.append(np.abs(bias(make_encoding("kerple"), params, 40, 40) - exact).max())
    assert errors[2] < errors[1] < errors[0] < 20 * 0.2 and errors[2] < 2e-3
    params = kerple.raw("power", jnp.asarray(slopes(3), jnp.float32), jnp.ones(3))
    np.testing.assert_allclose(bias(make_encoding("kerple(form='power')"), params, 40, 40), exact,
                               rtol=1e-5)


@settings(max_examples=50, deadline=None)
@given(q=st.integers(0, 2**31 - 1), k=st.integers(0, 2**31 - 1), c=st.floats(-9, 9),
       length=st.floats(-300, 20))
def test_fire_input_lies_between_0_and_1(q, k, c, length):
    params = {"log_c_U": jnp.array([c]), "log_length_U": jnp.array([length])}
    x = progress(params, jnp.array([q, k, 0]), jnp.array([k, k, 0]))
    assert 0 <= x[0] <= 1 + 1e-6 and x[1] == x[2] == 0


def test_fire_formula(key):
    encoding = make_encoding("fire(length=5, c=0.3, zero_init=False)")
    params = encoding.init(key, SIZES)
    p = {name: np.float64(leaf) for name, leaf in params.items()}
    i, j = np.mgrid[0:9, 0:9]
    x = np.log(0.3 * (i - j).clip(0) + 1) / np.log(0.3 * np.maximum(i, 5) + 1)
    hidden = np.maximum(x[..., None] * p["up_E"] + p["bias_E"], 0)
    exact = np.moveaxis(hidden @ p["down_EN"] + p["bias_N"], -1, 0)
    np.testing.assert_allclose(np.tril(bias(encoding, params, 9, 9)), np.tril(exact), atol=2e-6)
    np.testing.assert_allclose(np.exp(make_encoding("fire").init(key, SIZES)["log_length_U"]), 4)


def test_fire_starts_without_positions(key):
    encoding = make_encoding("fire")
    params = encoding.init(key, SIZES)
    assert not bias(encoding, params, 9, 9).any()
    grads = jax.grad(lambda p: (bias(encoding, p, 9, 9) ** 2
                                + bias(encoding, p, 9, 9)).sum())(params)
    assert (grads["bias_N"] != 0).all() and (grads["down_EN"] != 0).any()


@pytest.mark.parametrize("spec", SCHEMES)
def test_gradients_against_finite_differences(spec):
    """In float64, for keys at every distance, in the past, at 0 and in the future."""
    encoding = make_encoding(spec)
    with jax.enable_x64():
        params = random_params(encoding, "float64")
        weight = jnp.asarray(np.random.default_rng(4).standard_normal((3, 5, 9)))
        loss = jax.jit(lambda p: jnp.sum(bias(encoding, p, 5, 9) * weight))
        assert bias(encoding, params, 5, 9).dtype == jnp.float64
        grads = jax.jit(jax.grad(loss))(params)
        for name, leaf in params.items():
            for index in list(np.ndindex(leaf.shape))[:6]:
                step = np.zeros(leaf.shape)
                step[index] = 1e-6
                up, down = (loss(params | {name: leaf + e}) for e in (step, -step))
                slope = float(up - down) / 2e-6
                if spec != "alibi":  # whose slopes are constants
                    np.testing.assert_allclose(grads[name][index], slope, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("spec", SCHEMES)
def test_every_pair_has_a_finite_gradient(spec):
    encoding = make_encoding(spec)
    params = random_params(encoding)
    q, k = jnp.array([0, 0, 0, 9, 9, 0, 10**6, 10**6]), jnp.array([0, 1, 9, 0, 9, 10**6, 0, 10**6])
    one = jax.jit(jax.vmap(jax.value_and_grad(lambda p, q, k: encoding.pair_bias(
        p, jnp.array([1]), q[None], k[None])[0]), (None, 0, 0)))
    for leaf in jax.tree.leaves(one(params, q, k)):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize("spec", SCHEMES)
def test_tiles_shifts_and_dtypes(spec):
    """Elementwise: a tile is a part of the whole, whatever the shapes; positions may be packed."""
    encoding = make_encoding(spec)
    assert encoding.bias_kind == "pair"
    params = random_params(encoding)
    whole, pair_bias = np.asarray(bias(encoding, params, 8, 8)), jax.jit(encoding.pair_bias)
    assert whole.shape == (3, 8, 8) and whole.dtype == jnp.float32
    tile = np.ix_([2, 0], [3, 7], [1, 6, 3])
    np.testing.assert_allclose(pair_bias(params, *tile), whole[tile], rtol=1e-5)
    q, k = np.array([[0, 4, 0], [7, 7, 7]]), np.array([[0, 1, 5], [0, 7, 6]])
    packed = pair_bias(params, np.ones((1, 1), int), q, k)
    np.testing.assert_allclose(packed, whole[1][q, k], rtol=1e-5)
    if not spec.startswith("fire"):  # which knows where the query stands
        far = pair_bias(params, *np.ix_(range(3), 10**6 + np.arange(8), 10**6 + np.arange(8)))
        np.testing.assert_array_equal(far, whole)


@pytest.mark.parametrize("spec", [*SCHEMES, "cope", "transformer_xl"])
def test_parameters_are_named_by_letters(key, spec):
    """Sharding reads a letter per axis; tables of biases and lone numbers are not decayed."""
    params = make_encoding(spec).init(key, SIZES)
    sizes = SIZES | {"C": {"cope": 65}.get(spec, 32), "E": 32, "U": 1, "P": SIZES["D"]}
    for name, leaf in params.items():
        assert leaf.shape == tuple(sizes[letter] for letter in letters_of(name)), name
        assert leaf.dtype == jnp.float32
    decayed = {name for name, on in decay_mask(params).items() if on}
    assert decayed <= {"down_EN", "table_CH", "r_PNH"}


@pytest.mark.parametrize("spec, says", [
    ("alibi(learned=1)", "True or False"), ("t5(buckets=31)", "odd"), ("t5(buckets=0)", "least 2"),
    ("t5(buckets=2, bidirectional=True)", "least 4"), ("t5(buckets=True)", "whole number"),
    ("t5(max_distance=16)", "above half"), ("t5(max_distance=1e999)", "whole number"),
    ("t5(buckets=64, max_distance=32)", "above half"), ("t5(bidirectional='yes')", "True or False"),
    ("kerple(form='exp')", "choose one of: log, power"), ("fire(width=0)", "least 1"),
    ("fire(c=0)", "above 0"), ("fire(length=-1)", "least 0"), ("fire(c=1e999)", "finite"),
    ("fire(zero_init=0)", "True or False"), ("cope(p_max=0)", "least 1"),
    ("cope(p_max=2.0)", "whole"), ("cope(divide=1)", "True or False"),
    ("transformer_xl(width=-1)", "least 0"), ("transformer_xl(base=0)", "above 0"),
    ("learned(init_std=-1)", "least 0"), ("learned(length=True)", "whole number"),
    ("sinusoidal(base=1e999)", "above 0"), ("cope(p_max=1048577)", "at most 1048576"),
    ("t5(max_distance=1000000000000)", "at least 1 and of at most 1048576"),
    ("t5(buckets=1048578, max_distance=1048576)", "at most 1048576")])
def test_wrong_options_are_one_sentence(spec, says):
    with pytest.raises(UserError) as error:
        make_encoding(spec)
    assert says in str(error.value) and spec.split("(")[0] in str(error.value)
