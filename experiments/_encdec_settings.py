"""Flags of the study of architectures, its arms, and the depths that match their budgets."""

from dataclasses import dataclass
from functools import lru_cache

from experiments import _seq_tasks
from tx_jax import forms
from tx_jax.config import EncoderConfig, ModelConfig, OptimConfig, check, check_names, option
from tx_jax.errors import UserError
from tx_jax.study.budget import Budget, match, measure
from tx_jax.study.side_by_side import strategy_option

STUDY = "enc_dec_vs_decoder"
CHUNK = 50  # steps between two looks at freshly drawn rows
BASE = "encdec"


@dataclass(frozen=True)
class Arm:
    """A shape: with an encoder or alone, what it sees of the source, what is matched."""

    encoder: EncoderConfig | None = None
    prefix: bool = False
    matched: str = ""


# As many parameters as the pair, or as many operations in training; both at once cannot be.
ARMS = {
    BASE: Arm(EncoderConfig()),
    "encdec_shared": Arm(EncoderConfig(weights="shared")),
    "prefix": Arm(prefix=True, matched="parameters"),
    "causal": Arm(matched="parameters"),
    "prefix_flops": Arm(prefix=True, matched="flops"),
    "causal_flops": Arm(matched="flops"),
}


@dataclass(frozen=True)
class Settings:
    """Flags of the study."""

    arms: tuple[str, ...] = option(tuple(ARMS), f"shapes: {', '.join(ARMS)}")
    tasks: tuple[str, ...] = option(("shift", "reverse"), f"tasks: {', '.join(_seq_tasks.TASKS)}")
    seeds: int = option(5, "seeds", low=1)
    lrs: tuple[float, ...] = option((1e-3, 2e-3), "learning rates; the best of an arm and task is "
                                    "kept", low=0.0)
    # Of eight or sixteen symbols the pair did not solve `shift` within 800 to 1500 steps (pilots).
    length: int = option(8, "tokens of a source and of a target", low=2)
    symbols: int = option(4, "symbols", low=2)
    layers: int = option(3, "layers of the encoder, and as many of its decoder", low=1)
    d_model: int = option(64, "width", low=1)
    heads: int = option(4, "heads", low=1)
    positions: str = option("learned", "position scheme, as in --model.positions")
    steps: int = option(1000, f"optimizer steps; a multiple of {CHUNK}", low=CHUNK,
                        multiple_of=CHUNK)
    early: int = option(200, "steps after which losses are compared; a multiple of "
                        f"{CHUNK}", low=CHUNK, multiple_of=CHUNK)
    batch: int = option(32, "rows per step", low=1)
    attention: str = option("auto", "attention implementation, by name or module:function")
    strategy: str = strategy_option()

    def __post_init__(self) -> None:
        check(self, "")
        check_names("arms", self.arms, ARMS)
        check_names("tasks", self.tasks, _seq_tasks.TASKS)
        if self.early > self.steps:
            raise UserError(f"--early={self.early} lies beyond the --steps={self.steps} of a run; "
                            "make it smaller.")

    @property
    def optim(self) -> OptimConfig:
        """AdamW with a cosine."""
        return OptimConfig(weight_decay=0.0)

    def model(self, layers: int) -> ModelConfig:
        """The architecture at a depth; a few layers compile and run faster unrolled."""
        return ModelConfig(layers=layers, d_model=self.d_model, heads=self.heads,
                           positions=self.positions, attention=self.attention, scan=layers > 8)

    def build(self, arm: str, layers: int) -> forms.Model:
        """The model of an arm at a depth."""
        return forms.build(self.model(layers), ARMS[arm].encoder, self.symbols + 1,
                           2 * self.length)

    def layers_of(self, arm: str) -> int:
        """The depth of an arm: as chosen, or what matches the pair."""
        return _depth(self, arm)

    def budget(self, arm: str) -> Budget:
        """What an arm costs on a pair."""
        return measure(self.build(arm, self.layers_of(arm)), self.length, self.length)


@lru_cache(maxsize=256)
def _depth(settings: Settings, arm: str) -> int:
    matched = ARMS[arm].matched
    if not matched:
        return settings.layers

    def count(budget: Budget) -> int:
        return budget.layers if matched == "parameters" else budget.training

    return match(lambda layers: settings.build(arm, layers), count, count(settings.budget(BASE)),
                 settings.length, settings.length)
