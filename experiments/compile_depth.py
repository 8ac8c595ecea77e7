"""Compile seconds and program size of one training step against depth, scanned and unrolled.

    python -m experiments.compile_depth [--layers=2,4,8,16]          about a minute

Scanned, both stay constant: the block is compiled once whatever the number of layers. The peer is
the same model unrolled, as it would be without a scan.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from tx_jax import flags, models
from tx_jax.config import ModelConfig, OptimConfig, option
from tx_jax.errors import UserError
from tx_jax.train import init_state, train_step


@dataclass(frozen=True)
class Settings:
    """Flags of the benchmark."""

    layers: tuple[int, ...] = option((2, 4, 8, 16), "depths")
    d_model: int = option(64, "width", low=4)


def measure(layers: int, scan: bool, d_model: int) -> tuple[float, int]:
    """(seconds to compile a training step, lines of its lowered program)."""
    model = models.build(ModelConfig(layers=layers, d_model=d_model, heads=4, scan=scan), 64, 64)
    optim, tokens = OptimConfig(), jnp.zeros((4, 64), jnp.int32)
    state = jax.eval_shape(lambda: init_state(model, optim, jax.random.key(0)))
    lowered = jax.jit(lambda s, b: train_step(model, optim, 100, s, b)).lower(
        state, {"tokens_BT": tokens, "targets_BT": tokens})
    began = time.perf_counter()
    lowered.compile()
    return time.perf_counter() - began, lowered.as_text().count("\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    try:
        given = flags.parse(list(sys.argv[1:] if argv is None else argv), Settings(), {})
        settings = flags.replace(Settings(), given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table("layers", "scanned: seconds", "lines", "unrolled: seconds", "lines",
                  title=f"Compiling one training step, d_model={settings.d_model}")
    measure(1, True, settings.d_model)  # warms up the compiler
    for layers in settings.layers:
        scanned, unrolled = (measure(layers, scan, settings.d_model) for scan in (True, False))
        table.add_row(str(layers), f"{scanned[0]:.1f}", str(scanned[1]), f"{unrolled[0]:.1f}",
                      str(unrolled[1]))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
