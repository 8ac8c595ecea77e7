"""What holds exactly of blocks: parameters and operations of their variants, norms, branches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _ablation_start as start
from tests.helpers import make_params
from tx_jax import layers, letters, models, seq2seq
from tx_jax.config import EncoderConfig, ModelConfig
from tx_jax.study.flops import count_flops

D, L, V, T = 16, 4, 11, 8
BASE = ModelConfig(layers=L, d_model=D, heads=2, norm="none", mlp="relu", positions="none",
                   attention="reference")


def parameters(**change):
    model = models.build(dataclasses.replace(BASE, **change), V, T)
    return letters.count(jax.eval_shape(lambda: models.init(model, jax.random.key(0))),
                         embedding=False)


def operations(**change):
    model = models.build(dataclasses.replace(BASE, **change), V, T)
    params = jax.eval_shape(lambda: models.init(model, jax.random.key(0)))
    tokens_BT = jax.ShapeDtypeStruct((1, T), jnp.int32)
    return count_flops(lambda p, t: models.apply(model, p, t)[0], params, tokens_BT)


def test_heads_at_fixed_width_change_the_softmax_and_nothing_else():
    assert len({parameters(heads=n) for n in (1, 2, 4, 8, 16)}) == 1
    counted = {n: operations(heads=n) for n in (1, 2, 4, 8)}
    per_head = counted[2] - counted[1]
    assert 0 < per_head < 12 * L * T**2, "a few operations for each of the T^2 weights of a head"
    assert [counted[n] - counted[1] for n in (2, 4, 8)] == [per_head * n for n in (1, 3, 7)]


def test_parameters_of_the_feed_forward_layer_and_what_matches_them():
    assert parameters() == 12 * L * D**2
    for hidden in (D, 3 * D):
        assert parameters(d_ff=hidden) - parameters(mlp="none") == L * 2 * D * hidden
    assert parameters(mlp="none", layers=3 * L) == parameters()
    assert parameters(layers=3 * L // 2, d_ff=2 * D) == parameters()
    assert parameters(mlp="swiglu", d_ff=6 * D) - parameters(mlp="none") == L * 3 * D * 6 * D


@pytest.mark.slow
@pytest.mark.parametrize("row", [  # thousands, as 2017 prints them in millions (table 3)
    ({}, {"layers": 8}, 14_680), ({}, {"d_ff": 4096}, 25_166), ({"d_ff": 1024}, {}, 12_583),
    # Vaswani et al. narrow queries and keys (7.08 M); here values and outputs narrow with them.
    ({"head_dim": 16}, {}, 2 * 7_078), ({"head_dim": 32}, {}, 2 * 4_719)])
def test_differences_between_the_rows_of_vaswani_et_al(row):
    smaller, larger, thousands = row
    base = ModelConfig(layers=6, d_model=512, heads=8, mlp="relu", norm="layer",
                       norm_position="post", positions="sinusoidal")

    def total(change):
        model = seq2seq.build(dataclasses.replace(base, **change), EncoderConfig(), 37_000, 64)
        return letters.count(jax.eval_shape(lambda: seq2seq.init(model, jax.random.key(0))))

    without_norms = 28 * 6 * 512**2 + 37_000 * 512
    assert 0 <= total({}) - without_norms < 2 * 512 * (6 * 5 + 2) + 1
    # What is left are the norms of two more layers on either side, 0.02 M.
    assert total(larger) - total(smaller) == pytest.approx(thousands * 1e3, abs=25e3)


def test_norms_forget_scale_and_layer_norm_forgets_a_shift(key):
    x_BTD = jax.random.normal(key, (2, 3, 64), jnp.float32)
    one, zero = jnp.ones(64), jnp.zeros(64)
    plain = layers.layer_norm(x_BTD, one, zero, eps=0.0)
    np.testing.assert_allclose(layers.layer_norm(7 * x_BTD + 3, one, zero, eps=0.0), plain,
                               atol=1e-5)
    np.testing.assert_allclose(layers.rms_norm(7 * x_BTD, one, eps=0.0),
                               layers.rms_norm(x_BTD, one, eps=0.0), atol=1e-5)
    centred = x_BTD - jnp.mean(x_BTD, -1, keepdims=True)
    np.testing.assert_allclose(layers.rms_norm(centred, one, eps=0.0), plain, atol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(plain, axis=-1), 64**0.5, rtol=1e-5)


def through(arm, depth, x_BTD, *, gain=1.0, params=None):
    """The stream after `depth` random blocks."""
    cfg = start.config({**arm, "attention": "reference"}, depth, x_BTD.shape[-1], 4, mask="full")
    block, context = start.block_of(cfg, x_BTD.shape[1])
    if params is None:
        params = make_params(models.build(cfg, V, x_BTD.shape[1]))["blocks"]
    params = start.scale_branches(gain, params)

    def layer(x_BTD, weights):
        return block.apply({"params": weights}, x_BTD, context, None, None)[0], None

    return jax.jit(lambda x, p: jax.lax.scan(layer, x, p)[0])(x_BTD, params)


@pytest.fixture
def key():
    return jax.random.key(3)


@pytest.fixture
def x_BTD(key):
    return jax.random.normal(key, (1, 24, 32), jnp.float32)


def test_branches_that_start_at_zero_make_the_identity(x_BTD):
    np.testing.assert_array_equal(through({}, 3, x_BTD, gain=0.0), x_BTD)
    v_BTD = jnp.sin(jnp.arange(x_BTD.size, dtype=jnp.float32)).reshape(x_BTD.shape)
    moved = jax.jvp(lambda x: through({}, 3, x, gain=0.0), (x_BTD,), (v_BTD,))[1]
    np.testing.assert_array_equal(moved, v_BTD)


def test_post_norm_blocks_leave_rows_of_norm_sqrt_d(x_BTD):
    out_BTD = through({"norm_position": "post"}, 2, 5 * x_BTD)
    np.testing.assert_allclose(jnp.linalg.norm(out_BTD, axis=-1), 32**0.5, rtol=1e-4)


@pytest.mark.slow
def test_scaled_branches_keep_the_variance_of_the_stream_at_any_depth(x_BTD):
    def variance(depth, gain):
        return float(jnp.var(through({}, depth, x_BTD, gain=gain)))

    scaled = [variance(depth, (2 * depth) ** -0.5) for depth in (2, 32)]
    assert scaled[1] == pytest.approx(scaled[0], rel=0.15)
    assert variance(32, 1.0) > 8 * variance(2, 1.0), "unscaled it grows with the depth"


def test_attention_alone_keeps_equal_rows_equal_and_brings_the_others_together(x_BTD):
    alone = start.RANK["attention"]
    equal_BTD = jnp.broadcast_to(x_BTD[:, :1], x_BTD.shape)
    assert float(start.ratio(equal_BTD)) == pytest.approx(0.0, abs=1e-6)
    assert float(start.ratio(through(alone, 2, equal_BTD))) < 1e-5
    # No further: float32 rounds below 1e-6.
    left = [float(start.ratio(through(alone, depth, x_BTD))) for depth in (1, 2)]
    assert float(start.ratio(x_BTD)) > left[0] > left[1] > 1e-5
    assert float(start.ratio(through(start.RANK["attention_skip"], 2, x_BTD, gain=0.5))) > 0.9
