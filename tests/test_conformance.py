"""Every implementation passes every check of the conformance suite; the card and its command."""

import io

import pytest
from rich.console import Console

import launch
from tests.attention_subjects import SUBJECTS
from tx_jax.attention import Capabilities, implementations, reference
from tx_jax.conformance import CHECKS, check_attention, load, run_check, run_checks
from tx_jax.conformance.running import declared_degree
from tx_jax.errors import UserError

# `tests/test_conformance_random.py` runs these, with programs that it keeps.
ELSEWHERE = {"option_pairs", "random_cases"}
# At small sizes a call of blockwise has one tile; these see another path than with tiny tiles.
ONE_TILE = {"odd_lengths", "block_edges", "padding", "empty_rows", "error_budget", "memory_growth",
            "sharding", "head_groups"}
GRID = [(name, check) for name in SUBJECTS for check in CHECKS
        if check.name not in ELSEWHERE and (name != "blockwise" or check.name in ONE_TILE)]


# The fast set has the properties that break first.
QUICK = {"future", "window_width", "end_alignment", "documents", "empty_rows", "softcap_order",
         "sinks", "dropout_decisions", "refusals"}


@pytest.mark.parametrize("name, check", [
    pytest.param(n, c, id=f"{n}-{c.name}", marks=() if c.name in QUICK else pytest.mark.slow)
    for n, c in GRID])
def test_implementations_conform(name, check):
    outcome = run_check(SUBJECTS[name], check)
    lacking = SUBJECTS[name].lacks(*check.needs)
    assert outcome.status == ("refused" if lacking else "pass"), outcome.detail


def test_every_implementation_is_a_subject_or_needs_another_device():
    for name, capabilities in implementations().items():
        assert name in SUBJECTS or capabilities.platforms is not None
    assert {"reference", "blockwise", "jax_nn"} <= SUBJECTS.keys()


# The card.

FEW = [check for check in CHECKS if check.name in ("future", "window_width", "sinks", "refusals")]


def card_of(implementation, monkeypatch):
    monkeypatch.setattr("tx_jax.conformance.card.CHECKS", FEW)
    output = io.StringIO()
    good = check_attention(implementation, Console(file=output, width=200))
    return good, output.getvalue()


def test_outside_code_gets_a_card(monkeypatch):
    good, text = card_of("tx_jax.attention.jax_nn:attend", monkeypatch)
    assert good and "refused  sinks" in text and "not declared: sink" in text
    assert "conforms to the attention contract as declared: 3 pass, 1 refused" in text
    assert "refuses" in text and "softcap" in text and "N T S" in text


def test_errors_of_outside_code_are_lines_not_traces(monkeypatch):
    def broken(q, k, v, **options):
        if options["sink"] is not None:
            raise SystemExit("no sink today\nsecond line")
        raise ZeroDivisionError
    good, text = card_of(broken, monkeypatch)
    assert not good and "FAIL" in text and "Traceback" not in text
    assert "ZeroDivisionError: without a message" in text and "SystemExit: no sink today" in text
    assert "second line" not in text
    assert "does not conform: 1 pass, 3 FAIL; failing: future, window_width, sinks" in text


def test_undeclared_features_are_not_asked():
    def little(q, k, v, *, mask, bias, score, score_params, scale, softcap, dropout, sink, q_start):
        return reference.attend(q, k, v, mask=mask, bias=None, score=score, scale=scale, sink=None,
                                score_params=score_params, softcap=None, dropout=None, q_start=None)
    little.CAPABILITIES = Capabilities(rules=frozenset({"causal"}), memory="N T S")
    status = {o.check.name: o.status for o in run_checks(load(little), FEW)}
    assert status == {"future": "pass", "window_width": "refused", "sinks": "refused",
                      "refusals": "pass"}


@pytest.mark.parametrize("memory, degree", [("", None), ("T + S", 1), ("N T S", 2), ("B T S", 2),
                                            ("T + S (causal, windows), else B T S", 1)])
def test_growth_in_letters(memory, degree):
    assert declared_degree(memory) == degree


def test_the_command(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("tx_jax.conformance.card.CHECKS", FEW)
    monkeypatch.setattr("jax.config.update", lambda *a: None)
    assert launch.main(["--check_attention=reference"]) == 0
    assert "Capability card of reference" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def attend(q, k, v, **options):\n    return v[:, :1]\n")
    (tmp_path / "worse.py").write_text("1 / 0\n")
    assert launch.main(["--check_attention=mine:attend", "--cases=2"]) == 1
    assert "does not conform" in capsys.readouterr().out


@pytest.mark.parametrize("words, says", [
    (["--check_attention=refrence"], "did you mean 'reference'"),
    (["--check_attention=cudnn"], "cannot do"),
    (["--check_attention=no_such:thing"], "cannot be imported"),
    (["--check_attention=math:sqrt"], "does not take the arguments"),
    (["--check_attention="], "''"),
    (["--check_attention=reference", "--cases=0"], "--cases=0"),
    (["--check_attention=reference", "--preset=small"], "no flag --preset")])
def test_mistakes_on_the_command_line(words, says, capsys, monkeypatch):
    monkeypatch.setattr("jax.config.update", lambda *a: None)
    assert launch.main(words) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_module_that_fails_on_import(tmp_path, monkeypatch):
    (tmp_path / "worst.py").write_text("raise RuntimeError('broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"cannot be imported \(RuntimeError: broken\)"):
        check_attention("worst:attend")
