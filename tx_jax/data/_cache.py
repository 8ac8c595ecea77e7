"""A directory that is built once, appears whole or not at all, and is checked before each use.

A build goes to a temporary directory beside the final one and is renamed when every byte is on
disk, so a killed process or a full disk leaves no half-built entry. A lock, which the system
releases when its process dies, keeps two processes from building the same entry twice.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tx_jax.errors import UserError

_INDEX = "index.json"


def entry(root: Path, key: str, build: Callable[[Path], dict[str, Any]]) -> tuple[Path, dict]:
    """Return (directory, facts) of the entry `key` below `root`, building it if needed.

    Args:
      build: writes files into the directory it is given and returns facts for JSON. It also runs
        when the entry is damaged: a file missing, cut short or altered.

    Raises:
      UserError: `root` cannot be written.
    """
    path = root / key
    facts = _intact(path)
    if facts is not None:
        return path, facts
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key}.lock"):
            facts = _intact(path)  # another process may have built it while this one waited
            if facts is None:
                facts = _rebuild(root, key, build)
    except OSError as e:
        raise UserError(f"the cache directory {root} cannot be written: {e.strerror or e}; free "
                        "some space or name another directory.") from e
    return path, facts


def _rebuild(root: Path, key: str, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Build `key`. The caller holds its lock: temporary directories found are left-overs."""
    for old in root.glob(f"{key}.tmp-*"):
        shutil.rmtree(old, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{key}.tmp-", dir=root))
    try:
        facts = build(temporary)
        files = {file.name: _digest(file) for file in sorted(temporary.iterdir())}
        with open(temporary / _INDEX, "w", encoding="utf-8") as file:
            json.dump({"facts": facts, "files": files}, file)
        for file in temporary.iterdir():
            _to_disk(file)
        temporary.chmod(0o755)
        path = root / key
        if path.exists():
            # Damaged. A process that has it open keeps its files; only the name goes.
            os.rename(path, temporary.with_suffix(".tmp-damaged"))
        os.rename(temporary, path)
        _to_disk(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(temporary.with_suffix(".tmp-damaged"), ignore_errors=True)
    return facts


def _intact(path: Path) -> dict[str, Any] | None:
    """Return the facts of an entry whose files are all as they were written, else None."""
    try:
        index = json.loads((path / _INDEX).read_text(encoding="utf-8"))
        for name, digest in index["files"].items():
            if _digest(path / name) != digest:
                return None
        return index["facts"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; where the file system has none, the rename alone must do."""
    with open(path, "a", encoding="utf-8") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
