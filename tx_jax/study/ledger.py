"""The ledger: a JSON line per finished cell, safe against kill -9, foreign files, two writers."""

import datetime
import fcntl
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tx_jax.errors import UserError
from tx_jax.study.cells import Cell, canonical, fingerprint, plain, restore, short

Row = dict[str, Any]
_REQUIRED = ("fingerprint", "study", "part", "arm", "axes", "seed", "code", "metrics", "status")


@dataclass(frozen=True)
class Measured:
    """What running a cell gave; `make_row` adds who, what and where.

    Attributes:
      metrics: name -> scalar or short list.
      status: "ok" or "diverged".
      kernel: attention implementation that ran; strategy: how the replica axis ran.
      seconds: wall time of this cell without compilation; flops: operations of this cell.
    """

    metrics: Mapping[str, Any]
    seconds: float
    compile_seconds: float = 0.0
    flops: float = 0.0
    kernel: str = ""
    strategy: str = ""
    status: str = "ok"


def versions() -> dict[str, str]:
    """What may explain a difference: versions of libraries and Python, git commit if any."""
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "flax", "optax", "numpy", "tx_jax"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    try:
        here = Path(__file__).resolve().parent
        found["commit"] = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=here, check=True,
            capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        found["commit"] = ""
    return found


def device_name() -> str:
    """Kind and number of the devices, as "cpu x2"."""
    import jax

    devices = jax.local_devices()
    return f"{devices[0].device_kind} x{len(devices)}"


def make_row(cell: Cell, measured: Measured, *, code: str, data: str,
             versions: Mapping[str, str], device: str, together: Sequence[str] = ()) -> Row:
    """The ledger row of a finished cell; `together`: short ids of the cells of its program."""
    return {
        "fingerprint": fingerprint(cell, code, data), "study": cell.study, "part": cell.part,
        "arm": cell.arm, "axes": dict(cell.axes), "seed": cell.seed,
        "settings": json.loads(cell.settings), "code": code, "data": data,
        "versions": dict(versions), "device": device, "kernel": measured.kernel,
        "strategy": measured.strategy, "together": list(together), "seconds": measured.seconds,
        "compile_seconds": measured.compile_seconds, "flops": measured.flops,
        "metrics": dict(measured.metrics), "status": measured.status,
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def read(path: Path) -> list[Row]:
    """All rows, of any code version, in the order written; a torn last line is left out.

    Raises:
      UserError: a line that is not a row of this project.
    """
    if not path.exists():
        return []
    try:
        return _parse(path.read_bytes(), path)
    except OSError as e:
        raise UserError(f"{path} cannot be read ({e.strerror}); choose another --workdir.") from e


def _parse(text: bytes, path: Path) -> list[Row]:
    rows, lines = [], text.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or any(k not in row for k in _REQUIRED):
                raise ValueError
        except ValueError:
            if number == len(lines) and line[:7] == b'{"arm":'[:len(line)]:
                break  # Without a newline: the writer was killed in the middle of this row.
            raise UserError(f"{path} line {number} is not a result row of this project; move the "
                            "file away or choose another --workdir.") from None
        rows.append(restore(row))
    return rows


def finished(rows: Iterable[Row], cells: Iterable[Cell], code: str, data: str) -> dict[Cell, Row]:
    """The rows of planned cells under this code and data; the last row of a cell wins."""
    by_print = {row["fingerprint"]: row for row in rows}
    found = {}
    for cell in cells:
        row = by_print.get(fingerprint(cell, code, data))
        if row is not None:
            found[cell] = row
    return found


class Ledger:
    """The single writer of a `results.jsonl`; use as a context manager.

    Raises:
      UserError: the file is foreign, cannot be written, or another process writes it.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def __enter__(self) -> "Ledger":
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b")
        except OSError as e:
            raise UserError(f"{self.path} cannot be written ({e.strerror}); choose another "
                            "--workdir.") from e
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.rows = self._repair()
        except BaseException as e:
            self._file.close()
            if isinstance(e, BlockingIOError):
                raise UserError(f"{self.path} is being written by another run; wait for it or "
                                "choose another --workdir.") from e
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, row: Row) -> None:
        """Write one row and return when it is on the disk."""
        self._file.write((canonical(row) + "\n").encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.rows.append(restore(plain(row)))

    def _repair(self) -> list[Row]:
        """Read the rows; cut off a torn last line, or end it if only its newline is missing."""
        self._file.seek(0)
        text = self._file.read()
        rows = _parse(text, self.path)
        if text and not text.endswith(b"\n"):
            last = text.rfind(b"\n") + 1
            try:
                json.loads(text[last:])
                self._file.write(b"\n")
            except ValueError:
                self._file.truncate(last)
            self._file.flush()
        return rows


def find(rows: Iterable[Row], name: str) -> Row:
    """The row whose fingerprint starts with `name`.

    Raises:
      UserError: none or several.
    """
    hits = {row["fingerprint"]: row for row in rows if row["fingerprint"].startswith(name)}
    if len(hits) != 1:
        known = ", ".join(short(f) for f in hits) or "none"
        raise UserError(f"'{name}' names {len(hits)} cells ({known}); "
                        "give more of the fingerprint.")
    return next(iter(hits.values()))
