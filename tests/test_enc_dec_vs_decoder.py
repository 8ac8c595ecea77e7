"""The study of architectures: tasks, what each shape sees, matched depths, report and flags."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _seq_tasks, enc_dec_vs_decoder
from experiments._encdec_report import make_report
from experiments._encdec_settings import ARMS, Settings
from tests.helpers import check_refused, check_study
from tx_jax import forms
from tx_jax.study.report import markdown

TINY = Settings(layers=3, d_model=8, heads=2, length=4, symbols=4, steps=100, early=50, seeds=5,
                lrs=(1e-3,))


def test_targets_are_what_the_tasks_say():
    x = np.array(_seq_tasks.draw("copy", jax.random.key(0), 6, 5, 4)[0])
    for task, y in (("copy", x), ("reverse", x[:, ::-1]), ("sort", np.sort(x, axis=1)),
                    ("shift", (x + x[:, -1:]) % 4)):
        found_x, found_y = _seq_tasks.draw(task, jax.random.key(0), 6, 5, 4)
        np.testing.assert_array_equal(found_x, x)
        np.testing.assert_array_equal(found_y, y)


@pytest.mark.parametrize("arm", ["encdec", "prefix", "causal"])
def test_a_shape_sees_the_source_as_its_name_says_and_no_later_target(arm):
    """Which inputs reach the logits of the first source token and of each target."""
    model = TINY.build(arm, 2)
    params = jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(
        x.shape), jax.jit(lambda k: forms.init(model, k))(jax.random.key(0)))
    x, y = _seq_tasks.draw("copy", jax.random.key(1), 1, 4, 4)

    @jax.jit
    def logits(x, y):
        batch = _seq_tasks.make_batch(model, ARMS[arm].prefix, x, y, 4)
        return forms.logits(model, params, batch)[0]

    before = logits(x, y)
    for j in range(4):
        moved = np.any(logits(x.at[0, j].set((x[0, j] + 1) % 4), y) != before, axis=-1)
        assert moved[-4:].all(), "every target sees every token of the source"
        if arm != "encdec":
            assert moved[:j].all() == (arm == "prefix" or j == 0)
        if j < 3:  # the last target is never an input
            moved = np.any(logits(x, y.at[0, j].set((y[0, j] + 1) % 4)) != before, axis=-1)[-4:]
            assert moved.tolist() == [t > j for t in range(4)]


def test_only_the_target_has_targets_and_every_shape_has_the_same():
    x, y = _seq_tasks.draw("reverse", jax.random.key(1), 3, 4, 4)
    for arm in ("encdec", "causal"):
        batch = _seq_tasks.make_batch(TINY.build(arm, 1), False, x, y, 4)
        kept = batch["targets_BT"][batch["targets_BT"] >= 0].reshape(3, 4)
        np.testing.assert_array_equal(kept, y)


def test_depths_match_the_budgets():
    """7 L / 3 layers by parameters; 7 L / 6 by operations is a test of budgets."""
    assert [TINY.layers_of(arm) for arm in ("encdec", "prefix", "causal")] == [3, 7, 7]


def row(arm, task, seed, steps, early):
    return {"part": "sequences", "arm": arm, "axes": {"task": task, "lr": 1e-3}, "seed": seed,
            "metrics": {"steps_to_90": steps, "early_loss": early, "mean_loss": early,
                        "last_loss": 0.0, "exact": 1.0, "curve": [0.5, 1.0]},
            "seconds": 1.0, "compile_seconds": 1.0, "device": "cpu x2", "versions": {"jax": "0"},
            "kernel": "reference", "strategy": "queue", "settings": {}, "code": "c", "data": "d",
            "status": "ok", "command": f"run {arm}"}


def outcomes(levels):
    noise = np.random.default_rng(0)
    rows = [row(arm, task, seed, levels[arm] * noise.uniform(0.95, 1.05),
                levels[arm] / 100 * noise.uniform(0.95, 1.05))
            for task in ("shift", "reverse") for arm in ARMS for seed in range(5)]
    text = markdown(make_report(TINY, rows))
    return text, [line.split("**")[1] for line in text.splitlines()
                  if "of the operations)" in line]


@pytest.mark.slow
def test_verdicts_follow_the_rows():
    t5 = {"encdec": 10.0, "encdec_shared": 20.0, "prefix": 40.0, "prefix_flops": 40.0,
          "causal": 80.0, "causal_flops": 80.0}
    text, found = outcomes(t5)
    assert found == ["agrees"] * 12 and "| 3 + 3 |" in text
    assert outcomes({arm: 90 - level for arm, level in t5.items()})[1] == ["differs"] * 12
    assert set(outcomes(dict.fromkeys(t5, 50.0))[1]) == {"not resolvable with these seeds"}


def test_a_run_that_ended_early_counts_with_its_last_loss():
    records = {"exact": np.array([0.2, 0.95, 1.0, np.nan]), "step": np.arange(4),
               "loss": np.repeat([2.0, 1.0, 0.1, np.nan], 50).reshape(4, 50)}
    found = enc_dec_vs_decoder._metrics(Settings(steps=200, early=100), records, 3)
    assert found["steps_to_90"] == 100 and found["early_loss"] == 1.0
    assert found["mean_loss"] == pytest.approx((2 + 1 + 0.1 + 0.1) / 4)
    assert found["curve"] == [0.2, 0.95, 1.0]


@pytest.mark.slow
def test_from_flag_to_report_and_again(capsys, tmp_path):
    check_study("enc_dec_vs_decoder", [], tmp_path, capsys,
                said="4 cells, 0 finished before, 4 to run",
                shown=("| causal | 2 | parameters |",))


@pytest.mark.parametrize(("flag", "words"), [
    ("--arms=encdec,decoder", "--arms names 'decoder'"), ("--tasks=shfit", "'shift'"),
    ("--early=500", "--early=500 lies beyond"), ("--heads=3", "not divisible")])
def test_a_mistake_is_one_sentence(flag, words, capsys):
    check_refused("enc_dec_vs_decoder", [flag], words, capsys)
