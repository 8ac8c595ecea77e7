"""Variants of attention: values and gradients against their loops, padding, refusals, tiles."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention_loops import PAIRS, make_call, slow_keep
from tx_jax import plugins
from tx_jax.attention import Bias, Dropout, _rows, attend, make_score
from tx_jax.attention.variants import Variant, make_variant
from tx_jax.errors import UserError
from tx_jax.masks import Causal, Mask, Prefix, Window, dense_mask

pytestmark = pytest.mark.slow

SPECS = ("sigmoid", "sigmoid(bias=-0.5)", "sigmoid(length=7)", "hard", "hard(temperature=0.7)",
         "linear", "differential")
NAMES = ("differential", "hard", "linear", "sigmoid")


def variant_call(spec, choice, seed):
    """Variant, arrays and the options that it takes, of one combination of options."""
    variant = make_variant(spec)
    paired = variant.name == "differential"
    heads = {(2, 2): (2, 2), (4, 2): (8, 4), (3, 1): (4, 2)}[choice["heads"]] if paired else None
    args, options = make_call(choice | ({"heads": heads} if paired else {}), seed=seed)
    q, k, v = args
    if paired:
        v = v[:, :, ::2]
    options = {n: o for n, o in options.items() if n not in variant.refuses}
    sizes = {"N": q.shape[2], "H": q.shape[3], "W": v.shape[3]}
    rng = np.random.default_rng(seed)
    params = {name: np.float32(p + 0.3 * rng.normal(size=p.shape)) for name, p in
              variant.init(jax.random.key(seed), sizes).items()}
    return variant, (q, k, v), options, params


def slow(variant, args, params, *, mask=None, bias=None, score="scaled_dot", scale=None,
         softcap=None, dropout=None, sink=None, q_start=None, score_params=None):
    """The loops of the variant, on the logits of the contract; dropout is the test's own."""
    q, k, v = (np.float64(x) for x in args)
    (B, T, N, H), S = q.shape, k.shape[1]
    score = make_score(score)
    allowed = np.ones((1, T, S), bool) if mask is None else dense_mask(mask, T, S, q_start)
    allowed = np.broadcast_to(np.asarray(allowed)[:, None], (B, N, T, S))
    n = np.maximum(allowed.sum(axis=-1, keepdims=True), 1)
    rule = score.default_scale if scale is None else scale
    factor = {"none": 1.0, "1/sqrt(d)": H**-0.5, "1/d": 1 / H,
              "log_n(2)": H**-0.5 * np.maximum(1, np.log(n) / np.log(2))}.get(rule, rule)
    logits = score.slow_logits(score_params, q, k) * factor
    logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
    if bias is not None:
        logits = logits + np.float64(bias)
        allowed = allowed & np.isfinite(logits)
    start = S - T if q_start is None else q_start
    if dropout is not None:  # one key at a time: weights do not depend on the values
        out = 0.0
        for s in range(S):
            kept = np.array([[[[slow_keep(dropout.rate, int(dropout.seed), b, h, start + t, s)]
                               for h in range(N)] for t in range(T)] for b in range(B)])
            only = v * (np.arange(S) == s)[None, :, None, None]
            out = out + kept / (1 - dropout.rate) * variant.slow(
                params, q, k, only, allowed_BNTS=allowed, logits_BNTS=logits, sink=sink)
        return out
    return variant.slow(params, q, k, v, allowed_BNTS=allowed, logits_BNTS=logits, sink=sink)


def test_variants_are_files_that_build_from_a_call_string():
    assert tuple(plugins.names("tx_jax.attention.variants")) == NAMES
    for name in NAMES:
        assert isinstance(make_variant(name), Variant) and make_variant(name).name == name
    assert make_variant("sigmoid(bias=-2)") == make_variant(make_variant("sigmoid(bias=-2)"))
    shared = set(inspect.signature(Variant.attend).parameters) - {"self", "params"}
    assert shared == set(inspect.signature(attend).parameters)
    for name in NAMES:
        assert set(make_variant(name).refuses) <= shared


def rows_of(name):
    """The combinations in which every pair of values of the variant's own options occurs."""
    refused = make_variant(name).refuses
    kept = [tuple(str(o) for n, o in row.items() if n not in refused) for row in PAIRS]
    return [i for i, row in enumerate(kept) if row not in kept[:i]]


ROWS = {name: rows_of(name) for name in NAMES}


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_values_of_every_pair_of_options_are_the_loops_in_float64(number):
    odd = number % 2
    specs = [spec for name, spec in (("sigmoid", SPECS[odd]), ("hard", SPECS[3 + odd]),
                                     ("linear", "linear"), ("differential", "differential"))
             if number in ROWS[name]]
    calls = [variant_call(spec, PAIRS[number], number) for spec in specs]
    for variant, _, options, _ in calls:
        if variant.name == "differential":  # the loops below cannot drop before a norm
            options["dropout"] = None
    with jax.enable_x64():
        moving = [jax.tree.map(np.float64, (args, traced(options), params))
                  for _, args, options, params in calls]

        @jax.jit
        def run(moving):
            return [variant.attend(*args, **fixed(options), **arrays, params=params)
                    for (variant, _, options, _), (args, arrays, params)
                    in zip(calls, moving, strict=True)]

        outs = run(moving)
    for (variant, args, options, params), out in zip(calls, outs, strict=True):
        atol = 1e-6 if options.get("scale") == "log_n(2)" else 1e-12
        np.testing.assert_allclose(out, slow(variant, args, params, **options), atol=atol)


def traced(options):
    """What is differentiated: arrays and the parameters of the score."""
    return {n: o for n, o in options.items() if isinstance(o, (np.ndarray, dict))}


def fixed(options):
    return {n: o for n, o in options.items() if n not in traced(options)}


CHOICE = {"mask": "segments", "bias": "BNTS", "softcap": 0.7, "sink": True, "dropout": None,
          "scale": None, "score": "bilinear", "heads": (4, 2), "lengths": (4, 4), "v_width": 3,
          "q_start": None}


@pytest.mark.parametrize("mask", ["segments", Causal()])
@pytest.mark.parametrize("spec", SPECS)
def test_gradients_are_differences_of_the_loops(spec, mask):
    variant, args, options, params = variant_call(spec, CHOICE | {"mask": mask}, 3)
    rest, moving = fixed(options), traced(options)
    with jax.enable_x64():
        @jax.jit
        @jax.grad
        def slope(arrays):
            args, moving, params = arrays
            out = variant.attend(*args, **moving, **rest, params=params)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape))
        where = jax.tree.map(np.float64, (args, moving, params))
        grads = jax.tree.map(np.asarray, slope(where))
    leaves, tree = jax.tree.flatten(where)
    rng = np.random.default_rng(0)
    for i, grad in enumerate(jax.tree.leaves(grads)):
        direction, sides = rng.normal(size=leaves[i].shape), []
        for step in (1e-6, -1e-6):
            a, m, p = jax.tree.unflatten(tree, [x + step * direction if j == i else x
                                                for j, x in enumerate(leaves)])
            out = slow(variant, a, p, **m, **rest)
            sides.append(np.sum(out * np.cos(np.arange(out.size)).reshape(out.shape)))
        np.testing.assert_allclose(np.sum(grad * direction), (sides[0] - sides[1]) / 2e-6,
                                   atol=1e-7)


@pytest.mark.parametrize("spec", ["sigmoid", "hard", "hard(temperature=1)", "linear",
                                  "differential"])
def test_poison_empty_rows_and_the_future(spec, key):
    variant, (q, k, v), _, params = variant_call(spec, CHOICE, 0)
    q, k, v = (jnp.concatenate([x, x[:, :2] * 0.5], axis=1) for x in (q, k, v))
    seg = jnp.array([[1, 1, 1, 2, 2, 0], [0, 1, 1, 1, 1, 0]])
    bad = jnp.where(seg[..., None, None] == 0, jnp.nan, 0.0)
    length = Mask(Causal(), k_lengths_B=jnp.array([4, 0]))
    tail = jnp.where(jnp.arange(6)[None] >= length.k_lengths_B[:, None], jnp.inf, 0)[..., None,
                                                                                      None]
    def both(mask, q, k, v):
        def call(q, k, v):
            return variant.attend(q, k, v, mask=mask, params=params)
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(jnp.ones_like(out))
    both = jax.jit(both)
    clean = both(Mask(Causal(), seg, seg), q, k, v)
    for a, b in zip(clean, both(Mask(Causal(), seg, seg), q + bad, k + bad, v + bad), strict=True):
        np.testing.assert_array_equal(a, b)
    empty = seg == 0
    assert not any(np.asarray(x)[empty].any() for x in clean[:2]) and clean[0][0, 0].any()
    short = both(length, q, k + tail, v + tail)
    assert all(np.isfinite(x).all() for x in short) and not short[0][1].any()
    np.testing.assert_array_equal(short[0], both(length, q, k, v)[0])
    full = both(Mask(Causal()), q, k, v)[0]
    moved = both(Mask(Causal()), q, k.at[:, 4:].add(9.0), v.at[:, 4:].add(9.0))[0]
    np.testing.assert_array_equal(full[:, :4], moved[:, :4])
    assert jnp.abs(full[:, 4:] - moved[:, 4:]).max() > 0.01
    step = jax.jit(lambda q, t: variant.attend(q, k, v, mask=Causal(), q_start=t, params=params))
    for t in (0, 3):
        row = step(q[:, t:t + 1], jnp.int32(t))
        np.testing.assert_allclose(row[:, 0], full[:, t], atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_empty_sizes_and_half_precision(name, key):
    variant, (q, k, v), _, params = variant_call(name, CHOICE, 0)
    for B, T, S in ((0, 2, 2), (1, 0, 2), (1, 2, 0)):
        out = variant.attend(q[:B, :T], k[:B, :S], v[:B, :S], params=params)
        assert out.shape[:2] == (B, T) and out.shape[3] == 3 and not out.any()
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    call = jax.jit(lambda *a: variant.attend(*a, mask=Causal(), params=params))
    out, exact = call(*low), call(*(x.astype(jnp.float32) for x in low))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=3e-2)


@pytest.mark.parametrize("spec, options, says", [
    ("sigmoid", {"sink": jnp.zeros(4)}, "takes no sink"),
    ("sigmoid", {"implementation": "reference"}, "takes no implementation"),
    ("hard", {"implementation": "auto"}, "takes no implementation"),
    *(("linear", {option: value}, f"takes no {option}") for option, value in (
        ("bias", jnp.zeros((3, 3))), ("score", "dot"), ("scale", 1.0), ("softcap", 2.0),
        ("sink", jnp.zeros(4)), ("dropout", Dropout(0.1, jnp.uint32(0))))),
    ("differential", {}, "needs its parameter gain_W"), ("sigmoidal", {}, "did you mean 'sigmoid'"),
    ("sigmoid(b=1)", {}, "has no option 'b'"), ("sigmoid(bias=1, length=2)", {}, "twice"),
    ("sigmoid(length=0)", {}, "length"), ("hard(temperature=-1)", {}, "at least 0"),
    ("differential(start=1)", {}, "[0, 1)"), (3, {}, "3"),
    ("sigmoid", {"softcap": -1.0}, "softcap"), ("hard", {"bias": jnp.zeros((2, 2))}, "broadcast")])
def test_refusals_are_one_sentence(spec, options, says):
    q = jnp.ones((2, 3, 4, 8))
    with pytest.raises(UserError) as error:
        make_variant(spec).attend(q, q, q, **options)
    assert says in str(error.value) and "\n" not in str(error.value)
    make_variant("linear").attend(q, q, q, dropout=Dropout(0.0), score=make_score("scaled_dot"))


@pytest.mark.parametrize("spec, bias", [  # linear refuses a bias
    ("linear", None), *((spec, bias) for spec in ("sigmoid", "hard", "hard(temperature=1)")
                        for bias in (None, "pair", "rows", "dense"))])
def test_tiles_of_queries_change_nothing(spec, bias, key, monkeypatch):
    variant, (q, k, v), _, _ = variant_call(spec, CHOICE | {"lengths": (4, 4)}, 1)
    biases = {"pair": Bias(lambda p, n, q, k: p * jnp.float32((n + 1) * (q - k)), jnp.float32(0.2)),
              "rows": Bias(lambda p, q, x: p * jnp.where(x > -jnp.inf, x, 0) ** 2, jnp.float32(0.3),
                           kind="rows"),
              "dense": jax.random.normal(key, (2, 1, 4, 4))}
    options = {"bias": biases[bias]} if bias else {}
    mask = Mask(Causal() & Window(3) | Prefix(1), jnp.ones((2, 4), int), jnp.ones((2, 4), int))
    def call(*a):
        return variant.attend(*a, mask=mask, **options)
    whole = jax.jit(lambda *a: call(*a))(q, k, v)
    monkeypatch.setattr(_rows._tiles, "TILE_ELEMENTS", 24)  # 3 queries of 4
    np.testing.assert_allclose(jax.jit(lambda *a: call(*a))(q, k, v), whole, atol=1e-6)
