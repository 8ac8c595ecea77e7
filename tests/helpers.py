"""Shared by tests: parameters without compiling an initialiser."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax import models


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
