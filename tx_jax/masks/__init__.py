"""Masks: rules on absolute indices (`rules`), their text form (`text`), what differs between the
examples of a batch and the dense array (`mask`), tiles for block-sparse kernels (`tiles`)."""

from tx_jax.masks.mask import (
    Mask,
    as_mask,
    check_mask,
    decode_row,
    dense_mask,
    hide_unseen,
    index_arrays,
    segments_from_lengths,
)
from tx_jax.masks.rules import (
    Causal,
    Dilated,
    Explicit,
    Full,
    Global,
    Prefix,
    Rule,
    Window,
)
from tx_jax.masks.text import parse_mask
from tx_jax.masks.tiles import EMPTY, FULL, PARTIAL, tile_kinds

__all__ = ["Causal", "Dilated", "EMPTY", "Explicit", "FULL", "Full", "Global", "Mask", "PARTIAL",
           "Prefix", "Rule", "Window", "as_mask", "check_mask", "decode_row", "dense_mask",
           "hide_unseen", "index_arrays", "parse_mask", "segments_from_lengths", "tile_kinds"]
