"""The part `probes` of the length study: its flags, its cells, and what running them means.

Learning rates of the preset small: see `Probes.lrs`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import _probe_training, _probes
from experiments._kernel import kernel_name, shape
from tx_jax.config import ModelConfig, OptimConfig, check, option
from tx_jax.errors import UserError, nearest
from tx_jax.positions import make_encoding
from tx_jax.study.cells import Cell, canonical
from tx_jax.study.contract import Context
from tx_jax.study.ledger import Measured
from tx_jax.study.replicas import run_replicas

PART = "probes"
CHUNKS = 20  # records of a run


@dataclass(frozen=True)
class Probes:
    """Part `probes`: algorithmic tasks beyond the lengths of training."""

    tasks: tuple[str, ...] = option(("reverse", "recall"), f"tasks: {', '.join(_probes.TASKS)}")
    arms: tuple[str, ...] = option(("none", "t5", "alibi", "rope", "sinusoidal"),
                                   "position schemes, as in --model.positions")
    train_length: int = option(8, "L: training lengths are uniform in 1 .. L", low=1)
    test_lengths: tuple[int, ...] = option((4, 8, 10, 12, 16, 20), "lengths of the tests; some "
                                           "within the training lengths and some beyond", low=1)
    test_rows: int = option(200, "prompts per test length", low=1)
    symbols: int = option(40, "symbols of the alphabet; recall needs twice the longest test",
                          low=10, high=127 - _probes.FIRST)
    lrs: tuple[float, ...] = option((3e-3,), "learning rates", low=0.0)
    seeds: int = option(3, "seeds", low=1)
    steps: int = option(800, f"optimizer steps; a multiple of {CHUNKS}", low=CHUNKS,
                        multiple_of=CHUNKS)
    batch: int = option(32, "rows per step", low=1)
    layers: int = option(2, "blocks", low=1)
    d_model: int = option(64, "width", low=1)
    heads: int = option(2, "heads", low=1)

    def __post_init__(self) -> None:
        check(self, PART)
        for name in self.tasks:
            if name not in _probes.TASKS:
                raise UserError(f"--probes.tasks names '{name}', which is unknown"
                                f"{nearest(name, _probes.TASKS)}")
        for arm in self.arms:
            make_encoding(arm)
        inside = [n for n in self.test_lengths if n <= self.train_length]
        if not inside or len(inside) == len(self.test_lengths):
            raise UserError(f"--probes.test_lengths={','.join(map(str, self.test_lengths))} lie all"
                            f" on one side of --probes.train_length={self.train_length}; give some "
                            "up to it and some beyond.")
        longest = max(self.test_lengths)
        if "recall" in self.tasks and self.symbols < 2 * longest:
            raise UserError(f"--probes.symbols={self.symbols} has not enough keys for recall with "
                            f"{longest} pairs; make it {2 * longest} or drop a test length.")

    def model(self, arm: str, attention: str) -> ModelConfig:
        """The architecture of an arm; few layers compile and run faster unrolled."""
        return ModelConfig(layers=self.layers, d_model=self.d_model, heads=self.heads,
                           positions=arm, attention=attention, scan=self.layers > 4)

    def size(self, task: str) -> int:
        """Tokens of a training row: tasks of nearly equal size share a program."""
        return -(-(_probes.width(task, self.train_length) - 1) // 8) * 8 + 1

    @property
    def context(self) -> int:
        """Tokens of the longest test row of any task, whichever are chosen."""
        return max(_probes.width(task, max(self.test_lengths)) for task in _probes.TASKS)


def cells(probes: Probes, study: str, own: dict[str, Any]) -> list[Cell]:
    """Every task, scheme, learning rate and seed; `own`: further settings that decide results."""
    fields = ("train_length", "test_lengths", "test_rows", "symbols", "steps", "batch", "layers",
              "d_model", "heads")
    text = canonical(own | {name: getattr(probes, name) for name in fields})
    return [Cell(study, PART, arm, (("task", task), ("lr", lr)), seed, text)
            for task in probes.tasks for lr in probes.lrs for arm in probes.arms
            for seed in range(probes.seeds)]


def group(probes_size: int, cell: Cell) -> tuple[Any, ...]:
    """Cells that train as one program."""
    return PART, cell.arm, probes_size


def run(probes: Probes, members: list[Cell], context: Context, *, attention: str, strategy: str
        ) -> Iterator[tuple[Cell, Measured]]:
    """Train the cells of one scheme side by side and test each at every length."""
    task = _probe_training.Task(
        probes.model(members[0].arm, attention), OptimConfig(weight_decay=0.05, warmup=0.06),
        probes.symbols, probes.context, probes.steps)
    replicas, shared = _inputs(probes, members)
    key = PART
    if strategy == "auto":
        strategy = (context.recorded.get("strategy") if context.recorded else
                    context.strategies.get(key)) or "auto"
    result = run_replicas(_probe_training.program(task, probes.steps // CHUNKS), replicas, shared,
                          CHUNKS, strategy=strategy, cache=context.cache,
                          progress=lambda done: context.advance(done / CHUNKS))
    context.strategies[key] = result.strategy
    kernel = _kernel(probes, attention, max(probes.size(cell.axis["task"]) for cell in members))
    for r, cell in enumerate(members):
        params = jax.tree.map(lambda x, r=r: jnp.asarray(x[r]), result.carries.params)
        tests = _probe_training.test_rows(cell.axis["task"], probes.symbols, probes.context,
                                          probes.test_lengths, probes.test_rows, cell.seed)
        right_C = np.asarray(_probe_training.evaluate(task, params, tests), np.float64)
        metrics = _metrics(probes, right_C, result.records["loss"][r],
                           result.records["exact"][r])
        good = np.isfinite(metrics["final_loss"])
        yield cell, Measured(metrics, result.share(r), result.compile_seconds,
                             float(result.flops * int(result.lengths[r])), kernel, result.strategy,
                             "ok" if good else "diverged")


def _inputs(probes: Probes, members: list[Cell]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What differs between replicas, and the batches of all; equal seeds share keys and batches."""
    streams = sorted({(cell.axis["task"], cell.seed) for cell in members})
    size = max(probes.size(task) for task, _ in streams)
    drawn = [_probe_training.training_rows(task, probes.symbols, size, probes.train_length,
                                           probes.steps, probes.batch, seed)
             for task, seed in streams]
    replicas = {"key": jnp.stack([jax.random.key(cell.seed) for cell in members]),
                "lr": jnp.asarray([cell.axis["lr"] for cell in members], jnp.float32),
                "stream": jnp.asarray([streams.index((cell.axis["task"], cell.seed))
                                       for cell in members], jnp.int32)}
    return replicas, jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *drawn)


def _metrics(probes: Probes, right_C: np.ndarray, loss: np.ndarray, fresh: np.ndarray
             ) -> dict[str, Any]:
    """Exact match by length, within the training lengths and beyond, and while training."""
    inside = np.array([n <= probes.train_length for n in probes.test_lengths])
    nats = np.asarray(loss, np.float64).reshape(-1)
    stride = probes.steps // CHUNKS
    curve = np.asarray(fresh, np.float64)
    reached = np.flatnonzero(curve >= 0.9)
    return {"exact": {str(n): float(x) for n, x in zip(probes.test_lengths, right_C, strict=True)},
            "within": float(right_C[inside].mean()), "beyond": float(right_C[~inside].mean()),
            "solved": float(right_C[inside].min() >= 0.95),
            "steps_to_90": float(reached[0] * stride) if reached.size else float("inf"),
            "final_loss": float(nats[-stride:].mean()), "curve": curve.round(4).tolist()}


def _kernel(probes: Probes, attention: str, length: int) -> str:
    """The attention implementation that trains these shapes."""
    q = shape(probes.batch, length - 1, probes.heads, probes.d_model // probes.heads)
    return kernel_name(attention, q, q, q, mask="causal")
