"""What a replica does, which devices and slots it gets, and how its keys cross programs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = Any


@dataclass(frozen=True)
class Program:
    """What a replica does, as two pure functions.

    Attributes:
      init: (replica, shared) -> carry.
      step: (replica, carry, shared) -> (carry, record); one chunk, usually a scan over k optimizer
        steps. `replica` is a pytree of arrays of one replica (key, learning rate, scale ...).
    """

    init: Callable[[Tree, Tree], Tree]
    step: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]


@dataclass(frozen=True)
class Layout:
    """Slots of one round: `devices` x `group`, vectorised or looped within a device."""

    devices: tuple[jax.Device, ...]
    group: int
    vectorised: bool

    @property
    def slots(self) -> int:
        """Replicas in flight."""
        return len(self.devices) * self.group

    @property
    def sharding(self) -> NamedSharding:
        """The slot axis split over the devices."""
        return NamedSharding(Mesh(np.array(self.devices), ("slot",)), PartitionSpec("slot"))

    @property
    def replicated(self) -> NamedSharding:
        """The same array on every device."""
        return NamedSharding(self.sharding.mesh, PartitionSpec())


@dataclass(frozen=True)
class Keys:
    """Which leaves of a tree are typed PRNG keys: they cross program boundaries as raw integers."""

    impls: tuple[str | None, ...]

    @classmethod
    def of(cls, tree: Tree) -> "Keys":
        """Read the key implementations of `tree` (arrays or tracers)."""
        return cls(tuple(
            str(jax.random.key_impl(x)) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
            else None for x in jax.tree.leaves(tree)))

    def wrap(self, tree: Tree) -> Tree:
        """Raw integers -> keys."""
        leaves, form = jax.tree.flatten(tree)
        return form.unflatten([x if i is None else jax.random.wrap_key_data(x, impl=i)
                               for x, i in zip(leaves, self.impls, strict=True)])

    def unwrap(self, tree: Tree) -> Tree:
        """Keys -> raw integers."""
        leaves, form = jax.tree.flatten(tree)
        return form.unflatten([x if i is None else jax.random.key_data(x)
                               for x, i in zip(leaves, self.impls, strict=True)])
