"""The encoder-decoder: every layer of a decoder reads an encoder's output (Vaswani et al. 2017).

The decoder is a `DecoderLM` whose blocks have a second attention, over the output of the encoder.
Its parameters have the names of a `DecoderLM`, so that `tx_jax.decode` decodes with a cache; those
of the encoder stand beside them under "encoder".
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from tx_jax import layers, models
from tx_jax.blocks import (
    context_of,
    keys_and_values,
    run_stack,
    shared_positions,
    split_keys,
)
from tx_jax.config import EncoderConfig, ModelConfig
from tx_jax.errors import UserError
from tx_jax.letters import shape_of, sizes
from tx_jax.masks import Mask, parse_mask
from tx_jax.positions import Encoding, make_encoding

# What an encoder takes from the decoder when they share weights.
_SHARED = ("attention", "attention_norm", "attention_norm_out", "mlp", "mlp_norm", "mlp_norm_out")


class Encoder(nn.Module):
    """Embeds the source and runs the layers; `cfg` has the encoder's own depth, mask, positions."""

    cfg: ModelConfig
    vocab: int
    context: int

    @nn.compact
    def __call__(self, tokens_BS, segments_BS=None, dropout_key=None, embed_VD=None):
        """The output [B, S, D]; without `embed_VD` the encoder has a table of its own."""
        cfg, encoding = self.cfg, make_encoding(self.cfg.positions)
        size = nn.FrozenDict(sizes(cfg, self.vocab, self.context))
        if embed_VD is None:
            embed_VD = self.param("embed_VD", nn.initializers.normal(0.02),
                                  shape_of("embed_VD", size), jnp.float32)
        shared = shared_positions(self, encoding, size)
        positions_BS = models.default_positions(tokens_BS, segments_BS)
        x_BSD = models.embed(cfg, encoding, embed_VD, shared, tokens_BS, positions_BS)
        mask = Mask(parse_mask(cfg.mask), segments_BS, segments_BS)
        return run_stack(cfg, size, encoding, x_BSD, context_of(mask, positions_BS, shared),
                         dropout_key)[0]


@dataclass(frozen=True)
class EncoderDecoder:
    """Build it with `build`, run it with `apply`; decode through `decoder` and `read`."""

    decoder: models.DecoderLM
    encoder: Encoder
    options: EncoderConfig

    @property
    def cfg(self) -> ModelConfig:
        """That of the decoder."""
        return self.decoder.cfg


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Memory:
    """A source as the decoder's layers meet it.

    Attributes:
      x_BSD: output of the encoder, for a pass over whole targets; or
      held: keys and values [B, S, K, H] of every layer, made once for all steps of decoding.
      segments_BS: int32, 0 = padding; None = none.
      params: of the positions of the attention over it.
    """

    x_BSD: jax.Array | None
    held: tuple[tuple[jax.Array, jax.Array], ...] | None
    segments_BS: jax.Array | None
    params: Any
    mask: str = dataclasses.field(metadata={"static": True})

    def context(self, positions_BT: jax.Array, segments_BT: jax.Array | None) -> dict[str, Any]:
        """What the attention over the source shares between layers; see `blocks.Block`."""
        S = (self.held[0][0] if self.x_BSD is None else self.x_BSD).shape[1]
        k_positions = jnp.arange(S, dtype=jnp.int32)[None]
        # One length for both sides, in schemes whose formula follows it: that of the source.
        length_B = jnp.full(positions_BT.shape[:1], S, jnp.int32)
        if segments_BT is not None and self.mask != "full":
            raise UserError(f"--encoder.cross_mask={self.mask} counts from the start of a row, "
                            "where several pairs lie in one; use full, or a pair a row.")
        segments_BS = self.segments_BS
        if segments_BS is not None:
            k_positions = layers.positions_of(segments_BS)
            length_B = jnp.sum(segments_BS != 0, axis=1, dtype=jnp.int32)
            if segments_BT is None:
                segments_BT = jnp.ones_like(positions_BT)
        elif segments_BT is not None:
            segments_BS = jnp.ones((positions_BT.shape[0], S), jnp.int32)
        mask = Mask(parse_mask(self.mask), segments_BT, segments_BS)
        return context_of(mask, positions_BT, self.params, k_positions=k_positions,
                          length=length_B, start=positions_BT[:, 0], memory=self.x_BSD)


def build(cfg: ModelConfig, options: EncoderConfig, vocab: int, context: int) -> EncoderDecoder:
    """The model of a configuration.

    Args:
      cfg: the decoder, and the encoder but for what `options` say.
      vocab: V of source and target together.
      context: the longest source or target; sizes learned position tables.

    Raises:
      UserError: an unknown name or an impossible combination, before anything is compiled.
    """
    if options.weights == "shared" and options.layers not in (0, cfg.layers):
        raise UserError(f"--encoder.weights=shared needs as many layers on both sides, not "
                        f"--encoder.layers={options.layers} and --model.layers={cfg.layers}; "
                        "leave --encoder.layers out.")
    own = dataclasses.replace(cfg, layers=options.layers or cfg.layers, mask=options.mask,
                              positions=options.positions or _both_ways(cfg.positions))
    cross = make_encoding(options.cross_positions)
    if type(cross).embed is not Encoding.embed:
        raise UserError(f"--encoder.cross_positions={options.cross_positions} adds positions to "
                        "embeddings, of which an attention over the source has none of its own; "
                        "use none, rope, alibi or another scheme of queries, keys or logits.")
    sides = [make_encoding(name) for name in (cfg.positions, own.positions)]
    if options.weights == "shared" and any(e.per_layer for e in sides) and sides[0] != sides[1]:
        raise UserError(f"--encoder.weights=shared needs the same positions on both sides where "
                        f"layers hold their own, not {cfg.positions} and {own.positions}; leave "
                        "--encoder.positions out.")
    model = EncoderDecoder(models.DecoderLM(cfg, vocab, context, cross),
                           Encoder(own, vocab, context), options)
    tokens_11 = jnp.zeros((1, 1), jnp.int32)
    jax.eval_shape(lambda t: apply(model, init(model, jax.random.key(0)), t, t), tokens_11)
    return model


def _both_ways(positions: str) -> str:
    """The scheme for an encoder, whose keys may stand behind the query: T5's buckets differ."""
    name, _, inside = positions.partition("(")
    if name.strip() != "t5" or "bidirectional" in inside:
        return positions
    inside = inside.strip().removesuffix(")")
    return f"t5({inside}{', ' if inside else ''}bidirectional=True)"


def init(model: EncoderDecoder, key: jax.Array) -> dict[str, Any]:
    """Parameters: those of a `DecoderLM`, "encoder" and, if learned, "cross_positions"."""
    decoder_key, encoder_key, cross_key = jax.random.split(key, 3)
    cfg, decoder, tokens_11 = model.cfg, model.decoder, jnp.zeros((1, 1), jnp.int32)
    size = sizes(cfg, decoder.vocab, decoder.context)
    cross = decoder.cross.init(cross_key, size) if not decoder.cross.per_layer else {}
    table = None if model.options.embeddings == "own" else jnp.zeros((decoder.vocab, cfg.d_model))
    encoder = dict(model.encoder.init(encoder_key, tokens_11, embed_VD=table)["params"])
    memory = Memory(jnp.zeros((1, 1, cfg.d_model), cfg.dtype), None, None, cross,
                    model.options.cross_mask)
    positions_11 = jnp.zeros((1, 1), jnp.int32)
    params = dict(decoder.init(decoder_key, tokens_11,
                               cross=memory.context(positions_11, None))["params"])
    if model.options.weights == "shared":
        del encoder["blocks"]
    return params | ({"encoder": encoder} if encoder else {}) | (
        {"cross_positions": cross} if cross else {})


def encode(model: EncoderDecoder, params: dict[str, Any], source_BS: jax.Array,
           segments_BS: jax.Array | None = None, *, dropout_key: jax.Array | None = None
           ) -> Memory:
    """The source as the decoder reads it, before the keys of its layers.

    Args:
      source_BS: int32 tokens.
      segments_BS: int32 document numbers from 1, 0 = padding.
    """
    own = dict(params.get("encoder", {}))
    if model.options.weights == "shared":
        own["blocks"] = {name: x for name, x in params["blocks"].items() if name in _SHARED}
    table = None if model.options.embeddings == "own" else params["embed_VD"]
    x_BSD = model.encoder.apply({"params": own}, source_BS, segments_BS, dropout_key, table)
    return Memory(x_BSD, None, segments_BS, params.get("cross_positions", {}),
                  model.options.cross_mask)


def apply(model: EncoderDecoder, params: dict[str, Any], source_BS: jax.Array,
          target_BT: jax.Array, *, source_segments_BS: jax.Array | None = None,
          target_segments_BT: jax.Array | None = None, dropout_key: jax.Array | None = None,
          scale: jax.Array | float | None = None) -> jax.Array:
    """Logits [B, T, V], float32, of the token after each of the target.

    Args:
      source_BS, target_BT: int32 tokens; a target begins with the token that opens every target.
      source_segments_BS: int32 document numbers from 1, 0 = padding.
      target_segments_BT: the same; a target reads the source of its number. By default all are 1.
        Only under the cross mask "full".
      dropout_key: PRNG key; None turns dropout off.
      scale: overrides `cfg.scale` in the decoder's own attention.
    """
    encoder_key, decoder_key = split_keys(dropout_key, 2)
    memory = encode(model, params, source_BS, source_segments_BS, dropout_key=encoder_key)
    positions_BT = models.default_positions(target_BT, target_segments_BT)
    logits_BTV, _ = model.decoder.apply(
        {"params": decoder_params(params)}, target_BT, target_segments_BT, positions_BT,
        decoder_key, scale, cross=memory.context(positions_BT, target_segments_BT))
    return logits_BTV


def decoder_params(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the decoder alone."""
    return {name: x for name, x in params.items() if name not in ("encoder", "cross_positions")}


def read(model: EncoderDecoder, params: dict[str, Any], source_BS: jax.Array,
         segments_BS: jax.Array | None = None) -> Memory:
    """The source as the steps of decoding read it: keys and values of every layer, made once."""
    memory = encode(model, params, source_BS, segments_BS)
    held = jax.vmap(keys_and_values, (0, None))(params["blocks"]["cross"], memory.x_BSD)
    return dataclasses.replace(memory, x_BSD=None, held=tuple(
        tuple(x[i] for x in held) for i in range(model.cfg.layers)))


def repeat(memory: Memory, times: int) -> Memory:
    """A memory whose every row stands `times` times, one after another."""
    held, segments_BS = jax.tree.map(lambda x: jnp.repeat(x, times, axis=0),
                                     (memory.held, memory.segments_BS))
    return dataclasses.replace(memory, held=held, segments_BS=segments_BS)
