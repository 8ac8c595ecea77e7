"""A compiled layout of replicas and the one loop that runs it; see `replicas.py`."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from tx_jax.study.flops import count_flops
from tx_jax.study.layout import Keys, Layout, Program, Tree


@dataclass(frozen=True)
class Runner:
    """A compiled layout; `run` may be called again and again, with other values of equal shape."""

    layout: Layout
    init_fn: Callable[..., Tree]
    step_fn: Callable[..., tuple[Tree, Tree]]
    keys: Keys
    flops: int
    compile_seconds: float

    def run(self, replicas: Tree, shared: Tree, chunks: int, *,
            stop: Callable[[Tree], bool] | None = None,
            progress: Callable[[int], None] | None = None,
            to_the_end: bool = False) -> tuple[Tree, Tree, np.ndarray]:
        """Return (carries [R, ...], records [R, chunks, ...], lengths [R]) on the host.

        Args:
          replicas: numpy leaves [R, ...], keys as raw integers.
          to_the_end: finish the replicas in the slots before starting others.
        """
        count = len(jax.tree.leaves(replicas)[0])
        pool = _Pool(self, replicas, shared, count)
        left = np.full(count, chunks)
        rows: list[list[Tree]] = [[] for _ in range(count)]
        pending: list[tuple[list[int], Tree]] = []
        while left.any() or pending:
            if left.any():
                live = [int(r) for r in np.flatnonzero(left)]
                if not to_the_end:
                    live.sort(key=lambda r: -left[r])
                seated = pool.seat(live)
                pending.append((seated, pool.step()))
                left[[r for r in seated if r >= 0]] -= 1
            # Without a stop rule the next round is dispatched before this one's records are read.
            if len(pending) > 1 or stop is not None or not left.any():
                seated, records = pending.pop(0)
                records = jax.tree.map(np.asarray, records)
                for slot, r in enumerate(seated):
                    if r >= 0:
                        rows[r].append(jax.tree.map(lambda x, s=slot: x[s], records))
                        if stop is not None and stop(rows[r][-1]):
                            left[r] = 0
                if progress is not None:
                    progress(sum(r >= 0 for r in seated))
        return self.keys.wrap(pool.carries()), _stack_records(rows, chunks), np.array(
            [len(x) for x in rows])

    def time_chunk(self, replicas: Tree, shared: Tree, chunks: int) -> float:
        """Wall seconds per chunk of every replica in a run of `chunks`, from fresh carries.

        Times rounds without an empty slot: over a run of many chunks a queue has hardly any other.
        """
        count, slots = len(jax.tree.leaves(replicas)[0]), self.layout.slots
        pool = _Pool(self, replicas, shared, count)
        jax.block_until_ready(pool.parts or pool.stacked)
        began, records, full = time.perf_counter(), [], max(1, count // slots)
        for first in range(0, full * slots, slots):
            pool.seat(list(range(first, min(count, first + slots))))
            records.append(pool.step())
        jax.block_until_ready(records)
        seconds = time.perf_counter() - began
        return seconds / full * max(chunks, math.ceil(count * chunks / slots)) / chunks


class _Pool:
    """Carries of all replicas during one run.

    When every replica has a slot the carries stay stacked on the devices. Otherwise (one slot per
    device) each carry is a part of leading size 1 on the device that ran it last.
    """

    def __init__(self, runner: Runner, replicas: Tree, shared: Tree, count: int) -> None:
        self.runner, self.layout, self.replicas, self.count = runner, runner.layout, replicas, count
        self.shared = jax.device_put(shared, self.layout.replicated)
        self.resident = self.layout.slots >= count
        self.seated: list[int] = []
        self.stacked: Tree = None
        self.parts: list[Tree] = []
        slots = self.layout.slots
        self.home = [r % slots for r in range(count)]  # the slot a replica sat in last
        for first in range(0, count, slots):
            chosen = [min(first + i, count - 1) for i in range(slots)]
            carry = runner.init_fn(self._place(_take(replicas, chosen)), self.shared)
            if self.resident:
                self.stacked, self.members = carry, self._place(_take(replicas, chosen))
            else:
                self.parts += self._split(carry)
        if not self.resident:
            # Parts past the last replica fill slots that would otherwise be empty.
            while len(self.parts) < count + slots:
                self.parts.append(jax.tree.map(lambda x: x.copy(), self.parts[0]))

    def seat(self, wanted: Sequence[int]) -> list[int]:
        """Give slots to the first of `wanted`; return the replica of each slot, -1 for none."""
        slots = self.layout.slots
        if self.resident:
            chosen = set(wanted)
            answer = [r if r in chosen else -1 for r in range(self.count)]
            answer += [-1] * (slots - self.count)
        else:
            answer, moving = [-1] * slots, []
            for r in wanted[:slots]:  # to the device that holds its carry, if that slot is free
                if answer[self.home[r]] < 0:
                    answer[self.home[r]] = r
                else:
                    moving.append(r)
            answer = [r if r >= 0 or not moving else moving.pop(0) for r in answer]
        if answer != self.seated:
            if not self.resident:
                self._leave()
                rows = [r if r >= 0 else 0 for r in answer]
                self.members = self._place(_take(self.replicas, rows))
                self.stacked = self._join([self.parts[r if r >= 0 else self.count + slot]
                                           for slot, r in enumerate(answer)])
            self.seated = answer
            self.active = self._place(np.array([r >= 0 for r in answer]))
        return answer

    def step(self) -> Tree:
        """Run one chunk of the seated replicas; return the records [slots, ...]."""
        self.stacked, records = self.runner.step_fn(
            self.active, self.members, self.stacked, self.shared)
        return records

    def carries(self) -> Tree:
        """All carries on the host, leaves [R, ...]."""
        if self.resident:
            return jax.tree.map(lambda x: np.asarray(x)[:self.count], self.stacked)
        self._leave()
        return jax.tree.map(lambda *xs: np.concatenate([np.asarray(x) for x in xs]),
                            *self.parts[:self.count])

    def _leave(self) -> None:
        if self.seated:
            for slot, part in enumerate(self._split(self.stacked)):
                r = self.seated[slot]
                if r >= 0:
                    self.home[r] = slot
                self.parts[r if r >= 0 else self.count + slot] = part
            self.seated, self.stacked = [], None

    def _place(self, tree: Tree) -> Tree:
        return jax.device_put(tree, self.layout.sharding)

    def _split(self, carry: Tree) -> list[Tree]:
        order = {d: i for i, d in enumerate(self.layout.devices)}
        leaves, form = jax.tree.flatten(carry)
        shards = [sorted(x.addressable_shards, key=lambda s: order[s.device]) for x in leaves]
        return [form.unflatten([s[i].data for s in shards]) for i in range(len(order))]

    def _join(self, parts: Sequence[Tree]) -> Tree:
        moved = [p if next(iter(jax.tree.leaves(p)[0].devices())) == d else jax.device_put(p, d)
                 for p, d in zip(parts, self.layout.devices, strict=True)]
        return jax.tree.map(lambda *xs: jax.make_array_from_single_device_arrays(
            (len(xs), *xs[0].shape[1:]), self.layout.sharding, list(xs)), *moved)


def compile_runner(program: Program, layout: Layout, replicas: Tree, replica_keys: Keys,
                   shared: Tree) -> Runner:
    """Compile `program` for the slots of `layout`: one compilation of init, one of step.

    Args:
      replicas: numpy leaves [R, ...], keys as raw integers; only shapes and dtypes are read.
    """
    began = time.perf_counter()
    found: list[Keys] = []

    def first(replica, common):
        carry = program.init(replica_keys.wrap(replica), common)
        found.append(Keys.of(carry))
        return found[0].unwrap(carry)

    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), replicas)
    common = jax.tree.map(lambda x: jax.ShapeDtypeStruct(
        np.shape(x), x.dtype, sharding=layout.replicated), shared)
    carry = jax.eval_shape(first, one, common)

    def chunk(replica, raw, common):
        state, record = program.step(replica_keys.wrap(replica), found[0].wrap(raw), common)
        return found[0].unwrap(state), record

    record = jax.eval_shape(chunk, one, carry, common)[1]

    def step(active, replica, raw, common):
        empty = jax.tree.map(lambda s: jax.numpy.zeros(s.shape, s.dtype), record)
        return jax.lax.cond(active, lambda raw: chunk(replica, raw, common),
                            lambda raw: (raw, empty), raw)

    def slot_shapes(tree):
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct(
            (layout.slots, *s.shape), s.dtype, sharding=layout.sharding), tree)

    slot, whole = PartitionSpec("slot"), PartitionSpec()
    shard = partial(jax.shard_map, mesh=layout.sharding.mesh, out_specs=slot, check_vma=False)
    all_init = shard(lambda rs, common: jax.lax.map(lambda r: first(r, common), rs),
                     in_specs=(slot, whole))
    all_step = shard(_over_group(step, layout), in_specs=(slot, slot, slot, whole))
    members, active = slot_shapes(one), slot_shapes(jax.ShapeDtypeStruct((), np.bool_))
    # Devices of a CPU are its threads: with several busy, splitting each matmul again only costs.
    alone = len(layout.devices) > 1 and layout.devices[0].platform == "cpu"
    options = {"xla_cpu_multi_thread_eigen": False} if alone else None
    init_fn = jax.jit(all_init).lower(members, common).compile()
    step_fn = jax.jit(all_step, donate_argnums=2).lower(
        active, members, slot_shapes(carry), common).compile(compiler_options=options)
    return Runner(layout, init_fn, step_fn, found[0], count_flops(chunk, one, carry, common),
                  time.perf_counter() - began)


def _over_group(step: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """`step` over the replicas that one device holds."""
    if layout.vectorised:
        return jax.vmap(step, in_axes=(0, 0, 0, None))
    if layout.group > 1:
        return lambda active, replica, raw, common: jax.lax.map(
            lambda xs: step(*xs, common), (active, replica, raw))

    def single(active, replica, raw, common):
        active, replica, raw = jax.tree.map(lambda x: x[0], (active, replica, raw))
        return jax.tree.map(lambda x: x[None], step(active, replica, raw, common))

    return single


def _take(tree: Tree, rows: Sequence[int]) -> Tree:
    return jax.tree.map(lambda x: x[np.asarray(rows)], tree)


def _stack_records(rows: list[list[Tree]], chunks: int) -> Tree:
    def stack(*leaves):
        out = np.zeros((len(rows), chunks, *leaves[0].shape), leaves[0].dtype)
        if np.issubdtype(out.dtype, np.floating):
            out[:] = math.nan
        at = iter(leaves)
        for r, row in enumerate(rows):
            for c in range(len(row)):
                out[r, c] = next(at)
        return out

    return jax.tree.map(stack, *[record for row in rows for record in row])
