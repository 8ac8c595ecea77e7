"""Encoder-decoder, prefix and causal decoder at matched budgets.

    python launch.py --experiment=enc_dec_vs_decoder                  minutes on 2 cores
    python launch.py --experiment=enc_dec_vs_decoder --preset=smoke   proves nothing
    python launch.py --experiment=enc_dec_vs_decoder --tasks=copy,reverse,sort,shift

Each shape learns sequence tasks with the loss on the target alone (`_seq_tasks.py`). A pair of
L + L layers is compared with decoders of as many parameters (7 L / 3 layers) and of as many
operations (7 L / 6); both cannot hold at once, so both are arms and both budgets are printed.
Compared with Raffel et al. 2020 (T5), table 2: encoder-decoder before prefix before causal.

Expected at this size: all shapes solve copy, reverse and sort, at most at another speed; if
anything separates them, it is the time until `shift` is solved, whose every output needs the last
token of the source.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import _seq_training
from experiments._encdec_report import make_report
from experiments._encdec_settings import ARMS, CHUNK, Settings
from experiments._encdec_settings import STUDY as NAME
from experiments._kernel import kernel_name, shape
from experiments._seq_tasks import TASKS
from tx_jax.attention import source_hash
from tx_jax.study.cells import Cell, canonical
from tx_jax.study.contract import Context, Study
from tx_jax.study.ledger import Measured
from tx_jax.study.side_by_side import run_group

SOLVED = 0.9  # share of exact rows
DONE = 0.99  # a run ends here, once --early is past


def cells(settings: Settings) -> list[Cell]:
    """Every task, shape, learning rate and seed."""
    fields = ("length", "symbols", "d_model", "heads", "positions", "steps", "early", "batch",
              "attention")
    own = {name: getattr(settings, name) for name in fields} | {
        "attention_code": source_hash(settings.attention)}
    texts = {arm: canonical(own | {"layers": settings.layers_of(arm)}) for arm in settings.arms}
    return [Cell(NAME, "sequences", arm, (("task", task), ("lr", lr)), seed, texts[arm])
            for task in settings.tasks for arm in settings.arms for lr in settings.lrs
            for seed in range(settings.seeds)]


def group(cell: Cell) -> tuple[Any, ...]:
    """Cells that train as one program: learning rates and seeds of a shape on a task."""
    return cell.arm, cell.axis["task"]


def run(settings: Settings, members: list[Cell], context: Context
        ) -> Iterator[tuple[Cell, Measured]]:
    """Train the cells of one shape side by side, each until it is solved."""
    arm, name = members[0].arm, members[0].axis["task"]
    task = _seq_training.Task(name, settings.model(settings.layers_of(arm)), ARMS[arm].encoder,
                              ARMS[arm].prefix, settings.optim, settings.length, settings.symbols,
                              settings.batch, settings.steps)
    result = run_group(
        context, NAME, settings.strategy, _seq_training.program(task, CHUNK), _replicas(members),
        {}, settings.steps // CHUNK,
        stop=lambda record: record["exact"] >= DONE and record["step"] >= settings.early,
        progress=lambda done: context.advance(done * CHUNK / settings.steps))
    kernel = _kernel(settings, task)
    for r, cell in enumerate(members):
        metrics = _metrics(settings, jax.tree.map(lambda x, r=r: x[r], result.records),
                           int(result.lengths[r]))
        good = np.isfinite(metrics["last_loss"])
        yield cell, Measured(metrics, result.share(r), result.compile_seconds,
                             float(result.flops * int(result.lengths[r])), kernel,
                             result.strategy, "ok" if good else "diverged")


def _replicas(members: list[Cell]) -> dict[str, jax.Array]:
    """Equal seeds share keys and rows."""
    return {"key": jnp.stack([jax.random.key(cell.seed) for cell in members]),
            "data": jnp.stack([jax.random.key(1000 + cell.seed) for cell in members]),
            "lr": jnp.asarray([cell.axis["lr"] for cell in members], jnp.float32)}


def _metrics(settings: Settings, records: dict[str, np.ndarray], chunks: int) -> dict[str, Any]:
    """Steps until solved, the loss early on and over the whole run, and the curve.

    A run that ended when it was solved counts with its last loss for the steps it did not take.
    """
    curve = np.asarray(records["exact"], np.float64)[:chunks]
    loss = np.asarray(records["loss"], np.float64).reshape(-1, CHUNK).mean(axis=1)[:chunks]
    reached = np.flatnonzero(curve >= SOLVED)
    early = settings.early // CHUNK - 1
    rest = settings.steps // CHUNK - chunks
    return {"steps_to_90": float((reached[0] + 1) * CHUNK) if reached.size else float("inf"),
            "early_loss": float(loss[early]), "last_loss": float(loss[-1]),
            "mean_loss": float((loss.sum() + rest * loss[-1]) / (chunks + rest)),
            "exact": float(curve[-1]), "curve": curve.round(4).tolist()}


def _kernel(settings: Settings, task: _seq_training.Task) -> str:
    tokens = settings.length * (1 if task.encoder else 2)
    sizes = shape(task.batch, tokens, task.model.heads, task.model.head_width)
    return kernel_name(settings.attention, sizes, sizes, sizes)


SMOKE = {"seeds": 2, "arms": ("encdec", "causal"), "tasks": ("copy",), "lrs": (3e-3,), "layers": 1,
         "d_model": 16, "heads": 2, "length": 4, "symbols": 4, "steps": 50, "early": 50,
         "batch": 8, "strategy": "queue"}
SMALL = {"strategy": "queue", "arms": tuple(a for a in ARMS if a != "encdec_shared")}
# Sizes of T5-base, 12 + 12 layers, on tasks that a small model cannot do in so few steps.
FULL = {"tasks": tuple(TASKS), "lrs": (1e-4, 3e-4, 1e-3), "length": 128, "symbols": 256,
        "layers": 12, "d_model": 768, "heads": 12, "steps": 20_000, "early": 2000, "batch": 128,
        "seeds": 5}

STUDY = Study(
    name=NAME, title="Encoder-decoder against decoder-only", settings=Settings,
    presets={"smoke": SMOKE, "small": SMALL, "full": FULL}, cells=cells, run=run,
    report=make_report, group=group,
    files=tuple(Path(__file__).parent / name for name in
                ("enc_dec_vs_decoder.py", "_encdec_settings.py", "_seq_tasks.py",
                 "_seq_training.py")))
