"""Generation with a cache of keys and values: the next tokens, prefill, and the compiled loop.

The cache (`tx_jax.cache`) is an argument and a result. Prompts of different lengths are padded on
the right inside, so that what a row gives depends neither on its padding nor on the other rows.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.core import FrozenDict

from tx_jax import blocks, limits, models
from tx_jax.cache import Cache, empty_cache, view_of
from tx_jax.config import check_whole
from tx_jax.errors import UserError
from tx_jax.letters import ein, sizes
from tx_jax.masks import parse_mask
from tx_jax.models import DecoderLM
from tx_jax.positions import make_encoding
from tx_jax.requests import (
    Plan,
    check_chunk,
    check_numbers,
    check_room,
    make_plan,
    padded,
    row_keys,
    sequence_keys,
)
from tx_jax.sampling import Sampling, sample

__all__ = ["Cache", "Plan", "Sampling", "decode_step", "extend", "generate", "init_cache",
           "prefill", "sample", "sequence_keys", "stream", "unstack"]


def unstack(model: DecoderLM, params: Any) -> Any:
    """Parameters for many steps: a tree per layer, the head as [D, V], in the dtype of the model.

    A step reads every parameter once; a slice of stacked layers, a cast or a transposed head would
    be written and read again each time. `extend` takes either form.
    """
    if isinstance(params["blocks"], tuple):
        return params
    cfg, out = model.cfg, dict(params)
    if cfg.embeddings == "tied":
        out["head_DV"] = params["embed_VD"].T
    out = {name: x.astype(cfg.dtype) if name in ("embed_VD", "head_DV") else x
           for name, x in out.items()}

    def layer(i):
        cast = dict(jax.tree.map(lambda x: x[i], params["blocks"]))
        for part in ("attention", "cross", "mlp"):
            if part in cast:
                cast[part] = {name: x.astype(cfg.dtype) if name in _PRODUCTS else x
                              for name, x in cast[part].items()}
        return cast

    return out | {"blocks": tuple(layer(i) for i in range(cfg.layers))}


# Weights that enter products, in which they are cast to the dtype of the model anyway.
_PRODUCTS = ("q_DNH", "k_DKH", "v_DKH", "o_NHD", "up_DF", "down_FD", "gate_DF")


def init_cache(model: DecoderLM, batch: int, size: int, kind: str = "model") -> Cache:
    """An empty cache for `batch` texts of up to `size` tokens; `kind` as in `empty_cache`."""
    for name, value in (("batch", batch), ("size", size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"a cache needs {name} of at least 1, not {value!r}.")
    limit = limits.max_length(model)
    if limit is not None and size > limit:
        raise UserError(f"a cache of {size} tokens is longer than the {limit} positions that "
                        f"--model.positions={model.cfg.positions} knows; make it smaller.")
    return empty_cache(model.cfg, batch, size, kind)


def extend(model: DecoderLM, params: Any, tokens_BT: jax.Array, cache: Cache,
           lengths_B: jax.Array | None = None, *, last: bool = False, memory: Any = None
           ) -> tuple[jax.Array, Cache]:
    """Logits of the next tokens of every row, and the cache with them.

    They equal those of one pass over everything (`models.apply`), as far as the mask shows no token
    a later one that a later call brings, and but for schemes whose formula follows the current
    length (`rope_dynamic_ntk`, `longrope`) and for the rounding of an int8 cache.

    Args:
      params: of the model, as they are or unstacked.
      tokens_BT: int32.
      lengths_B: int32, how many of the T tokens of each row are text; the others are padding on its
        right, with logits that mean nothing. By default all are text. Inside a compiled program
        numbers below 0 or above T are taken as 0 or T.
      last: give the logits after the last text token of each row only.
      memory: the source that the decoder of an encoder-decoder reads, from `seq2seq.read`.

    Returns:
      (logits_BTV, or logits_BV with `last`, float32; cache). Logits of a token beyond the size of
      the cache are NaN, and it is kept nowhere.

    Raises:
      UserError: the tokens are known not to fit into the cache.
    """
    if (memory is None) != (model.cross is None) or (memory is not None and memory.held is None):
        raise UserError("a memory from seq2seq.read is for the decoder of an encoder-decoder, "
                        "which needs one; other models take none.")
    cfg, params = model.cfg, unstack(model, params)
    lengths_B = check_room(cache, tokens_BT, lengths_B)
    size, encoding = FrozenDict(sizes(cfg, model.vocab, model.context)), make_encoding(
        cfg.positions)
    positions_BT = cache.length_B[:, None] + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
    x_BTD = models.embed(cfg, encoding, params["embed_VD"], params.get("positions", {}), tokens_BT,
                         positions_BT)
    x_BTD = jnp.where((positions_BT < cache.size)[..., None], x_BTD,
                      jnp.asarray(jnp.nan, x_BTD.dtype))
    view = view_of(cache, parse_mask(cfg.mask), positions_BT, lengths_B,
                   encoding.bias_kind == "rows")
    context = blocks.context_of(
        view.mask, positions_BT, params.get("positions", {}), view=view, length=view.length_B,
        start=view.start, cross=None if memory is None else memory.context(positions_BT, None))
    source = ((),) * cfg.layers if memory is None else memory.held
    block, held = blocks.Block(cfg, size, encoding, False, model.cross), []
    for weights, k, v, of_source in zip(params["blocks"], cache.k, cache.v, source, strict=True):
        x_BTD, aux = block.apply({"params": weights}, x_BTD, context, None, (k, v, *of_source))
        held.append(aux["held"])
    cache = replace(cache, k=tuple(k for k, _ in held), v=tuple(v for _, v in held),
                    length_B=view.length_B)
    if last:
        last_B11 = jnp.maximum(lengths_B - 1, 0)[:, None, None]
        x_BTD = jnp.take_along_axis(x_BTD, last_B11, axis=1)
    if cfg.norm_position != "post":
        x_BTD = blocks.Norm(cfg).apply({"params": params.get("final_norm", {})}, x_BTD)
    logits_BTV = ein("BTD,DV->BTV", x_BTD, params["head_DV"]).astype(jnp.float32)
    return (logits_BTV[:, 0] if last else logits_BTV), cache


def prefill(model: DecoderLM, params: Any, tokens_BT: jax.Array, cache: Cache,
            segments_BT: jax.Array | None = None, *, chunk: int = 0) -> tuple[jax.Array, Cache]:
    """Read the prompts.

    Args:
      segments_BT: 0 = padding, on the left or on the right; the rest of a row is one text. Logits
        of a row without text mean nothing.
      chunk: read so many tokens at a time, which bounds the memory of long prompts; 0 = all.

    Returns:
      (logits_BV after the last token of each text, cache).
    """
    B, T = tokens_BT.shape
    if segments_BT is None:
        lengths_B = jnp.full((B,), T, jnp.int32)
    else:
        text_BT = segments_BT != 0
        order_BT = jnp.argsort(~text_BT, axis=1, stable=True)
        tokens_BT = jnp.take_along_axis(tokens_BT, order_BT, axis=1)
        lengths_B = jnp.sum(text_BT, axis=1, dtype=jnp.int32)
    check_whole("chunk", chunk, 0)
    if not chunk or chunk >= T:
        return extend(model, params, tokens_BT, cache, lengths_B, last=True)
    check_chunk(parse_mask(model.cfg.mask), chunk, T)
    params = unstack(model, params)
    padded_BT = jnp.pad(tokens_BT, ((0, 0), (0, -T % chunk)))
    chunks_IBT = jnp.moveaxis(padded_BT.reshape(B, -1, chunk), 1, 0)

    def read(carry, step):
        logits_BV, cache = carry
        i, tokens = step
        here_B = jnp.clip(lengths_B - i * chunk, 0, chunk)
        new_BV, cache = extend(model, params, tokens, cache, here_B, last=True)
        return (jnp.where(here_B[:, None] > 0, new_BV, logits_BV), cache), None

    start = jnp.zeros((B, model.vocab), jnp.float32), cache
    steps = jnp.arange(len(chunks_IBT), dtype=jnp.int32), chunks_IBT
    return jax.lax.scan(read, start, steps)[0]


def decode_step(model: DecoderLM, params: Any, token_B: jax.Array, cache: Cache, *,
                memory: Any = None) -> tuple[jax.Array, Cache]:
    """Read one more token of each text: (logits_BV, cache). Donate the cache to write in place."""
    return extend(model, params, token_B[:, None], cache, last=True, memory=memory)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """A generation between two tokens: `token_B`, the `count`-th, is drawn and not yet read."""

    cache: Cache
    token_B: jax.Array
    done_B: jax.Array
    seen_BV: jax.Array | None
    count: jax.Array


def generate(model: DecoderLM, params: Any, prompts: Sequence[Sequence[int]], new_tokens: int,
             sampling: Sampling | None = None, key: jax.Array | None = None, *,
             size: int | None = None, kind: str = "model", chunk: int = 0,
             stop: int | None = None) -> np.ndarray:
    """Continue prompts by `new_tokens` tokens each: one compiled program, int32 [B, new_tokens].

    Args:
      prompts: token ids, of any lengths above 0.
      sampling: by default `Sampling()`.
      key: one PRNG key, or one per prompt as from `sequence_keys`; a prompt with its key gives the
        same alone and among others. Temperature 0 needs none.
      size: places of the cache; by default as many as the longest text takes.
      kind: of the cache, "model" or "int8".
      chunk: tokens of the prompts read at a time; 0 = all.
      stop: a token that ends a row, which then repeats it; the loop ends when all rows have.

    Raises:
      UserError: anything that cannot work, before anything runs; or the logits are not numbers.
    """
    return np.concatenate(list(stream(model, params, prompts, new_tokens, sampling, key, size=size,
                                      kind=kind, chunk=chunk, stop=stop, every=0)), axis=1)


def stream(model: DecoderLM, params: Any, prompts: Sequence[Sequence[int]], new_tokens: int,
           sampling: Sampling | None = None, key: jax.Array | None = None, *,
           size: int | None = None, kind: str = "model", chunk: int = 0, stop: int | None = None,
           every: int = 16) -> Iterator[np.ndarray]:
    """As `generate`, piece by piece as they come: the first token, then [B, `every`] at a time.

    The same tokens, and the last piece may be shorter; `every` 0 = all in one piece.
    """
    sampling = sampling or Sampling()
    check_whole("every", every, 0)
    if not isinstance(model, DecoderLM) or model.cross is not None:
        raise UserError("generate and stream continue texts by a decoder alone; decode an "
                        "encoder-decoder with tx_jax.beam.search.")
    plan = make_plan(model, prompts, new_tokens, sampling, size=size, kind=kind, chunk=chunk,
                     stop=stop)
    tokens, lengths = padded(prompts)
    keys_B = row_keys(sampling, key, len(prompts))
    if new_tokens == 0:
        yield np.zeros((len(prompts), 0), np.int32)
        return
    weights = _unstack(model, params)
    if not every:
        yield check_numbers(run_loop(model, plan, weights, tokens, lengths, keys_B), 0)
        return
    state, done = _begin(model, plan, weights, tokens, lengths, keys_B), 1
    yield check_numbers(state.token_B[:, None], 0)
    while done < new_tokens:
        most = min(every, new_tokens - done)
        state, out_BT = _go_on(model, plan, every, weights, state, keys_B, most)
        piece = check_numbers(out_BT[:, :most], done)
        yield piece
        done += piece.shape[1]
        if stop is not None and (piece[:, -1] == stop).all() and done < new_tokens:
            yield np.full((len(prompts), new_tokens - done), stop, np.int32)
            return


def _draw(plan: Plan, logits_BV: jax.Array, keys_B: jax.Array | None, cache: Cache,
          done_B: jax.Array, seen_BV: jax.Array | None, count: jax.Array) -> State:
    """The state after one more token is drawn."""
    keys = None if keys_B is None else jax.vmap(jax.random.fold_in, (0, None))(keys_B, count)
    token_B = sample(logits_BV, plan.sampling, keys, seen_BV)
    if plan.stop is not None:
        token_B = jnp.where(done_B, plan.stop, token_B)
        done_B = token_B == plan.stop
    if seen_BV is not None:
        seen_BV = seen_BV.at[jnp.arange(token_B.shape[0]), token_B].set(True, mode="drop")
    return State(cache, token_B, done_B, seen_BV, count + 1)


def _start(model, plan, params, tokens_BT, lengths_B, keys_B) -> State:
    """Read the prompts and draw the first token."""
    B, T = tokens_BT.shape
    text_BT = jnp.arange(T)[None] < lengths_B[:, None]
    logits_BV, cache = prefill(model, params, tokens_BT, init_cache(model, B, plan.size, plan.kind),
                               text_BT.astype(jnp.int32), chunk=plan.chunk)
    seen_BV = None
    if plan.sampling.repetition_penalty != 1:
        seen_BV = jnp.zeros((B, model.vocab), bool).at[jnp.arange(B)[:, None], tokens_BT].max(
            text_BT)
    return _draw(plan, logits_BV, keys_B, cache, jnp.zeros((B,), bool), seen_BV, jnp.int32(0))


def _loop(model, plan, n, params, state, keys_B, most) -> tuple[State, jax.Array]:
    """`most` of up to n more tokens, int32 [B, n]; fewer are drawn when every row is done."""
    filler = 0 if plan.stop is None else plan.stop
    out_BT = jnp.full((state.token_B.shape[0], n), filler, jnp.int32)
    if n == 0:
        return state, out_BT

    def unfinished(carry):
        i, state, _ = carry
        return (i < most) & ~jnp.all(state.done_B)

    def step(carry):
        i, state, out_BT = carry
        logits_BV, cache = decode_step(model, params, state.token_B, state.cache)
        state = _draw(plan, logits_BV, keys_B, cache, state.done_B, state.seen_BV, state.count)
        return i + 1, state, jax.lax.dynamic_update_slice_in_dim(
            out_BT, state.token_B[:, None], i, axis=1)

    return jax.lax.while_loop(unfinished, step, (jnp.int32(0), state, out_BT))[1:]


@functools.partial(jax.jit, static_argnums=(0, 1))
def run_loop(model: DecoderLM, plan: Plan, params: Any, tokens_BT: jax.Array, lengths_B: jax.Array,
             keys_B: jax.Array | None) -> jax.Array:
    """The compiled part of `generate`: prefill, then a loop on the device, [B, new_tokens]."""
    state = _start(model, plan, params, tokens_BT, lengths_B, keys_B)
    n = plan.new_tokens - 1
    _, rest_BT = _loop(model, plan, n, params, state, keys_B, n)
    return jnp.concatenate([state.token_B[:, None], rest_BT], axis=1)


_unstack = jax.jit(unstack, static_argnums=0)
_begin = jax.jit(_start, static_argnums=(0, 1))
_go_on = jax.jit(_loop, static_argnums=(0, 1, 2), donate_argnums=4)
