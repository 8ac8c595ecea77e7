"""The replica axis: R runs of one program, compiled once, run by a chosen strategy.

A strategy is a layout (`layout.Layout`): how many devices, how many replicas each device holds at
a time, and whether those are vectorised (`vmap`) or looped (`lax.map`). One loop, `Runner.run`,
serves them all: each round it fills the slots with unfinished replicas and runs one chunk.

  sequential  one replica at a time on one device, to its end
  vmap        all replicas vectorised on one device
  sharded     vectorised on each of several devices
  map         looped on each of several devices
  queue       one replica per device and chunk, least advanced first: balanced for any R, and a
              replica that stopped early costs nothing
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tx_jax.errors import UserError, nearest
from tx_jax.study.layout import Keys, Layout, Program, Tree
from tx_jax.study.runner import Runner, compile_runner

__all__ = ("STRATEGIES", "Program", "Result", "candidates", "make_layout", "run_replicas")

STRATEGIES = ("sequential", "vmap", "sharded", "map", "queue")


@dataclass(frozen=True)
class Result:
    """What R replicas left behind; arrays live on the host.

    Attributes:
      carries: final carry of each replica, leaves [R, ...].
      records: one record per replica and chunk, leaves [R, chunks, ...]; past a replica's length
        NaN (floats) or 0 (other dtypes).
      lengths: chunks each replica ran, int [R].
      strategy: the one that ran; timings: seconds per chunk of R replicas of each candidate tried.
      seconds: wall time without compilation and without the timing of candidates.
      compile_seconds: compilation of all candidates in this call.
      flops: operations of one chunk of one replica, counted from the traced program.
    """

    carries: Tree
    records: Tree
    lengths: np.ndarray
    strategy: str
    timings: dict[str, float]
    seconds: float
    compile_seconds: float
    flops: int

    def share(self, r: int) -> float:
        """Wall seconds of replica r: the total, shared out by chunks run."""
        return self.seconds * float(self.lengths[r]) / max(1, int(self.lengths.sum()))


def make_layout(strategy: str, count: int, devices: Sequence[jax.Device]) -> Layout:
    """The layout of `strategy` for `count` replicas.

    Raises:
      UserError: unknown strategy.
    """
    devices = tuple(devices)[:max(1, count)]
    per_device = math.ceil(count / len(devices))
    layouts = {
        "sequential": Layout(devices[:1], 1, False),
        "vmap": Layout(devices[:1], count, True),
        "sharded": Layout(devices, per_device, True),
        "map": Layout(devices, per_device, False),
        "queue": Layout(devices, 1, False),
    }
    if strategy not in layouts:
        raise UserError(f"there is no replica strategy '{strategy}'{nearest(strategy, STRATEGIES)}")
    return layouts[strategy]


def candidates(count: int, devices: Sequence[jax.Device]) -> tuple[str, ...]:
    """Strategies worth timing: with one device vectorise or not, with several shard or queue."""
    if count == 1:
        return ("sequential",)
    return ("vmap", "sequential") if len(devices) == 1 else ("sharded", "queue")


def run_replicas(program: Program, replicas: Tree, shared: Tree, chunks: int, *,
                 strategy: str = "auto", devices: Sequence[jax.Device] | None = None,
                 stop: Callable[[Tree], bool] | None = None,
                 progress: Callable[[int], None] | None = None,
                 cache: dict[Any, Any] | None = None) -> Result:
    """Run every replica for `chunks` chunks.

    Args:
      replicas: pytree of arrays, leaves [R, ...]; shared: pytree of arrays common to all replicas.
      strategy: a name, or "auto": time a chunk under each of `candidates`, take the fastest and
        remember it in `cache`.
      devices: default all local devices.
      stop: host function of one replica's record (numpy); True ends that replica after this chunk.
      progress: called with the number of replica-chunks finished since the last call.
      cache: compiled programs to reuse and add to; give the same dict to later calls with the same
        program and shapes and nothing is compiled again.

    Raises:
      UserError: unknown strategy, no replicas, or no chunks.
    """
    leaves = jax.tree.leaves(replicas)
    count = int(leaves[0].shape[0]) if leaves else 0
    if count < 1 or chunks < 1:
        raise UserError(f"{count} replicas of {chunks} chunks leave nothing to run; "
                        "give at least one of each.")
    devices = tuple(devices or jax.local_devices())
    cache = {} if cache is None else cache
    keys = Keys.of(replicas)
    raw = jax.tree.map(np.asarray, keys.unwrap(replicas))
    names = candidates(count, devices) if strategy == "auto" else (strategy,)
    problem = (program, devices, keys, _signature(raw), _signature(shared))
    timings: dict[str, float] = cache.get(("timings", problem), {}) if len(names) > 1 else {}
    if timings:
        names = (min(timings, key=timings.__getitem__),)
    runners, compiled = {}, 0.0
    for name in names:
        layout = make_layout(name, count, devices)
        index = (layout, problem)
        if index not in cache:
            cache[index] = compile_runner(program, layout, raw, keys, shared)
            compiled += cache[index].compile_seconds
        runners[name] = cache[index]
    if len(names) > 1:
        timings = cache["timings", problem] = time_runners(runners, raw, shared, chunks)
    name = min(timings, key=timings.__getitem__) if timings else names[0]
    began = time.perf_counter()
    carries, records, lengths = runners[name].run(
        raw, shared, chunks, stop=stop, progress=progress, to_the_end=name == "sequential")
    return Result(carries, records, lengths, name, timings, time.perf_counter() - began, compiled,
                  runners[name].flops)


def time_runners(runners: dict[str, Runner], replicas: Tree, shared: Tree, chunks: int,
                 repeats: int = 2) -> dict[str, float]:
    """Seconds per chunk of all replicas: interleaved, the quickest of `repeats`."""
    best = dict.fromkeys(runners, math.inf)
    for _ in range(repeats):
        for name, runner in runners.items():
            best[name] = min(best[name], runner.time_chunk(replicas, shared, chunks))
    return best


def _signature(tree: Tree) -> tuple[Any, ...]:
    leaves, form = jax.tree.flatten(tree)
    return (form, *((np.shape(x), str(x.dtype)) for x in leaves))
