"""A cell is one (arm, axes, seed) of a study; its fingerprint says what its result depends on."""

import dataclasses
import hashlib
import importlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Files of this folder that cannot change a number.
READOUTS = frozenset({"contract.py", "driver.py", "figures.py", "ledger.py", "report.py",
                      "rerun.py", "statistics.py", "tables.py", "verdicts.py"})


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
      study, part, arm: names; part is a group of cells with the same metrics ("retrieval").
      axes: (name, value) pairs swept by the part, as (("d_k", 64), ("lr", 0.001)).
      seed: pairs cells across arms: equal seeds share initial key, batch order and dropout key.
      settings: canonical JSON of everything else that determines the result (`canonical`).
    """

    study: str
    part: str
    arm: str
    axes: tuple[tuple[str, Any], ...] = ()
    seed: int = 0
    settings: str = field(default="{}", repr=False)

    @property
    def axis(self) -> dict[str, Any]:
        """The axes as a dict."""
        return dict(self.axes)


def plain(value: Any) -> Any:
    """Turn dataclasses, tuples, numpy scalars and arrays into JSON types; NaN and infinities into
    {"float": "nan" | "inf" | "-inf"}, so that the result is strict JSON.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return [plain(v) for v in items]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def restore(value: Any) -> Any:
    """Undo the NaN and infinity encoding of `plain`."""
    if isinstance(value, dict):
        if set(value) == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        return {k: restore(v) for k, v in value.items()}
    return [restore(v) for v in value] if isinstance(value, list) else value


def canonical(value: Any) -> str:
    """Canonical JSON: sorted keys, no spaces, strict."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def fingerprint(cell: Cell, code: str, data: str) -> str:
    """sha256 of the cell, the code hash and the data hash; not of device, workdir or versions."""
    text = canonical({"cell": cell, "code": code, "data": data})
    return hashlib.sha256(text.encode()).hexdigest()


def short(fingerprint_: str) -> str:
    """The first ten hexadecimal digits: how a user names a cell."""
    return fingerprint_[:10]


def code_hash(packages: Iterable[str] = ("tx_jax",), files: Iterable[str | Path] = ()) -> str:
    """sha256 over the Python sources of `packages` (recursive) and of single `files`.

    `tx_jax.study` counts only where it can change a number: how the replica axis runs and which
    cells there are; tables, figures, reports and the ledger are read-outs and stay outside.
    """
    sources: dict[str, Path] = {}
    for package in packages:
        module = importlib.import_module(package)
        for root in map(Path, module.__path__):
            for path in root.rglob("*.py"):
                name = f"{package}/{path.relative_to(root).as_posix()}"
                if not (path.parent.name == "study" and path.name in READOUTS):
                    sources[name] = path
    for path in map(Path, files):
        sources[path.name] = path
    digest = hashlib.sha256()
    for name in sorted(sources):
        digest.update(name.encode() + b"\0" + sources[name].read_bytes() + b"\0")
    return digest.hexdigest()


def data_hash(*parts: bytes | str) -> str:
    """sha256 of the data a study reads (texts' fingerprints, or "" for generated data)."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update((part.encode() if isinstance(part, str) else part) + b"\0")
    return digest.hexdigest()
