"""Blockwise attention against the naive matrix and against PyTorch's CPU flash attention.

    python -m experiments.attention_speed [--torch_python=/path/to/python]       about 3 minutes

Float32. Three tables: time at one length, all sides taking turns in each round; peak memory of
forward and backward against length, from the compiler; time of a window against full causal at a
long length. Ratios are medians over rounds with their range.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from experiments._peer import Peer, cores, find_python
from tx_jax import flags
from tx_jax.attention import attend
from tx_jax.config import check, option
from tx_jax.errors import UserError
from tx_jax.masks import Causal, Rule, Window


@dataclass(frozen=True)
class Settings:
    """Flags of the benchmark."""

    batch: int = option(1, "examples", low=1)
    heads: int = option(8, "heads", low=1)
    width: int = option(64, "head width", low=1)
    length: int = option(2048, "tokens of the comparison in time", low=2)
    long: int = option(16384, "tokens of the comparison in memory, and of the window", low=64)
    window: int = option(256, "keys of the window", low=1)
    rounds: int = option(9, "rounds", low=1)
    torch_python: str = option("", "Python that has torch; empty = this one")

    def __post_init__(self) -> None:
        check(self, "")


def naive(q_BTNH: jax.Array, k_BTNH: jax.Array, v_BTNH: jax.Array) -> jax.Array:
    """Causal attention as a user writes it, without this project."""
    T = q_BTNH.shape[1]
    logits_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BTNH) * q_BTNH.shape[-1] ** -0.5
    below = jnp.tril(jnp.ones((T, T), bool))[None, None]
    weights_BNTS = jax.nn.softmax(jnp.where(below, logits_BNTS, -jnp.inf), axis=-1)
    return jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v_BTNH)


def blockwise(rule: Rule = Causal()) -> Callable[..., jax.Array]:  # noqa: B008
    """The project's attention under a rule."""
    return partial(attend, mask=rule, implementation="blockwise")


def both(call: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Forward and backward as one function of (q, k, v, gradient of the output)."""
    def passes(q, k, v, d_out):
        out, pull = jax.vjp(call, q, k, v)
        return out, pull(d_out)
    return passes


def seconds(compiled: Callable[..., Any], args: Sequence[jax.Array]) -> float:
    """Wall time of one call."""
    began = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    return time.perf_counter() - began


def in_turns(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each side in each round; the order turns round by round, the first is dropped."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for n in range(-1, rounds):
        for name in list(sides) if n % 2 else list(sides)[::-1]:
            times[name].append(sides[name]())
    return {name: found[1:] for name, found in times.items()}


def ratio(above: Sequence[float], below: Sequence[float]) -> str:
    """Median and range over rounds."""
    found = [a / b for a, b in zip(above, below, strict=True)]
    return f"{statistics.median(found):.2f} [{min(found):.2f}..{max(found):.2f}]"


def compare_time(s: Settings, console: Console) -> None:
    """Forward, and forward with backward, of every side."""
    shape = (s.batch, s.length, s.heads, s.width)
    arrays = [jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 4)]
    python = find_python(s.torch_python)
    peer = python and Peer(python, "_torch_attention.py", {
        "threads": cores(), "shape": shape, "causal": True})
    table = Table("pass", "naive ms", "blockwise ms", "torch flash ms", "blockwise / naive",
                  "blockwise / torch", title=f"Causal, B={s.batch} T={s.length} N={s.heads} "
                  f"H={s.width}, {cores()} cores, {jax.default_backend()}")
    for name, wrap, args in (("forward", lambda f: f, arrays[:3]), ("both", both, arrays)):
        sides = {side: partial(seconds, jax.jit(wrap(call)), args)
                 for side, call in (("naive", naive), ("blockwise", blockwise()))}
        if peer:
            sides["torch"] = lambda name=name: peer.ask(name)["seconds"]
        times = in_turns(sides, s.rounds)
        shown = [f"{1e3 * statistics.median(times[side]):.1f}" if side in times else "–"
                 for side in ("naive", "blockwise", "torch")]
        table.add_row(name, *shown, ratio(times["blockwise"], times["naive"]),
                      ratio(times["blockwise"], times["torch"]) if peer else "–")
    if peer:
        peer.close()
    console.print(table)


def memory(call: Callable[..., jax.Array], length: int, width: int) -> tuple[float, float]:
    """MiB of (inputs and outputs, everything else) of forward and backward of one head."""
    spec = jax.ShapeDtypeStruct((1, length, 1, width), jnp.float32)
    used = jax.jit(both(call)).lower(spec, spec, spec, spec).compile().memory_analysis()
    named = used.argument_size_in_bytes + used.output_size_in_bytes
    return named / 2**20, used.temp_size_in_bytes / 2**20


def compare_memory(s: Settings, console: Console) -> None:
    """Peak memory of one head against length."""
    table = Table("T", "inputs + outputs MiB", "blockwise: more MiB", "peak / inputs + outputs",
                  "naive: more MiB", title="Memory of forward and backward, one head, causal")
    for length in (s.long // 4, s.long // 2, s.long):
        named, more = memory(blockwise(), length, s.width)
        _, full = memory(naive, length, s.width)
        table.add_row(str(length), f"{named:.1f}", f"{more:.1f}", f"{(named + more) / named:.2f}",
                      f"{full:.0f}")
    console.print(table)


def compare_window(s: Settings, console: Console) -> None:
    """A window against full causal, one head."""
    shape = (1, s.long, 1, s.width)
    arrays = [jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 4)]
    table = Table("pass", "causal ms", f"window({s.window}) ms", "window / causal",
                  title=f"Skipped tiles, T={s.long}, one head")
    for name, wrap, args in (("forward", lambda f: f, arrays[:3]), ("both", both, arrays)):
        sides = {str(rule): partial(seconds, jax.jit(wrap(blockwise(rule))), args)
                 for rule in (Causal(), Window(s.window))}
        times = in_turns(sides, min(s.rounds, 5))
        full, part = times.values()
        table.add_row(name, f"{1e3 * statistics.median(full):.0f}",
                      f"{1e3 * statistics.median(part):.0f}", ratio(part, full))
    console.print(table)


def main(argv: Sequence[str]) -> None:
    """Parse flags, print the three tables."""
    settings, console = Settings(), Console()
    settings = flags.replace(settings, flags.parse(list(argv), settings, {}))
    compare_memory(settings, console)
    compare_time(settings, console)
    compare_window(settings, console)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
