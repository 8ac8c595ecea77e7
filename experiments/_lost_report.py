"""What the study of needles says: claims, tables and figures from ledger rows alone."""

from collections.abc import Sequence
from typing import Any

from tx_jax.study import tables
from tx_jax.study.report import Report

Row = dict[str, Any]


def make_report(rows: list[Row], *, arms: Sequence[str], chance: float) -> Report:
    """The report."""
    return Report("Lost in the middle", ("",), tables=(tables.ablation_table(
        rows, "middle_against_ends", arms[0], title="Middle against ends",
        by=("regime", "items"), lower_is_better=False),))
