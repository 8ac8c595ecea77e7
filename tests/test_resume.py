"""Runs that are killed, stopped or broken, and started again with the same command."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto import event_pb2

from tx_jax import checkpoint, fit, metrics, sharding
from tx_jax.config import DataConfig, ModelConfig, OptimConfig, TrainConfig
from tx_jax.errors import UserError

SIZES = {"layers": 1, "d_model": 16, "heads": 2, "mlp": "none", "dropout": 0.1}
CFG = fit.RunConfig(
    model=ModelConfig(**SIZES), data=DataConfig(text="TEXT", context=16),
    optim=OptimConfig(lr=1e-2, accumulate=2),
    train=TrainConfig(steps=9, batch=4, log_every=2, eval_every=4, eval_batches=2, save_every=3))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "rhyme.txt"
    path.write_text("the owl and the pussy-cat went to sea in a beautiful pea-green boat. " * 20)
    return path


@pytest.fixture(scope="module")
def cfg(text):
    return dataclasses.replace(CFG, data=dataclasses.replace(CFG.data, text=str(text)))


@pytest.fixture(scope="module")
def whole(cfg, tmp_path_factory):
    """An uninterrupted run: (its result, the bytes of its metrics)."""
    workdir = tmp_path_factory.mktemp("whole")
    result = fit.fit(cfg, workdir, cache_dir=workdir / "cache")
    return result, (workdir / "metrics.jsonl").read_bytes()


def change(cfg, **parts):
    return dataclasses.replace(cfg, **{name: dataclasses.replace(getattr(cfg, name), **fields)
                                       for name, fields in parts.items()})


class Killed(BaseException):
    """Stands for a kill inside one process."""


def kill_at(monkeypatch, step):
    """Die right after the row of `step` is on disk."""
    write = metrics.MetricsWriter.write

    def deadly(self, at, *args, **kwargs):
        write(self, at, *args, **kwargs)
        if at == step:
            raise Killed

    monkeypatch.setattr(metrics.MetricsWriter, "write", deadly)


def assert_same_params(got, want):
    for a, b in zip(jax.tree.leaves(got.params), jax.tree.leaves(want.params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_rows(whole):
    result, lines = whole
    rows = [json.loads(line) for line in lines.splitlines()]
    assert [(r["step"], "val_loss" in r) for r in rows] == [
        (2, False), (4, False), (4, True), (6, False), (8, False), (8, True), (9, False), (9, True)]
    assert result.finished and result.step == 9 and result.metrics == rows[-1]
    assert rows[0].keys() == {"step", "loss", "grad_norm", "lr", "tokens"}
    assert rows[0]["tokens"] == 64 and rows[-1]["val_tokens"] == 128
    # Characters are bytes here, so the two units differ by ln 2 alone.
    np.testing.assert_allclose(rows[-1]["bits_per_byte"], rows[-1]["val_loss"] / np.log(2))


@pytest.mark.parametrize("step", [2, 8])
def test_dying_and_starting_again(cfg, whole, tmp_path, monkeypatch, step):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, step)
        fit.fit(cfg, tmp_path, cache_dir=tmp_path / "cache")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')  # a row cut short by the kill
    result = fit.fit(cfg, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole[1]
    assert_same_params(result.state, whole[0].state)
    assert board_steps(tmp_path) == [2, 4, 6, 8, 9]


@pytest.mark.slow
def test_the_seconds_of_all_starts_are_kept(cfg, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 4)
        fit.fit(cfg, tmp_path)
    first = metrics.read_seconds(tmp_path)
    assert all(seconds > 0 for seconds in first.values())
    fit.fit(cfg, tmp_path)
    both = metrics.read_seconds(tmp_path)
    assert all(both[name] > first[name] for name in first)


def test_compilations_within_another_count_once(tmp_path, monkeypatch):
    watch, clock = metrics.Stopwatch(tmp_path), [0.0]
    watch._began = 0.0
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: clock[0])
    for now, duration in ((3.0, 1.0), (5.0, 1.0), (6.0, 5.0), (9.0, 2.0)):
        clock[0] = now
        watch._listen("/jax/core/compile/backend_compile_duration", duration)
    watch._listen("/jax/other", 9.0)
    clock[0] = 10.0
    watch.save()
    watch.stop()
    assert metrics.read_seconds(tmp_path) == {"seconds": 3.0, "compile_seconds": 7.0}
    (tmp_path / "seconds.json").write_text("{")
    assert metrics.read_seconds(tmp_path)["seconds"] == 0.0


def test_a_finished_run_does_nothing_more(cfg, whole, tmp_path, monkeypatch):
    first = fit.fit(cfg, tmp_path)
    monkeypatch.setattr(fit, "make_step", lambda *_: pytest.fail("compiled again"))
    again = fit.fit(cfg, tmp_path)
    assert again.metrics == first.metrics and again.finished
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole[1]


def board_steps(workdir):
    """Steps of the scalar `loss` as TensorBoard reads them, restarts purged."""
    steps = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        content, at = path.read_bytes(), 0
        while at + 12 <= len(content):
            length = int.from_bytes(content[at:at + 8], "little")
            event = event_pb2.Event.FromString(content[at + 12:at + 12 + length])
            at += 16 + length
            if event.session_log.status == event_pb2.SessionLog.START:
                steps = [s for s in steps if s < event.step]
            steps += [event.step for v in event.summary.value if v.tag == "loss"]
    return steps


@pytest.mark.slow
def test_one_compilation_of_the_step(cfg, tmp_path, monkeypatch):
    """Also for a run that resumes."""
    counted = []

    def compiles(name, *_, **__):
        if name == "/jax/core/compile/backend_compile_duration":
            counted.append(threading.current_thread().name)

    small = change(cfg, train={"steps": 6, "eval_every": 0})
    fit.fit(small, tmp_path / "a", cache_dir=tmp_path / "cache")  # helpers are compiled here
    lowered = []
    make_step = fit.make_step

    def watch(*args):
        lowered.append(1)
        return make_step(*args)

    monkeypatch.setattr(fit, "make_step", watch)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, 4)
        fit.fit(small, tmp_path / "b", cache_dir=tmp_path / "cache")
    jax.monitoring.register_event_duration_secs_listener(compiles)
    try:
        fit.fit(small, tmp_path / "b", cache_dir=tmp_path / "cache")
    finally:
        jax.monitoring.unregister_event_duration_listener(compiles)
    assert len(lowered) == 2
    assert len(counted) <= 4, "the step, and the initial state's small helpers"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_ends(cfg, whole, tmp_path, monkeypatch, signum):
    write = metrics.MetricsWriter.write

    def signalling(self, at, values, **live):
        write(self, at, values, **live)
        if at == 4 and "loss" in values:  # once: a second signal would kill
            os.kill(os.getpid(), signum)

    before = signal.getsignal(signum)
    with monkeypatch.context() as patch:
        patch.setattr(metrics.MetricsWriter, "write", signalling)
        result = fit.fit(cfg, tmp_path)
    assert not result.finished and result.metrics == {} and 4 <= result.step < 9
    assert signal.getsignal(signum) == before
    output = io.StringIO()
    result = fit.fit(cfg, tmp_path, console=Console(file=output, width=200))
    assert result.finished and "resuming from step" in output.getvalue()
    assert (tmp_path / "metrics.jsonl").read_bytes() == whole[1]


@pytest.mark.parametrize("log_every", [1, 50])
def test_not_finite_names_the_step_and_keeps_the_last_good(cfg, tmp_path, log_every):
    """The step named does not depend on how often the host looks."""
    wild = change(cfg, optim={"lr": 1e38, "schedule": "constant", "warmup": 0.0},
                  train={"log_every": log_every, "save_every": 1 if log_every == 1 else 0})
    with pytest.raises(fit.NonFiniteError, match="NaN or infinite at step 2; lower") as e:
        fit.fit(wild, tmp_path)
    kept = checkpoint.Checkpoints(tmp_path / "checkpoints").steps()
    assert kept == ([1] if log_every == 1 else [])
    assert ("step 1 is kept" in str(e.value)) == (log_every == 1)


def test_resuming_with_another_configuration(cfg, tmp_path):
    fit.fit(change(cfg, train={"steps": 2}), tmp_path)
    with pytest.raises(UserError, match="--train.steps=2, not --train.steps=3"):
        fit.fit(change(cfg, train={"steps": 3}), tmp_path)
    fit.fit(change(cfg, train={"steps": 2, "log_every": 7}), tmp_path)


def test_wandb_is_optional(cfg, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="--train.wandb=owl needs the package wandb"):
        metrics.MetricsWriter(tmp_path, wandb="owl")

    class Fake:
        calls = []

        def init(self, **kwargs):
            self.calls.append(kwargs)
            return self

        def log(self, values, step):
            self.calls.append((step, values))

        def finish(self):
            self.calls.append("finish")

    monkeypatch.setitem(sys.modules, "wandb", Fake())
    for start in (0, 1):
        writer = metrics.MetricsWriter(tmp_path, start=start, wandb="owl")
        writer.write(start + 1, {"loss": np.float32(0.5)}, speed=2.0)
        writer.close()
    first, row, _, second, *_ = Fake.calls
    assert first["project"] == "owl" and first["id"] == second["id"]
    assert row == (1, {"loss": 0.5, "speed": 2.0})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.5}\n')


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_more_and_fewer_devices(cfg, tmp_path, packing):
    """T7: a run on four devices goes on on one, and then on two."""
    cfg = change(cfg, data={"packing": packing}, model={"dropout": 0.0})
    want = fit.fit(cfg, tmp_path / "one", cache_dir=tmp_path / "cache").metrics["val_loss"]
    for steps, spec in ((4, "data:2,tensor:2"), (7, ""), (9, "fsdp:2")):
        stop = _stop_after(steps)
        mesh = sharding.make_mesh(spec) if spec else None
        with stop:
            result = fit.fit(cfg, tmp_path / "many", cache_dir=tmp_path / "cache", mesh=mesh)
    assert result.finished
    np.testing.assert_allclose(result.metrics["val_loss"], want, rtol=1e-4)


class _stop_after:
    """Deliver SIGTERM once the loop has taken so many steps."""

    def __init__(self, steps):
        self.steps = steps

    def __enter__(self):
        self.due = fit._Loop._due
        steps, due, sent = self.steps, self.due, []

        def watching(loop, every):
            if loop.step == steps < loop.cfg.train.steps and not sent:
                sent.append(steps)  # once: a second signal would kill
                os.kill(os.getpid(), signal.SIGTERM)
            return due(loop, every)

        fit._Loop._due = watching

    def __exit__(self, *_):
        fit._Loop._due = self.due


SCRIPT = """
import os, signal, sys
from pathlib import Path
point, text, workdir = sys.argv[1:]
import orbax.checkpoint as ocp
from tx_jax import checkpoint, config, fit, metrics

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def at_row(step):
    write = metrics.MetricsWriter.write
    def deadly(self, at, *args, **kwargs):
        write(self, at, *args, **kwargs)
        at == step and die()
    metrics.MetricsWriter.write = deadly

if point.isdigit():
    at_row(int(point))
elif point == "arrays written, no record":
    checkpoint._digests = die
elif point == "record written, not renamed":
    os.rename = die
elif point == "renamed, the oldest not yet removed":
    save = checkpoint.os.rename
    def rename(*args):
        save(*args)
        if "step_00000009" in str(args[1]):
            die()
    os.rename = rename

cfg = fit.RunConfig(
    model=config.ModelConfig(layers=1, d_model=16, heads=2, mlp="none", dropout=0.1),
    data=config.DataConfig(text=text, context=16, packing="documents"),
    optim=config.OptimConfig(lr=1e-2),
    train=config.TrainConfig(steps=12, batch=4, log_every=1, eval_every=5, eval_batches=2,
                             save_every=3))
fit.fit(cfg, Path(workdir))
"""


@pytest.mark.slow
def test_kill_9_at_any_point(text, tmp_path):
    """Real processes, one after the other killed somewhere else, against one left alone."""
    def run(name, point):
        (tmp_path / name).mkdir(exist_ok=True)
        command = [sys.executable, "-c", SCRIPT, point, str(text), str(tmp_path / name)]
        return subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"}).returncode

    assert run("whole", "never") == 0
    for point in ("2", "arrays written, no record", "record written, not renamed", "5",
                  "renamed, the oldest not yet removed", "11"):
        assert run("killed", point) == -signal.SIGKILL, point
    assert run("killed", "never") == 0
    whole, killed = ((tmp_path / n / "metrics.jsonl").read_bytes() for n in ("whole", "killed"))
    assert whole == killed and whole.count(b"\n") == 15
    assert checkpoint.Checkpoints(tmp_path / "killed" / "checkpoints").steps() == [9, 12]
