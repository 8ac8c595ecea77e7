"""Blockwise attention: any tile size, every pair of options, memory linear in the length."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention_loops import PAIRS, make_call
from tests.test_attention_pairs import run
from tx_jax.attention import attend, blockwise
from tx_jax.masks import parse_mask


@pytest.mark.parametrize("tiles", [(1, 2), (2, 1), (3, 2), (4, 4)])
@pytest.mark.parametrize("number", range(0, len(PAIRS), 2))
def test_every_tile_size_gives_the_reference(number, tiles):
    args, options = make_call(PAIRS[number], seed=number)
    out, grads = run(args, options, partial(blockwise.attend, tiles=tiles))
    expected, expected_grads = run(args, options, "reference")
    np.testing.assert_allclose(out, expected, atol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), grads, expected_grads)


@pytest.mark.parametrize("rule, T, S, start", [
    ("causal", 8, 2, -4), ("causal", 4, 2, -9), ("dilated(2)", 2, 1, 1), ("full", 3, 2, 0),
    ("causal", 4, 2, 5)])
def test_one_tile_of_keys_that_some_rows_do_not_see(rule, T, S, start):
    q, k, v = (jnp.arange(float(2 * n * 3)).reshape(1, n, 2, 3) / 9 for n in (T, S, S))
    for tiles in ((2, 2), (8, 8), (1, 1)):
        def both(name, q, k, v):
            out, pull = jax.vjp(lambda *a: attend(*a, mask=parse_mask(rule), q_start=start,
                                                  implementation=name), q, k, v)
            return out, pull(jnp.cos(out))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
                     both(partial(blockwise.attend, tiles=tiles), q, k, v),
                     both("reference", q, k, v))
