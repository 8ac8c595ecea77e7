"""Flags of the length study, and what follows from them alone."""

import math
from dataclasses import dataclass, field
from typing import Any

from experiments._extrapolation_models import ARMS, METHODS
from experiments._probes_settings import Probes
from tx_jax.config import DataConfig, ModelConfig, OptimConfig, check, check_names, option
from tx_jax.errors import UserError
from tx_jax.positions import make_encoding
from tx_jax.study.side_by_side import strategy_option

STUDY = "length_extrapolation"
PARTS = ("schemes", "extension", "probes")


@dataclass(frozen=True)
class Extend:
    """Part `extension`: other forms of trained rotary checkpoints."""

    methods: tuple[str, ...] = option(tuple(METHODS), f"methods: {', '.join(METHODS)}")
    tuned: tuple[str, ...] = option(("none", "pi", "ntk", "by_parts", "yarn"),
                                    "methods that are fine-tuned as well")
    factors: tuple[int, ...] = option((2, 4), "s: context after over context before; the "
                                      "largest is fine-tuned", low=2)
    # Published is 1:32, of which nothing is left at L = 64 (see rope_by_parts).
    ramps: tuple[str, ...] = option(("1:32", "1:8", "1:4", "0.5:2", "0.25:4"),
                                    "alpha:beta of by_parts and yarn to choose from")
    base_lr: float = option(1e-2, "learning rate of the checkpoint", low=0.0)
    lr: float = option(5e-4, "learning rate of fine-tuning, constant", low=0.0)
    steps: int = option(100, "steps of fine-tuning", low=1)
    every: int = option(25, "steps between scores while fine-tuning", low=1)
    batch: int = option(4, "rows per step of fine-tuning", low=1)

    def __post_init__(self) -> None:
        check(self, "extend")
        check_names("extend.methods", self.methods, METHODS)
        check_names("extend.tuned", self.tuned, METHODS)
        if self.steps % self.every:
            raise UserError(f"--extend.steps={self.steps} is not a multiple of --extend.every="
                            f"{self.every}; change one of them.")
        for text in self.ramps:
            self.ramp(text)

    def ramp(self, text: str) -> tuple[float, float]:
        """(alpha, beta) of "alpha:beta"."""
        try:
            alpha, beta = map(float, text.split(":"))
        except ValueError:
            raise UserError(f"--extend.ramps names '{text}'; write alpha:beta, as in 1:32."
                            ) from None
        make_encoding(f"rope_by_parts(alpha={alpha}, beta={beta})")  # refuses what cannot be
        return alpha, beta


@dataclass(frozen=True)
class Settings:
    """Flags of the study."""

    parts: tuple[str, ...] = option(PARTS, f"parts to run: {', '.join(PARTS)}")
    seeds: int = option(3, "seeds of the parts schemes and extension", low=1)
    arms: tuple[str, ...] = option(tuple(ARMS)[:7], f"position schemes: {', '.join(ARMS)}")
    # Of 2e-3, 1e-2 and 2e-2 (400 steps, one seed, loss at L on the tuning half): rope 2.23, 2.18,
    # 2.25; sinusoidal 2.94, 2.58, 2.57. Not tuned for the other schemes.
    lrs: tuple[float, ...] = option((1e-2,), "learning rates; the best of an arm is chosen on "
                                    "text that no score reads", low=0.0)
    text: str = option("shakespeare", "as --data.text of language_model")
    context: int = option(64, "L, tokens per training row", low=8)
    factors: tuple[float, ...] = option((1.0, 1.25, 1.5, 2.0, 4.0, 8.0, 16.0),
                                        "evaluation lengths over L; the first is 1", low=1.0)
    steps: int = option(600, "optimizer steps; a multiple of 10", low=10, multiple_of=10)
    batch: int = option(16, "rows per step", low=1)
    layers: int = option(2, "blocks", low=1)
    d_model: int = option(64, "width", low=1)
    heads: int = option(4, "heads", low=1)
    stride: int = option(16, "S of the sliding window; at most a quarter of --context", low=1)
    tokens: int = option(15360, "tokens scored in the protocol of windows; at least the least "
                         "common multiple of all lengths", low=1)
    slides: int = option(64, "windows scored in the protocol of sliding windows", low=1)
    attention: str = option("auto", "attention implementation, by name or module:function")
    strategy: str = strategy_option()
    extend: Extend = field(default_factory=Extend)
    probes: Probes = field(default_factory=Probes)

    def __post_init__(self) -> None:
        check(self, "")
        check_names("parts", self.parts, PARTS)
        check_names("arms", self.arms, ARMS)
        if self.factors[0] != 1:
            raise UserError(f"--factors={','.join(f'{f:g}' for f in self.factors)} start at "
                            f"{self.factors[0]:g}; put 1 first, to which all are compared.")
        for factor in self.factors:
            if (factor * self.context) % 1:
                raise UserError(f"--factors names {factor:g}, which gives {factor * self.context:g}"
                                f" tokens at --context={self.context}; choose one that gives a "
                                "whole number.")
        if 4 * self.stride > self.context or self.context % self.stride:
            raise UserError(f"--stride={self.stride} must divide --context={self.context} and be "
                            "at most a quarter of it.")

    @property
    def lengths(self) -> tuple[int, ...]:
        """Evaluation lengths, ascending."""
        return tuple(sorted({round(f * self.context) for f in self.factors}))

    def model(self, positions: str, **blanks: Any) -> ModelConfig:
        """The architecture under a scheme of ARMS or METHODS."""
        longest = self.lengths[-1]
        filled = positions.format(**{"trained": self.context, "longest": longest,
                                     "factor": longest / self.context} | blanks)
        return ModelConfig(layers=self.layers, d_model=self.d_model, heads=self.heads,
                           positions=filled, attention=self.attention)

    @property
    def optim(self) -> OptimConfig:
        """AdamW with a cosine."""
        return OptimConfig()

    @property
    def data(self) -> DataConfig:
        """Characters of the text."""
        return DataConfig(text=self.text, tokenizer="char", context=self.context)

    @property
    def scored(self) -> tuple[int, ...]:
        """Every length that some part scores, ascending; all score the same regions."""
        stretched = {factor * self.context for factor in self.extend.factors}
        return tuple(sorted({*self.lengths, *stretched}))

    def region(self) -> int:
        """Tokens of a scored region: all lengths divide it."""
        return math.lcm(*self.scored)
