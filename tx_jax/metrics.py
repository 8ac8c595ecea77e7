"""Metric rows to JSONL, TensorBoard and, by flag, Weights & Biases; exact across restarts.

`metrics.jsonl` holds only what the run determines (no times), so that a run that was killed and
resumed leaves the same bytes as one that was not. `seconds.json` holds the times, over all starts.
"""

import json
import os
import secrets
import time
from pathlib import Path
from typing import Any

import jax
import tensorboardX

from tx_jax.errors import UserError
from tx_jax.workdir import write_atomic


class MetricsWriter:
    """Writes one row per call, each on disk when the call returns.

    Args:
      workdir: holds `metrics.jsonl`, `seconds.json` and `tensorboard/`.
      start: steps already taken; rows after it, and a half-written last line, are cut.
      wandb: Weights & Biases project; empty = off.

    Raises:
      UserError: `wandb` is asked for and not installed.
    """

    def __init__(self, workdir: Path, start: int = 0, wandb: str = ""):
        self._wandb = _wandb_run(workdir, wandb) if wandb else None
        self._watch = Stopwatch(workdir)
        self._path = workdir / "metrics.jsonl"
        self.rows = _rows_until(self._path, start)
        write_atomic(self._path, "".join(map(_line, self.rows)))
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115
        # TensorBoard drops what earlier event files hold from this step on.
        self._board = tensorboardX.SummaryWriter(str(workdir / "tensorboard"),
                                                 purge_step=start + 1)

    def write(self, step: int, values: dict[str, Any], **live: float) -> None:
        """Append a row.

        Args:
          values: exact metrics, Python or NumPy scalars.
          live: values that differ from run to run (speed); left out of `metrics.jsonl`.
        """
        row = {"step": step} | {name: getattr(value, "item", lambda v=value: v)()
                                for name, value in values.items()}
        self.rows.append(row)
        self._file.write(_line(row))
        self._file.flush()
        shown = {k: v for k, v in row.items() if k != "step"} | live
        for name, value in shown.items():
            self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(shown, step=step)

    def flush(self) -> None:
        """Put everything on disk; called before a checkpoint, whose rows then survive a kill."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._watch.save()
        self._board.flush()

    def close(self) -> None:
        """Flush and close every sink."""
        self.flush()
        self._watch.stop()
        self._file.close()
        self._board.close()
        if self._wandb is not None:
            self._wandb.finish()


class Stopwatch:
    """Seconds of a run over all its starts, kept in `seconds.json`.

    It runs from the first batch on. What a kill cuts off after the last save is not counted: the
    steps it went into are lost too.
    """

    def __init__(self, workdir: Path):
        self._path, self._before = workdir / "seconds.json", read_seconds(workdir)
        self._began, self._spans = time.perf_counter(), []
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            now = time.perf_counter()
            # Events end inner first; the outer one holds the time of those that began within it.
            while self._spans and self._spans[-1][0] >= now - duration:
                self._spans.pop()
            self._spans.append((now - duration, now))

    def save(self) -> None:
        """Write the seconds so far."""
        compiling = sum(end - began for began, end in self._spans)
        now = {"seconds": time.perf_counter() - self._began - compiling,
               "compile_seconds": compiling}
        write_atomic(self._path, json.dumps({k: v + self._before[k] for k, v in now.items()}))

    def stop(self) -> None:
        """Count no more compilations."""
        jax.monitoring.unregister_event_duration_listener(self._listen)


def read_seconds(workdir: Path) -> dict[str, float]:
    """{"seconds" without compilation, "compile_seconds"} of a run; zeros before the first save."""
    try:
        found = json.loads((workdir / "seconds.json").read_text(encoding="utf-8"))
        return {name: float(found[name]) for name in ("seconds", "compile_seconds")}
    except (OSError, ValueError, KeyError, TypeError):
        return {"seconds": 0.0, "compile_seconds": 0.0}


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"


def _rows_until(path: Path, step: int) -> list[dict[str, Any]]:
    """The rows of a file up to a step; reading stops at the first line that is not whole."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
                if row["step"] > step:
                    break
            except (ValueError, KeyError, TypeError):
                break
            rows.append(row)
    return rows


def _wandb_run(workdir: Path, project: str) -> Any:
    try:
        import wandb  # an optional package: imported only where it is asked for
    except ImportError:
        raise UserError(f"--train.wandb={project} needs the package wandb, which is not installed; "
                        "run 'pip install wandb' or leave the flag out.") from None
    name = workdir / "wandb_id"  # kept, so that a resumed run goes on in the same place
    if not name.exists():
        name.write_text(secrets.token_hex(4), encoding="utf-8")
    return wandb.init(project=project, dir=str(workdir), id=name.read_text(encoding="utf-8"),
                      resume="allow")
