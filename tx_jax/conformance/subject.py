"""What is being checked, what a check is, and how it compares arrays."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.attention import Capabilities, Request, attend, implementations, resolve
from tx_jax.conformance.options import first_dtype

# Error of a result of order 1 that is no fault, by dtype of the inputs.
EPSILON = {"float64": 1e-11, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


class Failure(AssertionError):
    """A property does not hold; the message is one sentence."""


class Skip(Exception):
    """A check cannot be done here; the message says why."""


@dataclass(frozen=True)
class Subject:
    """An implementation under test.

    Attributes:
      name: for people.
      implementation: what `attend` takes.
      capabilities: what it declares.
    """

    name: str
    implementation: Any
    capabilities: Capabilities

    def __call__(self, *args: jax.Array, **options: Any) -> jax.Array:
        """`attend` by this implementation."""
        return attend(*args, implementation=self.implementation, **options)

    def lacks(self, *needs: str) -> list[str]:
        """Those of the named features and mask rules that it does not declare."""
        can, rules = self.capabilities, self.capabilities.rules
        return [n for n in needs if not (
            getattr(can, n) if hasattr(can, n) else rules is None or n in rules)]

    def can(self, *needs: str) -> bool:
        """Whether all the named features and mask rules are declared."""
        return not self.lacks(*needs)

    @property
    def dtype(self) -> Any:
        """The dtype of most checks."""
        return jnp.dtype(first_dtype(self.capabilities))

    def normal(self, seed: int, *shapes: tuple[int, ...]) -> list[jax.Array]:
        """Standard normal arrays."""
        rng = np.random.default_rng(seed)
        return [jnp.asarray(rng.normal(size=s), self.dtype) for s in shapes]

    def qkv(self, seed: int, B: int, T: int, S: int, N: int = 2, K: int = 2, H: int = 4
            ) -> list[jax.Array]:
        """Random queries, keys and values."""
        return self.normal(seed, (B, T, N, H), (B, S, K, H), (B, S, K, H))


@dataclass(frozen=True)
class Check:
    """A property by name.

    Attributes:
      function: subject -> None, or a sentence of what was seen; it raises Failure or whatever the
        implementation raises. Its docstring describes it.
      needs: features (fields of `Capabilities`) and mask rules without which it cannot be asked.
    """

    function: Callable[[Subject], str | None]
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    @property
    def summary(self) -> str:
        """What holds, in one line."""
        return " ".join((self.function.__doc__ or "").strip().split("\n\n")[0].split())


def load(implementation: Any, name: str = "") -> Subject:
    """A subject from whatever `attend` takes as one implementation.

    Raises:
      UserError: it cannot be found, or does not take the arguments of an implementation.
    """
    if isinstance(implementation, str) and implementation in implementations():
        return Subject(name or implementation, implementation, implementations()[implementation])
    found, function = resolve(implementation, Request())
    module = inspect.getmodule(function) if isinstance(implementation, str) else None
    default = getattr(module, "CAPABILITIES", Capabilities.everything())
    return Subject(name or found, implementation, getattr(function, "CAPABILITIES", default))


def fault(actual: Any, expected: Any, atol: float, what: str) -> str:
    """How two arrays differ by more than `atol` times max(1, |expected|), or "" if they do not."""
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    if a.shape != e.shape:
        return f"{what}: shape {a.shape}, not {e.shape}"
    bad = ~(np.abs(a - e) <= atol * np.maximum(1, np.abs(e)))
    if not bad.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(bad)[0])
    return f"{what}: {a[at]:.6g} instead of {e[at]:.6g} at {at}"


def close(actual: Any, expected: Any, what: str, *, slack: float = 1.0, dtype: Any = None) -> None:
    """Raise Failure unless the arrays agree up to `slack` times what is usual in their dtype."""
    dtype = jnp.dtype(dtype or actual.dtype).name
    if problem := fault(actual, expected, slack * EPSILON.get(dtype, 2e-5), what):
        raise Failure(problem)


def same(actual: Any, expected: Any, what: str) -> None:
    """Raise Failure unless the arrays are equal bit for bit."""
    if problem := fault(actual, expected, 0.0, what):
        raise Failure(problem)


def ensure(condition: Any, sentence: str) -> None:
    """Raise Failure unless the condition holds."""
    if not bool(condition):
        raise Failure(sentence)


def with_gradients(function: Callable[..., jax.Array]) -> Callable[..., tuple]:
    """The output of `function` and the gradients of its weighted sum, compiled as one."""
    def both(*args):
        out, pull = jax.vjp(function, *args)
        return out, *pull(weights_of(out.shape).astype(out.dtype))
    return jax.jit(both)


def weights_of(shape: tuple[int, ...]) -> jax.Array:
    """Weights of an output in a scalar loss; exact in half precision."""
    count = int(np.prod(shape))
    return jnp.asarray(np.round(np.cos(np.arange(count)) * 32) / 32, jnp.float32).reshape(shape)
