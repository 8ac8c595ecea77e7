"""The host loop around `train_step`: data in, progress out, checkpoints, signals, resuming.

Everything a run computes is decided by its configuration and seed. A run that is killed at any
moment and started again with the same configuration writes the same `metrics.jsonl`.
"""

import contextlib
import dataclasses
import functools
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tx_jax import data, letters, models, sharding, train
from tx_jax.checkpoint import Checkpoints
from tx_jax.config import DataConfig, ModelConfig, OptimConfig, TrainConfig
from tx_jax.errors import UserError
from tx_jax.leaks import check_leaks
from tx_jax.metrics import MetricsWriter
from tx_jax.optim import make_optimizer
from tx_jax.tokenizers import bits_per_byte

# What a resumed run may change: none of it reaches the parameters.
_FREE = ("eval_every", "eval_batches", "save_every", "log_every", "check_finite", "check_leaks",
         "wandb")


class NonFiniteError(UserError):
    """A loss, gradient or parameter became NaN or infinite; the message names the step."""


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """All that decides what a run computes."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()


@dataclasses.dataclass(frozen=True)
class FitResult:
    """How a run ended.

    Attributes:
      step: steps taken; less than asked for where a signal ended the run.
      finished: all steps were taken and the final validation is in `metrics`.
      metrics: the last validation (`val_loss`, `bits_per_byte`, `val_tokens`), {} if unfinished.
      state: the final state, on its devices.
    """

    step: int
    finished: bool
    metrics: dict[str, float]
    state: train.TrainState


def fit(cfg: RunConfig, workdir: Path, *, mesh: Mesh | None = None, console: Console | None = None,
        cache_dir: Path | None = None) -> FitResult:
    """Train a model, or go on where a killed run with the same configuration stopped.

    Args:
      workdir: a directory; gets `checkpoints/`, `metrics.jsonl` and `tensorboard/`.
      mesh: devices to shard over (`sharding.make_mesh`); None = one device.
      console: shows progress and notices; None = silent.
      cache_dir: holds tokenised texts; by default `workdir / "cache"`.

    Raises:
      NonFiniteError: NaN or infinity (`cfg.train.check_finite`); the last good checkpoint is kept.
      UserError: a configuration that cannot run or differs from the checkpoint's.
    """
    workdir = Path(workdir).expanduser().absolute()
    workdir.mkdir(parents=True, exist_ok=True)
    console = console or Console(quiet=True)
    prepared = data.prepare(cfg.data, cache_dir or workdir / "cache")
    if not prepared.n_validation_targets:
        raise UserError(f"--data.validation={cfg.data.validation} leaves no text to validate on; "
                        "raise it or give more text.")
    model = models.build(cfg.model, prepared.tokenizer.vocab_size, cfg.data.context)
    if cfg.train.batch % cfg.optim.accumulate:
        raise UserError(f"--optim.accumulate={cfg.optim.accumulate} does not divide "
                        f"--train.batch={cfg.train.batch}; change one of them.")
    if mesh is not None:
        sharding.check_divides(mesh, cfg.model, cfg.train.batch // cfg.optim.accumulate)
    with contextlib.ExitStack() as stack:
        if mesh is not None:
            stack.enter_context(jax.set_mesh(mesh))
        loop = _Loop(cfg, workdir, model, prepared, mesh, console)
        stack.callback(loop.writer.close)
        return loop.run()


def make_step(model: models.DecoderLM, cfg: RunConfig) -> Any:
    """The jitted step of the loop: (state, first_bad, batch) -> (state, first_bad, metrics).

    `first_bad` is an int32 scalar, -1 or the first step that was not finite: it stays on the
    device, so the step an error names is exact though the host looks only now and then.
    The state is donated.
    """
    def step(state, first_bad, batch):
        state, metrics = train.train_step(model, cfg.optim, cfg.train.steps, state, batch)
        bad_now = ~metrics.pop("finite") & (first_bad < 0)
        first_bad = jnp.where(bad_now, state.step, first_bad)
        return state, first_bad, metrics | {"first_bad": first_bad}

    return jax.jit(step, donate_argnums=(0, 1))


def state_shardings(model: models.DecoderLM, cfg: OptimConfig, mesh: Mesh | None) -> Any:
    """(shapes, shardings) of the train state: parameters and moments by letters, the rest whole."""
    shapes = jax.eval_shape(lambda: train.init_state(model, cfg, jax.random.key(0)))
    if mesh is None:
        one = SingleDeviceSharding(jax.devices()[0])
        return shapes, jax.tree.map(lambda _: one, shapes)
    whole = NamedSharding(mesh, PartitionSpec())
    params = jax.tree.map(lambda spec: NamedSharding(mesh, spec),
                          letters.param_specs(shapes.params, mesh),
                          is_leaf=lambda x: isinstance(x, PartitionSpec))
    opt_state = optax.tree_map_params(
        make_optimizer(cfg, 1, shapes.params), lambda _, placed: placed, shapes.opt_state, params,
        transform_non_params=lambda _: whole)
    return shapes, train.TrainState(whole, params, opt_state, whole)


class _Loop:
    """One run: its state, its sinks, and the order in which they are touched."""

    def __init__(self, cfg: RunConfig, workdir: Path, model: models.DecoderLM,
                 prepared: data.Prepared, mesh: Mesh | None, console: Console):
        self.cfg, self.model, self.prepared, self.console = cfg, model, prepared, console
        self.checkpoints = Checkpoints(workdir / "checkpoints")
        self.batches = data.train_iterator(prepared, cfg.data, cfg.train.batch, cfg.train.seed)
        self.rows: Sharding = (sharding.batch_spec(mesh) if mesh is not None else
                               SingleDeviceSharding(jax.devices()[0]))
        self.identity = _identity(cfg, prepared)
        shapes, places = state_shardings(model, cfg.optim, mesh)
        like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                            shapes, places)
        restored = self.checkpoints.restore(like, self.identity, console.print)
        if restored is None:
            init = jax.jit(functools.partial(train.init_state, model, cfg.optim),
                           out_shardings=places)
            self.state, self.step = init(jax.random.key(cfg.train.seed)), 0
        else:
            self.state, self.step = restored.state, restored.step
            self.batches.set_state(restored.data_state)
            console.print(f"resuming from step {self.step}.")
        self.saved = self.step if restored else None
        self.first_bad = jax.device_put(jnp.full((), -1, jnp.int32), places.step)
        self.writer = MetricsWriter(workdir, self.step, cfg.train.wandb)

    def run(self) -> FitResult:
        cfg = self.cfg.train
        with _stop_on_signal() as stop, self._progress() as show:
            compiled = None
            pending, clock = None, (time.perf_counter(), self.step)
            while self.step < cfg.steps and not stop.is_set():
                batch = jax.device_put(next(self.batches), self.rows)
                if compiled is None:
                    self._check_leaks(batch)
                    compiled = make_step(self.model, self.cfg).lower(
                        self.state, self.first_bad, batch).compile()
                    clock = (time.perf_counter(), self.step)
                self.state, self.first_bad, metrics = compiled(self.state, self.first_bad, batch)
                self.step += 1
                # A row is read one step late, while the device works on the next step.
                if pending is not None:
                    clock = self._log(*pending, clock, show)
                    pending = None
                if self.step % cfg.log_every == 0 or self.step == cfg.steps:
                    pending = (self.step, metrics)
                if self._due(cfg.eval_every) or self._due(cfg.save_every):
                    if pending is not None:
                        clock = self._log(*pending, clock, show)
                        pending = None
                    began = time.perf_counter()
                    if self._due(cfg.eval_every):
                        if cfg.check_leaks == "validations":
                            self._check_leaks(batch)
                        self._evaluate()
                    if self._due(cfg.save_every):
                        self._save()
                    clock = (clock[0] + time.perf_counter() - began, clock[1])
            if pending is not None:
                self._log(*pending, clock, show)
        return self._finish()

    def _finish(self) -> FitResult:
        finished = self.step == self.cfg.train.steps
        metrics: dict[str, float] = {}
        if finished:
            done = [row for row in self.writer.rows
                    if row["step"] == self.step and "val_loss" in row]
            metrics = done[-1] if done else self._evaluate()
        if self.saved != self.step:
            self._save()
        if not finished:
            self.console.print(f"stopped at step {self.step}, which is saved; start again to "
                               "go on.")
        return FitResult(self.step, finished, metrics, self.state)

    def _due(self, every: int) -> bool:
        """Whether something falls on this step; the last step is `_finish`'s."""
        return bool(every) and self.step % every == 0 and self.step < self.cfg.train.steps

    def _log(self, step, metrics, clock, show) -> tuple[float, int]:
        values = jax.device_get(metrics)
        self._check(int(values.pop("first_bad")))
        now = time.perf_counter()
        rows = (step - clock[1]) * self.cfg.train.batch
        speed = rows * self.cfg.data.context / max(now - clock[0], 1e-9)
        self.writer.write(step, values, tokens_per_second=speed)
        show(step, float(values["loss"]), speed)
        return now, step

    def _check_leaks(self, batch: train.Batch) -> None:
        """Through the shapes and the implementation that train: one micro-batch, with dropout."""
        if self.cfg.train.check_leaks == "never":
            return
        micro = jax.tree.map(lambda x: x[::self.cfg.optim.accumulate], batch)
        check_leaks(self.model, self.state.params, micro, self.state.key)

    def _check(self, first_bad: int) -> None:
        if self.cfg.train.check_finite and first_bad >= 0:
            self._stop_not_finite("the loss or gradient", first_bad)

    def _stop_not_finite(self, what: str, step: int) -> None:
        kept = self.checkpoints.steps()
        raise NonFiniteError(
            f"{what} became NaN or infinite at step {step}; lower --optim.lr or raise "
            "--optim.warmup, " + (f"the checkpoint of step {kept[-1]} is kept." if kept else
                                  "nothing was saved before it."))

    def _evaluate(self) -> dict[str, float]:
        self._check(int(self.first_bad))
        limit, part = self.cfg.train.eval_batches, self.prepared
        batches = (jax.device_put(batch, self.rows) for i, batch in enumerate(
            data.eval_batches(part, self.cfg.data, self.cfg.train.batch)) if not limit or i < limit)
        found = train.evaluate(self.model, self.state.params, batches)
        # Bytes are counted for the whole set; a limited one is charged its share of them.
        share = found["tokens"] / part.n_validation_targets
        values = {"val_loss": found["loss"], "val_tokens": found["tokens"]}
        said = f"step {self.step}: validation loss {found['loss']:.4f} nats per target, "
        if part.n_validation_unknown:
            # Saying "unknown" is cheap and tells nothing of the bytes: no bits per byte then.
            values["unknown_share"] = part.n_validation_unknown / part.n_validation_targets
            said += f"{values['unknown_share']:.2%} of the tokens unknown"
        else:
            values["bits_per_byte"] = bits_per_byte(found["nats"], share * part.n_validation_bytes)
            said += f"{values['bits_per_byte']:.4f} bits per byte"
        self.writer.write(self.step, values)
        self.console.print(said)
        return {"step": self.step} | values

    def _save(self) -> None:
        self._check(int(self.first_bad))
        if self.cfg.train.check_finite and not bool(_all_finite(self.state.params)):
            self._stop_not_finite("a parameter", self.step)
        self.writer.flush()
        self.checkpoints.save(self.state, self.batches.get_state(), self.identity)
        self.saved = self.step

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Any]:
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(),
                   TextColumn("loss {task.fields[loss]:.4f}"),
                   TextColumn("{task.fields[speed]:,.0f} tokens/s"), TimeRemainingColumn())
        with Progress(*columns, console=self.console, disable=self.console.quiet) as progress:
            task = progress.add_task("", total=self.cfg.train.steps, completed=self.step,
                                     loss=float("nan"), speed=0.0)
            yield lambda step, loss, speed: progress.update(task, completed=step, loss=loss,
                                                            speed=speed)


@jax.jit
def _all_finite(tree: Any) -> jax.Array:
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]).all()


def _identity(cfg: RunConfig, prepared: data.Prepared) -> dict[str, Any]:
    """What a checkpoint must agree on to be resumed."""
    parts = dataclasses.asdict(cfg)
    for name in _FREE:
        del parts["train"][name]
    return {f"--{name}": part for name, part in parts.items()} | {
        "the text and tokenizer": prepared.fingerprint}


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
    """An event set by the first SIGTERM or SIGINT; a second one acts as usual."""
    event, before = threading.Event(), {}

    def handle(signum: int, frame: Any) -> None:
        event.set()
        signal.signal(signum, before[signum])

    if threading.current_thread() is threading.main_thread():
        before = {s: signal.signal(s, handle) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield event
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
