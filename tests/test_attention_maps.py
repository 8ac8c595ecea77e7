"""Attention maps: what is traced, what is drawn, and a run or a sentence that cannot be used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tx_jax import models
from tx_jax.attention import attend, trace_attention
from tx_jax.config import ModelConfig
from tx_jax.errors import UserError
from tx_jax.masks import Mask, parse_mask

CFG = ModelConfig(layers=2, d_model=16, heads=2)


def qkv(T=5, S=7, N=4, K=2, H=8):
    keys = jax.random.split(jax.random.key(0), 3)
    return (jax.random.normal(keys[0], (2, T, N, H)), jax.random.normal(keys[1], (2, S, K, H)),
            jax.random.normal(keys[2], (2, S, K, H)))


@pytest.mark.parametrize("name", ["reference", "blockwise", "jax_nn"])
@pytest.mark.parametrize("options", [{}, {"mask": "causal"}, {"mask": "window(2)", "scale": 0.3}])
def test_a_trace_ends_in_what_every_implementation_gives(name, options):
    q, k, v = qkv()
    found = jax.jit(lambda q, k, v: trace_attention(q, k, v, **options))(q, k, v)
    out = jax.jit(lambda q, k, v: attend(q, k, v, implementation=name, **options))(q, k, v)
    np.testing.assert_allclose(found["out_BTNH"], out, atol=2e-6)
    assert found["weights_BNTS"].shape == found["logits_BNTS"].shape == (2, 4, 5, 7)
    np.testing.assert_allclose(found["weights_BNTS"].sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(jax.nn.softmax(found["logits_BNTS"], -1), found["weights_BNTS"],
                               atol=1e-6)


def test_a_trace_of_cross_attention_keeps_padding_out():
    """Queries and keys of different lengths; the keys of the second example end after 3."""
    q, k, v = qkv()
    mask = Mask(parse_mask("full"), k_lengths_B=jnp.array([7, 3]))
    bad = v.at[1, 3:].set(jnp.nan)
    found = trace_attention(q, k, bad, mask=mask, sink=jnp.zeros(4))
    assert not found["weights_BNTS"][1, :, :, 3:].any()
    assert np.isfinite(found["out_BTNH"]).all()
    assert (found["weights_BNTS"].sum(-1) < 1).all(), "a sink takes its share"


@pytest.mark.parametrize("changes", [{}, {"positions": "cope", "kv_heads": 1, "scan": False,
                                          "mask": "window(3)"}])
def test_the_weights_of_a_model_sum_to_one_and_see_no_future(changes):
    model = models.build(ModelConfig(layers=2, d_model=16, heads=2, **changes), 11, 8)
    params = models.init(model, jax.random.key(1))
    tokens = jnp.array([[1, 2, 3, 4, 5, 6]])
    trace = jax.jit(lambda t: models.apply(model, params, t, trace="weights")[1]["weights_BNTS"])
    weights = trace(tokens)
    assert weights.shape == (2, 1, 2, 6, 6)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert not np.triu(weights, 1).any()
    other = trace(tokens.at[0, 4].set(9))
    np.testing.assert_array_equal(other[..., :4, :], weights[..., :4, :])
    assert np.abs(other - weights)[..., 4:, :].max() > 1e-6


def test_an_unknown_trace_is_refused():
    model = models.build(CFG, 11, 8)
    with pytest.raises(UserError, match="trace='weigths' is unknown"):
        models.apply(model, {}, jnp.zeros((1, 2), jnp.int32), trace="weigths")
