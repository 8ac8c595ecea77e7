"""The capability matrix of the README, generated from what implementations declare."""

from tx_jax.attention._capabilities import DEVICES, FEATURES, Capabilities
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
    rows.append(["needs", *[_needs(c) for c in table.values()]])
    rows.append(["memory grows as", *[c.memory for c in table.values()]])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def _needs(can: Capabilities) -> str:
    """Device, dtypes and head width that an implementation is tied to."""
    words = [" or ".join(DEVICES[name] for name in sorted(can.platforms or ())),
             " or ".join(sorted(can.dtypes or ())),
             f"heads up to {can.max_width} wide" if can.max_width else ""]
    return ", ".join(word for word in words if word) or "–"
