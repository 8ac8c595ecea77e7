"""Characters, subwords and words: bits per byte at the same bytes and at the same operations.

    python launch.py --experiment=tokenizers                  minutes on 2 cores
    python launch.py --experiment=tokenizers --preset=smoke   proves nothing
    python launch.py --experiment=tokenizers --text=my_korean.txt

Every tokenizer cuts the same text; every model reads the same bytes of context, as many tokens as
these take. Under the budget `bytes` all models train on equally many bytes, under `flops` they take
equally many operations. Loss per token cannot be compared between tokenizers; bits per byte can, if
an unknown word pays for its spelling. Compared with Sennrich et al. 2016 (closed vocabularies lose
rare words, subwords need not) and Ding et al. 2019.

Expected: the perplexity of a token rises many times with the vocabulary while bits per byte have a
shallow optimum at some subword vocabulary; words look best only while unknown ones are free.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import _char_lm, _tokens_text
from experiments._kernel import kernel_name, shape
from experiments._tokens_report import make_report
from tx_jax import letters, models
from tx_jax.attention import source_hash
from tx_jax.config import ModelConfig, OptimConfig, check, check_names, option
from tx_jax.data.batches import token_starts
from tx_jax.loss import token_loss
from tx_jax.study.cells import Cell, canonical, data_hash
from tx_jax.study.contract import Context, Study
from tx_jax.study.flops import count_flops
from tx_jax.study.ledger import Measured
from tx_jax.study.side_by_side import replicas_of, run_group, strategy_option
from tx_jax.tokenizers import make_trainer
from tx_jax.train import loss_and_grads

CHUNKS = 10
BUDGETS = ("bytes", "flops")
ARMS = ("char", "bpe(vocab=512)", "bpe(vocab=1024)", "bpe(vocab=2048)", "bpe(vocab=4096)",
        "word(vocab=5000)")


@dataclass(frozen=True)
class Settings:
    """Flags of the study."""

    arms: tuple[str, ...] = option(ARMS, "tokenizers, as in --data.tokenizer")
    budgets: tuple[str, ...] = option(BUDGETS, "what all models have equally much of: bytes, flops")
    seeds: int = option(5, "seeds", low=1)
    lrs: tuple[float, ...] = option((3e-3, 1e-2), "learning rates; the best of an arm is chosen on "
                                    "text that is not scored", low=0.0)
    text: str = option("shakespeare", "as --data.text of language_model")
    validation: float = option(0.1, "share of the text held out", low=0.01, high=0.5)
    context_bytes: int = option(64, "bytes of a row", low=8)
    batch: int = option(16, "rows per step", low=1)
    steps: int = option(300, f"optimizer steps under the budget of bytes; a multiple of {CHUNKS}",
                        low=CHUNKS, multiple_of=CHUNKS)
    reference: str = option("bpe(vocab=1024)", "tokenizer whose operations are the budget of flops")
    scored: int = option(20_000, "characters to score", low=100)
    layers: int = option(2, "blocks", low=1)
    d_model: int = option(64, "width", low=1)
    heads: int = option(4, "heads", low=1)
    attention: str = option("auto", "attention implementation, by name or module:function")
    strategy: str = strategy_option()

    def __post_init__(self) -> None:
        check(self, "")
        check_names("budgets", self.budgets, BUDGETS)
        for spec in (*self.arms, self.reference):
            make_trainer(spec)

    def cut(self, arm: str) -> _tokens_text.Cut:
        """The text under a tokenizer."""
        return _tokens_text.cut(self.text, arm, self.validation, self.scored)

    def task(self, arm: str, steps: int) -> _char_lm.Task:
        """A model whose rows hold `context_bytes` bytes, as far as whole tokens can."""
        found = self.cut(arm)
        context = max(2, round(self.context_bytes / found.bytes_per_token))
        model = ModelConfig(layers=self.layers, d_model=self.d_model, heads=self.heads,
                            attention=self.attention, scan=False)
        return _char_lm.Task(model, OptimConfig(), found.tokenizer.vocab_size, context, steps)


@lru_cache(maxsize=64)
def step_flops(settings: Settings, arm: str) -> int:
    """Operations of the loss and its gradient on a batch."""
    task = settings.task(arm, settings.steps)
    model = task.build()
    params = jax.eval_shape(lambda: models.init(model, jax.random.key(0)))
    rows = jax.ShapeDtypeStruct((settings.batch, task.context), jnp.int32)
    batch = {"tokens_BT": rows, "targets_BT": rows}
    return count_flops(lambda p, b: loss_and_grads(model, p, b, jax.random.key(0))[:2], params,
                       batch)


def steps_of(settings: Settings, arm: str, budget: str) -> int:
    """Steps of an arm; under `flops` as many as the reference's operations buy."""
    if budget == "bytes":
        return settings.steps
    ratio = step_flops(settings, settings.reference) / step_flops(settings, arm)
    return max(1, round(settings.steps * ratio / CHUNKS)) * CHUNKS


def cells(settings: Settings) -> list[Cell]:
    """Every budget, tokenizer, learning rate and seed."""
    fields = ("text", "validation", "context_bytes", "batch", "steps", "scored", "layers",
              "d_model", "heads", "attention")
    own = {name: getattr(settings, name) for name in fields} | {
        "attention_code": source_hash(settings.attention)}
    texts = {budget: canonical(own | ({"reference": settings.reference} if budget == "flops"
                                      else {})) for budget in settings.budgets}
    return [Cell("tokenizers", "models", arm, (("budget", budget), ("lr", lr)), seed,
                 texts[budget])
            for budget in settings.budgets for arm in settings.arms for lr in settings.lrs
            for seed in range(settings.seeds)]


def group(cell: Cell) -> tuple[Any, ...]:
    """Cells that train as one program."""
    return cell.arm, cell.axis["budget"]


def run(settings: Settings, members: list[Cell], context: Context
        ) -> Iterator[tuple[Cell, Measured]]:
    """Train the cells of one tokenizer side by side, then score each."""
    arm, budget = members[0].arm, members[0].axis["budget"]
    found, task = settings.cut(arm), settings.task(arm, steps_of(settings, arm, budget))
    result = run_group(context, "models", settings.strategy,
                       _char_lm.program(task, task.steps // CHUNKS),
                       *_inputs(settings, task, found, members), CHUNKS,
                       progress=lambda done: context.advance(done / CHUNKS))
    q = shape(settings.batch, task.context, settings.heads, task.model.head_width)
    kernel = kernel_name(settings.attention, q, q, q, mask="causal")
    facts = _facts(settings, arm, task, found)
    for r, cell in enumerate(members):
        params = jax.tree.map(lambda x, r=r: jnp.asarray(x[r]), result.carries.params)
        metrics = facts | _score(task, params, found.test) | {
            "tuning": _score(task, params, found.tuning)["bpb"],
            "train_loss": float(np.asarray(result.records["loss"][r])[-1].mean())}
        yield cell, Measured(metrics, result.share(r), result.compile_seconds,
                             float(result.flops * CHUNKS), kernel, result.strategy,
                             "ok" if np.isfinite(metrics["bpb"]) else "diverged")


def _inputs(settings: Settings, task: _char_lm.Task, found: _tokens_text.Cut, members: list[Cell]
            ) -> tuple[dict[str, Any], dict[str, Any]]:
    """What differs between replicas, and what all read; equal seeds share keys."""
    seeds = sorted({cell.seed for cell in members})
    starts = [token_starts(len(found.train), task.context, settings.batch, task.steps, seed)
              for seed in seeds]
    replicas = replicas_of([(cell.seed, cell.axis["lr"]) for cell in members],
                           [seeds.index(cell.seed) for cell in members])
    return replicas, {"tokens": jnp.asarray(found.train, jnp.int32),
                      "starts": jnp.asarray(np.stack(starts))}


def _facts(settings: Settings, arm: str, task: _char_lm.Task, found: _tokens_text.Cut
           ) -> dict[str, Any]:
    """What a tokenizer is and costs, the same for every seed."""
    model = task.build()
    params = jax.eval_shape(lambda: models.init(model, jax.random.key(0)))
    unknown = found.tokenizer.unk_id
    row = settings.batch * task.context * found.bytes_per_token
    return {"vocabulary": task.vocab, "parameters": letters.count(params),
            "layers": letters.count(params, embedding=False), "context": task.context,
            "characters_per_token": found.test.characters / len(found.test.tokens),
            "unknown": 0.0 if unknown is None else float((found.test.tokens == unknown).mean()),
            "steps": task.steps, "flops_per_byte": step_flops(settings, arm) / row}


@partial(jax.jit, static_argnames="task")
def _nats(task: _char_lm.Task, params: Any, rows_RT: jax.Array, targets_RT: jax.Array
          ) -> jax.Array:
    logits_RTV, _ = models.apply(task.build(), params, rows_RT)
    return token_loss(logits_RTV, targets_RT)[0]


def _score(task: _char_lm.Task, params: Any, part: _tokens_text.Scored) -> dict[str, float]:
    """Bits per byte with unknown words spelled, and while they are free; perplexity of a token."""
    T, n = task.context, len(part.tokens) - 1
    rows = -(-n // T)
    rows += -rows % 8  # batches of eight rows
    inputs, targets = np.zeros(rows * T, np.int32), np.full(rows * T, -1, np.int32)
    inputs[:n], targets[:n] = part.tokens[:-1], part.tokens[1:]
    shape_ = (rows // 8, 8, T)
    nats = sum(float(_nats(task, params, jnp.asarray(x), jnp.asarray(y))) for x, y in
               zip(inputs.reshape(shape_), targets.reshape(shape_), strict=True))
    bits = np.log(2) * float(part.bytes_[1:].sum())
    return {"bpb": (nats + float(part.spelling[1:].sum())) / bits, "bpb_free": nats / bits,
            "perplexity": float(np.exp(nats / n))}


def data(settings: Settings) -> str:
    """Hash of the text."""
    return data_hash(_tokens_text.texts(settings.text, settings.validation)[2])


SMOKE = {"seeds": 2, "arms": ("char", "word(vocab=2000)"), "reference": "char", "lrs": (1e-2,),
         "steps": 10, "scored": 2000, "layers": 1, "d_model": 16, "heads": 2, "batch": 4,
         "strategy": "queue"}
SMALL = {"strategy": "queue"}
FULL = {"arms": ("char", "bpe(vocab=1024)", "bpe(vocab=4096)", "bpe(vocab=16384)",
                 "bpe(vocab=65536)", "word(vocab=50000)"), "reference": "bpe(vocab=16384)",
        "lrs": (3e-4, 1e-3, 3e-3), "context_bytes": 4096, "batch": 64, "steps": 20_000,
        "layers": 12, "d_model": 768, "heads": 12, "scored": 200_000}

STUDY = Study(
    name="tokenizers", title="Tokenizers", settings=Settings,
    presets={"smoke": SMOKE, "small": SMALL, "full": FULL}, cells=cells, run=run,
    report=lambda settings, rows: make_report(rows, settings.arms, settings.reference),
    group=group, data=data,
    files=tuple(Path(__file__).parent / name for name in
                ("tokenizers.py", "_tokens_text.py", "_char_lm.py")))
