"""What a study is to the driver, and what the driver gives to its `run`."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from tx_jax.study.cells import Cell
from tx_jax.study.ledger import Measured, Row
from tx_jax.study.report import Report


@dataclass
class Context:
    """What a study's `run` may use.

    Attributes:
      cache: compiled programs, kept over the groups of one study (`run_replicas(cache=...)`).
      strategies: free for the study: which replica strategy it picked for which shape.
      advance: called with a share of a cell done since the last call; moves the progress bar.
      recorded: the ledger row of the finished cell that is run again, else None. A study then
        starts afresh, with the row's strategy, so that the same numbers come out.
    """

    workdir: Path
    console: Console
    advance: Callable[[float], None]
    cache: dict[Any, Any] = field(default_factory=dict)
    strategies: dict[Any, str] = field(default_factory=dict)
    recorded: Row | None = None


@dataclass(frozen=True)
class Study:
    """A grid of cells and what to make of it.

    Attributes:
      name, title: as in `--experiment=NAME`, and for people.
      settings: dataclass type whose leaves become flags.
      presets: name -> {"dotted.field": value}.
      cells: settings -> all cells of the study.
      run: (settings, cells of one group, context) -> iterator of (cell, Measured), each yielded as
        soon as it is finished.
      report: (settings, finished rows in the order of `cells`) -> Report. Pure. Every row has a
        "command" that reproduces it.
      swept: settings leaf -> the leaf that decides it, because `cells` sweeps it; the launcher
        refuses the former.
      group: cell -> key; cells of one key go to one call of `run` and train as one program.
      data: settings -> hash of the data read.
      packages, files: sources that determine the results besides `tx_jax`.
      check: raises UserError for settings that cannot run, before anything is written. The launcher
        calls it, `run_study` does not.
    """

    name: str
    title: str
    settings: type
    presets: Mapping[str, Mapping[str, Any]]
    cells: Callable[[Any], list[Cell]]
    run: Callable[[Any, list[Cell], Context], Iterator[tuple[Cell, Measured]]]
    report: Callable[[Any, list[Row]], Report]
    swept: Mapping[str, str] = field(default_factory=dict)
    group: Callable[[Cell], Hashable] = lambda cell: (cell.part, cell.arm, cell.axes)
    data: Callable[[Any], str] = lambda settings: ""
    packages: tuple[str, ...] = ("tx_jax",)
    files: tuple[str | Path, ...] = ()
    check: Callable[[Any], None] = lambda settings: None
