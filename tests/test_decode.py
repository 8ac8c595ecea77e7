"""Decoding with a cache equals the full pass; rows do not see each other; overflow is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import make_params
from tests.test_positions_attention import LENGTH_DEPENDENT, SCHEMES
from tx_jax import decode, models
from tx_jax.config import ModelConfig
from tx_jax.decode import Sampling, decode_step, generate, init_cache, prefill, sample
from tx_jax.errors import UserError

V, T, START, SIZE = 11, 8, 5, 10
CFG = ModelConfig(layers=2, d_model=16, heads=4, kv_heads=2, d_ff=24)
GREEDY = Sampling(temperature=0)
PROMPTS = [[3, 1, 4], [2, 7, 1, 8, 2, 8, 1], [9]]


def make(context=SIZE, **options):
    model = models.build(dataclasses.replace(CFG, **options), V, context)
    params = make_params(model)
    # Away from zero, where some schemes start.
    return model, jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)
                                                           ).reshape(x.shape), params)


def tokens(rows, length=T):
    return jax.random.randint(jax.random.key(3), (rows, length), 0, V, jnp.int32)


def cached(model, params, tokens_BT, start=START):
    """Logits from a prefill of `start` tokens and one step for each of the others."""
    cache = init_cache(model, tokens_BT.shape[0], SIZE)
    first_BTV, cache = models.apply(model, params, tokens_BT[:, :start], cache=cache)

    def step(cache, token_B):
        logits_BV, cache = decode_step(model, params, token_B, cache)
        return cache, logits_BV

    cache, rest_TBV = jax.lax.scan(step, cache, tokens_BT[:, start:].T)
    return jnp.concatenate([first_BTV, jnp.moveaxis(rest_TBV, 0, 1)], axis=1), cache


def compare(rows=2, **options):
    model, params = make(**options)
    tokens_BT = tokens(rows)
    full, (steps, cache) = jax.jit(lambda p, t: (models.apply(model, p, t)[0], cached(model, p, t))
                                   )(params, tokens_BT)
    assert cache.length_B.tolist() == [T] * rows
    np.testing.assert_allclose(steps, full, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("scheme", sorted(set(SCHEMES) - LENGTH_DEPENDENT))
def test_cached_logits_equal_the_full_pass(scheme, implementation):
    """K2: at every position of the prompt and of the steps."""
    mask = {"reference": "causal", "blockwise": "causal & window(4) | prefix(3)"}[implementation]
    compare(positions=SCHEMES[scheme], attention=implementation, mask=mask)
