"""The decoder-only Transformer: Flax modules that hold parameters and wire pure functions.

How a batch becomes logits, in order: `DecoderLM` embeds tokens and adds positions, `Stack` scans
`Block` over the layers, each block runs `Attention` and `MLP` on the residual stream, and the
output head gives logits in float32. The mathematics lives in `attention/`, `positions/`, `masks`
and `layers`.
"""

import functools
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tx_jax import layers
from tx_jax.attention import (
    Bias,
    Dropout,
    attend,
    attention_statistics,
    attention_weights,
    make_score,
)
from tx_jax.attention.variants import make_variant
from tx_jax.config import ModelConfig
from tx_jax.errors import UserError
from tx_jax.letters import ein, place, shape_of, sizes
from tx_jax.masks import Mask, parse_mask
from tx_jax.positions import Encoding, make_encoding


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens so far, an argument and a result of `apply`.

    The text of every example starts at index 0 without gaps, so that an index is a position and
    masks mean what they mean in a full pass. Keys are stored as they are before positions enter:
    schemes that follow the current length turn all of them anew at each step.

    Attributes:
      k_LBSKH, v_LBSKH: S places for each layer and example.
      length_B: int32, how many of them are filled.
    """

    k_LBSKH: jax.Array
    v_LBSKH: jax.Array
    length_B: jax.Array

    @property
    def size(self) -> int:
        """S, the tokens that an example can have."""
        return self.k_LBSKH.shape[2]


def _tree_param(module: nn.Module, name: str, init: Any) -> Any:
    """A parameter that is itself a dict, or {} where `init` makes none."""
    return module.param(name, init) if jax.eval_shape(init, jax.random.key(0)) else {}


def _keys(key: jax.Array | None, n: int) -> tuple[jax.Array | None, ...]:
    return (None,) * n if key is None else tuple(jax.random.split(key, n))


class Norm(nn.Module):
    """RMSNorm, LayerNorm or nothing, by `cfg.norm`."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        if self.cfg.norm == "none":
            return x_BTD
        gain_D = self.param("gain_D", nn.initializers.ones, (self.cfg.d_model,), jnp.float32)
        if self.cfg.norm == "rms":
            return layers.rms_norm(x_BTD, gain_D)
        bias_D = self.param("bias_D", nn.initializers.zeros, (self.cfg.d_model,), jnp.float32)
        return layers.layer_norm(x_BTD, gain_D, bias_D)


class Attention(nn.Module):
    """Multi-head self-attention through the attention contract (Vaswani et al. 2017, 3.2)."""

    cfg: ModelConfig
    size: Any
    encoding: Encoding

    @nn.compact
    def __call__(self, x_BTD, context, key, cached):
        cfg, size = self.cfg, self.size
        score = make_score(cfg.score)
        # W_o starts smaller by sqrt(2L), which keeps the residual stream's variance about 1
        # whatever the depth (Radford et al. 2019, 2.3).
        out_gain = (2 * cfg.layers) ** -0.5 if cfg.residual else 1.0
        w = {name: self.param(name, layers.fan_in_init(name, size, gain)) for name, gain in
             (("q_DNH", 1.0), ("k_DKH", 1.0), ("v_DKH", 1.0), ("o_NHD", out_gain))}
        score_params = _tree_param(self, "score", lambda k: score.init(k, size))
        q_BTNH = ein("BTD,DNH->BTNH", x_BTD, w["q_DNH"])
        k_BTKH = ein("BTD,DKH->BTKH", x_BTD, w["k_DKH"])
        v_BTKH = ein("BTD,DKH->BTKH", x_BTD, w["v_DKH"])
        new = (k_BTKH, v_BTKH)
        if cached is not None:  # from here on keys and values are those of S places
            k_BTKH, v_BTKH = (_write(old, x, context["positions"])
                              for old, x in zip(cached, new, strict=True))
        q_BTNH, k_BTKH, bias = self._place(q_BTNH, k_BTKH, score, context)
        scale = cfg.scale if context["scale"] is None else context["scale"]
        widened = q_BTNH.shape[-1] != cfg.head_width
        options = {"mask": context["mask"], "bias": bias, "score": score,
                   "score_params": score_params,
                   "head_width": cfg.head_width if widened else None,
                   "scale": None if isinstance(scale, str) and scale == "default" else scale,
                   "softcap": cfg.softcap or None}
        drop = None
        if key is not None and cfg.dropout:
            drop = Dropout(cfg.dropout, jax.random.bits(key, dtype=jnp.uint32))
        mix = attend if cfg.variant == "softmax" else self._variant(v_BTKH.shape)
        mixed_BTNH = mix(q_BTNH, k_BTKH, v_BTKH, dropout=drop, **options,
                         q_start=context["start"],
                         implementation=None if cfg.attention == "auto" else cfg.attention)
        aux = {} if cached is None else {"cache": new}
        # What is traced are the weights and logits of a softmax.
        trace = context["trace"] if cfg.variant == "softmax" else False
        if trace == "weights":
            aux = {"weights_BNTS": attention_weights(q_BTNH, k_BTKH, **options)[0]}
        elif trace:
            aux = attention_statistics(q_BTNH, k_BTKH, **options)
        return ein("BTNH,NHD->BTD", mixed_BTNH, w["o_NHD"]), aux

    def _variant(self, shape_BSKH):
        """The variant of `cfg.variant` with its parameters, as a function like `attend`."""
        variant = make_variant(self.cfg.variant)
        params = _tree_param(self, "variant", lambda k: variant.init(k, self.size))
        B, S, K, H = shape_BSKH
        if not variant.paired_heads:
            return functools.partial(variant.attend, params=params)

        def paired(q_BTNH, k_BSKH, v_BSKH, **options):
            """Two heads of queries and keys share one of values, twice as wide."""
            v_BSKW = v_BSKH.reshape(B, S, -1, 2 * H) if K % 2 == 0 else v_BSKH
            out_BTNW = variant.attend(q_BTNH, k_BSKH, v_BSKW, params=params, **options)
            return out_BTNW.reshape(*q_BTNH.shape[:2], -1, H)

        return paired

    def _place(self, q_BTNH, k_BTKH, score, context):
        """Queries and keys with their positions in them, and the bias of the scheme."""
        encoding, positions = self.encoding, context["positions"]
        k_positions, length_B = context["k_positions"], context["length"]
        params = context["encoding"]
        if encoding.per_layer:
            params = _tree_param(self, "positions", lambda k: encoding.init(k, self.size))
        q_BTNH = encoding.rotate_q(params, q_BTNH, positions, length_B)
        k_BTKH = encoding.rotate_k(params, k_BTKH, k_positions, length_B)
        if q_BTNH.shape[-1] != self.cfg.head_width and not score.plain:
            raise UserError(f"--model.positions={self.cfg.positions} widens queries and keys, "
                            f"which --model.score={self.cfg.score} would mix with their content; "
                            "use the score scaled_dot or dot.")
        function = {"pair": encoding.pair_bias, "rows": encoding.row_bias}.get(encoding.bias_kind)
        bias = function and Bias(function, params, positions, k_positions, encoding.bias_kind)
        return q_BTNH, k_BTKH, bias


def _write(old_BSKH: jax.Array, new_BTKH: jax.Array, index_BT: jax.Array) -> jax.Array:
    """The cache with new entries; an index past its end is dropped."""
    rows_B1 = jnp.arange(old_BSKH.shape[0])[:, None]
    return old_BSKH.at[rows_B1, index_BT].set(new_BTKH.astype(old_BSKH.dtype), mode="drop",
                                              unique_indices=True)


class MLP(nn.Module):
    """Feed-forward layer, plain or gated (Shazeer 2020)."""

    cfg: ModelConfig
    size: Any

    @nn.compact
    def __call__(self, x_BTD):
        cfg, size = self.cfg, self.size
        out_gain = (2 * cfg.layers) ** -0.5 if cfg.residual else 1.0
        up_DF = self.param("up_DF", layers.fan_in_init("up_DF", size))
        down_FD = self.param("down_FD", layers.fan_in_init("down_FD", size, out_gain))
        hidden_BTF = ein("BTD,DF->BTF", x_BTD, up_DF)
        activation = layers.ACTIVATIONS[cfg.mlp]
        if cfg.mlp in layers.GATED:
            gate_DF = self.param("gate_DF", layers.fan_in_init("gate_DF", size))
            hidden_BTF = activation(ein("BTD,DF->BTF", x_BTD, gate_DF)) * hidden_BTF
        else:
            hidden_BTF = activation(hidden_BTF)
        return ein("BTF,FD->BTD", hidden_BTF, down_FD)


class Block(nn.Module):
    """One layer: attention and MLP, each wrapped by norm, dropout and residual as configured."""

    cfg: ModelConfig
    size: Any
    encoding: Encoding
    trace: bool | str

    def _wrap(self, x_BTD, name, inner, key):
        """x + f(norm(x)), norm(x + f(x)) or x + norm(f(norm(x))), by `cfg.norm_position`."""
        cfg = self.cfg
        before = cfg.norm_position in ("pre", "sandwich")
        y_BTD = Norm(cfg, name=f"{name}_norm")(x_BTD) if before else x_BTD
        y_BTD, aux = inner(y_BTD)
        if cfg.norm_position == "sandwich":
            y_BTD = Norm(cfg, name=f"{name}_norm_out")(y_BTD)
        y_BTD = layers.dropout(y_BTD, cfg.dropout, key)
        y_BTD = x_BTD + y_BTD if cfg.residual else y_BTD
        if cfg.norm_position == "post":
            y_BTD = Norm(cfg, name=f"{name}_norm")(y_BTD)
        return place("BTD", y_BTD), aux

    @nn.compact
    def __call__(self, x_BTD, context, key, cached):
        cfg, context = self.cfg, context | {"trace": self.trace}
        attention_key, first_key, second_key = _keys(key, 3)
        attention = Attention(cfg, self.size, self.encoding, name="attention")
        x_BTD, aux = self._wrap(x_BTD, "attention",
                                lambda y: attention(y, context, attention_key, cached), first_key)
        if cfg.mlp != "none":
            mlp = MLP(cfg, self.size, name="mlp")
            x_BTD, _ = self._wrap(x_BTD, "mlp", lambda y: (mlp(y), {}), second_key)
        return x_BTD, aux


class DecoderLM(nn.Module):
    """Decoder-only language model; build it with `build`, run it with `apply`."""

    cfg: ModelConfig
    vocab: int
    context: int

    @nn.compact
    def __call__(self, tokens_BT, segments_BT=None, positions_BT=None, dropout_key=None,
                 scale=None, trace=False, cache=None, lengths_B=None):
        cfg = self.cfg
        size = nn.FrozenDict(sizes(cfg, self.vocab, self.context))
        encoding = make_encoding(cfg.positions)
        if cache is not None:
            positions_BT = cache.length_B[:, None] + jnp.arange(tokens_BT.shape[1],
                                                                dtype=jnp.int32)[None]
        elif positions_BT is None:
            positions_BT = (layers.positions_of(segments_BT) if segments_BT is not None else
                            jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None],
                                             tokens_BT.shape))
        embed_VD = self.param("embed_VD", nn.initializers.normal(0.02), shape_of("embed_VD", size),
                              jnp.float32)
        encoding_params = {} if encoding.per_layer else _tree_param(
            self, "positions", lambda k: encoding.init(k, size))
        embed_key, stack_key = _keys(dropout_key if cfg.dropout else None, 2)
        # Gathering in fill mode turns a token outside the vocabulary into NaN, never another token.
        x_BTD = embed_VD.at[tokens_BT].get(mode="fill", fill_value=jnp.nan)
        x_BTD = place("BTD", x_BTD.astype(cfg.dtype))
        x_BTD = encoding.embed(encoding_params, x_BTD, positions_BT)
        x_BTD = layers.dropout(x_BTD, cfg.dropout, embed_key)
        context = {"mask": Mask(parse_mask(cfg.mask), segments_BT, segments_BT), "scale": scale,
                   "positions": positions_BT, "k_positions": positions_BT, "length": None,
                   "start": None, "encoding": encoding_params}
        cached = None
        if cache is not None:
            # A token that has no place is never written over another: it becomes NaN.
            x_BTD = jnp.where((positions_BT < cache.size)[..., None], x_BTD, jnp.nan)
            length_B = cache.length_B + lengths_B
            context |= {"mask": Mask(parse_mask(cfg.mask), k_lengths_B=length_B),
                        "k_positions": jnp.arange(cache.size, dtype=jnp.int32)[None],
                        "length": length_B, "start": cache.length_B}
            cached = cache.k_LBSKH, cache.v_LBSKH
        x_BTD, aux = self._stack(size, encoding, trace)(x_BTD, context, self._layer_keys(stack_key),
                                                        cached)
        if cache is not None:
            write = jax.vmap(_write, (0, 0, None))
            aux = Cache(*(write(old, new, positions_BT)
                          for old, new in zip(cached, aux["cache"], strict=True)), length_B)
        if cfg.norm_position != "post":
            x_BTD = Norm(cfg, name="final_norm")(x_BTD)
        if cfg.embeddings == "tied":
            return ein("BTD,VD->BTV", x_BTD, embed_VD).astype(jnp.float32), aux
        head_DV = self.param("head_DV", layers.fan_in_init("head_DV", size))
        return ein("BTD,DV->BTV", x_BTD, head_DV).astype(jnp.float32), aux

    def _layer_keys(self, key):
        return None if key is None else jax.random.split(key, self.cfg.layers)

    def _stack(self, size, encoding, trace):
        """The block repeated over layers; parameters are stacked whether or not the loop is."""
        cfg = self.cfg
        block = nn.remat(Block, prevent_cse=False) if cfg.remat == "block" else Block
        scanned = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True},
                          in_axes=(nn.broadcast, 0, 0), length=cfg.layers,
                          unroll=1 if cfg.scan else cfg.layers)
        return scanned(cfg, size, encoding, trace, name="blocks")


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
          trace: bool | str = False, cache: Cache | None = None,
          lengths_B: jax.Array | None = None) -> tuple[jax.Array, Any]:
    """Logits of a batch.

    Args:
      tokens_BT: int32 token ids; an id outside the vocabulary gives NaN logits.
      segments_BT: int32 document numbers from 1, 0 = padding; attention stays inside a segment.
      positions_BT: int32 positions; by default they restart with each segment.
      dropout_key: PRNG key; None turns dropout off.
      scale: overrides `cfg.scale` by a number, which may be traced.
      trace: True also returns attention statistics of every layer, "weights" the attention
        weights, weights_BNTS.
      cache: the tokens before these, see `decode`. Logits equal those of one pass over everything,
        as far as the mask shows no token a later one that a later call brings, and but for schemes
        whose formula follows the current length (`rope_dynamic_ntk`, `longrope`).
      lengths_B: int32, with a cache: how many of the T tokens of each row are text; the others are
        padding on its right, with logits that mean nothing. By default all are text.

    Returns:
      (logits_BTV float32, aux): aux is empty, or holds arrays with leading axis L. With a cache
      (logits_BTV, cache), the new cache; logits of a token that has no place in it are NaN.

    Raises:
      UserError: options contradict each other, or the cache is known to be too small.
    """
    if trace not in (False, True, "weights"):
        raise UserError(f"trace={trace!r} is unknown; give False, True or 'weights'.")
    if cache is not None:
        given = {"segments_BT": segments_BT, "positions_BT": positions_BT, "trace": trace or None,
                 "dropout_key": dropout_key}
        if refused := [name for name, value in given.items() if value is not None]:
            raise UserError(f"{refused[0]} does not go with a cache, where each row is one text "
                            "from index 0 on; leave it out, or pad on the right by lengths_B.")
        lengths_B = _check_room(cache, tokens_BT, lengths_B)
    elif lengths_B is not None:
        raise UserError("lengths_B goes with a cache; without one give segments_BT, 0 = padding.")
    return model.apply({"params": params}, tokens_BT, segments_BT, positions_BT, dropout_key, scale,
                       trace, cache, lengths_B)


def _check_room(cache: Cache, tokens_BT: jax.Array, lengths_B: jax.Array | None) -> jax.Array:
    """The lengths of the new tokens; UserError where they are known not to fit."""
    B, T = tokens_BT.shape
    if cache.length_B.shape != (B,):
        raise UserError(f"the cache holds {cache.length_B.shape[0]} examples but the batch has "
                        f"{B}; make one with init_cache(model, {B}, size).")
    if lengths_B is None:
        lengths_B = jnp.full((B,), T, jnp.int32)
    try:
        longest = int(np.max(np.asarray(cache.length_B + lengths_B), initial=0))
    except jax.errors.TracerArrayConversionError:  # inside a compiled program: NaN instead
        return lengths_B
    if longest > cache.size:
        raise UserError(f"{longest} tokens do not fit into a cache of {cache.size}; make it larger "
                        "or give fewer tokens.")
    return lengths_B
