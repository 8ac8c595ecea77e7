"""A language model on disk: found by `--run`, with its tokenizer and its parameters."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tx_jax import models
from tx_jax.checkpoint import Checkpoints
from tx_jax.config import ModelConfig, OptimConfig
from tx_jax.errors import UserError
from tx_jax.fit import state_shardings
from tx_jax.study.cells import canonical
from tx_jax.tokenizers import Tokenizer, from_json


@dataclass(frozen=True)
class Run:
    """A trained model on disk: its directory and the record of its newest readable checkpoint."""

    root: Path
    record: dict[str, Any]

    @property
    def model(self) -> ModelConfig:
        """Its configuration, under the reference, which needs no special device."""
        return dataclasses.replace(_config(ModelConfig, self.record["config"]["--model"]),
                                   attention="reference")

    @property
    def context(self) -> int:
        """The longest row it was trained on."""
        return self.record["config"]["--data"]["context"]

    @property
    def identity(self) -> str:
        """Changes when the run is trained further."""
        return hashlib.sha256(canonical(self.record).encode()).hexdigest()


def _config(kind: type, fields: dict[str, Any]) -> Any:
    try:
        return kind(**fields)
    except TypeError:
        raise UserError("the run was made by another version of this project, whose "
                        f"{kind.__name__} has other fields; train it again.") from None


def find_run(path: str) -> Run:
    """The run in a directory; of several seeds the one whose checkpoint is newest.

    Raises:
      UserError: there is no checkpoint.
    """
    root = Path(path).expanduser().absolute()
    found = [*root.glob("checkpoints/step_*/record.json"),
             *root.glob("cells/*/checkpoints/step_*/record.json")]
    for record in sorted(found, key=lambda p: (p.stat().st_mtime, str(p)), reverse=True):
        try:
            data = json.loads(record.read_text(encoding="utf-8"))
            if isinstance(data["config"]["--model"], dict):
                return Run(record.parents[2], data)
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a damaged one
    raise UserError(f"--run={path} holds no checkpoint of a language model; give the --workdir of "
                    "a language_model run, or one of its cells/ID.")


def read_tokenizer(run: Run) -> Tokenizer:
    """The tokenizer of a run, from the cache of tokenised texts beside it.

    Raises:
      UserError: the cache is gone.
    """
    wanted = run.record["config"]["the text and tokenizer"]
    for index in (index for folder in (run.root, run.root.parent.parent)
                  for index in folder.glob("cache/*/index.json")):
        try:
            if json.loads(index.read_text(encoding="utf-8"))["facts"]["fingerprint"] == wanted:
                return from_json(index.with_name("tokenizer.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    raise UserError(f"the cache beside {run.root} no longer holds the tokenizer of that run; start "
                    "its command once more, which makes it again.")


def restore(found: Run, model: models.DecoderLM, warn: Callable[[str], None]) -> Any:
    """Its newest readable checkpoint, on one device; `warn` hears of those that are damaged."""
    optim = _config(OptimConfig, found.record["config"]["--optim"])
    shapes, places = state_shardings(model, optim, None)
    like = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
                        shapes, places)
    return Checkpoints(found.root / "checkpoints").restore(like, found.record["config"], warn)
