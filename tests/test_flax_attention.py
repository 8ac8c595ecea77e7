"""Attention inside Flax modules: Flax's own values and gradients, and what is refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tx_jax.attention import Dropout, attend, implementations
from tx_jax.errors import UserError
from tx_jax.flax_attention import attention_fn
from tx_jax.masks import Causal, Mask, Window, dense_mask

pytestmark = pytest.mark.slow

ANYWHERE = sorted(name for name, can in implementations().items() if not can.platforms)


@pytest.fixture(autouse=True)
def as_flax_needs():
    """Flax promotes ranks and dtypes."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def arrays(batch=(2,), T=5, S=5, N=4, K=4, H=8, V=8, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return (jax.random.normal(keys[0], (*batch, T, N, H)),
            jax.random.normal(keys[1], (*batch, S, K, H)),
            jax.random.normal(keys[2], (*batch, S, K, V)))


def both(fn, q, k, v, bias, **options):
    """Output, and gradients to the arrays."""
    def loss(q, k, v, bias):
        out = fn(q, k, v, bias=bias, **options)
        return jnp.sum(jnp.sin(out)), out
    wanted = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    return jax.jit(jax.grad(loss, wanted, has_aux=True))(q, k, v, bias)


def same(a, b, atol=1e-6):
    """Equal to `atol`, relative to the largest number where that is above 1."""
    def compare(x, y):
        np.testing.assert_allclose(x, y, atol=atol * max(1, float(np.abs(y).max())), rtol=0)
    jax.tree.map(compare, a, b)


def dense(*shape, seed=1):
    """A random mask in which every query sees the first key."""
    return jax.random.bernoulli(jax.random.key(seed), 0.5, shape).at[..., 0].set(True)


@pytest.mark.parametrize("own, sizes", [
    (nn.dot_product_attention, {}), (nnx.dot_product_attention, {}),
    (nn.dot_product_attention, {"V": 3}), (nnx.dot_product_attention, {"K": 2}),
    (nn.dot_product_attention, {"batch": ()}), (nn.dot_product_attention, {"batch": (2, 3)}),
    (nn.dot_product_attention, {"T": 3}), (nn.dot_product_attention, {"S": 3})])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_mask", [False, True])
def test_the_function_equals_that_of_flax(own, sizes, with_bias, with_mask):
    q, k, v = arrays(**sizes)
    batch, T, S = q.shape[:-3], q.shape[-3], k.shape[-3]
    bias = jax.random.normal(jax.random.key(2), (1,) * len(batch) + (4, T, S))
    options = {"mask": dense(*batch, 1, T, S)} if with_mask else {}
    call = (q, k, v, bias if with_bias else None)
    same(both(attention_fn(), *call, **options), both(own, *call, **options))


def test_masks_of_numbers_lower_ranks_and_causality_are_understood():
    q, k, v = arrays(T=3)
    numbers = nn.make_attention_mask(jnp.array([[1, 1, 1], [1, 0, 1]]),
                                     jnp.array([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]]))
    call = attention_fn()(q, k, v, mask=numbers)
    own = nn.dot_product_attention(q, k, v, mask=numbers)
    seen = np.array([[True, True, True], [True, False, True]])
    same(call[seen], own[seen])
    assert not call[~seen].any()  # Flax averages all values there
    table = dense(3, 5)
    same(attention_fn()(q, k, v, mask=table), nn.dot_product_attention(q, k, v, mask=table))
    for T, S in ((5, 5), (3, 5), (5, 3)):
        q, k, v = arrays(T=T, S=S)
        for mask in (None, dense(2, 4, T, S)):
            options = {"mask": mask, "is_causal": True}
            same(attention_fn()(q, k, v, **options), nnx.dot_product_attention(q, k, v, **options))
    rule, (q, k, v) = Causal() & Window(2), arrays()
    table = dense(2, 1, 5, 5) | jnp.eye(5, dtype=bool)
    same(attention_fn(mask=rule)(q, k, v, mask=table), nn.dot_product_attention(
        q, k, v, mask=table & dense_mask(rule, 5, 5)[:, None]))


@pytest.mark.parametrize("name", ANYWHERE)
def test_a_linen_module_keeps_its_values_and_gradients(name):
    x = jax.random.normal(jax.random.key(0), (2, 6, 16))
    mask = nn.make_causal_mask(x[..., 0])
    own = nn.MultiHeadDotProductAttention(num_heads=4, normalize_qk=True)
    ours = own.clone(attention_fn=attention_fn(name))
    params = own.init(jax.random.key(1), x)

    def run(module):
        def loss(params, x):
            out = module.apply(params, x, mask=mask)
            return jnp.sum(jnp.sin(out)), out
        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x)

    same(run(ours), run(own), atol=3e-6)


def test_linen_decoding_equals_the_full_pass():
    x = jax.random.normal(jax.random.key(0), (2, 4, 16))
    module = nn.MultiHeadDotProductAttention(num_heads=4, decode=True, attention_fn=attention_fn())
    variables = module.init(jax.random.key(1), x)
    full = module.clone(decode=False).apply({"params": variables["params"]}, x,
                                            mask=nn.make_causal_mask(x[..., 0]))
    step = jax.jit(lambda v, x: module.apply(v, x, mutable=["cache"]))
    for t in range(4):
        out, cache = step(variables, x[:, t:t + 1])
        variables = variables | cache
        np.testing.assert_allclose(out[:, 0], full[:, t], atol=1e-6)


@pytest.mark.parametrize("groups", [4, 2])
def test_an_nnx_module_keeps_its_values_and_gradients(groups):
    def module(**options):
        return nnx.MultiHeadAttention(4, 16, num_kv_heads=groups, decode=False,
                                      rngs=nnx.Rngs(0), **options)
    x = jax.random.normal(jax.random.key(0), (2, 6, 16))

    def run(module):
        def loss(module, x):
            return jnp.sum(jnp.sin(module(x, is_causal=True)))
        return nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1)))(module, x)

    (value, grads), (own, own_grads) = run(module(attention_fn=attention_fn())), run(module())
    np.testing.assert_allclose(value, own, atol=2e-6)
    same(jax.tree.leaves(grads), jax.tree.leaves(own_grads), atol=3e-6)


def test_dtypes():
    q, k, v = arrays()
    low = attention_fn()(q, k.astype(jnp.bfloat16), v, dtype=jnp.bfloat16)
    assert low.dtype == jnp.bfloat16
    mixed = attention_fn()(q, k.astype(jnp.bfloat16), v)
    own = nn.dot_product_attention(q, k.astype(jnp.bfloat16), v)
    assert mixed.dtype == own.dtype == jnp.float32
    same(mixed, own)
    same(low.astype(jnp.float32), mixed, atol=3e-2)
    assert attention_fn()(q, k, v, force_fp32_for_softmax=True).dtype == jnp.float32
    assert attention_fn()(q, k, v, precision=jax.lax.Precision.DEFAULT).dtype == jnp.float32


# Dropout.

@pytest.mark.parametrize("rate", [-0.1, float("nan"), 1.0, 1.5])
@pytest.mark.parametrize("deterministic", [False, True])
def test_rates_out_of_range_are_errors(rate, deterministic):
    """Flax #5497: a rate below 0 or NaN silently disabled dropout, and Linen still does so."""
    with pytest.raises(UserError, match="dropout rate"):
        attention_fn()(*arrays(), dropout_rate=rate, dropout_rng=jax.random.key(0),
                       deterministic=deterministic, broadcast_dropout=False)
    module = nn.MultiHeadDotProductAttention(num_heads=4, dropout_rate=rate,
                                             attention_fn=attention_fn())
    with pytest.raises(UserError, match="dropout rate"):
        module.init(jax.random.key(0), jnp.ones((1, 3, 8)), deterministic=deterministic)


def test_dropout_is_that_of_attend_and_deterministic_turns_it_off():
    q, k, v = arrays()
    plain, rng = attention_fn()(q, k, v), jax.random.key(5)
    for off in ({"deterministic": True, "dropout_rate": 0.3}, {"dropout_rate": 0.0},
                {"deterministic": True, "dropout_rate": 0.3, "dropout_rng": rng},
                {"dropout_rate": 0, "dropout_rng": rng}):
        np.testing.assert_array_equal(attention_fn()(q, k, v, **off), plain)
    out = attention_fn()(q, k, v, dropout_rate=0.3, dropout_rng=rng, broadcast_dropout=False)
    seed = jax.random.bits(rng, dtype=jnp.uint32)
    np.testing.assert_array_equal(out, attend(q, k, v, dropout=Dropout(0.3, seed)))
    many = jax.vmap(lambda rng: attention_fn()(q, k, v, dropout_rate=0.3, dropout_rng=rng,
                                               broadcast_dropout=False))
    mean = jnp.mean(jax.jit(many)(jax.random.split(rng, 2000)), axis=0)
    np.testing.assert_allclose(mean, plain, atol=0.1)
    module = nn.MultiHeadDotProductAttention(num_heads=4, dropout_rate=0.5, deterministic=False,
                                             broadcast_dropout=False, attention_fn=attention_fn())
    x = jnp.ones((1, 3, 8))
    params = module.init({"params": rng, "dropout": rng}, x)
    first, second = (module.apply(params, x, rngs={"dropout": jax.random.key(i)}) for i in (0, 1))
    assert jnp.abs(first - second).max() > 1e-4


# Refusals.

@pytest.mark.parametrize("options, says", [
    ({"dropout_rate": 0.1, "broadcast_dropout": False}, "needs a dropout_rng"),
    ({"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}, "broadcast_dropout=False"),
    ({"precision": jax.lax.Precision.HIGHEST}, "precision"), ({"precision": "high"}, "precision"),
    ({"module": nn.Dense(2)}, "sown"), ({"einsum_dot_general": jax.lax.dot_general}, "einsums"),
    ({"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum}, "einsums"),
    ({"bias": jnp.zeros((2, 4, 5, 4))}, "broadcast"),
    ({"mask": jnp.ones((2, 3, 5, 5))}, "broadcast")])
def test_what_cannot_be_honoured_is_refused(options, says):
    with pytest.raises(UserError, match=says):
        attention_fn()(*arrays(), **options)


def test_rules_need_equal_lengths_and_known_names():
    with pytest.raises(UserError, match="'causal' of attention_fn needs as many queries as keys"):
        attention_fn(mask=Causal())(*arrays(T=1))
    attention_fn(mask="full")(*arrays(T=1))
    seg = jnp.array([[1, 1, 2, 2, 0]])
    out = attention_fn(mask=Mask(Causal(), seg, seg))(*arrays(), is_causal=True)
    assert not out[:, 4].any()
    with pytest.raises(UserError, match="did you mean 'blockwise'"):
        attention_fn("blockwize")(*arrays())
    with pytest.raises(UserError, match="'jax_nn' cannot do a soft cap"):
        attention_fn("jax_nn", softcap=2.0)(*arrays())
