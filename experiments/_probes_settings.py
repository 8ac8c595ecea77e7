"""Flags of the part `probes` of the length study, and what follows from them alone."""

from dataclasses import dataclass

from experiments import _probes
from tx_jax.config import ModelConfig, check, check_names, option
from tx_jax.errors import UserError
from tx_jax.options import name_of
from tx_jax.positions import make_encoding

CHUNKS = 20  # records of a run
FOLLOWING = ("rope_dynamic_ntk", "longrope")  # see `_probe_training`


@dataclass(frozen=True)
class Probes:
    """Part `probes`: algorithmic tasks beyond the lengths of training.

    The one learning rate of the preset small comes from 2e-3, 5e-3 and 1e-2, tried once with
    `none`, seed 0 and 1500 steps: exact match over the lengths 3 and 6 was 0.94, 1 and 0.99 for
    copy, 1 three times for passkey, and 1, 0.95 and 0.04 for reverse. No other scheme was tuned.
    """

    tasks: tuple[str, ...] = option(("copy", "passkey"), f"tasks: {', '.join(_probes.TASKS)}")
    arms: tuple[str, ...] = option(("none", "t5", "alibi", "rope", "sinusoidal"),
                                   "position schemes, as in --model.positions")
    train_length: int = option(6, "L: training lengths are uniform in 1 .. L", low=1)
    test_lengths: tuple[int, ...] = option((3, 6, 7, 8, 9, 12, 18), "lengths of the tests; some "
                                           "within the training lengths and some beyond", low=1)
    test_rows: int = option(200, "prompts per test length", low=1)
    symbols: int = option(48, "symbols of the alphabet; recall needs twice the longest test",
                          low=10, high=127 - _probes.FIRST)
    lrs: tuple[float, ...] = option((5e-3,), "learning rates; the best of an arm and task is "
                                    "chosen within the training lengths", low=0.0)
    seeds: int = option(3, "seeds", low=1)
    steps: int = option(1400, f"optimizer steps; a multiple of {CHUNKS}", low=CHUNKS,
                        multiple_of=CHUNKS)
    batch: int = option(32, "rows per step", low=1)
    layers: int = option(3, "blocks", low=1)
    d_model: int = option(32, "width", low=1)
    heads: int = option(2, "heads", low=1)

    def __post_init__(self) -> None:
        check(self, "probes")
        check_names("probes.tasks", self.tasks, _probes.TASKS)
        for arm in self.arms:
            if name_of(make_encoding(arm)) in FOLLOWING:
                raise UserError(f"--probes.arms names '{arm}', whose formula follows the length of "
                                "the row, so that exact match by argmax is not that of decoding; "
                                "choose other schemes.")
        if self.d_model % self.heads:
            raise UserError(f"--probes.d_model={self.d_model} is not divisible by --probes.heads="
                            f"{self.heads}; change one of them.")
        inside = [n for n in self.test_lengths if n <= self.train_length]
        if not inside or len(inside) == len(self.test_lengths):
            raise UserError(f"--probes.test_lengths={','.join(map(str, self.test_lengths))} lie all"
                            f" on one side of --probes.train_length={self.train_length}; give some "
                            "up to it and some beyond.")
        longest = max(self.test_lengths)
        if "recall" in self.tasks and self.symbols < 2 * longest:
            raise UserError(f"--probes.symbols={self.symbols} has not enough keys for recall with "
                            f"{longest} pairs; make it {2 * longest} or drop a test length.")

    def model(self, arm: str, attention: str) -> ModelConfig:
        """The architecture of an arm; few layers compile and run faster unrolled."""
        return ModelConfig(layers=self.layers, d_model=self.d_model, heads=self.heads,
                           positions=arm, attention=attention, scan=self.layers > 4)

    @property
    def context(self) -> int:
        """Tokens of the longest row, padded or of a test, of any task, whichever are chosen."""
        return max(max(row_size(task, self.train_length),
                       _probes.width(task, max(self.test_lengths))) for task in _probes.TASKS)


def row_size(task: str, train_length: int) -> int:
    """Tokens of a training row, padded so that tasks of nearly equal size share a program."""
    return -(-(_probes.width(task, train_length) - 1) // 8) * 8 + 1


SMOKE = {"probes.tasks": ("passkey",), "probes.arms": ("none", "rope"), "probes.layers": 1,
         "probes.steps": 20, "probes.seeds": 2, "probes.test_rows": 20}
# Lengths, batch and seeds of Kazemnejad et al. 2023; a model between theirs and a laptop's.
FULL = {"probes.tasks": tuple(_probes.TASKS), "probes.train_length": 20,
        "probes.arms": ("none", "t5", "alibi", "rope", "sinusoidal", "learned", "kerple", "fire"),
        "probes.test_lengths": (10, 20, 22, 25, 30, 40), "probes.test_rows": 500,
        "probes.symbols": 80, "probes.lrs": (1e-4, 3e-4, 1e-3), "probes.steps": 20_000,
        "probes.batch": 64, "probes.layers": 6, "probes.d_model": 256, "probes.heads": 8}
