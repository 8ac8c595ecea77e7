"""Train one decoder-only language model per seed on a text: the shipped ones or your own.

    python launch.py --experiment=language_model                      about 5 minutes
    python launch.py --experiment=language_model --data.text=my.txt --data.tokenizer="bpe(2048)"

Each seed writes `cells/ID/` with checkpoints, metrics.jsonl and TensorBoard files. Killed at any
moment, the same command goes on and ends with the same curve, bit for bit. For a finished seed
`--cell=ID` trains it once more from the start, in `again/ID/`, and compares.

Expected (preset small, Shakespeare by characters): about 1.6 nats per character held out.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments._kernel import kernel_name, shape
from tx_jax import letters, models, sharding
from tx_jax.attention import source_hash
from tx_jax.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
    check,
    option,
    resolved,
)
from tx_jax.data import prepare, text_hash, train_iterator
from tx_jax.errors import UserError
from tx_jax.fit import RunConfig, fit, make_step, state_shardings
from tx_jax.masks import Causal, parse_mask
from tx_jax.metrics import read_seconds
from tx_jax.study import figures, tables
from tx_jax.study import statistics as st
from tx_jax.study.cells import Cell, canonical, code_hash, data_hash, fingerprint, short
from tx_jax.study.contract import Context, Study
from tx_jax.study.flops import count_flops
from tx_jax.study.ledger import Measured
from tx_jax.study.report import Report
from tx_jax.tokenizers import make_trainer


@dataclass(frozen=True)
class Settings:
    """Flags of the experiment."""

    seeds: int = option(1, "seeds, counted from --train.seed", low=1)
    mesh: str = option("", "mesh axes, as in data:2,fsdp:2,tensor:2; empty = one device")
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        check(self, "")
        sharding.parse_mesh(self.mesh)
        if self.train.batch % self.optim.accumulate:
            raise UserError(f"--optim.accumulate={self.optim.accumulate} does not divide "
                            f"--train.batch={self.train.batch}; change one of them.")


def check_settings(settings: Settings) -> None:
    """Refuse what cannot run before anything is written or compiled.

    Raises:
      UserError: an unknown part, an impossible combination, or a mask that shows the answer.
    """
    model, length = settings.model, min(settings.data.context, 8)
    make_trainer(settings.data.tokenizer)
    built = models.build(model, 2, settings.data.context)

    def once() -> jax.Array:
        tokens_BT = jnp.zeros((1, length), jnp.int32)
        key = jax.random.key(0) if model.dropout else None
        return models.apply(built, models.init(built, jax.random.key(0)), tokens_BT,
                            segments_BT=tokens_BT + 1, dropout_key=key)[0]

    jax.eval_shape(once)  # an attention implementation refuses here what it cannot do
    index = np.arange(settings.data.context)
    rule = parse_mask(model.mask)
    seen = np.broadcast_to(rule.allowed(index[:, None], index[None, :]), (index.size, index.size))
    if np.triu(seen, 1).any():
        raise UserError(f"--model.mask={rule} lets a token see the one it has to predict; "
                        f"write it as '{Causal() & rule}'.")


def cells(settings: Settings) -> list[Cell]:
    """One cell per seed."""
    # What a resumed run may change without changing a number is not part of a cell.
    train = {f.name: getattr(settings.train, f.name) for f in dataclasses.fields(settings.train)
             if not f.metadata["run_only"] and f.name != "seed"}
    own = canonical({"model": resolved(settings.model), "data": settings.data,
                     "optim": settings.optim, "train": train, "mesh": settings.mesh,
                     "attention_code": source_hash(settings.model.attention)})
    return [Cell("language_model", "train", "model", (), settings.train.seed + i, own)
            for i in range(settings.seeds)]


def run(settings: Settings, members: list[Cell], context: Context
        ) -> Iterator[tuple[Cell, Measured]]:
    """Train each seed in its own directory, going on from its last checkpoint.

    A finished cell that is run again trains afresh in a directory that is removed afterwards.
    """
    mesh = sharding.make_mesh(settings.mesh) if settings.mesh else None
    code, text = code_hash(STUDY.packages, STUDY.files), data(settings)
    cache = context.workdir / "cache"
    for cell in members:
        cfg = RunConfig(resolved(settings.model), settings.data, settings.optim,
                        dataclasses.replace(settings.train, seed=cell.seed))
        # Other code, another directory: a checkpoint must not pass for a run of today's code.
        root = (context.workdir / ("again" if context.recorded else "cells")
                / short(fingerprint(cell, code, text)))
        result = fit(cfg, root, mesh=mesh, console=context.console, cache_dir=cache)
        if not result.finished:
            raise KeyboardInterrupt
        curve = [(row["step"], row["loss"]) for row in
                 map(json.loads, (root / "metrics.jsonl").read_text().splitlines())
                 if "loss" in row]
        thin = curve[::max(1, len(curve) // 100)]
        metrics = {**result.metrics, "parameters": letters.count(result.state.params),
                   "parameters_without_embedding":
                       letters.count(result.state.params, embedding=False),
                   "step": [s for s, _ in thin], "curve": [v for _, v in thin]}
        seconds = read_seconds(root)
        if context.recorded:
            shutil.rmtree(root)
        yield cell, Measured(metrics, **seconds, flops=float(cfg.train.steps * _flops(cfg, cache)),
                             kernel=_kernel(settings), strategy="sequential")


def _flops(cfg: RunConfig, cache: Path) -> int:
    """Operations of one training step over all devices, traced for a single one."""
    prepared = prepare(cfg.data, cache)
    batch = next(train_iterator(prepared, cfg.data, cfg.train.batch, cfg.train.seed))
    model = models.build(cfg.model, prepared.tokenizer.vocab_size, cfg.data.context)
    state, _ = state_shardings(model, cfg.optim, None)
    return count_flops(make_step(model, cfg), state, shape(dtype="int32"), batch)


def _kernel(settings: Settings) -> str:
    model, length = settings.model, settings.data.context
    if model.variant != "softmax":
        return f"variant {model.variant}"
    rows = settings.train.batch // settings.optim.accumulate
    q, k = (shape(rows, length, heads, model.head_width, dtype=model.dtype)
            for heads in (model.heads, model.groups))
    return kernel_name(model.attention, q, k, k, mask=model.mask, score=model.score,
                       scale=None if model.scale == "default" else model.scale,
                       softcap=model.softcap or None)


def data(settings: Settings) -> str:
    """Hash of the text."""
    return data_hash(text_hash(settings.data.text, settings.data.field))


def report(settings: Settings, rows: list[dict[str, Any]]) -> Report:
    """Held-out loss over seeds and the training curves."""
    shown = (("val_loss", "held-out loss (nats per token)"), ("bits_per_byte", "bits per byte"),
             ("unknown_share", "unknown tokens"))
    shown = [(m, label) for m, label in shown if all(m in r["metrics"] for r in rows)]
    entries = (f"{rows[0]['metrics']['parameters']:,}", str(len(rows)), *(
        tables.interval(st.summarize(list(tables.values(rows, m).values()), bootstrap=0))
        for m, _ in shown))
    table = tables.Table("Held-out text", ("parameters", "seeds", *(label for _, label in shown)),
                         (entries,), caption="Mean over seeds with 95 % CI.",
                         commands=tuple((f"seed={r['seed']}", r["command"]) for r in rows))
    curve = figures.curves({"": {"model": [r["metrics"]["curve"] for r in rows]}},
                           name="training", title="Training loss", x=rows[0]["metrics"]["step"],
                           arms=("model",), xlabel="step", ylabel="loss (nats per token)")
    first = rows[0]
    return Report("Language model", (
        f"{settings.data.text}, tokenizer {settings.data.tokenizer}, {settings.train.steps} steps "
        f"of {settings.train.batch} x {settings.data.context} tokens.",),
        tables=(table,), figures=(curve,),
        facts=(("attention implementation", first["kernel"]), ("device", first["device"]),
               ("backend", jax.default_backend()), ("code", first["code"][:12]),
               ("versions", ", ".join(f"{k} {v}" for k, v in first["versions"].items() if v)),
               ("seconds in all", f"{sum(r['seconds'] for r in rows):.0f}")))


SMOKE = {"model.layers": 2, "model.d_model": 32, "model.heads": 2, "data.context": 32,
         "train.steps": 20, "train.eval_batches": 4, "train.eval_every": 10, "train.save_every": 10,
         "train.log_every": 1}
FULL = {"model.layers": 12, "model.d_model": 768, "model.heads": 12, "model.dtype": "bfloat16",
        "model.remat": "block", "data.tokenizer": "bpe(vocab=16384)", "data.context": 1024,
        "optim.lr": 6e-4, "train.steps": 20000, "train.batch": 64, "train.eval_every": 1000,
        "train.save_every": 1000, "seeds": 3}
# The block, the optimizer and the regularisation of Vaswani et al. 2017, at the size of `small`.
ORIGINAL = {"model.norm": "layer", "model.norm_position": "post", "model.mlp": "relu",
            "model.positions": "sinusoidal", "model.embedding_scale": "sqrt_d",
            "model.dropout": 0.1, "optim.label_smoothing": 0.1, "optim.schedule": "inverse_sqrt",
            "optim.warmup": 0.1, "optim.b2": 0.98, "optim.eps": 1e-9, "optim.weight_decay": 0.0,
            "optim.clip": 0.0}
# That of Llama 3: grouped keys, a gated layer of 8/3 D, an output head of its own.
MODERN = {"model.kv_heads": 2, "model.mlp": "swiglu", "model.d_ff": 344, "model.norm": "rms",
          "model.positions": "rope(base=500000)", "model.embeddings": "untied", "optim.b2": 0.95}

STUDY = Study(
    name="language_model", title="Language model", settings=Settings,
    cells=cells, run=run, report=report,
    presets={"smoke": SMOKE, "small": {}, "full": FULL, "original": ORIGINAL, "modern": MODERN},
    check=check_settings, group=lambda cell: cell, data=data, files=(Path(__file__),))
