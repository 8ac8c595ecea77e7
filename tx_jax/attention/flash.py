"""Adapter to this project's FlashAttention kernel for Hopper GPUs (`kernels_pallas.forward`).

Half precision only. Blocks of keys before the first and after the last that a tile of queries may
see are skipped; memory grows with T + S. The kernel is the forward pass: gradients come from the
tiles of `blockwise`, which computes its own log-sum-exp again, so they are exact but not fast yet.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.config import default_config, padded_width
from kernels_pallas.forward import NO_SEGMENT, flash_forward
from kernels_pallas.ranges import block_ranges
from tx_jax.attention import blockwise
from tx_jax.attention._capabilities import Capabilities
from tx_jax.errors import UserError
from tx_jax.masks import Full, Mask, hide_unseen
from tx_jax.masks.tiles import tile_kinds

CAPABILITIES = Capabilities(
    rules=frozenset({"full", "causal", "window", "prefix", "global"}), segments=True,
    prefix_lengths=True, key_lengths=True, gqa=True, v_width=True, shifted=True, traced_start=True,
    jvp=False, dtypes=frozenset({"bfloat16", "float16"}), platforms=frozenset({"cuda"}),
    max_width=256, memory="T + S")


def attend(q_BTNH, k_BSKH, v_BSKH, *, mask, bias, score, score_params, scale, softcap, dropout,
           sink, q_start, interpret=None):
    """Attention [B, T, N, H of v] in the dtype of v; arguments as `tx_jax.attention.attend` gives
    them to implementations, and `plgpu.InterpretGPUParams` to run the kernel on a CPU.

    Raises:
      UserError: the GPU is no Hopper.
    """
    if interpret is None:
        _check_device()
    options = dict(bias=bias, score=score, score_params=score_params, scale=scale, softcap=softcap,
                   dropout=dropout, sink=sink)
    return _attend(_Static(options, interpret), q_BTNH, k_BSKH, v_BSKH, mask, q_start)


class _Static:
    """What is no array; compared by identity, as it lives for one call."""

    def __init__(self, options: dict[str, Any], interpret: Any):
        self.options, self.interpret = options, interpret


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, q_BTNH, k_BSKH, v_BSKH, mask, q_start):
    (T, S), start = (q_BTNH.shape[1], k_BSKH.shape[1]), q_start
    start = S - T if start is None else start
    call = partial(flash_forward, scale=float(static.options["scale"]), interpret=static.interpret)
    if mask is None:
        return call(q_BTNH, k_BSKH, v_BSKH)[0]
    if not _all_seen(mask, T, S, start):  # this copies
        q_BTNH, k_BSKH, v_BSKH = hide_unseen(mask, q_BTNH, k_BSKH, v_BSKH, start)
    return call(q_BTNH, k_BSKH, v_BSKH,
                **_mask_arguments(mask, q_BTNH.shape[0], T, S, start,
                                  max(q_BTNH.shape[3], v_BSKH.shape[3])))[0]


def _forward(static, q_BTNH, k_BSKH, v_BSKH, mask, q_start):
    return _attend(static, q_BTNH, k_BSKH, v_BSKH, mask, q_start), (q_BTNH, k_BSKH, v_BSKH, mask,
                                                                   q_start)


def _backward(static, saved, d_out_BTNH):
    q_BTNH, k_BSKH, v_BSKH, mask, q_start = saved
    _, pull = jax.vjp(partial(blockwise.attend, mask=mask, q_start=q_start, **static.options),
                      q_BTNH, k_BSKH, v_BSKH)
    return *pull(d_out_BTNH), None, None


_attend.defvjp(_forward, _backward)


def _all_seen(mask: Mask, T: int, S: int, start: Any) -> bool:
    """Whether every key is seen for sure, by the query at its own index."""
    alike = T == S and not isinstance(start, jax.Array) and start == 0
    # A rule with a band depends on the distance alone.
    return (alike and not jax.tree.leaves(mask) and mask.rule.band() is not None
            and bool(mask.rule.allowed(0, 0)))


def _mask_arguments(mask: Mask, B: int, T: int, S: int, start: Any, width: int) -> dict[str, Any]:
    """The keywords of the kernel that mean this mask."""
    config = default_config(padded_width(width))
    kinds = tile_kinds(mask, T, S, start, q_tile=config.rows, k_tile=config.block_kv)
    lengths, prefix = mask.k_lengths_B, mask.prefix_B
    ranges = block_ranges(jnp.asarray(kinds), S if lengths is None else jnp.minimum(lengths, S),
                          config.block_kv, 0 if prefix is None else prefix, start)
    segments = {}
    if mask.q_segments_BT is not None:
        # Segment 0 meets nothing, not even itself; the others may be any number but the smallest.
        q_ids, k_ids = (jnp.broadcast_to(ids, (B, ids.shape[1])).astype(jnp.int32)
                        for ids in (mask.q_segments_BT, mask.k_segments_BS))
        segments = {"q_segments_BT": q_ids,
                    "k_segments_BS": jnp.where(k_ids == 0, NO_SEGMENT, k_ids)}
    return dict(ranges=ranges, allowed=None if mask.rule == Full() else mask.rule.allowed,
                prefix=prefix is not None, lengths=lengths is not None, **segments)


def _check_device() -> None:
    """Raise UserError where the instructions of the kernel do not exist."""
    capability = getattr(jax.devices()[0], "compute_capability", "9.0")
    if capability != "9.0":
        raise UserError(f"attention 'flash' needs a Hopper GPU (compute capability 9.0), not "
                        f"{capability}; use --model.attention=cudnn or blockwise.")
