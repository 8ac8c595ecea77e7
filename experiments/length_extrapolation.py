"""Trained at L, read at 1x to 16x: every position scheme, and RoPE stretched afterwards.

    python launch.py --experiment=length_extrapolation                  minutes on 2 cores
    python launch.py --experiment=length_extrapolation --preset=smoke   proves nothing
    python launch.py --experiment=length_extrapolation --parts=extension --extend.factors=2,4,8

Part `schemes`: a small language model per position scheme, trained on rows of L characters and
scored in three protocols (`_extrapolation_eval.py`). Part `extension`: the checkpoints of `rope`
read under seven forms that came later, zero-shot and after a short fine-tuning. Part `probes`:
algorithmic tasks (`_probes.py`). Compared with Press et al. 2022, Haviv et al. 2022, Chen et al.
2023, Peng et al. 2023 and Kazemnejad et al. 2023.

Expected: sinusoidal and learned positions break within 25 % beyond L, RoPE holds to about 1.5 L and
breaks, T5's bias degrades slowly, ALiBi and KERPLE stay flat. Zero-shot at 4 L by-parts and YaRN
beat NTK-aware scaling, and that beats PI, if their constants are scaled to L. Not expected of
models of 0.1 M parameters: PI ahead of plain fine-tuning, nor YaRN's temperature of any use.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments import (
    _extrapolation_extend,
    _extrapolation_schemes,
    _probes_part,
    _probes_settings,
)
from experiments._extrapolation_models import ARMS, METHODS
from experiments._extrapolation_report import make_report
from experiments._extrapolation_settings import STUDY as NAME
from experiments._extrapolation_settings import Settings
from tx_jax.data import text_hash
from tx_jax.study.cells import Cell, data_hash
from tx_jax.study.contract import Context, Study
from tx_jax.study.ledger import Measured

RUNNERS = {"schemes": _extrapolation_schemes, "extension": _extrapolation_extend,
           "probes": _probes_part}


def cells(settings: Settings) -> list[Cell]:
    """The cells of the chosen parts."""
    return [cell for part in settings.parts for cell in RUNNERS[part].cells(settings)]


def group(cell: Cell) -> tuple[Any, ...]:
    """Cells that train as one program."""
    return RUNNERS[cell.part].group(cell)


def run(settings: Settings, members: list[Cell], context: Context
        ) -> Iterator[tuple[Cell, Measured]]:
    """Run the cells of one group."""
    yield from RUNNERS[members[0].part].run(settings, members, context)


def data(settings: Settings) -> str:
    """Hash of the text."""
    return data_hash(text_hash(settings.text))


SMOKE = {"seeds": 2, "arms": ("rope", "alibi"), "steps": 20, "factors": (1.0, 4.0), "context": 32,
         "stride": 8, "tokens": 1024, "slides": 16, "layers": 1, "d_model": 32,
         "extend.methods": ("none", "by_parts"), "extend.tuned": ("none",),
         "extend.factors": (4,), "extend.steps": 4, "extend.every": 2,
         "extend.ramps": ("1:32", "0.25:4"), "strategy": "queue"}
# One replica per core: the fastest on 2 cores, and "auto" would compile everything twice.
SMALL = {"strategy": "queue", "seeds": 5, "steps": 500, "probes.steps": 1200,
         "probes.arms": ("none", "t5", "alibi", "rope")}
# Austen's novels, because a scored region of 122,880 characters lies in no held-out play.
FULL = {"arms": tuple(ARMS), "lrs": (3e-4, 1e-3, 3e-3), "text": "austen", "context": 512,
        "steps": 20_000, "batch": 32, "layers": 6, "d_model": 512, "heads": 8, "stride": 128,
        "tokens": 122_880, "slides": 240, "extend.factors": (2, 4, 8), "extend.base_lr": 1e-3,
        "extend.lr": 1e-4, "extend.steps": 400, "extend.tuned": tuple(METHODS)}

STUDY = Study(
    name=NAME, title="Length extrapolation", settings=Settings,
    presets={"smoke": SMOKE | _probes_settings.SMOKE, "small": SMALL,
             "full": FULL | _probes_settings.FULL}, cells=cells, run=run,
    report=make_report, group=group, data=data,
    files=tuple(Path(__file__).parent / name for name in
                ("length_extrapolation.py", "_char_lm.py", "_extrapolation_settings.py",
                 "_extrapolation_models.py", "_extrapolation_eval.py",
                 "_extrapolation_schemes.py", "_extrapolation_extend.py",
                 "_probes.py", "_probes_settings.py", "_probe_training.py", "_probes_part.py")))
