"""Checkpoints: orbax arrays and a JSON record, together in a directory that is whole or absent.

    checkpoints/step_00000400/arrays/       orbax: step, params, opt_state, key
                             record.json    step, config, data position, versions, sha256 per file

A save fills a temporary directory and renames it, so a kill at any moment leaves the checkpoints
before it untouched. Arrays are restored onto whatever devices the new run has.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from tx_jax.errors import UserError
from tx_jax.train import TrainState

_RECORD, _ARRAYS, _TEMPORARY = "record.json", "arrays", "saving_"
_PACKAGES = ("jax", "flax", "optax", "orbax-checkpoint", "grain")


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint gives back: the state, the data position, and its step."""

    state: TrainState
    data_state: Any
    step: int


class Checkpoints:
    """The checkpoints of one run, in one directory.

    Args:
      directory: absolute, relative, or with `~`; made at the first save.
      keep: the newest checkpoints that are kept.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int = 2):
        # Orbax refuses relative paths.
        self.directory = Path(directory).expanduser().absolute()
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, in order."""
        return sorted(int(path.name.removeprefix("step_"))
                      for path in self.directory.glob("step_*"))

    def save(self, state: TrainState, data_state: Any, config: dict[str, Any]) -> Path:
        """Write the checkpoint of `state.step`, then keep it and the `keep - 1` before it.

        Args:
          data_state: position of the data iterator, anything JSON holds.
          config: what must agree on resuming, a nested dict that JSON holds.

        Raises:
          UserError: it could not be written (a full disk); the ones before are untouched.
        """
        step = int(state.step)
        final, temporary = self._path(step), self.directory / f"{_TEMPORARY}{step:08d}"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            ocp.PyTreeCheckpointer().save(temporary / _ARRAYS, _to_tree(state))
            record = {"step": step, "config": config, "data_state": data_state,
                      "key_impl": str(jax.random.key_impl(state.key)),
                      "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
                      "files": _digests(temporary / _ARRAYS)}
            with open(temporary / _RECORD, "w", encoding="utf-8") as file:
                json.dump(record, file)
                file.flush()
                os.fsync(file.fileno())
            # Saving a step again happens only after it was found damaged.
            shutil.rmtree(final, ignore_errors=True)
            os.rename(temporary, final)
        except (OSError, ValueError, RuntimeError) as error:
            shutil.rmtree(temporary, ignore_errors=True)
            kept = self.steps()
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise UserError(f"the checkpoint of step {step} could not be written to "
                            f"{self.directory} ({reason}); free some space and start again, "
                            + (f"step {kept[-1]} is kept." if kept else "none was saved before.")
                            ) from error
        # Later steps are damaged ones that `restore` passed over.
        past = [other for other in self.steps() if other <= step]
        for other in set(self.steps()) - set(past[-self.keep:]):
            shutil.rmtree(self._path(other), ignore_errors=True)
        return final

    def restore(self, like: TrainState, config: dict[str, Any],
                notice: Callable[[str], None]) -> Restored | None:
        """Restore the newest checkpoint that is intact, or None where there is none at all.

        Args:
          like: state of arrays or `jax.ShapeDtypeStruct`; its shardings say where arrays go, which
            need not be where they were saved from.
          config: compared with the saved one.
          notice: called with one sentence for each damaged checkpoint passed over.

        Raises:
          UserError: a field of `config` differs, or checkpoints exist and all are damaged.
        """
        for left_over in self.directory.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(left_over, ignore_errors=True)
        for step in reversed(self.steps()):
            path = self._path(step)
            record = _read_record(path)
            if record is None:
                notice(f"checkpoint {path} is damaged; falling back to the one before it.")
                continue
            _check_config(path, record["config"], json.loads(json.dumps(config)))
            state = _read_state(path, like, record["key_impl"])
            return Restored(state, record["data_state"], step)
        if self.steps():
            raise UserError(f"every checkpoint in {self.directory} is damaged; delete the "
                            "directory to start from step 0.")
        return None

    def _path(self, step: int) -> Path:
        return self.directory / f"step_{step:08d}"


def _to_tree(state: TrainState) -> dict[str, Any]:
    """The state as a dict of plain arrays: typed PRNG keys are stored as their uint32 data."""
    return {"step": state.step, "params": state.params, "opt_state": state.opt_state,
            "key": jax.random.key_data(state.key)}


def _read_state(path: Path, like: TrainState, key_impl: str) -> TrainState:
    shapes = jax.eval_shape(_to_tree, like)
    places = {"step": like.step, "params": like.params, "opt_state": like.opt_state,
              "key": like.step}  # the key is as whole on every device as the step
    tree = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=place.sharding), shapes, places)
    got = ocp.PyTreeCheckpointer().restore(path / _ARRAYS, args=ocp.args.PyTreeRestore(
        item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree)))
    key = jax.random.wrap_key_data(got["key"], impl=key_impl)
    return TrainState(got["step"], got["params"], got["opt_state"], key)


def _digests(directory: Path) -> dict[str, str]:
    digests = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                digests[str(path.relative_to(directory))] = hashlib.file_digest(
                    file, "sha256").hexdigest()
    return digests


def _read_record(path: Path) -> dict[str, Any] | None:
    """The record of a checkpoint whose files are all as they were written, else None."""
    try:
        record = json.loads((path / _RECORD).read_text(encoding="utf-8"))
        intact = record["files"] == _digests(path / _ARRAYS)
        return record if intact and {"config", "data_state", "key_impl"} <= record.keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _check_config(path: Path, saved: Any, wanted: Any, prefix: str = "") -> None:
    if isinstance(saved, dict) and isinstance(wanted, dict):
        for name in sorted(saved.keys() | wanted.keys()):
            _check_config(path, saved.get(name), wanted.get(name),
                          f"{prefix}.{name}" if prefix else name)
    elif saved != wanted:
        raise UserError(f"the checkpoint {path} was made with {prefix}={saved}, not "
                        f"{prefix}={wanted}; set it back or choose another --workdir.")
