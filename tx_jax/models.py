"""The decoder-only Transformer: Flax modules that hold parameters and wire pure functions.

How a batch becomes logits, in order: `DecoderLM` embeds tokens and adds positions, `Stack` scans
`Block` over the layers, each block runs `Attention` and `MLP` on the residual stream, and the
output head gives logits in float32. The mathematics lives in `attention/`, `positions/`, `masks`
and `layers`.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

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
    def __call__(self, x_BTD, context, key, held):
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
        q_BTNH, k_BTKH, bias, k_held = self._place(q_BTNH, k_BTKH, score, context,
                                                   None if held is None else held[0])
        aux = {}
        if held is not None:
            v_BTKH, v_held = context["view"].extend(held[1], v_BTKH)
            aux = {"held": (k_held, v_held)}
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

    def _place(self, q_BTNH, k_BTKH, score, context, held):
        """Queries and keys with their positions in them, the bias of the scheme, and what a cache
        then holds; with a cache the keys are all that the queries may see."""
        encoding, positions, length_B = self.encoding, context["positions"], context["length"]
        params, view, k_positions = context["encoding"], context.get("view"), positions
        if encoding.per_layer:
            params = _tree_param(self, "positions", lambda k: encoding.init(k, self.size))
        q_BTNH = encoding.rotate_q(params, q_BTNH, positions, length_B)
        if held is None or not encoding.late:
            k_BTKH = encoding.rotate_k(params, k_BTKH, positions, length_B)
        if held is not None:
            k_BTKH, held = view.extend(held, k_BTKH)
            k_positions = view.k_positions_BS
            if encoding.late:
                k_BTKH = encoding.rotate_k(params, k_BTKH, k_positions, length_B)
        if q_BTNH.shape[-1] != self.cfg.head_width and not score.plain:
            raise UserError(f"--model.positions={self.cfg.positions} widens queries and keys, "
                            f"which --model.score={self.cfg.score} would mix with their content; "
                            "use the score scaled_dot or dot.")
        function = {"pair": encoding.pair_bias, "rows": encoding.row_bias}.get(encoding.bias_kind)
        bias = function and Bias(function, params, positions, k_positions, encoding.bias_kind)
        return q_BTNH, k_BTKH, bias, held


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
    def __call__(self, x_BTD, context, key, held):
        cfg, context = self.cfg, context | {"trace": self.trace}
        attention_key, first_key, second_key = _keys(key, 3)
        attention = Attention(cfg, self.size, self.encoding, name="attention")
        x_BTD, aux = self._wrap(x_BTD, "attention",
                                lambda y: attention(y, context, attention_key, held), first_key)
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
                 scale=None, trace=False):
        cfg = self.cfg
        size = nn.FrozenDict(sizes(cfg, self.vocab, self.context))
        encoding = make_encoding(cfg.positions)
        if positions_BT is None:
            positions_BT = (layers.positions_of(segments_BT) if segments_BT is not None else
                            jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None],
                                             tokens_BT.shape))
        embed_VD = self.param("embed_VD", nn.initializers.normal(0.02), shape_of("embed_VD", size),
                              jnp.float32)
        encoding_params = {} if encoding.per_layer else _tree_param(
            self, "positions", lambda k: encoding.init(k, size))
        embed_key, stack_key = _keys(dropout_key if cfg.dropout else None, 2)
        x_BTD = embed(cfg, encoding, embed_VD, encoding_params, tokens_BT, positions_BT)
        x_BTD = layers.dropout(x_BTD, cfg.dropout, embed_key)
        context = {"mask": Mask(parse_mask(cfg.mask), segments_BT, segments_BT), "scale": scale,
                   "positions": positions_BT, "length": None, "start": None,
                   "encoding": encoding_params}
        x_BTD, aux = self._stack(size, encoding, trace)(x_BTD, context, self._layer_keys(stack_key),
                                                        None)
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


def embed(cfg: ModelConfig, encoding: Encoding, embed_VD: jax.Array, encoding_params: Any,
          tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
    """Tokens as vectors [B, T, D], with their positions where the scheme puts them there."""
    # Gathering in fill mode turns a token outside the vocabulary into NaN, never another token.
    x_BTD = embed_VD.at[tokens_BT].get(mode="fill", fill_value=jnp.nan)
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
          trace: bool | str = False) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Logits of a batch; `decode.extend` gives the same a few tokens at a time.

    Args:
      tokens_BT: int32 token ids; an id outside the vocabulary gives NaN logits.
      segments_BT: int32 document numbers from 1, 0 = padding; attention stays inside a segment.
      positions_BT: int32 positions; by default they restart with each segment.
      dropout_key: PRNG key; None turns dropout off.
      scale: overrides `cfg.scale` by a number, which may be traced.
      trace: True also returns attention statistics of every layer, "weights" the attention
        weights, weights_BNTS.

    Returns:
      (logits_BTV float32, aux): aux is empty, or holds arrays with leading axis L.

    Raises:
      UserError: options contradict each other.
    """
    if trace not in (False, True, "weights"):
        raise UserError(f"trace={trace!r} is unknown; give False, True or 'weights'.")
    return model.apply({"params": params}, tokens_BT, segments_BT, positions_BT, dropout_key, scale,
                       trace)
