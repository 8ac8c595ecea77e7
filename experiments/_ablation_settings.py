"""Flags of the block ablation, and what follows from them alone."""

from dataclasses import dataclass, field, replace

from experiments._ablation_arms import ARMS, FAMILIES, Arm
from tx_jax.config import DataConfig, ModelConfig, OptimConfig, check, check_names, option
from tx_jax.errors import UserError
from tx_jax.study.side_by_side import strategy_option

STUDY = "block_ablation"
PARTS = ("rank", "gradient", "training")
# What fits into minutes; the others are for --arms and the preset full.
SMALL_ARMS = ("pre_layer", "pre_layer_cold", "pre_rms", "sandwich", "post_layer",
              "post_unit", "post_unit_cold", "no_norm", "no_residual", "base", "attention_only",
              "attention_only_3x", "narrow_deep", "ffn_2x", "swiglu", "heads_8", "heads_1",
              "heads_32", "key_quarter", "depth_half", "depth_double", "smoothing", "few",
              "few_dropout_1")


@dataclass(frozen=True)
class Start:
    """Parts `rank` and `gradient`, before training."""

    # Slopes scatter, and all seeds of an arm are one program.
    seeds: int = option(24, "seeds", low=1)
    layers: int = option(12, "depth down to which the rank is followed", low=3)
    tokens: int = option(64, "tokens of a row", low=2)
    depths: tuple[int, ...] = option((2, 8, 16, 32), "depths at which gradients are taken",
                                     low=1)

    def __post_init__(self) -> None:
        check(self, "start")


@dataclass(frozen=True)
class Settings:
    """Flags of the study."""

    parts: tuple[str, ...] = option(PARTS, f"parts to run: {', '.join(PARTS)}")
    arms: tuple[str, ...] = option(SMALL_ARMS, f"arms of the training: {', '.join(ARMS)}")
    seeds: int = option(5, "seeds of the training", low=1)
    # As many as the other seeds: both rounds of an arm are then one compiled program.
    lrs: tuple[float, ...] = option((3e-4, 1e-3, 3e-3, 1e-2), "learning rates; each arm takes its "
                                    "best at the first seed", low=0.0)
    steps: int = option(600, "optimizer steps; a multiple of 10", low=10, multiple_of=10)
    deep_steps: int = option(250, "steps of the arms of norms and residual; a multiple of 10",
                             low=10, multiple_of=10)
    text: str = option("shakespeare", "as --data.text of language_model")
    few: int = option(8192, "tokens of the little text", low=2)
    context: int = option(32, "tokens per row", low=2)
    batch: int = option(8, "rows per step", low=1)
    scored: int = option(160, "held-out rows of either half that are scored", low=1)
    layers: int = option(2, "blocks; of some arms half, 3/2, 2 or 3 times as many", low=1)
    deep: int = option(6, "blocks of the arms of norms and residual", low=1)
    d_model: int = option(64, "width", low=1)
    heads: int = option(4, "heads, but for the arms of heads", low=1)
    attention: str = option("auto", "attention implementation, by name or module:function")
    strategy: str = strategy_option("queue", "how runs of one arm go side by side")
    start: Start = field(default_factory=Start)

    def __post_init__(self) -> None:
        check(self, "")
        check_names("parts", self.parts, PARTS)
        check_names("arms", self.arms, ARMS)
        for arm in self.arms:
            bases = [names[0] for names in FAMILIES.values() if arm in names]
            if not set(bases) & set(self.arms):
                raise UserError(f"--arms names '{arm}' without '{bases[0]}', to which it is "
                                "compared; add it.")
            self.model(arm)
        if self.few <= self.context:
            raise UserError(f"--few={self.few} is no longer than a row of --context="
                            f"{self.context}; raise it.")

    def model(self, name: str) -> ModelConfig:
        """The architecture of an arm."""
        arm: Arm = ARMS[name]
        fields = {"layers": self.layers, "heads": self.heads, "norm": "layer",
                  **arm.change(self.layers, self.deep, self.d_model)}
        if self.layers % 2 and name in ("narrow_deep", "depth_half"):
            raise UserError(f"--arms names '{name}', which halves --layers={self.layers}; make "
                            "that even.")
        if fields.get("head_dim", 1) * fields["heads"] == 0 or self.d_model % fields["heads"]:
            raise UserError(f"--arms names '{name}', whose heads do not divide --d_model="
                            f"{self.d_model}; change one of them.")
        return ModelConfig(d_model=self.d_model, attention=self.attention, **fields)

    def optim(self, name: str) -> OptimConfig:
        """AdamW without decay, warm-up and label smoothing as the arm has them."""
        return replace(OptimConfig(weight_decay=0.0), **ARMS[name].optim)

    @property
    def data(self) -> DataConfig:
        """Characters of the text."""
        return DataConfig(text=self.text, tokenizer="char", context=self.context)
