"""Decoding with a cache of keys and values and without: time, operations, memory, what fits.

    python launch.py --experiment=kv_cache                    a few minutes on 2 cores
    python launch.py --experiment=kv_cache --preset=smoke     under a minute, proves nothing

Part `decode`: the time of the last token of a context, by a full pass over the text (`no_cache`)
and by a step with a cache: as many key heads as query heads (`mha`, the baseline), fewer (`gqa`),
one (`mqa`), a window, and int8. Part `memory`: bytes of the cache against the closed form, and what
a compiled step takes beside it. Part `fits`: the predictor of `tx_jax.limits` against the memory
that XLA plans for a whole generation. Part `rounding`: logits with an int8 cache against those with
the model's own.

This is a benchmark: in `decode` rounds take the place of seeds. Every arm at every length is timed
once in a round, in rotated order, and ratios are taken within rounds; so one of these cells takes
as long as all. `memory` and `fits` read compiled
programs, which do not vary. Only `rounding` has seeds, of random weights.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments import _decoding
from experiments._decoding import ARMS, BASELINE, kind_of, model_of
from experiments._kernel import kernel_name, shape
from experiments._kv_report import make_report
from tx_jax import decode, limits, models
from tx_jax.cache import places_of
from tx_jax.config import check, option
from tx_jax.errors import UserError
from tx_jax.study import statistics as st
from tx_jax.study.cells import Cell, canonical
from tx_jax.study.contract import Context, Study
from tx_jax.study.ledger import Measured

MODEL = ("layers", "d_model", "heads", "groups", "window", "dtype")
FITS = ("mha", "gqa", "window", "int8")


@dataclass(frozen=True)
class Settings:
    """Flags of the study."""

    lengths: tuple[int, ...] = option((64, 128, 256, 512, 1024), "contexts of every arm", low=2)
    longer: tuple[int, ...] = option((4096,), "contexts of the arms with a cache only", low=2)
    sizes: tuple[int, ...] = option((256, 1024, 4096), "caches whose memory is analysed", low=2)
    fit_sizes: tuple[int, ...] = option((512, 2048), "generations that are compiled to check the "
                                        "predictor", low=4)
    fit_batches: tuple[int, ...] = option((2,), "rows of these generations", low=1)
    chunk: int = option(256, "tokens of the prompt read at a time in these", low=1)
    rounds: int = option(9, "timings of every arm; an interval of the median needs 6", low=1)
    rounding_length: int = option(256, "tokens of which logits are compared with int8", low=1)
    seeds: int = option(5, "random weights with which they are compared", low=1)
    batch: int = option(1, "rows that decode at a time", low=1)
    layers: int = option(4, "blocks L", low=1)
    d_model: int = option(128, "width D", low=1)
    heads: int = option(4, "query heads N", low=1)
    groups: int = option(2, "key heads K of gqa", low=1)
    window: int = option(64, "keys that window keeps", low=1)
    dtype: str = option("float32", "dtype of the model", choices=("float32", "bfloat16"))

    def __post_init__(self) -> None:
        check(self, "")
        if self.d_model % self.heads or self.d_model // self.heads % 2:
            raise UserError(f"--d_model={self.d_model} does not split into --heads={self.heads} of "
                            "an even width, which rope needs; change one of them.")
        if self.heads % self.groups:
            raise UserError(f"--groups={self.groups} does not divide --heads={self.heads}; each "
                            "key head serves as many query heads.")


def cells(settings: Settings) -> list[Cell]:
    """Every arm at every length of its part."""
    def own(*names: str) -> str:
        return canonical({name: getattr(settings, name) for name in (*MODEL, *names)})

    found = []
    timed = canonical({name: getattr(settings, name) for name in
                       (*MODEL, "batch", "rounds", "lengths", "longer")})
    found += [Cell("kv_cache", "decode", arm, (("length", length),), 0, timed)
              for length, arms in _arms(settings).items() for arm in arms]
    found += [Cell("kv_cache", "memory", arm, (("length", size),), 0, own("batch"))
              for size in settings.sizes for arm in ARMS[1:]]
    found += [Cell("kv_cache", "fits", arm, (("batch", batch), ("length", size)), 0, own("chunk"))
              for size in settings.fit_sizes for batch in settings.fit_batches for arm in FITS]
    found += [Cell("kv_cache", "rounding", "int8", (("length", settings.rounding_length),), seed,
                   own()) for seed in range(settings.seeds)]
    return found


def run(settings: Settings, members: list[Cell], context: Context
        ) -> Iterator[tuple[Cell, Measured]]:
    """One group of a part: everything that is timed, or a program that is compiled and read."""
    part = {"decode": _decode, "memory": _memory, "fits": _fits, "rounding": _rounding}
    for cell, measured in part[members[0].part](settings, members):
        context.advance(1.0)
        yield cell, measured


def _decode(settings: Settings, members: list[Cell]) -> Iterator[tuple[Cell, Measured]]:
    """Time every arm at every length in the same rounds, whichever of them are asked for."""
    runners, compiling = {}, {}
    for length, arms in _arms(settings).items():
        for arm in arms:
            runners[arm, length], compiling[arm, length] = _decoding.make_runner(
                settings, arm, length)
    seconds, steps = _decoding.time_tokens(runners, settings.rounds)
    for cell in members:
        length = cell.axis["length"]
        key, model = (cell.arm, length), model_of(settings, cell.arm, length)
        ratios = [a / b for a, b in zip(seconds[key], seconds[BASELINE, length], strict=True)]
        middle, clock = st.times(ratios, np.inf), st.times(seconds[key], np.inf)
        metrics = {"seconds": seconds[key], "ratios": ratios, "ratio": middle.median,
                   "ratio_low": middle.low, "ratio_high": middle.high, "second": clock.median,
                   "tokens": steps[key],
                   "flops": settings.batch * limits.flops_per_token(
                       model, length, cached=cell.arm != "no_cache"),
                   "counted": _decoding.counted_flops(settings, cell.arm, length)}
        yield cell, Measured(metrics, sum(seconds[key]) * steps[key], compiling[key],
                             strategy="none", kernel=_kernel(settings, cell.arm, length))


def _kernel(settings: Settings, arm: str, length: int) -> str:
    """The attention of a step, or of the whole text where nothing is kept."""
    cfg, queries = model_of(settings, arm, length).cfg, length if arm == "no_cache" else 1
    q, k = (shape(settings.batch, n, heads, cfg.head_width, dtype=cfg.dtype)
            for n, heads in ((queries, cfg.heads), (length, cfg.groups)))
    return kernel_name("auto", q, k, k, mask=cfg.mask)


def _arms(settings: Settings) -> dict[int, tuple[str, ...]]:
    """length -> the arms that are timed there."""
    return {n: ARMS if n in settings.lengths else ARMS[1:]
            for n in sorted({*settings.lengths, *settings.longer})}


def _memory(settings: Settings, members: list[Cell]) -> Iterator[tuple[Cell, Measured]]:
    """Bytes of a cache, and what a step beside it takes."""
    for cell in members:
        size, kind = cell.axis["length"], kind_of(cell.arm)
        model, began = model_of(settings, cell.arm, size), time.perf_counter()
        memory = _decoding.lower_step(model, settings.batch, size, kind).compile(
            ).memory_analysis()
        metrics = {"cache": decode.init_cache(model, settings.batch, size, kind).nbytes,
                   "formula": limits.cache_bytes(model.cfg, settings.batch, size, kind),
                   "places": places_of(model.cfg, size),
                   "alias": memory.alias_size_in_bytes, "temp": memory.temp_size_in_bytes}
        yield cell, Measured(metrics, 0.0, time.perf_counter() - began, strategy="none",
                             kernel="decode")


def _fits(settings: Settings, members: list[Cell]) -> Iterator[tuple[Cell, Measured]]:
    """The prediction of a generation against what XLA plans for it."""
    for cell in members:
        (batch, size), kind = (cell.axis[name] for name in ("batch", "length")), kind_of(cell.arm)
        model, began = model_of(settings, cell.arm, size), time.perf_counter()
        guess = limits.predict(model, batch, size, kind, settings.chunk)
        planned = _decoding.generation_memory(model, batch, size, kind, settings.chunk)
        metrics = {"weights": guess.weights, "cache": guess.cache, "work": guess.work,
                   "predicted": guess.total, "planned": planned,
                   "error": guess.total / planned - 1,
                   "device_bytes": limits.device_bytes("this")}
        yield cell, Measured(metrics, 0.0, time.perf_counter() - began, strategy="none",
                             kernel="decode")


def _rounding(settings: Settings, members: list[Cell]) -> Iterator[tuple[Cell, Measured]]:
    """Logits of a random text under random weights, exact and with an int8 cache."""
    length = settings.rounding_length
    model = model_of(settings, "int8", length)
    both = _decoding.rounding_of(model, 1, length)
    init = jax.jit(lambda key: models.init(model, key))
    for cell in members:
        began, key = time.perf_counter(), jax.random.key(cell.seed)
        text_BT = jax.random.randint(jax.random.fold_in(key, 1), (1, length), 0, _decoding.VOCAB,
                                     jnp.int32)
        metrics = _decoding.compare_logits(*both(init(key), text_BT))
        yield cell, Measured(metrics, time.perf_counter() - began, strategy="none",
                             kernel=_kernel(settings, "int8", length))


def _group(cell: Cell) -> tuple:
    """What is timed is timed together, seeds share a program; other programs are read one by one.
    """
    alone = {"decode": (), "rounding": ()}
    return cell.part, *alone.get(cell.part, (cell.arm, cell.axes))


SMOKE = {"lengths": (16, 64), "longer": (), "sizes": (64, 256), "fit_sizes": (64,),
         "fit_batches": (1,), "chunk": 16, "rounds": 2, "rounding_length": 32, "seeds": 2,
         "layers": 1, "d_model": 32, "window": 16}
# All caches lie in memory together: 55 GB.
FULL = {"lengths": (512, 1024, 2048, 4096, 8192), "longer": (32768,), "sizes": (4096, 32768),
        "fit_sizes": (8192, 32768), "fit_batches": (1, 16), "chunk": 512, "rounds": 21, "batch": 4,
        "layers": 16, "d_model": 2048, "heads": 32, "groups": 8, "window": 4096,
        "dtype": "bfloat16", "rounding_length": 2048}

STUDY = Study(
    name="kv_cache", title="Decoding with a cache and without", settings=Settings,
    presets={"smoke": SMOKE, "small": {}, "full": FULL}, cells=cells, run=run, report=make_report,
    group=_group,
    files=tuple(Path(__file__).parent / name for name in ("kv_cache.py", "_decoding.py")))
