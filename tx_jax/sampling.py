"""How the next token is drawn from logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tx_jax.config import check, option
from tx_jax.errors import UserError

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
      repetition_penalty: before all others, logits of tokens that the row holds already, its
        prompt included, are divided by it if positive and multiplied if negative (Keskar et al.
        2019, CTRL, section 4.1); 1 is off, below 1 favours them.
    """

    temperature: float = option(1.0, "divides the logits; 0 = always the likeliest token", low=0.0)
    top_k: int = option(0, "draw among the k likeliest tokens; 0 = all", low=0,
                       when=_DRAWN)
    top_p: float = option(1.0, "draw among the likeliest tokens that sum to this probability; "
                          "1 = all", low=0.0, high=1.0, when=_DRAWN)
    min_p: float = option(0.0, "leave out tokens below this share of the largest probability; "
                          "0 = none", low=0.0, high=1.0, when=_DRAWN)
    repetition_penalty: float = option(1.0, "makes tokens of the text so far less likely; 1 = off",
                                       low=0.01, high=100.0)

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            kinds = int if name == "top_k" else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds):
                what = "whole number" if name == "top_k" else "number"
                raise UserError(f"--{name}={value!r} is not a {what}.")
        check(self, "")


def sample(logits_BV: jax.Array, sampling: Sampling, keys_B: jax.Array | None,
           seen_BV: jax.Array | None = None) -> jax.Array:
    """The next tokens, int32 [B]; -1 where a logit is NaN or the largest is infinite.

    Args:
      keys_B: one PRNG key per row, which alone decides it; not read at temperature 0.
      seen_BV: bool, the tokens that the row holds; a repetition penalty needs it.
    """
    bad_B = jnp.any(jnp.isnan(logits_BV), axis=-1) | jnp.isinf(jnp.max(logits_BV, axis=-1))
    if sampling.repetition_penalty != 1:
        logits_BV = _penalize(logits_BV, sampling.repetition_penalty, seen_BV)
    if sampling.temperature == 0:
        token_B = jnp.argmax(logits_BV, axis=-1)
    else:
        if keys_B is None:
            raise UserError(f"temperature {sampling.temperature} draws at random; give a key, or "
                            "temperature 0 for the likeliest token.")
        # Differences first: then no quotient of a tiny temperature is infinity minus infinity.
        logits_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)
        logits_BV = logits_BV / max(sampling.temperature, COLDEST)
        if (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 1, 0):
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


def _penalize(logits_BV: jax.Array, penalty: float, seen_BV: jax.Array | None) -> jax.Array:
    if seen_BV is None:
        raise UserError(f"a repetition penalty of {penalty} needs to know the tokens so far; give "
                        "seen_BV.")
    lower_BV = jnp.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return jnp.where(seen_BV, lower_BV, logits_BV)
