"""No position at all: order comes from the causal mask alone (Haviv et al. 2022)."""

from dataclasses import dataclass

from tx_jax.positions import _base


@dataclass(frozen=True)
class Encoding(_base.Encoding):
    """Nothing is added, turned or biased."""
