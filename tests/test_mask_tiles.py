"""Tiles of a mask: never wrong, and exact for the rules that kernels skip by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_masks import RULES
from tx_jax.masks import EMPTY, FULL, PARTIAL, Causal, Mask, Window, dense_mask, tile_kinds
from tx_jax.masks.picture import draw_mask

SEGMENTS = st.lists(st.integers(0, 3), min_size=7, max_size=7)


def check(mask, T, S, start, q_tile, k_tile):
    """Tile kinds contradict no pair; returns how many tiles could have been called better."""
    dense = np.asarray(dense_mask(mask, T, S, start))
    kinds = np.asarray(tile_kinds(mask, T, S, start, q_tile=q_tile, k_tile=k_tile))
    kinds = np.broadcast_to(kinds, (max(len(kinds), len(dense)), *kinds.shape[1:]))
    assert kinds.shape[1:] == (-(-T // q_tile), -(-S // k_tile)) and kinds.dtype == np.int8
    loose = 0
    for b, i, j in np.ndindex(kinds.shape):
        tile = dense[min(b, len(dense) - 1), i * q_tile:(i + 1) * q_tile,
                     j * k_tile:(j + 1) * k_tile]
        exact = FULL if tile.all() else PARTIAL if tile.any() else EMPTY
        assert kinds[b, i, j] in (exact, PARTIAL), (mask, start, i, j)
        loose += kinds[b, i, j] != exact
    return loose


@settings(max_examples=150, deadline=None)
@given(rule=RULES, T=st.integers(1, 7), S=st.integers(1, 9), start=st.none() | st.integers(-3, 9),
       q_tile=st.integers(1, 4), k_tile=st.integers(1, 4))
def test_tiles_contradict_no_pair(rule, T, S, start, q_tile, k_tile):
    check(rule, T, S, start, q_tile, k_tile)
    kinds = tile_kinds(rule, T, S, start, q_tile=q_tile, k_tile=k_tile)
    assert isinstance(kinds, np.ndarray)
    if start is not None:
        traced = tile_kinds(rule, T, S, jnp.int32(start), q_tile=q_tile, k_tile=k_tile)
        assert isinstance(traced, jax.Array)
        np.testing.assert_array_equal(traced, kinds)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(rule=RULES, q=SEGMENTS, k=SEGMENTS, prefix=st.none() | st.integers(0, 8),
       length=st.none() | st.integers(0, 8), segments=st.booleans(), tile=st.integers(1, 4))
def test_tiles_of_masks_with_arrays_contradict_no_pair(rule, q, k, prefix, length, segments, tile):
    one = lambda x: None if x is None else jnp.array([x, 0])  # noqa: E731
    pair = (jnp.array([q, q[::-1]]), jnp.array([k, k])) if segments else (None, None)
    check(Mask(rule, *pair, one(prefix), one(length)), 7, 7, jnp.array([0, 2]), tile, 3)


@pytest.mark.parametrize("mask", [
    "causal", "window(5)", "causal & window(5)", "prefix(5)", "causal | prefix(5)", "dilated(3)",
    "~causal", "global(3)", "explicit('1100110 1111110 0000001')"])
def test_tiles_are_exact_for_the_usual_rules(mask):
    for start in (-2, 0, 3):
        assert check(mask, 12, 12, start, 4, 3) == 0


def test_packed_documents_leave_the_diagonal():
    segments = jnp.repeat(jnp.arange(1, 5), 4)[None]
    kinds = tile_kinds(Mask(Causal(), segments, segments), 16, 16, q_tile=4, k_tile=4)
    np.testing.assert_array_equal(kinds[0], np.eye(4) * PARTIAL)
    kinds = tile_kinds(Mask(q_segments_BT=segments, k_segments_BS=segments), 16, 16, q_tile=4,
                       k_tile=4)
    np.testing.assert_array_equal(kinds[0], np.eye(4) * FULL)


def test_picture_has_the_colours_of_the_mask(tmp_path):
    import matplotlib.image
    path = draw_mask(Causal() & Window(3), 8, 8, tmp_path / "mask.png", tile=4)
    pixels = matplotlib.image.imread(path)
    assert pixels.ndim == 3 and len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 3
