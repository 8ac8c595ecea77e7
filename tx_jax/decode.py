"""Generation with a cache of keys and values: prefill, one step, sampling, and the compiled loop.

The cache (`models.Cache`) is an argument and a result. Prompts of different lengths are padded on
the right inside, so every text starts at index 0 of its row, and what a row gives depends neither
on its padding nor on the other rows. Not here yet: a ring buffer for windows, int8 caches, prefill
in chunks, a stop at the end of text.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax import models
from tx_jax.config import check, option
from tx_jax.errors import UserError
from tx_jax.letters import letters_of, sizes
from tx_jax.masks import Rule, parse_mask
from tx_jax.models import Cache, DecoderLM
from tx_jax.positions import make_encoding

_DRAWN = ("temperature", lambda t: t > 0, "temperature 0 takes the likeliest token anyway")

# A temperature below is taken as this, so that no quotient is 0 / 0.
COLDEST = 1e-30


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; filters narrow each other in the order of the fields.

    Attributes:
      temperature: divides the logits; 0 takes the likeliest token, the lowest id among equals.
      top_k: keep the k likeliest tokens, exactly k also among equals (the lowest ids); 0 or more
        than the vocabulary is off.
      top_p: keep the likeliest tokens until their probabilities sum to p, at least one; 1 is off.
      min_p: drop tokens below this share of the largest probability; 0 is off.
    """

    temperature: float = option(1.0, "divides the logits; 0 = always the likeliest token", low=0.0)
    top_k: int = option(0, "draw among the k likeliest tokens; 0 = all", low=0,
                       when=_DRAWN)
    top_p: float = option(1.0, "draw among the likeliest tokens that sum to this probability; "
                          "1 = all", low=0.0, high=1.0, when=_DRAWN)
    min_p: float = option(0.0, "leave out tokens below this share of the largest probability; "
                          "0 = none", low=0.0, high=1.0, when=_DRAWN)

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p"):
            value = getattr(self, name)
            kinds = int if name == "top_k" else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds):
                what = "whole number" if name == "top_k" else "number"
                raise UserError(f"--{name}={value!r} is not a {what}.")
        check(self, "")


def sample(logits_BV: jax.Array, sampling: Sampling, keys_B: jax.Array | None) -> jax.Array:
    """The next tokens, int32 [B]; -1 where the logits are not numbers.

    Args:
      keys_B: one PRNG key per row, which alone decides it; not read at temperature 0.
    """
    bad_B = jnp.any(jnp.isnan(logits_BV), axis=-1)
    if sampling.temperature == 0:
        token_B = jnp.argmax(logits_BV, axis=-1)
    else:
        if keys_B is None:
            raise UserError(f"temperature {sampling.temperature} draws at random; give a key, or "
                            "temperature 0 for the likeliest token.")
        # Differences first: then no quotient of a tiny temperature is infinity minus infinity.
        logits_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)
        logits_BV = logits_BV / max(sampling.temperature, COLDEST)
        if sampling == Sampling(sampling.temperature):
            token_B = jax.vmap(jax.random.categorical)(keys_B, logits_BV)
        else:
            kept_BC, id_BC = _kept(logits_BV, sampling)
            place_B = jax.vmap(jax.random.categorical)(keys_B, kept_BC)
            token_B = jnp.take_along_axis(id_BC, place_B[:, None], axis=1)[:, 0]
    return jnp.where(bad_B, -1, token_B.astype(jnp.int32))


def _kept(logits_BV: jax.Array, sampling: Sampling) -> tuple[jax.Array, jax.Array]:
    """Candidates from the likeliest on: logits, minus infinity where dropped, and token ids."""
    V = logits_BV.shape[-1]
    logits_BC, id_BC = jax.lax.top_k(logits_BV, min(sampling.top_k or V, V))
    p_BC = jax.nn.softmax(logits_BC, axis=-1)
    first_1C = jnp.arange(p_BC.shape[1])[None] == 0
    keep_BC = first_1C | (jnp.cumsum(p_BC, axis=-1) - p_BC < sampling.top_p)
    p_BC = jnp.where(keep_BC, p_BC, 0)
    keep_BC &= first_1C | (p_BC >= sampling.min_p * p_BC[:, :1])
    return jnp.where(keep_BC, logits_BC, -jnp.inf), id_BC


def init_cache(model: DecoderLM, batch: int, size: int) -> Cache:
    """An empty cache for `batch` texts of up to `size` tokens."""
    for name, value in (("batch", batch), ("size", size)):
        if not isinstance(value, int) or value < 1:
            raise UserError(f"a cache needs {name} of at least 1, not {value!r}.")
    limit = max_length(model)
    if limit is not None and size > limit:
        raise UserError(f"a cache of {size} tokens is longer than the {limit} positions that "
                        f"--model.positions={model.cfg.positions} knows; make it smaller.")
    cfg = model.cfg
    shape = (cfg.layers, batch, size, cfg.groups, cfg.head_width)
    return Cache(jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype),
                 jnp.zeros((batch,), jnp.int32))


def max_length(model: DecoderLM) -> int | None:
    """The positions that the model's scheme knows; None = no limit."""
    encoding = make_encoding(model.cfg.positions)
    size = sizes(model.cfg, model.vocab, model.context)
    tables = jax.eval_shape(lambda key: encoding.init(key, size), jax.random.key(0))
    limits = [leaf.shape[letters_of(name).index("T")] for name, leaf in tables.items()
              if "T" in letters_of(name)]
    return min([*limits, *filter(None, [encoding.max_length])], default=None)


def prefill(model: DecoderLM, params: Any, tokens_BT: jax.Array, cache: Cache,
            segments_BT: jax.Array | None = None) -> tuple[jax.Array, Cache]:
    """Read the prompts in one pass.

    Args:
      segments_BT: 0 = padding, on the left or on the right; the rest of a row is one text.

    Returns:
      (logits_BV after the last token of each text, cache).
    """
    if segments_BT is None:
        lengths_B = jnp.full(tokens_BT.shape[:1], tokens_BT.shape[1], jnp.int32)
    else:
        text_BT = segments_BT != 0
        order_BT = jnp.argsort(~text_BT, axis=1, stable=True)
        tokens_BT = jnp.take_along_axis(tokens_BT, order_BT, axis=1)
        lengths_B = jnp.sum(text_BT, axis=1, dtype=jnp.int32)
    logits_BTV, cache = models.apply(model, params, tokens_BT, cache=cache, lengths_B=lengths_B)
    last_B11 = jnp.maximum(lengths_B - 1, 0)[:, None, None]
    return jnp.take_along_axis(logits_BTV, last_B11, axis=1)[:, 0], cache


def decode_step(model: DecoderLM, params: Any, token_B: jax.Array, cache: Cache
                ) -> tuple[jax.Array, Cache]:
    """Read one more token of each text: (logits_BV, cache)."""
    logits_BTV, cache = models.apply(model, params, token_B[:, None], cache=cache)
    return logits_BTV[:, 0], cache


def sequence_keys(key: jax.Array, n: int) -> jax.Array:
    """The keys [n] that `generate` gives to n prompts."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(n))


def generate(model: DecoderLM, params: Any, prompts: Sequence[Sequence[int]], new_tokens: int,
             sampling: Sampling | None = None, key: jax.Array | None = None, *,
             size: int | None = None) -> np.ndarray:
    """Continue prompts by `new_tokens` tokens each: one compiled program, int32 [B, new_tokens].

    Args:
      prompts: token ids, of any lengths above 0.
      sampling: by default `Sampling()`.
      key: one PRNG key, or one per prompt as from `sequence_keys`; a prompt with its key gives the
        same alone and among others. Temperature 0 needs none.
      size: places of the cache; by default as many as the longest text takes.

    Raises:
      UserError: anything that cannot work, before anything runs; or the logits are not numbers.
    """
    sampling = sampling or Sampling()
    lengths = _check_prompts(model, prompts, new_tokens)
    total = max(lengths) + new_tokens
    limit = max_length(model)
    for most, what in ((size, "a cache of {} places"),
                       (limit, f"the {{}} positions of --model.positions={model.cfg.positions}")):
        if most is not None and total > most:
            raise UserError(f"a prompt of {max(lengths)} tokens and {new_tokens} new ones make "
                            f"{total}, more than {what.format(most)}; shorten one of them.")
    _check_mask(parse_mask(model.cfg.mask), min(lengths), total)
    keys_B = _row_keys(sampling, key, len(prompts))
    if new_tokens == 0:
        return np.zeros((len(prompts), 0), np.int32)
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[:len(prompt)] = prompt
    out = np.asarray(run_loop(model, sampling, new_tokens, size or total, params, tokens,
                              np.asarray(lengths, np.int32), keys_B))
    if (out < 0).any():
        row, place = np.argwhere(out < 0)[0]
        raise UserError(f"the logits for new token {place + 1} of prompt {row + 1} are not "
                        "numbers; the parameters hold NaN or infinity, train them again.")
    return out


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def run_loop(model: DecoderLM, sampling: Sampling, new_tokens: int, size: int, params: Any,
             tokens_BT: jax.Array, lengths_B: jax.Array, keys_B: jax.Array | None) -> jax.Array:
    """The compiled part of `generate`: prefill, then a loop on the device, [B, new_tokens]."""
    B, T = tokens_BT.shape

    def draw(logits_BV, i):
        keys = None if keys_B is None else jax.vmap(jax.random.fold_in, (0, None))(keys_B, i)
        return sample(logits_BV, sampling, keys)

    def step(carry, i):
        token_B, cache = carry
        logits_BV, cache = decode_step(model, params, token_B, cache)
        token_B = draw(logits_BV, i)
        return (token_B, cache), token_B

    segments_BT = (jnp.arange(T)[None] < lengths_B[:, None]).astype(jnp.int32)
    logits_BV, cache = prefill(model, params, tokens_BT, init_cache(model, B, size), segments_BT)
    first_B = draw(logits_BV, jnp.int32(0))
    _, rest_TB = jax.lax.scan(step, (first_B, cache), jnp.arange(1, new_tokens, dtype=jnp.int32))
    return jnp.concatenate([first_B[:, None], rest_TB.T], axis=1)


def _row_keys(sampling: Sampling, key: jax.Array | None, n: int) -> jax.Array | None:
    if sampling.temperature == 0:
        return None
    if key is None:
        raise UserError(f"temperature {sampling.temperature} draws at random; give a key, or "
                        "temperature 0 for the likeliest token.")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape not in ((), (n,)):
        raise UserError(f"key has shape {key.shape} and dtype {key.dtype}; give one jax.random.key "
                        f"or one per prompt ({n}).")
    return key if key.ndim else sequence_keys(key, n)


def _check_prompts(model: DecoderLM, prompts: Sequence[Sequence[int]], new_tokens: int
                   ) -> list[int]:
    """Lengths of the prompts; UserError if one is empty or holds something else than tokens."""
    if isinstance(new_tokens, bool) or not isinstance(new_tokens, int) or new_tokens < 0:
        raise UserError(f"new_tokens={new_tokens!r} must be a whole number of at least 0.")
    if not len(prompts):
        raise UserError("there are no prompts; give at least one.")
    for i, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise UserError(f"prompt {i + 1} is no list of token ids; give at least one integer.")
        outside = ids[(ids < 0) | (ids >= model.vocab)]
        if outside.size:
            raise UserError(f"prompt {i + 1} holds token {outside[0]}, outside the vocabulary of "
                            f"{model.vocab} tokens.")
    return [len(prompt) for prompt in prompts]


def _check_mask(rule: Rule, shortest: int, total: int) -> None:
    """Refuse a mask under which a token would see one that is not there yet."""
    keys = np.arange(shortest, total)
    # Rows of queries one after another, as the whole table may be large.
    for q in range(total - 1):
        later = keys[keys > q]
        if np.any(rule.allowed(np.full(later.shape, q), later)):
            raise UserError(f"the mask {rule} shows token {q} a token after the prompt, which is "
                            f"generated later; give longer prompts (the shortest has {shortest} "
                            "tokens) or a causal mask.")
