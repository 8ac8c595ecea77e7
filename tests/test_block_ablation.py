"""The block study: arms are what they are called, two rounds of training, claims, report, flags."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _ablation_claims as claims
from experiments import _ablation_start as start
from experiments import _ablation_training as training
from experiments import block_ablation as study
from experiments._ablation_arms import ARMS, FAMILIES
from experiments._ablation_settings import Settings, Start
from tests.helpers import check_refused, check_study
from tx_jax import letters, models
from tx_jax.study.ledger import Measured
from tx_jax.study.report import markdown
from tx_jax.study.verdicts import judge_all

EVERY = Settings(arms=tuple(ARMS))


def parameters(arm):
    model = models.build(EVERY.model(arm), 65, EVERY.context)
    return letters.count(jax.eval_shape(lambda: models.init(model, jax.random.key(0))),
                         embedding=False)


def test_every_arm_belongs_to_a_family_and_differs_from_its_baseline():
    assert {arm for names in FAMILIES.values() for arm in names} == set(ARMS)
    for base, *others in FAMILIES.values():
        seen = [(EVERY.model(arm), EVERY.optim(arm), ARMS[arm].few, ARMS[arm].unit)
                for arm in (base, *others)]
        assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("arm", ["attention_only_3x", "narrow_deep", "swiglu", "geglu", "reglu"])
def test_arms_said_to_match_have_as_many_parameters(arm):
    assert parameters(arm) == pytest.approx(parameters("base"), rel=0.01)


def test_heads_have_equal_parameters_and_no_rotation():
    heads = [arm for arm in ARMS if arm.startswith("heads_")]
    assert len({parameters(arm) for arm in heads}) == 1
    assert {EVERY.model(arm).positions for arm in heads} == {"learned"}
    assert [EVERY.model(arm).head_width for arm in ("heads_8", "key_half", "key_quarter")] == [
        8, 4, 2]


def test_cells_pair_seeds_and_an_arm_trains_as_one_group():
    settings = Settings(arms=("base", "swiglu"), seeds=3, lrs=(1e-3, 1e-2),
                        start=Start(seeds=2, depths=(2, 4)))
    found = study.cells(settings)
    assert [(c.arm, c.axis["lr"], c.seed) for c in found if c.part == "tuning"] == [
        (arm, lr, 0) for arm in settings.arms for lr in settings.lrs]
    assert [(c.arm, c.seed) for c in found if c.part == "training"] == [
        (arm, seed) for arm in settings.arms for seed in range(3)]
    assert len({study.group(c) for c in found if c.part in ("tuning", "training")}) == 2
    assert sum(c.part == "rank" for c in found) == 2 * len(start.RANK)
    assert sum(c.part == "gradient" for c in found) == 2 * 2 * len(start.GRADIENT)
    other = study.cells(Settings(arms=("base",), seeds=3, lrs=(1e-3,)))
    both = [{c.settings for c in cells if c.part == "training"} for cells in (found, other)]
    assert not both[0] & both[1], "the grid decides what is trained"


def test_the_best_rate_is_the_lowest_and_never_one_that_diverged():
    def seen(tuning, status="ok"):
        return Measured({"tuning": tuning}, 0.0, status=status)

    found = {1e-3: seen(2.0), 1e-2: seen(1.8), 3e-2: seen(1.0, "diverged"), 1e-1: seen(1.9)}
    assert training.best(found) == 1e-2
    assert training.best({1e-3: seen(float("nan"), "diverged"), 1e-2: seen(9.0)}) == 1e-2


def test_little_text_is_read_and_no_more_and_halves_do_not_meet(monkeypatch):
    settings = Settings(few=100, context=16, batch=4, steps=30, seeds=2)
    prepared = SimpleNamespace(train=SimpleNamespace(tokens=lambda: np.arange(5000)),
                               validation=SimpleNamespace(tokens=lambda: np.arange(2000)))
    monkeypatch.setattr(training, "window_starts", lambda prepared, context, batch, steps, seed:
                        np.arange(steps * batch).reshape(steps, batch) * 37 + seed)
    task = SimpleNamespace(steps=30, build=lambda: None)

    def bench_of(arm):
        return training.Bench(settings, arm, None, prepared, task, None)

    for arm, length in (("few", 100), ("base", 5000)):
        bench = bench_of(arm)
        starts = bench.starts()
        assert len(bench.tokens()) == length and starts.shape == (2, 30, 4)
        assert starts.min() >= 0 and starts.max() + settings.context < length
    halves = []
    monkeypatch.setattr(training.train, "evaluate", lambda model, params, batches: {
        "loss": halves.append(np.asarray(batches[0]["targets_BT"])) or 0.0})
    bench_of("base").score(None)
    tuning, test = halves
    assert tuning.shape == test.shape == (settings.scored, 16)
    assert tuning[:, 0].max() < test[:, 0].min() and test.max() < 2000


@pytest.mark.slow
def test_branches_at_unit_gain_are_those_of_the_same_key():
    """Only the last matrix of every branch is larger, by the root of the number of branches."""
    settings = Settings(arms=("pre_layer", "post_layer", "post_unit"), d_model=16, heads=2)
    seen = {}
    for arm in ("post_layer", "post_unit"):
        task = training._char_lm.Task(settings.model(arm), settings.optim(arm), 11, 8, 10)
        program = training._char_lm.program(task, 10)
        if ARMS[arm].unit:
            program = training.at_unit_gain(program, settings.deep)
        seen[arm] = jax.jit(program.init)({"key": jax.random.key(0)}, {}).params
    for path, w in jax.tree_util.tree_leaves_with_path(seen["post_unit"]):
        plain = seen["post_layer"]
        for part in path:
            plain = plain[part.key]
        gain = 12**0.5 if path[-1].key in ("o_NHD", "down_FD") else 1.0
        np.testing.assert_allclose(w, gain * plain, rtol=1e-6)


@pytest.mark.slow
def test_blocks_are_shared_by_all_arms_and_ranks_begin_alike():
    settings = Settings(arms=("base", "swiglu"), d_model=16, heads=2,
                        start=Start(seeds=2, layers=3, tokens=8))
    context = SimpleNamespace(cache={}, advance=lambda share: None)
    seen = {}
    for arm in ("attention", "pre_block"):
        members = [c for c in start.cells(settings, "rank") if c.arm == arm]
        seen[arm] = np.array([m.metrics["ratio"] for _, m in start.run(settings, members, context)])
    assert len(context.cache) == 1 and seen["attention"].shape == (2, 4)
    np.testing.assert_array_equal(seen["attention"][:, 0], seen["pre_block"][:, 0])
    assert (seen["attention"][:, 3] < seen["pre_block"][:, 3]).all()
    again = start.draw_blocks(start.config({}, 3, 16, 2, mask="full"),
                              jnp.stack([jax.random.key(1)]), 8)
    first = context.cache[next(iter(context.cache))]
    np.testing.assert_array_equal(again[1][0], first[1][1], "a seed alone draws the same")


def row(part, arm, seed, axes, metrics):
    metrics = json.loads(json.dumps(metrics, sort_keys=True))  # as a ledger gives it back
    return {"part": part, "arm": arm, "seed": seed, "axes": axes, "metrics": metrics,
            "status": "ok", "seconds": 1.0, "kernel": "reference", "strategy": "queue",
            "device": "cpu", "versions": {"jax": "0"}, "code": "c" * 12, "data": "d" * 12,
            "command": f"run {arm}"}


# Nats above the baseline, as the papers have it.
COST = {"no_residual": 1.0, "post_unit_cold": 0.4, "post_unit": 0.1, "no_norm": 0.2,
        "attention_only": 0.1, "ffn_1x": 0.08, "ffn_2x": 0.04, "ffn_8x": -0.03, "swiglu": -0.05,
        "geglu": -0.05, "heads_1": 0.06, "heads_32": 0.05, "key_quarter": 0.08, "key_half": 0.03,
        "depth_half": 0.1, "depth_double": -0.05, "smoothing": 0.03, "few_dropout_1": -0.1,
        "few_dropout_3": -0.05}


def as_published(settings):
    noise, rows = np.random.default_rng(0), []

    def near(value):
        return float(value + noise.normal(0, 0.001))

    for arm in settings.arms:
        for seed in range(settings.seeds):
            rows.append(row("training", arm, seed, {}, {
                "loss": near(2 + COST.get(arm, 0.0)), "tuning": near(2), "lr": 1e-2,
                "train_loss": near(2), "curve": [3, 2], "parameters": 1000,
                "flops_per_token": 1e6}))
        rows += [row("tuning", arm, 0, {"lr": lr}, {"tuning": near(2 + abs(np.log(lr / 1e-2))),
                                                    "loss": 2.0}) for lr in settings.lrs]
    for arm in start.RANK:
        for seed in range(settings.start.seeds):
            alone = arm in ("attention", "attention_pre_norm", "attention_post_norm")
            ratio = ([0.99, 0.8 + near(0), 0.02 + near(0), 1e-6] if alone else
                     [0.99, 0.9 + near(0), 0.6, 0.5 + near(0)])
            rows.append(row("rank", arm, seed, {}, {"ratio": ratio}))
    for arm, power in (("pre", -0.5), ("post", 0.0), ("pre_scaled", 0.0)):
        for layers in settings.start.depths:
            rows += [row("gradient", arm, seed, {"layers": layers}, {
                "first": near(0.7), "last": near(layers**power)})
                for seed in range(settings.start.seeds)]
    return rows


def outcomes(rows):
    parts = {p: [r for r in rows if r["part"] == p] for p in ("training", "rank", "gradient")}
    made = claims.trained(parts["training"]) + claims.rank(parts["rank"]) + claims.gradient(
        parts["gradient"])
    return {v.claim: v.outcome for v in judge_all(made)}


def test_claims_agree_with_rows_made_as_published_and_turn_with_them():
    settings = Settings(arms=tuple(ARMS), start=Start(layers=3))
    rows = as_published(settings)
    found = outcomes(rows)
    assert len(found) == len(claims.TRAINED) + 5 + 3
    assert {claim: o for claim, o in found.items() if o != "agrees"} == {}
    for r in rows:
        if r["part"] == "training" and r["arm"] in ("attention_only_3x", "swiglu"):
            r["metrics"]["loss"] += 0.2
        if r["part"] == "gradient" and r["arm"] == "post":
            r["metrics"]["last"] /= r["axes"]["layers"]
    turned = [claim for claim, o in outcomes(rows).items() if o == "differs"]
    assert [claim.split(" (")[0] for claim in turned] == [
        "Their parameters are as well spent elsewhere", "SwiGLU is better at equal parameters",
        "Post-LN: it does not depend on depth", "It falls faster with Pre-LN than with Post-LN"]


def test_what_small_models_cannot_say_is_never_judged():
    rows = as_published(EVERY)
    found = claims.beyond([r for r in rows if r["part"] == "training"])
    assert len(found) == len(claims.BEYOND)
    assert {v.outcome for v in found} == {"not resolvable at this size"}


def test_the_report_shows_every_family_the_grid_and_every_figure():
    settings = Settings(arms=tuple(ARMS), start=Start(layers=3))
    made = study.STUDY.report(settings, as_published(settings))
    text = markdown(made)
    assert all(f"### Held-out loss: {family}" in text for family in FAMILIES)
    assert "| no_residual | 0.01 | 2.999" in text and "not resolvable at this size" in text
    assert "| base | " in text.partition("### Learning rates tried")[2]
    assert [f.name for f in made.figures] == ["losses", "rank", "gradient"]
    assert all(f.png[:4] == b"\x89PNG" for f in made.figures)


def test_a_loss_of_nan_is_told_and_chosen_by_nobody():
    settings = Settings(arms=("base", "swiglu"), parts=("training",))
    rows = [r for r in as_published(settings) if r["part"] in ("training", "tuning")]
    for r in rows:
        if r["arm"] == "swiglu" and (r["seed"] == 1 or r["axes"].get("lr") == 1e-2):
            r["status"], r["metrics"]["loss"], r["metrics"]["tuning"] = ("diverged", None, None)
    text = markdown(study.STUDY.report(settings, rows))
    assert "(1 diverged)" in text and "nan" in text.partition("### Learning rates tried")[2]


def test_single_seeds_and_absent_parts_do_not_break_the_report():
    settings = Settings(seeds=1, arms=("base", "smoothing"), parts=("training",))
    rows = [r for r in as_published(settings) if r["part"] == "training"]
    text = markdown(study.STUDY.report(settings, rows))
    assert "no CI" in text and "### Before training" not in text


@pytest.mark.slow
def test_from_flag_to_report_and_again(capsys, tmp_path):
    check_study("block_ablation", [], tmp_path, capsys,
                said="0 finished before",
                shown=("### Held-out loss: feed-forward", "gradient of W_down"))


@pytest.mark.parametrize(("flag", "words"), [
    ("--arms=base,swigl", "did you mean 'swiglu'"),
    ("--arms=base,heads_1", "without 'heads_8'"),
    ("--arms=heads_8,heads_32", "do not divide --d_model=16"),
    ("--layers=3 --arms=base,depth_half", "make that even"),
    ("--few=32", "no longer than a row"),
    ("--parts=training,ranks", "did you mean 'rank'"),
    ("--steps=15", "not a multiple of 10")])
def test_a_mistake_is_one_sentence(flag, words, capsys):
    check_refused("block_ablation", flag.split(), words, capsys)
