"""The FlashAttention kernel in the Mosaic GPU interpreter, on a CPU, with its race detector on.

What the interpreter of JAX 0.11.2 cannot do: a `wgmma` whose left operand is in registers, and
`run_state` with an accumulator. So weights x values is one function of the kernel with a branch for
the interpreter, and only compiling checks its other branch (`test_flash_compile.py`). Nor does it
know registers, the size of shared memory, or that a TMA copy beyond an array is an error. `exp2` is
exact here and approximate on a GPU.
"""

import math
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas import forward
from kernels_pallas.config import Config, padded_width
from kernels_pallas.forward import flash_forward
from kernels_pallas.ranges import FIRST, FULL_FIRST, FULL_LAST, LAST, block_ranges
from tx_jax.attention import attend, flash, request_of, resolve
from tx_jax.conformance import CHECKS, Subject, run_check
from tx_jax.errors import UserError
from tx_jax.masks import Causal, Full, Global, Mask, Window, dense_mask

INTERPRETED = partial(flash.attend, interpret=plgpu.InterpretGPUParams(detect_races=True))
INTERPRETED.CAPABILITIES = replace(flash.CAPABILITIES, platforms=None)
SEGMENTS = jnp.asarray(np.repeat([0, 1, -1, 1], [20, 70, 60, 50])[None], jnp.int32)


@contextmanager
def interpreter():
    """Races of other tests are forgotten, also where a kernel broke down."""
    gpu_callbacks.reset_gpu_interpret_mode_state()
    try:
        yield
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()


def inputs(T, S, H, dtype, B=1, N=2, K=1, V=None):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype)
            for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, V or H))]


def exact(q, k, v, allowed_BTS, scale):
    """Output and log-sum-exp in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = np.where(allowed_BTS[:, None], np.einsum("btnh,bsnh->bnts", q, k) * scale, -np.inf)
    peak = np.max(logits, axis=-1, keepdims=True)
    peak = np.where(peak == -np.inf, 0, peak)
    weights = np.exp(logits - peak)
    total = weights.sum(-1, keepdims=True)
    out = np.einsum("bnts,bsnh->btnh", weights / np.where(total == 0, 1, total), v)
    with np.errstate(divide="ignore"):
        return out, (peak + np.log(total))[..., 0]


def naive_error(q, k, v, allowed_BTS, scale):
    """Largest error of attention that keeps logits and weights in the dtype of its inputs."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) * jnp.asarray(scale, q.dtype)
    weights = jax.nn.softmax(logits, axis=-1, where=jnp.asarray(allowed_BTS)[:, None])
    out = np.asarray(jnp.einsum("bnts,bsnh->btnh", weights, v), np.float64)
    rows = np.any(allowed_BTS, -1)[:, :, None, None]
    return np.max(np.abs(np.where(rows, out, 0) - exact(q, k, v, allowed_BTS, scale)[0]))


def check(T, S, H, mask, dtype=jnp.bfloat16, q_start=None, **sizes):
    """The adapter against float64: within twice the error of naive attention, free of races, and
    deaf to NaN in keys and values that nobody sees."""
    q, k, v = inputs(T, S, H, dtype, **sizes)
    allowed = np.broadcast_to(dense_mask(mask, T, S, q_start), (q.shape[0], T, S))
    unseen = jnp.asarray(~allowed.any(1))[:, :, None, None]
    with interpreter():
        out = attend(q, jnp.where(unseen, jnp.nan, k), jnp.where(unseen, jnp.nan, v), mask=mask,
                     q_start=q_start, implementation=INTERPRETED)
        out = np.asarray(out, np.float64)
        assert not gpu_callbacks.get_races().races_found
    error = np.max(np.abs(out - exact(q, k, v, allowed, H**-0.5)[0]))
    assert error <= 2 * naive_error(q, k, v, allowed, H**-0.5), error


def test_causal_with_shared_heads_and_lengths_that_are_no_tiles():
    check(100, 200, 64, Causal())


def test_key_lengths_and_rows_without_keys():
    check(40, 140, 64, Mask(Full(), k_lengths_B=jnp.array([130, 0])), B=2, N=1)


@pytest.mark.slow
def test_gradients_are_those_of_the_reference():
    """Within twice the error that half precision makes in the reference, against its float32."""
    inputs_ = inputs(40, 70, 64, jnp.bfloat16)

    def pull(implementation, *inputs_):
        def loss(q, k, v):
            out = attend(q, k, v, mask=Causal(), implementation=implementation)
            return jnp.sum(jnp.sin(out.astype(jnp.float32)))
        return jax.grad(loss, (0, 1, 2))(*inputs_)

    with interpreter():
        found = pull(INTERPRETED, *inputs_)
    half = pull("reference", *inputs_)
    full = pull("reference", *(x.astype(jnp.float32) for x in inputs_))
    for a, b, c in zip(found, half, full, strict=True):
        a, b, c = (np.asarray(x, np.float64) for x in (a, b, c))
        assert np.abs(a - c).max() <= 2 * np.abs(b - c).max()


@pytest.mark.slow
@pytest.mark.parametrize("T, S, H, mask, options", [
    (300, 300, 64, Window(70), {}), (40, 300, 64, Window(70), {"N": 1}),
    (200, 200, 64, Mask(Causal(), SEGMENTS, SEGMENTS), {}),
    (200, 200, 40, Mask(Causal(), prefix_B=jnp.array([150])), {"V": 24}),
    (200, 200, 64, Window(40) | Global(3), {"dtype": jnp.float16}),
    (130, 100, 64, ~Causal(), {"q_start": -5}), (64, 300, 128, Causal(), {"N": 1}),
    (100, 200, 256, Causal(), {"N": 1})])
def test_other_masks_and_widths(T, S, H, mask, options):
    check(T, S, H, mask, **options)


@pytest.mark.parametrize("scale", [0.2, -0.3])
def test_log_sum_exp_is_natural(scale):
    q, k, v = inputs(64, 128, 64, jnp.bfloat16, N=1)
    with interpreter():
        out, lse = flash_forward(q, k, v, scale=scale,
                                 interpret=plgpu.InterpretGPUParams(detect_races=True))
        out, lse = np.asarray(out, np.float64), np.asarray(lse)
        assert not gpu_callbacks.get_races().races_found
    expected, expected_lse = exact(q, k, v, np.ones((1, 64, 128), bool), scale)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
    np.testing.assert_allclose(out, expected, atol=1e-2)


# Planted bugs.

def broken(T, S, mask):
    """Whether the tests above would notice: an error, a race, or another result."""
    q, k, v = inputs(T, S, 64, jnp.bfloat16, N=1)
    with interpreter():
        try:
            out = np.asarray(attend(q, k, v, mask=mask, implementation=INTERPRETED), np.float64)
            if gpu_callbacks.get_races().races_found:
                return True
        except Exception:  # the interpreter has its own words for each
            return True
    allowed = np.asarray(dense_mask(mask, T, S))
    return np.max(np.abs(out - exact(q, k, v, allowed, 1 / 8)[0])) > 0.05


@pytest.mark.parametrize("number", [0, 2])
def test_a_missing_wait_is_noticed(monkeypatch, number):
    """Number 0 of a step waits for keys, 2 for values.

    Two blocks only, so that each place of the ring is used once: where it is used again the
    interpreter stops one thread with an error and the others wait for it for ever. For that reason
    a loader that does not wait for a free place is not planted here.
    """
    count, wait, original = [math.inf], plgpu.barrier_wait, forward._step

    def counted(*args):
        count[0] = 0
        return original(*args)

    def skipping(barrier):
        count[0] += 1
        if count[0] - 1 != number:
            wait(barrier)

    monkeypatch.setattr(forward, "_step", counted)
    monkeypatch.setattr(plgpu, "barrier_wait", skipping)
    assert broken(40, 200, Full())


def test_one_block_too_few_is_noticed(monkeypatch):
    def short(*args):
        table = block_ranges(*args)
        bounds, rest = table[..., :LAST + 1], table[..., LAST + 1:]
        return jnp.concatenate([jnp.minimum(bounds, bounds[..., LAST:] - 1), rest], axis=-1)

    assert not broken(40, 140, Causal())
    monkeypatch.setattr(flash, "block_ranges", short)
    assert broken(40, 140, Causal())


# What needs no kernel.

def test_block_ranges():
    kinds = jnp.asarray([[0, 1, 2, 2, 1, 0], [0] * 6, [1, 2, 0, 2, 1, 1], [2] * 6], jnp.int8)
    table = block_ranges(kinds[None], 700, 128)
    assert table.shape == (1, 4, 8)
    columns = table[0][:, jnp.array([FIRST, FULL_FIRST, FULL_LAST, LAST])]
    assert columns.tolist() == [[1, 2, 4, 5], [0, 0, 0, 0], [0, 1, 2, 6], [0, 0, 5, 6]]


def test_what_the_kernel_cannot_do_is_refused():
    q = jnp.ones((1, 8, 2, 64), jnp.bfloat16)
    with pytest.raises(UserError, match="'flash' cannot do .*it needs an NVIDIA GPU"):
        attend(q, q, q, implementation="flash")
    asked = replace(request_of(q, q, q), platform="cuda")
    assert resolve("flash", asked)[0] == "flash"
    for change in ({"softcap": True}, {"dtype": "float32"}, {"width": 257}, {"sink": True},
                   {"rules": frozenset({"dilated"})}, {"bias": True}, {"dropout": True}):
        assert len(flash.CAPABILITIES.lacks(replace(asked, **change))) == 1
    with pytest.raises(ValueError, match="wider"):
        padded_width(257)
    with pytest.raises(ValueError, match="bfloat16"):
        flash_forward(*[q.astype(jnp.float32)] * 3, scale=1.0)
    assert Config().shared_bytes(128) < 227 * 1024


def test_another_gpu_is_refused(monkeypatch):
    class Ampere:
        compute_capability = "8.0"
    monkeypatch.setattr(jax, "devices", lambda: [Ampere()])
    with pytest.raises(UserError, match=r"needs a Hopper GPU .*, not 8\.0; use"):
        flash._check_device()


CONFORMANCE = ("future", "window_width", "end_alignment", "documents", "empty_rows", "refusals",
               "padding")


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFORMANCE)
def test_conformance(name):
    """The checks of visibility and shape; the others take the interpreter minutes."""
    interpreted = partial(flash.attend, interpret=plgpu.InterpretGPUParams())
    interpreted.CAPABILITIES = INTERPRETED.CAPABILITIES
    with interpreter():
        outcome = run_check(Subject("flash", interpreted, interpreted.CAPABILITIES),
                            {c.name: c for c in CHECKS}[name])
    assert outcome.status == "pass", outcome.detail
