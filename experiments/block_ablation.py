"""What each piece of the block is worth: norms, residual, feed-forward, heads, depth, dropout.

    python launch.py --experiment=block_ablation                  10 to 15 minutes on 2 cores
    python launch.py --experiment=block_ablation --preset=smoke   proves nothing
    python launch.py --experiment=block_ablation --parts=rank,gradient

Parts `rank` and `gradient` look at random weights (`_ablation_start.py`): whether the rows of the
stream become equal with depth, and what gradient the last layer gets. Part `training` trains small
language models, one change at a time (`_ablation_arms.py`), each at the best of a grid of learning
rates. Compared with Dong et al. 2021, Xiong et al. 2020, Vaswani et al. 2017 (table 3), Shazeer
2020, Narang et al. 2021 and Pires et al. 2023.

Expected: attention alone collapses within three layers, a skip connection stops it, a norm only
delays it; gradients of the last layer fall as L^-1/2 with the norm before the branch and not at all
with the norm after it. Without residual a model of 6 layers learns letter frequencies at best;
Post-LN whose branches start at unit gain wants a warm-up and a small rate. One head is worse than
8, SwiGLU better than GELU; without feed-forward layers the loss is a little higher, hardly less so
at equal parameters. Not expected of models of 0.1 M parameters: RMSNorm's gain over LayerNorm, the
best number of heads, or which of Pre-LN and Post-LN ends lower.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments import _ablation_start, _ablation_training
from experiments._ablation_arms import ARMS
from experiments._ablation_report import make_report
from experiments._ablation_settings import STUDY as NAME
from experiments._ablation_settings import Settings
from tx_jax.data import text_hash
from tx_jax.study.cells import Cell, data_hash
from tx_jax.study.contract import Context, Study
from tx_jax.study.ledger import Measured


def cells(settings: Settings) -> list[Cell]:
    """The cells of the chosen parts."""
    found = [cell for part in settings.parts if part != "training"
             for cell in _ablation_start.cells(settings, part)]
    return found + (_ablation_training.cells(settings) if "training" in settings.parts else [])


def group(cell: Cell) -> tuple[Any, ...]:
    """What runs together: an arm before training at one depth, or an arm with its tuning."""
    trained = cell.part in ("tuning", "training")
    return (cell.arm,) if trained else (cell.part, cell.arm, cell.axes)


def run(settings: Settings, members: list[Cell], context: Context
        ) -> Iterator[tuple[Cell, Measured]]:
    """Run the cells of one group."""
    trained = members[0].part in ("tuning", "training")
    runner = _ablation_training if trained else _ablation_start
    yield from runner.run(settings, members, context)


def data(settings: Settings) -> str:
    """Hash of the text."""
    return data_hash(text_hash(settings.text) if "training" in settings.parts else "")


SMOKE = {"seeds": 2, "arms": ("base", "attention_only", "smoothing"), "lrs": (1e-2,), "steps": 20,
         "deep_steps": 20, "scored": 32, "layers": 2, "deep": 2, "d_model": 16, "heads": 2,
         "start.seeds": 2, "start.layers": 3, "start.tokens": 16, "start.depths": (2, 4)}
# Widths and depths of Vaswani et al. 2017 and the 18 layers at which Post-LN is said to fail.
FULL = {"arms": tuple(ARMS), "lrs": (1e-4, 3e-4, 1e-3, 3e-3), "text": "austen", "steps": 20_000,
        "deep_steps": 20_000, "few": 2**18, "context": 256, "batch": 64, "scored": 2048,
        "layers": 6, "deep": 18, "d_model": 512, "heads": 8, "strategy": "auto",
        "start.layers": 24, "start.tokens": 256, "start.depths": (2, 4, 8, 16, 32, 64)}

STUDY = Study(
    name=NAME, title="Block ablation", settings=Settings,
    presets={"smoke": SMOKE, "small": {}, "full": FULL}, cells=cells, run=run, report=make_report,
    group=group, data=data,
    files=tuple(Path(__file__).parent / name for name in
                ("block_ablation.py", "_char_lm.py", "_ablation_settings.py", "_ablation_arms.py",
                 "_ablation_start.py", "_ablation_training.py")))
