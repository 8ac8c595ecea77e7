"""The part `training`: every arm at its best learning rate, on the same batches seed by seed.

Two rounds an arm: all learning rates at seed 0 (part `tuning`), then the other seeds at the rate
that ended lowest on one half of the held-out text. What is reported is the loss on the other half.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import _char_lm
from experiments._ablation_arms import ARMS, FAMILIES
from experiments._ablation_settings import STUDY, Settings
from experiments._ablation_start import scale_branches
from experiments._extrapolation_schemes import CHUNKS, kernel_of
from tx_jax import letters, train
from tx_jax.attention import source_hash
from tx_jax.data import Prepared, prepare, window_starts
from tx_jax.study.cells import Cell, canonical
from tx_jax.study.contract import Context
from tx_jax.study.ledger import Measured
from tx_jax.study.replicas import Program, Result
from tx_jax.study.side_by_side import replicas_of, run_group

HALVES = ("tuning", "loss")  # what is scored on either half of the held-out text
_SIZES = ("lrs", "text", "few", "context", "batch", "scored", "layers", "deep", "d_model", "heads",
          "steps", "deep_steps", "attention", "seeds")


def cells(settings: Settings) -> list[Cell]:
    """Every arm with each learning rate, and every arm and seed at its best."""
    own = {name: getattr(settings, name) for name in _SIZES}
    text = canonical(own | {"attention_code": source_hash(settings.attention)})
    found = [Cell(STUDY, "tuning", arm, (("lr", lr),), 0, text)
             for arm in settings.arms for lr in settings.lrs]
    return found + [Cell(STUDY, "training", arm, (), seed, text)
                    for arm in settings.arms for seed in range(settings.seeds)]


@dataclass(frozen=True)
class Bench:
    """What trains an arm and scores it.

    Attributes:
      program: made once, so that the second round finds the first one's compiled program.
    """

    settings: Settings
    arm: str
    context: Context
    prepared: Prepared
    task: _char_lm.Task
    program: Program

    @classmethod
    def of(cls, settings: Settings, arm: str, context: Context) -> "Bench":
        """The bench of an arm."""
        prepared = prepare(settings.data, Path(context.workdir) / "cache")
        deep = arm in FAMILIES["norms and residual"]
        task = _char_lm.Task(
            settings.model(arm), settings.optim(arm), prepared.tokenizer.vocab_size,
            settings.context, settings.deep_steps if deep else settings.steps)
        program = _char_lm.program(task, task.steps // CHUNKS)
        return cls(settings, arm, context, prepared, task,
                   at_unit_gain(program, task.model.layers) if ARMS[arm].unit else program)

    def tokens(self) -> np.ndarray:
        """The text that the arm reads."""
        tokens = self.prepared.train.tokens()
        return tokens[:self.settings.few] if ARMS[self.arm].few else tokens

    def starts(self) -> np.ndarray:
        """Where the rows of every step start, [seeds, steps, B]."""
        s, last = self.settings, len(self.tokens()) - self.settings.context
        return np.stack([window_starts(self.prepared, s.context, s.batch, self.task.steps, seed)
                         % last for seed in range(s.seeds)])

    def train(self, runs: Sequence[tuple[int, float]]) -> Result:
        """Train one model per (seed, learning rate); equal seeds share keys and batches."""
        replicas = replicas_of(runs, [seed for seed, _ in runs])
        shared = {"tokens": jnp.asarray(self.tokens()), "starts": jnp.asarray(self.starts())}
        return run_group(self.context, self.arm, self.settings.strategy, self.program, replicas,
                         shared, CHUNKS)

    def score(self, params: Any) -> dict[str, float]:
        """Plain cross-entropy on each half of the held-out text."""
        held_out, model = jnp.asarray(self.prepared.validation.tokens()), self.task.build()
        last = held_out.size - self.settings.context - 1
        ends = (0, last // 2, last)
        found = {}
        for half, first, end in zip(HALVES, ends, ends[1:], strict=False):
            rows = np.linspace(first, end, self.settings.scored, endpoint=False).astype(np.int32)
            batch = _char_lm.windows(held_out, jnp.asarray(rows), self.settings.context)
            found[half] = train.evaluate(model, params, [batch])["loss"]
        return found

    def measure(self, result: Result, r: int, lr: float) -> Measured:
        """What replica r of a training gave."""
        params = jax.tree.map(lambda x: jnp.asarray(x[r]), result.carries.params)
        nats = np.asarray(result.records["loss"][r], np.float64).reshape(-1)
        per_token = result.flops * CHUNKS / (self.task.steps * self.settings.batch
                                             * self.settings.context)
        scores = self.score(params)
        metrics = scores | {
            "lr": lr, "train_loss": float(nats[-20:].mean()),
            "curve": nats.reshape(CHUNKS, -1).mean(axis=1).round(4).tolist(),
            "parameters": letters.count(params, embedding=False), "flops_per_token": per_token}
        finite = np.isfinite([*nats, *scores.values()]).all()
        return Measured(metrics, result.share(r), result.compile_seconds,
                        float(result.flops * CHUNKS), self.kernel(), result.strategy,
                        "ok" if finite else "diverged")

    def kernel(self) -> str:
        """The attention implementation that trains these shapes."""
        s = self.settings
        return kernel_of(s, self.task.model, s.batch, s.context)


def at_unit_gain(program: Program, layers: int) -> Program:
    """The program with branches that start at unit gain."""
    def init(replica, shared):
        state = program.init(replica, shared)
        blocks = scale_branches((2 * layers) ** 0.5, state.params["blocks"])
        return replace(state, params=state.params | {"blocks": blocks})

    return Program(init, program.step)


def best(found: dict[float, Measured]) -> float:
    """The learning rate that ended lowest on the tuning half; what diverged comes last."""
    def rank(lr: float) -> float:
        return found[lr].metrics["tuning"] if found[lr].status == "ok" else math.inf

    return min(found, key=rank)


def run(settings: Settings, members: list[Cell], context: Context
        ) -> Iterator[tuple[Cell, Measured]]:
    """The two rounds of an arm; each is run as a whole, whichever of its cells are asked for."""
    bench = Bench.of(settings, members[0].arm, context)
    result = bench.train([(0, lr) for lr in settings.lrs])
    first = {lr: bench.measure(result, r, lr) for r, lr in enumerate(settings.lrs)}
    chosen = best(first)
    later = [cell for cell in members if cell.part == "training" and cell.seed]
    for cell in members:
        if cell.part == "tuning":
            context.advance(1.0)
            yield cell, first[cell.axis["lr"]]
        elif cell.seed == 0:  # its seconds are counted as those of its tuning
            context.advance(1.0)
            yield cell, replace(first[chosen], seconds=0.0, compile_seconds=0.0, flops=0.0)
    if later:
        result = bench.train([(seed, chosen) for seed in range(1, settings.seeds)])
    for cell in later:
        context.advance(1.0)
        yield cell, bench.measure(result, cell.seed - 1, chosen)
