"""Programs of the cache study: the next token with a cache and without, and a whole generation."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax import decode, models
from tx_jax.config import ModelConfig
from tx_jax.decode import Plan, Sampling
from tx_jax.models import DecoderLM

VOCAB = 256
ARMS = ("no_cache", "mha", "gqa", "mqa", "window", "int8")
BASELINE = "mha"


def model_of(settings: Any, arm: str, length: int, **options: Any) -> DecoderLM:
    """The model of an arm, for texts of `length` tokens; `options` override its configuration."""
    heads = {"gqa": settings.groups, "mqa": 1}.get(arm, settings.heads)
    mask = f"causal & window({settings.window})" if arm == "window" else "causal"
    cfg = ModelConfig(layers=settings.layers, d_model=settings.d_model, heads=settings.heads,
                      kv_heads=heads, mask=mask, dtype=settings.dtype)
    return DecoderLM(replace(cfg, **options), VOCAB, length)  # what `build` checks is known here


def kind_of(arm: str) -> str:
    """The format of an arm's cache."""
    return "int8" if arm == "int8" else "model"


def cached_tokens(model: DecoderLM, weights: Any, carry: Any, steps: jax.Array) -> Any:
    """`steps` times the last token of a full context: (token_B, cache) -> the same.

    The cache is set back by a token before every step, so that each sees the same number of keys.
    """
    def step(_, carry):
        token_B, cache = carry
        before = replace(cache, length_B=jnp.full_like(cache.length_B, cache.size - 1))
        logits_BV, cache = decode.decode_step(model, weights, token_B, before)
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32), cache

    return jax.lax.fori_loop(0, steps, step, carry)


def uncached_tokens(model: DecoderLM, params: Any, carry: Any, steps: jax.Array) -> Any:
    """`steps` times the last token of a full context: (text_BT, last) -> the same.

    Every token takes a pass over the whole padded text, as the positions before it are not kept.
    `last`, the place of the newest token, is an argument, as it would move in a generation.
    """
    def step(_, carry):
        text_BT, last = carry
        logits_BTV, _ = models.apply(model, params, text_BT)
        token_B = jnp.argmax(logits_BTV[:, last], axis=-1).astype(jnp.int32)
        return text_BT.at[:, last].set(token_B), last

    return jax.lax.fori_loop(0, steps, step, carry)


def make_runner(settings: Any, arm: str, length: int) -> tuple[Callable[[int], Any], float]:
    """A function that draws n tokens at a full context, and the seconds it took to compile."""
    model, kind = model_of(settings, arm, length), kind_of(arm)
    # Zeros will do for a cache and any weights: no time depends on what the numbers are.
    if arm == "no_cache":
        function, shapes = uncached_tokens, jax.eval_shape(
            lambda: models.init(model, jax.random.key(0)))
        carry = jnp.zeros((settings.batch, length), jnp.int32), jnp.int32(length - 1)
    else:
        function, shapes = cached_tokens, shapes_of(model, settings.batch, length, kind)[0]
        carry = (jnp.zeros((settings.batch,), jnp.int32),
                 decode.init_cache(model, settings.batch, length, kind))
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda x: jnp.asarray(
        0.05 * rng.standard_normal(x.shape, np.float32), x.dtype), shapes)
    began = time.perf_counter()
    program = jax.jit(partial(function, model), donate_argnums=1).lower(
        weights, carry, jnp.int32(1)).compile()
    compiling = time.perf_counter() - began
    held = [carry]

    def run(steps: int) -> None:
        held[0] = jax.block_until_ready(program(weights, held[0], jnp.int32(steps)))

    return run, compiling


def time_tokens[K](runners: Mapping[K, Callable[[int], None]], rounds: int, least: float = 0.02
                   ) -> tuple[dict[K, list[float]], dict[K, int]]:
    """Seconds per token of each arm in each round, and the tokens that one timing averages.

    A timing lasts `least` seconds or a token, whichever is longer; arms take turns in an order
    that rotates from round to round.
    """
    def clock(run, steps):
        began = time.perf_counter()
        run(steps)
        return (time.perf_counter() - began) / steps

    steps = {}
    for name, run in runners.items():
        run(1)  # warm
        steps[name] = 1
        while steps[name] * clock(run, steps[name]) < least:
            steps[name] *= 2
    seconds: dict[K, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for r in range(rounds):
        for name in names[r % len(names):] + names[:r % len(names)]:
            seconds[name].append(clock(runners[name], steps[name]))
    return seconds, steps


def counted_flops(settings: Any, arm: str, length: int) -> float:
    """Operations of a token as XLA counts them in the program before it is optimised.

    Layers are unrolled and attention is the plain matrix, as it counts the body of a loop once.
    """
    plain = {"scan": False, "attention": "reference"} if arm == "no_cache" else {}
    model, batch = model_of(settings, arm, length, **plain), settings.batch
    params = jax.eval_shape(lambda: models.init(model, jax.random.key(0)))
    if arm == "no_cache":
        lowered = jax.jit(lambda p, t: models.apply(model, p, t)[0]).lower(
            params, jax.ShapeDtypeStruct((batch, length), jnp.int32))
    else:
        lowered = lower_step(model, batch, length, kind_of(arm))
    return float(lowered.cost_analysis()["flops"])


def shapes_of(model: DecoderLM, batch: int, size: int, kind: str) -> tuple[Any, Any]:
    """Weights and cache as shapes, nothing allocated."""
    return jax.eval_shape(lambda: (
        decode.unstack(model, models.init(model, jax.random.key(0))),
        decode.init_cache(model, batch, size, kind)))


def lower_step(model: DecoderLM, batch: int, size: int, kind: str) -> Any:
    """A step whose cache is donated, lowered for its shapes."""
    weights, cache = shapes_of(model, batch, size, kind)
    step = jax.jit(partial(decode.decode_step, model), donate_argnums=2)
    return step.lower(weights, jax.ShapeDtypeStruct((batch,), jnp.int32), cache)


def generation_memory(model: DecoderLM, batch: int, size: int, kind: str, chunk: int) -> int:
    """Bytes that XLA plans for a generation of `size` tokens, half of them the prompt.

    Arguments, results and temporaries of the compiled program, what is donated counted once.
    """
    prompt = size // 2
    plan = Plan(Sampling(temperature=0), size - prompt, size, kind, chunk)
    weights, _ = shapes_of(model, batch, size, kind)
    memory = decode.run_loop.lower(
        model, plan, weights, jax.ShapeDtypeStruct((batch, prompt), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32), None).compile().memory_analysis()
    return int(memory.argument_size_in_bytes + memory.output_size_in_bytes
               + memory.temp_size_in_bytes - memory.alias_size_in_bytes)


def rounding_of(model: DecoderLM, batch: int, length: int) -> Callable[[Any, Any], Any]:
    """(params, tokens_BT) -> logits_BTV with the model's own cache and with int8."""
    def both(params, tokens_BT):
        return [decode.extend(model, params, tokens_BT, decode.init_cache(
            model, batch, length, kind))[0] for kind in ("model", "int8")]

    return jax.jit(both)


def compare_logits(exact_BTV: Any, rounded_BTV: Any) -> dict[str, float]:
    """Largest difference, the spread of exact logits over the vocabulary, and how often the
    likeliest token is the same."""
    exact, rounded = np.asarray(exact_BTV), np.asarray(rounded_BTV)
    return {"max_difference": float(np.abs(exact - rounded).max()),
            "spread": float(exact.std(axis=-1).mean()),
            "agreement": float((exact.argmax(-1) == rounded.argmax(-1)).mean())}
