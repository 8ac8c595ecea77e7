"""Blockwise attention: any tile size, every pair of options, memory linear in the length."""

from functools import partial

import jax
import numpy as np
import pytest

from tests.attention_loops import PAIRS, make_call
from tests.test_attention_pairs import run
from tx_jax.attention import blockwise


@pytest.mark.parametrize("tiles", [(1, 2), (2, 1), (3, 2), (4, 4)])
@pytest.mark.parametrize("number", range(0, len(PAIRS), 2))
def test_every_tile_size_gives_the_reference(number, tiles):
    args, options = make_call(PAIRS[number], seed=number)
    out, grads = run(args, options, partial(blockwise.attend, tiles=tiles))
    expected, expected_grads = run(args, options, "reference")
    np.testing.assert_allclose(out, expected, atol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), grads, expected_grads)
