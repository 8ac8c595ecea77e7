"""Attention tile by tile in plain JAX: memory grows with T + S, forward and backward.

The softmax runs online over tiles of keys (Milakov and Gimelshein 2018; Rabe and Staats 2021; Dao
et al. 2022, algorithm 1), tiles that the mask empties are skipped, and the backward pass computes
the weights again from the log-sum-exp of each row (Dao et al. 2022, algorithm 4). A bias on whole
rows (CoPE) runs the formulas of the reference on one tile of queries after another instead.

Inside, queries are [B, K, G, T, H] and keys [B, K, S, H]: the G query heads of a key head share
their tiles of keys. Lengths are padded to whole tiles.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tx_jax.attention import _tiles, reference
from tx_jax.attention._bias import Bias, bias_positions, split_bias
from tx_jax.attention._capabilities import Capabilities
from tx_jax.attention._dropout import keep
from tx_jax.attention._rows import attend_by_rows
from tx_jax.attention._tiles import add, cut, pad
from tx_jax.attention.scores import DotProduct, ScoreFunction
from tx_jax.dtypes import wide

CAPABILITIES = Capabilities.everything(memory="T + S", jvp=False)


@dataclass(frozen=True)
class _Plan:
    """What is known while tracing; hashable."""

    S: int
    q_tile: int
    k_tile: int
    some_full: bool
    some_partial: bool
    score: ScoreFunction | None  # None: plain dot products of queries that are scaled already
    softcap: float | None
    bias: Any  # a pair bias as a function, see `split_bias`
    rate: float


def attend(q_BTNH, k_BSKH, v_BSKH, *, mask, bias, score, score_params, scale, softcap, dropout,
           sink, q_start, tiles=None):
    """Attention [B, T, N, H of v] in the dtype of v; arguments as `tx_jax.attention.attend` gives
    them to implementations, and (queries, keys) of a tile, by default from the shapes."""
    (B, T, N, H), (S, K) = q_BTNH.shape, k_BSKH.shape[1:3]
    start, high = S - T if q_start is None else q_start, wide(q_BTNH.dtype)
    if isinstance(bias, Bias) and bias.kind == "rows":
        return attend_by_rows(
            reference.softmax, q_BTNH, k_BSKH, v_BSKH, mask=mask, bias=bias, score=score,
            score_params=score_params, scale=scale, softcap=softcap, dropout=dropout, sink=sink,
            q_start=q_start, size=tiles and tiles[0])
    dot = isinstance(score, DotProduct)
    q_tile, k_tile = tiles or _tiles.tile_sizes(
        B * N, T, S, 1 if dot else H, mask, start)
    q_tile, k_tile = min(q_tile, T), min(k_tile, S)  # an axis of length 1 is never padded
    visits, some_full, some_partial = _tiles.list_tiles(mask, T, S, start, q_tile, k_tile)
    plan = _Plan(S, q_tile, k_tile, some_full, some_partial, None if dot else score,
                 None if isinstance(softcap, jax.Array) else softcap,
                 split_bias(bias)[0] if isinstance(bias, Bias) else None,
                 dropout.rate if dropout else 0)
    fixed = {"visits": jax.tree.map(jnp.asarray, visits),
             "start_B": jnp.reshape(jnp.asarray(start, jnp.int32), (-1,)),
             "mask": _tiles.pad_mask(mask, q_tile, k_tile),
             "seed": dropout.seed if dropout else None}
    learned = {}  # what gets gradients besides queries, keys and values
    if dot:
        q_BTNH, k_BSKH = score.project(score_params, q_BTNH, k_BSKH)
        rows = jnp.swapaxes(scale, 1, 2) if jnp.ndim(scale) else scale
        q_BTNH = q_BTNH.astype(high) * jnp.asarray(rows, high)
    else:
        rows = jnp.asarray(scale, high)
        rows = rows[:, :, None] if rows.ndim else rows.reshape((1,) * 5)
        learned |= {"score": dict(score_params), "scale": pad(rows, 3, q_tile)}
    if isinstance(softcap, jax.Array):
        learned["softcap"] = softcap.astype(high)
    if sink is not None:
        learned["sink"] = sink.astype(high).reshape(1, K, N // K, 1)
    if isinstance(bias, Bias):
        _, learned["bias_params"], fixed["bias_rest"] = split_bias(bias)
        q_pos, k_pos = bias_positions(bias, T, S, start)
        fixed |= {"q_pos": pad(q_pos, 1, q_tile), "k_pos": pad(k_pos, 1, k_tile)}
    elif bias is not None:
        heads = (K, N // K) if bias.shape[1] == N else (1, 1)
        bias = bias.reshape(bias.shape[0], *heads, *bias.shape[2:])
        learned["bias"] = pad(pad(bias, 3, q_tile), 4, k_tile)
    q = jnp.transpose(q_BTNH.reshape(B, T, K, N // K, -1), (0, 2, 3, 1, 4))
    k, v = (jnp.transpose(x, (0, 2, 1, 3)) for x in (k_BSKH, v_BSKH))
    if some_partial:
        fixed["broken"] = pad(_broken(k) | _broken(v), 2, k_tile)
    out = _core(plan, learned, fixed, pad(q, 3, q_tile), pad(k, 2, k_tile), pad(v, 2, k_tile))
    out_BTNH = jnp.transpose(out[:, :, :, :T], (0, 3, 1, 2, 4)).reshape(B, T, N, -1)
    return out_BTNH.astype(v_BSKH.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _core(plan, learned, fixed, q, k, v):
    return _forward(plan, learned, fixed, q, k, v)[0]


def _forward(plan, learned, fixed, q, k, v):
    """Output [B, K, G, T, H of v] and log-sum-exp [B, K, G, T]."""
    shape, high = q.shape[:3], wide(q.dtype)

    def rows(i):
        q_i = cut(q, 3, i, plan.q_tile)
        m = jnp.full((*shape, plan.q_tile), -jnp.inf, high)
        empty = (m, jnp.zeros_like(m), jnp.zeros((*m.shape, v.shape[-1]), high))

        def step(carry, j, allowed):
            m, total, mixed = carry
            k_t, v_t, mark = _mend(plan, fixed, j, allowed, k, v)
            logits = _logits(plan, fixed, i, j, _cut_learned(plan, learned, i, j), q_i, k_t)
            logits = logits if allowed is None else jnp.where(allowed, logits + mark, -jnp.inf)
            peak = jnp.maximum(m, jnp.max(logits, axis=-1))
            safe = jnp.where(peak == -jnp.inf, 0, peak)
            weights, fade = jnp.exp(logits - safe[..., None]), jnp.exp(m - safe)
            total = total * fade + jnp.sum(weights, axis=-1)
            weights = _drop(plan, fixed, i, j, weights)
            mixed = mixed * fade[..., None] + jnp.einsum("BKGTS,BKSH->BKGTH", weights,
                                                         v_t.astype(high))
            return peak, total, mixed

        m, total, mixed = _visit(plan, fixed, i, step, empty)
        if "sink" in learned:
            peak = jnp.maximum(m, learned["sink"])
            safe = jnp.where(peak == -jnp.inf, 0, peak)
            fade = jnp.exp(m - safe)
            m, total, mixed = (peak, total * fade + jnp.exp(learned["sink"] - safe),
                               mixed * fade[..., None])
        full = jnp.where(total == 0, 1, total)
        return mixed / full[..., None], jnp.where(total == 0, -jnp.inf, m + jnp.log(full))

    count = q.shape[3] // plan.q_tile
    if count == 1:
        return rows(0)
    _, (out, lse) = jax.lax.scan(lambda _, i: (None, rows(i)), None,
                                 jnp.arange(count, dtype=jnp.int32))
    return _join(out), _join(lse)


def _core_fwd(plan, learned, fixed, q, k, v):
    out, lse = _forward(plan, learned, fixed, q, k, v)
    return out, (learned, fixed, q, k, v, out, lse)


def _core_bwd(plan, saved, d_out):
    learned, fixed, q, k, v, out, lse = saved
    high = wide(q.dtype)
    # A row without keys has log-sum-exp minus infinity; its weights exp(x - inf) are 0.
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    mean = jnp.sum(d_out * out, axis=-1)

    def rows(sums, i):
        q_i, d_out_i = cut(q, 3, i, plan.q_tile), cut(d_out, 3, i, plan.q_tile)
        lse_i, mean_i = cut(lse, 3, i, plan.q_tile), cut(mean, 3, i, plan.q_tile)
        q_i = jnp.where(lse_i[..., None] == jnp.inf, 0, q_i)

        def step(carry, j, allowed):
            dq_i, dk, dv, d_learned = carry
            k_t, v_t, mark = _mend(plan, fixed, j, allowed, k, v)
            logits, pull = jax.vjp(partial(_logits, plan, fixed, i, j),
                                   _cut_learned(plan, learned, i, j), q_i.astype(high),
                                   k_t.astype(high))
            logits = logits if allowed is None else jnp.where(allowed, logits + mark, -jnp.inf)
            weights = jnp.exp(logits - lse_i[..., None])
            d_v = jnp.einsum("BKGTS,BKGTH->BKSH", _drop(plan, fixed, i, j, weights), d_out_i)
            d_weights = jnp.einsum("BKGTH,BKSH->BKGTS", d_out_i, v_t.astype(high))
            d_weights = _drop(plan, fixed, i, j, d_weights)
            d_tile, d_q, d_k = pull(weights * (d_weights - mean_i[..., None]))
            return (dq_i + d_q, add(dk, d_k, (2, j)), add(dv, d_v, (2, j)),
                    _add_learned(d_learned, d_tile, i, j))

        empty = jnp.zeros(q_i.shape, high)
        dq_i, *sums = _visit(plan, fixed, i, step, (empty, *sums))
        if "sink" in learned:
            weights = jnp.exp(learned["sink"] - lse_i)
            d_sink = -jnp.sum(weights * mean_i, axis=(0, 3), keepdims=True)
            sums[2] = sums[2] | {"sink": sums[2]["sink"] + d_sink}
        return tuple(sums), dq_i

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, wide(x.dtype)), (k, v, learned))
    count = q.shape[3] // plan.q_tile
    if count == 1:
        (dk, dv, d_learned), dq = rows(zeros, 0)
    else:
        (dk, dv, d_learned), dq = jax.lax.scan(rows, zeros, jnp.arange(count, dtype=jnp.int32))
        dq = _join(dq)
    d_learned, dq, dk, dv = jax.tree.map(lambda d, x: d.astype(x.dtype), (d_learned, dq, dk, dv),
                                         (learned, q, k, v))
    return d_learned, None, dq, dk, dv


_core.defvjp(_core_fwd, _core_bwd)


def _visit(plan, fixed, i, step, carry):
    """Run step(carry, j, allowed) on the tiles of keys that tile i of queries sees."""
    order_j = fixed["visits"]["order"][i]
    full, partly = fixed["visits"]["full"][i], fixed["visits"]["partial"][i]

    def masked(n, carry):
        q_idx, k_idx = _indices(plan, fixed, i, order_j[n])
        allowed = _tiles.visible(fixed["mask"], q_idx, k_idx, i, order_j[n], plan.S)
        return step(carry, order_j[n], allowed[:, None, None])

    # A loop would only slow down the one tile there is.
    if order_j.shape[0] == 1 and plan.some_partial:
        return masked(0, carry)
    if fixed["visits"]["order"].shape == (1, 1) and plan.some_full:
        return step(carry, 0, None)
    if plan.some_full:
        carry = jax.lax.fori_loop(0, full, lambda n, c: step(c, order_j[n], None), carry)
    if plan.some_partial:
        carry = jax.lax.fori_loop(full, full + partly, masked, carry)
    return carry


def _indices(plan, fixed, i, j):
    """Absolute indices of the tile: queries [1|B, t, 1] and keys [1, 1, s]."""
    q_idx = i * plan.q_tile + jnp.arange(plan.q_tile, dtype=jnp.int32)
    q_idx = fixed["start_B"][:, None] + q_idx[None]
    k_idx = j * plan.k_tile + jnp.arange(plan.k_tile, dtype=jnp.int32)
    return q_idx[:, :, None], k_idx[None, None, :]


def _broken(x_BKSH):
    """Which keys hold NaN or infinity [B, K, S], as padding and unwritten caches may."""
    return ~jnp.all(jnp.isfinite(jax.lax.stop_gradient(x_BKSH)), axis=-1)


def _mend(plan, fixed, j, allowed, k, v):
    """Keys and values of a tile, the broken ones zero as 0 * NaN is NaN, and what to add to the
    logits, so that whoever may see a broken key still gets NaN."""
    k_t, v_t = cut(k, 2, j, plan.k_tile), cut(v, 2, j, plan.k_tile)
    if allowed is None:
        return k_t, v_t, None
    broken = cut(fixed["broken"], 2, j, plan.k_tile)
    mark = jnp.where(broken, jnp.nan, 0).astype(wide(k.dtype))[:, :, None, None]
    return (*(jnp.where(broken[..., None], 0, x) for x in (k_t, v_t)), mark)


def _logits(plan, fixed, i, j, learned, q_t, k_t):
    """Logits of one tile as they enter the mask [B, K, G, t, s]."""
    if plan.score is None:
        logits = jnp.einsum("BKGTH,BKSH->BKGTS", q_t, k_t.astype(q_t.dtype))
    else:
        B, K, G, t, H = q_t.shape
        raw = plan.score.logits(learned["score"],
                                jnp.moveaxis(q_t, 3, 1).reshape(B, t, K * G, H),
                                jnp.swapaxes(k_t, 1, 2))
        logits = raw.reshape(B, K, G, t, -1) * learned["scale"]
    cap = learned.get("softcap", plan.softcap)
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    if "bias" in learned:
        logits = logits + learned["bias"].astype(logits.dtype)
    if plan.bias is not None:
        _, K, G, _, _ = q_t.shape
        q_pos = cut(fixed["q_pos"], 1, i, plan.q_tile)
        k_pos = cut(fixed["k_pos"], 1, j, plan.k_tile)
        bias = plan.bias(learned["bias_params"], fixed["bias_rest"],
                         jnp.arange(K * G)[None, :, None, None], q_pos[:, None, :, None],
                         k_pos[:, None, None, :])
        logits = logits + bias.reshape(bias.shape[0], K, G, *bias.shape[2:]).astype(logits.dtype)
    return logits


def _drop(plan, fixed, i, j, weights):
    """Dropout of a tile of weights, or of their gradients: it is linear."""
    if not plan.rate:
        return weights
    B, K, G = weights.shape[:3]
    q_idx, k_idx = _indices(plan, fixed, i, j)
    kept = keep(plan.rate, fixed["seed"], jnp.arange(B).reshape(B, 1, 1, 1, 1),
                jnp.arange(K * G).reshape(1, K, G, 1, 1), q_idx[:, None, None],
                k_idx[:, None, None])
    return jnp.where(kept, weights / (1 - plan.rate), 0)


def _cut_learned(plan, learned, i, j):
    """The part of the learned arrays that a tile needs."""
    learned = {name: x for name, x in learned.items() if name != "sink"}
    if "scale" in learned:
        learned["scale"] = cut(learned["scale"], 3, i, plan.q_tile)
    if "bias" in learned:
        learned["bias"] = cut(cut(learned["bias"], 3, i, plan.q_tile), 4, j, plan.k_tile)
    return learned


def _add_learned(sums, tile, i, j):
    """Add the gradients of one tile to those of the whole."""
    places = {"scale": ((3, i),), "bias": ((3, i), (4, j))}
    added = {name: add(sums[name], tile[name], *places[name]) if name in places else
             jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums[name], tile[name])
             for name in tile}
    return sums | added


def _join(tiles):
    """[tiles, B, K, G, t, ...] -> [B, K, G, tiles * t, ...]."""
    moved = jnp.moveaxis(tiles, 0, 3)
    return moved.reshape(*moved.shape[:3], -1, *moved.shape[5:])
