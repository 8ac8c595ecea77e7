"""Equal budgets for unequal shapes: parameters, operations, and the depth that matches either.

An encoder-decoder of L + L layers and a decoder alone cannot be equal in both: without biases and
with F = 4 D, the former has 28 L D^2 weights and the latter 12 L D^2, so that 7 L / 3 layers have
as many; but every token passes all of a decoder and half of the pair, so that 7 L / 6 layers take
as many operations where source and target are equally long.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tx_jax import forms, letters
from tx_jax.errors import UserError
from tx_jax.forms import Model
from tx_jax.seq2seq import EncoderDecoder
from tx_jax.study.flops import count_flops


@dataclass(frozen=True)
class Budget:
    """What a model costs on pairs of a source and a target.

    Attributes:
      parameters: all of them; layers: those without the vocabulary in their shape, learned tables
        of positions among them.
      forward: operations of one pair up to the logits, two for a product and its sum, counted from
        the program.
      training: the same with the gradient; the loss and the optimizer come on top.
    """

    parameters: int
    layers: int
    forward: int
    training: int


@functools.cache  # tracing a model and its gradient takes a second
def measure(model: Model, source: int, target: int) -> Budget:
    """The budget of a model on pairs of `source` and `target` tokens; nothing is run and no
    device started."""
    params = jax.eval_shape(lambda: forms.init(model, jax.random.key(0)))
    pair = isinstance(model, EncoderDecoder)
    lengths = {"source_BS": source, "tokens_BT": target} if pair else {
        "tokens_BT": source + target}
    batch = {name: jax.ShapeDtypeStruct((1, n), jnp.int32) for name, n in lengths.items()}

    def total(params, batch):
        return jnp.sum(forms.logits(model, params, batch)[:, -target:])

    return Budget(letters.count(params), letters.count(params, embedding=False),
                  count_flops(total, params, batch), count_flops(jax.grad(total), params, batch))


def closed_parameters(layers: int, width: int, hidden: int, *, cross: bool = False) -> int:
    """Weights of so many layers without norms: 4 D^2 for each attention and 2 D F."""
    return layers * ((8 if cross else 4) * width**2 + 2 * width * hidden)


def closed_flops(width: int, hidden: int, *, decoder: int, source: int, target: int,
                 encoder: int | None = None) -> int:
    """Operations of the layers' products in one forward pass, the masked half of scores included.

    A decoder alone reads source and target in one row; with `encoder` layers the source is theirs.
    """
    def layer(tokens: int, keys: int) -> int:
        return 8 * tokens * width**2 + 4 * tokens * width * hidden + 4 * width * tokens * keys

    if encoder is None:
        return decoder * layer(source + target, source + target)
    cross = 4 * (source + target) * width**2 + 4 * width * target * source
    return encoder * layer(source, source) + decoder * (layer(target, target) + cross)


def match(make: Callable[[int], Model], count: Callable[[Budget], int], goal: int, source: int,
          target: int, most: int = 64) -> int:
    """The depth at which `count` of the model `make(depth)` comes nearest to `goal`.

    Raises:
      UserError: not even `most` layers reach it.
    """
    below = None
    for layers in range(1, most + 1):
        found = count(measure(make(layers), source, target))
        if found >= goal:
            return layers if below is None or found - goal <= goal - below else layers - 1
        below = found
    raise UserError(f"{most} layers come to {below}, less than the {goal} to be matched; make "
                    "the model wider.")
