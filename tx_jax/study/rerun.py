"""Running a finished cell again: with which other cells, and how far the new row agrees."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from tx_jax.study.cells import Cell, canonical, short
from tx_jax.study.ledger import Row

_RTOL = 1e-4  # Two runs of one program in float32 agree to this when training is stable.


def trained_with(row: Row, cells: Sequence[Cell], print_of: Callable[[Cell], str]
                 ) -> tuple[list[Cell], int]:
    """The cells that trained as one program with `row`, in that order; how many are not planned."""
    planned = {short(print_of(c)): c for c in cells}
    names = row.get("together") or [short(row["fingerprint"])]
    return [planned[n] for n in names if n in planned], sum(n not in planned for n in names)


def agreement(before: Row, now: Row) -> str:
    """One sentence: whether two rows of a cell hold the same numbers, else how far off they are."""
    names = [*before["metrics"], *(m for m in now["metrics"] if m not in before["metrics"])]
    apart = {m: _apart(before["metrics"].get(m), now["metrics"].get(m)) for m in names}
    worst = max(apart, key=lambda m: apart[m], default=None)
    row = "The earlier row, which stays in the ledger,"
    if canonical(before["metrics"]) == canonical(now["metrics"]):
        return f"{row} is reproduced bit for bit."
    if worst is None or apart[worst] <= _RTOL:
        return (f"{row} agrees within float32 rounding (relative difference at most {_RTOL:g}), "
                f"{_changed(before, now)}.")
    far = f"{apart[worst]:.2g}" if math.isfinite(apart[worst]) else "not a number"
    return (f"{row} differs: the largest relative difference is {far}, of {worst}, "
            f"{_changed(before, now)}; unstable training amplifies rounding.")


def _changed(before: Row, now: Row) -> str:
    """What rounding depends on and is not as it was."""
    def seen(row: Row) -> dict[str, Any]:
        versions = {k: v for k, v in row.get("versions", {}).items() if k != "commit"}
        return {"strategy": row.get("strategy"), "device": row.get("device"),
                "cells in one program": len(row.get("together", ())), **versions}

    was, is_ = seen(before), seen(now)
    found = [f"{k} '{was.get(k) or 'none'}', now '{is_.get(k) or 'none'}'"
             for k in {**was, **is_} if was.get(k) != is_.get(k)]
    return ("recorded with " + "; ".join(found) if found else
            "though strategy, device and versions are those recorded")


def _apart(a: Any, b: Any) -> float:
    """Largest relative difference of two metrics; inf where they cannot be compared."""
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return max(map(_apart, a, b), default=0.0)
    numbers = all(isinstance(v, int | float) for v in (a, b))
    if a == b or (numbers and math.isnan(a) and math.isnan(b)):
        return 0.0
    if not numbers or not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))
