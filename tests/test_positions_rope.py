"""The rotary family: published frequency tables, exactness far out, layouts, dtypes, options."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tx_jax.errors import UserError
from tx_jax.positions import make_encoding
from tx_jax.positions._angles import frequencies

# Every member with constants that make it differ from `rope` at head width 16.
FAMILY = {
    "rope_pi": "factor=4", "rope_ntk": "factor=4", "rope_dynamic_ntk": "trained=64",
    "rope_by_parts": "factor=4, trained=64, beta=4", "yarn": "factor=4, trained=64, beta=4",
    "llama3": "original=64", "longrope": "original=64", "xpos": ""}


def spec(name, options=""):
    return f"{name}({', '.join(o for o in (FAMILY[name], options) if o)})"


def ratio(text, width, base):
    """Frequency over that of plain rotary positions."""
    return make_encoding(text).frequency(width) / frequencies(base, width)


@partial(jax.jit, static_argnums=(0, 1))
def turn(encoding, hook, x, pos, length=None):
    """One hook of a scheme, compiled as a whole."""
    return getattr(encoding, hook)({}, x, jnp.asarray(pos, jnp.int32), length)


def test_position_interpolation_divides_positions(key):
    x = jax.random.normal(key, (1, 3, 2, 8))
    got = turn(make_encoding("rope_pi(factor=4)"), "rotate", x, [[0, 4, 4000]])
    plain = turn(make_encoding("rope"), "rotate", x, [[0, 1, 1000]])
    np.testing.assert_allclose(got, plain, atol=2e-6)


def test_ntk_frequencies():
    """s = 4, D = 128: base 40889.94; the highest frequency stays, the lowest is a quarter."""
    got = make_encoding("rope_ntk(factor=4)").frequency(128)
    np.testing.assert_allclose(got, frequencies(40889.94, 128), rtol=2e-7)
    change = got / frequencies(1e4, 128)
    assert change[0] == 1
    np.testing.assert_allclose(change[-1], 0.25, rtol=1e-12)
    assert make_encoding("rope_ntk(factor=4)").frequency(2).tolist() == [1]


def test_llama3_frequencies():
    """P6 of the case list: blended in frequency, not in wavelength."""
    change = ratio("llama3", 128, 5e5)
    blended = [0.828168, 0.643743, 0.493507, 0.371122, 0.271425, 0.190211]
    expected = [1] * 29 + blended + [0.125] * 29
    np.testing.assert_allclose(change, expected, atol=6e-7)
    change = ratio("llama3(factor=32)", 64, 5e5)
    expected = [1] * 15 + [0.605573, 0.303743, 0.103448] + [0.03125] * 14
    np.testing.assert_allclose(change, expected, atol=6e-7)


def test_llama3_by_its_own_formula():
    frequency, got = frequencies(1e4, 64), make_encoding(
        "llama3(factor=4, low=0.5, high=3, original=256, base=10000)").frequency(64)
    for theta, new in zip(frequency, got, strict=True):
        wavelength = 2 * np.pi / theta
        smooth = (256 / wavelength - 0.5) / 2.5
        expected = (theta if wavelength < 256 / 3 else theta / 4 if wavelength > 256 / 0.5 else
                    (1 - smooth) * theta / 4 + smooth * theta)
        np.testing.assert_allclose(new, expected, rtol=1e-12)


def test_yarn_ramps_of_paper_and_code():
    pairs = [24, 28, 32, 36, 40]
    paper = ratio("yarn(factor=16, trained=4096)", 128, 1e4)
    np.testing.assert_allclose(paper[pairs], [0.656, 0.383, 0.229, 0.143, 0.095], atol=6e-4)
    code = ratio("yarn(factor=16, trained=4096, ramp='code')", 128, 1e4)
    np.testing.assert_allclose(code[pairs], [0.856, 0.712, 0.567, 0.423, 0.279], atol=6e-4)
    # The ramp of the code runs from pair 20 to pair 46.
    assert (code == 1).sum() == 21 and np.isclose(code, 1 / 16).sum() == 64 - 46
    by_parts = ratio("rope_by_parts(factor=16, trained=4096)", 128, 1e4)
    np.testing.assert_array_equal(by_parts, paper)


def test_yarn_attention_factor():
    table = {2: 1.0693, 4: 1.1386, 8: 1.2079, 16: 1.2773, 32: 1.3466}
    logits = {2: 1.143, 4: 1.297, 8: 1.459, 16: 1.631, 32: 1.813}
    for s in table:
        got = make_encoding(f"yarn(factor={s})").attention_factor
        np.testing.assert_allclose([got, got**2], [table[s], logits[s]], atol=6e-4)
    assert make_encoding("yarn(factor=1)").attention_factor == 1
    assert make_encoding("rope_by_parts(factor=16)").attention_factor == 1


def test_by_parts_at_small_lengths_is_nearly_interpolation():
    """No pair is left alone unless trained > 2 pi beta."""
    small = ratio("rope_by_parts(factor=4, trained=64)", 32, 1e4)
    assert small.max() < 0.25 + 0.75 * 0.31 and np.isclose(small, 0.25, rtol=2e-3).sum() == 12
    assert (ratio("rope_by_parts(factor=4, trained=201)", 32, 1e4) < 1).all()
    assert ratio("rope_by_parts(factor=4, trained=202)", 32, 1e4)[0] == 1
    tiny = ratio("yarn(factor=4, trained=4, ramp='code')", 32, 1e4)
    np.testing.assert_allclose(tiny[1:], 0.25)


@pytest.mark.parametrize("options", ["factor=8", "factor=8, original=64, base=500"])
def test_longrope_formula_and_attention_factor(options):
    encoding = make_encoding(f"longrope({options})")
    original, base = encoding.original, encoding.base
    assert encoding.attention_factor == np.sqrt(1 + np.log(8) / np.log(original))
    np.testing.assert_array_equal(encoding.frequency(16, long=False), frequencies(base, 16))
    np.testing.assert_allclose(encoding.frequency(16), make_encoding(
        f"rope_ntk(factor=8, base={base})").frequency(16), rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(FAMILY)), m=st.integers(0, 300), n=st.integers(0, 300),
       shift=st.sampled_from([1000, 1_000_000]), layout=st.sampled_from(["half", "interleaved"]),
       fraction=st.sampled_from([1.0, 0.5]))
def test_only_the_distance_counts(name, m, n, shift, layout, fraction):
    """At equal length, as two members have other frequencies at another one."""
    q, k = np.random.default_rng(1).standard_normal((2, 1, 1, 1, 16), np.float32)
    encoding = make_encoding(spec(name, f"layout='{layout}', fraction={fraction}"))
    length = jnp.array([301 + shift], jnp.int32)

    def dot(m, n):
        return np.sum(turn(encoding, "rotate_q", q, [[m]], length)
                      * turn(encoding, "rotate_k", k, [[n]], length))

    if name == "xpos":  # a query far behind the current length is refused, see its docstring
        m, n, base = max(m, n), min(m, n), shift - 1000
    else:
        base = 0
    scale = np.linalg.norm(q) * np.linalg.norm(k) * encoding.attention_factor**2
    np.testing.assert_allclose(dot(m + base, n + base), dot(m + shift, n + shift),
                               atol=3e-6 * scale)


@pytest.mark.parametrize("name", sorted(FAMILY))
@pytest.mark.parametrize("fraction, width", [(1.0, 16), (0.5, 8)])
def test_layouts_are_one_up_to_a_permutation(key, name, fraction, width):
    """And every member is a turn: norms are kept up to the factor, passed columns are equal."""
    x = jax.random.normal(key, (2, 3, 2, 16))
    pos = jnp.array([[0, 1, 2], [1_000_000, 7, 999_999]])
    order = np.r_[0:width:2, 1:width:2, width:16]
    half, pairs = (make_encoding(spec(name, f"layout='{layout}', fraction={fraction}"))
                   for layout in ("half", "interleaved"))
    for hook in ("rotate_q", "rotate_k"):
        got = turn(pairs, hook, x, pos)
        np.testing.assert_allclose(got[..., order], turn(half, hook, x[..., order], pos),
                                   rtol=2e-6, atol=1e-6)
        np.testing.assert_array_equal(got[..., width:], x[..., width:])
    np.testing.assert_allclose(
        jnp.linalg.norm(turn(half, "rotate", x, pos)[..., :width], axis=-1),
        jnp.linalg.norm(x[..., :width], axis=-1) * half.attention_factor, rtol=2e-6)


@pytest.mark.parametrize("name", sorted(FAMILY.keys() - {"xpos", "rope_dynamic_ntk"}))
@pytest.mark.parametrize("base", [100.0, 500000.0])
def test_every_member_turns_by_its_frequencies(key, name, base):
    """Against complex numbers in float64, at positions up to 10^6."""
    x, pos = jax.random.normal(key, (1, 3, 2, 8)), np.array([[3, 1_000_000, 999_999]])
    encoding = make_encoding(spec(name, f"base={base}, layout='interleaved'"))
    z = np.float64(x[..., 0::2]) + 1j * np.float64(x[..., 1::2])
    z = z * np.exp(1j * pos[:, :, None, None] * encoding.frequency(8)) * encoding.attention_factor
    got = np.asarray(turn(encoding, "rotate", x, pos))
    np.testing.assert_allclose(got[..., 0::2] + 1j * got[..., 1::2], z, atol=1e-5)


@pytest.mark.parametrize("name", sorted(FAMILY))
def test_dtypes_gradients_and_transformations(key, name):
    x = jax.random.normal(key, (2, 3, 2, 16))
    pos = jnp.array([[0, 1, 2], [70, 71, 200]])
    encoding = make_encoding(spec(name))
    expected = encoding.rotate_q({}, x, pos)
    half = turn(encoding, "rotate_q", x.astype(jnp.bfloat16), pos)
    assert half.dtype == jnp.bfloat16 and expected.dtype == jnp.float32
    np.testing.assert_allclose(half.astype(jnp.float32), expected, atol=0.06)
    np.testing.assert_allclose(turn(encoding, "rotate_q", x, pos), expected, rtol=1e-5, atol=1e-6)
    one = jax.vmap(lambda x, p: turn(encoding, "rotate_q", x[None], p[None])[0])(x, pos)
    np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6)
    grad = jax.grad(lambda x: jnp.sum(turn(encoding, "rotate_k", x, pos) * expected))(x)
    assert np.isfinite(grad).all() and (grad != 0).any()


@pytest.mark.parametrize("name", sorted(FAMILY))
def test_head_widths_that_are_not_pairs(name):
    for width, fraction, columns in ((5, 1.0, 5), (6, 0.5, 3), (8, 0.1, 0)):
        with pytest.raises(UserError, match=f"^{name} turns pairs.* gives {columns} columns"):
            make_encoding(spec(name, f"fraction={fraction}")).rotate_q(
                {}, jnp.zeros((1, 1, 1, width)), jnp.zeros((1, 1), jnp.int32))


@pytest.mark.parametrize("text, says", [
    *((f"{name}({option})", says) for name in FAMILY for option, says in (
        ("base=0", "above 0"), ("base=True", "base=True"), ("base=1e999", "base=inf"),
        ("layout='halves'", "did you mean 'half'"), ("fraction=1.5", "(0, 1]"),
        ("fraction=True", "(0, 1]"), ("spelling=1", "has no option 'spelling'"))),
    *((f"{name}({option})", "factor") for name in FAMILY if name != "xpos" for option in (
        "factor=0.5", "factor=True", "factor='4'", "factor=1e999", "factor=-2")),
    *((f"{name}(trained={value})", "trained") for value in (0, 2.5, True, -1)
      for name in ("yarn", "rope_by_parts", "rope_dynamic_ntk")),
    ("rope_by_parts(alpha=0)", "above 0"), ("yarn(beta=-1)", "above 0"),
    ("yarn(alpha=4, beta=4)", "alpha below beta"), ("yarn(ramp='linear')", "paper"),
    ("yarn(ramp='code', base=1)", "above 1"), ("llama3(low=4)", "low below high"),
    ("llama3(original=0)", "at least 1"), ("longrope(original=1)", "at least 2"),
    ("longrope(long_factors=3)", "tuple"), ("longrope(short_factors=(1, -1))", "above 0"),
    ("rope_dynamic_ntk(form='hf')", "code"), ("xpos(scale_base=0)", "above 0"),
    ("xpos(centred=1)", "True or False")])
def test_wrong_options_are_one_sentence(text, says):
    with pytest.raises(UserError) as error:
        make_encoding(text)
    assert says in str(error.value) and "\n" not in str(error.value)
    assert str(error.value).endswith(".") or "did you mean" in str(error.value) \
        or "choose one of" in str(error.value)
