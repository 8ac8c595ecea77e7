"""Every position scheme under every implementation: values, gradients, cached decoding, packing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tx_jax import models, plugins
from tx_jax.attention import Bias, attend, implementations
from tx_jax.config import ModelConfig
from tx_jax.errors import UserError
from tx_jax.masks import Causal, Window
from tx_jax.positions import make_encoding

pytestmark = pytest.mark.slow

# Every scheme, with the options that change its formula; trained lengths inside the tested ones.
SCHEMES = {name: name for name in plugins.names("tx_jax.positions")} | {
    "rope_interleaved": "rope(layout='interleaved', fraction=0.5)",
    "rope_dynamic_ntk": "rope_dynamic_ntk(factor=2, trained=3)",
    "rope_dynamic_ntk_paper": "rope_dynamic_ntk(factor=2, trained=3, form='paper')",
    "yarn_paper": "yarn(factor=4, trained=64, ramp='paper', beta=4)",
    "yarn_code": "yarn(factor=4, trained=64, ramp='code', beta=4)",
    "t5_bidirectional": "t5(buckets=8, max_distance=16, bidirectional=True)",
    "kerple_power": "kerple(form='power')", "fire": "fire(zero_init=False)",
}
# Their frequencies follow the current length, so a step computes with others than a longer pass.
LENGTH_DEPENDENT = {"rope_dynamic_ntk", "rope_dynamic_ntk_paper"}
OTHERS = sorted(set(implementations()) - {"reference", "cudnn", "flash"})
B, T, N, K, H = 2, 6, 4, 2, 8


def encoded(scheme, implementation, params, q, k, v, rows=slice(None)):
    """Attention with the scheme; `rows` are the queries, met by the keys up to the last."""
    encoding, pos = make_encoding(SCHEMES[scheme]), jnp.arange(T, dtype=jnp.int32)[None]
    keys = slice(0, range(T)[rows][-1] + 1)
    length = jnp.array([keys.stop])
    q = encoding.rotate_q(params, q[:, rows], pos[:, rows], length)
    k = encoding.rotate_k(params, k[:, keys], pos[:, keys], length)
    function = {"pair": encoding.pair_bias, "rows": encoding.row_bias}.get(encoding.bias_kind)
    bias = function and Bias(function, params, pos[:, rows], pos[:, keys], encoding.bias_kind)
    return attend(q, k, v[:, keys], mask=Causal() & Window(5), bias=bias, head_width=H,
                  implementation=implementation)


@pytest.fixture
def arrays(key):
    return (jax.random.normal(key, (B, T, N, H)), *jax.random.normal(key, (2, B, T, K, H)))


def parameters(scheme, key):
    """Parameters away from their start, which is zero for some."""
    start = make_encoding(SCHEMES[scheme]).init(key, {"N": N, "H": H, "D": 12, "T": 16, "K": K})
    return jax.tree.map(lambda x: x + 0.3 * jax.random.normal(key, x.shape), start)


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_every_implementation_gives_the_reference(scheme, arrays, key):
    params = parameters(scheme, key)

    def run(name):
        def loss(params, arrays):
            out = encoded(scheme, name, params, *arrays)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))
        return jax.jit(jax.value_and_grad(loss, (0, 1)))(params, arrays)

    expected, ran = run("reference"), 0
    assert all(bool(jnp.any(g != 0)) for g in jax.tree.leaves(expected[1])) or scheme in (
        "alibi", "learned")
    for name in OTHERS:
        try:
            got = run(name)
        except UserError as error:
            assert f"'{name}' cannot do" in str(error) and name != "blockwise"
            continue
        ran += 1
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, expected)
    assert ran


@pytest.mark.parametrize("scheme", sorted(set(SCHEMES) - LENGTH_DEPENDENT))
def test_decoding_with_a_cache_equals_the_full_pass(scheme, arrays, key):
    params = parameters(scheme, key)
    for name in ("reference", "blockwise"):
        full = encoded(scheme, name, params, *arrays)
        for t in (0, 3, T - 1):
            step = encoded(scheme, name, params, *arrays, rows=slice(t, t + 1))
            np.testing.assert_allclose(step[:, 0], full[:, t], atol=2e-6)


@pytest.mark.parametrize("scheme", sorted(LENGTH_DEPENDENT))
def test_length_dependent_decoding_equals_a_pass_of_that_length(scheme, arrays):
    """Keys are cached unrotated: step t computes what a full pass over t + 1 tokens does last."""
    for t in (1, T - 1):
        step = encoded(scheme, "blockwise", {}, *arrays, rows=slice(t, t + 1))
        upto = encoded(scheme, "reference", {}, *arrays, rows=slice(0, t + 1))
        np.testing.assert_allclose(step[:, 0], upto[:, t], atol=2e-6)


@pytest.mark.parametrize("scheme", sorted(set(SCHEMES) - LENGTH_DEPENDENT))
def test_packed_and_left_padded_rows_equal_the_document_alone(scheme, key):
    """A18 and K4 of the case list, through the model."""
    cfg = ModelConfig(positions=SCHEMES[scheme], layers=2, d_model=16, heads=2)
    model = models.build(cfg, 11, 8)
    params = models.init(model, key)
    params = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(key, x.shape), params)
    tokens = jax.random.randint(key, (1, 8), 0, 11)
    rows = jnp.concatenate([tokens, tokens])
    segments = jnp.array([[1, 1, 1, 2, 2, 2, 2, 2], [0, 0, 0, 1, 1, 1, 1, 1]])
    both, _ = jax.jit(lambda p: models.apply(model, p, rows, segments_BT=segments))(params)
    alone, _ = jax.jit(lambda p: models.apply(model, p, tokens[:, 3:]))(params)
    for row in both[:, 3:]:
        np.testing.assert_allclose(row, alone[0], atol=2e-5)


@pytest.mark.parametrize("score", ["additive", "bilinear", "cosine"])
def test_widened_heads_take_plain_scores_only(score):
    with pytest.raises(UserError, match="transformer_xl widens .* scaled_dot or dot"):
        models.build(ModelConfig(positions="transformer_xl", score=score), 11, 8)
