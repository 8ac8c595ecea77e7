"""Decoder-only models and encoder-decoders alike: how to build, initialise and run either."""

from typing import Any

import jax

from tx_jax import models, seq2seq
from tx_jax.config import EncoderConfig, ModelConfig
from tx_jax.models import DecoderLM
from tx_jax.seq2seq import EncoderDecoder

Model = DecoderLM | EncoderDecoder


def build(cfg: ModelConfig, encoder: EncoderConfig | None, vocab: int, context: int) -> Model:
    """The model of a configuration; without `encoder` a decoder alone."""
    if encoder is None:
        return models.build(cfg, vocab, context)
    return seq2seq.build(cfg, encoder, vocab, context)


def init(model: Model, key: jax.Array) -> dict[str, Any]:
    """Parameters as a nested dict of float32 arrays."""
    room = seq2seq if isinstance(model, EncoderDecoder) else models
    return room.init(model, key)


def logits(model: Model, params: Any, batch: dict[str, jax.Array],
           dropout_key: jax.Array | None = None,
           scale: jax.Array | float | None = None) -> jax.Array:
    """Logits [B, T, V], float32, at the target tokens of a batch.

    Args:
      batch: int32 `tokens_BT` and, where they matter, `segments_BT`. A decoder alone also takes
        `positions_BT` and `prefix_B`; an encoder-decoder needs `source_BS` and takes
        `source_segments_BS`.
    """
    if isinstance(model, EncoderDecoder):
        return seq2seq.apply(model, params, batch["source_BS"], batch["tokens_BT"],
                             source_segments_BS=batch.get("source_segments_BS"),
                             target_segments_BT=batch.get("segments_BT"),
                             dropout_key=dropout_key, scale=scale)
    return models.apply(model, params, batch["tokens_BT"], segments_BT=batch.get("segments_BT"),
                        positions_BT=batch.get("positions_BT"), dropout_key=dropout_key,
                        scale=scale, prefix_B=batch.get("prefix_B"))[0]
