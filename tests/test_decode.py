"""Decoding with a cache equals the full pass; rows do not see each other; overflow is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launch
from experiments import _generate
from tests.helpers import make_params
from tests.test_positions_attention import LENGTH_DEPENDENT, SCHEMES
from tx_jax import attention, decode, limits, models, plugins
from tx_jax.config import ModelConfig
from tx_jax.decode import (
    Sampling,
    decode_step,
    extend,
    generate,
    init_cache,
    prefill,
    sample,
)
from tx_jax.errors import UserError
from tx_jax.positions import make_encoding

V, T, START, SIZE = 11, 8, 5, 10
CFG = ModelConfig(layers=2, d_model=16, heads=4, kv_heads=2, d_ff=24)
GREEDY = Sampling(temperature=0)
PROMPTS = [[3, 1, 4], [2, 7, 1, 8, 2, 8, 1], [9]]


def make(context=SIZE, **options):
    model = models.build(dataclasses.replace(CFG, **options), V, context)
    params = make_params(model)
    # Away from zero, where some schemes start.
    return model, jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size, dtype=x.dtype)
                                                           ).reshape(x.shape), params)


def tokens(rows, length=T):
    return jax.random.randint(jax.random.key(3), (rows, length), 0, V, jnp.int32)


def cached(model, params, tokens_BT, start=START):
    """Logits from a prefill of `start` tokens and one step for each of the others."""
    cache = init_cache(model, tokens_BT.shape[0], SIZE)
    first_BTV, cache = extend(model, params, tokens_BT[:, :start], cache)

    def step(cache, token_B):
        logits_BV, cache = decode_step(model, params, token_B, cache)
        return cache, logits_BV

    cache, rest_TBV = jax.lax.scan(step, cache, tokens_BT[:, start:].T)
    return jnp.concatenate([first_BTV, jnp.moveaxis(rest_TBV, 0, 1)], axis=1), cache


def compare(rows=2, implementations=("auto",), **options):
    """Cached logits under these implementations against one full pass of the reference."""
    model, params = make(**{"attention": "reference"} | options)
    ways = [models.build(dataclasses.replace(model.cfg, attention=name), V, SIZE)
            for name in implementations]
    tokens_BT = tokens(rows)
    full, found = jax.jit(lambda p, t: (models.apply(model, p, t)[0],
                                        [cached(way, p, t) for way in ways]))(params, tokens_BT)
    for name, (steps, cache) in zip(implementations, found, strict=True):
        assert cache.length_B.tolist() == [T] * rows
        np.testing.assert_allclose(steps, full, atol=2e-5, rtol=2e-5, err_msg=name)


MASKS = ("causal", "causal & window(4)", "causal | prefix(3)")
EXACT = sorted(set(SCHEMES) - LENGTH_DEPENDENT)
# Compiling takes a second or two each: of every scheme one, of two layers; all pairs have one.
QUICK = {scheme: (MASKS[i % 3], ("auto", "reference", "blockwise")[i // 3 % 3])
         for i, scheme in enumerate(EXACT) if scheme in {*plugins.names("tx_jax.positions"),
                                                         "fire"}}


def does(name, scheme):
    """Whether an implementation runs on this machine and takes the bias and widths of a scheme."""
    can, kind = attention.implementations()[name], make_encoding(SCHEMES[scheme]).bias_kind
    return can.platforms is None and can.key_lengths and (
        can.row_bias if kind == "rows" else can.pair_bias or not kind) and (
        can.v_width or scheme != "transformer_xl")


@pytest.mark.parametrize("scheme", QUICK)
def test_cached_logits_equal_the_full_pass(scheme):
    """K2: at every position of the prompt and of the steps; the slow set has all pairs."""
    mask, name = QUICK[scheme]
    compare(implementations=(name,), positions=SCHEMES[scheme], mask=mask, mlp="none", norm="none")


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scheme", EXACT)
def test_every_implementation_decodes_every_scheme_and_mask(scheme, mask):
    names = [name for name in attention.implementations() if does(name, scheme)]
    assert {"reference", "blockwise", "decode"} - ({"blockwise"} if scheme == "cope" else set()
                                                   ) <= set(names)
    compare(implementations=names, layers=1, positions=SCHEMES[scheme], mask=mask, mlp="none",
            norm="none")


# Variants that are no softmax have one program of their own.
OWN = {"attention": "auto"}


@pytest.mark.parametrize("options", [
    {"rows": 1, "norm": "layer", "norm_position": "post", "embeddings": "untied", "scan": False,
     "score": "qk_norm", "scale": "log_n(3)", "softcap": 5.0},
    {"variant": "differential", "remat": "block"},
    *(pytest.param(options, marks=pytest.mark.slow) for options in (
        {"variant": "sigmoid", "score": "additive", **OWN}, {"variant": "linear", **OWN},
        {"score": "bilinear"}, {"score": "cosine"}, {"variant": "hard(temperature=0)", **OWN}))],
    ids=str)
def test_other_parts_decode_as_well(options):
    compare(**options)


def test_length_dependent_schemes_equal_a_pass_of_that_length_last():
    """One layer, as deeper states were computed when the text was shorter; `rope_dynamic_ntk`."""
    model, params = make(positions=SCHEMES["rope_dynamic_ntk"], layers=1)
    steps, _ = jax.jit(lambda t: cached(model, params, t))(tokens(2))
    full, _ = jax.jit(lambda t: models.apply(model, params, t))(tokens(2))
    np.testing.assert_allclose(steps[:, -1], full[:, -1], atol=2e-5)
    assert np.abs(steps - full)[:, START:-1].max() > 1e-3, "the documented difference"


def greedy_by_full_passes(apply, prompt, n):
    """The likeliest token again and again, from a pass over a padded row each time."""
    ids = list(prompt)
    for _ in range(n):
        row = jnp.asarray([ids + [0] * (SIZE + 4 - len(ids))], jnp.int32)
        ids.append(int(jnp.argmax(apply(row)[0, len(ids) - 1])))
    return ids[len(prompt):]


@pytest.mark.parametrize("positions", ["learned", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("rope", "sinusoidal", "alibi", "t5"))])
def test_ragged_prompts_give_what_each_gives_alone(positions):
    """K4, and greedy is the argmax of full passes; one compilation for all tokens and calls."""
    # Untied, as a head that shares the embedding repeats the last token.
    model, params = make(SIZE + 4, positions=positions, embeddings="untied")
    apply = jax.jit(lambda ids: models.apply(model, params, ids)[0])
    before = decode.run_loop._cache_size()
    together = generate(model, params, PROMPTS, 6, GREEDY)
    assert decode.run_loop._cache_size() == before + 1
    assert any(len(set(row.tolist())) > 1 for row in together)
    generate(model, params, [[5, 5, 5], PROMPTS[1], [0]], 6, GREEDY)
    assert decode.run_loop._cache_size() == before + 1
    for row, prompt in zip(together, PROMPTS, strict=True):
        assert row.tolist() == greedy_by_full_passes(apply, prompt, 6)
    assert together[:1].tolist() == generate(model, params, PROMPTS[:1], 6, GREEDY).tolist()


def test_one_compiled_step_serves_every_token():
    model, params = make()
    step = jax.jit(lambda token, cache: decode_step(model, params, token, cache))
    cache = init_cache(model, 2, SIZE)
    for t in range(4):
        _, cache = step(tokens(2)[:, t], cache)
    assert step._cache_size() == 1 and cache.length_B.tolist() == [4, 4]


def test_padding_on_either_side_and_what_it_holds_do_not_matter():
    """K4: also a row of one token, and padding that is no token at all."""
    model, params = make(positions="t5", mask="causal & window(4)")
    read = jax.jit(lambda ids, segments: prefill(
        model, params, ids, init_cache(model, 3, SIZE), segments))
    rows = [([99] * (7 - len(p)) + p, [0] * (7 - len(p)) + [1] * len(p)) for p in PROMPTS]
    left = read(*(jnp.asarray(x, jnp.int32) for x in zip(*rows, strict=True)))
    rows = [(p + [0] * (7 - len(p)), [1] * len(p) + [0] * (7 - len(p))) for p in PROMPTS]
    right = read(*(jnp.asarray(x, jnp.int32) for x in zip(*rows, strict=True)))
    assert left[1].length_B.tolist() == right[1].length_B.tolist() == [3, 7, 1]
    np.testing.assert_allclose(left[0], right[0], atol=1e-6)
    step = jax.jit(lambda cache: decode_step(model, params, jnp.array([1, 2, 3]), cache)[0])
    np.testing.assert_allclose(step(left[1]), step(right[1]), atol=1e-6)
    assert np.isfinite(step(left[1])).all()


def test_a_row_draws_the_same_alone_and_among_others():
    model, params = make(SIZE + 4)
    keys = decode.sequence_keys(jax.random.key(7), 3)
    warm = Sampling(temperature=1.5, top_k=8, top_p=0.95, min_p=0.01)
    together = generate(model, params, PROMPTS, 6, warm, keys)
    assert together.tolist() == generate(model, params, PROMPTS, 6, warm,
                                         jax.random.key(7)).tolist()
    assert together[1].tolist() == generate(model, params, PROMPTS[1:2], 6, warm,
                                            keys[1:2])[0].tolist()
    other = generate(model, params, PROMPTS, 6, warm, jax.random.key(8))
    assert (together != other).any(axis=1).all()


def test_overflow_is_refused_before_anything_runs():
    """K1: never a wrap, never a clamp."""
    model, params = make(6, positions="learned")
    assert generate(model, params, [[1, 2, 3]], 3, GREEDY, size=6).shape == (1, 3)
    assert generate(model, params, [[1, 2, 3]], 0, GREEDY).shape == (1, 0)
    one = generate(model, params, [[1, 2, 3]], 1, GREEDY, size=6)
    assert one.tolist() == generate(model, params, [[1, 2, 3]], 3, GREEDY, size=6)[:, :1].tolist()
    for prompt, new, size, words in (
            ([1, 2, 3], 4, None, "make 7, more than the 6 positions of --model.positions=learned"),
            ([1, 2, 3], 2, 4, "make 5, more than a cache of 4 places"),
            ([1] * 5, 0, 4, "more than a cache of 4"),
            ([], 1, None, "prompt 1 is no list"), ([11], 1, None, "token 11, outside"),
            ([1], -1, None, "new_tokens=-1 must be")):
        with pytest.raises(UserError, match=words):
            generate(model, params, [prompt], new, GREEDY, size=size)
    with pytest.raises(UserError, match="longer than the 6 positions"):
        init_cache(model, 1, 7)
    full = dataclasses.replace(init_cache(model, 1, 4), length_B=jnp.array([2]))
    with pytest.raises(UserError, match="5 tokens do not fit into a cache of 4"):
        extend(model, params, jnp.array([[1, 2, 3]]), full)
    filled = jax.tree.map(lambda x: x * 0 + 4, full)
    logits, after = jax.jit(lambda c: decode_step(model, params, jnp.array([1]), c))(filled)
    assert np.isnan(logits).all()
    assert all((held.x_BKSH == 4).all() for held in (*after.k, *after.v)), "a write past the end"
    for lengths in ([4], [-1]):
        with pytest.raises(UserError, match="must lie between 0 and the 3 tokens"):
            extend(model, params, jnp.array([[1, 2, 3]]), init_cache(model, 1, 6),
                   jnp.array(lengths))


def test_what_does_not_go_with_a_cache_is_refused():
    model, params = make()
    with pytest.raises(UserError, match="the cache holds 1 examples but the batch has 2"):
        extend(model, params, tokens(2), init_cache(model, 1, SIZE))
    ahead, _ = make(mask="causal | prefix(8)")
    with pytest.raises(UserError, match="generated later; give longer prompts"):
        generate(ahead, params, PROMPTS, 6, GREEDY)


LOGITS = jnp.array([[0.0, 2.0, 1.0, 2.0], [5.0, 1.0, 0.0, -1.0]])


def draws(sampling, n=200):
    found = sample(jnp.tile(LOGITS, (n, 1)), sampling, jax.random.split(jax.random.key(0), 2 * n))
    return [set(found[row::2].tolist()) for row in (0, 1)]


def test_sampling_edges():
    """K6: greedy needs no key; a tiny temperature is finite; filters keep what they say."""
    assert sample(LOGITS, GREEDY, None).tolist() == [1, 0]
    for tiny in (1e-8, 1e-45, 1e-300):
        assert draws(Sampling(tiny)) == [{1, 3}, {0}]
    assert draws(Sampling(3.0)) == draws(Sampling(3.0, top_k=4)) == draws(
        Sampling(3.0, top_k=5)) == [{0, 1, 2, 3}] * 2
    assert draws(Sampling(3.0, top_k=1)) == [{1}, {0}], "of equals the lowest id"
    assert draws(Sampling(9.0, top_k=2)) == [{1, 3}, {0, 1}]
    assert draws(Sampling(1.0, top_p=0.0)) == [{1}, {0}]
    assert draws(Sampling(1.0, top_p=0.7)) == [{1, 3}, {0}]
    assert draws(Sampling(1.0, min_p=0.2)) == [{1, 2, 3}, {0}]
    assert sample(LOGITS.at[0, 2].set(jnp.nan), GREEDY, None).tolist() == [-1, 0]
    assert sample(jnp.full((1, 4), -jnp.inf), GREEDY, None).tolist() == [-1]
    with pytest.raises(UserError, match="draws at random; give a key"):
        sample(LOGITS, Sampling(), None)


@pytest.mark.parametrize(("options", "words"), [
    ({"temperature": -1.0}, "--temperature=-1.0 is too small"), ({"top_k": -1}, "--top_k=-1 is"),
    ({"temperature": float("nan")}, "finite"), ({"top_k": 2.5}, "--top_k=2.5 is not a whole"),
    ({"top_p": 1.5}, "--top_p=1.5 is too large"), ({"min_p": -0.1}, "--min_p=-0.1 is too small")])
def test_a_wrong_sampling_is_one_sentence(options, words):
    with pytest.raises(UserError, match=words):
        Sampling(**options)


def test_what_does_not_fit_is_said_before_it_runs(monkeypatch):
    """Memory by the closed forms, here of a device with 1 MiB."""
    model, _ = make(64)
    ask = _generate.Settings(run="x", prompt="y", cache="int8")
    assert _generate._beyond(model, ask, 4, 60) == ""
    monkeypatch.setattr(limits, "device_bytes", lambda name: 2**20)
    assert _generate._beyond(model, ask, 4, 60) == ""
    said = _generate._beyond(model, ask, 4, 60_000)
    assert said.startswith("4 tokens of prompt and 60000 new ones make 60004, but the model was")
    assert ", and they take " in said and "MiB of it cache) and the device has 1.0 MiB" in said


@pytest.mark.slow
def test_generate_from_a_run(trained, capsys):
    flags = ["--generate", f"--run={trained}", "--prompt=the owl", "--new_tokens=40", "--top_k=5",
             "--past_limits"]
    capsys.readouterr()
    assert launch.main(flags) == 0
    out = capsys.readouterr().out
    said, text = out.split("\n", 1)
    assert said.startswith("note: 7 tokens of prompt and 40 new ones make 47, but the model was "
                           "trained on 32 in a row") and text.startswith("the owl")
    assert "memory" not in said
    assert launch.main([*flags, "--chunk=3"]) == 0 and capsys.readouterr().out == out, "same seed"
    assert launch.main(["--generate", "--help"]) == 0 and "--min_p" in capsys.readouterr().out
    assert launch.main([*flags[:3], "--cache=int8"]) == 0
    out = capsys.readouterr().out
    assert "note" not in out and len(out) <= 32 + 1, "by default as far as it was trained"
    for changed, words in (("--prompt=Zebra", "--prompt holds 'Z', 'b', 'r'"),
                           ("--prompt=", "--prompt is empty"), ("--run=/nowhere", "no checkpoint"),
                           ("--temperature=-1", "--temperature=-1.0 is too small"),
                           ("--topk=1", "did you mean 'top_k'"), ("--run=", "add --run=DIR"),
                           ("--past_limits=false", "gets worse, see --experiment=length_extrapol"),
                           ("--temperature=0", "--top_k has no effect with --temperature=0"),
                           ("--generate=false", "--generate=false asks for nothing")):
        kept = [f for f in flags if f.split("=")[0] != changed.split("=")[0]]
        assert launch.main([*kept, changed]) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1
