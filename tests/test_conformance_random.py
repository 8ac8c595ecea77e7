"""Every pair of options, and random data, against loops in float64, on every implementation.

`CONFORMANCE_CASES=5000 pytest tests/test_conformance_random.py` tries more, and others each time.
"""

import os
from functools import cache

import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attention_subjects import SUBJECTS, tiled
from tx_jax.conformance import Failure
from tx_jax.conformance.options import OPTIONS, all_pairs, make_call, split
from tx_jax.conformance.values import compare_choice, make_runner, random_cases

pytestmark = pytest.mark.slow

# Blockwise is tried on all combinations with tiny tiles; jax_nn is a thin adapter.
STEPS = {"blockwise": 9, "jax_nn": 2}
ROWS = {name: all_pairs(subject.capabilities)[::STEPS.get(name, 1)]
        for name, subject in SUBJECTS.items()}
# Many tiles are much to compile.
SLOW = {"blockwise-2x3"}
SHAPED = SUBJECTS | {f"blockwise-{t}x{s}": tiled(t, s) for t, s in ((1, 2), (4, 1))}
CASES = int(os.environ.get("CONFORMANCE_CASES", 0))


@cache
def runner(name, number):
    """The program of one combination, compiled once for this whole file."""
    choice = ROWS[name][number]
    return make_runner(SUBJECTS[name], split(make_call(choice), jnp.dtype(choice["dtype"]))[2])


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW))
                                  for n in SUBJECTS])
def test_every_pair_of_options(name):
    for number, choice in enumerate(ROWS[name]):
        compare_choice(SUBJECTS[name], choice, number, runner(name, number))


def test_pairs_are_complete():
    """Every two values of two options meet in some combination, unless they contradict."""
    for a, b in (("rule", "bias"), ("examples", "q_start"), ("scale", "score"), ("bias", "dtype")):
        met = {(str(c[a]), str(c[b])) for c in ROWS["reference"]}
        contradictions = 4 if (a, b) == ("scale", "score") else 0
        assert len(met) == len(OPTIONS[a]) * len(OPTIONS[b]) - contradictions


@pytest.mark.parametrize("name", SUBJECTS)
def test_random_data(name):
    """Segments, lengths, starts, seeds, magnitudes and forbidding biases, on compiled programs."""
    @settings(max_examples=CASES or (40 if name == "blockwise" else 170), deadline=None,
              derandomize=not CASES, database=None, suppress_health_check=list(HealthCheck))
    # The first combinations hold the most pairs.
    @given(number=st.integers(0, min(len(ROWS[name]), 24) - 1), seed=st.integers(1, 2**31),
           spread=st.sampled_from([0.1, 1.0, 2.0]), forbid=st.sampled_from([0, 0.3, 0.9, 1]))
    def check(number, seed, spread, forbid):
        compare_choice(SUBJECTS[name], ROWS[name][number], seed, runner(name, number),
                       spread=spread, forbid=forbid)
    check()


@pytest.mark.parametrize("name", SHAPED)
def test_random_shapes(name):
    random_cases(SHAPED[name], cases=CASES // 20 or 5, seed=list(SHAPED).index(name))


def test_a_difference_names_the_array_and_the_options():
    choice = ROWS["reference"][0] | {"bias": "TS", "dtype": "float32"}
    program = make_runner(SUBJECTS["reference"], split(make_call(choice), jnp.float32)[2])

    def wrong(slopes, traced):
        grads, out = program(slopes, traced)
        return grads | {"bias": 2 * grads["bias"]}, out
    with pytest.raises(Failure, match=r"gradient of \['bias'\]: slope .*bias=TS.*seed 3"):
        compare_choice(SUBJECTS["reference"], choice, 3, wrong)
