"""The part `schemes`: train every scheme at L, score it at 1x to 16x."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import _extrapolation_eval as scores
from experiments._char_lm import Task
from experiments._extrapolation_models import ARMS, training
from experiments._extrapolation_settings import STUDY, Settings
from experiments._kernel import kernel_name, shape
from tx_jax.attention import Bias, source_hash
from tx_jax.config import ModelConfig
from tx_jax.data import Prepared, prepare, window_starts
from tx_jax.positions import make_encoding
from tx_jax.study.cells import Cell, canonical
from tx_jax.study.contract import Context
from tx_jax.study.ledger import Measured
from tx_jax.study.replicas import Result
from tx_jax.study.side_by_side import replicas_of, run_group

PART = "schemes"
CHUNKS = 10  # records of a training run
TUNING, TEST = (0.0, 0.5), (0.5, 1.0)  # halves of the held-out text
_SIZES = ("text", "context", "steps", "batch", "layers", "d_model", "heads", "stride", "tokens",
          "slides")


def own(settings: Settings) -> dict[str, Any]:
    """What determines a trained and scored model, besides its axes."""
    return {name: getattr(settings, name) for name in _SIZES} | {
        "scored": settings.scored, "attention": settings.attention,
        "attention_code": source_hash(settings.attention)}


def cells(settings: Settings) -> list[Cell]:
    """Every scheme, learning rate and seed."""
    text = canonical(own(settings) | {"lengths": settings.lengths})
    return [Cell(STUDY, PART, arm, (("lr", lr),), seed, text)
            for arm in settings.arms for lr in settings.lrs for seed in range(settings.seeds)]


def group(cell: Cell) -> tuple[str, ...]:
    """Learning rates and seeds of a scheme train as one program."""
    return PART, cell.arm


def run(settings: Settings, members: list[Cell], context: Context
        ) -> Iterator[tuple[Cell, Measured]]:
    """Train and score the cells of one scheme side by side."""
    arm, lengths = members[0].arm, settings.lengths
    prepared = prepare(settings.data, Path(context.workdir) / "cache")
    task = task_of(settings, settings.model(ARMS[arm]), prepared)
    # Before training, as it refuses a text that is too short.
    plans = {"test": plan(settings, prepared, TEST, lengths),
             "tuning": plan(settings, prepared, TUNING, lengths[:1], ("windows",))}
    trained = train(settings, task, [(cell.seed, cell.axis["lr"]) for cell in members], prepared,
                    context, lambda done: context.advance(0.8 * done))
    keep(context, arm, [(cell.seed, cell.axis["lr"]) for cell in members], trained)
    scored, seen = score(settings, task, trained.carries.params, plans, prepared, context)
    kernel = kernel_of(settings, task.model, settings.batch, settings.context)
    for r, cell in enumerate(members):
        nats = np.asarray(trained.records[r], np.float64).reshape(-1)
        metrics = scores.losses(seen[r]["test"], settings.stride) | {
            "tuning": float(seen[r]["tuning"]["windows"][lengths[0]].mean()),
            "position": scores.bins(seen[r]["test"]["sliding"][lengths[-1]],
                                    settings.stride).round(4).tolist(),
            "train_loss": float(nats[-20:].mean()),
            "curve": nats.reshape(CHUNKS, -1).mean(axis=1).round(4).tolist()}
        yield cell, Measured(metrics, trained.share(r) + scored.share(r),
                             trained.compile_seconds + scored.compile_seconds,
                             float(trained.flops * CHUNKS + scored.flops), kernel,
                             trained.strategy,
                             "ok" if np.isfinite(metrics["train_loss"]) else "diverged")


def task_of(settings: Settings, model: ModelConfig, prepared: Prepared) -> Task:
    """Training at L with the study's own recipe."""
    return Task(model, settings.optim, prepared.tokenizer.vocab_size, settings.context,
                settings.steps)


def train(settings: Settings, task: Task, runs: Sequence[tuple[int, float]], prepared: Prepared,
          context: Context, progress: Callable[[float], None]) -> Result:
    """Train one model per (seed, learning rate); equal seeds share keys and batches."""
    seeds = sorted({seed for seed, _ in runs})
    replicas = replicas_of(runs, [seeds.index(seed) for seed, _ in runs])
    starts = [window_starts(prepared, task.context, settings.batch, task.steps, seed)
              for seed in seeds]
    shared = {"tokens": jnp.asarray(prepared.train.tokens()), "starts": jnp.asarray(starts)}
    return run_group(context, PART, settings.strategy, training(task, task.steps // CHUNKS),
                     replicas, shared, CHUNKS, progress=lambda done: progress(done / CHUNKS))


def keep(context: Context, arm: str, runs: Sequence[tuple[int, float]], trained: Result) -> None:
    """Leave the parameters to later groups of this process."""
    for r, (seed, lr) in enumerate(runs):
        context.cache["trained", arm, seed, lr] = jax.tree.map(lambda x, r=r: x[r],
                                                               trained.carries.params)


def plan(settings: Settings, prepared: Prepared, share: tuple[float, float],
         lengths: Sequence[int], protocols: Sequence[str] = scores.PROTOCOLS) -> scores.Plan:
    """What to score of a half of the held-out text."""
    region_R = scores.regions(prepared.validation, share, settings.scored, settings.tokens)
    return scores.plan(region_R, settings.region(), lengths, settings.stride, settings.slides,
                       protocols)


def score(settings: Settings, task: Task, params: Any, plans: Mapping[str, scores.Plan],
          prepared: Prepared, context: Context) -> tuple[Result, list[dict[str, Any]]]:
    """Score every replica; of each, the losses by place as from `_extrapolation_eval.by_place`."""
    arrays, labels = scores.batches(plans)
    shared = {"tokens": jnp.asarray(prepared.validation.tokens()),
              "batches": jax.tree.map(jnp.asarray, arrays)}
    result = run_group(context, PART, settings.strategy, scores.scoring(task), {"params": params},
                       shared, 1, progress=lambda done: context.advance(0.2 * done))
    return result, [scores.by_place(jax.tree.map(lambda x, r=r: x[r, 0], result.records), labels,
                                    plans) for r in range(len(result.lengths))]


def kernel_of(settings: Settings, model: ModelConfig, batch: int, length: int) -> str:
    """The attention implementation that trains these shapes."""
    encoding = make_encoding(model.positions)
    function = {"pair": encoding.pair_bias, "rows": encoding.row_bias}.get(encoding.bias_kind)
    bias = function and Bias(function, {}, kind=encoding.bias_kind)
    q = shape(batch, length, model.heads, model.head_width)
    return kernel_name(settings.attention, q, q, q, mask="causal", bias=bias)
