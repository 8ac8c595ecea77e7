"""The leak detector finds what sees the future, another document or padding, and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from tests.helpers import make_params
from tx_jax import models
from tx_jax.attention import reference
from tx_jax.config import ModelConfig
from tx_jax.leaks import LeakError, check_leaks
from tx_jax.masks import Causal, Full, Mask

SEGMENTS = jnp.array([[1, 1, 1, 1, 2, 2, 2, 0], [0, 0, 1, 1, 1, 1, 1, 1]])


def sees_the_next(q, k, v, *, q_start, **options):
    """Off by one: the mask of the query to the right."""
    return reference.attend(q, k, v, q_start=k.shape[1] - q.shape[1] + 1, **options)


def sees_all(q, k, v, *, mask, **options):
    return reference.attend(q, k, v, mask=dataclasses.replace(mask, rule=Full()), **options)


def sees_other_documents(q, k, v, *, mask, **options):
    """Segment ids dropped, padding kept out."""
    if mask.q_segments_BT is not None:
        one = jnp.minimum(mask.q_segments_BT, 1)
        mask = Mask(Causal(), one, one)
    return reference.attend(q, k, v, mask=mask, **options)


def sees_padding(q, k, v, *, mask, **options):
    """Padding takes the number of the document beside it."""
    if mask.q_segments_BT is not None:
        seg = jnp.where(mask.q_segments_BT == 0, mask.q_segments_BT[:, 2:3], mask.q_segments_BT)
        mask = Mask(Causal(), seg, seg)
    return reference.attend(q, k, v, mask=mask, **options)


def sees_a_little(q, k, v, *, mask, **options):
    """A thousandth of the mean of all values."""
    out = reference.attend(q, k, v, mask=mask, **options)
    return out + 1e-3 * jnp.mean(v, axis=1, keepdims=True)


def check(attention, segments=None, **changes):
    cfg = ModelConfig(layers=2, d_model=16, heads=2, attention=attention, **changes)
    model = models.build(cfg, 11, 8)
    tokens = jax.random.randint(jax.random.key(1), (2, 8), 0, 11)
    batch = {"tokens_BT": tokens} | ({} if segments is None else {"segments_BT": segments})
    return check_leaks(model, make_params(model), batch, jax.random.key(2))


@pytest.mark.parametrize("attention, positions", [
    ("reference", "rope"), ("reference", "cope"), ("blockwise", "t5"), ("blockwise", "cope"),
    ("jax_nn", "rope"), ("jax_nn", "fire")])
def test_nothing_is_found_where_nothing_leaks(attention, positions):
    assert check(attention, positions=positions) == 3
    assert check(attention, SEGMENTS, positions=positions) == 6


def test_half_precision_and_dropout_are_no_leak():
    assert check("auto", SEGMENTS, dtype="bfloat16", dropout=0.3) == 6


@pytest.mark.parametrize("function, segments, says", [
    ("sees_the_next", None, "sees the future"), ("sees_all", None, "sees the future"),
    ("sees_the_next", SEGMENTS, "sees the future"), ("sees_a_little", None, "sees the future"),
    ("sees_other_documents", SEGMENTS, "sees another document"),
    ("sees_padding", SEGMENTS, "sees padding")])
def test_each_leak_is_found(function, segments, says):
    with pytest.raises(LeakError, match=says) as error:
        check(f"tests.test_leaks:{function}", segments)
    assert f"--model.attention=tests.test_leaks:{function}" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_the_trainer_stops_before_the_first_step(tmp_path):
    from tx_jax.config import DataConfig, OptimConfig, TrainConfig
    from tx_jax.fit import RunConfig, fit
    (tmp_path / "text.txt").write_text("some words to learn, again and again. " * 60)
    cfg = RunConfig(ModelConfig(layers=1, d_model=16, heads=2,
                                attention="tests.test_leaks:sees_all"),
                    DataConfig(text=str(tmp_path / "text.txt"), context=16), OptimConfig(),
                    TrainConfig(steps=2, batch=2))
    with pytest.raises(LeakError, match="sees the future"):
        fit(cfg, tmp_path / "run")
    never = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, check_leaks="never"))
    assert fit(never, tmp_path / "other").finished
