"""The mask study: every arm computes the same and skips what it says; what the report says."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _masked, masking
from experiments._masking_report import ARMS
from tests.helpers import check_refused, check_study
from tx_jax.masks import Mask, parse_mask
from tx_jax.study.report import markdown

pytestmark = pytest.mark.slow

TINY = masking.Settings(masks=("causal", "documents"), lengths=(32,), tile=8, window=8,
                        pair_lengths=(8,), heads=2, head_dim=4, rounds=2)


def inputs(length=32):
    return [jax.random.normal(key, (1, length, 2, 4))
            for key in jax.random.split(jax.random.key(3), 4)]


@pytest.mark.parametrize("name", ["causal", "documents", "global"])
def test_every_arm_computes_the_reference(name):
    length = 128 if name == "documents" else 32
    mask, given = masking.make_mask(name, length, 8), inputs(length)
    if name == "documents":
        mask = Mask(mask.rule, *[jnp.repeat(jnp.arange(1, 5, dtype=jnp.int32), 32)[None]] * 2)
    functions = {**masking.arms(TINY, "tiles"), "select": _masked.select}
    if name == "causal":
        functions |= masking.arms(TINY, "pairs")
    wanted = jax.jit(masking._gradients(masking._project("reference")))(mask, *given)
    for arm, function in functions.items():
        found = jax.jit(masking._gradients(function))(mask, *given)
        assert masking._error(arm, found, wanted, "float32") < 5e-6


def test_a_wrong_arm_is_not_timed():
    mask, (q, k, v, _) = masking.make_mask("causal", 32, 8), inputs()
    right = masking._project("reference")(mask, q, k, v)
    wrong = _masked.add(Mask(parse_mask("full")), q, k, v)
    with pytest.raises(ValueError, match="'add' differs from the reference"):
        masking._error("add", wrong, right, "float32")


@pytest.mark.parametrize(("visit", "clean"), [("all", False), ("branch", True), ("skip", True)])
def test_a_skipped_tile_is_not_computed(visit, clean):
    """NaN in keys that only empty tiles would read."""
    q, k, v, _ = inputs()
    mask, k = Mask(parse_mask("prefix(16)")), k.at[:, 16:].set(jnp.nan)
    out = jax.jit(partial(_masked.tiled, tile=8, visit=visit))(mask, q, k, v)
    assert bool(np.isfinite(out).all()) == clean


def test_documents_are_packed_without_padding():
    segments = np.asarray(masking.make_mask("documents", 4096, 256).q_segments_BT)
    assert segments.shape == (1, 4096) and segments.min() == 1
    assert 64 <= np.bincount(segments[0])[1:-1].min()


def row(part, arm, mask, length, pass_, ratios):
    axes = {"length": length, "mask": mask, "pass": pass_}  # sorted, as a ledger holds them
    metrics = {"seconds": ratios, "ratios": ratios, "ratio": float(np.median(ratios)),
               "ratio_low": min(ratios), "ratio_high": max(ratios), "temp_bytes": 1000 * length,
               "max_error": 1e-7, "calls": 1, "allowed": 0.5, "skipped": 0.4}
    return {"part": part, "arm": arm, "axes": axes, "metrics": metrics, "seconds": 1.0,
            "device": "cpu x2", "versions": {"jax": "0"}, "settings": {"rounds": 6}, "code": "c",
            "command": f"run {arm}"}


def test_the_verdicts_compare_paired_ratios():
    """Branching over tiles takes half, over pairs 30 times as long as adding."""
    level = {"add": 1.0, "tiles_all": 0.9, "tiles_branch": 0.5, "tiles_skip": 0.5,
             "blockwise": 0.6, "select": 1.0, "loop_add": 15.0, "loop_branch": 30.0}
    noise = np.random.default_rng(0)
    rows = [row(part, arm, mask, length, pass_,
                [1.0] * 6 if arm == "add" else list(level[arm] * noise.uniform(0.98, 1.02, 6)))
            for part in ARMS for mask in (("causal", "full") if part == "tiles" else ("causal",))
            for length in (128, 256) for pass_ in masking.PASSES for arm in ARMS[part]]
    made = masking.report(masking.Settings(masks=("causal", "documents"), lengths=(128, 256)), rows)
    assert [v.outcome for v in made.verdicts[:5]] == ["differs", "differs", "agrees", "agrees",
                                                      "agrees"]
    assert made.verdicts[0].detail.startswith("time x 0.")
    assert "length 256" in made.verdicts[0].claim
    text = markdown(made)
    assert "| causal | 128 | 50% | 40% |" in text and "30" in text
    assert [f.name for f in made.figures] == ["time_gradients", "time_forward", "memory", "masks"]
    assert all(f.png[:4] == b"\x89PNG" for f in made.figures)


def test_from_flag_to_report_and_again(capsys, tmp_path):
    check_study("masking", ["--masks=causal", "--lengths=32", "--pair_lengths=8", "--tile=16"],
                tmp_path, capsys,
                said="14 cells, 0 finished before, 14 to run",
                shown=("a branch per pair against adding per pair", "no CI, n=2"))


@pytest.mark.parametrize(("flag", "words"), [
    ("--lengths=100", "--lengths names 100, which --tile=64 does not divide"),
    ("--masks=casual", "did you mean 'causal'"), ("--tile=0", "--tile=0 is too small")])
def test_a_mistake_is_one_sentence(flag, words, capsys):
    check_refused("masking", [flag], words, capsys)
