"""The length study: same targets at every length, protocols against plain loops, claims, flags."""

import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _extrapolation_claims as claims
from experiments import _extrapolation_eval as scores
from experiments import length_extrapolation as study
from experiments._extrapolation_models import ARMS, METHODS
from experiments._extrapolation_settings import Extend, Settings
from tests.helpers import check_refused, check_study
from tx_jax import models
from tx_jax.config import ModelConfig
from tx_jax.errors import UserError
from tx_jax.positions import make_encoding
from tx_jax.study.report import markdown
from tx_jax.study.verdicts import judge_all

LENGTHS = (8, 10, 16, 32)  # their least common multiple is 160
SIZE = 160


def part(*ends):
    return SimpleNamespace(n_tokens=ends[-1], ends=lambda: np.array(ends))


def test_regions_stay_in_their_document_and_half():
    ends, first, last = (500, 700, 1400, 2000), 400, 1600
    found = scores.regions(part(*ends), (0.2, 0.8), LENGTHS, 10_000)
    assert found.tolist() == [532, 732, 892, 1052, 1212, 1432]
    for start in found:
        begin = max(e for e in (0, *ends) if e <= start)
        end = min(e for e in ends if e > start)
        # The longest window before the first target, and the last target, are of one document.
        assert start - 32 >= max(begin, first) and start + SIZE <= min(end, last)
    assert np.diff(found).min() >= SIZE
    assert scores.regions(part(*ends), (0.2, 0.8), LENGTHS, 2 * SIZE).tolist() == [532, 1432]
    assert len(scores.regions(part(*ends), (0.2, 0.8), LENGTHS, 1)) == 1


def test_a_text_too_short_for_the_lengths_is_one_sentence():
    with pytest.raises(UserError, match="no held-out document has 192 tokens in a row"):
        scores.regions(part(150, 300), (0.0, 1.0), LENGTHS, 1000)


def targets(starts, length, last=None):
    """Indices of the scored targets of windows, by a plain loop."""
    return [s + 1 + t for s in starts for t in range(length)[slice(None if last is None else -last,
                                                                   None)]]


def test_every_length_scores_the_same_targets():
    region_R = np.array([1000, 5000])
    for T in LENGTHS:
        seen = targets(scores.window_starts(region_R, SIZE, T), T)
        assert seen == [r + i for r in region_R for i in range(SIZE)]
    first = targets(scores.sliding_starts(region_R, SIZE, 8, 2, 12), 8, last=2)
    assert len(first) == 24 and len(set(first)) == 24
    assert set(first) <= {r + i for r in region_R for i in range(SIZE)}
    for T in LENGTHS[1:]:
        assert targets(scores.sliding_starts(region_R, SIZE, T, 2, 12), T, last=2) == first
    assert len(scores.sliding_starts(region_R, SIZE, 8, 2, 10**6)) == 2 * SIZE // 2


def test_rows_are_at_most_twice_as_wide_as_their_windows():
    assert scores.widths((64, 80, 96, 128, 256, 512, 1024)) == {
        64: 128, 80: 128, 96: 128, 128: 128, 256: 512, 512: 512, 1024: 1024}
    assert scores.widths((8,)) == {8: 8}


def test_batches_hold_every_window_once(monkeypatch):
    monkeypatch.setattr(scores, "_AT_ONCE", 64)
    plans = {"test": scores.plan(np.array([1000]), SIZE, LENGTHS, 2, 7)}
    arrays, labels = scores.batches(plans)
    for protocol, by_length in plans["test"].items():
        for T, starts in by_length.items():
            kept = [s for width, found in labels.items() for i, label in enumerate(found)
                    if label == ("test", protocol, T)
                    for s, w in zip(arrays[width]["starts"][i], arrays[width]["weight"][i],
                                    strict=True) if w == 1]
            assert kept == starts.tolist()
    assert all(set(np.unique(a["weight"])) <= {0, 1} for a in arrays.values())


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["alibi", "rope_dynamic_ntk(trained=8)"])
def test_losses_are_those_of_single_windows(positions, monkeypatch):
    """Shared rows, filled-up batches and sums against one unpadded window after the other."""
    monkeypatch.setattr(scores, "_AT_ONCE", 64)
    model = models.build(ModelConfig(layers=1, d_model=8, heads=2, positions=positions), 11, 32)
    params = jax.tree.map(lambda x: 3 * x, models.init(model, jax.random.key(0)))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, 300), jnp.uint16)
    plans = {"test": scores.plan(np.array([100]), SIZE, (8, 10), 2, 5)}
    arrays, labels = scores.batches(plans)
    assert list(arrays) == ["10"]
    loss_sums = jax.jit(scores.loss_sums, static_argnums=(0, 4))
    sums = {width: np.stack([loss_sums(model, params, tokens, jax.tree.map(
        lambda x, i=i: jnp.asarray(x[i]), some), int(width)) for i in range(len(labels[width]))])
        for width, some in arrays.items()}
    found = scores.losses(scores.by_place(sums, labels, plans)["test"], 2)
    apply = jax.jit(lambda p, t: models.apply(model, p, t)[0])
    for protocol, last in (("windows", None), ("sliding", 2)):
        for T, starts in plans["test"][protocol].items():
            nats = []
            for s in starts:
                log_p = jax.nn.log_softmax(apply(params, tokens[None, s:s + T].astype(jnp.int32)))
                own = [-float(log_p[0, t, int(tokens[s + t + 1])]) for t in range(T)]
                nats += own if last is None else own[-last:]
            assert found[protocol][str(T)] == pytest.approx(np.mean(nats), abs=2e-5)


def test_every_scheme_and_method_is_named_in_full():
    settings = Settings()
    for text in ARMS.values():
        make_encoding(settings.model(text).positions)
    for text in METHODS.values():
        filled = settings.model(text, factor=4, alpha=0.5, beta=2.0).positions
        assert "rope" in filled or "yarn" in filled or "llama3" in filled
        make_encoding(filled)
    assert settings.model(ARMS["learned"]).positions == "learned(length=1024)"
    assert math.lcm(*settings.lengths) == settings.region() == 15360


def test_the_lengths_of_the_extension_divide_a_region_too():
    settings = Settings(factors=(1.0, 1.5), extend=Extend(factors=(2, 4)))
    assert settings.lengths == (64, 96) and settings.scored == (64, 96, 128, 256)
    assert settings.region() == 768


def test_bins_end_with_the_window():
    assert scores.bins(np.arange(7.0), 3).tolist() == [2.0, 5.0]


def test_cells_pair_seeds_and_know_what_decides_them():
    own = ("schemes", "extension")
    found = study.cells(Settings(parts=own, seeds=2, arms=("rope", "alibi"), lrs=(1e-3, 1e-2)))
    assert [(c.arm, c.axis["lr"], c.seed) for c in found if c.part == "schemes"] == [
        (a, lr, s) for a in ("rope", "alibi") for lr in (1e-3, 1e-2) for s in (0, 1)]
    assert len({study.group(c) for c in found}) == 3
    other = study.cells(Settings(parts=own, seeds=2, arms=("rope",), extend=Extend(lr=1e-3)))
    assert {c.settings for c in found if c.part == "schemes"} == {
        c.settings for c in other if c.part == "schemes"}
    assert not {c.settings for c in found if c.part == "extension"} & {
        c.settings for c in other if c.part == "extension"}


def row(part, arm, seed, axes, metrics):
    metrics = json.loads(json.dumps(metrics, sort_keys=True))  # as a ledger gives it back
    return {"part": part, "arm": arm, "seed": seed, "axes": axes, "metrics": metrics,
            "status": "ok", "seconds": 1.0, "kernel": "reference", "strategy": "queue",
            "device": "cpu", "versions": {"jax": "0"}, "code": "c" * 12, "data": "d" * 12,
            "command": f"run {arm}"}


def as_published(settings):
    """Rows that behave as in the papers, and differ a little by seed."""
    noise, rows = np.random.default_rng(0), []
    slope = {"none": 0.1, "sinusoidal": 0.8, "learned": 0.9, "rope": 0.3, "t5": 0.1,
             "alibi": -0.01, "kerple": 0.0, "fire": -0.1}

    def near(value):
        return float(value + noise.normal(0, 0.001))

    for arm in settings.arms:
        for seed in range(settings.seeds):
            level = 1.8 + 0.4 * (arm == "none") + near(0)
            windows, sliding = ({str(T): near(level + early * slope[arm] * max(
                0, T / 64 - (1.6 if arm == "rope" else 1))) for T in settings.lengths}
                for early in (1.0, 0.05 if arm == "alibi" else 1.0))
            rows.append(row("schemes", arm, seed, {"lr": 5e-3}, {
                "windows": windows, "sliding": sliding, "tuning": level,
                "position": [near(2)] * (settings.lengths[-1] // 16), "train_loss": level,
                "curve": [2, 1]}))
    zero = {"none": 4.0, "pi": 3.0, "ntk": 2.5, "dynamic_ntk": 2.6, "by_parts": 2.0, "yarn": 1.95,
            "llama3": 2.1}
    for method, far in zero.items():
        for seed in range(settings.seeds):
            seen = {"64": near(1.8), "256": near(far)}
            metrics = {"windows": seen, "sliding": seen, "ramp": "1:4",
                       "ramps": {"1:32": near(3), "1:4": near(2)}}
            if method in settings.extend.tuned:
                end = {"none": 1.9, "pi": 1.82, "ntk": 1.86, "yarn": 1.8}.get(method, 1.81)
                metrics |= {"tuned": near(end), "curve": [far, 2.0, 1.9, 1.85, end]}
            rows.append(row("extension", method, seed, {"factor": 4}, metrics))
    return rows


def test_claims_agree_with_rows_made_as_published_and_turn_with_them():
    settings = Settings(seeds=5, arms=tuple(ARMS)[:8])
    rows = as_published(settings)
    parts = [[r for r in rows if r["part"] == p] for p in ("schemes", "extension")]
    made = claims.schemes(parts[0], settings) + claims.extension(parts[1], settings)
    assert len(made) == 22
    assert {v.outcome for v in judge_all(made)} == {"agrees"}
    for r in parts[1]:
        m = r["metrics"]
        if r["arm"] == "pi":  # as measured at this size: behind plain fine-tuning
            m["sliding"]["256"], m["tuned"] = m["sliding"]["256"] + 2.0, m["tuned"] + 0.2
    turned = judge_all(claims.extension(parts[1], settings))
    assert {v.claim.split(" (")[0]: v.outcome for v in turned if v.outcome != "agrees"} == {
        "Untuned, PI is better than nothing": "differs",
        "pi is recovered by a short fine-tuning": "differs",
        "PI is ahead of plain fine-tuning": "differs",
        "Once tuned, PI is ahead of NTK-aware": "differs"}


def test_the_report_shows_every_arm_length_and_figure():
    settings = Settings(seeds=5, arms=tuple(ARMS)[:8])
    made = study.STUDY.report(settings, as_published(settings))
    text = markdown(made)
    assert "| scheme | 64 | 80 | 96 | 128 | 256 | 512 | 1024 |" in text
    assert "| 1:4 | 1.99" in text and "chosen" in text and "22 claims" in text
    assert [f.name for f in made.figures] == [
        "heat_windows", "heat_sliding", "schemes_windows", "schemes_sliding", "positions",
        "fine_tuning"]
    assert all(f.png[:4] == b"\x89PNG" for f in made.figures)
    rise = next(t for t in made.tables if t.title == "Loss minus that at 64")
    assert len(rise.rows) == 2 * len(settings.arms)


def test_single_seeds_and_absent_parts_do_not_break_the_report():
    settings = Settings(seeds=1, arms=("alibi",), factors=(1.0, 2.0))
    rows = [r for r in as_published(settings) if r["part"] == "schemes"]
    text = markdown(study.STUDY.report(settings, rows))
    assert "no CI" in text and "zero-shot" not in text


@pytest.mark.slow
def test_from_flag_to_report_and_again(capsys, tmp_path):
    check_study("length_extrapolation", ["--steps=10", "--parts=schemes,extension", "--arms=rope",
                                         "--factors=1,4", "--strategy=map",
                                         "--extend.methods=by_parts", "--extend.tuned=by_parts"],
                tmp_path, capsys,
                said="4 cells, 0 finished before, 4 to run",
                shown=("One checkpoint under other positions", "After fine-tuning"))


@pytest.mark.parametrize(("flag", "words"), [
    ("--arms=rope,alibbi", "did you mean 'alibi'"),
    ("--factors=2,4", "put 1 first"),
    ("--factors=1,1.3", "gives 41.6 tokens"),
    ("--stride=16", "at most a quarter"),
    ("--extend.ramps=1-32", "write alpha:beta"),
    ("--extend.ramps=4:1", "alpha below beta"),
    ("--extend.steps=5", "not a multiple of --extend.every=2"),
    ("--extend.methods=pj", "did you mean 'pi'")])
def test_a_mistake_is_one_sentence(flag, words, capsys):
    check_refused("length_extrapolation", [flag], words, capsys)
