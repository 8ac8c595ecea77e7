"""The Transformer block: Flax modules that hold parameters and wire pure functions.

`Block` runs `Attention` and `MLP` on the residual stream; in a decoder that reads an encoder a
second `Attention`, over the encoder's output, stands between them (Vaswani et al. 2017, 3.1). The
mathematics lives in `attention/`, `positions/`, `masks` and `layers`.
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
from tx_jax.letters import ein, place
from tx_jax.masks import Mask
from tx_jax.positions import Encoding


def tree_param(module: nn.Module, name: str, init: Any) -> Any:
    """A parameter that is itself a dict, or {} where `init` makes none."""
    return module.param(name, init) if jax.eval_shape(init, jax.random.key(0)) else {}


def split_keys(key: jax.Array | None, n: int) -> tuple[jax.Array | None, ...]:
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
    """Multi-head attention through the attention contract (Vaswani et al. 2017, 3.2).

    Attributes:
      gain: of W_o at the start.
      cross: read the keys and values off `context["memory"]` [B, S, D] instead of the stream. What
        is held then are the keys and values [B, S, K, H] themselves, before their positions.
    """

    cfg: ModelConfig
    size: Any
    encoding: Encoding
    gain: float
    cross: bool = False

    @nn.compact
    def __call__(self, x_BTD, context, key, held):
        cfg, size = self.cfg, self.size
        score = make_score(cfg.score)
        w = {name: self.param(name, layers.fan_in_init(name, size, gain)) for name, gain in
             (("q_DNH", 1.0), ("k_DKH", 1.0), ("v_DKH", 1.0), ("o_NHD", self.gain))}
        score_params = tree_param(self, "score", lambda k: score.init(k, size))
        q_BTNH = ein("BTD,DNH->BTNH", x_BTD, w["q_DNH"])
        if self.cross and held is not None:
            (k_BSKH, v_BSKH), held = held, None
        else:
            k_BSKH, v_BSKH = keys_and_values(w, context["memory"] if self.cross else x_BTD)
        q_BTNH, k_BSKH, bias, k_held = self._place(q_BTNH, k_BSKH, score, context,
                                                   None if held is None else held[0])
        aux = {}
        if held is not None:
            v_BSKH, v_held = context["view"].extend(held[1], v_BSKH)
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
        mix = attend if cfg.variant == "softmax" else self._variant(v_BSKH.shape)
        mixed_BTNH = mix(q_BTNH, k_BSKH, v_BSKH, dropout=drop, **options,
                         q_start=context["start"],
                         implementation=None if cfg.attention == "auto" else cfg.attention)
        # What is traced are the weights and logits of a softmax.
        trace = context["trace"] if cfg.variant == "softmax" else False
        if trace == "weights":
            aux = {"weights_BNTS": attention_weights(q_BTNH, k_BSKH, **options)[0]}
        elif trace:
            aux = attention_statistics(q_BTNH, k_BSKH, **options)
        return ein("BTNH,NHD->BTD", mixed_BTNH, w["o_NHD"]), aux

    def _variant(self, shape_BSKH):
        """The variant of `cfg.variant` with its parameters, as a function like `attend`."""
        variant = make_variant(self.cfg.variant)
        params = tree_param(self, "variant", lambda k: variant.init(k, self.size))
        B, S, K, H = shape_BSKH
        if not variant.paired_heads:
            return functools.partial(variant.attend, params=params)

        def paired(q_BTNH, k_BSKH, v_BSKH, **options):
            """Two heads of queries and keys share one of values, twice as wide."""
            v_BSKW = v_BSKH.reshape(B, S, -1, 2 * H) if K % 2 == 0 else v_BSKH
            out_BTNW = variant.attend(q_BTNH, k_BSKH, v_BSKW, params=params, **options)
            return out_BTNW.reshape(*q_BTNH.shape[:2], -1, H)

        return paired

    def _place(self, q_BTNH, k_BSKH, score, context, held):
        """Queries and keys with their positions in them, the bias of the scheme, and what a cache
        then holds; with a cache the keys are all that the queries may see."""
        encoding, positions, length_B = self.encoding, context["positions"], context["length"]
        params, view = context["encoding"], context.get("view")
        k_positions = context.get("k_positions", positions)
        if encoding.per_layer:
            params = tree_param(self, "positions", lambda k: encoding.init(k, self.size))
        q_BTNH = encoding.rotate_q(params, q_BTNH, positions, length_B)
        if held is None or not encoding.late:
            k_BSKH = encoding.rotate_k(params, k_BSKH, k_positions, length_B)
        if held is not None:
            k_BSKH, held = view.extend(held, k_BSKH)
            k_positions = view.k_positions_BS
            if encoding.late:
                k_BSKH = encoding.rotate_k(params, k_BSKH, k_positions, length_B)
        if q_BTNH.shape[-1] != self.cfg.head_width and not score.plain:
            raise UserError(f"--model.positions={self.cfg.positions} widens queries and keys, "
                            f"which --model.score={self.cfg.score} would mix with their content; "
                            "use the score scaled_dot or dot.")
        function = {"pair": encoding.pair_bias, "rows": encoding.row_bias}.get(encoding.bias_kind)
        bias = function and Bias(function, params, positions, k_positions, encoding.bias_kind)
        return q_BTNH, k_BSKH, bias, held


class MLP(nn.Module):
    """Feed-forward layer, plain or gated (Shazeer 2020)."""

    cfg: ModelConfig
    size: Any
    gain: float  # of W_down at the start

    @nn.compact
    def __call__(self, x_BTD):
        cfg, size = self.cfg, self.size
        up_DF = self.param("up_DF", layers.fan_in_init("up_DF", size))
        down_FD = self.param("down_FD", layers.fan_in_init("down_FD", size, self.gain))
        hidden_BTF = ein("BTD,DF->BTF", x_BTD, up_DF)
        activation = layers.ACTIVATIONS[cfg.mlp]
        if cfg.mlp in layers.GATED:
            gate_DF = self.param("gate_DF", layers.fan_in_init("gate_DF", size))
            hidden_BTF = activation(ein("BTD,DF->BTF", x_BTD, gate_DF)) * hidden_BTF
        else:
            hidden_BTF = activation(hidden_BTF)
        return ein("BTF,FD->BTD", hidden_BTF, down_FD)


class Block(nn.Module):
    """One layer: attention, attention over a memory where there is one, and MLP, each wrapped by
    norm, dropout and residual as configured.

    Attributes:
      cross: positions of the attention over a memory; None = no such attention.
    """

    cfg: ModelConfig
    size: Any
    encoding: Encoding
    trace: bool | str
    cross: Encoding | None = None

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
        """The stream after the layer, and what it traced or holds.

        Args:
          context: what all layers share; "cross" is that of the attention over a memory.
          held: keys and values of a cache; after them those of the memory.
        """
        cfg, context = self.cfg, context | {"trace": self.trace}
        # Branches end smaller by the root of their number, which keeps the variance of the stream
        # about 1 whatever the depth (Radford et al. 2019, 2.3).
        branches = 3 if self.cross else 2
        gain = (branches * cfg.layers) ** -0.5 if cfg.residual else 1.0
        attention_key, first_key, second_key, *cross_keys = split_keys(key, 2 * branches - 1)
        own, of_memory = (None, None) if held is None else (held[:2], held[2:])
        attention = Attention(cfg, self.size, self.encoding, gain, name="attention")
        x_BTD, aux = self._wrap(x_BTD, "attention",
                                lambda y: attention(y, context, attention_key, own), first_key)
        if self.cross:
            cross = Attention(cfg, self.size, self.cross, gain, True, name="cross")
            about, (key, last_key) = context["cross"] | {"trace": False}, cross_keys
            x_BTD, _ = self._wrap(x_BTD, "cross", lambda y: cross(y, about, key, of_memory),
                                  last_key)
        if cfg.mlp != "none":
            mlp = MLP(cfg, self.size, gain, name="mlp")
            x_BTD, _ = self._wrap(x_BTD, "mlp", lambda y: (mlp(y), {}), second_key)
        return x_BTD, aux


def keys_and_values(weights: Any, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values [B, S, K, H] of a stream, before their positions."""
    return tuple(ein("BSD,DKH->BSKH", x_BSD, weights[name]) for name in ("k_DKH", "v_DKH"))


def stack(cfg: ModelConfig, size: Any, encoding: Encoding, trace: bool | str = False,
          cross: Encoding | None = None) -> nn.Module:
    """The block repeated over layers; parameters are stacked whether or not the loop is."""
    block = nn.remat(Block, prevent_cse=False) if cfg.remat == "block" else Block
    scanned = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True},
                      in_axes=(nn.broadcast, 0, 0), length=cfg.layers,
                      unroll=1 if cfg.scan else cfg.layers)
    return scanned(cfg, size, encoding, trace, cross, name="blocks")


def context_of(mask: Mask, positions_BT: jax.Array, params: Any, **others: Any) -> dict[str, Any]:
    """What all layers share, for `Block`: by default no scale of the caller, the positions' own
    length, queries that end on the last key, and no memory.

    Args:
      params: of the position scheme, where layers share them.
    """
    return {"mask": mask, "positions": positions_BT, "encoding": params, "scale": None,
            "length": None, "start": None, "cross": None} | others


def shared_positions(module: nn.Module, encoding: Encoding, size: Any) -> Any:
    """The parameters of a position scheme that layers share; {} where each has its own."""
    return {} if encoding.per_layer else tree_param(
        module, "positions", lambda key: encoding.init(key, size))


def run_stack(cfg: ModelConfig, size: Any, encoding: Encoding, x_BTD: jax.Array,
              context: dict[str, Any], dropout_key: jax.Array | None = None,
              trace: bool | str = False, cross: Encoding | None = None) -> tuple[jax.Array, Any]:
    """Embedded tokens through dropout, all layers and the last norm, inside a module's call:
    (stream [B, T, D], what the layers traced)."""
    embed_key, stack_key = split_keys(dropout_key if cfg.dropout else None, 2)
    x_BTD = layers.dropout(x_BTD, cfg.dropout, embed_key)
    x_BTD, aux = stack(cfg, size, encoding, trace, cross)(x_BTD, context,
                                                          layer_keys(cfg, stack_key), None)
    if cfg.norm_position != "post":
        x_BTD = Norm(cfg, name="final_norm")(x_BTD)
    return x_BTD, aux


def layer_keys(cfg: ModelConfig, key: jax.Array | None) -> jax.Array | None:
    """A dropout key for each layer."""
    return None if key is None else jax.random.split(key, cfg.layers)
