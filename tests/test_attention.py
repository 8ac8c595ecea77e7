"""The attention contract: values and gradients of every implementation against slow references."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tx_jax.attention import (
    Capabilities,
    Dropout,
    attend,
    attention_statistics,
    attention_weights,
    capability_matrix,
    implementations,
    make_score,
    request_of,
    resolve,
)
from tx_jax.attention._dropout import keep
from tx_jax.errors import UserError
from tx_jax.masks import Causal, Full, Mask, Prefix, Window, dense_mask

NAMES = sorted(implementations())
OPTIONS = {
    "mask": [None, Causal(), Causal() & Window(2), "segments", "prefix"],
    "bias": [None, "BNTS", "N1S"],
    "softcap": [None, 0.7],
    "sink": [None, True],
    "dropout": [None, 0.4],
    "scale": [None, 0.3, "1/d", "log_n(2)"],
    "score": ["scaled_dot", "bilinear", "additive", "cosine", "dot"],
    "heads": [(2, 2), (4, 2), (3, 1)],
    "lengths": [(3, 3), (2, 4), (4, 2)],
    "v_width": [4, 3],
    "q_start": [None, 1],
}


def slow_keep(rate, seed, b, n, q, k):
    """The dropout decision in Python integers."""
    def mix(word):
        word = (word ^ (word >> 16)) * 0x85EBCA6B % 2**32
        word = (word ^ (word >> 13)) * 0xC2B2AE35 % 2**32
        return word ^ (word >> 16)
    word = mix(seed ^ 0x9E3779B9)
    for index, odd in ((b, 0x85EBCA77), (n, 0xC2B2AE3D), (q, 0x27D4EB2F), (k, 0x165667B1)):
        word = mix((word + (index + 1) * odd) % 2**32)
    return word >= round(rate * 2**32)


def slow_attend(q, k, v, *, mask=None, bias=None, score="scaled_dot", scale=None, softcap=None,
                dropout=None, sink=None, q_start=None, score_params=None):
    """Attention as loops in float64, from the text of the contract."""
    (B, T, N, H), S, K = q.shape, k.shape[1], k.shape[2]
    score = make_score(score)
    scale = score.default_scale if scale is None else scale
    raw = score.slow_logits(score_params, q, k)
    if bias is not None:
        bias = np.broadcast_to(np.float64(bias), (B, N, T, S))
    start = S - T if q_start is None else q_start
    out = np.zeros((B, T, N, v.shape[3]))
    for b, n, t in np.ndindex(B, N, T):
        seen = [s for s in range(S) if _allowed(mask, b, t, start + t, s)]
        factor = {"none": 1.0, "1/sqrt(d)": H**-0.5, "1/d": 1 / H,
                  "log_n(2)": H**-0.5 * max(1.0, np.log(max(len(seen), 1)) / np.log(2))}
        factor = factor[scale] if isinstance(scale, str) else float(scale)
        logits = {}
        for s in seen:
            x = raw[b, n, t, s] * factor
            x = x if softcap is None else softcap * np.tanh(x / softcap)
            logits[s] = x if bias is None else x + bias[b, n, t, s]
        total = sum(np.exp(x) for x in logits.values())
        total += 0 if sink is None else np.exp(np.float64(sink[n]))
        for s, x in logits.items():
            weight = np.exp(x) / total
            if dropout is not None:
                kept = slow_keep(dropout.rate, int(dropout.seed), b, n, start + t, s)
                weight = weight / (1 - dropout.rate) if kept else 0.0
            out[b, t, n] += weight * np.float64(v[b, s, n // (N // K)])
    return out


def _allowed(mask, b, t, q_idx, k_idx):
    if mask is None:
        return True
    rule = mask.rule if isinstance(mask, Mask) else mask
    allowed = bool(rule.allowed(q_idx, k_idx))
    if isinstance(mask, Mask) and mask.prefix_B is not None:
        allowed = allowed or k_idx < int(mask.prefix_B[b])
    if isinstance(mask, Mask) and mask.q_segments_BT is not None:
        q_seg, k_seg = int(mask.q_segments_BT[b, t]), int(mask.k_segments_BS[b, k_idx])
        allowed = allowed and q_seg == k_seg != 0
    return allowed


def make_call(choice, seed=0, dtype=np.float32):
    """Arrays and keywords of one combination of OPTIONS, as NumPy arrays."""
    rng = np.random.default_rng(seed)
    (N, K), (T, S), B, H = choice["heads"], choice["lengths"], 2, 4
    normal = lambda *shape: rng.normal(size=shape).astype(dtype)  # noqa: E731
    q, k, v = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, choice["v_width"])
    score = make_score(choice["score"])
    params = {name: np.asarray(p, dtype) for name, p in
              score.init(jax.random.key(seed), {"N": N, "H": H}).items()}
    mask = choice["mask"]
    if mask == "segments":
        mask = Mask(Causal(), jnp.array([[1, 1, 2, 2][4 - T:], [0, 1, 1, 0][4 - T:]]),
                    jnp.array([[1, 1, 2, 2][4 - S:], [0, 1, 1, 0][4 - S:]]))
    elif mask == "prefix":
        mask = Mask(Causal(), prefix_B=jnp.array([2, 0]))
    shape = {None: None, "BNTS": (B, N, T, S), "N1S": (N, 1, S)}[choice["bias"]]
    drop = choice["dropout"] and Dropout(choice["dropout"], jnp.uint32(seed + 7))
    options = {"mask": mask, "bias": None if shape is None else normal(*shape), "score": score,
               "softcap": choice["softcap"], "dropout": drop, "scale": choice["scale"],
               "sink": normal(N) if choice["sink"] else None, "q_start": choice["q_start"],
               "score_params": params}
    return (q, k, v), options


def all_pairs():
    """Combinations in which every pair of option values occurs (greedy cover)."""
    names = list(OPTIONS)
    todo = {((a, i), (b, j)) for a, b in itertools.combinations(names, 2)
            for i in range(len(OPTIONS[a])) for j in range(len(OPTIONS[b]))
            if _sensible({a: OPTIONS[a][i], b: OPTIONS[b][j]})}
    rng, rows = np.random.default_rng(0), []
    while todo:
        first = min(todo)
        best, covered = None, set()
        for _ in range(60):
            row = {n: int(rng.integers(len(OPTIONS[n]))) for n in names} | dict(first)
            if not _sensible({n: OPTIONS[n][i] for n, i in row.items()}):
                continue
            hits = {p for p in itertools.combinations(row.items(), 2) if p in todo}
            if best is None or len(hits) > len(covered):
                best, covered = row, hits
        rows.append({n: OPTIONS[n][i] for n, i in best.items()})
        todo -= covered
    return rows


def _sensible(choice):
    """Dot and cosine refuse the scale rules; a test of its own says so."""
    return not (choice.get("score") in ("dot", "cosine")
                and choice.get("scale") in ("1/d", "log_n(2)"))


PAIRS = all_pairs()


def split(args, options, dtype):
    """What is differentiated or traced (as JAX arrays of `dtype`), and the other options."""
    names = [n for n in ("bias", "sink", "score_params") if options[n] is not None]
    arrays = {"args": args, "options": {n: options[n] for n in names}}
    arrays = jax.tree.map(lambda x: jnp.asarray(x, dtype), arrays)
    return arrays, {n: o for n, o in options.items() if n not in names}


def run(args, options, implementation=None):
    """Output and gradients to q, k, v, bias, sink and score parameters, compiled as one."""
    arrays, rest = split(args, options, jnp.float32)

    def loss(arrays):
        out = attend(*arrays["args"], **arrays["options"], **rest, implementation=implementation)
        weight = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        return jnp.sum(out * weight), out

    grads, out = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    return out, grads


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_every_pair_of_options_gives_the_loops_of_the_contract(number):
    args, options = make_call(PAIRS[number], seed=number)
    with jax.enable_x64():
        arrays, rest = split(args, options, jnp.float64)
        out = jax.jit(lambda arrays: attend(*arrays["args"], **arrays["options"], **rest))(arrays)
        assert out.dtype == jnp.float64
    # The factor of log_n is float32 in every precision.
    atol = 1e-6 if options["scale"] == "log_n(2)" else 1e-12
    np.testing.assert_allclose(out, slow_attend(*args, **options), atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_gradients_of_every_pair_of_options(number):
    """Float32 gradients against central differences of the loops, along random directions."""
    args, options = make_call(PAIRS[number], seed=number)
    out, all_grads = run(args, options)
    arg_grads, traced_grads = all_grads["args"], all_grads["options"]
    np.testing.assert_allclose(out, slow_attend(*args, **options), atol=5e-6)
    weight = np.cos(np.arange(out.size)).reshape(out.shape)
    traced = {n: options[n] for n in traced_grads}
    rng, step = np.random.default_rng(1), 1e-4
    for grads, values, rebuild in (
            (arg_grads, args, lambda new: (new, options)),
            (traced_grads, traced, lambda new: (args, options | new))):
        leaves, tree = jax.tree.flatten(values)
        for i, grad in enumerate(jax.tree.leaves(grads)):
            direction = rng.normal(size=leaves[i].shape)
            sides = []
            for sign in (1, -1):
                moved = list(leaves)
                moved[i] = np.float64(leaves[i]) + sign * step * direction
                a, o = rebuild(jax.tree.unflatten(tree, moved))
                sides.append(np.sum(slow_attend(*a, **o) * weight))
            slope = (sides[0] - sides[1]) / (2 * step)
            np.testing.assert_allclose(np.sum(np.float64(grad) * direction), slope, atol=2e-4)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "reference"])
@pytest.mark.parametrize("number", range(0, len(PAIRS), 6))
def test_other_implementations_agree_or_refuse(name, number):
    args, options = make_call(PAIRS[number], seed=number)
    request = request_of(*args, **{n: o for n, o in options.items() if n != "score_params"})
    if implementations()[name].lacks(request):
        with pytest.raises(UserError, match=f"'{name}' cannot do .*attention=reference"):
            run(args, options, name)
        clean = {n: None for n in ("softcap", "sink", "dropout")}
        simple = PAIRS[number] | clean | {"v_width": 4, "score": "scaled_dot"}
        args, options = make_call(simple, seed=number)
    out, grads = run(args, options, name)
    expected, expected_grads = run(args, options, "reference")
    np.testing.assert_allclose(out, expected, atol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), grads, expected_grads)


def with_gradients(fn):
    """The output of `fn` and the gradients of its sum, compiled as one."""
    def both(*args):
        out, pull = jax.vjp(fn, *args)
        return out, *pull(jnp.ones_like(out))
    return jax.jit(both)


@pytest.fixture(params=NAMES)
def name(request):
    """Every implementation that comes with the project."""
    return request.param


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_empty_rows_are_zero_with_zero_gradients(name, dtype):
    """A1 of the case list (pytorch #41508)."""
    q = jnp.ones((1, 2, 1, 2), dtype)
    k = jnp.array([[0, 0.25], [0.5, 0.75]], dtype).reshape(1, 2, 1, 2)
    v = jnp.eye(2, dtype=dtype).reshape(1, 2, 1, 2)
    segments = Mask(Full(), jnp.array([[1, 0]]), jnp.array([[1, 1]]))
    minus_inf = jnp.array([[0.0, 0.0], [-jnp.inf, -jnp.inf]]).reshape(1, 1, 2, 2)
    for extra in ({"mask": segments}, {"bias": minus_inf}, {"mask": segments, "bias": minus_inf}):
        def loss(q, k, v, bias, extra=extra):
            rest = {n: o for n, o in extra.items() if n != "bias"}
            out = attend(q, k, v, scale=1.0, bias=bias, implementation=name, **rest)
            return out[0, 0, 0, 0].astype(jnp.float32), out
        bias = extra.get("bias", jnp.zeros((1, 1, 2, 2)))
        (value, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(
            q, k, v, bias)
        np.testing.assert_allclose(value, 0.268941, atol=1e-6 if dtype == jnp.float32 else 2e-3)
        assert not out[0, 1].any() and out.dtype == dtype
        assert all(bool(jnp.isfinite(g).all()) for g in grads)
        assert not grads[0][0, 1].any() and not grads[3][0, 0, 1].any()


def test_end_aligned_causality(name):
    """A2 of the case list (pytorch #108108)."""
    def mean_seen(T, S):
        v = jnp.arange(S, dtype=jnp.float32).reshape(1, S, 1, 1)
        call = jax.jit(lambda *a: attend(*a, mask=Causal(), implementation=name))
        return call(jnp.zeros((1, T, 1, 1)), jnp.zeros((1, S, 1, 1)), v).ravel()
    np.testing.assert_allclose(mean_seen(2, 5), [1.5, 2.0], atol=1e-6)
    np.testing.assert_allclose(mean_seen(5, 2), [0, 0, 0, 0, 0.5], atol=1e-6)
    np.testing.assert_allclose(mean_seen(1, 5), [2.0], atol=1e-6)


def test_window_counts(name):
    """A4 of the case list (transformers #39408), in one pass and token by token."""
    v = jnp.eye(8).reshape(1, 8, 1, 8)
    q = k = jnp.zeros((1, 8, 1, 8))
    mask = Causal() & Window(4)
    full = attend(q, k, v, mask=mask, implementation=name)
    assert (full[0, :, 0] > 0).sum(axis=1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4]
    step = jax.jit(lambda t: attend(q[:, :1], k, v, mask=mask, q_start=t, implementation=name))
    for t in range(8):
        np.testing.assert_allclose(step(jnp.int32(t))[0, 0], full[0, t], atol=1e-6)


@pytest.mark.parametrize("D", [1, 3, 40, 96])
def test_scale_uses_the_true_width(name, D, key):
    """A7 of the case list (pytorch #133321)."""
    q, k, v = jax.random.normal(key, (3, 1, 5, 1, D))
    out = attend(q, k, v, implementation=name)
    np.testing.assert_allclose(out, slow_attend(*map(np.asarray, (q, k, v))), atol=2e-6)


def test_heads_are_grouped_not_tiled(name):
    """A11 of the case list (jax-js #180); dK and dV sum over the group."""
    q, k = jnp.ones((1, 2, 4, 2)), jnp.ones((1, 3, 2, 2))
    v = jnp.broadcast_to(jnp.arange(2.0)[None, None, :, None], (1, 3, 2, 2))
    out = attend(q, k, v, implementation=name)
    np.testing.assert_allclose(out[0, 0, :, 0], [0, 0, 1, 1], atol=1e-6)
    dv = jax.grad(lambda v: attend(q, k, v, implementation=name).sum())(v)
    np.testing.assert_allclose(dv, 2 * 2 / 3, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (2, 1, 8, 8), (1, 1, 8, 8), (2, 4, 1, 8),
                                   (4, 8, 8), (8, 8), (1,)])
def test_bias_gradients_have_the_shape_of_the_bias(name, shape, key):
    """A12 of the case list (jax #27184)."""
    q, k, v = jax.random.normal(key, (3, 2, 8, 4, 4))
    @jax.jit
    @jax.grad
    def slope(bias):
        return jnp.sum(attend(q, k, v, bias=bias, implementation=name) ** 2)
    bias = jax.random.normal(key, shape)
    grad = slope(bias)
    full = slope(jnp.broadcast_to(bias.reshape((1,) * (4 - bias.ndim) + shape),
                                           (2, 4, 8, 8)))
    padded = (1,) * (4 - len(shape)) + shape
    axes = tuple(i for i in range(4) if padded[i] == 1)
    assert grad.shape == shape and (shape == (1,) or float(jnp.abs(grad).max()) > 1e-3)
    np.testing.assert_allclose(grad, full.sum(axis=axes, keepdims=True).reshape(shape), atol=2e-5)


@pytest.mark.parametrize("B, T, S", [(0, 2, 2), (1, 0, 2), (1, 2, 0), (0, 0, 0)])
def test_empty_sizes(name, B, T, S):
    """A15 of the case list (pytorch #81077)."""
    q, k, v = jnp.ones((B, T, 2, 3)), jnp.ones((B, S, 2, 3)), jnp.ones((B, S, 2, 3))
    run = jax.jit(jax.value_and_grad(lambda q, k, v: attend(
        q, k, v, mask=Causal(), implementation=name).sum(), (0, 1, 2)))
    value, grads = run(q, k, v)
    assert attend(q, k, v, implementation=name).shape == (B, T, 2, 3) and value == 0
    assert not any(g.any() for g in grads)


def test_length_zero_in_a_batch(name, key):
    """A15: key lengths [3, 0]."""
    q, k, v = jax.random.normal(key, (3, 2, 3, 1, 4))
    mask = Mask(Full(), jnp.ones((2, 3), int), jnp.array([[1, 1, 1], [0, 0, 0]]))
    out, *grads = with_gradients(
        lambda *a: jnp.sin(attend(*a, mask=mask, implementation=name)))(q, k, v)
    assert out[0].all() and not out[1].any()
    assert all(g[0].any() and not g[1].any() for g in grads)


def test_packed_documents_do_not_meet(name, key):
    """A18 of the case list (profam #495): a document in a pack equals the document alone."""
    q, k, v = jax.random.normal(key, (3, 1, 8, 2, 4))
    seg = jnp.array([[1, 1, 1, 2, 2, 2, 0, 0]])
    @jax.jit
    def pack(q, k, v):
        return attend(q, k, v, mask=Mask(Causal(), seg, seg), implementation=name)
    out = pack(q, k, v)
    alone = jax.jit(lambda *a: attend(*a, mask=Causal(), implementation=name))(
        q[:, 3:6], k[:, 3:6], v[:, 3:6])
    np.testing.assert_allclose(out[:, 3:6], alone, atol=1e-6)
    moved = pack(*(x.at[:, :3].add(5.0) for x in (q, k, v)))
    np.testing.assert_array_equal(moved[:, 3:6], out[:, 3:6])
    assert not out[:, 6:].any()


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf])
def test_poison_in_padding_reaches_nothing(name, poison, key):
    q, k, v = jax.random.normal(key, (3, 2, 5, 2, 4))
    seg = jnp.array([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    mask = Mask(Causal(), seg, seg)
    bad = jnp.where(seg[..., None, None] == 0, poison, 0.0)
    def call(q, k, v):
        return attend(q, k, v, mask=mask, implementation=name)
    both = with_gradients(call)
    for a, b in zip(both(q, k, v), both(q + bad, k + bad, v + bad), strict=True):
        np.testing.assert_array_equal(a, b)
    cache = jnp.where(jnp.arange(5)[None, :, None, None] > 2, poison, 0.0)
    early = attend(q[:, :1], k + cache, v + cache, mask=Causal(), q_start=2, implementation=name)
    late = attend(q[:, :1], k[:, :3], v[:, :3], mask=Causal(), implementation=name)
    np.testing.assert_allclose(early, late, atol=1e-6)


def test_transformations(name, key):
    """A19 of the case list (jax #38495)."""
    q, k, v = jax.random.normal(key, (3, 2, 4, 2, 8))
    def eager(q, k, v):
        return attend(q, k, v, mask=Causal(), implementation=name)
    call = jax.jit(eager)
    @jax.jit
    def loss(q):
        return jnp.sum(call(q, k, v) ** 2)
    slope = jax.jit(jax.grad(loss))
    grad, out = slope(q), call(q, k, v)
    np.testing.assert_allclose(eager(q, k, v), out, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(call)(q[:, None], k[:, None], v[:, None])[:, 0], out,
                               atol=1e-6)
    jacobian = jax.jit(jax.jacobian(lambda q: call(q, k, v)))(q)
    np.testing.assert_allclose(jnp.tensordot(2 * out, jacobian, 4), grad, atol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(jax.checkpoint(loss)))(q), grad, atol=1e-6)
    tangent = jax.jit(lambda v: jax.jvp(loss, (q,), (v,))[1])(v)
    np.testing.assert_allclose(tangent, jnp.sum(grad * v), rtol=1e-4)
    _, scanned = jax.lax.scan(lambda c, x: (c, jax.grad(loss)(x)), 0, jnp.stack([q, q]))
    np.testing.assert_allclose(scanned[1], grad, atol=1e-6)
    hvp = jax.jit(lambda v: jax.jvp(jax.grad(loss), (q,), (v,))[1])(v)
    np.testing.assert_allclose(hvp, (slope(q + 1e-2 * v) - slope(q - 1e-2 * v)) / 2e-2, atol=5e-3)


def test_decoding_token_by_token_equals_the_full_pass(name, key):
    q, k, v = jax.random.normal(key, (3, 2, 6, 2, 4))
    mask = Causal() & Window(4) | Prefix(1)
    full = jax.jit(lambda *a: attend(*a, mask=mask, scale="log_n(2)", implementation=name))(q, k, v)
    step = jax.jit(lambda x, t: attend(x, k, v, mask=mask, scale="log_n(2)", q_start=t,
                                       implementation=name))
    starts = jnp.array([3, 5])
    rows = step(jnp.stack([q[0, 3:4], q[1, 5:6]]), starts)
    np.testing.assert_allclose(rows[:, 0], jnp.stack([full[0, 3], full[1, 5]]), atol=1e-6)


def test_half_precision_is_as_good_as_its_inputs(name, key):
    q, k, v = jax.random.normal(key, (3, 1, 16, 2, 8))
    for dtype, atol in ((jnp.bfloat16, 2e-2), (jnp.float16, 3e-3)):
        low = [x.astype(dtype) for x in (q, k, v)]
        call = jax.jit(lambda *a: attend(*a, mask=Causal(), implementation=name))
        exact, out = call(*(x.astype(jnp.float32) for x in low)), call(*low)
        assert out.dtype == dtype
        np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=atol)


def test_large_logits_stay_finite(name):
    q = jnp.full((1, 2, 1, 4), 1e4)
    out, pull = jax.vjp(lambda q: attend(q, q, q, scale=1.0, implementation=name), q)
    np.testing.assert_allclose(out, q, rtol=1e-6)
    assert bool(jnp.isfinite(pull(q)[0]).all())


# Arguments that cannot be meant.

Q = jnp.ones((2, 3, 4, 8))


@pytest.mark.parametrize("change, says", [
    ({"v": Q[:, :2]}, "(2, 2, 4, 8)"), ({"v": Q[:, :, :2]}, "(2, 3, 2, 8)"),
    ({"k": Q[:1], "v": Q[:1]}, "batch sizes"), ({"k": Q[..., :4]}, "differ in width"),
    ({"k": Q[:, :, :3], "v": Q[:, :, :3]}, "4 query heads are not a multiple of 3"),
    ({"q": Q[0]}, "rank 4"), ({"k": Q.astype(jnp.bfloat16)}, "bfloat16"),
    ({"q": jnp.ones((2, 3, 4, 8), int)}, "int32"),
    ({"bias": jnp.ones((2, 2, 3, 3))}, "(2, 2, 3, 3)"), ({"bias": jnp.ones((3, 3), bool)}, "mask"),
    ({"bias": lambda n, q, k: 0.0}, "array"), ({"mask": jnp.ones((3, 3), bool)}, "Rule"),
    ({"mask": Mask(Causal(), jnp.ones((3, 3), int), jnp.ones((3, 3), int))}, "2 examples"),
    ({"softcap": 0.0}, "softcap 0.0"), ({"softcap": -1}, "softcap"),
    ({"softcap": float("nan")}, "nan"), ({"sink": jnp.ones(3)}, "(3,)"),
    ({"q_start": 1.5}, "float32"), ({"q_start": jnp.ones(3, int)}, "(3,)"),
    ({"dropout": 0.1}, "Dropout"), ({"dropout": Dropout(0.1)}, "needs a seed"),
    ({"dropout": Dropout(0.1, jax.random.key(0))}, "uint32"),
    ({"score": "bilinear"}, "bilinear_NHH"), ({"score": "scaled"}, "did you mean 'scaled_dot'"),
    ({"score": 3}, "3"), ({"score": "cosine(gain=-1)"}, "gain"),
    ({"scale": "1/sqrt(dd)"}, "did you mean '1/sqrt(d)'"), ({"scale": float("nan")}, "nan"),
    ({"scale": True}, "True"), ({"scale": jnp.ones(2)}, "(2,)"), ({"scale": "log_n(1)"}, "above 1"),
    ({"scale": "log_n(x)"}, "'x'"), ({"scale": "log_n"}, "log_n(L)"),
    ({"score": "dot", "scale": "1/sqrt(d)"}, "use the score scaled_dot"),
    ({"implementation": "refrence"}, "did you mean 'reference'"),
    ({"implementation": []}, "[]"), ({"implementation": 3}, "3"),
    ({"implementation": "no_such_module:fn"}, "cannot be imported"),
    ({"implementation": "math:nothing"}, "cannot be imported")])
def test_wrong_arguments_are_one_sentence(change, says):
    arrays = [change.get(n, Q) for n in "qkv"]
    options = {n: o for n, o in change.items() if n not in "qkv"}
    with pytest.raises(UserError) as error:
        attend(*arrays, **options)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("rate", [-0.1, float("nan"), 1.0, 1.5, True, "0.1"])
def test_dropout_rates_out_of_range(rate):
    """A20 of the case list (flax #5497)."""
    with pytest.raises(UserError, match="dropout rate"):
        Dropout(rate, jnp.uint32(1))


def test_cosine_refuses_a_second_normalisation():
    score = make_score("cosine")
    params = score.init(jax.random.key(0), {"N": 4, "H": 8})
    for scale in ("1/sqrt(d)", "1/d", "log_n(16)"):
        with pytest.raises(UserError, match="contradicts the score 'cosine'"):
            attend(Q, Q, Q, score=score, score_params=params, scale=scale)
    for scale in ("none", "default", None, 1.0):
        out = attend(Q, Q, Q, score=score, score_params=params, scale=scale)
        np.testing.assert_allclose(out, 1.0, atol=1e-6)


# Dispatch.

def test_resolution_names_what_runs():
    request = request_of(Q, Q, Q, softcap=3.0)
    assert resolve(None, request)[0] == resolve("auto", request)[0] == "reference"
    assert resolve(["jax_nn", "reference"], request)[0] == "reference"
    assert resolve(["jax_nn", "reference"], request_of(Q, Q, Q))[0] == "jax_nn"
    name, function = resolve("tx_jax.attention.jax_nn:attend", request_of(Q, Q, Q))
    assert name == "tx_jax.attention.jax_nn:attend" and callable(function)
    with pytest.raises(UserError, match="'jax_nn' cannot do a soft cap; use .*=reference"):
        resolve("jax_nn", request)
    with pytest.raises(UserError, match="cannot do a soft cap"):
        resolve("tx_jax.attention.jax_nn:attend", request)


def test_outside_callables_take_the_same_arguments():
    seen = {}

    def mine(q, k, v, *, mask, bias, score, score_params, scale, softcap, dropout, sink, q_start):
        seen.update(scale=scale, mask=mask, dropout=dropout)
        return v * 2

    out = attend(Q, Q, Q, mask="causal", dropout=Dropout(0.0), implementation=mine)
    np.testing.assert_array_equal(out, 2 * Q)
    assert seen == {"scale": 8**-0.5, "mask": Mask(Causal()), "dropout": None}
    name, _ = resolve(mine, request_of(Q, Q, Q))
    assert name.endswith("mine")
    mine.CAPABILITIES = Capabilities(rules=frozenset({"causal"}))
    with pytest.raises(UserError, match="a dense bias with the mask rule window"):
        attend(Q, Q, Q, mask=Causal() & Window(2), bias=jnp.ones((3, 3)), implementation=mine)


def test_request_reads_shapes_only():
    q, k = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 2, 4, 8), (1, 5, 2, 8)))
    v = jax.ShapeDtypeStruct((1, 5, 2, 6), jnp.float32)
    request = request_of(q, k, v, mask=Mask(Causal() | ~Window(3)), scale="log_n(5)", q_start=1)
    assert request.rules == {"causal", "window"} and request.gqa and request.v_width
    assert request.row_scale and request.shifted and not request.traced_start
    assert not request_of(q, k, v, q_start=3).shifted


def test_capability_matrix_lists_every_implementation():
    lines = capability_matrix().splitlines()
    assert lines[0].split("|")[2:-1] == [f" {name} " for name in NAMES]
    row = next(line for line in lines if "soft cap" in line)
    assert row.split("|")[2:-1] == [" – ", " yes "]


# Dropout.

def test_dropout_decisions_match_python_integers():
    seed = 123456789
    got = keep(0.3, jnp.uint32(seed), jnp.arange(2)[:, None, None, None],
               jnp.arange(3)[None, :, None, None], jnp.arange(5, 9)[None, None, :, None],
               jnp.arange(6)[None, None, None, :])
    for b, n, t, s in np.ndindex(got.shape):
        assert bool(got[b, n, t, s]) == slow_keep(0.3, seed, b, n, t + 5, s)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_is_fair_and_independent_along_every_axis(rate):
    shape = (4, 4, 128, 128)
    axes = [jnp.arange(n).reshape([-1 if i == j else 1 for j in range(4)])
            for i, n in enumerate(shape)]
    masks = [np.asarray(keep(rate, jnp.uint32(s), *axes), np.float64) for s in (0, 1, 2**31)]
    deviation = np.sqrt(rate * (1 - rate))
    for x in masks:
        assert abs(x.mean() - (1 - rate)) < 5 * deviation / np.sqrt(x.size)
        y = (x - (1 - rate)) / deviation
        for axis, size in enumerate(shape):
            rows = np.moveaxis(y, axis, 0).reshape(size, -1)
            assert np.abs(rows.mean(axis=1)).max() < 5 / np.sqrt(rows.shape[1])
            for lag in (1, 2):
                assert abs((rows[lag:] * rows[:-lag]).mean()) < 5 / np.sqrt(rows[lag:].size)
    pair = (masks[0] - (1 - rate)) * (masks[1] - (1 - rate)) / deviation**2
    assert abs(pair.mean()) < 5 / np.sqrt(pair.size)


def test_dropout_does_not_depend_on_tiling(key):
    q, k, v = jax.random.normal(key, (3, 2, 8, 2, 4))
    drop = Dropout(0.5, jnp.uint32(5))
    call = jax.jit(lambda *a, **start: attend(*a, mask=Causal(), dropout=drop, **start))
    full, part = call(q, k, v), call(q[:, 3:5], k, v, q_start=3)
    short = call(q[:, 3:5], k[:, :5], v[:, :5])
    np.testing.assert_allclose(part, full[:, 3:5], atol=1e-6)
    np.testing.assert_allclose(short, full[:, 3:5], atol=1e-6)
    mean = jnp.mean(jax.jit(jax.vmap(lambda s: attend(q, k, v, dropout=Dropout(0.5, s))))(
        jnp.arange(3000, dtype=jnp.uint32)), axis=0)
    np.testing.assert_allclose(mean, attend(q, k, v), atol=0.15)


# Inspection.

def test_attention_weights_rebuild_the_output(key):
    q, k, v = jax.random.normal(key, (3, 2, 5, 2, 4))
    sink = jnp.array([0.3, -1.0])
    options = {"mask": Causal() & Window(3), "softcap": 1.5, "sink": sink}
    weights, lse = attention_weights(q, k, **options)
    np.testing.assert_allclose(jnp.einsum("BNTS,BSNH->BTNH", weights, v),
                               attend(q, k, v, **options), atol=1e-6)
    np.testing.assert_allclose(weights.sum(-1), 1 - jnp.exp(sink[None, :, None] - lse), atol=1e-6)


def test_attention_statistics_against_numpy(key):
    q, k = 2 * jax.random.normal(key, (2, 2, 6, 2, 4))
    seg = jnp.array([[1, 1, 1, 1, 0, 0], [1, 1, 2, 2, 2, 2]])
    mask = Mask(Causal(), seg, seg)
    got = jax.jit(lambda q, k: attention_statistics(q, k, mask=mask, score="dot"))(
        jnp.where(seg[..., None, None] == 0, jnp.nan, q), k)
    logits = np.einsum("btnh,bsnh->bnts", np.float64(q), np.float64(k))
    allowed = np.broadcast_to(np.asarray(dense_mask(mask, 6, 6))[:, None], logits.shape)
    entropy, top = [], []
    for b, n, t in np.ndindex(logits.shape[:3]):
        row = logits[b, n, t][allowed[b, n, t]]
        if row.size:
            p = np.exp(row - row.max())
            p /= p.sum()
            entropy.append(-np.sum(p * np.log(np.maximum(p, 1e-300))))
            top.append(p.max())
    np.testing.assert_allclose(got["logit_variance"], logits[allowed].var(), rtol=1e-5)
    np.testing.assert_allclose(got["largest_logit"], np.abs(logits[allowed]).max(), rtol=1e-6)
    np.testing.assert_allclose(got["entropy"], np.mean(entropy), rtol=1e-5)
    np.testing.assert_allclose(got["saturated"], np.mean(np.array(top) > 0.99), rtol=1e-6)


def test_statistics_with_a_sink_and_without_any_pair():
    q = jnp.zeros((1, 2, 1, 4))
    sunk = attention_statistics(q, q, sink=jnp.zeros(1))
    np.testing.assert_allclose(sunk["entropy"], np.log(3), rtol=1e-6)
    nothing = attention_statistics(q, q, mask=~Full())
    assert all(float(x) == 0 for x in nothing.values())
