"""Claiming a working directory before anything is compiled: ours, writable, never mixed."""

import json
import os
import tempfile
from pathlib import Path

from tx_jax.errors import UserError

MARKER = "tx_jax_run.json"


def claim(path: str, experiment: str) -> Path:
    """Create or reopen the working directory of one experiment.

    Args:
      path: relative, absolute or with `~`.

    Returns:
      The absolute path; `MARKER` inside it names the experiment.

    Raises:
      UserError: the path is a file, cannot be written, holds foreign files or another experiment.
    """
    root = Path(path).expanduser().absolute()
    if root.exists() and not root.is_dir():
        raise UserError(f"--workdir={path} is a file; name a directory.")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            pass
    except OSError as error:
        raise UserError(f"--workdir={path} cannot be written ({error.strerror}); choose a "
                        "directory you may write to.") from None
    marker = root / MARKER
    if marker.exists():
        owner = _owner(marker)
        if owner != experiment:
            raise UserError(f"--workdir={path} belongs to the experiment '{owner}', not "
                            f"'{experiment}'; choose another directory.")
        return root
    if any(root.iterdir()):
        raise UserError(f"--workdir={path} is not empty and was not made by this project; choose a "
                        "new or empty directory.")
    write_atomic(marker, json.dumps({"project": "tx_jax", "experiment": experiment}) + "\n")
    return root


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that a crash leaves the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _owner(marker: Path) -> str:
    try:
        return str(json.loads(marker.read_text(encoding="utf-8"))["experiment"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{marker} is damaged; delete it if the directory is an old run, or choose "
                        "another --workdir.") from None
