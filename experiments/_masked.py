"""The same masked attention in several plain ways; each is `f(mask, q_BTNH, k_BSNH, v_BSNH)`.

`add`, `select`: the whole matrix of logits. `loop_add`, `loop_branch`: pair after pair. `tiled`:
the online softmax over tiles (Dao et al. 2022, algorithms 1 and 4), with one of three rules that
say which tiles are computed; the rest of the code is the same.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from tx_jax.masks import FULL, PARTIAL, Mask, dense_mask, index_arrays, tile_kinds


def add(mask: Mask, q_BTNH: jax.Array, k_BSNH: jax.Array, v_BSNH: jax.Array) -> jax.Array:
    """Minus infinity added to the logits of forbidden pairs."""
    allowed = dense_mask(mask, q_BTNH.shape[1], k_BSNH.shape[1])[:, None]
    return _finish(_logits(q_BTNH, k_BSNH) + jnp.where(allowed, 0.0, -jnp.inf), v_BSNH)


def select(mask: Mask, q_BTNH: jax.Array, k_BSNH: jax.Array, v_BSNH: jax.Array) -> jax.Array:
    """The logit or minus infinity, selected element by element."""
    allowed = dense_mask(mask, q_BTNH.shape[1], k_BSNH.shape[1])[:, None]
    return _finish(jnp.where(allowed, _logits(q_BTNH, k_BSNH), -jnp.inf), v_BSNH)


def loop_add(mask: Mask, q_BTNH: jax.Array, k_BSNH: jax.Array, v_BSNH: jax.Array) -> jax.Array:
    """One pair after the other; minus infinity is added where it is forbidden."""
    def pair(allowed, q_BNH, k_BNH):
        return _pair(q_BNH, k_BNH) + jnp.where(allowed, 0.0, -jnp.inf)

    return _finish(_loop(mask, q_BTNH, k_BSNH, pair), v_BSNH)


def loop_branch(mask: Mask, q_BTNH: jax.Array, k_BSNH: jax.Array, v_BSNH: jax.Array) -> jax.Array:
    """One pair after the other; a branch leaves forbidden ones out."""
    def pair(allowed, q_BNH, k_BNH):
        return lax.cond(allowed, _pair, lambda q, k: jnp.full(q.shape[:2], -jnp.inf), q_BNH, k_BNH)

    return _finish(_loop(mask, q_BTNH, k_BSNH, pair), v_BSNH)


def _logits(q_BTNH, k_BSNH):
    logits = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH, preferred_element_type=jnp.float32)
    return logits * q_BTNH.shape[-1] ** -0.5


def _finish(logits_BNTS, v_BSNH):
    weights_BNTS = jax.nn.softmax(logits_BNTS, axis=-1)
    out_BTNH = jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS.astype(v_BSNH.dtype), v_BSNH,
                          preferred_element_type=jnp.float32)
    return out_BTNH.astype(v_BSNH.dtype)


def _pair(q_BNH, k_BNH):
    product_BNH = q_BNH.astype(jnp.float32) * k_BNH.astype(jnp.float32)
    return jnp.sum(product_BNH, axis=-1) * q_BNH.shape[-1] ** -0.5


def _loop(mask, q_BTNH, k_BSNH, pair):
    """Logits [B, N, T, S] by a loop over pairs, which stays a loop and never becomes vector code.

    The mask has to be that of a single example: a branch goes one way for the whole batch.
    """
    (T, S), table_TS = (q_BTNH.shape[1], k_BSNH.shape[1]), dense_mask(
        mask, q_BTNH.shape[1], k_BSNH.shape[1])[0]

    def one(index):
        i, j = index // S, index % S
        return pair(table_TS[i, j], q_BTNH[:, i], k_BSNH[:, j])

    logits = lax.map(one, jnp.arange(T * S))
    return jnp.moveaxis(logits.reshape(T, S, *logits.shape[1:]), (0, 1), (2, 3))


def tiled(mask: Mask, q_BTNH: jax.Array, k_BSNH: jax.Array, v_BSNH: jax.Array, *, tile: int,
          visit: str) -> jax.Array:
    """Attention tile by tile in O(T + S) memory, forward and backward.

    Args:
      mask: of a single example; every row sees a key.
      tile: queries and keys of a tile; divides both lengths.
      visit: "all": every tile is computed and minus infinity added. "branch": every tile is
        visited, and a branch at run time leaves out the empty ones and the mask of full ones.
        "skip": the tiles to compute are listed beforehand, full ones first.
    """
    kinds = tile_kinds(mask, q_BTNH.shape[1], k_BSNH.shape[1], q_tile=tile, k_tile=tile)[0]
    kinds = jnp.asarray(kinds, jnp.int32)
    fixed = {"mask": mask, "kinds": kinds, "order": jnp.argsort(-kinds, axis=1, stable=True),
             "full": jnp.sum(kinds == FULL, axis=1), "partial": jnp.sum(kinds == PARTIAL, axis=1)}
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q_BTNH, k_BSNH, v_BSNH))
    scaled = q.astype(jnp.float32) * q.shape[-1] ** -0.5
    out = _core((tile, visit), fixed, scaled, k, v)
    return jnp.swapaxes(out, 1, 2).astype(v_BSNH.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _core(plan, fixed, q, k, v):
    return _forward(plan, fixed, q, k, v)[0]


def _forward(plan, fixed, q, k, v):
    """Output [B, N, T, H] and log-sum-exp [B, N, T], float32."""
    tile = plan[0]

    def rows(i):
        q_i = _cut(q, i, tile)
        m = jnp.full(q_i.shape[:3], -jnp.inf, jnp.float32)

        def step(carry, j, masked):
            m, total, mixed = carry
            logits = _tile_logits(fixed, q_i, _cut(k, j, tile), i, j, tile, masked)
            peak = jnp.maximum(m, jnp.max(logits, axis=-1))
            safe = jnp.where(peak == -jnp.inf, 0, peak)
            weights, fade = jnp.exp(logits - safe[..., None]), jnp.exp(m - safe)
            mixed = mixed * fade[..., None] + jnp.einsum(
                "BNTS,BNSH->BNTH", weights, _cut(v, j, tile).astype(jnp.float32))
            return peak, total * fade + jnp.sum(weights, axis=-1), mixed

        empty = (m, jnp.zeros_like(m), jnp.zeros((*m.shape, v.shape[-1]), jnp.float32))
        m, total, mixed = _visit(plan[1], fixed, i, step, empty)
        return mixed / total[..., None], m + jnp.log(total)

    _, (out, lse) = lax.scan(lambda _, i: (None, rows(i)), None, jnp.arange(q.shape[2] // tile))
    return _join(out), _join(lse)


def _core_fwd(plan, fixed, q, k, v):
    out, lse = _forward(plan, fixed, q, k, v)
    return out, (fixed, q, k, v, out, lse)


def _core_bwd(plan, saved, d_out):
    fixed, q, k, v, out, lse = saved
    tile, mean = plan[0], jnp.sum(d_out * out, axis=-1)

    def rows(sums, i):
        q_i, d_i, lse_i, mean_i = (_cut(x, i, tile) for x in (q, d_out, lse, mean))

        def step(carry, j, masked):
            dq_i, dk, dv = carry
            k_j, v_j = (_cut(x, j, tile).astype(jnp.float32) for x in (k, v))
            logits = _tile_logits(fixed, q_i, k_j, i, j, tile, masked)
            weights = jnp.exp(logits - lse_i[..., None])
            d_weights = jnp.einsum("BNTH,BNSH->BNTS", d_i, v_j)
            d_logits = weights * (d_weights - mean_i[..., None])
            return (dq_i + jnp.einsum("BNTS,BNSH->BNTH", d_logits, k_j),
                    _add(dk, jnp.einsum("BNTS,BNTH->BNSH", d_logits, q_i), j),
                    _add(dv, jnp.einsum("BNTS,BNTH->BNSH", weights, d_i), j))

        dq_i, *sums = _visit(plan[1], fixed, i, step, (jnp.zeros_like(q_i), *sums))
        return tuple(sums), dq_i

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    (dk, dv), dq = lax.scan(rows, zeros, jnp.arange(q.shape[2] // tile))
    return None, _join(dq), dk.astype(k.dtype), dv.astype(v.dtype)


_core.defvjp(_core_fwd, _core_bwd)


def _visit(visit, fixed, i, step, carry):
    """Run step(carry, j, masked) on tiles j of keys for tile i of queries."""
    kinds_j, order_j = fixed["kinds"][i], fixed["order"][i]
    full, partly = fixed["full"][i], fixed["partial"][i]
    match visit:
        case "all":
            return lax.fori_loop(0, kinds_j.shape[0], lambda j, c: step(c, j, True), carry)
        case "branch":
            def choose(j, carry):
                return lax.switch(kinds_j[j], (lambda c: c, lambda c: step(c, j, True),
                                               lambda c: step(c, j, False)), carry)

            return lax.fori_loop(0, kinds_j.shape[0], choose, carry)
        case "skip":
            carry = lax.fori_loop(0, full, lambda n, c: step(c, order_j[n], False), carry)
            return lax.fori_loop(full, full + partly, lambda n, c: step(c, order_j[n], True), carry)
    raise ValueError(f"visit={visit!r} must be 'all', 'branch' or 'skip'.")


def _tile_logits(fixed, q_i, k_j, i, j, tile, masked):
    logits = jnp.einsum("BNTH,BNSH->BNTS", q_i, k_j.astype(jnp.float32))
    if not masked:
        return logits
    mask, (q_idx, k_idx) = fixed["mask"], index_arrays(tile, tile)
    if mask.q_segments_BT is not None:
        mask = replace(mask, q_segments_BT=_slice(mask.q_segments_BT, i * tile, tile, 1),
                       k_segments_BS=_slice(mask.k_segments_BS, j * tile, tile, 1))
    allowed = mask.allowed(q_idx + i * tile, k_idx + j * tile)
    return logits + jnp.where(allowed, 0.0, -jnp.inf)[:, None]


def _slice(x, start, size, axis):
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _cut(x, tile, size):
    """Tile number `tile` along the length, which is axis 2."""
    return _slice(x, tile * size, size, 2)


def _add(x, update, tile):
    size = update.shape[2]
    return lax.dynamic_update_slice_in_dim(x, _cut(x, tile, size) + update, tile * size, 2)


def _join(tiles):
    """[tiles, B, N, t, ...] -> [B, N, tiles * t, ...]."""
    moved = jnp.moveaxis(tiles, 0, 2)
    return moved.reshape(*moved.shape[:2], -1, *moved.shape[4:])
