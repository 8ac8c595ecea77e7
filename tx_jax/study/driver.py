"""Run a study: plan its cells, skip the finished, run the rest, write tables and report."""

import shlex
import traceback
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tx_jax.errors import UserError
from tx_jax.study.cells import Cell, code_hash, fingerprint, plain, restore, short
from tx_jax.study.contract import Context, Study
from tx_jax.study.ledger import (
    Ledger,
    Row,
    device_name,
    finished,
    make_row,
    read,
    versions,
)
from tx_jax.study.report import write_report
from tx_jax.study.rerun import agreement, trained_with


@dataclass(frozen=True)
class Failure:
    """A cell that raised: the error in one line, the whole trace, the command that repeats it."""

    cell: Cell
    error: str
    trace: str
    command: str


@dataclass(frozen=True)
class Outcome:
    """What `run_study` did; `report` is None when no row exists yet or a single cell was run."""

    planned: int
    skipped: int
    ran: int
    missing: tuple[Cell, ...]
    failures: tuple[Failure, ...]
    report: Path | None


@dataclass(frozen=True)
class _Plan:
    cells: list[Cell]
    code: str
    data: str
    command: list[str]

    def print_of(self, cell: Cell) -> str:
        return fingerprint(cell, self.code, self.data)

    def command_of(self, cell: Cell) -> str:
        return reproduce_command(self.print_of(cell), self.command)


def reproduce_command(fingerprint_: str, command: Sequence[str]) -> str:
    """The shell command that runs one cell again: `command` without --table, with --cell=ID."""
    kept = [a for a in command if a.partition("=")[0].lstrip("-") not in ("table", "cell")]
    return shlex.join([*kept, f"--cell={short(fingerprint_)}"])


def run_study(study: Study, settings: Any, workdir: Path, *, only_table: bool = False,
              cell: str | None = None, command: Sequence[str] = (),
              console: Console | None = None) -> Outcome:
    """Run what is missing of `study` and write the report.

    Args:
      only_table: run nothing; rebuild tables and report from the ledger and name what is missing.
      cell: run this one cell (its short id) and show its metrics. If it was finished, all cells
        that trained with it as one program run again with the strategy recorded, so that the same
        numbers come out; they stand beside the earlier ones, which tables go on to show.
      command: argv that started this study, for the commands shown.

    Raises:
      UserError: foreign or unwritable workdir, unknown cell, duplicate cells.
    """
    console, workdir = console or Console(), Path(workdir)
    cells = study.cells(settings)
    if len(set(cells)) != len(cells):
        twice = next(c for i, c in enumerate(cells) if c in cells[:i])
        raise UserError(f"study '{study.name}' plans the cell {twice} twice; remove repeated "
                        "values from its axes.")
    plan = _Plan(cells, code_hash(study.packages, study.files), study.data(settings), list(command))
    path = workdir / "results.jsonl"
    if only_table:
        return _tables(study, settings, workdir, plan, read(path), 0, (), console)
    with Ledger(path) as ledger:
        found = finished(ledger.rows, cells, plan.code, plan.data)
        if cell is not None:
            return _one(study, settings, workdir, plan, ledger, cell, console)
        todo = [c for c in cells if c not in found]
        console.print(f"{study.title}: {len(cells)} cells, {len(found)} finished before, "
                      f"{len(todo)} to run.", highlight=False)
        failures = _run(study, settings, workdir, plan, ledger.append, todo, console)
        return _tables(study, settings, workdir, plan, ledger.rows, len(found), failures, console)


def _run(study: Study, settings: Any, workdir: Path, plan: _Plan, keep: Callable[[Row], None],
         todo: list[Cell], console: Console, recorded: Row | None = None) -> tuple[Failure, ...]:
    """Run `todo` group by group; `keep` gets every row as it comes."""
    groups: dict[Hashable, list[Cell]] = {}
    for c in todo:
        groups.setdefault(study.group(c), []).append(c)
    failures: list[Failure] = []
    stamp = {"code": plan.code, "data": plan.data, "versions": versions(),
             "device": device_name() if todo else ""}
    bar = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                   TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(), console=console,
                   transient=True)
    with bar:
        task = bar.add_task(study.name, total=len(todo))
        context = Context(workdir, console, lambda share: bar.advance(task, share),
                          recorded=recorded)
        queue, done = list(groups.values()), set()
        while queue:
            members = queue.pop(0)
            first, names = members[0], [short(plan.print_of(c)) for c in members]
            axes = " ".join(f"{k}={v}" for k, v in first.axes) if len(members) == 1 else ""
            bar.update(task, description=f"{first.part} {first.arm} {axes}".strip())
            try:
                for finished_cell, measured in study.run(settings, members, context):
                    if finished_cell not in members:
                        raise ValueError(f"run yielded {finished_cell}, which it was not given.")
                    keep(make_row(finished_cell, measured, together=names, **stamp))
                    done.add(finished_cell)
                    bar.update(task, completed=len(done) + len(failures))
                left = [c for c in members if c not in done]
                if left:
                    raise ValueError(f"run ended without a result for {left[0]}.")
            except Exception as e:  # One bad cell must not lose the others.
                left = [c for c in members if c not in done]
                # What the user got wrong for the group is as wrong for each of its cells.
                if len(members) > 1 and not isinstance(e, UserError):
                    console.print(f"{len(left)} cells failed together ({_one_line(e)}); they run "
                                  "one by one now.", markup=False, highlight=False)
                    queue[:0] = [[c] for c in left]
                else:
                    failures += [_failure(c, e, plan) for c in left]
    return tuple(failures)


def _one_line(e: Exception) -> str:
    text = str(e).strip().splitlines()[0] if str(e).strip() else "no message"
    return text if isinstance(e, UserError) else f"{type(e).__name__}: {text}"


def _failure(cell: Cell, e: Exception, plan: _Plan) -> Failure:
    trace = "".join(traceback.format_exception(e))
    return Failure(cell, _one_line(e), trace, plan.command_of(cell))


def _one(study: Study, settings: Any, workdir: Path, plan: _Plan, ledger: Ledger, name: str,
         console: Console) -> Outcome:
    """Run one cell; if it has a row, with all that trained with it: compared, never replaced."""
    hits = [c for c in plan.cells if name and plan.print_of(c).startswith(name)]
    if len(hits) != 1:
        raise UserError(f"--cell={name} names {len(hits)} of the {len(plan.cells)} planned cells; "
                        "use the command printed in the report (the same settings, code and data).")
    before, new = finished(ledger.rows, hits, plan.code, plan.data).get(hits[0]), []
    if before:
        hits, absent = trained_with(before, plan.cells, plan.print_of)
        console.print(f"This cell has a row: running again what trained as one program, "
                      f"{len(hits)} cell(s), strategy '{before['strategy'] or 'none'}'"
                      + (f"; {absent} more are not planned by these settings, so rounding may "
                         "differ." if absent else "."), highlight=False, soft_wrap=True)
    failures = _run(study, settings, workdir, plan, new.append if before else ledger.append, hits,
                    console, before)
    rows = [restore(plain(row)) for row in new] if before else ledger.rows
    row = next((r for r in reversed(rows) if r["fingerprint"].startswith(name)), None)
    for metric, value in (row["metrics"] if row else {}).items():
        earlier = f"   before: {before['metrics'].get(metric)}" if before else ""
        console.print(f"{metric}: {value}{earlier}", markup=False, highlight=False)
    if row and before:
        console.print(agreement(before, row), markup=False, highlight=False, soft_wrap=True)
    _show_failures(failures, console)
    return Outcome(1, 0, int(row is not None), (), failures, None)


def _tables(study: Study, settings: Any, workdir: Path, plan: _Plan, rows: list[Row], skipped: int,
            failures: tuple[Failure, ...], console: Console) -> Outcome:
    """Write the report from the finished rows; say what is missing."""
    found = finished(rows, plan.cells, plan.code, plan.data)
    missing = tuple(c for c in plan.cells if c not in found)
    failed = {f.cell for f in failures}
    unknown = [c for c in missing if c not in failed]
    if unknown:
        other = sum(row["code"] != plan.code for row in rows)
        console.print(f"{len(unknown)} of {len(plan.cells)} cells are missing"
                      + (f" ({other} rows are from other versions of the code)" if other else "")
                      + "; this fills them:", highlight=False)
        kept = [a for a in plan.command if a.partition("=")[0].lstrip("-") not in ("table", "cell")]
        if kept:
            console.print("  " + shlex.join(kept), markup=False, highlight=False, soft_wrap=True)
        for c in unknown[:5]:
            console.print(f"  {c.part} {c.arm} {dict(c.axes)} seed={c.seed}: {plan.command_of(c)}",
                          markup=False, highlight=False, soft_wrap=True)
        if len(unknown) > 5:
            console.print(f"  ... and {len(unknown) - 5} more", highlight=False)
    path = None
    if found:
        shown = [{**found[c], "command": plan.command_of(c)} for c in plan.cells if c in found]
        path = write_report(study.report(settings, shown), workdir)
        console.print(f"report: {path}", markup=False, highlight=False, soft_wrap=True)
    _show_failures(failures, console)
    ran = len(found) - skipped if skipped or failures or not missing else 0
    return Outcome(len(plan.cells), skipped, max(0, ran), missing, failures, path)


def _show_failures(failures: Sequence[Failure], console: Console) -> None:
    """Print every error once: how many cells it ended, the first of them and its command."""
    same: dict[str, list[Failure]] = {}
    for f in failures:
        same.setdefault(f.error, []).append(f)
    for error, members in same.items():
        c = members[0].cell
        many = f"{len(members)} cells, the first " if len(members) > 1 else ""
        console.print(f"failed: {many}{c.part} {c.arm} {dict(c.axes)} seed={c.seed}: {error}\n"
                      f"  {members[0].command}", markup=False, highlight=False, soft_wrap=True)
