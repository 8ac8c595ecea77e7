"""The capability matrix of the README, generated from what implementations declare."""

from tx_jax.attention._capabilities import FEATURES
from tx_jax.attention._contract import implementations


def capability_matrix() -> str:
    """A Markdown table: a row per feature, a column per implementation."""
    table = implementations()
    rows = [["", *table], ["---", *[":-:"] * len(table)]]
    rows.append(["mask rules", *["any" if c.rules is None else ", ".join(sorted(c.rules)) or "–"
                                 for c in table.values()]])
    rows += [[words, *["yes" if getattr(c, name) else "–" for c in table.values()]]
             for name, words in FEATURES.items()]
    rows.append(["forward-mode derivatives", *["yes" if c.jvp else "–" for c in table.values()]])
    rows.append(["memory grows as", *[c.memory for c in table.values()]])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"
