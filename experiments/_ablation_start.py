"""Before training: what depth does to the rank of the stream and to gradients.

Both parts start every branch at unit gain, as the papers do. This library starts the last matrix
of a branch (2L)^-1/2 smaller (Radford et al. 2019, 2.3); the arm `pre_scaled` keeps that.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from experiments._ablation_settings import STUDY, Settings
from tx_jax import models
from tx_jax.blocks import Block, context_of
from tx_jax.config import ModelConfig
from tx_jax.letters import sizes
from tx_jax.masks import Mask
from tx_jax.positions import make_encoding
from tx_jax.study.cells import Cell, canonical
from tx_jax.study.contract import Context
from tx_jax.study.ledger import Measured
from tx_jax.train import loss_and_grads

# Dong et al. 2021: attention alone, and what may keep its rows apart.
RANK = {
    "attention": {"mlp": "none", "norm": "none", "residual": False},
    "attention_ffn": {"norm": "none", "residual": False},
    "attention_pre_norm": {"mlp": "none", "residual": False},
    "attention_post_norm": {"mlp": "none", "norm_position": "post", "residual": False},
    "attention_skip": {"mlp": "none", "norm": "none"},
    "post_block": {"norm_position": "post"},
    "pre_block": {},
}
# Xiong et al. 2020.
GRADIENT = {"pre": {}, "post": {"norm_position": "post"}, "pre_scaled": {}}
VOCAB, ROWS = 64, 4


def config(arm: dict[str, Any], layers: int, d_model: int, heads: int, **fields: Any
           ) -> ModelConfig:
    """A model of such blocks."""
    return ModelConfig(layers=layers, d_model=d_model, heads=heads,
                       **{"norm": "layer", "mlp": "relu", "positions": "none"} | arm | fields)


def scale_branches(gain: jax.Array | float, blocks: Any) -> Any:
    """Parameters of blocks with the last matrix of every branch `gain` times as large."""
    return jax.tree_util.tree_map_with_path(
        lambda path, w: gain * w if path[-1].key in ("o_NHD", "down_FD") else w, blocks)


def ratio(x_BTD: jax.Array) -> jax.Array:
    """||X - mean row|| / ||X||, Frobenius norms: 0 where all tokens are equal."""
    apart = x_BTD - jnp.mean(x_BTD, axis=1, keepdims=True)
    return jnp.linalg.norm(apart) / jnp.linalg.norm(x_BTD)


def block_of(cfg: ModelConfig, tokens: int) -> tuple[Block, dict[str, Any]]:
    """A block, and what it is called with besides the stream: every token sees every token."""
    block = Block(cfg, nn.FrozenDict(sizes(cfg, 1, tokens)), make_encoding("none"), False)
    return block, context_of(Mask(), jnp.arange(tokens, dtype=jnp.int32)[None], {})


@partial(jax.jit, static_argnums=(0, 2))
def draw_blocks(cfg: ModelConfig, keys: jax.Array, tokens: int) -> Any:
    """Random blocks at unit gain, leaves [seeds, L, ...], and a row of random vectors for each.

    All arms share them: one that lacks a part does not read its parameters. Drawing them once for
    all also saves the compilation of many draws.
    """
    block, context = block_of(cfg, tokens)
    x_BTD = jax.ShapeDtypeStruct((1, tokens, cfg.d_model), jnp.float32)
    gain = (2 * cfg.layers) ** 0.5

    def layer(key):
        return block.init(key, jnp.zeros(x_BTD.shape, x_BTD.dtype), context, None, None)["params"]

    def one(key):
        x_key, key = jax.random.split(key)
        blocks = jax.lax.map(layer, jax.random.split(key, cfg.layers))
        return (scale_branches(gain, blocks),
                jax.random.normal(x_key, x_BTD.shape, x_BTD.dtype))

    return jax.lax.map(one, keys)


@partial(jax.jit, static_argnums=(0, 3))
def rank_by_depth(cfg: ModelConfig, blocks: Any, x_RBTD: jax.Array, tokens: int) -> jax.Array:
    """`ratio` of a row after 0, 1, ... L blocks, for every seed, [R, L + 1]."""
    block, context = block_of(cfg, tokens)

    def layer(x_BTD, params):
        x_BTD, _ = block.apply({"params": params}, x_BTD, context, None, None)
        return x_BTD, ratio(x_BTD)

    def one(drawn):
        blocks, x_BTD = drawn
        return jnp.concatenate([ratio(x_BTD)[None], jax.lax.scan(layer, x_BTD, blocks)[1]])

    return jax.lax.map(one, (blocks, x_RBTD))


@partial(jax.jit, static_argnums=(0, 2))
def draw_model(cfg: ModelConfig, keys: jax.Array, tokens: int) -> tuple[Any, jax.Array]:
    """Parameters of the deepest model, leaves [seeds, ...], and random text [seeds, B, 2 T].

    Branches and embeddings are of unit gain; the library draws both smaller.
    """
    model = models.build(cfg, VOCAB, tokens)

    def one(key):
        params_key, token_key = jax.random.split(key)
        params = models.init(model, params_key)
        params["embed_VD"] = params["embed_VD"] * 50.0
        params["blocks"] = scale_branches((2 * cfg.layers) ** 0.5, params["blocks"])
        return params, jax.random.randint(token_key, (ROWS, 2 * tokens), 0, VOCAB, jnp.int32)

    return jax.lax.map(one, keys)


@partial(jax.jit, static_argnums=0)
def gradient_by_depth(cfg: ModelConfig, params: Any, text_RBT: jax.Array, gain: float
                      ) -> jax.Array:
    """Norm of the gradient of W_down of every layer, [seeds, L], on random tokens and targets.

    Args:
      params: as from `draw_model`; the first layers are read.
      gain: of the last matrix of every branch.
    """
    tokens = text_RBT.shape[-1] // 2
    model = models.build(cfg, VOCAB, tokens)
    params = params | {"blocks": scale_branches(gain, jax.tree.map(
        lambda x: x[:, :cfg.layers], params["blocks"]))}

    def one(drawn):
        params, text_BT = drawn
        batch = {"tokens_BT": text_BT[:, :tokens], "targets_BT": text_BT[:, tokens:]}
        _, grads, _ = loss_and_grads(model, params, batch, jax.random.key(0))
        down_LFD = grads["blocks"]["mlp"]["down_FD"]
        return jnp.sqrt(jnp.sum(jnp.square(down_LFD), axis=(1, 2)))

    return jax.lax.map(one, (params, text_RBT))


def cells(settings: Settings, part: str) -> list[Cell]:
    """Every arm, depth and seed of a part."""
    start = settings.start
    own = {"tokens": start.tokens, "d_model": settings.d_model, "heads": settings.heads}
    if part == "rank":
        text = canonical(own | {"layers": start.layers})
        return [Cell(STUDY, part, arm, (), seed, text)
                for arm in RANK for seed in range(start.seeds)]
    # Shallower models are the first layers of the deepest.
    text = canonical(own | {"deepest": max(start.depths)})
    return [Cell(STUDY, part, arm, (("layers", layers),), seed, text)
            for layers in start.depths for arm in GRADIENT for seed in range(start.seeds)]


def run(settings: Settings, members: list[Cell], context: Context
        ) -> Iterator[tuple[Cell, Measured]]:
    """The seeds of one arm, and of one depth."""
    part, arm, tokens = members[0].part, members[0].arm, settings.start.tokens
    began = time.perf_counter()
    measure = _ranks if part == "rank" else _gradients
    found = measure(settings, arm, members[0].axis, context,
                    jnp.stack([jax.random.key(cell.seed) for cell in members]), tokens)
    seconds = (time.perf_counter() - began) / len(members)
    for cell, values_L in zip(members, np.asarray(found, np.float64), strict=True):
        metrics = ({"ratio": values_L.tolist()} if part == "rank" else
                   {"first": values_L[0], "last": values_L[-1]})
        context.advance(1.0)
        yield cell, Measured(metrics, seconds, kernel="none", strategy="none")


def _ranks(settings, arm, _, context, keys, tokens) -> jax.Array:
    width, heads, layers = settings.d_model, settings.heads, settings.start.layers
    every = config({}, layers, width, heads, mask="full")
    drawn = _once(context, draw_blocks, every, keys, tokens)
    return rank_by_depth(config(RANK[arm], layers, width, heads, mask="full"), *drawn, tokens)


def _gradients(settings, arm, axis, context, keys, tokens) -> jax.Array:
    def cfg(options, layers):
        return config(options, layers, settings.d_model, settings.heads, embeddings="untied")

    drawn = _once(context, draw_model, cfg({}, max(settings.start.depths)), keys, tokens)
    gain = (2 * axis["layers"]) ** -0.5 if arm == "pre_scaled" else 1.0
    return gradient_by_depth(cfg(GRADIENT[arm], axis["layers"]), *drawn, jnp.float32(gain))


def _once(context: Context, draw: Any, cfg: ModelConfig, keys: jax.Array, tokens: int) -> Any:
    """Draw what all arms share, unless it lies there from the arm before."""
    name = (draw, cfg, tokens, tuple(np.asarray(jax.random.key_data(keys)).ravel().tolist()))
    if name not in context.cache:
        context.cache[name] = draw(cfg, keys, tokens)
    return context.cache[name]
