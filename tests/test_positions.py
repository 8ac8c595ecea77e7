"""Position schemes: published values, exactness far out, and errors instead of silent numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tx_jax.errors import UserError
from tx_jax.positions import make_encoding
from tx_jax.positions._angles import angles, frequencies
from tx_jax.positions.sinusoidal import sinusoids


def rotate(spec, x, pos):
    return make_encoding(spec).rotate({}, x, jnp.asarray(pos, jnp.int32))


def rope_by_complex(x, pos, base, width):
    """Interleaved rotary positions as complex multiplication, float64."""
    z = x[..., 0:width:2] + 1j * x[..., 1:width:2]
    turned = z * np.exp(1j * pos[:, :, None, None] * base ** (-np.arange(0, width, 2) / width))
    out = np.array(x, np.float64)
    out[..., 0:width:2], out[..., 1:width:2] = turned.real, turned.imag
    return out


def test_both_rope_layouts():
    """P1 of the case list (transformers #25199)."""
    x = jnp.array([1.0, 2, 3, 4]).reshape(1, 1, 1, 4)
    half = rotate("rope", x, [[1]]).ravel()
    np.testing.assert_allclose(half, [-1.984111, 1.959901, 2.462378, 4.0198], atol=2e-6)
    pairs = rotate("rope(layout='interleaved')", x, [[1]]).ravel()
    np.testing.assert_allclose(pairs, [-1.14264, 1.922076, 2.959851, 4.0298], atol=2e-6)


def test_a_permutation_maps_one_layout_to_the_other(key):
    x = jax.random.normal(key, (2, 5, 3, 8))
    pos = jnp.arange(10).reshape(2, 5)
    order = np.r_[0:8:2, 1:8:2]
    np.testing.assert_allclose(rotate("rope(layout='interleaved')", x, pos)[..., order],
                               rotate("rope", x[..., order], pos), atol=1e-6)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("fraction, width", [(1.0, 8), (0.5, 4), (0.25, 2)])
@pytest.mark.parametrize("base", [10000.0, 500000])
def test_rope_against_complex_numbers(key, layout, fraction, width, base):
    x = jax.random.normal(key, (2, 3, 2, 8))
    pos = np.array([[0, 1, 2], [1_000_000, 7, 999_999]])
    got = rotate(f"rope(base={base}, layout='{layout}', fraction={fraction})", x, pos)
    order = np.arange(8)
    if layout == "half":
        order[:width] = np.arange(width).reshape(2, -1).T.ravel()
    expected = rope_by_complex(np.float64(x)[..., order], pos, float(base), width)
    np.testing.assert_allclose(np.asarray(got)[..., order], expected, atol=5e-6)


@settings(max_examples=25, deadline=None)
@given(m=st.integers(0, 2000), n=st.integers(0, 2000), shift=st.integers(0, 1_000_000),
       layout=st.sampled_from(["half", "interleaved"]), fraction=st.sampled_from([1.0, 0.5]))
def test_rope_depends_on_the_distance_only_and_keeps_norms(m, n, shift, layout, fraction):
    q, k = (jax.random.normal(jax.random.key(i), (1, 1, 1, 16)) for i in (1, 2))
    spec = f"rope(layout='{layout}', fraction={fraction})"
    near = jnp.sum(rotate(spec, q, [[m]]) * rotate(spec, k, [[n]]))
    far = jnp.sum(rotate(spec, q, [[m + shift]]) * rotate(spec, k, [[n + shift]]))
    np.testing.assert_allclose(near, far, atol=2e-5)
    np.testing.assert_allclose(jnp.linalg.norm(rotate(spec, q, [[m]])), jnp.linalg.norm(q),
                               rtol=1e-6)


def test_rope_gradient_is_the_inverse_turn(key):
    x, g = jax.random.normal(key, (2, 1, 3, 2, 8))
    pos = jnp.array([[5, 0, 123456]])
    (back,) = jax.vjp(lambda x: rotate("rope", x, pos), x)[1](g)
    np.testing.assert_allclose(back, rotate("rope", g, -pos), atol=1e-6)


def test_rope_keeps_dtype_and_position_zero(key):
    x = jax.random.normal(key, (1, 2, 2, 4), jnp.bfloat16)
    out = rotate("rope", x, [[0, 3]])
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out[:, 0], x[:, 0])


@settings(max_examples=30, deadline=None)
@given(pos=st.integers(-(2**31) + 1, 2**31 - 1), base=st.sampled_from([0.5, 10.0, 1e4, 5e5]))
def test_angles_are_exact_far_out(pos, base):
    frequency = frequencies(base, 32)
    got = np.asarray(angles(jnp.array([[pos]], jnp.int32), frequency), np.float64)[0, 0]
    exact = np.float128(pos) * np.float128(1) * frequency.astype(np.float128)
    error = np.asarray((exact - got + np.pi) % (2 * np.float128(np.pi)) - np.pi, np.float64)
    # float64 frequencies, and pi in float64, limit the comparison itself beyond 10^6.
    assert np.abs(error).max() < 1e-6 + abs(pos) * 1e-15


def test_angles_in_float64():
    with jax.enable_x64():
        got = np.asarray(angles(jnp.array([[12345]]), frequencies(1e4, 8), jnp.float64))[0, 0]
    exact = 12345 * frequencies(1e4, 8)
    assert got.dtype == np.float64
    assert np.abs((got - exact + np.pi) % (2 * np.pi) - np.pi).max() < 3e-9


@pytest.mark.parametrize("spec, width, says", [
    ("rope", 5, "gives 5 columns"), ("rope(fraction=0.5)", 6, "gives 3 columns"),
    ("rope(fraction=0.1)", 8, "gives 0 columns")])
def test_odd_head_widths_are_refused(spec, width, says):
    with pytest.raises(UserError) as error:
        rotate(spec, jnp.zeros((1, 1, 1, width)), [[0]])
    assert says in str(error.value)


@pytest.mark.parametrize("spec, says", [
    ("rpoe", "did you mean 'rope'"), ("rope(bse=3)", "did you mean 'base'"),
    ("rope(layout='halves')", "half"), ("rope(fraction=0)", "(0, 1]"), ("rope(base=0)", "above 0"),
    ("rope(1, 'half', 1, 2)", "too many"), ("rope(1, base=2)", "too many"),
    ("none(3)", "too many; it has no options."), ("rope(base={[]: 1})", "name(key=value)"),
    ("rope(\nbase=)", "'rope( base=)'"), ("rope(base=1, base=2)", "each option once"),
    (f"rope(base={'-' * 3000}1)", "name(key=value)"),
    ("none(a=1)", "no options"), ("sinusoidal(base=-1)", "above 0"),
    ("rope(", "not of the form"), ("learned(length=-1)", "length")])
def test_wrong_specs_are_one_sentence(spec, says):
    with pytest.raises(UserError) as error:
        make_encoding(spec)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_positions_are_whole_numbers_of_the_right_shape():
    rope = make_encoding("rope")
    with pytest.raises(UserError, match="float32"):
        rope.rotate({}, jnp.zeros((1, 2, 1, 4)), jnp.zeros((1, 2)))
    with pytest.raises(UserError, match=r"\(1, 3\)"):
        rope.rotate({}, jnp.zeros((1, 2, 1, 4)), jnp.zeros((1, 3), jnp.int32))


def test_odd_width_sinusoids():
    """P12 of the case list (BERT-pytorch #78)."""
    row = sinusoids(jnp.array([[1]]), 5)[0, 0]
    np.testing.assert_allclose(row, [0.841471, 0.540302, 0.025116, 0.999685, 0.000631], atol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 5, 6, 64])
def test_sinusoid_identities(width):
    pos = jnp.array([[0, 1, 17, 1_000_000]])
    table = np.asarray(sinusoids(pos, width), np.float64)[0]
    even = width - width % 2
    pairs = table[:, :even].reshape(4, even // 2, 2)
    np.testing.assert_allclose((pairs**2).sum(-1), 1, atol=1e-6)
    theta = np.array([0, 1, 17, 1_000_000])[:, None] * 10000.0 ** (
        -np.arange(0, width, 2) / width)
    np.testing.assert_allclose(table[:, 0::2], np.sin(theta), atol=1e-6)
    if width == 64:
        near = table[2] @ table[1]
        np.testing.assert_allclose(near, np.cos(16 * frequencies(1e4, 64)).sum(), atol=1e-5)


def test_embed_adds_at_the_given_positions(key):
    """Packed documents restart, left-padded rows start late: only `pos_BT` counts."""
    x = jnp.zeros((2, 4, 6))
    pos = jnp.array([[0, 1, 0, 1], [0, 0, 0, 1]])
    for spec in ("sinusoidal", "learned(length=9)"):
        encoding = make_encoding(spec)
        params = encoding.init(key, {"D": 6, "T": 4})
        rows = encoding.embed(params, jnp.zeros((1, 2, 6)), jnp.array([[0, 1]]))[0]
        np.testing.assert_array_equal(encoding.embed(params, x, pos), rows[pos])
        assert encoding.rotate(params, x[:, :, None], pos) is not None
        assert encoding.bias_kind == "" and not encoding.per_layer


def test_none_is_the_identity(key):
    encoding, x = make_encoding("none"), jax.random.normal(key, (1, 2, 4))
    assert encoding.init(key, {}) == {} and encoding.max_length is None
    assert encoding.embed({}, x, jnp.zeros((1, 2), jnp.int32)) is x
    assert encoding.rotate({}, x, jnp.zeros((1, 2), jnp.int32)) is x


def test_learned_table_past_its_end(key):
    encoding = make_encoding("learned")
    params = encoding.init(key, {"D": 3, "T": 4})
    assert params["table_TD"].shape == (4, 3)
    assert make_encoding("learned(length=7)").max_length == 7
    embed = jax.jit(lambda x, p: encoding.embed(params, x, p))
    with pytest.raises(UserError, match="5 tokens .* 4 rows"):
        embed(jnp.zeros((1, 5, 3)), jnp.arange(5)[None])
    for bad in ([[0, 4]], [[-1, 0]]):
        with pytest.raises(UserError, match="leave the learned position table"):
            encoding.embed(params, jnp.zeros((1, 2, 3)), jnp.array(bad))
        out = embed(jnp.zeros((1, 2, 3)), jnp.array(bad))
        wrong = np.array(bad)[0] != 0
        np.testing.assert_array_equal(np.isnan(out[0]).all(axis=-1), wrong)
    packed = encoding.embed(params, jnp.zeros((1, 6, 3)), jnp.array([[0, 1, 2, 0, 1, 2]]))
    np.testing.assert_array_equal(packed[0, :3], packed[0, 3:])


def test_learned_gradient_reaches_the_rows_used(key):
    encoding = make_encoding("learned(length=5)")
    params = encoding.init(key, {"D": 2})
    pos = jnp.array([[0, 3, 3]])
    grads = jax.grad(lambda p: encoding.embed(p, jnp.zeros((1, 3, 2)), pos).sum())(params)
    assert grads["table_TD"].tolist() == [[1, 1], [0, 0], [0, 0], [2, 2], [0, 0]]


@pytest.mark.parametrize("spec", ["rope", "rope(layout='interleaved')"])
def test_rotate_under_jit_vmap_and_traced_positions(key, spec):
    x, pos = jax.random.normal(key, (3, 2, 1, 4)), jnp.array([[0, 1], [5, 6], [9, 2]])
    expected = rotate(spec, x, pos)
    np.testing.assert_allclose(jax.jit(lambda x, p: rotate(spec, x, p))(x, pos), expected,
                               atol=1e-6)
    one = jax.vmap(lambda x, p: rotate(spec, x[None], p[None])[0])(x, pos)
    np.testing.assert_allclose(one, expected, atol=1e-6)
