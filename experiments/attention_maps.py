"""What each head of a trained language model looks at, drawn for a sentence of your own.

    python launch.py --experiment=attention_maps --text="To be" --run=runs/language_model-small
    python launch.py --experiment=attention_maps       trains a small model first, in a minute

`--run` is the working directory of a `language_model` run (of several seeds the one trained last),
or one of its `cells/ID`. Without it a small model is trained on the shipped Shakespeare and kept.
Each sentence gets a directory `maps/ID/`: a PNG per layer with a heat map per head, and
`attention.html`, a page that loads nothing, to point at a token and read its weights. The weights
are those of the reference's formulas before dropout, whichever implementation trained the model.

The models here are decoders, so all maps are self-attention. The drawing takes rectangles too, as
cross-attention will have: see `trace_attention` and `draw_maps`.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments._attention_page import LARGEST_PAGE, draw_maps, render_page, visible
from experiments._run import Run, find_run, read_tokenizer, restore
from tx_jax import models
from tx_jax.config import DataConfig, ModelConfig, OptimConfig, TrainConfig, check, option
from tx_jax.data import load_text, prepare, split_tail
from tx_jax.errors import UserError
from tx_jax.fit import RunConfig, fit
from tx_jax.study import tables
from tx_jax.study.cells import Cell, canonical, code_hash, data_hash, fingerprint, short
from tx_jax.study.contract import Context, Study
from tx_jax.study.ledger import Measured
from tx_jax.study.report import Report
from tx_jax.tokenizers import Tokenizer, make_tokenizer
from tx_jax.workdir import write_atomic

# The model that is trained where no run is given.
SMALL = RunConfig(ModelConfig(layers=2, d_model=64, heads=4), DataConfig(context=96),
                  OptimConfig(lr=3e-3), TrainConfig(eval_every=0, eval_batches=20, save_every=0))


@dataclass(frozen=True)
class Settings:
    """Flags of the experiment."""

    text: str = option("To be, or not to be, that is the question.", "the sentence to look at")
    run: str = option("", "working directory of a language_model run, or one of its cells/ID; "
                      "empty = train a small model first")
    steps: int = option(400, "optimizer steps of the small model", low=1,
                        when=("run", lambda run: not run, "that model is trained already"))

    def __post_init__(self) -> None:
        check(self, "")


@lru_cache(maxsize=1)
def _small_tokenizer() -> Tokenizer:
    train, _ = split_tail(load_text(SMALL.data.text).documents, SMALL.data.validation)
    return make_tokenizer(SMALL.data.tokenizer, [text for text, _ in train])


def encode(text: str, tokenizer: Tokenizer, context: int, heads: int) -> np.ndarray:
    """Token ids of the sentence, int32 [T].

    Raises:
      UserError: it is empty, unknown in part, too long for the model or for a page.
    """
    if not text.strip():
        raise UserError("--text is empty; give a sentence to look at.")
    if unknown := tokenizer.unknown(text):
        shown = ", ".join(repr(piece) for piece in unknown[:5])
        raise UserError(f"--text holds {shown}{', ...' if unknown[5:] else ''}, unknown to the "
                        f"tokenizer {tokenizer.name} of this model; leave it out.")
    ids = tokenizer.encode(text)
    most = min(context, int((LARGEST_PAGE / heads) ** 0.5))
    if len(ids) > most:
        why = ("the model has seen rows of" if most == context else
               f"a page with {heads} heads holds")
        raise UserError(f"--text has {len(ids)} tokens, but {why} at most {most}; shorten it.")
    return ids


def _opened(settings: Settings) -> tuple[Run | None, Tokenizer, np.ndarray]:
    """The run if any, the tokenizer, and the sentence in tokens."""
    run = find_run(settings.run) if settings.run else None
    model, context = ((run.model, run.context) if run else (SMALL.model, SMALL.data.context))
    tokenizer = read_tokenizer(run) if run else _small_tokenizer()
    return run, tokenizer, encode(settings.text, tokenizer, context, model.layers * model.heads)


def cells(settings: Settings) -> list[Cell]:
    """One cell: the sentence under the model."""
    own = {"text": settings.text}
    own |= {"run": find_run(settings.run).identity} if settings.run else {"steps": settings.steps}
    return [Cell("attention_maps", "maps", "model", (), 0, canonical(own))]


def data(settings: Settings) -> str:
    """Hash of the text that the small model is trained on."""
    return data_hash("" if settings.run else load_text(SMALL.data.text).sha256)


def run(settings: Settings, members: list[Cell], context: Context
        ) -> Iterator[tuple[Cell, Measured]]:
    """Load or train the model, trace it on the sentence, write the maps."""
    [cell] = members
    found, tokenizer, ids = _opened(settings)
    if found is None:
        context.console.print(f"no --run was given: training a small model on {SMALL.data.text}, "
                              f"{settings.steps} steps.", highlight=False)
        found = _train_small(settings, context)
    model = models.build(found.model, tokenizer.vocab_size, found.context)
    restored = restore(found, model, context.console.print)
    trace = jax.jit(lambda params, tokens_BT: models.apply(
        model, params, tokens_BT, trace="weights")[1])
    traced = trace(restored.state.params, jnp.asarray(ids)[None])
    if "weights_BNTS" not in traced:
        raise UserError("this model's attention is no softmax over keys, so there are no weights "
                        "to draw.")
    weights_LNTS = np.asarray(traced["weights_BNTS"])[:, 0]
    tokens = [tokenizer.decode(ids[i:i + 1]) for i in range(len(ids))]
    folder = (context.workdir / "maps"
              / short(fingerprint(cell, code_hash(STUDY.packages, STUDY.files), data(settings))))
    about = (f"{'' if settings.run else 'A small model trained for this page: '}{found.root}, step "
             f"{restored.step}; {found.model.layers} layers, {found.model.heads} heads, positions "
             f"{found.model.positions}, mask {found.model.mask}, tokenizer {tokenizer.name}.")
    write_maps(weights_LNTS, tokens, tokens, folder, title=settings.text, about=(about,))
    context.console.print(f"maps: {folder / 'attention.html'}", highlight=False, soft_wrap=True)
    context.advance(1.0)
    yield cell, Measured({**summary(weights_LNTS), "tokens": [visible(t) for t in tokens],
                          "step": restored.step, "run": str(found.root), "folder": str(folder)},
                         0.0, kernel="reference", strategy="none")


def _train_small(settings: Settings, context: Context) -> Run:
    train = dataclasses.replace(SMALL.train, steps=settings.steps)
    root = context.workdir / "model" / f"{code_hash()[:10]}-{settings.steps}"
    prepare(SMALL.data, root / "cache")
    result = fit(dataclasses.replace(SMALL, train=train), root, console=context.console)
    if not result.finished:
        raise KeyboardInterrupt
    return find_run(str(root))


def write_maps(weights_LNTS: np.ndarray, rows: list[str], columns: list[str], folder: Path, *,
               title: str, about: tuple[str, ...] = ()) -> None:
    """Write `layer_1.png` ... and `attention.html` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, weights_NTS in enumerate(weights_LNTS):
        draw_maps(weights_NTS, rows, columns, folder / f"layer_{i + 1}.png",
                  title=f"layer {i + 1}: rows ask, columns are looked at")
    write_atomic(folder / "attention.html", render_page(
        weights_LNTS, rows, columns, title=f"Attention: {title}", about=about))


def summary(weights_LNTS: np.ndarray) -> dict[str, list[list[float]]]:
    """Per layer and head of self-attention, means over the tokens from the second on."""
    T = weights_LNTS.shape[-1]
    later, index = slice(1 if T > 1 else 0, None), np.arange(T)
    safe = np.where(weights_LNTS > 0, weights_LNTS, 1)
    entropy = -np.sum(weights_LNTS * np.log(safe), axis=-1)
    distance = np.sum(weights_LNTS * np.abs(index[:, None] - index[None, :]), axis=-1)
    parts = {"entropy": entropy, "distance": distance,
             "itself": weights_LNTS[..., index, index], "first": weights_LNTS[..., 0],
             "previous": weights_LNTS[..., index, np.maximum(index - 1, 0)]}
    return {name: value[..., later].mean(-1).astype(float).round(4).tolist()
            for name, value in parts.items()}


def report(settings: Settings, rows: list[dict[str, Any]]) -> Report:
    """What each head does on average; the maps themselves lie in the folder it names."""
    row = rows[0]
    m = row["metrics"]
    columns = {"entropy": "entropy (nats)", "distance": "distance (tokens)",
               "previous": "on the token before", "itself": "on itself", "first": "on the first"}
    lines = tuple((str(layer + 1), str(head + 1), *(tables.number(m[name][layer][head], digits=3)
                                                    for name in columns))
                  for layer in range(len(m["entropy"])) for head in range(len(m["entropy"][0])))
    table = tables.Table("Heads", ("layer", "head", *columns.values()), lines,
                         caption="Means over the tokens of the sentence from the second on; the "
                                 "last three are shares of the weight.",
                         commands=(("maps", row["command"]),) if "command" in row else ())
    return Report("Attention maps", (
        f"{len(m['tokens'])} tokens: {settings.text}",
        f"The maps: {m['folder']}/attention.html and a PNG per layer beside it.",
        "One sentence says what these heads do on it, not what they are for."), tables=(table,),
        facts=(("run", m["run"]), ("step", str(m["step"])), ("device", row["device"]),
               ("versions", ", ".join(f"{k} {v}" for k, v in row["versions"].items() if v)),
               ("code", row["code"][:12])))


STUDY = Study(
    name="attention_maps", title="Attention maps", settings=Settings,
    presets={"smoke": {"steps": 20}, "small": {}, "full": {"steps": 4000}}, cells=cells, run=run,
    report=report, data=data, check=lambda settings: (_opened(settings), None)[1],
    files=tuple(Path(__file__).parent / name for name in
                ("attention_maps.py", "_attention_page.py", "_run.py")))
