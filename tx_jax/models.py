"""The decoder-only Transformer: a Flax module that holds parameters, and how to build and run it.

How a batch becomes logits, in order: `DecoderLM` embeds tokens and adds positions, `blocks.stack`
scans `Block` over the layers, each block runs `Attention` and `MLP` on the residual stream, and the
output head gives logits in float32.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from tx_jax import layers
from tx_jax.blocks import context_of, run_stack, shared_positions
from tx_jax.config import ModelConfig
from tx_jax.errors import UserError
from tx_jax.letters import ein, place, shape_of, sizes
from tx_jax.masks import Mask, parse_mask
from tx_jax.positions import Encoding, make_encoding


class DecoderLM(nn.Module):
    """Decoder-only language model; build it with `build`, run it with `apply`.

    Attributes:
      cross: positions of the attention over an encoder's output, for the decoder of an
        encoder-decoder (`seq2seq`); None = decoder only.
    """

    cfg: ModelConfig
    vocab: int
    context: int
    cross: Encoding | None = None

    @nn.compact
    def __call__(self, tokens_BT, segments_BT=None, positions_BT=None, dropout_key=None,
                 scale=None, trace=False, prefix_B=None, cross=None):
        cfg = self.cfg
        size = nn.FrozenDict(sizes(cfg, self.vocab, self.context))
        encoding = make_encoding(cfg.positions)
        if positions_BT is None:
            positions_BT = default_positions(tokens_BT, segments_BT)
        embed_VD = self.param("embed_VD", nn.initializers.normal(0.02), shape_of("embed_VD", size),
                              jnp.float32)
        shared = shared_positions(self, encoding, size)
        x_BTD = embed(cfg, encoding, embed_VD, shared, tokens_BT, positions_BT)
        mask = Mask(parse_mask(cfg.mask), segments_BT, segments_BT, prefix_B)
        x_BTD, aux = run_stack(
            cfg, size, encoding, x_BTD,
            context_of(mask, positions_BT, shared, scale=scale, cross=cross), dropout_key, trace,
            self.cross)
        if cfg.embeddings == "tied":
            return ein("BTD,VD->BTV", x_BTD, embed_VD).astype(jnp.float32), aux
        head_DV = self.param("head_DV", layers.fan_in_init("head_DV", size))
        return ein("BTD,DV->BTV", x_BTD, head_DV).astype(jnp.float32), aux


def default_positions(tokens_BT: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
    """Positions 0, 1, ... of every row, restarting with each segment, int32 [B, T]."""
    if segments_BT is not None:
        return layers.positions_of(segments_BT)
    return jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None], tokens_BT.shape)


def embed(cfg: ModelConfig, encoding: Encoding, embed_VD: jax.Array, encoding_params: Any,
          tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """Tokens as vectors [B, T, D], with their positions where the scheme puts them there."""
    # Gathering in fill mode turns a token outside the vocabulary into NaN, never another token; a
    # negative one would count from the end.
    tokens_BT = jnp.where(tokens_BT < 0, embed_VD.shape[0], tokens_BT)
    x_BTD = embed_VD.at[tokens_BT].get(mode="fill", fill_value=jnp.nan)
    if cfg.embedding_scale == "sqrt_d":
        x_BTD = x_BTD * cfg.d_model**0.5
    x_BTD = place("BTD", x_BTD.astype(cfg.dtype))
    return encoding.embed(encoding_params, x_BTD, positions_BT)


def build(cfg: ModelConfig, vocab: int, context: int) -> DecoderLM:
    """The model of a configuration.

    Args:
      vocab: V, number of tokens.
      context: T, the longest sequence it is built for; sizes learned position tables.

    Raises:
      UserError: an unknown name or an impossible combination, before anything is compiled.
    """
    model = DecoderLM(cfg, vocab, context)
    jax.eval_shape(lambda: init(model, jax.random.key(0)))
    return model


def init(model: DecoderLM, key: jax.Array) -> dict[str, Any]:
    """Parameters as a nested dict of float32 arrays; layers are stacked on a leading axis L."""
    tokens_BT = jnp.zeros((1, min(2, model.context)), jnp.int32)
    return model.init(key, tokens_BT)["params"]


def apply(model: DecoderLM, params: dict[str, Any], tokens_BT: jax.Array, *,
          segments_BT: jax.Array | None = None, positions_BT: jax.Array | None = None,
          dropout_key: jax.Array | None = None, scale: jax.Array | float | None = None,
          trace: bool | str = False, prefix_B: jax.Array | None = None
          ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Logits of a batch; without a prefix `decode.extend` gives them a few tokens at a time.

    Args:
      tokens_BT: int32 token ids; an id outside the vocabulary gives NaN logits.
      segments_BT: int32 document numbers from 1, 0 = padding; attention stays inside a segment.
      positions_BT: int32 positions; by default they restart with each segment.
      dropout_key: PRNG key; None turns dropout off.
      scale: overrides `cfg.scale` by a number, which may be traced.
      trace: True also returns attention statistics of every layer, "weights" the attention
        weights, weights_BNTS.
      prefix_B: int32, how many first tokens of each row all tokens see besides those of the mask: a
        prefix language model (Raffel et al. 2020, 3.2.1).

    Returns:
      (logits_BTV float32, aux): aux is empty, or holds arrays with leading axis L.

    Raises:
      UserError: options contradict each other.
    """
    if trace not in (False, True, "weights"):
        raise UserError(f"trace={trace!r} is unknown; give False, True or 'weights'.")
    if model.cross is not None:
        raise UserError("the decoder of an encoder-decoder reads a source; use seq2seq.apply.")
    prefix = {} if prefix_B is None else {"prefix_B": prefix_B}
    return model.apply({"params": params}, tokens_BT, segments_BT, positions_BT, dropout_key, scale,
                       trace, **prefix)
