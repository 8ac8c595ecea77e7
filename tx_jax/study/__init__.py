"""Studies: cells, the replica axis, ledger, statistics, tables, figures, report, driver."""
