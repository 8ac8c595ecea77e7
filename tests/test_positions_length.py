"""Rotary schemes that read the current length: dynamic NTK, LongRoPE, and the centre of xPos."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tx_jax.errors import UserError
from tx_jax.positions import make_encoding
from tx_jax.positions._angles import angles_of, frequencies


def frequency_at(encoding, length, width=128, dtype=jnp.float32):
    """The frequencies in use at a length, in radians."""
    high, low = encoding.turns(width, jnp.zeros((1, 1), jnp.int32), jnp.array([length]), dtype)
    return ((np.float64(high) * 2.0**32 + np.float64(low)) * 2.0**-64 * 2 * np.pi)[0, 0]


def ones(*shape):
    return jnp.ones(shape)


@pytest.mark.parametrize("form, base", [("code", 30527.74), ("paper", 20221.3)])
def test_dynamic_base(form, base):
    """P3 of the case list: D = 128, trained at 2048, factor 2, length 4096."""
    encoding = make_encoding(f"rope_dynamic_ntk(form='{form}')")
    np.testing.assert_allclose(frequency_at(encoding, 4096), frequencies(base, 128), rtol=2e-6)
    for length in (1, 2047, 2048):
        np.testing.assert_allclose(frequency_at(encoding, length), frequencies(1e4, 128),
                                   rtol=1e-14)


@pytest.mark.parametrize("form", ["code", "paper"])
@pytest.mark.parametrize("length", [2049, 3000, 100_000, 10_000_000])
def test_dynamic_frequencies_are_accurate(form, length):
    encoding = make_encoding(f"rope_dynamic_ntk(factor=3, form='{form}')")
    s = 3 * length / 2048 - 2 if form == "code" else length / 2048
    exact = make_encoding(f"rope_ntk(factor={s!r})").frequency(128)
    np.testing.assert_allclose(frequency_at(encoding, length), exact, rtol=2e-6)
    with jax.enable_x64():
        double = frequency_at(encoding, length, dtype=jnp.float64)
    np.testing.assert_allclose(double, exact, rtol=1e-13, atol=2.0**-61)  # of 64-bit turns


def test_dynamic_angles_are_exact_products(key):
    """However rounded a frequency is, position 10^6 turns by 10^6 times it."""
    encoding, pos = make_encoding("rope_dynamic_ntk"), jnp.array([[0, 1, 999_999, 1_000_000]])
    length = jnp.array([1_000_001])
    got = np.float64(angles_of(pos, encoding.turns(128, pos, length, jnp.float32)))
    exact = np.asarray(pos)[..., None] * frequency_at(encoding, 1_000_001)
    assert np.abs((got - exact + np.pi) % (2 * np.pi) - np.pi).max() < 1e-6


@pytest.mark.parametrize("text", ["rope_dynamic_ntk(trained=8)", "longrope(original=8)"])
def test_no_state_and_lengths_by_example(key, text):
    """Long then short gives what short alone gives; examples of a batch do not touch."""
    encoding = make_encoding(text)
    x, short, long = jax.random.normal(key, (2, 5, 1, 8)), jnp.arange(5)[None], jnp.arange(20, 25)
    turn = jax.jit(lambda x, p: encoding.rotate({}, x, p))
    first = turn(x[:1], short)
    turn(x[:1], long[None])
    np.testing.assert_array_equal(turn(x[:1], short), first)
    both = turn(x, jnp.stack([long, short[0]]))
    np.testing.assert_allclose(both[0], turn(x[:1], long[None])[0], atol=1e-6)
    np.testing.assert_allclose(both[1], turn(x[1:], short)[0], atol=1e-6)
    plain = make_encoding("rope").rotate({}, x, short) * encoding.attention_factor
    np.testing.assert_allclose(turn(x, short), plain, atol=1e-6)


@pytest.mark.parametrize("text", ["rope_dynamic_ntk(trained=8)", "longrope(original=8)", "xpos"])
def test_cached_decoding_of_the_last_query(key, text):
    """Keys cached unturned and turned at the current length meet the query as in a full pass."""
    encoding = make_encoding(text)
    q, k = jax.random.normal(key, (2, 1, 12, 1, 8))
    pos = jnp.arange(12)[None]
    turn_q = jax.jit(lambda *args: encoding.rotate_q({}, *args))
    turn_k = jax.jit(lambda *args: encoding.rotate_k({}, *args))
    for t in (7, 8, 11):
        seen, length = slice(0, t + 1), jnp.array([t + 1])
        full_q = turn_q(q[:, seen], pos[:, seen])[:, -1:]
        full_k = turn_k(k[:, seen], pos[:, seen])
        step_q = turn_q(q[:, t:t + 1], pos[:, t:t + 1], length)
        step_k = turn_k(k, pos, length)[:, seen]
        np.testing.assert_allclose(step_q, full_q, atol=1e-6)
        np.testing.assert_allclose(step_k, full_k, atol=1e-6)


def test_longrope_takes_its_list_by_length(key):
    encoding = make_encoding("longrope(original=8, short_factors=(1, 1.5), long_factors=[2, 4])")
    assert encoding.long_factors == (2, 4) and hash(encoding)
    theta = frequencies(1e4, 4)
    np.testing.assert_allclose(frequency_at(encoding, 8, 4), theta / [1, 1.5], rtol=1e-14)
    np.testing.assert_allclose(frequency_at(encoding, 9, 4), theta / [2, 4], rtol=1e-14)
    x, pos = jax.random.normal(key, (1, 1, 1, 4)), jnp.array([[7]])
    assert not np.allclose(encoding.rotate({}, x, pos), encoding.rotate({}, x, pos + 1))
    with pytest.raises(UserError, match="long_factors=.* 2 factors, but 8 columns turn; give 4"):
        encoding.rotate({}, ones(1, 1, 1, 8), pos)


def test_lengths_are_integers_by_example():
    encoding = make_encoding("rope_dynamic_ntk")
    for bad in (jnp.array([3.0]), jnp.array(3)):
        with pytest.raises(UserError, match="one integer per example"):
            encoding.rotate({}, ones(1, 1, 1, 4), jnp.zeros((1, 1), jnp.int32), bad)
    assert encoding.rotate({}, ones(2, 0, 1, 4), jnp.zeros((2, 0), jnp.int32)).shape == (2, 0, 1, 4)


@partial(jax.jit, static_argnums=0)
def xpos_logits(text, q, k, pos, length=None):
    encoding = make_encoding(text)
    return jnp.einsum("BTNH,BSNH->BTS", encoding.rotate_q({}, q, pos, length),
                      encoding.rotate_k({}, k, pos, length))


def causal(x):
    return np.tril(np.asarray(x, np.float64))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_xpos_against_complex_numbers(key, layout):
    """Logits are the real part of sum q conj(k) zeta^((m - n)/512) e^(i (m - n) theta)."""
    q, k = np.float64(jax.random.normal(key, (2, 1, 40, 1, 8)))
    pos = np.arange(40) * 37
    order = np.r_[0:4] if layout == "half" else np.r_[0:8:2]
    step = 4 if layout == "half" else 1
    zq, zk = (x[0, :, 0, order].T + 1j * x[0, :, 0, order + step].T for x in (q, k))
    distance = (pos[:, None] - pos[None])[..., None]
    zeta = (2 * np.arange(4) + 0.4 * 8) / (1.4 * 8)
    exact = np.real(zq[:, None] * np.conj(zk)[None] * zeta ** (distance / 512)
                    * np.exp(1j * distance * frequencies(1e4, 8))).sum(-1)
    got = xpos_logits(f"xpos(layout='{layout}')", jnp.float32(q), jnp.float32(k),
                      jnp.asarray(pos)[None])
    np.testing.assert_allclose(causal(got[0]), causal(exact), atol=3e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_xpos_centre_cancels(key, dtype):
    with jax.enable_x64(dtype == "float64"):
        q, k = jax.random.normal(key, (2, 1, 30, 2, 8)).astype(dtype)
        pos = 100 * jnp.arange(30, dtype=jnp.int32)[None]
        centred, plain = (xpos_logits(f"xpos(centred={c})", q, k, pos) for c in (True, False))
        other = xpos_logits("xpos", q, k, pos, jnp.array([4000], jnp.int32))
    atol = 3e-5 if dtype == "float32" else 1e-9  # positions take angles of 32 bits
    np.testing.assert_allclose(causal(centred), causal(plain), atol=atol)
    np.testing.assert_allclose(causal(centred), causal(other), atol=atol)


def test_xpos_far_out(key):
    """At 10^6 logits are those near 0; future keys and gradients are finite."""
    q, k = jax.random.normal(key, (2, 1, 20, 2, 8))
    pos = 300 * jnp.arange(20, dtype=jnp.int32)[None]
    near = causal(xpos_logits("xpos", q, k, pos))
    np.testing.assert_allclose(causal(xpos_logits("xpos", q, k, pos + 1_000_000)), near, atol=5e-5)
    for text in ("xpos", "xpos(centred=False)", "xpos(scale_base=128)"):
        loss = lambda q, k, text=text: xpos_logits(text, q, k, pos).sum()  # noqa: E731
        value, grads = jax.value_and_grad(loss, (0, 1))(q, k)
        assert np.isfinite(value) and all(np.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("centred, limit", [(True, 62), (False, 32)])
def test_xpos_beyond_its_range(key, centred, limit):
    """Up to the limit it is right; beyond, a sentence where the length or positions are known."""
    text = f"xpos(scale_base=1, centred={centred})"
    encoding = make_encoding(text)
    q, k = jax.random.normal(key, (2, 1, 70, 1, 8))
    pos = jnp.arange(70, dtype=jnp.int32)[None]
    inside = slice(0, limit)
    got = causal(xpos_logits(text, q[:, inside], k[:, inside], pos[:, inside])[0])
    zeta = (2 * np.arange(4) / 8 + 0.4) / 1.4
    rope = make_encoding("rope")
    tq, tk = (np.float64(rope.rotate({}, x, pos))[0, inside, 0].reshape(-1, 2, 4) for x in (q, k))
    distance = np.maximum(np.subtract.outer(range(limit), range(limit)), 0)
    exact = np.einsum("tcf,scf,tsf->ts", tq, tk, zeta ** distance[..., None])
    np.testing.assert_allclose(got, causal(exact), atol=3e-5)

    longer = slice(0, limit + 1)
    with pytest.raises(UserError, match=f"{limit + 1} tokens .* exact for {limit} positions"):
        xpos_logits(text, q[:, longer], k[:, longer], pos[:, longer])
    with pytest.raises(UserError, match=f"positions 0 to {limit} .* raise scale_base"):
        encoding.rotate_q({}, q[:, longer], pos[:, longer])
    spread = jnp.array([[0, 1, limit]], jnp.int32)  # short, so only the program can see it
    logits = np.asarray(xpos_logits(text, q[:, :3], k[:, :3], spread))[0]
    wrong = [True, False, False] if centred else [False, False, True]
    np.testing.assert_array_equal(np.isnan(logits).all(axis=1), wrong)
    np.testing.assert_array_equal(np.isnan(logits).any(axis=1), wrong)


def test_xpos_decodes_far_beyond_its_range(key):
    """Keys cached unturned: each step is exact, with a cache longer than a full pass may be."""
    q, k = jax.random.normal(key, (2, 1, 200, 1, 8))
    pos = jnp.arange(200, dtype=jnp.int32)[None]
    encoding = make_encoding("xpos(scale_base=1)")
    step = jax.jit(lambda t, q: jnp.einsum(
        "BTNH,BSNH->BTS", encoding.rotate_q({}, q, t[None], t + 1),
        encoding.rotate_k({}, k, pos, t + 1)))
    turned_q, turned_k = (np.float64(make_encoding("rope").rotate({}, x, pos))[0, :, 0]
                          .reshape(-1, 2, 4) for x in (q, k))
    zeta = (2 * np.arange(4) / 8 + 0.4) / 1.4
    for t in (0, 30, 62, 100, 199):
        got = np.asarray(step(jnp.array([t], jnp.int32), q[:, t:t + 1]))[0, 0]
        decay = zeta ** (t - np.arange(t + 1))[:, None]
        exact = np.einsum("cf,scf,sf->s", turned_q[t], turned_k[:t + 1], decay)
        np.testing.assert_allclose(got[:t + 1], exact, atol=3e-5)
        assert np.isfinite(got).all()
