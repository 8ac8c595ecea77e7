"""Rings, int8, chunks, streams, stops: what a cache may be, each against the plain way."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_decode import GREEDY, PROMPTS, SIZE, V, make, tokens
from tests.test_positions_attention import LENGTH_DEPENDENT, SCHEMES
from tx_jax import decode, models
from tx_jax.cache import ring_width
from tx_jax.decode import Sampling, decode_step, extend, generate, init_cache, prefill, stream
from tx_jax.errors import UserError
from tx_jax.masks import parse_mask

W, LONG = 4, 14
WINDOW = f"causal & window({W})"


def in_pieces(model, params, tokens_BT, pieces, kind="model"):
    """Logits of every token, read in pieces of these lengths; also the cache."""
    cache, found, start = init_cache(model, tokens_BT.shape[0], LONG, kind), [], 0
    for n in pieces:
        logits_BTV, cache = extend(model, params, tokens_BT[:, start:start + n], cache)
        found.append(logits_BTV)
        start += n
    return jnp.concatenate(found, axis=1), cache


def ring_case(scheme, pieces, **options):
    model, params = make(LONG, positions=SCHEMES.get(scheme, scheme), mask=WINDOW, norm="none",
                         mlp="none", **options)
    ids = tokens(2, LONG)
    full, (steps, cache) = jax.jit(lambda p, t: (
        models.apply(model, p, t)[0], in_pieces(model, p, t, pieces)))(params, ids)
    assert cache.ring and cache.places == W and cache.length_B.tolist() == [LONG] * 2
    np.testing.assert_allclose(steps, full, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("scheme", "pieces"), [
    ("rope", (2, 1, 6, 1, 1, 3)), pytest.param("t5", (14,), marks=pytest.mark.slow)])
def test_a_ring_equals_the_full_pass(scheme, pieces):
    """Pieces shorter and longer than the window, single tokens before and after it is full."""
    ring_case(scheme, pieces)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", sorted(set(SCHEMES) - LENGTH_DEPENDENT))
def test_a_ring_serves_every_scheme(scheme):
    """The prompt longer than the window under one half of the schemes, shorter under the other."""
    odd = sorted(SCHEMES).index(scheme) % 2
    ring_case(scheme, (3, 9, 1, 1) if odd else (1, 1, 7, 1, 3, 1),
              attention="reference" if odd and scheme == "cope" else "blockwise" if odd else "auto")


RULES = st.recursive(st.sampled_from(["causal", "full", "window(1)", "window(3)", "dilated(2)",
                                      "prefix(2)", "global(1)", "explicit('10 11')"]),
                     lambda inner: st.one_of(
                         st.builds("({}) & ({})".format, inner, inner),
                         st.builds("({}) | ({})".format, inner, inner),
                         st.builds("~({})".format, inner)), max_leaves=5)


@settings(max_examples=300, deadline=None)
@given(text=RULES)
def test_a_band_holds_every_pair_and_nothing_else_matters(text):
    """Where a rule states a band it depends on q - k alone; a ring then loses nothing."""
    rule = parse_mask(text)
    q, k = np.ix_(np.arange(12), np.arange(12))
    allowed = np.broadcast_to(rule.allowed(q, k), (12, 12))
    if (band := rule.band()) is None:
        return
    distance = q - k
    assert (~allowed | ((distance >= band[0]) & (distance <= band[1]))).all()
    for d in range(-11, 12):
        assert len(set(np.diagonal(allowed, -d).tolist())) == 1
    if (width := ring_width(rule)) is not None:
        assert not allowed[distance < 0].any() and not allowed[distance >= width].any()


def test_only_a_window_makes_a_ring():
    for mask, width in ((WINDOW, 4), ("window(4) & dilated(2)", 4), ("causal", None),
                        ("causal & (window(4) | global(2))", None), ("window(4) | window(6)", 6),
                        ("causal & ~window(4)", None), ("window(4) | prefix(2)", None)):
        assert ring_width(parse_mask(mask)) == width, mask
    model, _ = make(mask="causal & window(64)")
    cache = init_cache(model, 1, SIZE)
    assert not cache.ring and cache.places == SIZE


@pytest.mark.parametrize("options", [{}, pytest.param({"mask": WINDOW}, marks=pytest.mark.slow)],
                         ids=str)
def test_int8_rounds_and_nothing_else(options):
    """Near the full pass, the same however the text is cut, a quarter of the bytes and scales."""
    model, params = make(LONG, heads=2, kv_heads=2, head_dim=32, **options)
    ids = tokens(2, LONG)
    run = jax.jit(lambda p, t: (models.apply(model, p, t)[0], in_pieces(model, p, t, (9, 1, 4),
                                "int8"), in_pieces(model, p, t, (3, 6, 5), "int8")))
    full, (first, cache), (second, _) = run(params, ids)
    error = float(np.abs(first - full).max() / np.abs(full).max())
    assert 1e-5 < error < 0.02
    np.testing.assert_allclose(first, second, atol=1e-4 + 0.002 * float(np.abs(full).max()))
    places = W if options else LONG
    assert cache.nbytes == 2 * 2 * 2 * 2 * places * (32 + 4)
    assert init_cache(model, 2, LONG).nbytes == 2 * 2 * 2 * 2 * places * 32 * 4


@pytest.mark.parametrize("mask", ["causal", pytest.param(WINDOW, marks=pytest.mark.slow)])
def test_a_prompt_in_chunks_gives_the_same(mask):
    """Ragged rows that end in different chunks, and padding that is no token at all."""
    model, params = make(LONG, mask=mask, positions="alibi")
    rows = [(p + [99] * (7 - len(p)), [1] * len(p) + [0] * (7 - len(p))) for p in PROMPTS]
    ids, segments = (jnp.asarray(x, jnp.int32) for x in zip(*rows, strict=True))

    def read(chunk):
        logits, cache = prefill(model, params, ids, init_cache(model, 3, LONG), segments,
                                chunk=chunk)
        return logits, decode_step(model, params, jnp.array([1, 2, 3]), cache)[0]

    whole, *others = jax.jit(lambda: [read(chunk) for chunk in (0, 3)])()
    for found in others:
        for a, b in zip(found, whole, strict=True):
            assert np.isfinite(a).all()
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_chunks_that_would_change_what_is_seen_are_refused():
    model, params = make(mask="causal | prefix(4)")
    ids = tokens(1)
    with pytest.raises(UserError, match="lies in a later chunk of 3; read the prompt in one"):
        prefill(model, params, ids, init_cache(model, 1, SIZE), chunk=3)
    with pytest.raises(UserError, match="later chunk of 2"):
        generate(model, params, ids.tolist(), 1, GREEDY, chunk=2)
    prefill(model, params, ids, init_cache(model, 1, SIZE), chunk=4)


def test_rows_stop_alone_and_streams_are_the_same_tokens():
    model, params = make(SIZE + 8, embeddings="untied", positions="sinusoidal")
    warm, key = Sampling(temperature=2.0), jax.random.key(5)
    free = generate(model, params, PROMPTS, 10, warm, key)
    stop = int(free[0, 3])
    held = generate(model, params, PROMPTS, 10, warm, key, stop=stop)
    for row, whole in zip(held.tolist(), free.tolist(), strict=True):
        end = whole.index(stop) + 1 if stop in whole else 10
        assert row == whole[:end] + [stop] * (10 - end)
    assert (held != free).any()
    for every, end in itertools.product((1, 4), (None, stop)):
        pieces = list(stream(model, params, PROMPTS, 10, warm, key, stop=end, every=every))
        assert len(pieces) > 1 and np.concatenate(pieces, axis=1).tolist() == (
            free if end is None else held).tolist()


def test_the_loop_ends_when_every_row_has():
    """The last token is drawn and not read, and nothing is after it."""
    model, params = make(SIZE + 8, embeddings="untied", positions="sinusoidal")
    warm, keys = Sampling(2.0), decode.sequence_keys(jax.random.key(1), 1)
    out = generate(model, params, [[3]], 9, warm, keys)[0].tolist()
    stop = next(token for token in out[2:] if token != out[0])
    plan = decode.Plan(warm, 9, SIZE, stop=stop)
    state = decode._start(model, plan, params, jnp.array([[3]]), jnp.array([1]), keys)
    state, rest = jax.jit(lambda s: decode._loop(model, plan, 8, params, s, keys, 8))(state)
    assert state.cache.length_B.tolist() == [1 + out.index(stop)]
    assert rest[0].tolist() == out[1:out.index(stop)] + [stop] * (9 - out.index(stop))


def test_a_repetition_penalty_counts_the_prompt_and_what_was_drawn():
    """Against a loop over full passes (Keskar et al. 2019, 4.1)."""
    model, params = make(SIZE + 4, embeddings="untied", positions="none")
    apply = jax.jit(lambda ids: models.apply(model, params, ids)[0])
    sampling = dataclasses.replace(GREEDY, repetition_penalty=3.0)
    found = generate(model, params, PROMPTS, 6, sampling)
    for row, prompt in zip(found.tolist(), PROMPTS, strict=True):
        ids = list(prompt)
        for _ in range(6):
            logits = np.array(apply(jnp.asarray([ids + [0] * (SIZE + 4 - len(ids))])))[
                0, len(ids) - 1]
            for token in set(ids):
                logits[token] *= 1 / 3 if logits[token] > 0 else 3
            ids.append(int(np.argmax(logits)))
        assert row == ids[len(prompt):]
    assert found.tolist() != generate(model, params, PROMPTS, 6, GREEDY).tolist()
    with pytest.raises(UserError, match=r"--repetition_penalty=0.0 is too small"):
        Sampling(repetition_penalty=0.0)
    with pytest.raises(UserError, match="needs to know the tokens so far"):
        decode.sample(jnp.zeros((1, V)), sampling, None)


@pytest.mark.parametrize(("options", "kind"), [
    ({}, "model"), ({"kv_heads": 1}, "int8"), ({"mask": "causal & window(512)"}, "model")], ids=str)
def test_a_step_copies_no_cache(options, kind):
    """What is donated is written in place, and temporaries do not grow with the cache.

    Not in bfloat16, which XLA turns into float32 on a CPU, a layer at a time.
    """
    model, params = make(4096, head_dim=64, **options)
    weights = decode.unstack(model, params)
    step = jax.jit(lambda token, cache: decode_step(model, weights, token, cache),
                   donate_argnums=1)
    for size in (1024, 4096):
        cache = init_cache(model, 2, size, kind)
        memory = step.lower(jnp.zeros((2,), jnp.int32), cache).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= cache.nbytes
        # Logits and weights of the softmax: a few numbers for every row, head and place. A copy of
        # the keys of a layer would be as many, times 64 or 16.
        softmax = 4 * 2 * 4 * cache.places
        assert memory.temp_size_in_bytes < 4 * softmax + 2**16
    loop = decode.run_loop.lower(model, decode.Plan(GREEDY, 64, 4096, kind), weights,
                                 jnp.zeros((2, 8), jnp.int32), jnp.array([8, 8]), None).compile()
    cache = init_cache(model, 2, 4096, kind)
    # The prompt of one pass reads keys and values of a layer as float32.
    layer = 2 * 4 * 2 * model.cfg.groups * cache.places * 64
    assert loop.memory_analysis().temp_size_in_bytes < cache.nbytes + 2 * layer + 2**20


@pytest.mark.parametrize(("options", "words"), [
    ({"kind": "int4"}, "a cache of kind 'int4' is unknown; choose from model, int8"),
    ({"chunk": -1}, "chunk=-1 must be a whole number"), ({"stop": 11}, "stop=11 lies outside"),
    ({"stop": -1}, "stop=-1 must be"), ({"every": -1}, "every=-1 must be"),
    ({"every": 1.5}, "every=1.5 must be")])
def test_a_wrong_request_is_one_sentence(options, words):
    model, params = make()
    with pytest.raises(UserError, match=words):
        list(stream(model, params, [[1]], 2, GREEDY, **options))


def test_a_ring_takes_nothing_beyond_the_size_of_its_text():
    """K1: the places of a ring repeat, its text does not."""
    model, params = make(LONG, mask=WINDOW)
    full = jax.tree.map(lambda x: x * 0 + 6, init_cache(model, 1, 6))
    assert full.ring and full.size == 6
    logits, after = jax.jit(lambda c: decode_step(model, params, jnp.array([1]), c))(full)
    assert np.isnan(logits).all()
    assert all((held.x_BKSH == 6).all() for held in (*after.k, *after.v))
