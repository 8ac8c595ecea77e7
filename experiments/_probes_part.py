"""The part `probes` of the length study: its cells, and what running them means."""

import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import _probe_training
from experiments._extrapolation_schemes import kernel_of
from experiments._extrapolation_settings import STUDY, Settings
from experiments._probes_settings import CHUNKS, Probes, row_size
from tx_jax.attention import source_hash
from tx_jax.config import OptimConfig
from tx_jax.study.cells import Cell, canonical
from tx_jax.study.contract import Context
from tx_jax.study.ledger import Measured
from tx_jax.study.side_by_side import replicas_of, run_group

PART = "probes"
OPTIM = OptimConfig(weight_decay=0.05, warmup=0.06)  # Kazemnejad et al. 2023


def cells(settings: Settings) -> list[Cell]:
    """Every task, scheme, learning rate and seed."""
    probes = settings.probes
    own = {"attention": settings.attention, "attention_code": source_hash(settings.attention)}
    fields = ("train_length", "test_lengths", "test_rows", "symbols", "steps", "batch", "layers",
              "d_model", "heads")
    text = canonical(own | {name: getattr(probes, name) for name in fields})
    return [Cell(STUDY, PART, arm, (("task", task), ("lr", lr)), seed, text)
            for task in probes.tasks for lr in probes.lrs for arm in probes.arms
            for seed in range(probes.seeds)]


def group(cell: Cell) -> tuple[Any, ...]:
    """Cells that train as one program: the same scheme and rows of the same size."""
    length = json.loads(cell.settings)["train_length"]
    return PART, cell.arm, row_size(cell.axis["task"], length)


def run(settings: Settings, members: list[Cell], context: Context
        ) -> Iterator[tuple[Cell, Measured]]:
    """Train the cells of one scheme side by side and test each at every length."""
    probes = settings.probes
    task = _probe_training.Task(probes.model(members[0].arm, settings.attention), OPTIM,
                                probes.symbols, probes.context, probes.steps)
    replicas, shared = _inputs(probes, members)
    result = run_group(context, PART, settings.strategy,
                       _probe_training.program(task, probes.steps // CHUNKS), replicas, shared,
                       CHUNKS, progress=lambda done: context.advance(done / CHUNKS))
    length = row_size(members[0].axis["task"], probes.train_length) - 1
    kernel = kernel_of(settings, task.model, probes.batch, length)
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
    size = row_size(streams[0][0], probes.train_length)
    drawn = [_probe_training.training_rows(task, probes.symbols, size, probes.train_length,
                                           probes.steps, probes.batch, seed)
             for task, seed in streams]
    replicas = replicas_of([(cell.seed, cell.axis["lr"]) for cell in members],
                           [streams.index((cell.axis["task"], cell.seed)) for cell in members])
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
