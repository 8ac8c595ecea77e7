"""Variants of attention: other mathematics than a softmax over scores. One file each.

Unlike the implementations in the folder above, these do not agree with `reference.py`: each brings
its own slow reference (`Variant.slow`), and refuses the options that contradict it.
"""

from tx_jax.attention.variants._base import Variant
from tx_jax.construct import construct
from tx_jax.errors import UserError

__all__ = ["Variant", "make_variant"]


def make_variant(spec: str | Variant) -> Variant:
    """Build a variant of attention from its call string, as in `sigmoid(bias=-6.9)`."""
    if isinstance(spec, Variant):
        return spec
    if not isinstance(spec, str):
        raise UserError(f"a variant of attention must be a name or a Variant, not {spec!r}.")
    return construct("tx_jax.attention.variants", spec, "Variant", "variant of attention")
