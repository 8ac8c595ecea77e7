"""The letters: one glossary from which follow shapes, initialisers, shardings and weight decay.

    B batch        T query length    S key length      D model width    F hidden width
    N query heads  K key/value heads G = N / K group   H head width     V vocabulary
    L layers (stacked in front of the parameters of a scanned block)    R replicas
    In position schemes only: C rows of a table    P columns of a position vector
    E hidden width of a small MLP    U one number
    W width of values, where it is not H

Arrays carry them as a suffix (`x_BTD`), and so do parameters (`q_DNH`); einsum equations use the
same letters. The two tables below are the whole sharding policy: a letter sits on a mesh axis, for
parameters and for activations. Mesh axes are `data`, `fsdp` and `tensor`, always all three.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from tx_jax.config import ModelConfig

PARAMETER_AXES = {"D": "fsdp", "F": "tensor", "N": "tensor", "K": "tensor", "V": "tensor"}
ACTIVATION_AXES = {"B": ("data", "fsdp"), "F": "tensor", "N": "tensor", "K": "tensor",
                   "V": "tensor"}

# Biases, gains and norm weights are not decayed, however many letters they carry.
UNDECAYED = ("norm", "gain", "bias")


def sizes(cfg: ModelConfig, vocab: int, context: int) -> dict[str, int]:
    """The size of every letter of a model; T is the longest sequence it is built for."""
    return {"D": cfg.d_model, "F": cfg.hidden, "N": cfg.heads, "K": cfg.groups,
            "H": cfg.head_width, "V": vocab, "L": cfg.layers, "T": context}


def letters_of(name: str) -> str:
    """The letters of a name: `q_DNH` -> `DNH`.

    Raises:
      ValueError: the name carries none.
    """
    found = re.fullmatch(r".*_([A-Z]+)", name)
    if not found:
        raise ValueError(f"the name '{name}' carries no letters; write it like q_DNH.")
    return found[1]


def shape_of(name: str, size: Mapping[str, int]) -> tuple[int, ...]:
    """The shape that a name stands for."""
    return tuple(size[letter] for letter in letters_of(name))


def fan_in(name: str, size: Mapping[str, int]) -> int:
    """Inputs summed into one output: D of `q_DNH`, N * H of `o_NHD`, F of `down_FD`."""
    letters = letters_of(name)
    inputs = letters[0] if letters.startswith("D") else letters[:-1]
    product = 1
    for letter in inputs:
        product *= size[letter]
    return product


def ein(equation: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """Einsum in the dtype of `x`, its result placed by the letters of the output."""
    out = jnp.einsum(equation, x, w.astype(x.dtype))
    return place(equation.split("->")[1], out)


def place(letters: str, x: jax.Array) -> jax.Array:
    """Constrain an activation to the activation table; the identity where no mesh is set."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or not {"data", "fsdp", "tensor"} <= set(mesh.axis_names):
        return x  # no mesh, or one of somebody else, such as the replica axis of a study
    spec = _spec(letters, x.shape, ACTIVATION_AXES, mesh.shape)
    return jax.lax.with_sharding_constraint(x, spec)


def _spec(letters: str, shape: tuple[int, ...], table: Mapping[str, Any],
          mesh_shape: Mapping[str, int]) -> PartitionSpec:
    axes = []
    for letter, size in zip(letters, shape, strict=True):
        axis = table.get(letter)
        names = axis if isinstance(axis, tuple) else (axis,) if axis else ()
        width = 1
        for name in names:
            width *= mesh_shape[name]
        # Vocabularies are odd numbers often enough: V is replicated where it does not divide.
        axes.append(None if letter == "V" and size % width else axis)
    return PartitionSpec(*axes)


def _named_leaves(params: Any) -> tuple[list[tuple[str, jax.Array]], Any]:
    leaves, tree = jax.tree_util.tree_flatten_with_path(params)
    return [(path[-1].key, leaf) for path, leaf in leaves], tree


def param_specs(params: Any, mesh: Mesh) -> Any:
    """PartitionSpec of every parameter, by the parameter table; stacked layers stay whole.

    Args:
      params: nested dict of arrays or of `jax.ShapeDtypeStruct`.
    """
    named, tree = _named_leaves(params)
    specs = []
    for name, leaf in named:
        letters = letters_of(name)
        stacked = leaf.ndim - len(letters)
        spec = _spec(letters, leaf.shape[stacked:], PARAMETER_AXES, mesh.shape)
        specs.append(PartitionSpec(*(None,) * stacked, *spec))
    return jax.tree.unflatten(tree, specs)


def decay_mask(params: Any) -> Any:
    """True where AdamW decays: matrices by name, so that stacking a bias does not make it one."""
    named, tree = _named_leaves(params)
    return jax.tree.unflatten(tree, [
        len(letters_of(name)) > 1 and not name.startswith(UNDECAYED) for name, _ in named])


def count(params: Any, *, embedding: bool = True) -> int:
    """Number of parameters, with or without those whose letters hold the vocabulary."""
    named, _ = _named_leaves(params)
    return sum(leaf.size for name, leaf in named if embedding or "V" not in letters_of(name))
