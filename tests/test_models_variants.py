"""Variants of attention and scores inside the model: they train, leak nothing, and refuse."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.test_models import CFG, change, run, tokens, value_and_grads
from tx_jax import models, plugins
from tx_jax.config import ModelConfig
from tx_jax.errors import UserError
from tx_jax.leaks import check_leaks

pytestmark = pytest.mark.slow

SEGMENTS = jnp.array([[1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0, 0], [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]])


@pytest.mark.parametrize("variant", plugins.names("tx_jax.attention.variants"))
def test_each_variant_changes_the_model_and_leaks_nothing(variant):
    cfg = change(variant=variant)
    (logits, aux), params = run(cfg, tokens(), trace=True)
    plain, _ = run(CFG, tokens(), {n: p for n, p in params.items()})[0]
    assert logits.shape == plain.shape and not aux
    assert float(jnp.max(jnp.abs(logits - plain))) > 1e-4
    model = models.build(cfg, 11, 12)
    assert check_leaks(model, params, {"tokens_BT": tokens(), "segments_BT": SEGMENTS}) == 6
    _, grads = value_and_grads(cfg, params, tokens())
    moved = {name for name, g in grads["blocks"]["attention"].items()
             if any(bool(jnp.any(x != 0)) for x in jax.tree.leaves(g))}
    assert moved >= {"v_DKH", "o_NHD"} and ("q_DNH" in moved) == (variant != "hard")


@pytest.mark.parametrize("changes, says", [
    ({"variant": "sigmoyd"}, "did you mean 'sigmoid'"),
    ({"variant": "linear", "positions": "alibi"}, "takes no bias"),
    ({"variant": "sigmoid", "attention": "blockwise"}, "takes no implementation"),
    ({"variant": "differential", "kv_heads": 1}, "pairs heads")])
def test_what_a_variant_refuses_is_said_at_once(changes, says):
    with pytest.raises(UserError, match=says):
        models.build(dataclasses.replace(ModelConfig(layers=1, d_model=16, heads=4), **changes),
                     11, 12)


@pytest.mark.parametrize("score", plugins.names("tx_jax.attention.scores"))
def test_every_score_runs_by_tiles(score):
    """The same logits whichever implementation; tiles are the whole here, as lengths are small."""
    cfg = change(score=score, attention="reference")
    (expected, _), params = run(cfg, tokens())
    (got, _), _ = run(dataclasses.replace(cfg, attention="blockwise"), tokens(), params)
    assert float(jnp.max(jnp.abs(got - expected))) < 1e-5
