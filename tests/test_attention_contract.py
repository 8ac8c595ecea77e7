"""What attention refuses, how names resolve, dropout decisions and inspection."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention_loops import slow_keep
from tx_jax.attention import (
    Bias,
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
from tx_jax.masks import Causal, Full, Mask, Window, dense_mask

NAMES = sorted(implementations())


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
    ({"q_start": 1.5}, "1.5"), ({"q_start": 2**40}, "2^30"), ({"q_start": "1"}, "'1'"),
    ({"q_start": True}, "True"), ({"q_start": jnp.ones(3, int)}, "(3,)"),
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
    ({"implementation": "math:nothing"}, "cannot be imported"),
    ({"implementation": "math:sqrt"}, "does not take"),
    ({"softcap": jnp.ones(3)}, "(3,)"), ({"softcap": True}, "True"), ({"sink": [0.0] * 4}, "list"),
    ({"dropout": Dropout(0.5, 5)}, "int"), ({"head_width": -1}, "-1"),
    ({"score": "cosine", "score_params": {"gain_N": jnp.ones(1)}}, "must be (4,)"),
    ({"bias": Bias(lambda p, n, q, k: 0.5)}, "gave float"),
    ({"bias": Bias(lambda p, n, q, k: (q + k)[0].astype(jnp.float32))}, "gave float32 (1, 3, 3)"),
    ({"bias": Bias(lambda q, k: q)}, "(params, head, q_pos, k_pos)"),
    ({"bias": Bias(lambda p, n, q, k: n, q_pos_BT=[[0, 1, 2]])}, "is a list"),
    ({"mask": Mask(Causal(), k_lengths_B=[3, 4])}, "is a list"),
    ({"k": Q[..., :0], "q": Q[..., :0]}, "width 0"),
    ({"implementation": lambda q, k, v: v}, "mask, bias")])
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
    with pytest.raises(UserError, match="'jax_nn' cannot do a soft cap; use .*=blockwise"):
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
    capped = ("blockwise", "decode", "reference")
    assert row.split("|")[2:-1] == [" yes " if name in capped else " – " for name in NAMES]


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
