"""What may be asked of a generation: every check that can be made before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.cache import Cache, check_kind
from tx_jax.config import check_whole
from tx_jax.errors import UserError
from tx_jax.limits import max_length
from tx_jax.masks import Rule, parse_mask
from tx_jax.models import DecoderLM
from tx_jax.sampling import Sampling


@dataclass(frozen=True)
class Plan:
    """What a generation is compiled for.

    Attributes:
      size: places of the cache. kind: its format. chunk: of the prefill, 0 = all at once.
      stop: token after which a row only repeats it; None = none.
    """

    sampling: Sampling
    new_tokens: int
    size: int
    kind: str = "model"
    chunk: int = 0
    stop: int | None = None


def make_plan(model: DecoderLM, prompts: Sequence[Sequence[int]], new_tokens: int,
              sampling: Sampling, *, size: int | None = None, kind: str = "model", chunk: int = 0,
              stop: int | None = None) -> Plan:
    """The plan of a generation that will work.

    Raises:
      UserError: it would not.
    """
    lengths = check_prompts(model, prompts, new_tokens)
    total = max(lengths) + new_tokens
    limit = max_length(model)
    for most, what in ((size, "a cache of {} places"),
                       (limit, f"the {{}} positions of --model.positions={model.cfg.positions}")):
        if most is not None and total > most:
            raise UserError(f"a prompt of {max(lengths)} tokens and {new_tokens} new ones make "
                            f"{total}, more than {what.format(most)}; shorten one of them.")
    check_kind(kind)
    check_whole("chunk", chunk, 0)
    check_whole("stop", 0 if stop is None else stop, 0)
    if stop is not None and stop >= model.vocab:
        raise UserError(f"stop={stop} lies outside the vocabulary of {model.vocab} tokens; give "
                        "the token that ends a text.")
    rule = parse_mask(model.cfg.mask)
    _check_mask(rule, min(lengths), total)
    check_chunk(rule, chunk, max(lengths))
    return Plan(sampling, new_tokens, size or total, kind, chunk, stop)


def padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as int32 [B, T] with zeros on the right, and their lengths [B]."""
    lengths = [len(prompt) for prompt in prompts]
    tokens = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[:len(prompt)] = prompt
    return tokens, np.asarray(lengths, np.int32)


def sequence_keys(key: jax.Array, n: int) -> jax.Array:
    """The keys [n] that `generate` gives to n prompts."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(n))


def row_keys(sampling: Sampling, key: jax.Array | None, n: int) -> jax.Array | None:
    """A key for each of n prompts; None where nothing is drawn."""
    if sampling.temperature == 0:
        return None
    if key is None:
        raise UserError(f"temperature {sampling.temperature} draws at random; give a key, or "
                        "temperature 0 for the likeliest token.")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key) or key.shape not in ((), (n,)):
        raise UserError(f"key has shape {key.shape} and dtype {key.dtype}; give one jax.random.key "
                        f"or one per prompt ({n}).")
    return key if key.ndim else sequence_keys(key, n)


def check_room(cache: Cache, tokens_BT: jax.Array, lengths_B: jax.Array | None) -> jax.Array:
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
        return jnp.clip(lengths_B, 0, T)
    if ((lengths_B < 0) | (lengths_B > T)).any():
        raise UserError(f"lengths_B={lengths_B.tolist()} must lie between 0 and the {T} tokens of "
                        "each row.")
    if longest > cache.size:
        raise UserError(f"{longest} tokens do not fit into a cache of {cache.size}; make it larger "
                        "or give fewer tokens.")
    return lengths_B


def check_chunk(rule: Rule, chunk: int, length: int) -> None:
    """Refuse chunks between which the mask shows a token a later one."""
    if not chunk or chunk >= length or _looks_back(rule):
        return
    for start in range(0, length - chunk, chunk):
        q_idx, k_idx = np.ix_(np.arange(start, start + chunk), np.arange(start + chunk, length))
        if np.any(rule.allowed(q_idx, k_idx)):
            raise UserError(f"the mask {rule} shows a token one that lies in a later chunk of "
                            f"{chunk}; read the prompt in one piece (chunk 0).")


def check_numbers(out_BT: jax.Array, before: int) -> np.ndarray:
    """Tokens as NumPy; UserError where one is -1, which `sample` gives for NaN."""
    out = np.asarray(out_BT)
    if (out < 0).any():
        row, place = np.argwhere(out < 0)[0]
        raise UserError(f"the logits for new token {before + place + 1} of prompt {row + 1} are "
                        "not numbers; the parameters hold NaN or infinity, train them again.")
    return out


def _looks_back(rule: Rule) -> bool:
    band = rule.band()
    return band is not None and band[0] >= 0


def check_prompts(model: DecoderLM, prompts: Sequence[Sequence[int]], new_tokens: int
                   ) -> list[int]:
    """Lengths of the prompts; UserError if one is empty or holds something else than tokens."""
    check_whole("new_tokens", new_tokens, 0)
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
    if _looks_back(rule):
        return
    keys = np.arange(shortest, total)
    # Rows of queries one after another, as the whole table may be large.
    for q in range(total - 1):
        later = keys[keys > q]
        if np.any(rule.allowed(np.full(later.shape, q), later)):
            raise UserError(f"the mask {rule} shows token {q} a token after the prompt, which is "
                            f"generated later; give longer prompts (the shortest has {shortest} "
                            "tokens) or a causal mask.")
