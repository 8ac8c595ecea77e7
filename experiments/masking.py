"""Adding minus infinity, skipping empty tiles, or branching: time and memory per mask and length.

    python launch.py --experiment=masking                    a few minutes on 2 cores
    python launch.py --experiment=masking --preset=smoke     under a minute, proves nothing

The same masked attention, forward alone and with its gradients, on the device at hand. Part
`tiles`: the whole matrix with minus infinity added (`add`, the baseline), the online softmax over
tiles that computes all of them, branches at run time, or skips by a list made beforehand, and the
project's own `blockwise`. Part `pairs`: the same question for single pairs, where the branch stands
inside a loop over pairs. Values and gradients are compared with the reference before any clock
starts. A round times every arm once, in rotated order; ratios are taken within rounds.

This is a benchmark, not training: a cell is an arm at one shape, and rounds take the place of
seeds. All arms of a shape are timed together, whichever of them is asked for.

Expected on a CPU: a branch per tile costs nothing and saves what the mask empties; a branch per
pair is hopeless, and so is a loop over pairs that adds minus infinity instead.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import _masked
from experiments._masking_report import ARMS, BASELINE, make_report
from tx_jax.attention import attend
from tx_jax.config import check, check_names, option
from tx_jax.errors import UserError
from tx_jax.masks import EMPTY, Mask, dense_mask, parse_mask, tile_kinds
from tx_jax.study import statistics as st
from tx_jax.study.cells import Cell, canonical
from tx_jax.study.contract import Context, Study
from tx_jax.study.ledger import Measured

PASSES = ("forward", "gradients")  # the second computes values and gradients
# name -> the rule at a length T and window W.
MASKS = {
    "full": lambda T, W: "full",
    "causal": lambda T, W: "causal",
    "window": lambda T, W: f"causal & window({W})",
    "prefix": lambda T, W: f"causal | prefix({T // 4})",
    "documents": lambda T, W: "causal",
    "dilated": lambda T, W: f"window({4 * W}) & dilated(4)",
    "global": lambda T, W: f"causal & (window({W}) | global(16))",
}


@dataclass(frozen=True)
class Settings:
    """Flags of the study."""

    masks: tuple[str, ...] = option(tuple(MASKS), f"masks: {', '.join(MASKS)}")
    lengths: tuple[int, ...] = option((512, 1536, 4096), "lengths T = S of part tiles", low=2)
    pair_lengths: tuple[int, ...] = option((128, 512), "lengths of part pairs", low=2)
    rounds: int = option(7, "timings of every arm; an interval of the median needs 6", low=1)
    tile: int = option(128, "queries and keys of a tile; divides every length", low=1)
    window: int = option(256, "keys of the window", low=1)
    heads: int = option(1, "heads N", low=1)
    head_dim: int = option(64, "head width H", low=1)
    dtype: str = option("float32", "dtype of queries, keys and values",
                        choices=("float32", "bfloat16"))

    def __post_init__(self) -> None:
        check(self, "")
        check_names("masks", self.masks, MASKS)
        for length in self.lengths:
            if length % self.tile:
                raise UserError(f"--lengths names {length}, which --tile={self.tile} does not "
                                "divide; change one of them.")


def make_mask(name: str, length: int, window: int) -> Mask:
    """The mask of one example; for `documents`, packed ones of 64 to 511 tokens."""
    rule = parse_mask(MASKS[name](length, window))
    if name != "documents":
        return Mask(rule)
    sizes = np.random.default_rng(0).integers(64, 512, length // 64 + 1)
    segments_BT = jnp.asarray(np.repeat(np.arange(1, sizes.size + 1), sizes)[None, :length],
                              jnp.int32)
    return Mask(rule, segments_BT, segments_BT)


def cells(settings: Settings) -> list[Cell]:
    """Every arm at every mask, length and pass of its part."""
    shape = {name: getattr(settings, name) for name in
             ("rounds", "window", "heads", "head_dim", "dtype")}
    found = []
    for part, masks, lengths in (("tiles", settings.masks, settings.lengths),
                                 ("pairs", ("causal",), settings.pair_lengths)):
        own = canonical(shape | ({"tile": settings.tile} if part == "tiles" else {}))
        found += [Cell("masking", part, arm, (("mask", mask), ("length", length), ("pass", pass_)),
                       0, own)
                  for mask in masks for length in lengths for pass_ in PASSES
                  for arm in ARMS[part] if part == "tiles" or pass_ == "forward"]
    return found


def arms(settings: Settings, part: str) -> dict[str, Callable[..., jax.Array]]:
    """arm -> f(mask, q_BTNH, k_BSNH, v_BSNH)."""
    if part == "pairs":
        return {name: getattr(_masked, name) for name in ARMS["pairs"]}
    tiles = {f"tiles_{visit}": partial(_masked.tiled, tile=settings.tile, visit=visit)
             for visit in ("all", "branch", "skip")}
    return {"add": _masked.add, **tiles, "blockwise": _project("blockwise")}


def _project(name: str) -> Callable[..., jax.Array]:
    return lambda mask, q, k, v: attend(q, k, v, mask=mask, implementation=name)


def run(settings: Settings, members: list[Cell], context: Context
        ) -> Iterator[tuple[Cell, Measured]]:
    """Compare and time the arms of one mask and length."""
    part, axis = members[0].part, members[0].axis
    mask = make_mask(axis["mask"], axis["length"], settings.window)
    shape = (1, axis["length"], settings.heads, settings.head_dim)
    q, k, v, d_out = (jax.random.normal(key, shape, settings.dtype)
                      for key in jax.random.split(jax.random.key(0), 4))
    given = {"forward": (mask, q, k, v), "gradients": (mask, q, k, v, d_out)}
    facts = _facts(settings, mask, axis["length"]) if part == "tiles" else {}
    wanted = jax.jit(_gradients(_project("reference")))(*given["gradients"])
    for pass_ in PASSES:
        asked = [cell for cell in members if cell.axis["pass"] == pass_]
        if not asked:
            continue
        programs, compiling, errors = {}, {}, {}
        for name, function in arms(settings, part).items():
            began = time.perf_counter()
            function = _gradients(function) if pass_ == "gradients" else function
            programs[name] = jax.jit(function).lower(*given[pass_]).compile()
            compiling[name] = time.perf_counter() - began
            errors[name] = _error(name, programs[name](*given[pass_]), wanted, settings.dtype)
        seconds, calls = _time(programs, given[pass_], settings.rounds)
        for cell in asked:
            ratios = [a / b for a, b in zip(seconds[cell.arm], seconds[BASELINE], strict=True)]
            middle = st.times(ratios, np.inf)
            memory = programs[cell.arm].memory_analysis()
            metrics = {"seconds": seconds[cell.arm], "ratios": ratios, "ratio": middle.median,
                       "ratio_low": middle.low, "ratio_high": middle.high,
                       "temp_bytes": memory.temp_size_in_bytes if memory else None,
                       "max_error": errors[cell.arm], "calls": calls[cell.arm], **facts}
            context.advance(1.0)
            yield cell, Measured(metrics, sum(seconds[cell.arm]) * calls[cell.arm],
                                 compiling[cell.arm], strategy="none",
                                 kernel="blockwise" if cell.arm == "blockwise" else "none")


def _gradients(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """f -> (values, gradients to q, k and v)."""
    def both(mask, q, k, v, d_out):
        out, pull = jax.vjp(partial(function, mask), q, k, v)
        return out, pull(d_out)

    return both


def _facts(settings: Settings, mask: Mask, length: int) -> dict[str, float]:
    """Share of allowed pairs, and of tiles that hold none."""
    kinds = np.asarray(tile_kinds(mask, length, length, q_tile=settings.tile, k_tile=settings.tile))
    return {"allowed": float(jnp.mean(dense_mask(mask, length, length))),
            "skipped": float((kinds == EMPTY).mean())}


def _error(name: str, found: Any, wanted: Any, dtype: str) -> float:
    """Largest difference to the reference, relative to its largest value.

    Raises:
      ValueError: the arm computes something else.
    """
    worst, limit = 0.0, {"float32": 2e-5, "bfloat16": 3e-2}[dtype]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=False):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        worst = max(worst, float(np.abs(a - b).max() / np.abs(b).max()))
        if not np.isfinite(a).all() or worst > limit:
            raise ValueError(f"'{name}' differs from the reference by {worst:.2g} of its largest "
                             f"value, more than {limit:g}; nothing was timed.")
    return worst


def _time(programs: dict[str, Any], given: tuple, rounds: int
          ) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds per call of each arm in each round, and the calls that one timing averages."""
    def clock(program, calls):
        began = time.perf_counter()
        for _ in range(calls):
            out = program(*given)
        jax.block_until_ready(out)
        return (time.perf_counter() - began) / calls

    # A timing lasts 20 ms or a call, whichever is longer: the clock and the start cost nothing.
    calls = {name: max(1, min(100, round(0.02 / clock(p, 1)))) for name, p in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    for r in range(rounds):
        for name in names[r % len(names):] + names[:r % len(names)]:
            seconds[name].append(clock(programs[name], calls[name]))
    return seconds, calls


def report(settings: Settings, rows: list[dict[str, Any]]):
    """Tables, figures, pictures of the masks, and verdicts."""
    length = min(max(settings.lengths), 1024)
    masks = {name: (MASKS[name](length, settings.window),
                    make_mask(name, length, settings.window)) for name in settings.masks}
    return make_report(rows, masks=masks, length=length, tile=settings.tile)


SMOKE = {"masks": ("causal", "documents"), "lengths": (128, 256), "pair_lengths": (32,),
         "rounds": 2, "tile": 64, "window": 64, "head_dim": 16}
FULL = {"lengths": (1024, 2048, 4096, 8192, 16384, 32768), "pair_lengths": (128, 256, 512),
        "rounds": 15, "heads": 2}

STUDY = Study(
    name="masking", title="Adding minus infinity, skipping or branching", settings=Settings,
    presets={"smoke": SMOKE, "small": {}, "full": FULL}, cells=cells, run=run, report=report,
    group=lambda cell: (cell.part, cell.axis["mask"], cell.axis["length"]),
    files=tuple(Path(__file__).parent / name for name in ("masking.py", "_masked.py")))
