"""Beam search over any decoder with a cache, inside one compiled loop.

A hypothesis scores the sum of its tokens' log-probabilities, the stop token's among them, over
`length ** length_penalty` with that many tokens (Wu et al. 2016, eq. 14, with the plain power that
later systems took). At each step the `beams` likeliest continuations of a row are kept; one that
ends with the stop token is finished and is not continued. A row is done when as many
hypotheses are finished as there are beams, or at the last token, when those that go on count with
the tokens they have. Rows do not wait for each other's scores, so a batch gives what its rows give
alone. One more hypothesis follows the likeliest token alone, so that the best is never below greedy
search; one beam is greedy search.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax import decode, seq2seq
from tx_jax.config import check, check_whole, option
from tx_jax.errors import UserError
from tx_jax.models import DecoderLM
from tx_jax.requests import check_numbers, check_prompts, make_plan, padded
from tx_jax.sampling import Sampling
from tx_jax.seq2seq import EncoderDecoder

Step = Callable[[jax.Array, Any], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class Beam:
    """How a search goes.

    Attributes:
      beams: hypotheses kept for each row; 1 = greedy.
      length_penalty: power of the length that divides a score; 0 = none, which favours short ones,
        and above 0 the more the longer.
    """

    beams: int = option(4, "hypotheses kept for each row; 1 = greedy", low=1)
    length_penalty: float = option(1.0, "power of the length that divides a score; 0 = none")

    def __post_init__(self) -> None:
        check(self, "")


@dataclass(frozen=True)
class Found:
    """The hypotheses of each row from the best on.

    Attributes:
      tokens_BRT: int32 [rows, beams, new tokens]; after the stop token only stop tokens.
      scores_BR: float32; minus infinity where there is no further hypothesis.
    """

    tokens_BRT: np.ndarray
    scores_BR: np.ndarray

    @property
    def best_BT(self) -> np.ndarray:
        """Tokens of the best hypothesis of each row."""
        return self.tokens_BRT[:, 0]


def search(model: DecoderLM | EncoderDecoder, params: Any, prompts: Sequence[Sequence[int]],
           new_tokens: int, stop: int, beam: Beam | None = None, *,
           begin: int | None = None) -> Found:
    """The likeliest continuations of prompts, or targets of sources, by beam search.

    Args:
      prompts: token ids of any lengths above 0; for an encoder-decoder the sources.
      new_tokens: the most tokens to add, the stop token among them.
      stop: the token that ends a text.
      begin: for an encoder-decoder, the token that opens every target.

    Raises:
      UserError: anything that cannot work, before anything runs; or the logits are not numbers.
    """
    beam = beam or Beam()
    check_whole("new_tokens", new_tokens, 1)
    decoder = getattr(model, "decoder", model)
    if beam.beams > decoder.vocab:
        raise UserError(f"--beams={beam.beams} is more than the {decoder.vocab} tokens that can "
                        "follow; give fewer.")
    greedy = Sampling(temperature=0)
    if decoder is model:
        size = make_plan(model, prompts, new_tokens, greedy, stop=stop).size
        found = _search(model, beam, new_tokens, size, stop, params, *padded(prompts))
    else:
        check_prompts(decoder, prompts, new_tokens)
        if begin is None:
            raise UserError("an encoder-decoder needs the token that opens every target; give "
                            "begin.")
        make_plan(decoder, [[begin]], new_tokens, greedy, stop=stop)
        found = _search_source(model, beam, new_tokens, stop, begin, params, *padded(prompts))
    check_numbers(found[0].reshape(-1, new_tokens), 0)
    return Found(*map(np.asarray, found))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _search(model, beam, n, size, stop, params, tokens_BT, lengths_B):
    params = decode.unstack(model, params)
    text_BT = jnp.arange(tokens_BT.shape[1])[None] < lengths_B[:, None]
    logits_BV, cache = decode.prefill(model, params, tokens_BT, decode.init_cache(
        model, tokens_BT.shape[0], size), text_BT.astype(jnp.int32))
    step = functools.partial(decode.decode_step, model, params)
    return run(step, logits_BV, cache, beam, n, stop)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _search_source(model, beam, n, stop, begin, params, tokens_BS, lengths_B):
    text_BS = jnp.arange(tokens_BS.shape[1])[None] < lengths_B[:, None]
    memory = seq2seq.read(model, params, tokens_BS, text_BS.astype(jnp.int32))
    B, decoder = tokens_BS.shape[0], model.decoder
    weights = decode.unstack(decoder, seq2seq.decoder_params(params))
    cache = decode.init_cache(decoder, B, n)
    logits_BV, cache = decode.decode_step(decoder, weights, jnp.full((B,), begin, jnp.int32),
                                          cache, memory=memory)
    # All hypotheses of a row read the same source, so it is repeated once and never reordered.
    wide = seq2seq.repeat(memory, hypotheses(beam))
    return run(functools.partial(decode.decode_step, decoder, weights, memory=wide), logits_BV,
               cache, beam, n, stop)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _State:
    """Hypotheses that go on, the last of them the greedy one, and those that are finished.

    Scores of the former are sums, of the latter divided by their length's power.
    """

    t: jax.Array
    model: Any
    score_BR: jax.Array
    tokens_BRT: jax.Array
    done_score_BR: jax.Array
    done_BRT: jax.Array
    greedy_goes_B: jax.Array
    count_B: jax.Array


def hypotheses(beam: Beam) -> int:
    """R, the hypotheses of a row that go on: the beams and, beside several, the greedy one."""
    return beam.beams + (beam.beams > 1)


def run(step: Step, logits_BV: jax.Array, state: Any, beam: Beam, n: int, stop: int
        ) -> tuple[jax.Array, jax.Array]:
    """Tokens [B, beams, n] and scores [B, beams] from the best on; see the module for the rules.

    Args:
      step: (tokens [B * R], state) -> (logits [B * R, V], state) of the tokens after.
      logits_BV: of the first token.
      state: what `step` carries, every leaf with the rows [B] first.
    """
    B, R, K = logits_BV.shape[0], hypotheses(beam), beam.beams
    # All hypotheses begin alike, so only one of them, and the greedy one, may be continued.
    first_R = (jnp.arange(R) == 0) | (jnp.arange(R) >= K)
    start = _State(jnp.int32(0), jax.tree.map(lambda x: jnp.repeat(x, R, axis=0), state),
                   jnp.broadcast_to(jnp.where(first_R, 0.0, -jnp.inf)[None], (B, R)),
                   jnp.full((B, R, n), stop, jnp.int32), jnp.full((B, R), -jnp.inf),
                   jnp.full((B, R, n), stop, jnp.int32), jnp.full((B,), R > K),
                   jnp.zeros((B,), jnp.int32))
    state = _choose(start, jnp.repeat(logits_BV, R, axis=0), beam, stop)

    def advance(state):
        last_BR = jax.lax.dynamic_index_in_dim(state.tokens_BRT, state.t - 1, 2, keepdims=False)
        logits_RV, inner = step(last_BR.reshape(-1), state.model)
        return _choose(replace(state, model=inner), logits_RV, beam, stop)

    state = jax.lax.while_loop(lambda s: (s.t < n) & ~jnp.all(_done(s, K)), advance, state)
    # What still goes on counts with the tokens it has, unless its row has all it needs.
    enough_BR = (state.count_B >= K)[:, None] & (jnp.arange(R) < K)[None]
    rest_BR = jnp.where(enough_BR, -jnp.inf, state.score_BR)
    rest_BR /= state.t.astype(jnp.float32) ** beam.length_penalty
    return _best(K, jnp.concatenate([state.done_score_BR, rest_BR], axis=1),
                 jnp.concatenate([state.done_BRT, state.tokens_BRT], axis=1))


def _done(state: _State, K: int) -> jax.Array:
    return (state.count_B >= K) & ~state.greedy_goes_B


def _best(R: int, score_BC: jax.Array, tokens_BCT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The R best hypotheses, each once: the greedy one may have been found by the beams too."""
    same_BCC = jnp.all(tokens_BCT[:, :, None] == tokens_BCT[:, None], axis=-1)
    same_BCC &= (score_BC > -jnp.inf)[:, None]
    C = score_BC.shape[1]
    again_BC = jnp.any(same_BCC & (jnp.arange(C)[None] < jnp.arange(C)[:, None])[None], axis=-1)
    score_BR, place_BR = jax.lax.top_k(jnp.where(again_BC, -jnp.inf, score_BC), R)
    return jnp.take_along_axis(tokens_BCT, place_BR[..., None], axis=1), score_BR


def _choose(state: _State, logits_RV: jax.Array, beam: Beam, stop: int) -> _State:
    """One more token for every hypothesis that goes on."""
    (B, R), K, V = state.score_BR.shape, beam.beams, logits_RV.shape[-1]
    logp_BRV = jax.nn.log_softmax(logits_RV.astype(jnp.float32)).reshape(B, R, V)
    total_BRV = state.score_BR[..., None] + logp_BRV
    # By logits: beside a long sum the difference of two near tokens would be rounded away.
    greedy_B1 = jnp.argmax(logits_RV.reshape(B, R, V)[:, -1], axis=-1)[:, None]
    greedy = (jnp.take_along_axis(total_BRV[:, -1], greedy_B1, axis=1), greedy_B1,
              jnp.full_like(greedy_B1, R - 1))
    if R > K:
        score_BK, place_BK = jax.lax.top_k(total_BRV[:, :K].reshape(B, K * V), K)
        greedy = (jnp.concatenate(pair, axis=1) for pair in zip(
            (score_BK, place_BK % V, place_BK // V), greedy, strict=True))
    score_BR, token_BR, from_BR = greedy
    bad_B = jnp.any(jnp.isnan(logp_BRV).any(axis=-1) & (state.score_BR > -jnp.inf), axis=-1)
    token_BR = jnp.where(bad_B[:, None], -1, token_BR.astype(jnp.int32))
    tokens_BRT = jnp.take_along_axis(state.tokens_BRT, from_BR[..., None], axis=1)
    tokens_BRT = jax.lax.dynamic_update_slice_in_dim(tokens_BRT, token_BR[..., None], state.t, 2)
    rows_R = (jnp.arange(B)[:, None] * R + from_BR).reshape(-1)
    ends_BR = (token_BR == stop) & (score_BR > -jnp.inf) & ~_done(state, K)[:, None]
    beams_end_BR = ends_BR & (jnp.arange(R) < K)[None] & (state.count_B < K)[:, None]
    greedy_end_BR = ends_BR & (jnp.arange(R) >= K)[None] & state.greedy_goes_B[:, None]
    length = (state.t + 1).astype(jnp.float32) ** beam.length_penalty
    done_BRT, done_score_BR = _best(
        R, jnp.concatenate([state.done_score_BR, jnp.where(beams_end_BR | greedy_end_BR,
                                                           score_BR / length, -jnp.inf)], axis=1),
        jnp.concatenate([state.done_BRT, tokens_BRT], axis=1))
    return _State(state.t + 1, jax.tree.map(lambda x: x[rows_R], state.model),
                  jnp.where(ends_BR, -jnp.inf, score_BR), tokens_BRT, done_score_BR, done_BRT,
                  state.greedy_goes_B & ~jnp.any(greedy_end_BR, axis=1),
                  state.count_B + jnp.sum(beams_end_BR, axis=1, dtype=jnp.int32))
