"""Shared by tests: parameters without compiling an initialiser, and studies run by their flags."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax import forms, models


def make_params(model: models.DecoderLM, seed: int = 1) -> dict[str, Any]:
    """Parameters of the model's structure: gains 1, biases 0, the rest normal by fan-in.

    Initialising by `models.init` compiles for seconds; tests of what a model computes need none of
    it. Equal names get equal numbers in models that differ elsewhere.
    """
    shapes = jax.eval_shape(lambda: models.init(model, jax.random.key(0)))

    def fill(path: Any, leaf: Any) -> jax.Array:
        name = path[-1].key
        if name.startswith(("gain", "bias")):
            return jnp.full(leaf.shape, float(name.startswith("gain")), leaf.dtype)
        text = "/".join(str(p.key) for p in path)
        rng = np.random.default_rng([seed, *text.encode()])
        stacked = "blocks" in text
        fan_in = {"o_NHD": leaf.shape[-3:-1], "down_FD": leaf.shape[-2:-1]}.get(
            name, leaf.shape[int(stacked):int(stacked) + 1])
        std = 0.3 if name.startswith("embed") else float(np.prod(fan_in)) ** -0.5
        return jnp.asarray(std * rng.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def random_params(model: forms.Model, std: float = 1.0) -> dict[str, Any]:
    """Parameters of either shape of model, all normal, so that nothing starts at zero."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: forms.init(model, jax.random.key(0)))
    return jax.tree.map(lambda x: jnp.asarray(std * rng.normal(size=x.shape), x.dtype), shapes)


def check_study(study: str, flags: Sequence[str], folder: Path, capsys: Any, *, said: str,
                shown: Sequence[str]) -> None:
    """The smoke preset runs to its table, and the table comes again from the ledger alone.

    Args:
      said: printed on the way. shown: in the table.
    """
    import launch  # here, as most tests need none of what it loads

    flags = [f"--experiment={study}", "--preset=smoke", "--cpu_devices=8", *flags,
             f"--workdir={folder / 'run'}"]
    assert launch.main(flags) == 0
    assert said in capsys.readouterr().out
    table = (folder / "run" / "table.md").read_text()
    for words in shown:
        assert words in table
    assert launch.main([*flags, "--table"]) == 0
    assert (folder / "run" / "table.md").read_text() == table


def check_refused(study: str, flags: Sequence[str], words: str, capsys: Any) -> None:
    """A mistake is status 2 and one sentence that holds `words`."""
    import launch

    assert launch.main([f"--experiment={study}", "--preset=smoke", *flags, "--explain"]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
