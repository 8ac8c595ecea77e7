"""How a study trains the cells of a group side by side: the flag, what differs, and the run."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tx_jax.config import option
from tx_jax.study.contract import Context
from tx_jax.study.layout import Program, Tree
from tx_jax.study.replicas import STRATEGIES, Result, run_replicas


def strategy_option(default: str = "auto", help: str = "how seeds run side by side") -> Any:
    """The field `strategy` of a study's settings."""
    return option(default, help, choices=("auto", *STRATEGIES), run_only=True)


def replicas_of(runs: Iterable[tuple[int, float]], streams: Sequence[int]) -> dict[str, jax.Array]:
    """What differs between runs of (seed, learning rate): equal seeds start alike, and read the
    stream of data of their number."""
    seeds, lrs = zip(*runs, strict=True)
    return {"key": jnp.stack([jax.random.key(seed) for seed in seeds]),
            "lr": jnp.asarray(lrs, jnp.float32), "stream": jnp.asarray(streams, jnp.int32)}


def run_group(context: Context, timed: Any, strategy: str, program: Program, replicas: Tree,
              shared: Tree, chunks: int, **options: Any) -> Result:
    """`run_replicas` with what the study has compiled and timed so far.

    Args:
      timed: what "auto" is timed once for; later groups of the same name take its choice.
      strategy: as set by the user. A finished cell that is run again takes the one of its row, so
        that the same numbers come out.
      options: `stop` and `progress` of `run_replicas`.
    """
    if context.recorded:
        strategy = context.recorded.get("strategy") or strategy
    elif strategy == "auto":
        strategy = context.strategies.get(timed, "auto")
    result = run_replicas(program, replicas, shared, chunks, strategy=strategy,
                          cache=context.cache, **options)
    context.strategies[timed] = result.strategy
    return result
