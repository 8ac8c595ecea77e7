"""Needles: what prompts hold, that only the needle moves, what the model is, what reports say."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launch
from experiments import _needles, lost_in_the_middle
from tests.helpers import check_refused, check_study
from tx_jax import models
from tx_jax.config import ModelConfig, OptimConfig
from tx_jax.study.replicas import run_replicas
from tx_jax.study.report import markdown
from tx_jax.train import init_state, train_step

V = 16


def make_task(positions="rope", layers=1, layout="last", mask="causal", items=6):
    model = ModelConfig(layers=layers, d_model=16, heads=2, d_ff=16, positions=positions, mask=mask)
    return _needles.Task(model, OptimConfig(weight_decay=0.0), V, items, 2 * items, batch=8,
                         steps=4, layout=layout)


def start(model, key):
    return jax.jit(partial(models.init, model))(key)


def logits(model, params, tokens_BT):
    return np.asarray(jax.jit(lambda *x: models.apply(model, *x)[0])(params, tokens_BT))


def test_moving_the_needle_moves_only_the_needle(key):
    keys_BN, values_BN = (np.asarray(x) for x in _needles.draw(key, 5, 6, V))
    for depth in range(6):
        for x_BN in (keys_BN, values_BN):
            for found, row in zip(_needles.moved(x_BN, depth), x_BN, strict=True):
                others = list(row[1:])
                others.insert(depth, row[0])
                assert found.tolist() == others


def test_prompts_hold_the_queried_key_once(key):
    keys_BN, values_BN = _needles.draw(key, 300, 6, V)
    assert all(len(set(row)) == 6 for row in np.asarray(keys_BN).tolist())
    assert set(np.asarray(values_BN).ravel().tolist()) == set(range(V))
    for layout, before in (("last", 0), ("first_and_last", 1)):
        tokens = np.asarray(_needles.prompt(keys_BN, values_BN, keys_BN[:, 2], V, layout))
        items = tokens[:, before:before + 6]
        assert tokens.shape == (300, 7 + before) and tokens[:, before:-1].min() >= V
        assert (tokens[:, -1] == tokens[:, 0]).all() == bool(before)
        assert ((items % V == tokens[:, -1:]).sum(axis=1) == 1).all()
        np.testing.assert_array_equal(items % V, keys_BN)
        np.testing.assert_array_equal(items // V - 1, values_BN)


@pytest.mark.parametrize("regime", list(_needles.REGIMES))
def test_depths_of_training_follow_the_regime_and_nothing_else(key, regime):
    """What is asked for depends on the weights, the items do not; shares match to 5 sigma."""
    task = _needles.Task(ModelConfig(), OptimConfig(), V, 6, 12, batch=4000, steps=1)
    weights_N = _needles.depth_weights(regime, 6)
    wanted = [{"uniform": 1.0, "ends": 0.5**i + 0.5**(5 - i), "recent": 0.7**(5 - i)}[regime]
              for i in range(6)]
    np.testing.assert_allclose(weights_N, np.array(wanted) / sum(wanted), rtol=1e-6)
    batch = _needles.batch_of(task, key, jnp.asarray(weights_N))
    tokens, targets = np.asarray(batch["tokens_BT"]), np.asarray(batch["targets_BT"])
    plain = _needles.batch_of(task, key, jnp.asarray(_needles.depth_weights("uniform", 6)))
    np.testing.assert_array_equal(tokens[:, :-1], plain["tokens_BT"][:, :-1])
    at = np.argmax(tokens[:, :-1] % V == tokens[:, -1:], axis=1)
    np.testing.assert_array_equal(targets[:, -1], tokens[np.arange(4000), at] // V - 1)
    assert (targets[:, :-1] == -1).all()
    sigma = np.sqrt(weights_N * (1 - weights_N) / 4000)
    assert (np.abs(np.bincount(at, minlength=6) / 4000 - weights_N) < 5 * sigma).all()
    for asked in (tokens[:, -1], targets[:, -1]):  # depth is independent of key and value
        assert abs(np.corrcoef(at, asked)[0, 1]) < 5 / np.sqrt(4000)


def reader(seen, model, params, tokens_BT):
    """In place of `models.apply`: reads the item with the queried key, or the one in column `seen`;
    finds nothing, and says 0, where there is none.
    """
    items_BN = tokens_BT[:, :-1]
    found_BN = items_BN % V == tokens_BT[:, -1:]
    if seen is not None:
        found_BN &= (jnp.arange(items_BN.shape[1]) == seen)[None]
    value_B = jnp.sum(jnp.where(found_BN, items_BN // V - 1, 0), axis=1)
    return jax.nn.one_hot(value_B, V)[:, None], {}


@pytest.mark.parametrize("seen", [None, 0, 2, 5])
def test_evaluation_asks_the_same_at_every_depth(key, monkeypatch, seen):
    """A perfect reader is right everywhere, one that sees a single column is right there alone."""
    monkeypatch.setattr(models, "apply", partial(reader, seen))
    found = _needles.accuracy(make_task(), {}, key, 6, 6, 400)
    right = np.asarray(found["depth"])
    blind = float(found["without"])  # right by chance: the answer is value 0
    assert abs(blind - 1 / V) < 5 * np.sqrt(1 / V / 400)
    for depth in range(6):
        assert right[depth] == (1.0 if seen in (None, depth) else pytest.approx(blind, abs=1e-7))
    if seen in (None, 0):
        assert float(_needles.alone(make_task(), {}, key, 50)) == 1.0


def test_the_reader_is_the_decoder_with_summed_embeddings(key):
    """Against `DecoderLM` with a row for every pair of key and value."""
    task = make_task(layers=2)
    model = task.build(6)
    params = start(model, key)
    keys_BN, values_BN = _needles.draw(key, 3, 6, V)
    tokens_BT = _needles.prompt(keys_BN, values_BN, keys_BN[:, 1], V)
    table = [params["query_VD"][k] for k in range(V)]
    table += [params["key_VD"][k] + params["value_VD"][v] for v in range(V) for k in range(V)]
    plain = models.build(ModelConfig(**{**vars(task.model), "embeddings": "untied"}), V * (V + 1),
                         14)
    own = {name: x for name, x in params.items() if name not in ("key_VD", "value_VD", "query_VD")}
    wide = {**own, "embed_VD": jnp.stack(table),
            "head_DV": jnp.pad(params["head_DV"], ((0, 0), (0, V * V)))}
    np.testing.assert_allclose(logits(model, params, tokens_BT),
                               logits(plain, wide, tokens_BT)[..., :V], atol=2e-6)


@pytest.mark.parametrize(("positions", "layers", "layout", "same"), [
    ("none", 1, "last", True), ("none", 2, "last", False), ("rope", 1, "last", False),
    ("none", 1, "first_and_last", True)])
def test_one_layer_without_positions_cannot_see_depth(key, positions, layers, layout, same):
    task = make_task(positions, layers, layout)
    model = task.build(6)
    params = start(model, key)
    keys_BN, values_BN = _needles.draw(key, 8, 6, V)
    prompts = [_needles.prompt(_needles.moved(keys_BN, d), _needles.moved(values_BN, d),
                               keys_BN[:, 0], V, layout) for d in (0, 3, 5)]
    last_3BV = logits(model, params, jnp.concatenate(prompts))[:, -1].reshape(3, 8, V)
    spread = np.abs(last_3BV - last_3BV[0]).max()
    assert (spread < 2e-6) == same, spread


def test_under_a_prefix_mask_items_see_each_other(key):
    """Changing the last item changes the first one's logits, and the query stays unseen."""
    keys_BN, values_BN = _needles.draw(key, 1, 6, V)
    task = make_task(mask="causal | prefix({n})", layers=2)
    model = task.build(6)
    params = start(model, key)
    tokens_BT = _needles.prompt(keys_BN, values_BN, keys_BN[:, 0], V)
    base, item, query = logits(model, params, jnp.concatenate([
        tokens_BT, tokens_BT.at[0, 5].set(V), tokens_BT.at[0, 6].set((keys_BN[0, 0] + 1) % V)]))
    assert np.abs(item[0] - base[0]).max() > 1e-4
    np.testing.assert_array_equal(query[:6], base[:6])


@pytest.mark.slow
def test_a_replica_trains_as_a_plain_loop_does():
    task, weights_N = make_task(), jnp.asarray(_needles.depth_weights("ends", 6))
    replicas = {"key": jnp.stack([jax.random.key(s) for s in (3, 4)]),
                "lr": jnp.asarray([1e-2, 3e-3], jnp.float32),
                "weights": jnp.stack([weights_N] * 2)}
    result = run_replicas(_needles.program(task, 2, 5, 20), replicas, {}, 2, strategy="vmap")
    model, key = task.build(6), jax.random.key(4)
    train_key, test_key = _needles.keys_of(key)
    step = jax.jit(lambda state, batch: train_step(model, task.optim, 4, state, batch, lr=3e-3))
    state = jax.jit(lambda: init_state(model, task.optim, key))()
    for i in range(4):
        batch = _needles.batch_of(task, jax.random.fold_in(train_key, i), weights_N)
        state, metrics = step(state, batch)
        assert result.records["loss"][1, i // 2, i % 2] == pytest.approx(float(metrics["loss"]),
                                                                         rel=1e-4)
    wanted = jax.jit(lambda p: _needles.accuracy(task, p, test_key, 6, 5, 20))(state.params)
    np.testing.assert_allclose(result.records["depth"][1, -1], wanted["depth"], atol=0.051)
    params = jax.tree.map(jnp.asarray, result.carries.params)
    elsewhere = run_replicas(_needles.evaluation(task, (6, 12), 5, 20),
                             {"key": replicas["key"], "params": params}, {}, 1, strategy="vmap")
    np.testing.assert_allclose(elsewhere.records["6"]["depth"][:, 0],
                               result.records["depth"][:, -1], atol=1e-6)


def row(arm, regime, seed, curve, lr=5e-3):
    noise = 0.004 * np.random.default_rng([seed, len(arm)]).standard_normal(9)
    curve = np.array(curve) + noise
    by_items = {str(n): {"depths": [0] * 5, "accuracy": (curve - drop)[::2], "without": 0.02}
                for n, drop in ((12, 0.0), (48, 0.2 + noise[0]))}
    by_items["24"] = {"depths": [0] * 9, "accuracy": curve, "without": 0.02}
    return {"arm": arm, "axes": {"items": 24, "lr": lr, "regime": regime}, "seed": seed,
            "metrics": {"final_loss": 0.1 + lr, **_needles.shape_of_curve(curve), "without": 0.02,
                        "alone": 0.9, "by_step": [curve / 2, curve], "by_items": by_items,
                        "steps": [100, 200]},
            "seconds": 1.0, "status": "ok", "kernel": "k", "strategy": "queue", "device": "cpu",
            "versions": {"jax": "0"}, "code": "c", "data": "d", "command": f"run {arm}"}


FLAT, U = [0.95] * 9, [0.99, 0.95, 0.85, 0.7, 0.7, 0.7, 0.85, 0.95, 0.99]
RISING = np.linspace(0.5, 1.0, 9).tolist()


def test_the_verdicts_follow_the_curves():
    curves = {"uniform": FLAT, "ends": U, "recent": RISING}
    rows = [row(arm, regime, seed, curves[regime]) for regime in curves
            for arm in ("rope", "alibi") for seed in range(5)]
    rows += [row("query_first", "ends", seed, FLAT) for seed in range(5)]
    rows += [row("rope", "ends", seed, FLAT, lr=1.0) for seed in range(5)]  # worse, not kept
    made = lost_in_the_middle.report(
        lost_in_the_middle.Settings(arms=("rope", "alibi", "query_first")), rows)
    found = {v.claim: v.outcome for v in made.verdicts}

    def outcome(*words):
        return [o for c, o in found.items() if all(w in c for w in words)]

    unclear = "not resolvable with these seeds"
    assert outcome("worse than the ends", "anywhere") == [unclear]
    assert outcome("worse than the ends", "both ends") == ["agrees"]
    assert outcome("The null") == ["agrees"] and outcome("Uniform demand") == [unclear]
    assert outcome("Recent demand") == ["agrees"] and outcome("Both demands") == ["agrees"] * 3
    assert outcome("n=48 against 24") == ["agrees"] and outcome("n=24 against 12") == [unclear]
    assert outcome("lifts the middle") == ["agrees"]
    text = markdown(made)
    assert "chance is 0.016" in text and "| near both ends | 24 | rope | 0.9" in text
    assert [f.name for f in made.figures] == ["lost_positions_24", "lost_distractors_24",
                                              "lost_steps_24"]


def test_a_diverged_seed_enters_no_mean():
    rows = [row("rope", "uniform", seed, FLAT) for seed in range(5)]
    rows[2] = row("rope", "uniform", 2, [0.0] * 9) | {"status": "diverged"}
    made = lost_in_the_middle.report(lost_in_the_middle.Settings(arms=("rope",)), rows)
    text = markdown(made)
    assert "| anywhere | 24 | rope | 0.9" in text and "diverged" in text
    assert all(v.claim.count("n=48 against 24") == 0 or v.outcome == "agrees"
               for v in made.verdicts)


@pytest.mark.slow
def test_refusing_settings_starts_no_device():
    """The launcher counts devices after it; in this process they have long been started."""
    code = ("from experiments import lost_in_the_middle as study; from jax._src import xla_bridge; "
            "study.refuse(study.Settings(arms=('rope', 'learned', 't5', 'fire', 'prefix'))); "
            "assert not xla_bridge.backends_are_initialized()")
    subprocess.run([sys.executable, "-c", code], cwd=Path(launch.__file__).parent, check=True)


@pytest.mark.slow
def test_from_flag_to_report_and_again(capsys, tmp_path):
    check_study("lost_in_the_middle", ["--arms=rope,query_first", "--regimes=ends,recent",
                                       "--strategy=vmap"], tmp_path, capsys,
                said="8 cells, 0 finished before, 8 to run",
                shown=("lifts the middle", "| near the end | 10 | query_first |"))


@pytest.mark.parametrize(("flag", "words"), [
    ("--regimes=end", "did you mean 'ends'"), ("--arms=ropee", "did you mean 'rope'"),
    ("--vocab=20", "needs more than --vocab=20 different keys"),
    ("--items=4", "have no 5 depths to put the needle at"),
    ("--steps=7", "--steps=7 is not a multiple of --every=5"),
    ("--arms=learned(length=8)", "has 8 rows")])
def test_a_mistake_is_one_sentence(flag, words, capsys):
    check_refused("lost_in_the_middle", [flag], words, capsys)
