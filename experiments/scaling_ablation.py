"""Why divide by sqrt(d_k)? Score functions and scales against key width and learning rate.

    make ablation                                                  about 10 minutes on 2 cores
    python launch.py --experiment=scaling_ablation --preset=smoke  under a minute, proves nothing

Three parts. `initial`: what the softmax does to random queries and keys, no training. `retrieval`:
one attention layer learns to look keys up. `char_lm`: a small language model on Shakespeare.
Compared with the argument of Vaswani et al. 2017 (3.2.1, footnote 4), who publish no unscaled row,
and with Britz et al. 2017 (table of attention mechanisms: unscaled dot products lose 4 BLEU from
width 512 to 1024, additive attention loses none).

Expected: unscaled attention takes longer the larger d_k is and, at the highest learning rate, fails
from d_k = 256 on; scaled, QK-norm and additive scores do not depend on d_k. At the smallest
learning rate and d_k <= 64 hardly anything shows: the reason to sweep both.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import _char_lm, _retrieval
from experiments._initial import softmax_at_init
from experiments._kernel import kernel_name, shape
from experiments._scaling_report import make_report
from tx_jax.attention import make_score, source_hash
from tx_jax.config import DataConfig, ModelConfig, OptimConfig, check, check_names, option
from tx_jax.data import prepare, text_hash, window_starts
from tx_jax.errors import UserError
from tx_jax.study.cells import Cell, canonical, data_hash
from tx_jax.study.contract import Context, Study
from tx_jax.study.ledger import Measured
from tx_jax.study.side_by_side import replicas_of, run_group, strategy_option


@dataclass(frozen=True)
class Arm:
    """A score function, the factor on it, and how much smaller W_q starts."""

    score: str
    scale: Callable[[int], float]
    q_gain: Callable[[int], float] = lambda d_k: 1.0


# The dot-product arms differ only in numbers, so they train together as one program.
ARMS = {
    "scaled_dot": Arm("dot", lambda d_k: d_k**-0.5),
    "dot": Arm("dot", lambda d_k: 1.0),
    "one_over_d": Arm("dot", lambda d_k: 1.0 / d_k),
    # The control of the argument: logits of scaled_dot at the start, but the gradients of dot.
    "dot_small_init": Arm("dot", lambda d_k: 1.0, lambda d_k: d_k**-0.5),
    # g starts at log2(L^2 - L) for L = 16 items (Henry et al. 2020, 3.2).
    "qk_norm": Arm("cosine(gain=7.907)", lambda d_k: 1.0),
    "additive": Arm("additive", lambda d_k: 1.0),
    "bilinear": Arm("bilinear", lambda d_k: d_k**-0.5),
}
BASELINE = "scaled_dot"
PARTS = ("initial", "retrieval", "char_lm")


@dataclass(frozen=True)
class Initial:
    """Part `initial`."""

    d_k: tuple[int, ...] = option((16, 64, 256, 1024), "key widths", low=1)
    keys: int = option(64, "keys per query", low=2)
    rows: int = option(200, "queries per seed; a multiple of 50", low=50,
                       multiple_of=50)

    def __post_init__(self) -> None:
        check(self, "initial")


@dataclass(frozen=True)
class Retrieval:
    """Part `retrieval`."""

    d_k: tuple[int, ...] = option((16, 64, 256), "key widths", low=1)
    lrs: tuple[float, ...] = option((1e-3, 3e-3, 1e-2), "learning rates", low=0.0)
    steps: int = option(400, "optimizer steps; a multiple of 50", low=50,
                       multiple_of=50)
    stop_when_solved: bool = option(True, "end a run once 50 steps are answered 99.95 % right")

    def __post_init__(self) -> None:
        check(self, "retrieval")


@dataclass(frozen=True)
class CharLM:
    """Part `char_lm`."""

    arms: tuple[str, ...] = option(("scaled_dot", "dot"), "arms")
    d_k: tuple[int, ...] = option((16, 256), "key widths; one head", low=1)
    lrs: tuple[float, ...] = option((1e-3, 1e-2, 3e-2), "learning rates", low=0.0)
    seeds: int = option(3, "seeds", low=1)
    steps: int = option(200, "optimizer steps; a multiple of 10", low=10,
                       multiple_of=10)
    batch: int = option(16, "rows per step", low=1)
    context: int = option(64, "characters per row", low=2)
    layers: int = option(2, "blocks", low=1)
    d_model: int = option(64, "width", low=1)
    text: str = option("shakespeare", "as --data.text of language_model")

    def __post_init__(self) -> None:
        check(self, "lm")


@dataclass(frozen=True)
class Settings:
    """Flags of the study."""

    # Six, because the exact permutation test over five pairs cannot fall below p = 0.06.
    seeds: int = option(6, "seeds of the parts initial and retrieval", low=1)
    parts: tuple[str, ...] = option(PARTS, f"parts to run: {', '.join(PARTS)}")
    arms: tuple[str, ...] = option(tuple(ARMS), f"arms: {', '.join(ARMS)}")
    attention: str = option("auto", "attention implementation, by name or module:function")
    strategy: str = strategy_option()
    initial: Initial = field(default_factory=Initial)
    retrieval: Retrieval = field(default_factory=Retrieval)
    lm: CharLM = field(default_factory=CharLM)

    def __post_init__(self) -> None:
        check(self, "")
        for flag, names, known in (("parts", self.parts, PARTS), ("arms", self.arms, ARMS),
                                   ("lm.arms", self.lm.arms, ARMS)):
            check_names(flag, names, known)
        for flag, names in (("arms", self.arms), ("lm.arms", self.lm.arms)):
            if BASELINE not in names:
                raise UserError(f"--{flag}={','.join(names)} lacks '{BASELINE}', to which every "
                                "arm is compared; add it.")
        for score in sorted({ARMS[arm].score for arm in (*self.arms, *self.lm.arms)}):
            _kernel(self.attention, score, 1, 1, 2, 1, True)  # refuses what cannot run


def cells(settings: Settings) -> list[Cell]:
    """The grid: every arm, width, learning rate and seed of the chosen parts."""
    grid = []

    def add(part: str, arms: tuple[str, ...], axes: list[tuple], seeds: int, own: Any) -> None:
        text = canonical(own | {"attention": settings.attention,
                                "attention_code": source_hash(settings.attention)})
        grid.extend(Cell("scaling_ablation", part, arm, pairs, seed, text)
                    for pairs in axes for arm in arms for seed in range(seeds))

    def widths(part: Any) -> list[tuple]:
        return [(("d_k", d_k), ("lr", lr)) for d_k in part.d_k for lr in part.lrs]

    start, task, lm = settings.initial, settings.retrieval, settings.lm
    if "initial" in settings.parts:
        # The small initialisation exists only where there are parameters.
        arms = tuple(a for a in settings.arms if a != "dot_small_init")
        add("initial", arms, [(("d_k", d_k),) for d_k in start.d_k], settings.seeds,
            {"keys": start.keys, "rows": start.rows})
    if "retrieval" in settings.parts:
        add("retrieval", settings.arms, widths(task), settings.seeds,
            {"steps": task.steps, "stop_when_solved": task.stop_when_solved})
    if "char_lm" in settings.parts:
        fields = ("steps", "batch", "context", "layers", "d_model", "text")
        own = {name: getattr(lm, name) for name in fields}
        add("char_lm", lm.arms, widths(lm), lm.seeds, own)
    return grid


def group(cell: Cell) -> tuple:
    """Cells that train as one program: equal part, score function and key width."""
    return cell.part, ARMS[cell.arm].score, cell.axis["d_k"]


def run(settings: Settings, members: list[Cell], context: Context
        ) -> Iterator[tuple[Cell, Measured]]:
    """Run the cells of one group."""
    runner = {"initial": _run_initial, "retrieval": _run_retrieval, "char_lm": _run_char_lm}
    yield from runner[members[0].part](settings, members, context)


def _run_initial(settings, members, context):
    for cell in members:
        arm, d_k, began = ARMS[cell.arm], cell.axis["d_k"], time.perf_counter()
        out = softmax_at_init(jax.random.key(cell.seed), make_score(arm.score),
                              jnp.asarray(arm.scale(d_k), jnp.float32), d_k=d_k,
                              n=settings.initial.keys, rows=settings.initial.rows)
        metrics = {name: float(value) for name, value in out.items()}
        context.advance(1.0)
        yield cell, Measured(metrics, time.perf_counter() - began, kernel="none", strategy="none")


def _replicas(members: list[Cell]) -> tuple[dict[str, Any], list[int]]:
    """What differs between the cells of a group, stacked; and the seeds in order of stream."""
    seeds = sorted({cell.seed for cell in members})

    def column(values) -> jax.Array:
        return jnp.asarray(list(values), jnp.float32)

    arms = [(ARMS[cell.arm], cell.axis["d_k"]) for cell in members]
    return replicas_of([(cell.seed, cell.axis["lr"]) for cell in members],
                       [seeds.index(cell.seed) for cell in members]) | {
        "scale": column(arm.scale(d_k) for arm, d_k in arms),
        "q_gain": column(arm.q_gain(d_k) for arm, d_k in arms)}, seeds


def _train(settings, members, context, program, replicas, shared, chunks, stop=None):
    """Run the group; the strategy is timed once per part, and for retrieval once per width."""
    part, d_k = members[0].part, members[0].axis["d_k"]
    # The language model compiles for longer than a wrong choice between widths would cost.
    key = part if part == "char_lm" else (part, d_k)
    return run_group(context, key, settings.strategy, program, replicas, shared, chunks, stop=stop,
                     progress=lambda done: context.advance(done / chunks))


def _measured(result, r: int, metrics: dict[str, Any], kernel: str) -> Measured:
    flops = float(result.flops * int(result.lengths[r]))
    return Measured(metrics, result.share(r), result.compile_seconds, flops, kernel,
                    result.strategy, "ok" if np.isfinite(metrics["final_loss"]) else "diverged")


def _run_retrieval(settings, members, context):
    first, steps = members[0], settings.retrieval.steps
    task = _retrieval.Task(ARMS[first.arm].score, first.axis["d_k"], attention=settings.attention)
    replicas, seeds = _replicas(members)
    streams = [_retrieval.draw(task, steps, seed) for seed in seeds]
    shared = jax.tree.map(lambda *x: jnp.asarray(np.stack(x)), *streams)
    chunk = 50

    def solved(record) -> bool:
        return settings.retrieval.stop_when_solved and record["accuracy"].mean() >= 0.9995

    result = _train(settings, members, context, _retrieval.program(task, chunk), replicas, shared,
                    steps // chunk, stop=solved)
    kernel = _kernel(task.attention, task.score, task.d_k, 32, task.items, task.d_model, False)
    for r, cell in enumerate(members):
        ran = int(result.lengths[r])
        nats = np.asarray(result.records["loss"][r][:ran], np.float64).reshape(-1)
        hits = np.asarray(result.records["accuracy"][r][:ran], np.float64).reshape(-1)
        curve = hits.reshape(-1, 25).mean(axis=1)
        curve = np.pad(curve, (0, steps // 25 - curve.size), mode="edge")  # solved stays solved
        metrics = {"steps_to_90": _retrieval.first_reached(hits, 0.9),
                   "steps_to_99.9": _retrieval.first_kept(hits, 0.999),
                   "final_loss": float(nats[-50:].mean()), "early_loss": float(nats[:50].mean()),
                   "final_accuracy": float(hits[-50:].mean()),
                   "steps": ran * chunk, "curve": curve.round(4).tolist(),
                   **{k: float(v[r]) for k, v in result.carries["at_init"].items()}}
        yield cell, _measured(result, r, metrics, kernel)


def _kernel(attention: str, score: str, d_k: int, batch: int, length: int, v_width: int,
            causal: bool) -> str:
    """The name of the implementation that runs these shapes."""
    q, v = shape(batch, length, 1, d_k), shape(batch, length, 1, v_width)
    return kernel_name(attention, q, q, v, mask="causal" if causal else None, score=score,
                       scale=1.0, traced_scale=True)


def _data(lm: CharLM) -> DataConfig:
    return DataConfig(text=lm.text, tokenizer="char", context=lm.context)


def _run_char_lm(settings, members, context):
    lm, first, chunk = settings.lm, members[0], settings.lm.steps // 10
    prepared = prepare(_data(lm), Path(context.workdir) / "cache")
    model = ModelConfig(layers=lm.layers, d_model=lm.d_model, heads=1, head_dim=first.axis["d_k"],
                        score=ARMS[first.arm].score, attention=settings.attention)
    task = _char_lm.Task(model, OptimConfig(weight_decay=0.0), prepared.tokenizer.vocab_size,
                         lm.context, lm.steps)
    replicas, seeds = _replicas(members)
    del replicas["q_gain"]
    starts = [window_starts(prepared, lm.context, lm.batch, lm.steps, seed) for seed in seeds]
    shared = {"tokens": jnp.asarray(prepared.train.tokens()), "starts": jnp.asarray(starts)}
    result = _train(settings, members, context, _char_lm.program(task, chunk), replicas, shared, 10)
    held_out = jnp.asarray(prepared.validation.tokens())
    rows = jnp.asarray(np.linspace(0, held_out.size - lm.context - 1, 128).astype(np.int32))
    batch = _char_lm.windows(held_out, rows, lm.context)
    kernel = _kernel(settings.attention, model.score, model.head_width, lm.batch, lm.context,
                     model.head_width, True)
    for r, cell in enumerate(members):
        params = jax.tree.map(lambda x, r=r: jnp.asarray(x[r]), result.carries.params)
        seen = _char_lm.inspect(task, params, batch, replicas["scale"][r])
        seen = {name: np.asarray(value, np.float64).tolist() for name, value in seen.items()}
        nats = np.asarray(result.records["loss"][r], np.float64).reshape(-1)
        metrics = {"final_loss": seen.pop("loss"), "train_loss": float(nats[-20:].mean()),
                   "curve": nats.reshape(-1, 10).mean(axis=1).round(4).tolist(), **seen}
        yield cell, _measured(result, r, metrics, kernel)


def data(settings: Settings) -> str:
    """Hash of the text that the language model reads."""
    return data_hash(text_hash(settings.lm.text) if "char_lm" in settings.parts else "")


def report(settings: Settings, rows: list[dict[str, Any]]):
    """Tables, figures and verdicts."""
    return make_report(rows, arms=tuple(ARMS), baseline=BASELINE,
                       retrieval_steps=settings.retrieval.steps)


SMOKE = {"seeds": 2, "arms": ("scaled_dot", "dot"), "initial.d_k": (16, 256), "initial.rows": 50,
         "retrieval.d_k": (16, 256), "retrieval.lrs": (1e-3, 1e-2), "retrieval.steps": 100,
         "lm.d_k": (16,), "lm.lrs": (1e-2,), "lm.seeds": 2, "lm.steps": 10}
FULL = {"seeds": 10, "retrieval.d_k": (16, 64, 256, 1024), "retrieval.steps": 2000,
        "retrieval.stop_when_solved": False,
        "retrieval.lrs": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), "initial.rows": 4000,
        "lm.arms": tuple(ARMS)[:3] + ("qk_norm", "additive"), "lm.d_k": (16, 64, 256, 1024),
        "lm.lrs": (3e-4, 1e-3, 3e-3, 1e-2), "lm.seeds": 5, "lm.steps": 5000, "lm.batch": 64,
        "lm.context": 256, "lm.layers": 6, "lm.d_model": 384}

STUDY = Study(
    name="scaling_ablation", title="The 1/sqrt(d_k) ablation", settings=Settings,
    presets={"smoke": SMOKE, "small": {}, "full": FULL}, cells=cells, run=run, report=report,
    group=group, data=data,
    files=tuple(Path(__file__).parent / name for name in
                ("scaling_ablation.py", "_retrieval.py", "_char_lm.py", "_initial.py")))
