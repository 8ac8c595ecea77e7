"""The part `extension`: a rotary checkpoint trained at L, read at s L in other forms, then tuned.

Every method starts from the same checkpoints, one per seed, those of the scheme `rope`. A cell is
a method at a factor s. Zero-shot: scored at L and at s L. At the largest factor some methods are
fine-tuned on rows of s L tokens and scored on the way. The (alpha, beta) of `by_parts` and `yarn`
are chosen once, by the mean loss of `by_parts` over all seeds at the largest factor, on the
half of the held-out text that no score reads; scores are those of the other half. Seconds and
operations are those of scoring and tuning a method: checkpoints and the choice belong to no cell.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import _extrapolation_eval as scores
from experiments import _extrapolation_schemes as schemes
from experiments._char_lm import Task
from experiments._extrapolation_models import ARMS, METHODS, fine_tuning
from experiments._extrapolation_settings import STUDY, Settings
from tx_jax.config import OptimConfig
from tx_jax.data import Prepared, prepare, window_starts
from tx_jax.study.cells import Cell, canonical
from tx_jax.study.contract import Context
from tx_jax.study.ledger import Measured
from tx_jax.study.replicas import Result
from tx_jax.study.side_by_side import replicas_of, run_group

PART = "extension"
_RAMPED = ("by_parts", "yarn")


def cells(settings: Settings) -> list[Cell]:
    """Every method, factor and seed."""
    extend = settings.extend
    names = ("ramps", "base_lr", "lr", "steps", "every", "batch", "tuned")
    # The seeds belong to it: all of them choose (alpha, beta).
    text = canonical(schemes.own(settings) | {name: getattr(extend, name) for name in names}
                     | {"factors": extend.factors, "seeds": settings.seeds})
    return [Cell(STUDY, PART, method, (("factor", factor),), seed, text)
            for factor in extend.factors for method in extend.methods
            for seed in range(settings.seeds)]


def group(cell: Cell) -> tuple[str, ...]:
    """All share the checkpoints."""
    return (PART,)


def run(settings: Settings, members: list[Cell], context: Context
        ) -> Iterator[tuple[Cell, Measured]]:
    """Train the checkpoints unless this process has them, then score and tune every method."""
    prepared = prepare(settings.data, Path(context.workdir) / "cache")
    params = _checkpoints(settings, prepared, context)
    ramp, table = settings.extend.ramps[0], {}
    if any(cell.arm in _RAMPED for cell in members):
        ramp, table = _choose(settings, params, prepared, context)
    for factor in sorted({cell.axis["factor"] for cell in members}):
        for method in dict.fromkeys(cell.arm for cell in members):
            own = [c for c in members if c.arm == method and c.axis["factor"] == factor]
            if own:
                yield from _method(settings, own, params, ramp, table, prepared, context)


def _checkpoints(settings: Settings, prepared: Prepared, context: Context) -> Any:
    """Parameters of `rope` at L, leaves [seeds, ...]."""
    runs = [(seed, settings.extend.base_lr) for seed in range(settings.seeds)]
    names = [("trained", "rope", *one) for one in runs]
    if not all(name in context.cache for name in names):
        task = schemes.task_of(settings, settings.model(ARMS["rope"]), prepared)
        trained = schemes.train(settings, task, runs, prepared, context, lambda done: None)
        schemes.keep(context, "rope", runs, trained)
    return jax.tree.map(lambda *x: jnp.stack(x), *(context.cache[name] for name in names))


def _task(settings: Settings, method: str, factor: int, ramp: str, prepared: Prepared) -> Task:
    """A method at a factor; its rows are s L long, and its steps those of fine-tuning."""
    alpha, beta = settings.extend.ramp(ramp)
    model = settings.model(METHODS[method], factor=factor, alpha=alpha, beta=beta)
    # Constant, so that every point of the curve is a whole fine-tuning of that many steps.
    optim = OptimConfig(schedule="constant", warmup=0.0)
    return Task(model, optim, prepared.tokenizer.vocab_size, factor * settings.context,
                settings.extend.steps)


def _choose(settings: Settings, params: Any, prepared: Prepared, context: Context
            ) -> tuple[str, dict[str, list[float]]]:
    """The best alpha:beta, and the loss of each by seed: sliding, largest factor, tuning half."""
    factor, table = max(settings.extend.factors), {}
    length = factor * settings.context
    plans = {"tuning": schemes.plan(settings, prepared, schemes.TUNING, (length,), ("sliding",))}
    for ramp in settings.extend.ramps:
        task = _task(settings, "by_parts", factor, ramp, prepared)
        _, seen = schemes.score(settings, task, params, plans, prepared, context)
        table[ramp] = [scores.losses(one["tuning"], settings.stride)["sliding"][str(length)]
                       for one in seen]
    return min(table, key=lambda ramp: np.mean(table[ramp])), table


def _method(settings: Settings, own: list[Cell], params: Any, ramp: str,
            table: dict[str, list[float]], prepared: Prepared, context: Context
            ) -> Iterator[tuple[Cell, Measured]]:
    """The cells of one method at one factor."""
    method, factor = own[0].arm, own[0].axis["factor"]
    task = _task(settings, method, factor, ramp, prepared)
    params = jax.tree.map(lambda x: x[jnp.asarray([cell.seed for cell in own])], params)
    lengths = (settings.context, factor * settings.context)
    plan = schemes.plan(settings, prepared, schemes.TEST, lengths)
    result, seen = schemes.score(settings, task, params, {"test": plan}, prepared, context)
    results = [result]
    tuned = method in settings.extend.tuned and factor == max(settings.extend.factors)
    if tuned:
        results.append(_tune(settings, task, own, params, plan, prepared, context))
    kernel = schemes.kernel_of(settings, task.model, settings.extend.batch, task.context)
    for r, cell in enumerate(own):
        metrics = scores.losses(seen[r]["test"], settings.stride)
        zero = metrics["sliding"][str(lengths[1])]
        if tuned:
            later = np.asarray(results[1].records[r], np.float64)
            metrics |= {"tuned": float(later[-1]), "curve": [zero, *later.tolist()]}
        if method in _RAMPED:
            metrics |= {"ramp": ramp, "ramps": {k: v[cell.seed] for k, v in table.items()}}
        seconds = sum(result.share(r) for result in results)
        compiling = sum(result.compile_seconds for result in results)
        flops = sum(float(result.flops * int(result.lengths[r])) for result in results)
        yield cell, Measured(metrics, seconds, compiling, flops, kernel, results[0].strategy,
                             "ok" if np.isfinite(metrics.get("tuned", zero)) else "diverged")


def _tune(settings: Settings, task: Task, own: list[Cell], params: Any, plan: scores.Plan,
          prepared: Prepared, context: Context) -> Result:
    """Fine-tune on rows of s L; records the sliding loss at s L after every `every` steps."""
    extend, seeds, width = settings.extend, [cell.seed for cell in own], str(task.context)
    slides = plan["sliding"][task.context]
    arrays, _ = scores.batches({"test": {"sliding": {task.context: slides}}})
    starts = [window_starts(prepared, task.context, extend.batch, extend.steps, seed)
              for seed in seeds]
    shared = {"tokens": jnp.asarray(prepared.train.tokens()), "starts": jnp.asarray(starts),
              "held_out": jnp.asarray(prepared.validation.tokens()),
              "slides": jax.tree.map(jnp.asarray, arrays[width])}
    replicas = {"params": params} | replicas_of([(seed, extend.lr) for seed in seeds],
                                                range(len(seeds)))

    def held_out(model, params, shared):
        sums = jax.lax.map(lambda one: scores.loss_sums(model, params, shared["held_out"], one,
                                                        task.context), shared["slides"])
        return jnp.mean(jnp.sum(sums, axis=0)[-settings.stride:]) / len(slides)

    chunks = extend.steps // extend.every
    return run_group(context, schemes.PART, settings.strategy,
                     fine_tuning(task, extend.every, held_out), replicas, shared, chunks,
                     progress=lambda done: context.advance(0.2 * done / chunks))
