"""Heads, scale, score, softcap, bias, sinks and dropout: what goes into the softmax, in order."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.attention import Bias, Dropout
from tx_jax.conformance.loops import slow_keep
from tx_jax.conformance.options import OPTIONS, covers, distance_bias
from tx_jax.conformance.subject import (
    Check,
    Subject,
    close,
    ensure,
    same,
    weights_of,
    with_gradients,
)
from tx_jax.conformance.values import compare_choice
from tx_jax.masks import Causal, Dilated, Global, Window


def _compare_all(subject: Subject, choices: list[dict[str, Any]]) -> str:
    """Compare each combination with the loops in the dtype of the subject."""
    able = [c for c in choices if covers(c, subject.capabilities)]
    for number, choice in enumerate(able):
        plain = {n: values[0] for n, values in OPTIONS.items()}
        compare_choice(subject, plain | {"lengths": (2, 5), "dtype": subject.dtype.name} | choice,
                       number)
    return f"{len(able)} combinations"


def head_groups(subject: Subject) -> None:
    """Query head n meets key head n // (N/K), also where B = K; dk and dv sum over the group."""
    for N, K in ((4, 2), (4, 1), (6, 3)):
        v = jnp.broadcast_to(jnp.arange(K, dtype=subject.dtype)[None, None, :, None], (K, 3, K, 4))
        q, k, _ = subject.qkv(0, K, 2, 3, N, K)
        _, dq, dk, dv = (call := with_gradients(lambda *a: subject(*a)))(q, k, v)
        out = call(q, k, v)[0]
        right = jnp.broadcast_to((jnp.arange(N) // (N // K)).astype(out.dtype)[None, None, :, None],
                                 out.shape)
        close(out, right, f"{N} query heads on {K} key heads, value = number of the key head")
        wide = [jnp.repeat(x, N // K, axis=2) for x in (k, v)]
        _, dq_all, dk_all, dv_all = call(q, *wide)
        close(dq, dq_all, f"dq of {N} heads on {K}", slack=4)
        for name, d, d_all in (("dk", dk, dk_all), ("dv", dv, dv_all)):
            total = d_all.astype(jnp.float32).reshape(K, 3, K, N // K, -1).sum(axis=3)
            close(d, total, f"{name} of {N} heads on {K}", slack=4)


def head_width(subject: Subject) -> str:
    """Any width of heads works, and the scale is that of the true width."""
    widest = subject.capabilities.max_width or 96
    widths = [w for w in (1, 3, 40, 72, 96) if w <= widest]
    call = jax.jit(lambda *a: subject(*a))
    for width in widths:
        q, k, v = subject.qkv(width, 1, 3, 5, H=width)
        logits = np.einsum("bqnh,bknh->bnqk", *(np.asarray(x, np.float64) for x in (q, k)))
        weights = np.exp(logits / np.sqrt(width))
        weights /= weights.sum(-1, keepdims=True)
        close(call(q, k, v), np.einsum("bnqk,bknh->bqnh", weights, np.asarray(v, np.float64)),
              f"heads of width {width}")
    return f"{', '.join(map(str, widths))}"


def value_width(subject: Subject) -> str:
    """Values may be narrower or wider than keys."""
    q, k, _ = subject.qkv(0, 1, 3, 5)
    (v,) = subject.normal(1, (1, 5, 2, 7))
    both = jax.jit(lambda *a: subject(*a))
    halves = [both(q, k, part) for part in (v[..., :4], v[..., 4:])]
    close(both(q, k, v), jnp.concatenate(halves, axis=-1), "values of width 7")
    return _compare_all(subject, [{"v_width": 3}])


def scales(subject: Subject) -> str:
    """Every scale gives its logits: the default, a number, a traced one, 1/d, log_n per row."""
    choices = [{"scale": scale} for scale in OPTIONS["scale"]]
    return _compare_all(subject, [*choices, {"scale": "log_n(2)", "rule": Causal()}])


def scores(subject: Subject) -> str:
    """Every score function equals its own loop, with gradients of its parameters."""
    return _compare_all(subject, [{"score": s, "heads": (4, 2)} for s in OPTIONS["score"]])


def bias_shapes(subject: Subject) -> None:
    """A bias of any broadcast shape gets its gradient, summed over what was broadcast."""
    q, k, v = subject.qkv(0, 2, 8, 8, N=4, K=4)
    slope = jax.jit(jax.grad(lambda b: jnp.sum(weights_of((2, 8, 4, 4)) * subject(
        q, k, v, bias=b).astype(jnp.float32))))
    rng = np.random.default_rng(0)
    for shape in ((2, 4, 8, 8), (2, 1, 8, 8), (2, 4, 1, 8), (4, 8, 8), (8, 8), (8, 1), (1,)):
        bias = jnp.asarray(rng.normal(size=shape), jnp.float32)
        padded = (1,) * (4 - len(shape)) + shape
        whole = slope(jnp.broadcast_to(bias.reshape(padded), (2, 4, 8, 8)))
        axes = tuple(i for i in range(4) if padded[i] == 1)
        right = whole.sum(axis=axes, keepdims=True).reshape(shape)
        close(slope(bias), right, f"gradient of a bias of shape {shape}", dtype=subject.dtype)
        if shape == (2, 4, 8, 8):
            ensure(jnp.abs(whole).max() > 1e-3, "the gradient of a bias is zero")


def bias_values(subject: Subject) -> str:
    """A dense bias is added to the logits, in every broadcast shape."""
    return _compare_all(subject, [{"bias": b, "heads": (4, 2)} for b in ("BNTS", "N1S", "TS")])


def bias_functions(subject: Subject) -> str:
    """A bias as a function equals the array it means; its parameters get gradients."""
    q, k, v = subject.qkv(1, 2, 5, 5)
    places = jnp.array([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    params = {"slope_N": jnp.array([0.5, -1.0]), "offset_N": jnp.array([0.1, 0.0])}
    run = with_gradients(lambda q, k, v, p: subject(
        q, k, v, bias=Bias(distance_bias, p, q_pos_BT=places, k_pos_BS=places)))
    out, *_, grads = run(q, k, v, params)
    ensure(all(bool(jnp.any(g != 0)) for g in (grads["slope_N"],)),
           "the parameters of a bias function get no gradient")
    if subject.can("bias"):
        far = (places[:, :, None] - places[:, None, :]).astype(jnp.float32)[:, None]
        dense = (params["offset_N"][None, :, None, None]
                 - params["slope_N"][None, :, None, None] ** 2 * far)
        beside = jax.jit(lambda *a: subject(*a[:3], bias=a[3]))(q, k, v, dense)
        close(out, beside, "a bias function beside its array")
    return _compare_all(subject, [{"bias": "pair", "rule": r, "heads": h, "q_start": start}
                                  for r, h, start in ((None, (4, 2), None),
                                                      (Causal(), (3, 1), 1))])


def row_biases(subject: Subject) -> str:
    """A bias that reads whole rows of logits sees them after scale, softcap and mask."""
    rows = {"bias": "rows", "heads": (4, 2)}
    holes = Window(4) & Dilated(2) | Global(1)  # what is hidden between two keys counts for nothing
    return _compare_all(subject, [rows, rows | {"rule": Causal()}, rows | {"rule": holes},
                                  rows | {"softcap": 0.7}])


def softcap_order(subject: Subject) -> str:
    """The cap comes after the scale and before bias and mask."""
    cap = {"softcap": 0.7, "heads": (4, 2)}
    return _compare_all(subject, [cap, cap | {"scale": 0.3}, cap | {"bias": "BNTS"},
                                  cap | {"rule": Causal()},
                                  cap | {"bias": "TS", "rule": Causal()}])


def sinks(subject: Subject) -> str:
    """A sink joins the softmax of its head without a value, and gets its gradient."""
    sink = {"sink": True, "heads": (4, 2)}
    q, k, v = subject.qkv(2, 1, 2, 3)
    call = jax.jit(lambda *a, **o: subject(*a, **o))
    drained = call(q, k, v, sink=jnp.array([60.0, -60.0]))
    close(drained[:, :, 0], 0 * drained[:, :, 0], "a head whose sink takes everything")
    close(drained[:, :, 1], call(q, k, v)[:, :, 1], "a head whose sink takes nothing")
    return _compare_all(subject, [sink, sink | {"rule": Causal(), "lengths": (5, 3)}])


def dropout_decisions(subject: Subject) -> None:
    """Dropout keeps exactly the weights that the hash of (seed, b, n, q, k) keeps."""
    B, T, N, S, rate = 2, 5, 2, 8, 0.4
    v = jnp.broadcast_to(jnp.eye(S, dtype=subject.dtype)[None, :, None], (B, S, N, S))
    q, k = jnp.zeros((B, T, N, S), subject.dtype), jnp.zeros((B, S, N, S), subject.dtype)
    call = with_gradients(lambda q, k, v, seed: subject(q, k, v, dropout=Dropout(
        rate, jax.lax.bitcast_convert_type(seed, jnp.uint32))))
    for seed in (0, 3_000_000_000):
        raw = jax.lax.bitcast_convert_type(jnp.uint32(seed), jnp.float32)
        out, _, _, dv, _ = call(q, k, v, raw)
        kept = np.zeros((B, N, T, S))
        for index in np.ndindex(B, N, T, S):
            b, n, t, s = index
            kept[index] = slow_keep(rate, seed, b, n, S - T + t, s) / (1 - rate) / S
        close(out, np.moveaxis(kept, 1, 2), f"weights after dropout with seed {seed}")
        d_out = np.asarray(weights_of(out.shape), np.float64)
        close(dv, np.einsum("bnts,btnh->bsnh", kept, d_out), f"dv under dropout, seed {seed}")


def dropout_gradients(subject: Subject) -> str:
    """The backward pass drops the same weights as the forward pass."""
    drop = {"dropout": 0.4, "heads": (4, 2), "lengths": (5, 3)}
    off = subject(*(a := subject.qkv(0, 1, 4, 4)), dropout=Dropout(0.0))
    same(off, subject(*a), "dropout of rate 0")
    return _compare_all(subject, [drop, drop | {"rule": Causal(), "q_start": 1}])


def large_logits(subject: Subject) -> None:
    """Logits of 1e4 neither overflow nor lose the largest one, forward and backward."""
    big = 1e4 if subject.dtype != jnp.float16 else 1e2
    q = jnp.full((1, 2, 2, 4), np.sqrt(big / 2), subject.dtype)
    k = jnp.stack([q[:, 0], -q[:, 0]], axis=1)
    (v,) = subject.normal(0, (1, 2, 2, 4))
    results = with_gradients(lambda *a: subject(*a))(q, k, v)
    ensure(all(bool(jnp.isfinite(x).all()) for x in results), "logits of 1e4 give NaN or infinity")
    close(results[0][:, 0], v[:, 0], "a row with one logit far above the others")


CHECKS = (
    Check(head_groups, ("gqa",)), Check(head_width), Check(value_width, ("v_width",)),
    Check(scales), Check(scores), Check(bias_values, ("bias",)), Check(bias_shapes, ("bias",)),
    Check(bias_functions, ("pair_bias",)), Check(row_biases, ("row_bias",)),
    Check(softcap_order, ("softcap",)), Check(sinks, ("sink",)),
    Check(dropout_decisions, ("dropout",)), Check(dropout_gradients, ("dropout",)),
    Check(large_logits))
