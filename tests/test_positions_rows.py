"""CoPE and Transformer-XL against float64 loops of their papers' formulas."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tx_jax import attention, masks
from tx_jax.errors import UserError
from tx_jax.positions import make_encoding
from tx_jax.positions.sinusoidal import sinusoids


def masked_logits(key, B=2, N=4, T=7, H=6, dtype="float32"):
    """Random queries, and logits with minus infinity on future keys."""
    q = jax.random.normal(key, (B, T, N, H), dtype)
    logits = jax.random.normal(jax.random.fold_in(key, 1), (B, N, T, T), dtype)
    return q, jnp.where(jnp.tril(jnp.ones((T, T), bool)), logits, -jnp.inf)


def cope_by_loops(table, q, logits, divide):
    """Golovneva et al. 2024, equations 3 to 5, in float64."""
    table, q, logits = (np.float64(x) for x in (table, q, logits))
    B, N, T, S = logits.shape
    out, gates = np.zeros(logits.shape), 1 / (1 + np.exp(-logits))
    for b, n, i, j in np.ndindex(B, N, T, S):
        p = min(sum(gates[b, n, i, k] for k in range(j, S)), len(table) - 1)
        low, high = int(np.floor(p)), int(np.ceil(p))
        e = table[low] if low == high else (high - p) * table[low] + (p - low) * table[high]
        out[b, n, i, j] = q[b, i, n] @ e / (q.shape[-1] ** 0.5 if divide else 1)
    return out


@pytest.mark.parametrize("p_max, divide", [(64, True), (3, True), (1, False)])
def test_cope_against_loops(key, p_max, divide):
    encoding = make_encoding(f"cope(p_max={p_max}, divide={divide})")
    q, logits = masked_logits(key)
    table = jax.random.normal(key, (p_max + 1, 6))
    got = jax.jit(encoding.row_bias)({"table_CH": table}, q, logits)
    assert got.dtype == jnp.float32 and encoding.bias_kind == "rows" and encoding.per_layer
    np.testing.assert_allclose(got, cope_by_loops(table, q, logits, divide), atol=1e-5)


def test_cope_with_open_gates_is_a_relative_embedding(key):
    """g = 1: key j of query i counts i - j + 1, up to p_max."""
    q, logits = masked_logits(key)
    table = jax.random.normal(key, (5, 6))
    got = make_encoding("cope(p_max=4, divide=False)").row_bias(
        {"table_CH": table}, q, jnp.where(logits > -jnp.inf, 1e4, -jnp.inf))
    i, j = np.mgrid[0:7, 0:7]
    count = np.minimum((i - j + 1).clip(0), 4)
    np.testing.assert_allclose(got, jnp.einsum("BTNH,TSH->BNTS", q, table[count]), atol=1e-5)


def test_cope_starts_without_positions_and_learns(key):
    encoding = make_encoding("cope(p_max=3)")
    params = encoding.init(key, {"H": 6})
    q, logits = masked_logits(key)
    assert params["table_CH"].shape == (4, 6)
    assert not encoding.row_bias(params, q, logits).any()
    loss = jax.jit(lambda p: jnp.sum(encoding.row_bias(p, q, logits)[..., :2]))
    grads = jax.grad(loss)(params)
    assert np.isfinite(grads["table_CH"]).all() and (grads["table_CH"][1:] != 0).all()


def test_cope_gradients_against_finite_differences(key):
    """Through the gates as well; forbidden keys get none, and none is NaN."""
    encoding = make_encoding("cope(p_max=2)")
    with jax.enable_x64():
        q, logits = masked_logits(key, B=1, N=1, T=4, H=2, dtype="float64")
        table = jax.random.normal(key, (3, 2), "float64")
        weight = jax.random.normal(key, logits.shape, "float64")
        loss = jax.jit(lambda args: jnp.sum(weight * encoding.row_bias(
            {"table_CH": args[0]}, args[1], args[2])))
        args = (table, q, logits)
        grads = jax.grad(loss)(args)
        for which, (leaf, grad) in enumerate(zip(args, grads, strict=True)):
            assert np.isfinite(grad).all()
            for index in np.ndindex(leaf.shape):
                if not np.isfinite(leaf[index]):
                    assert grad[index] == 0
                    continue
                up, down = (loss((*args[:which], leaf.at[index].add(e), *args[which + 1:]))
                            for e in (1e-6, -1e-6))
                np.testing.assert_allclose(grad[index], (up - down) / 2e-6, rtol=1e-6, atol=1e-8)


def test_cope_in_bfloat16_is_float32(key):
    encoding = make_encoding("cope(p_max=3)")
    q, logits = masked_logits(key)
    table = {"table_CH": jax.random.normal(key, (4, 6))}
    got = encoding.row_bias(table, q.astype(jnp.bfloat16), logits)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, encoding.row_bias(table, q, logits), atol=0.05)


def xl_by_loops(params, q, k, q_pos, k_pos, base):
    """Dai et al. 2019, section 3.3: (q + u) k + (q + v) W R(i - j), float64 [B, N, T, S]."""
    u, v, r = (np.float64(params[name]) for name in ("bias_u_NH", "bias_v_NH", "r_PNH"))
    q, k = np.float64(q), np.float64(k)
    (B, T, N, _), (S, K), P = q.shape, k.shape[1:3], r.shape[0]
    column = np.arange(P)
    frequency = base ** (-2.0 * (column // 2) / P)
    out = np.zeros((B, N, T, S))
    for b, n, t, s in np.ndindex(out.shape):
        angle = float(int(q_pos[b, t]) - int(k_pos[b, s])) * frequency
        relative = np.where(column % 2 == 0, np.sin(angle), np.cos(angle))
        out[b, n, t, s] = (q[b, t, n] + u[n]) @ k[b, s, n // (N // K)] \
            + (q[b, t, n] + v[n]) @ (relative @ r[:, n])
    return out


@partial(jax.jit, static_argnums=0)
def widen(encoding, params, q, k, q_pos, k_pos):
    """Queries and keys as they meet."""
    return encoding.rotate_q(params, q, q_pos), encoding.rotate_k(params, k, k_pos)


def xl_params(P, N, H):
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.standard_normal(shape) * size, jnp.float32)
            for name, shape, size in (("r_PNH", (P, N, H), P**-0.5), ("bias_u_NH", (N, H), 1),
                                      ("bias_v_NH", (N, H), 1))}


@pytest.mark.parametrize("N, K, H, P, base", [
    (2, 2, 4, 8, 1e4), (4, 2, 3, 6, 1e4), (3, 1, 5, 7, 100.0), (1, 1, 2, 1, 1e4)])
def test_transformer_xl_against_loops(N, K, H, P, base):
    """Heads that share keys, odd widths, packed documents, positions near 10^6."""
    encoding = make_encoding(f"transformer_xl(base={base})")
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal(shape), jnp.float32)
            for shape in ((2, 5, N, H), (2, 6, K, H)))
    q_pos = jnp.array([[1, 2, 3, 4, 5], [0, 1, 1_000_000, 1_000_001, 1_000_007]])
    k_pos = jnp.array([[0, 1, 2, 3, 4, 5], [0, 1, 999_995, 1_000_001, 1_000_005, 1_000_090]])
    params = xl_params(P, N, H)
    wide_q, wide_k = widen(encoding, params, q, k, q_pos, k_pos)
    assert wide_q.shape == (2, 5, N, H + P + P % 2) and wide_k.shape == (2, 6, K, H + P + P % 2)
    got = np.einsum("BTNH,BSNH->BNTS", wide_q, np.repeat(wide_k, N // K, axis=2))
    np.testing.assert_allclose(got, xl_by_loops(params, q, k, q_pos, k_pos, base), atol=2e-5)


def test_transformer_xl_through_attention(key):
    """The scale stays that of the true head width; values keep theirs."""
    encoding, params = make_encoding("transformer_xl"), xl_params(8, 2, 4)
    q, k, v = jax.random.normal(key, (3, 1, 6, 2, 4))
    pos = jnp.arange(6)[None]
    attend = partial(attention.attend, scale=4**-0.5, mask=masks.parse_mask("causal"))
    got = jax.jit(attend)(*widen(encoding, params, q, k, pos, pos), v)
    logits = xl_by_loops(params, q, k, pos, pos, 1e4) / 2
    logits = np.where(np.tril(np.ones((6, 6), bool)), logits, -np.inf)
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(got, np.einsum("BNTS,BSNH->BTNH", weights, v), atol=2e-6)


def test_transformer_xl_uses_the_table_of_sinusoidal():
    """With W the identity, u = v = 0 and k = 0, logits of unit queries are R(i - j) itself."""
    params = {"r_PNH": jnp.eye(5)[:, None], "bias_u_NH": jnp.zeros((1, 5)),
              "bias_v_NH": jnp.zeros((1, 5))}
    q, k = jnp.eye(5)[None, :, None], jnp.zeros((1, 1, 1, 5))
    wide_q, wide_k = widen(make_encoding("transformer_xl"), params, q, k,
                           jnp.full((1, 5), 17, jnp.int32), jnp.array([[3]]))
    got = np.einsum("TH,H->T", wide_q[0, :, 0], wide_k[0, 0, 0])
    np.testing.assert_allclose(got, sinusoids(jnp.array([[14]]), 5)[0, 0], atol=1e-6)


def test_transformer_xl_parameters_dtypes_and_gradients(key):
    sizes = {"N": 4, "K": 2, "H": 6, "D": 10}
    params = make_encoding("transformer_xl").init(key, sizes)
    assert {n: p.shape for n, p in params.items()} == {
        "r_PNH": (10, 4, 6), "bias_u_NH": (4, 6), "bias_v_NH": (4, 6)}
    assert make_encoding("transformer_xl(width=4)").init(key, sizes)["r_PNH"].shape == (4, 4, 6)
    encoding, pos = make_encoding("transformer_xl"), jnp.arange(3)[None]
    q, k = jax.random.normal(key, (1, 3, 4, 6)), jax.random.normal(key, (1, 3, 2, 6))
    halves = widen(encoding, params, q.astype(jnp.bfloat16), k.astype(jnp.bfloat16), pos, pos)
    assert [half.dtype for half in halves] == [jnp.bfloat16] * 2

    def loss(p):
        wide_q, wide_k = widen(encoding, p, q, k, pos, pos)
        return jnp.sum(jnp.einsum("BTNH,BSNH->BNTS", wide_q, jnp.repeat(wide_k, 2, 2)) ** 2)

    grads = jax.jit(jax.grad(loss))(params)
    assert all((g != 0).any() and np.isfinite(g).all() for g in grads.values())
    with pytest.raises(UserError, match="integers"):
        encoding.rotate_k(params, k, jnp.zeros((1, 3)))
