"""Blockwise attention where its own bookkeeping could go wrong; conformance has the contract."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tx_jax.attention import attend, blockwise, request_of, resolve
from tx_jax.attention._tiles import tile_sizes
from tx_jax.masks import Causal, Mask, Window, parse_mask


@pytest.mark.slow
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


def peak(mask, T=4096, H=64):
    """Bytes beyond inputs and outputs, and those of inputs and outputs, forward and backward."""
    spec = jax.ShapeDtypeStruct((1, T, 1, H), jnp.float32)

    def both(q, k, v, d_out):
        out, pull = jax.vjp(partial(attend, mask=mask, implementation="blockwise"), q, k, v)
        return out, pull(d_out)

    used = jax.jit(both).lower(spec, spec, spec, spec).compile().memory_analysis()
    return used.temp_size_in_bytes, used.argument_size_in_bytes + used.output_size_in_bytes


def test_peak_memory_stays_near_inputs_and_outputs_at_16k():
    """Within 4 times of them, forward and backward, and linear from 4k on."""
    sizes = [peak(Causal(), T) for T in (4096, 16384)]
    for more, named in sizes:
        assert more + named < 2 * named
    assert sizes[1][0] < 4 * sizes[0][0]


def test_a_sparse_mask_gets_smaller_tiles():
    assert tile_sizes(1, 16384, 16384, mask=Mask(Causal())) == (512, 512)
    assert tile_sizes(1, 16384, 16384, mask=Mask(Window(256))) == (128, 128)
    segments = jnp.ones((1, 4096), jnp.int32)
    assert tile_sizes(1, 4096, 4096, mask=Mask(Causal(), segments, segments)) == (128, 128)
    assert tile_sizes(8, 256, 256, mask=Mask(Causal())) == (256, 256)


def test_it_is_the_default_but_for_small_calls():
    def chosen(T):
        spec = jax.ShapeDtypeStruct((4, T, 4, 32), jnp.float32)
        return resolve(None, request_of(spec, spec, spec))[0]
    assert [chosen(T) for T in (32, 128, 2048)] == ["reference", "blockwise", "blockwise"]
