"""Decoding against transformers' `generate()`: `python -m experiments.decoding_speed`.

Both sides hold the same small Llama with the same random weights (float32, the same cores),
continue the same prompts greedily and take turns, so that a busy machine slows both. The whole call
is timed, prompt included; the time of one more token comes from calls of two lengths. The peer is
optional and may live in another Python that has torch and transformers:
`--torch_python=/path/to/python`. Nothing is compared unless at least nine tokens of ten agree
between the sides; near-ties of random weights fall either way.
"""

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments._peer import Peer, cores, find_python
from tx_jax import decode, flags, models
from tx_jax.config import ModelConfig, check, option
from tx_jax.errors import UserError
from tx_jax.sampling import Sampling

GREEDY = Sampling(temperature=0)
# Near-ties of random weights may fall either way; what follows one differs altogether.
SAME = 0.9


@dataclasses.dataclass(frozen=True)
class Settings:
    """Shape of the model and length of the measurement; the default has 7.5 M parameters."""

    layers: int = option(4, "number of blocks L", low=1)
    d_model: int = option(256, "width D", low=1)
    heads: int = option(8, "query heads N", low=1)
    kv_heads: int = option(4, "key heads K", low=1)
    d_ff: int = option(688, "hidden width F", low=1)
    vocab: int = option(8192, "vocabulary V", low=2)
    batches: tuple[int, ...] = option((1, 16), "rows B", low=1)
    prompt: int = option(64, "tokens of every prompt", low=1)
    new_tokens: int = option(256, "tokens to add", low=2)
    contexts: tuple[int, ...] = option((128, 512, 2048), "prompts after which a step is timed, "
                                       "one row", low=1)
    rounds: int = option(5, "calls of each side", low=1)
    torch_python: str = option("", "Python that has torch and transformers; empty = this one")
    out: str = option("", "write the numbers to this JSON file")

    def __post_init__(self) -> None:
        check(self, "")


@dataclasses.dataclass
class Side:
    """One contestant: how it continues prompts by n tokens: (seconds, tokens)."""

    name: str
    run: Callable[[list[list[int]], int], tuple[float, list[list[int]]]]


def llama(s: Settings) -> models.DecoderLM:
    """The project's model in the shape of Llama."""
    cfg = ModelConfig(layers=s.layers, d_model=s.d_model, heads=s.heads, kv_heads=s.kv_heads,
                      d_ff=s.d_ff, mlp="swiglu", norm="rms", positions="rope",
                      embeddings="untied")
    longest = max(s.prompt + s.new_tokens, *(c + s.new_tokens for c in s.contexts))
    return models.build(cfg, s.vocab, longest)


def jax_side(model: models.DecoderLM, params: Any) -> Side:
    """The project's `generate`."""
    weights = decode.unstack(model, params)

    def run(prompts, new):
        began = time.perf_counter()
        out = decode.generate(model, weights, prompts, new, GREEDY)
        return time.perf_counter() - began, out.tolist()

    return Side(f"tx_jax, jax {jax.__version__}", run)


def torch_arrays(s: Settings, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The parameters under the names and in the layout of transformers: [outputs, inputs]."""
    arrays = {"model.embed_tokens.weight": params["embed_VD"],
              "model.norm.weight": params["final_norm"]["gain_D"],
              "lm_head.weight": params["head_DV"].T}
    for layer in range(s.layers):
        block = jax.tree.map(lambda x, layer=layer: np.asarray(x[layer]), params["blocks"])
        w, mlp, to = block["attention"], block["mlp"], f"model.layers.{layer}."
        arrays |= {f"{to}self_attn.{theirs}_proj.weight": w[ours].reshape(s.d_model, -1).T
                   for theirs, ours in (("q", "q_DNH"), ("k", "k_DKH"), ("v", "v_DKH"))}
        arrays |= {f"{to}self_attn.o_proj.weight": w["o_NHD"].reshape(-1, s.d_model).T,
                   f"{to}mlp.gate_proj.weight": mlp["gate_DF"].T,
                   f"{to}mlp.up_proj.weight": mlp["up_DF"].T,
                   f"{to}mlp.down_proj.weight": mlp["down_FD"].T,
                   f"{to}input_layernorm.weight": block["attention_norm"]["gain_D"],
                   f"{to}post_attention_layernorm.weight": block["mlp_norm"]["gain_D"]}
    return {name: np.ascontiguousarray(x, np.float32) for name, x in arrays.items()}


def torch_side(s: Settings, python: str, folder: str, params: dict[str, Any], longest: int
               ) -> tuple[Side, Peer]:
    """The peer and the process that it runs in."""
    path = os.path.join(folder, "arrays.npz")
    np.savez(path, **torch_arrays(s, params))
    config = {"vocab_size": s.vocab, "hidden_size": s.d_model, "intermediate_size": s.d_ff,
              "num_hidden_layers": s.layers, "num_attention_heads": s.heads,
              "num_key_value_heads": s.kv_heads, "max_position_embeddings": longest,
              "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
    peer = Peer(python, "_torch_llama.py", {"threads": cores(), "arrays": path, "config": config})

    def run(prompts, new):
        answer = peer.ask(json.dumps({"prompts": prompts, "new": new}))
        return answer["seconds"], answer["tokens"]

    return Side(peer.ready["version"], run), peer


def compare(sides: list[Side], prompts: list[list[int]], new: int, rounds: int
            ) -> list[list[float]]:
    """Seconds of each side in each round, after one call that compiles and is compared.

    Raises:
      UserError: the sides give different tokens.
    """
    tokens = [np.asarray(side.run(prompts, new)[1]) for side in sides]
    for other in tokens[1:]:
        same = float((other == tokens[0]).mean())
        if same < SAME:
            raise UserError(f"only {same:.0%} of the tokens agree between the sides, so they do "
                            "not run the same model; nothing was timed.")
    seconds: list[list[float]] = [[] for _ in sides]
    for r in range(rounds):
        order = range(len(sides)) if r % 2 else reversed(range(len(sides)))
        for i in order:
            seconds[i].append(sides[i].run(prompts, new)[0])
    return seconds


def measure(s: Settings) -> dict[str, Any]:
    """Time every case; the numbers as a dict ready for JSON."""
    python = find_python(s.torch_python)
    model = llama(s)
    params = models.init(model, jax.random.key(0))
    # Away from the tiny start of embeddings, whose likeliest token is often a near-tie.
    params["embed_VD"] = params["embed_VD"] * 50
    draw = np.random.default_rng(0).integers
    sides, found = [jax_side(model, params)], {"calls": [], "steps": []}
    with contextlib.ExitStack() as stack:
        if python is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            side, peer = torch_side(s, python, folder, params, model.context)
            stack.callback(peer.close)
            sides.append(side)
        for batch in s.batches:
            prompts = draw(0, s.vocab, (batch, s.prompt)).tolist()
            seconds = compare(sides, prompts, s.new_tokens, s.rounds)
            found["calls"].append({"batch": batch, "seconds": seconds})
        for context in s.contexts:
            prompts = draw(0, s.vocab, (1, context)).tolist()
            short, long = (compare(sides, prompts, n, s.rounds) for n in (2, s.new_tokens))
            steps = [[(b - a) / (s.new_tokens - 2) for a, b in zip(x, y, strict=True)]
                     for x, y in zip(short, long, strict=True)]
            found["steps"].append({"context": context, "seconds": steps})
    return found | {"sides": [side.name for side in sides], "settings": dataclasses.asdict(s),
                    "cores": cores(), "device": jax.default_backend(), "jax": jax.__version__}


def show(found: dict[str, Any], console: Console) -> None:
    """Print the two tables."""
    s = found["settings"]
    shape = (f"L={s['layers']} D={s['d_model']} N={s['heads']} K={s['kv_heads']} F={s['d_ff']} "
             f"V={s['vocab']}, float32, {found['cores']} cores")
    calls = Table(title=f"generate(): {s['prompt']} + {s['new_tokens']} tokens; {shape}")
    steps = Table(title="one more token after a context, one row")
    for table, first, unit in ((calls, "rows", "tokens/s"), (steps, "context", "ms per token")):
        for column in (first, *(f"{side}: {unit}" for side in found["sides"]), "ratio [min..max]"):
            table.add_column(column)
    for case in found["calls"]:
        count = case["batch"] * s["new_tokens"]
        calls.add_row(str(case["batch"]), *(f"{count / statistics.median(t):,.0f}"
                                            for t in case["seconds"]), _ratio(case["seconds"]))
    for case in found["steps"]:
        steps.add_row(str(case["context"]), *(f"{1e3 * statistics.median(t):.2f}"
                                              for t in case["seconds"]), _ratio(case["seconds"]))
    console.print(calls)
    console.print(steps)
    if len(found["sides"]) < 2:
        console.print("This Python has no torch, so nothing is compared; give "
                      "--torch_python=/path/to/python of one that has torch and transformers.")


def _ratio(seconds: list[list[float]]) -> str:
    if len(seconds) < 2:
        return "–"
    ratios = [theirs / ours for ours, theirs in zip(*seconds, strict=True)]
    return f"{statistics.median(ratios):.1f}x [{min(ratios):.1f}..{max(ratios):.1f}]"


def main(argv: list[str]) -> None:
    """Parse flags, measure, print, write."""
    settings = Settings()
    settings = flags.replace(settings, flags.parse(argv, settings, {}))
    if settings.out and not Path(settings.out).absolute().parent.is_dir():
        raise UserError(f"--out={settings.out} is in a folder that does not exist; create it.")
    found = measure(settings)
    show(found, Console())
    if settings.out:
        Path(settings.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
