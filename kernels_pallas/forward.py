"""FlashAttention forward for Hopper in Pallas Mosaic GPU.

One block of the grid owns the query rows of one tile and one head. A loader warpgroup streams tiles
of keys and values through a ring in shared memory; two compute warpgroups take half of the rows
each and hand the tensor cores to each other, so that one runs its softmax while the other
multiplies (Shah et al. 2024, FlashAttention-3, section 3.1). The softmax runs online in base 2
(Dao et al. 2022, algorithm 1) with accumulators in float32.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels_pallas.config import COMPUTE, Config, default_config, padded_width
from kernels_pallas.ranges import (
    COLUMNS,
    FIRST,
    FULL,
    FULL_FIRST,
    FULL_LAST,
    LAST,
    LENGTH,
    PREFIX,
    START,
    block_ranges,
)

LOG2E = math.log2(math.e)
# Of a key that no query meets.
NO_SEGMENT = -2**31
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)


@dataclass(frozen=True)
class _Plan:
    """What the kernel knows while it is traced."""

    config: Config
    width: int
    group: int
    dtype: Any
    scale_log2: float
    blocks: int
    allowed: Callable[[Any, Any], Any] | None
    prefix: bool
    lengths: bool
    per_example: bool  # block ranges differ between examples
    interpret: bool

    def slot(self, step):
        stages = self.config.stages
        if stages & (stages - 1):
            return lax.rem(step, jnp.int32(stages))
        return step & (stages - 1)  # no sign to care for: fewer instructions


def flash_forward(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, *, scale: float,
                  ranges: jax.Array | None = None,
                  allowed: Callable[[Any, Any], Any] | None = None, prefix: bool = False,
                  lengths: bool = False,
                  q_segments_BT: jax.Array | None = None, k_segments_BS: jax.Array | None = None,
                  config: Config | None = None, interpret: Any = None
                  ) -> tuple[jax.Array, jax.Array]:
    """Attention and its log-sum-exp without the table of weights (Dao et al. 2022, algorithm 1).

    A pair may meet when `allowed` (or the prefix) says so, its key is below the length in `ranges`,
    and both segments are equal. A row without such a key gives zeros and minus infinity.
    Lengths that are no multiple of a tile, and widths without a kernel, are padded, which copies.

    Args:
      q_BTNH: queries, bfloat16 or float16. k_BSKH, v_BSKH: keys and values of the same dtype; query
        head n meets key head n // (N / K); the width of v may differ. Keys and values that no query
        sees must be finite.
      scale: factor of the products, a Python number.
      ranges: int32 [1|B, tiles, 8] from `ranges.block_ranges`; None = every query sees every key.
      allowed: static function of two int32 arrays (absolute index of query and key) that is applied
        in the blocks that `ranges` does not call full; None = no such rule.
      prefix, lengths: whether the prefix lengths, or the lengths, in `ranges` count; where S is no
        multiple of a block the lengths always do.
      q_segments_BT, k_segments_BS: int32; padding is 0 in queries and `NO_SEGMENT` in keys, which
        no query may have; both or none.
      config: tiles; None = `default_config`.
      interpret: `plgpu.InterpretGPUParams` to run on a CPU.

    Returns:
      out [B, T, N, width of v] in the dtype of v; natural log-sum-exp [B, N, T], float32.

    Raises:
      ValueError: dtype, shapes or width do not fit.
    """
    _check(q_BTNH, k_BSKH, v_BSKH, q_segments_BT, k_segments_BS)
    (_, T, N, H), (S, K), V = q_BTNH.shape, k_BSKH.shape[1:3], v_BSKH.shape[3]
    width = padded_width(max(H, V))
    config = config or default_config(width)
    if scale <= 0:  # the running maximum is kept multiplied by the scale, so that must be positive
        q_BTNH, scale = (-q_BTNH, -scale) if scale else (jnp.zeros_like(q_BTNH), 1.0)
    if ranges is None and S % config.block_kv:
        tiles, blocks = -(-T // config.rows), -(-S // config.block_kv)
        ranges = block_ranges(jnp.full((1, tiles, blocks), FULL, jnp.int8), S, config.block_kv)
    q, k, v = (_pad(_pad(x, 3, width), 1, size) for x, size in (
        (q_BTNH, config.rows), (k_BSKH, config.block_kv), (v_BSKH, config.block_kv)))
    lengths = lengths or S % config.block_kv > 0
    per_example = ranges is not None and ranges.shape[0] > 1
    plan = _Plan(config, width, N // K, q.dtype, float(scale) * LOG2E,
                 k.shape[1] // config.block_kv, allowed, prefix, lengths, per_example,
                 interpret is not None)
    extra = {"ranges": None if ranges is None else ranges.reshape(-1)}
    if q_segments_BT is not None:
        extra |= {"q_segments": _pad(q_segments_BT, 1, config.rows),
                  "k_segments": _pad(k_segments_BS, 1, config.block_kv, NO_SEGMENT)}
    out, lse = _call(plan, q, k, v, {n: x for n, x in extra.items() if x is not None}, interpret)
    return out[:, :T, :, :V], lse[:, :, :T]


def _call(plan: _Plan, q, k, v, extra: dict, interpret):
    """The kernel on padded arrays."""
    config, (B, T, N, H) = plan.config, q.shape
    names = tuple(extra)

    def flash_forward_kernel(q_ref, k_ref, v_ref, *rest, **scratch):
        masks, (out_ref, lse_ref) = dict(zip(names, rest, strict=False)), rest[len(names):]
        scope = _Scope(plan, masks, **scratch)

        @pl.when(lax.axis_index("wg") < COMPUTE)
        def _():
            plgpu.set_max_registers(232 if H < 256 else 240, action="increase")
            _compute(scope, q_ref, out_ref, lse_ref)

        @pl.when(lax.axis_index("wg") == COMPUTE)
        def _():
            plgpu.set_max_registers(40 if H < 256 else 24, action="decrease")
            _load(scope, k_ref, v_ref)

    return plgpu.kernel(
        flash_forward_kernel,
        out_type=(jax.ShapeDtypeStruct(q.shape, q.dtype),
                  jax.ShapeDtypeStruct((B, N, T), jnp.float32)),
        scratch_types=_scratch(plan), grid=(N, T // config.rows, B),
        grid_names=("heads", "tiles", "batch"), num_threads=COMPUTE + 1, thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True), interpret=interpret,
    )(q, k, v, *extra.values())


def _scratch(plan: _Plan) -> dict:
    c = plan.config
    layout = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    ring = plgpu.SMEM((c.stages, c.block_kv, plan.width), plan.dtype, transforms=layout)
    return {
        "rows": plgpu.SMEM((COMPUTE, c.block_q, plan.width), plan.dtype, transforms=layout),
        "keys": ring, "values": ring,
        "lse": plgpu.SMEM((COMPUTE, c.block_q), jnp.float32),
        "rows_full": plgpu.Barrier(num_barriers=COMPUTE),
        "keys_full": plgpu.Barrier(num_barriers=c.stages),
        "values_full": plgpu.Barrier(num_barriers=c.stages),
        "keys_free": plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=c.stages),
        "values_free": plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=c.stages),
        "turn": plgpu.Barrier(num_arrivals=COMPUTE),
    }


@dataclass(frozen=True)
class _Scope:
    """References of one block: masks in global memory, then shared memory and barriers."""

    plan: _Plan
    masks: dict
    rows: Any
    keys: Any
    values: Any
    lse: Any
    rows_full: Any
    keys_full: Any
    values_full: Any
    keys_free: Any
    values_free: Any
    turn: Any

    def bound(self, column: int):
        """One number of the block ranges of this tile."""
        example = lax.axis_index("batch") if self.plan.per_example else 0
        at = (example * lax.axis_size("tiles") + lax.axis_index("tiles")) * COLUMNS
        return self.masks["ranges"][at + column]

    def span(self) -> tuple:
        """First block, first and last full block, last block; the last ones exclusive."""
        if "ranges" not in self.masks:
            return tuple(jnp.int32(x) for x in (0, 0, self.plan.blocks, self.plan.blocks))
        return tuple(self.bound(c) for c in (FIRST, FULL_FIRST, FULL_LAST, LAST))

    def change_turns(self):
        plgpu.barrier_arrive(self.turn)
        plgpu.barrier_wait(self.turn)


def _load(scope: _Scope, k_ref, v_ref):
    """The loader: every block of this tile through the ring, in order."""
    plan, block_kv, stages = scope.plan, scope.plan.config.block_kv, scope.plan.config.stages
    first, _, _, last = scope.span()
    batch, head = lax.axis_index("batch"), lax.div(lax.axis_index("heads"), plan.group)

    # Ends only when every tile has been released, so that no barrier is left unobserved.
    @pl.loop(0, last - first + stages)
    def _(count):
        slot = plan.slot(count)
        source = (batch, pl.ds((first + count) * block_kv, block_kv), head)
        for ref, ring, full, free in (
                (k_ref, scope.keys, scope.keys_full, scope.keys_free),
                (v_ref, scope.values, scope.values_full, scope.values_free)):
            @pl.when(count >= stages)
            def _(free=free):
                plgpu.barrier_wait(free.at[slot])

            @pl.when(count < last - first)
            def _(ref=ref, ring=ring, full=full):
                plgpu.copy_gmem_to_smem(ref.at[source], ring.at[slot], full.at[slot])


def _compute(scope: _Scope, q_ref, out_ref, lse_ref):
    """A compute warpgroup: its rows against every block, then output and log-sum-exp."""
    plan, wg, block_q = scope.plan, lax.axis_index("wg"), scope.plan.config.block_q
    base = lax.axis_index("tiles") * plan.config.rows + wg * block_q
    batch, head, rows = lax.axis_index("batch"), lax.axis_index("heads"), pl.ds(base, block_q)
    q_smem = scope.rows.at[wg]
    plgpu.copy_gmem_to_smem(q_ref.at[batch, rows, head], q_smem, scope.rows_full.at[wg])
    first, full_first, full_last, last = scope.span()
    plgpu.barrier_wait(scope.rows_full.at[wg])
    carry = (plgpu.layout_cast(jnp.zeros((block_q, plan.width), jnp.float32), plgpu.Layout.WGMMA),
             plgpu.layout_cast(jnp.full((block_q,), -jnp.inf, jnp.float32), ROW),
             plgpu.layout_cast(jnp.zeros((block_q,), jnp.float32), ROW))
    pl.when(wg == 1)(scope.change_turns)  # the other one multiplies first

    def blocks(low, high, carry, masked):
        return lax.fori_loop(low - first, high - first, lambda count, carry: _step(
            scope, first, count, q_smem, base, carry, masked), carry)

    if "ranges" in scope.masks:
        carry = blocks(first, full_first, carry, True)
    carry = blocks(full_first, full_last, carry, False)
    if "ranges" in scope.masks:
        carry = blocks(full_last, last, carry, True)
    acc, m, total = carry
    pl.when(wg == 0)(scope.change_turns)
    safe = jnp.where(total == 0, 1.0, total) if "ranges" in scope.masks else total
    q_smem[...] = (acc * _wide(1 / safe, acc.shape)).astype(plan.dtype)
    scope.lse.at[wg][...] = m * (1 / LOG2E) + jnp.log(safe)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_smem, out_ref.at[batch, rows, head])
    plgpu.copy_smem_to_gmem(scope.lse.at[wg], lse_ref.at[batch, head, rows])
    plgpu.wait_smem_to_gmem(0)


def _step(scope: _Scope, first, count, q_smem, base, carry, masked: bool):
    """One block of keys: products, online softmax, weighted sum."""
    plan, (acc, m, total) = scope.plan, carry
    slot, shape = plan.slot(count), (plan.config.block_q, plan.config.block_kv)
    plgpu.barrier_wait(scope.keys_full.at[slot])

    if plan.interpret:  # its race detector does not see what wgmma reads
        acc = acc + 0 * jnp.sum(scope.keys.at[slot][...].astype(jnp.float32))
        plgpu.commit_smem()

    def products(ref):
        plgpu.wgmma(ref, q_smem, scope.keys.at[slot].T)
        scope.change_turns()
        return ref[...]

    logits = pl.run_scoped(products, plgpu.ACC(shape, jnp.float32))
    plgpu.barrier_arrive(scope.keys_free.at[slot])
    visible = _visible(scope, first + count, base, shape) if masked else None
    if visible is not None:
        logits = jnp.where(visible, logits, -jnp.inf)
    peak = jnp.maximum(m, jnp.max(logits, axis=1) * plan.scale_log2)
    # A row that has seen no key yet: minus infinity less minus infinity would be NaN.
    safe = jnp.where(peak == -jnp.inf, 0.0, peak) if masked else peak
    fade = jnp.exp2(m - safe)
    weights = jnp.exp2(logits * plan.scale_log2 - _wide(safe, shape))
    acc, total = acc * _wide(fade, acc.shape), total * fade + jnp.sum(weights, axis=1)
    weights = weights.astype(plan.dtype)
    # The softmax ends before the other warpgroup gets its turn.
    acc, total, peak, weights = lax.optimization_barrier((acc, total, peak, weights))
    plgpu.barrier_arrive(scope.turn)
    plgpu.barrier_wait(scope.values_full.at[slot])
    plgpu.barrier_wait(scope.turn)
    acc = _add_product(plan, acc, weights, scope.values.at[slot])
    plgpu.barrier_arrive(scope.values_free.at[slot])
    return acc, peak, total


def _add_product(plan: _Plan, acc, weights, v_smem):
    """acc + weights @ v with the weights in registers."""
    if plan.interpret:  # the interpreter knows wgmma from shared memory only
        values = v_smem[...]
        plgpu.commit_smem()  # a plain read, unlike wgmma, must be fenced from the next TMA copy
        return acc + jnp.dot(weights, values, preferred_element_type=jnp.float32)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weights, v_smem))(plgpu.ACC.init(acc))


def _visible(scope: _Scope, j, base, shape):
    """Which pairs of a tile may meet, bool [block_q, block_kv]; None = all."""
    plan, masks, block_kv = scope.plan, scope.masks, scope.plan.config.block_kv
    k_idx = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + j * block_kv
    terms = [k_idx < scope.bound(LENGTH)] if plan.lengths else []
    if plan.allowed is not None:
        q_idx = (plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
                 + (base + scope.bound(START)))
        rule = plan.allowed(q_idx, k_idx)
        terms.append((rule | (k_idx < scope.bound(PREFIX))) if plan.prefix else rule)
    if "q_segments" in masks:
        batch = lax.axis_index("batch")
        q_seg = plgpu.load(masks["q_segments"].at[batch, pl.ds(base, shape[0])], layout=ROW,
                           optimized=False)
        k_seg = plgpu.load(masks["k_segments"].at[batch, pl.ds(j * block_kv, block_kv)],
                           layout=COLUMN, optimized=False)
        terms.append(_wide(q_seg, shape) == lax.broadcast_in_dim(k_seg, shape, [1]))
    return functools.reduce(jnp.logical_and, terms) if terms else None


def _wide(x, shape):
    """A number per row, on every column."""
    return lax.broadcast_in_dim(x, shape, [0])


def _pad(x: jax.Array, axis: int, size: int, value: int = 0) -> jax.Array:
    """Padded at the end to a multiple of `size`."""
    missing = -x.shape[axis] % size
    if not missing:
        return x
    pads = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, pads, constant_values=value)


def _check(q, k, v, q_segments, k_segments) -> None:
    if any(x.ndim != 4 or x.dtype not in (jnp.bfloat16, jnp.float16) for x in (q, k, v)):
        raise ValueError("queries, keys and values must be [B, length, heads, width] in bfloat16 "
                         f"or float16, not {q.shape} {q.dtype}, {k.shape} {k.dtype}, {v.shape} "
                         f"{v.dtype}.")
    if not q.dtype == k.dtype == v.dtype or k.shape[:3] != v.shape[:3] or (
            q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]):
        raise ValueError(f"queries {q.shape} {q.dtype}, keys {k.shape} {k.dtype} and values "
                         f"{v.shape} {v.dtype} do not fit together.")
    if (q_segments is None) != (k_segments is None):
        raise ValueError("give segments for both queries and keys or for none.")
