"""Run every check on an implementation and print its capability card."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tx_jax.attention import Capabilities, Request
from tx_jax.conformance import running, terms, values, visibility
from tx_jax.conformance.subject import Check, Failure, Skip, Subject, load
from tx_jax.errors import UserError

CHECKS: tuple[Check, ...] = (*values.CHECKS, *visibility.CHECKS, *terms.CHECKS, *running.CHECKS)
STYLES = {"pass": "green", "refused": "yellow", "skipped": "yellow", "FAIL": "bold red"}


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes:
      status: "pass"; "refused" = it needs what is not declared; "skipped" = not possible here; or
        "FAIL".
      detail: a sentence.
    """

    check: Check
    status: str
    detail: str


def run_check(subject: Subject, check: Check) -> Outcome:
    """Run one check; whatever the implementation raises is a failure of it."""
    if lacking := subject.lacks(*check.needs):
        return Outcome(check, "refused", f"not declared: {', '.join(lacking)}")
    # Products of float32 in less than float32 would be told from mistakes by no tolerance.
    exact = subject.dtype.name == "float32"
    try:
        with jax.default_matmul_precision("highest") if exact else nullcontext():
            return Outcome(check, "pass", check.function(subject) or "")
    except Skip as reason:
        return Outcome(check, "skipped", str(reason))
    except Failure as failure:
        return Outcome(check, "FAIL", str(failure))
    except (Exception, SystemExit) as error:  # outside code may raise anything
        return Outcome(check, "FAIL", _one_line(error))


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["without a message"]
    return f"{type(error).__name__}: {lines[0]}"


def run_checks(subject: Subject, checks: Iterable[Check] = CHECKS, cases: int = 0,
               report: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
    """All outcomes; `cases` is the number of random cases where it is above 0."""
    outcomes = []
    for check in checks:
        if cases and check.function is values.random_cases:
            more = partial(values.random_cases, cases=cases)
            more.__name__, more.__doc__ = check.name, check.function.__doc__
            check = replace(check, function=more)
        outcomes.append(run_check(subject, check))
        report(outcomes[-1])
    return outcomes


def features(capabilities: Capabilities) -> dict[str, bool]:
    """Declared yes or no, by name of the feature."""
    return {f.name: getattr(capabilities, f.name) for f in fields(capabilities)
            if isinstance(getattr(capabilities, f.name), bool)}


def print_card(console: Console, subject: Subject, outcomes: list[Outcome]) -> None:
    """What is declared, and a verdict."""
    can, declared = subject.capabilities, features(subject.capabilities)

    def names(value: frozenset[str] | None) -> str:
        return "any" if value is None else ", ".join(sorted(value)) or "none"
    failed = [o.check.name for o in outcomes if o.status == "FAIL"]
    table = Table(title=f"Capability card of {escape(subject.name)}", show_header=False, box=None,
                  title_justify="left")
    table.add_row("does", ", ".join(n for n, yes in declared.items() if yes) or "nothing optional")
    table.add_row("refuses", ", ".join(n for n, yes in declared.items() if not yes) or "nothing")
    table.add_row("mask rules", names(can.rules))
    table.add_row("dtypes", names(can.dtypes))
    table.add_row("devices", names(can.platforms))
    table.add_row("memory grows as", can.memory or "not declared")
    console.print(table)
    count = {status: sum(o.status == status for o in outcomes) for status in STYLES}
    numbers = ", ".join(f"{n} {status}" for status, n in count.items() if n)
    if failed:
        console.print(f"[bold red]does not conform[/]: {numbers}; failing: {', '.join(failed)}")
    else:
        console.print(f"[bold green]conforms[/] to the attention contract as declared: {numbers}")


def check_attention(implementation: Any, console: Console | None = None, cases: int = 0) -> bool:
    """Run all checks on an implementation, print the table and the card; True iff all pass.

    Args:
      implementation: a name, a callable or "module:function", as `attend` takes it.
      console: where to print.
      cases: random cases to try; 0 = a few.

    Raises:
      UserError: it cannot be found, does not take the arguments, or does not run on this device.
    """
    console = console or Console(highlight=False)
    try:
        subject = load(implementation)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # while importing outside code
        raise UserError(f"attention '{implementation}' cannot be imported: "
                        f"{_one_line(error)}.") from None
    plain = Request(dtype=subject.dtype.name)
    if missing := subject.capabilities.lacks(plain):
        raise UserError(f"attention '{subject.name}' cannot do {' with '.join(missing)}; check it "
                        "where it runs.")

    def report(outcome: Outcome) -> None:
        style = STYLES[outcome.status]
        console.print(f"[{style}]{outcome.status:8}[/] {outcome.check.name:18} "
                      f"{escape(outcome.check.summary)}")
        if outcome.detail:
            console.print(f"{'':27} [dim]{escape(outcome.detail)}[/]")
    outcomes = run_checks(subject, CHECKS, cases, report)
    console.print()
    print_card(console, subject, outcomes)
    return all(o.status != "FAIL" for o in outcomes)
