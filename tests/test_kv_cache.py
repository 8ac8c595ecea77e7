"""The cache study: both programs draw the same tokens, clocks take turns, and verdicts can fail."""

import copy
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _decoding, kv_cache
from experiments._kv_report import verdicts
from experiments._kv_tables import KNOWN
from tests.helpers import check_refused, check_study, make_params
from tx_jax import decode, limits
from tx_jax.cache import places_of
from tx_jax.study.report import markdown

TINY = kv_cache.Settings(lengths=(8, 16), longer=(32,), sizes=(8, 16), fit_sizes=(8,),
                         fit_batches=(1,), layers=1, d_model=16, heads=2, groups=1, window=4,
                         rounds=6, seeds=5, rounding_length=8)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["mha", "mqa", "window"])
def test_both_programs_draw_the_same_tokens(arm):
    """One keeps the text before, the other reads it again for each of three tokens."""
    model = _decoding.model_of(TINY, arm, 8)
    params = make_params(model)
    text_BT = jax.random.randint(jax.random.key(1), (2, 8), 0, _decoding.VOCAB, jnp.int32)
    _, cache = decode.extend(model, params, text_BT[:, :7], decode.init_cache(model, 2, 8))
    token_B, _ = _decoding.cached_tokens(model, params, (text_BT[:, 7], cache), 3)
    again_BT, _ = _decoding.uncached_tokens(model, params, (text_BT, jnp.int32(7)), 3)
    assert token_B.tolist() == again_BT[:, 7].tolist()
    assert again_BT[:, :7].tolist() == text_BT[:, :7].tolist()
    assert again_BT[:, 7].tolist() != text_BT[:, 7].tolist()


def test_arms_take_turns_and_timings_last_long_enough(monkeypatch):
    """A clock that only the arms move: `slow` takes 16 ms a token, `quick` one."""
    now, order = [0.0], []
    monkeypatch.setattr(_decoding.time, "perf_counter", lambda: now[0])

    def arm(name, cost):
        def run(steps):
            now[0] += cost * steps
            order.append((name, steps))
        return run

    seconds, steps = _decoding.time_tokens({"slow": arm("slow", 16e-3), "quick": arm("quick", 1e-3)
                                            }, 4, least=0.02)
    assert steps == {"slow": 2, "quick": 32}
    assert [name for name, _ in order[-8:]] == ["slow", "quick", "quick", "slow"] * 2
    np.testing.assert_allclose(seconds["slow"], [16e-3] * 4)
    np.testing.assert_allclose(seconds["quick"], [1e-3] * 4)


def test_logits_are_compared():
    exact = np.array([[[0.0, 2.0], [4.0, 2.0]]])
    found = _decoding.compare_logits(exact, exact + np.array([[[0.0, 0.5], [0.0, 3.0]]]))
    assert found == {"max_difference": 3.0, "spread": 1.0, "agreement": 0.5}


def row(part, arm, metrics, seed=0, **axes):
    shape = {name: getattr(TINY, name) for name in (*kv_cache.MODEL, "batch", "rounds", "chunk")}
    return {"part": part, "arm": arm, "axes": axes, "seed": seed, "metrics": metrics,
            "seconds": 1.0, "compile_seconds": 1.0, "device": "cpu x2", "versions": {"jax": "0"},
            "settings": shape, "code": "c", "status": "ok", "command": f"run {arm}"}


def decode_row(arm, length, level, base, noise):
    times = list(level * noise.uniform(0.98, 1.02, 6))
    ratios = [a / b for a, b in zip(times, base, strict=True)]
    return row("decode", arm, {
        "seconds": times, "ratios": ratios, "ratio": float(np.median(ratios)),
        "ratio_low": min(ratios), "ratio_high": max(ratios), "second": float(np.median(times)),
        "tokens": 4, "flops": 95, "counted": 100.0}, length=length)


@pytest.fixture
def rows():
    """A cache worth 8 times at 8 tokens and 40 at 16, equal arms but for a window twice as fast."""
    noise, found = np.random.default_rng(0), []
    for length in (8, 16, 32):
        base = list(1e-3 * noise.uniform(0.98, 1.02, 6))
        for arm in _decoding.ARMS if length < 32 else _decoding.ARMS[1:]:
            level = {"no_cache": 8e-3 if length == 8 else 40e-3, "window": 5e-4}.get(arm, 1e-3)
            found.append(decode_row(arm, length, level, base, noise))
    for size in (8, 16):
        for arm in _decoding.ARMS[1:]:
            cfg = _decoding.model_of(TINY, arm, size).cfg
            n = limits.cache_bytes(cfg, 1, size, _decoding.kind_of(arm))
            S = places_of(cfg, size)
            found.append(row("memory", arm, {"cache": n, "formula": n, "places": S, "alias": n + 4,
                                             "temp": 1000 + 24 * S}, length=size))
    found += [row("fits", arm, {"weights": 1, "cache": 2, "work": 3, "predicted": 6, "planned": 6,
                                "error": 0.04, "device_bytes": 10**9}, batch=1, length=8)
              for arm in kv_cache.FITS]
    return found + [row("rounding", "int8", {"max_difference": 0.1 + 0.01 * s, "spread": 1.0,
                                             "agreement": 0.9}, seed=s, length=8)
                    for s in range(5)]


def outcomes(rows):
    return {v.claim: v.outcome for v in verdicts(rows)}


def test_the_verdicts_follow_the_rows(rows):
    found = outcomes(rows)
    expected = {"A cache saves time": "agrees", "What it saves grows": "agrees",
                "One key head": "not resolvable with these seeds",
                "Our expectation: a window": "agrees",
                "Our expectation: int8": "not resolvable with these seeds",
                "Our expectation: a step of mha": "agrees"}
    for start, outcome in expected.items():
        assert [o for claim, o in found.items() if claim.startswith(start)] == [outcome], start
    exact = [o for claim, o in found.items() if "cache holds 2 L" in claim or "A step copies" in
             claim or "linear" in claim or "divides" in claim or "bounds" in claim or
             "int8 takes" in claim or "predictor" in claim or "Closed forms" in claim]
    assert exact == ["agrees"] * 9


@pytest.mark.parametrize(("part", "arm", "metric", "value", "claim"), [
    ("memory", "mha", "cache", lambda m: m["cache"] + 1, "A cache holds"),
    ("memory", "mqa", "cache", lambda m: 2 * m["cache"], "MQA divides"),
    ("memory", "gqa", "cache", lambda m: 2 * m["cache"], "GQA divides"),
    ("memory", "int8", "cache", lambda m: m["cache"] - 4, "int8 takes"),
    ("memory", "window", "places", lambda m: 2 * m["places"], "A window bounds"),
    # A copy of the keys of a layer, and a cache that is not donated.
    ("memory", "mha", "temp", lambda m: m["temp"] + m["cache"] // 2, "A step copies no cache"),
    ("memory", "mqa", "temp", lambda m: m["temp"] + m["cache"] // 2, "A step copies no cache"),
    ("memory", "int8", "alias", lambda m: 4, "A step copies no cache"),
    ("fits", "int8", "error", lambda m: -0.11, "The predictor"),
    ("decode", "mqa", "counted", lambda m: 70.0, "Closed forms")])
def test_what_is_wrong_in_one_row_is_said(rows, part, arm, metric, value, claim):
    broken = copy.deepcopy(rows)
    metrics = [r for r in broken if (r["part"], r["arm"]) == (part, arm)][-1]["metrics"]
    metrics[metric] = value(metrics)
    found = outcomes(broken)
    assert [o for text, o in found.items() if text.startswith(claim)] == ["differs"]
    if metric != "cache":  # which several claims read
        assert sum(o == "differs" for o in found.values()) == 1


@pytest.mark.slow
def test_the_report_shows_every_part(rows):
    made = kv_cache.STUDY.report(TINY, rows)
    text = markdown(made)
    assert [f.name for f in made.figures] == ["time", "tokens", "bytes"]
    assert all(f.png[:4] == b"\x89PNG" for f in made.figures)
    assert "| 16 | mha | 16 | 2048 | 2048 | 2052 | 1384 | 0.676 |" in text
    assert "+4.0% |" in text and "| 8 | 0.120 ± 0.020 |" in text
    assert "| Llama 3 70B | H200 | 141 | 320 | 0 | any | 8192 | hardware | 0 |" in text
    assert "| GPT-2 | this |" in text and "| 1024 | 1024 | positions |" in text


def test_known_shapes_have_the_parameters_they_are_known_for():
    """Within a percent of the published totals, as biases are left out; a tied head counts once."""
    for name, total in (("GPT-2", 124.4e6), ("Llama 3 8B", 8.03e9), ("Llama 3 70B", 70.6e9)):
        cfg, vocab, context = KNOWN[name]
        model = _decoding.DecoderLM(cfg, vocab, context)
        table = vocab * cfg.d_model if cfg.embeddings == "untied" else context * cfg.d_model
        assert math.isclose(limits.products(model) + table, total, rel_tol=0.01)


@pytest.mark.slow
def test_from_flag_to_report_and_again(capsys, tmp_path):
    check_study("kv_cache", ["--lengths=8", "--sizes=8,16", "--fit_sizes=8", "--chunk=4",
                             "--d_model=16", "--window=4", "--rounding_length=8"], tmp_path, capsys,
                said="22 cells, 0 finished before, 22 to run",
                shown=("A cache holds 2 L K H S B numbers, to the byte | **agrees** | 10 of 10",
                       "no CI, n=2"))


@pytest.mark.parametrize(("flag", "words"), [
    ("--groups=3", "--groups=3 does not divide --heads=4"),
    ("--d_model=36", "--d_model=36 does not split into --heads=4 of an even width"),
    ("--lengths=1", "--lengths=1 is too small")])
def test_a_mistake_is_one_sentence(flag, words, capsys):
    check_refused("kv_cache", [flag], words, capsys)
