"""Training throughput against plain eager PyTorch: `python -m experiments.throughput`.

Both sides train the same GPT (same shape, parameters, batches, optimizer; float32) on the same
cores and take turns in blocks of steps, so that a busy machine slows both. Torch is optional and
may live in another Python: `--torch_python=/path/to/python`. Nothing is compared unless parameter
counts are equal and the two losses agree after every block.
"""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from experiments._peer import Peer, cores, find_python
from tx_jax import flags, letters, models, train
from tx_jax.config import ModelConfig, OptimConfig, check, option
from tx_jax.errors import UserError

APPROXIMATE = {"gelu_exact": "none", "gelu": "tanh"}
BATCHES = 16  # distinct batches, used in turn
OPTIM = OptimConfig(lr=1e-3, schedule="constant", warmup=0.0)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Shape of the model and length of the measurement; the default has 3.7 M parameters."""

    layers: int = option(4, "number of blocks L", low=1)
    d_model: int = option(256, "width D", low=1)
    heads: int = option(4, "heads N", low=1)
    mlp: str = option("gelu_exact", "non-linearity", choices=tuple(APPROXIMATE))
    vocab: int = option(2048, "vocabulary V", low=2)
    context: int = option(256, "tokens per row T", low=1)
    batch: int = option(8, "rows per step B", low=1)
    attention: str = option("auto", "attention implementation of the JAX side")
    scan: bool = option(False, "scan over layers on the JAX side")
    steps: int = option(4, "steps per block", low=1)
    rounds: int = option(9, "blocks of each side", low=1)
    onednn: bool = option(False, "let XLA call oneDNN for matrix products (x86 CPU only)")
    torch_python: str = option("", "Python that has torch; empty = this one")
    out: str = option("", "write the numbers to this JSON file")

    def __post_init__(self) -> None:
        check(self, "")


@dataclasses.dataclass
class Side:
    """One contestant: how it runs a block, and what its blocks gave."""

    name: str
    version: str
    parameters: int
    run: Any  # steps -> (seconds, last loss)
    seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)

    def block(self, steps: int) -> None:
        seconds, loss = self.run(steps)
        self.seconds.append(seconds)
        self.losses.append(loss)


def model_config(s: Settings) -> ModelConfig:
    """The project's model in nanoGPT's shape."""
    return ModelConfig(layers=s.layers, d_model=s.d_model, heads=s.heads, mlp=s.mlp, norm="layer",
                       positions="learned", attention=s.attention, scan=s.scan)


def make_batches(s: Settings) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and next-token targets, int32 [BATCHES, B, T]; frequencies fall as in text (Zipf)."""
    weights_V = 1.0 / np.arange(1, s.vocab + 1)
    stream = np.random.default_rng(0).choice(
        s.vocab, (BATCHES, s.batch, s.context + 1), p=weights_V / weights_V.sum())
    return stream[..., :-1].astype(np.int32), stream[..., 1:].astype(np.int32)


def jax_side(s: Settings, state: train.TrainState, model: models.DecoderLM,
             tokens: np.ndarray, targets: np.ndarray) -> Side:
    """The project's `train_step`, jitted, its state donated."""
    # XLA's own products that contract over tokens (gradients of weights) are 1.5x slower.
    choice = {"xla_cpu_experimental_onednn_custom_call": True} if s.onednn else None
    step = jax.jit(train.train_step, static_argnums=(0, 1, 2), donate_argnums=3,
                   compiler_options=choice)
    batches = [{"tokens_BT": jax.device_put(x), "targets_BT": jax.device_put(y)}
               for x, y in zip(tokens, targets, strict=True)]
    held, done = state, 0

    def run(steps: int) -> tuple[float, float]:
        nonlocal held, done
        start = time.perf_counter()
        for _ in range(steps):
            held, metrics = step(model, OPTIM, 1, held, batches[done % BATCHES])
            done += 1
        loss = float(metrics["loss"])
        return time.perf_counter() - start, loss

    return Side("tx_jax", f"jax {jax.__version__}", letters.count(state.params), run)


def torch_arrays(s: Settings, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The parameters under the names and in the layout of `_torch_gpt.GPT`: [outputs, inputs]."""
    arrays = {"embed.weight": params["embed_VD"],
              "positions.weight": params["positions"]["table_TD"],
              "final_norm.weight": params["final_norm"]["gain_D"],
              "final_norm.bias": params["final_norm"]["bias_D"]}
    for layer in range(s.layers):
        block = jax.tree.map(lambda x, layer=layer: np.asarray(x[layer]), params["blocks"])
        w, to = block["attention"], f"blocks.{layer}."
        qkv = [w[name].reshape(s.d_model, -1).T for name in ("q_DNH", "k_DKH", "v_DKH")]
        arrays |= {to + "qkv.weight": np.concatenate(qkv),
                   to + "out.weight": w["o_NHD"].reshape(-1, s.d_model).T,
                   to + "up.weight": block["mlp"]["up_DF"].T,
                   to + "down.weight": block["mlp"]["down_FD"].T}
        for norm in ("attention_norm", "mlp_norm"):
            arrays |= {f"{to}{norm}.weight": block[norm]["gain_D"],
                       f"{to}{norm}.bias": block[norm]["bias_D"]}
    return {name: np.ascontiguousarray(x) for name, x in arrays.items()}


def torch_side(s: Settings, python: str, folder: str, params: dict[str, Any],
               tokens: np.ndarray, targets: np.ndarray) -> tuple[Side, Peer]:
    """The torch side and the process that it runs in."""
    path = os.path.join(folder, "arrays.npz")
    np.savez(path, tokens=tokens, targets=targets, **torch_arrays(s, params))
    shape = {"vocab": s.vocab, "context": s.context, "layers": s.layers, "width": s.d_model,
             "heads": s.heads, "hidden": model_config(s).hidden,
             "approximate": APPROXIMATE[s.mlp]}
    optim = {"lr": OPTIM.lr, "betas": (OPTIM.b1, OPTIM.b2), "eps": OPTIM.eps,
             "decay": OPTIM.weight_decay, "clip": OPTIM.clip}
    peer = Peer(python, "_torch_gpt.py", {"threads": cores(), "arrays": path, "shape": shape,
                                          "optim": optim})

    def run(steps: int) -> tuple[float, float]:
        answer = peer.ask(steps)
        return answer["seconds"], answer["loss"]

    return Side("torch eager", f"torch {peer.ready['version']}", peer.ready["parameters"],
                run), peer


def measure(s: Settings) -> list[Side]:
    """Run both sides in turns; each block's order is the reverse of the one before.

    Raises:
      UserError: parameter counts or losses of the two sides differ: not the same model.
    """
    python = find_python(s.torch_python)
    tokens, targets = make_batches(s)
    model = models.build(model_config(s), s.vocab, s.context)
    state = train.init_state(model, OPTIM, jax.random.key(0))
    sides = [jax_side(s, state, model, tokens, targets)]
    with contextlib.ExitStack() as stack:
        if python is not None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            side, peer = torch_side(s, python, folder, state.params, tokens, targets)
            stack.callback(peer.close)
            sides.append(side)
        if len({side.parameters for side in sides}) > 1:
            raise UserError("the two sides have different parameter counts: "
                            f"{[side.parameters for side in sides]}.")
        for round_ in range(-1, s.rounds):  # the first round compiles and warms up
            for side in sides if round_ % 2 else sides[::-1]:
                side.block(s.steps)
            losses = [side.losses[-1] for side in sides]
            if not max(losses) - min(losses) < 2e-2 * max(losses):
                raise UserError(f"the losses of the two sides differ in round {round_}: {losses}.")
    for side in sides:
        del side.seconds[0]
    return sides


def summary(s: Settings, sides: list[Side]) -> dict[str, Any]:
    """What was measured, ready for JSON; `ratio` is the median over rounds, with its range."""
    tokens = s.steps * s.batch * s.context
    rows = [{"side": side.name, "version": side.version, "parameters": side.parameters,
             "tokens_per_second": [tokens / t for t in side.seconds], "losses": side.losses}
            for side in sides]
    found = {"settings": dataclasses.asdict(s), "cores": cores(), "device": jax.default_backend(),
             "jaxlib": importlib.metadata.version("jaxlib"), "sides": rows}
    if len(sides) == 2:
        ratios = [b / a for a, b in zip(*(side.seconds for side in sides), strict=True)]
        found["ratio"] = {"median": statistics.median(ratios), "low": min(ratios),
                          "high": max(ratios)}
    return found


def show(found: dict[str, Any], console: Console) -> None:
    """Print the table."""
    s = found["settings"]
    table = Table(title=f"Training, float32, {found['cores']} cores: L={s['layers']} "
                        f"D={s['d_model']} N={s['heads']} T={s['context']} V={s['vocab']} "
                        f"B={s['batch']}; {s['rounds']} blocks of {s['steps']} steps in turns")
    for column in ("side", "version", "parameters", "tokens/s [min..max]", "loss"):
        table.add_column(column)
    for row in found["sides"]:
        speed, losses = row["tokens_per_second"], row["losses"]
        table.add_row(row["side"], row["version"], f"{row['parameters']:,}",
                      f"{statistics.median(speed):,.0f} [{min(speed):,.0f}..{max(speed):,.0f}]",
                      f"{losses[0]:.3f} -> {losses[-1]:.3f}")
    console.print(table)
    if "ratio" in found:
        ratio = found["ratio"]
        console.print(f"tx_jax / torch eager = {ratio['median']:.2f}x "
                      f"[{ratio['low']:.2f}..{ratio['high']:.2f}] tokens/s")
    else:
        console.print("This Python has no torch, so nothing is compared; "
                      "give --torch_python=/path/to/python of one that has.")


def main(argv: list[str]) -> None:
    """Parse flags, measure, print, write."""
    settings = Settings()
    settings = flags.replace(settings, flags.parse(argv, settings, {}))
    if settings.out and not Path(settings.out).absolute().parent.is_dir():
        raise UserError(f"--out={settings.out} is in a folder that does not exist; create it.")
    found = summary(settings, measure(settings))
    show(found, Console())
    if settings.out:
        Path(settings.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
