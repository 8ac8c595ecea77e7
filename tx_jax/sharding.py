"""Meshes from a flag, checks that they divide the model, and placement of whole trees."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tx_jax import letters
from tx_jax.config import ModelConfig
from tx_jax.errors import UserError, nearest

AXES = ("data", "fsdp", "tensor")


def parse_mesh(spec: str) -> dict[str, int]:
    """Parse `data:2,fsdp:2,tensor:2` into the size of every mesh axis; missing axes are 1.

    Raises:
      UserError: an unknown or repeated axis, or a size that is not a positive number.
    """
    shape: dict[str, int] = {}
    for part in filter(None, spec.split(",")):
        name, _, size = part.strip().partition(":")
        if name not in AXES:
            raise UserError(f"--mesh={spec} names an unknown axis '{name}'{nearest(name, AXES)}")
        if name in shape:
            raise UserError(f"--mesh={spec} names the axis '{name}' twice; give it once.")
        if not size.isdecimal() or int(size) < 1:
            raise UserError(f"--mesh={spec} gives '{name}' the size '{size}'; write it like "
                            "data:2.")
        shape[name] = int(size)
    return {axis: shape.get(axis, 1) for axis in AXES}


def make_mesh(spec: str, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh over the first devices, with the axes `data`, `fsdp` and `tensor`.

    Raises:
      UserError: the mesh wants more devices than there are.
    """
    shape = parse_mesh(spec)
    devices = jax.devices() if devices is None else devices
    wanted = math.prod(shape.values())
    if wanted > len(devices):
        raise UserError(f"--mesh={spec} needs {wanted} devices but there are {len(devices)}; "
                        f"make it smaller or, on a CPU, add --cpu_devices={wanted}.")
    grid = np.asarray(devices[:wanted], dtype=object).reshape(tuple(shape.values()))
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_divides(mesh: Mesh, cfg: ModelConfig, rows: int) -> None:
    """Raise a UserError unless the mesh divides the letters and the rows of a micro-batch."""
    size = letters.sizes(cfg, 1, 1) | {"B": rows}
    flags = {"D": "--model.d_model", "F": "--model.d_ff", "N": "--model.heads",
             "K": "--model.kv_heads", "B": "rows per micro-batch"}
    for table in (letters.PARAMETER_AXES, letters.ACTIVATION_AXES):
        for letter, axis in table.items():
            if letter == "V":
                continue
            names = axis if isinstance(axis, tuple) else (axis,)
            width = math.prod(mesh.shape[name] for name in names)
            if size[letter] % width:
                axes = ",".join(f"{name}:{mesh.shape[name]}" for name in names)
                raise UserError(f"--mesh with {axes} does not divide {flags[letter]}="
                                f"{size[letter]}; choose a multiple of {width} or a smaller mesh.")


def shard(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Put a tree of arrays on the mesh by a tree of PartitionSpecs."""
    return jax.device_put(tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs,
                                             is_leaf=lambda x: isinstance(x, PartitionSpec)))


def batch_spec(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over the batch axes of the activation table."""
    return NamedSharding(mesh, PartitionSpec(letters.ACTIVATION_AXES["B"]))
