"""Sequence tasks for pairs of a source and a target, drawn inside the compiled program.

  copy     y_i = x_i
  reverse  y_i = x_(n-1-i)
  sort     the symbols of x in order
  shift    y_i = x_i + x_(n-1) modulo the symbols: every output needs the last token of the source,
           which a causal reader meets only after it has read all others

A row holds n symbols on each side. Which tokens a model sees is the same in every shape; a decoder
alone reads source, BEGIN and target in one row.
"""

import jax
import jax.numpy as jnp

from tx_jax import forms
from tx_jax.forms import Model
from tx_jax.seq2seq import EncoderDecoder
from tx_jax.train import Batch

TASKS = {
    "copy": lambda x_BS, symbols: x_BS,
    "reverse": lambda x_BS, symbols: x_BS[:, ::-1],
    "sort": lambda x_BS, symbols: jnp.sort(x_BS, axis=1),
    "shift": lambda x_BS, symbols: (x_BS + x_BS[:, -1:]) % symbols,
}


def draw(task: str, key: jax.Array, rows: int, length: int, symbols: int
         ) -> tuple[jax.Array, jax.Array]:
    """Sources and targets, int32 [rows, length], symbols 0 and up."""
    x_BS = jax.random.randint(key, (rows, length), 0, symbols, jnp.int32)
    return x_BS, TASKS[task](x_BS, symbols)


def make_batch(model: Model, prefix: bool, x_BS: jax.Array, y_BT: jax.Array, begin: int) -> Batch:
    """What a model reads and has to say; only the target has targets.

    Args:
      prefix: of a decoder alone: all tokens see the whole source.
      begin: the token that opens a target.
    """
    begin_B1 = jnp.full((x_BS.shape[0], 1), begin, jnp.int32)
    inputs_BT = jnp.concatenate([begin_B1, y_BT[:, :-1]], axis=1)
    if isinstance(model, EncoderDecoder):
        return {"source_BS": x_BS, "tokens_BT": inputs_BT, "targets_BT": y_BT}
    batch = {"tokens_BT": jnp.concatenate([x_BS, inputs_BT], axis=1),
             "targets_BT": jnp.concatenate([jnp.full_like(x_BS, -1), y_BT], axis=1)}
    lengths_B = jnp.full((x_BS.shape[0],), x_BS.shape[1], jnp.int32)
    return batch | ({"prefix_B": lengths_B} if prefix else {})


def exact(model: Model, params: dict, batch: Batch) -> jax.Array:
    """Rows that greedy decoding would answer without a mistake, bool [B].

    Free-running decoding follows the right targets up to its first mistake, so one pass over them
    decides it.
    """
    found_BT = jnp.argmax(forms.logits(model, params, batch), axis=-1)
    return jnp.all((found_BT == batch["targets_BT"]) | (batch["targets_BT"] < 0), axis=-1)
