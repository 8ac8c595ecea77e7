"""A peer in a Python of its own, driven line by line over pipes: what torch is measured through."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tx_jax.errors import UserError


def cores() -> int:
    """CPU cores this process may use, which is what both sides get."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_torch(python: str) -> bool:
    """Whether that Python can run the peer."""
    probe = subprocess.run([python, "-c", "import torch, numpy"], capture_output=True)
    return probe.returncode == 0


def find_python(torch_python: str) -> str | None:
    """The Python that runs the peer; None where this one has no torch and no other was named.

    Raises:
      UserError: the one that was named cannot run it.
    """
    python = shutil.which(torch_python or sys.executable)
    if python is None:
        raise UserError(f"--torch_python={torch_python} is not a program; give the path of a "
                        "Python that has torch and numpy.")
    if has_torch(python):
        return python
    if torch_python:
        raise UserError(f"--torch_python={torch_python} cannot import torch and numpy; install "
                        "them there or leave the flag out.")
    return None


# Named on the command line, a script would put its folder first on the path, where a study may have
# the name of a package that the peer's libraries import (`tokenizers`).
_RUN = ("import runpy, sys; sys.path[:] = filter(None, sys.path); sys.argv = sys.argv[1:]; "
        "runpy.run_path(sys.argv[0], run_name='__main__')")


class Peer:
    """A running script of this folder; `ready` is its first answer."""

    def __init__(self, python: str, script: str, options: dict[str, Any]) -> None:
        path = Path(__file__).with_name(script)
        self.process = subprocess.Popen([python, "-c", _RUN, str(path), json.dumps(options)],
                                        text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.ready = self._read()

    def ask(self, line: Any) -> dict[str, Any]:
        """Send one line, return the answer."""
        print(line, file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise UserError("the torch process ended early; its own message is above.")
        return json.loads(line)

    def close(self) -> None:
        """End the script."""
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()
