"""Every check of the conformance suite finds the fault it is meant for."""

import re

import pytest

from tests.attention_mutants import MUTANTS
from tx_jax.conformance import CHECKS, load, run_check

pytestmark = pytest.mark.slow

BY_NAME = {check.name: check for check in CHECKS}
# `attend` itself sees to the first two; the third repeats option_pairs; no mutant of ours tells
# several devices from one.
WITHOUT_MUTANT = {"refusals", "empty_sizes", "random_cases", "sharding"}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_the_check_meant_for_a_fault_finds_it(mutant):
    outcome = run_check(load(mutant), BY_NAME[MUTANTS[mutant]])
    assert outcome.status == "FAIL", outcome
    # By what it computes, not by accident of an exception.
    expected = "Concretization" if MUTANTS[mutant] == "transformations" else "forward-mode" if (
        mutant.__name__ == "no_forward_mode") else ""
    assert expected in outcome.detail
    assert expected or not re.match(r"\w+Error: ", outcome.detail), outcome.detail


def test_every_check_has_a_mutant():
    assert set(MUTANTS.values()) | WITHOUT_MUTANT == set(BY_NAME)
