"""Configuration as typed frozen dataclasses; their leaves become flags. Imports no jax.

A field's metadata carries `choices` (allowed values), `low`/`high` (bounds) and `when` (a condition
under which the field is read at all: setting it otherwise is an error, see `flags.py`).
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tx_jax.errors import UserError, nearest


def option(default: Any, help: str, *, choices=None, low=None, high=None, when=None,
           run_only: bool = False, multiple_of: int = 1, derived: str = "") -> Any:
    """A dataclass field with help and validation.

    Args:
      when: (sibling field, function of its value, reason) or None; the field has an effect only
        while the function is true.
      multiple_of: what a whole number has to be divisible by.
      run_only: the field changes how a run goes, never what it gives.
      derived: property that gives the field's value where it is left at 0.
    """
    meta = {"help": help, "choices": choices, "low": low, "high": high, "when": when,
            "run_only": run_only, "multiple_of": multiple_of, "derived": derived}
    return field(default=default, metadata=meta)


def check(cfg: Any, prefix: str) -> None:
    """Validate the choices and bounds of every field of `cfg`; errors name `prefix.field`."""
    for f in dataclasses.fields(cfg):
        value, meta = getattr(cfg, f.name), f.metadata
        flag = f"--{prefix}.{f.name}" if prefix else f"--{f.name}"
        if meta.get("choices") and value not in meta["choices"]:
            raise UserError(f"{flag}={value} is unknown{nearest(str(value), meta['choices'])}")
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not isinstance(number, bool):
                _check_number(flag, number, meta.get("low"), meta.get("high"))
        step = meta.get("multiple_of", 1)
        if step > 1 and value % step:
            raise UserError(f"{flag}={value} is not a multiple of {step}; try "
                            f"{value - value % step + step}.")
        if isinstance(value, tuple) and len(set(value)) < len(value):
            raise UserError(f"{flag}={','.join(map(str, value))} names a value twice; drop one.")


def check_names(flag: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise UserError at the first of `names` that is not among `known`."""
    for name in names:
        if name not in known:
            raise UserError(f"--{flag} names '{name}', which is unknown{nearest(name, known)}")


def check_whole(name: str, value: Any, low: int) -> None:
    """Raise UserError unless `value` is a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UserError(f"{name}={value!r} must be a whole number of at least {low}.")


def resolved(cfg: Any) -> Any:
    """`cfg` with derived defaults written out: what means the same is then equal."""
    found: dict[str, Any] = {}
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if dataclasses.is_dataclass(value):
            found[f.name] = resolved(value)
        elif f.metadata.get("derived") and not value:
            found[f.name] = getattr(cfg, f.metadata["derived"])
    return dataclasses.replace(cfg, **found)


def _check_number(flag: str, number: float, low: float | None, high: float | None) -> None:
    if not math.isfinite(number):
        raise UserError(f"{flag}={number} must be a finite number.")
    if low is not None and number < low:
        raise UserError(f"{flag}={number} is too small; it must be at least {low}.")
    if high is not None and number > high:
        raise UserError(f"{flag}={number} is too large; it must be at most {high}.")


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a decoder-only Transformer."""

    layers: int = option(4, "number of blocks L", low=1)
    d_model: int = option(128, "width D", low=1)
    heads: int = option(4, "query heads N", low=1)
    kv_heads: int = option(0, "key/value heads K; 0 = as many as query heads", low=0,
                          derived="groups")
    head_dim: int = option(0, "head width H; 0 = d_model / heads", low=0, derived="head_width")
    d_ff: int = option(0, "hidden width F of the MLP; 0 = 4 * d_model", low=0, derived="hidden",
                       when=("mlp", lambda mlp: mlp != "none", "there is no MLP"))
    mlp: str = option("gelu", "feed-forward layer",
                      choices=("relu", "gelu", "gelu_exact", "silu", "relu2", "swiglu", "geglu",
                               "reglu", "none"))
    norm: str = option("rms", "normalisation", choices=("rms", "layer", "none"))
    norm_position: str = option("pre", "where the norm stands", choices=("pre", "post", "sandwich"),
                                when=("norm", lambda norm: norm != "none", "there is no norm"))
    residual: bool = option(True, "residual connections")
    embeddings: str = option("tied", "output head shares the embedding table or not",
                             choices=("tied", "untied"))
    embedding_scale: str = option("none", "factor on token embeddings: none, or the root of the "
                                  "width (Vaswani et al. 2017, 3.4)", choices=("none", "sqrt_d"))
    positions: str = option("rope", "position scheme: the name of a file of tx_jax/positions, with "
                            "its options, as in rope(base=500000), yarn(factor=4) or alibi")
    mask: str = option("causal", "attention mask, as in 'causal & window(256)'; rules: full, "
                       "causal, window, prefix, dilated, global, explicit")
    score: str = option("scaled_dot", "score function: scaled_dot, dot, additive, bilinear, "
                       "cosine, qk_norm")
    scale: str = option("default", "factor on the scores: default, 1/sqrt(d), 1/d, none, log_n(L) "
                        "or a number")
    softcap: float = option(0.0, "soft cap on the scaled scores; 0 = off", low=0.0)
    variant: str = option("softmax", "what turns scores into weights: softmax, sigmoid, hard, "
                          "linear, differential")
    attention: str = option("auto", "attention implementation, by name or module:function")
    dropout: float = option(0.0, "dropout rate on embeddings, attention weights and block outputs",
                            low=0.0, high=0.999)
    scan: bool = option(True, "scan over layers, so that compile time does not grow with depth")
    remat: str = option("none", "recompute in the backward pass: none or block",
                        choices=("none", "block"))
    dtype: str = option("float32", "dtype of activations; parameters stay float32",
                        choices=("float32", "bfloat16"))

    def __post_init__(self) -> None:
        check(self, "model")
        if not self.head_dim and self.d_model % self.heads:
            raise UserError(f"--model.d_model={self.d_model} is not divisible by --model.heads="
                            f"{self.heads}; change one of them or set --model.head_dim.")
        if self.kv_heads and self.heads % self.kv_heads:
            raise UserError(f"--model.heads={self.heads} is not a multiple of --model.kv_heads="
                            f"{self.kv_heads}; each key/value head serves an equal group of heads.")

    @property
    def head_width(self) -> int:
        """H, the width of one head."""
        return self.head_dim or self.d_model // self.heads

    @property
    def groups(self) -> int:
        """K, the number of key/value heads."""
        return self.kv_heads or self.heads

    @property
    def hidden(self) -> int:
        """F, the hidden width of the MLP."""
        return self.d_ff or 4 * self.d_model


@dataclass(frozen=True)
class EncoderConfig:
    """What an encoder and the attention over its output have of their own (`tx_jax.seq2seq`)."""

    layers: int = option(0, "layers of the encoder; 0 = as many as the decoder", low=0)
    mask: str = option("full", "mask of the encoder")
    positions: str = option("", "positions of the encoder; empty = the decoder's, T5's buckets in "
                            "both directions")
    cross_mask: str = option("full", "mask of the attention over the encoder's output")
    cross_positions: str = option("none", "positions of the attention over the encoder's output")
    embeddings: str = option("shared", "table of the source: the decoder's or its own",
                             choices=("shared", "own"))
    weights: str = option("own", "layers of the encoder: its own, or the decoder's but for the "
                          "attention over the encoder (Raffel et al. 2020, 3.2.2)",
                          choices=("own", "shared"))

    def __post_init__(self) -> None:
        check(self, "encoder")


@dataclass(frozen=True)
class DataConfig:
    """Which text, how it is cut into tokens, and how tokens become batches."""

    text: str = option("shakespeare", "shakespeare, austen, bible_en/fr/es, a file, a directory, "
                       "*.jsonl, *.parquet (all but the last also .xz, .gz), or "
                       "hf:NAME[:CONFIG][:SPLIT]")
    field: str = option("text", "field that holds the text in JSONL, parquet or a hub data set",
                        when=("text", lambda text: text.startswith("hf:") or any(
                            kind in text for kind in (".jsonl", ".ndjson", ".parquet")),
                            "this text has no fields"))
    tokenizer: str = option("char", "char, word(vocab=8192), bpe(vocab=2048) or gpt2")
    context: int = option(128, "tokens per row", low=1)
    packing: str = option("windows", "windows of one long stream, or documents packed into rows "
                          "with segment ids", choices=("windows", "documents"))
    validation: float = option(0.1, "share of the text held out for validation", low=0.0, high=0.9)

    def __post_init__(self) -> None:
        check(self, "data")


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    lr: float = option(1e-3, "peak learning rate", low=0.0)
    schedule: str = option("cosine", "shape after warm-up",
                           choices=("cosine", "linear", "constant", "inverse_sqrt"))
    warmup: float = option(0.05, "share of the steps spent warming up", low=0.0, high=1.0)
    floor: float = option(0.1, "final learning rate as a share of the peak", low=0.0, high=1.0,
                          when=("schedule", lambda name: name in ("cosine", "linear"),
                                "a constant or inverse_sqrt schedule has no end"))
    b1: float = option(0.9, "AdamW first-moment decay", low=0.0, high=0.9999)
    b2: float = option(0.99, "AdamW second-moment decay", low=0.0, high=0.999999)
    eps: float = option(1e-8, "AdamW denominator offset", low=1e-20)
    weight_decay: float = option(0.1, "AdamW decay of matrices (never of norms, biases or scalars)",
                                 low=0.0)
    clip: float = option(1.0, "clip the global gradient norm here; 0 = off", low=0.0)
    label_smoothing: float = option(0.0, "share of the target probability spread evenly over the "
                                    "vocabulary, in training only", low=0.0, high=0.999)
    accumulate: int = option(1, "micro-batches per step; equals the big batch exactly", low=1)

    def __post_init__(self) -> None:
        check(self, "optim")


@dataclass(frozen=True)
class TrainConfig:
    """Length of a run and what it writes."""

    steps: int = option(1000, "optimizer steps", low=1)
    batch: int = option(16, "rows per step, over all devices and micro-batches", low=1)
    seed: int = option(0, "seed of parameters, data order and dropout", low=0, high=2**31 - 1)
    eval_every: int = option(200, "steps between validations; 0 = only at the end", low=0,
                             run_only=True)
    eval_batches: int = option(0, "validation batches; 0 = all", low=0)
    save_every: int = option(200, "steps between checkpoints; 0 = only at the end", low=0,
                             run_only=True)
    log_every: int = option(10, "steps between metric rows", low=1, run_only=True)
    check_finite: bool = option(True, "stop on a NaN or infinite loss or gradient, naming the "
                                "step", run_only=True)
    check_leaks: str = option("start", "look for tokens that see the future, another document or "
                              "padding: before the first step, also at each validation, or never",
                              choices=("start", "validations", "never"), run_only=True)
    wandb: str = option("", "Weights & Biases project; empty = off", run_only=True)

    def __post_init__(self) -> None:
        check(self, "train")
