"""Position schemes: one file each, one interface (`Encoding` in `_base.py`)."""

from tx_jax.construct import construct
from tx_jax.positions._base import Encoding

__all__ = ["Encoding", "make_encoding"]


def make_encoding(spec: str) -> Encoding:
    """Build a position scheme from its call string, as in `rope(base=10000)`."""
    return construct("tx_jax.positions", spec, "Encoding", "position scheme")
