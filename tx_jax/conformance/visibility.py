"""Who sees whom: causality, windows, alignment, documents, padding, rows without keys, lengths."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.conformance.loops import slow_attend
from tx_jax.conformance.subject import (
    Check,
    Subject,
    close,
    ensure,
    fault,
    same,
    with_gradients,
)
from tx_jax.masks import Causal, Full, Mask, Prefix, Rule, Window


def future(subject: Subject) -> None:
    """Under a causal mask later tokens change nothing, neither outputs nor gradients."""
    q, k, v = subject.qkv(0, 2, 6, 6)
    call = jax.jit(lambda *a: subject(*a, mask=Causal()))
    out = call(q, k, v)
    for t in (0, 2, 4):
        moved = call(*(x.at[:, t + 1:].add(3) for x in (q, k, v)))
        same(moved[:, :t + 1], out[:, :t + 1], f"output up to {t} after a change from {t + 1} on")
    early = jax.jit(jax.grad(lambda *a: jnp.sum(call(*a)[:, :3].astype(jnp.float32)), (0, 1, 2)))
    for name, grad in zip("qkv", early(q, k, v), strict=True):
        same(grad[:, 3:], 0 * grad[:, 3:], f"gradient of later {name}")


def window_width(subject: Subject) -> None:
    """A window of W keys counts the query itself: 1, 2, 3, 4, 4 ... keys for W = 4."""
    v = jnp.broadcast_to(jnp.eye(8, dtype=subject.dtype)[None, :, None], (1, 8, 1, 8))
    for width in (1, 4, 8):
        mask = Causal() & Window(width)
        out = jax.jit(lambda v, mask=mask: subject(0 * v, 0 * v, v, mask=mask))(v)
        seen, right = (out[0, :, 0] > 0).sum(axis=1), [min(t + 1, width) for t in range(8)]
        ensure(seen.tolist() == right, f"window({width}) shows {seen.tolist()} keys, not {right}")


def end_alignment(subject: Subject) -> None:
    """With T != S the last query stands on the last key; rows before the first key are zero."""
    q, k, v = subject.qkv(1, 1, 5, 5)
    call = jax.jit(lambda *a: subject(*a, mask=Causal()))
    square = call(q, k, v)
    for T in (1, 2):
        close(call(q[:, 5 - T:], k, v), square[:, 5 - T:], f"the last {T} of 5 queries")
    out = call(q, k[:, :2], v[:, :2])
    same(out[:, :3], 0 * out[:, :3], "rows before the first key (T = 5, S = 2)")
    close(out[:, 3], v[:, 0], "the row on the first key (T = 5, S = 2)")
    if subject.can("shifted"):
        before = jax.jit(lambda *a: subject(*a, mask=Causal(), q_start=-2))(q, k, v)
        same(before[:, :2], 0 * before[:, :2], "rows before the first key (q_start = -2)")
        later = jax.jit(lambda *a: subject(*a, mask=Causal(), q_start=0))(q[:, 2:], k, v)
        close(before[:, 2:], later, "rows from the first key on (q_start = -2)")


def documents(subject: Subject) -> None:
    """A document in a pack equals the document alone; changes of another do not reach it."""
    rule = Causal() if subject.can("causal") else None
    q, k, v = subject.qkv(2, 1, 8, 8)
    seg = jnp.array([[1, 1, 1, 2, 2, 2, 0, 0]])
    pack = with_gradients(lambda *a: subject(*a, mask=Mask(rule or Full(), seg, seg)))
    packed = pack(q, k, v)
    alone = jax.jit(lambda *a: subject(*a, mask=rule))(*(x[:, 3:6] for x in (q, k, v)))
    close(packed[0][:, 3:6], alone, "document 2 in the pack")
    # Any integer is a document's number: these are equal in 8 bits, or below 0.
    for other in (257, -1, 2**30):
        ids = jnp.where(seg == 2, other, seg)
        again = jax.jit(lambda *a, ids=ids: subject(*a, mask=Mask(rule or Full(), ids, ids)))
        same(again(q, k, v), packed[0], f"the pack with its second document numbered {other}")
    moved = pack(*(x.at[:, :3].add(3) for x in (q, k, v)))
    for name, a, b in zip(("output", "dq", "dk", "dv"), moved, packed, strict=True):
        same(a[:, 3:6], b[:, 3:6], f"{name} of document 2 after a change of document 1")


def padding(subject: Subject) -> None:
    """Segment 0 neither sees nor is seen, even if it holds NaN or infinity."""
    q, k, v = subject.qkv(3, 2, 5, 5)
    seg = jnp.array([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]])
    call = with_gradients(lambda *a: subject(*a, mask=Mask(Full(), seg, seg)))
    clean, pad = call(q, k, v), (seg == 0)[..., None, None]
    for name, x in zip(("output", "dq", "dk", "dv"), clean, strict=True):
        same(jnp.where(pad, x, 0), 0 * x, f"{name} of padding")
    _poison(call, clean, (q, k, v), (pad, pad, pad), "padding")


def key_lengths(subject: Subject) -> None:
    """Keys beyond their length are not seen, even if they hold NaN or infinity."""
    q, k, v = subject.qkv(4, 3, 3, 6)
    lengths = jnp.array([2, 6, 0])
    call = with_gradients(lambda *a: subject(*a, mask=Mask(Full(), k_lengths_B=lengths)))
    clean = call(q, k, v)
    short = jax.jit(lambda *a: subject(*a))(q[:1], k[:1, :2], v[:1, :2])
    close(clean[0][:1], short, "an example with 2 keys")
    for name, x in zip(("output", "dq", "dk", "dv"), clean, strict=True):
        same(x[2], 0 * x[2], f"{name} of an example without keys")
    beyond = (jnp.arange(6)[None] >= lengths[:, None])[..., None, None]
    _poison(call, clean, (q, k, v), (False, beyond, beyond), "keys beyond their length")


def _poison(call: Any, clean: Any, arrays: Any, where: Any, what: str) -> None:
    for poison in (jnp.nan, jnp.inf):
        bad = [jnp.where(w, jnp.asarray(poison, x.dtype), x)
               for w, x in zip(where, arrays, strict=True)]
        for name, a, b in zip(("output", "dq", "dk", "dv"), call(*bad), clean, strict=True):
            same(a, b, f"{name} with {poison} in {what}")


def cache_poison(subject: Subject) -> None:
    """The unwritten part of a cache is not read, even if it holds NaN or infinity."""
    q, k, v = subject.qkv(5, 1, 1, 6)
    call = jax.jit(lambda *a: subject(*a, mask=Causal(), q_start=2))
    right = call(q, k[:, :3], v[:, :3])
    for poison in (jnp.nan, jnp.inf):
        k_bad, v_bad = k.at[:, 3:].set(poison), v.at[:, 3:].set(poison)
        close(call(q, k_bad, v_bad), right, f"{poison} after key 2")


def prefix_lengths(subject: Subject) -> None:
    """Every query sees the prefix of its example, and the rest by the rule."""
    q, k, v = subject.qkv(6, 2, 5, 5)
    out = jax.jit(lambda *a: subject(*a[:3], mask=Mask(Causal(), prefix_B=a[3])))(
        q, k, v, jnp.array([3, 0]))
    for b, rule in enumerate((Causal() | Prefix(3), Causal())):
        close(out[b:b + 1], _loops(q[b:b + 1], k[b:b + 1], v[b:b + 1], rule), f"example {b}")


def _loops(q: Any, k: Any, v: Any, rule: Rule | None, **options: Any) -> np.ndarray:
    return slow_attend(*(np.asarray(x, np.float64) for x in (q, k, v)), mask=rule, **options)


def empty_rows(subject: Subject) -> None:
    """A row without keys gives zeros, with zero gradients, and spoils no other row."""
    q, k, v = subject.qkv(7, 1, 4, 2)
    full = Mask(Full(), jnp.array([[0, 1, 0, 1]]), jnp.ones((1, 2), int))
    bias = jnp.array([[0.0, 0], [0, 0], [0, 0], [-jnp.inf, -jnp.inf]], jnp.float32)
    cases = [({"mask": Causal()}, (0, 1), ("causal",)), ({"mask": full}, (0, 2), ("segments",)),
             ({"bias": bias}, (3,), ("bias",)),
             ({"bias": bias, "mask": full}, (0, 2, 3), ("bias", "segments"))]
    done = 0
    for options, rows, needs in cases:
        if not subject.can(*needs):
            continue
        done += 1
        slopes = {n: o for n, o in options.items() if n == "bias"}
        rest = {n: o for n, o in options.items() if n != "bias"}
        results = with_gradients(lambda q, k, v, s, rest=rest: subject(q, k, v, **s, **rest))(
            q, k, v, slopes)
        for name, x in zip(("output", "dq"), results[:2], strict=True):
            same(x[:, rows, :], 0 * x[:, rows, :], f"{name} of rows {rows} without keys "
                 f"by {' and '.join(needs)}")
        ensure(all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(results)),
               f"rows without keys by {' and '.join(needs)} make gradients NaN")
        if "bias" in slopes:
            same(results[4]["bias"][3], jnp.zeros(2), "bias gradient of a row without keys")
        seen = [t for t in range(4) if t not in rows]
        ensure(bool(jnp.any(results[0][:, jnp.array(seen)])), "rows with keys are zero as well")
    return None if done else "no declared option can empty a row"


def empty_sizes(subject: Subject) -> None:
    """Batch, queries or keys of size 0 give outputs of the right shape, and zeros without keys."""
    for B, T, S in ((0, 2, 2), (1, 0, 2), (1, 2, 0), (0, 0, 0)):
        q, k, v = subject.qkv(8, B, T, S)
        out, *grads = with_gradients(lambda *a: subject(*a))(q, k, v)
        ensure(out.shape == (B, T, 2, 4), f"B={B}, T={T}, S={S} give the shape {out.shape}")
        ensure(not out.any() and not any(g.any() for g in grads),
               f"B={B}, T={T}, S={S} give something else than zeros")


def odd_lengths(subject: Subject) -> None:
    """Lengths that fit no block are exact, with T = S and not, and repeated calls agree."""
    heads = {"N": 2, "K": 1 if subject.can("gqa") else 2, "H": 16}
    for mask, lengths in ((None, ((1, 1), (7, 7), (129, 129), (7, 129))),
                          (Causal(), ((127, 127), (192, 192), (127, 192)))):
        if mask is not None and not subject.can("causal"):
            continue
        call = jax.jit(lambda *a, mask=mask: subject(*a, mask=mask))
        for T, S in lengths:
            q, k, v = subject.qkv(T, 1, T, S, **heads)
            out = call(q, k, v)
            close(out, _vectorised(q, k, v, mask is not None), f"T={T}, S={S}")
            for _ in range(3):
                same(call(q, k, v), out, f"a repeated call with T={T}, S={S}")


def _vectorised(q: Any, k: Any, v: Any, causal: bool) -> np.ndarray:
    """End-aligned attention in float64; its loops would be slow at these lengths."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    G = q.shape[2] // k.shape[2]
    logits = np.einsum("btnh,bsnh->bnts", q, k.repeat(G, 2)) / np.sqrt(q.shape[3])
    T, S = logits.shape[2:]
    if causal:
        logits = np.where(np.tril(np.ones((T, S)), S - T) > 0, logits, -np.inf)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v.repeat(G, 2))


def block_edges(subject: Subject) -> None:
    """Gradients at ragged lengths (T = 37, S = 53) equal central differences."""
    mask = Causal() if subject.can("causal") else None
    K = 1 if subject.can("gqa") else 2
    arrays = subject.normal(9, (1, 37, 2, 8), (1, 53, K, 8), (1, 53, K, 8))
    run = with_gradients(lambda *a: subject(*a, mask=mask))
    weights = np.round(np.cos(np.arange(37 * 16)) * 32).reshape(1, 37, 2, 8) / 32
    _, *grads = run(*arrays)
    rng = np.random.default_rng(0)
    for i, name in enumerate("qkv"):
        exact = [np.asarray(x, np.float64) for x in arrays]
        d = rng.normal(size=exact[i].shape)
        sides = [np.sum(weights * _vectorised(*(x + s * d if i == j else x for j, x in
                                                enumerate(exact)), mask is not None))
                 for s in (1e-5, -1e-5)]
        slope, got = (sides[0] - sides[1]) / 2e-5, float(np.sum(np.float64(grads[i]) * d))
        ensure(not fault(got, slope, 20 * 2e-5 if grads[i].dtype == jnp.float32 else 0.3, ""),
               f"the gradient of {name} has slope {got:.6g} instead of {slope:.6g}")


CHECKS = (
    Check(future, ("causal",)), Check(window_width, ("causal", "window")),
    Check(end_alignment, ("causal",)), Check(documents, ("segments",)),
    Check(padding, ("segments",)), Check(key_lengths, ("key_lengths",)),
    Check(cache_poison, ("causal", "shifted")),
    Check(prefix_lengths, ("causal", "prefix_lengths")), Check(empty_rows), Check(empty_sizes),
    Check(odd_lengths), Check(block_edges))
