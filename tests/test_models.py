"""The decoder: shapes, invariances, and that options change what they should and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import make_params
from tx_jax import letters, models
from tx_jax.config import ModelConfig
from tx_jax.errors import UserError

V, T = 11, 12
CFG = ModelConfig(layers=2, d_model=16, heads=4, kv_heads=2, d_ff=24)


def change(**options):
    return dataclasses.replace(CFG, **options)


def tokens(rows=2, length=T, seed=0):
    return jax.random.randint(jax.random.key(seed), (rows, length), 0, V, jnp.int32)


def run(cfg, tokens_BT, params=None, **options):
    model = models.build(cfg, V, T)
    params = make_params(model) if params is None else params
    trace = options.pop("trace", False)
    return jax.jit(lambda p, t, o: models.apply(model, p, t, trace=trace, **o))(
        params, tokens_BT, options), params


def value_and_grads(cfg, params, tokens_BT):
    model = models.build(cfg, V, T)

    def loss(p):
        logits_BTV, _ = models.apply(model, p, tokens_BT)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), tokens_BT[..., None],
                                             axis=-1))

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.fixture(scope="module")
def base_loss():
    return float(value_and_grads(CFG, make_params(models.build(CFG, V, T)), tokens())[0])


def assert_close(a, b, atol=1e-5):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), atol=atol)


def test_parameters_are_nested_dicts_named_by_letters():
    model = models.build(CFG, V, T)
    params = models.init(model, jax.random.key(0))
    size = letters.sizes(CFG, V, T)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        stacked = (CFG.layers,) if path[0].key == "blocks" else ()
        assert leaf.shape == stacked + letters.shape_of(path[-1].key, size)
        assert leaf.dtype == jnp.float32
    assert set(params) == {"blocks", "embed_VD", "final_norm"}
    assert params["blocks"]["attention"]["q_DNH"].shape == (2, 16, 4, 4)


def test_count_matches_the_closed_form():
    cfg = ModelConfig(layers=3, d_model=32, heads=4, norm="none")
    params = make_params(models.build(cfg, V, T))
    assert letters.count(params, embedding=False) == 12 * 3 * 32**2
    assert letters.count(params) == 12 * 3 * 32**2 + V * 32


@pytest.mark.slow
@pytest.mark.parametrize("other", [{"scan": False}, {"remat": "block"}])
def test_scan_and_remat_change_no_number_and_no_parameter(other):
    params = models.init(models.build(CFG, V, T), jax.random.key(1))
    again = models.init(models.build(change(**other), V, T), jax.random.key(1))
    assert_close(params, again, atol=0)
    assert_close(value_and_grads(CFG, params, tokens()),
                 value_and_grads(change(**other), params, tokens()))


@pytest.mark.slow
@pytest.mark.parametrize("option", [
    {"norm_position": "post"}, {"norm_position": "sandwich"}, {"norm": "layer"}, {"norm": "none"},
    {"residual": False}, {"mlp": "none"}, {"mlp": "relu"}, {"mlp": "swiglu"}, {"mlp": "geglu"},
    {"mlp": "reglu"}, {"mlp": "gelu_exact"}, {"mlp": "silu"}, {"mlp": "relu2"},
    {"embeddings": "untied"}, {"head_dim": 6}, {"kv_heads": 0}, {"positions": "none"},
    {"positions": "learned"}, {"positions": "sinusoidal"}, {"score": "additive"},
    {"score": "bilinear"}, {"score": "cosine"}, {"score": "dot"}, {"scale": "1/d"},
    {"scale": "log_n(4)"}, {"softcap": 0.5}, {"mask": "causal & window(3)"}])
def test_every_option_changes_the_logits_and_trains(option, base_loss):
    params = make_params(models.build(change(**option), V, T))
    loss, grads = value_and_grads(change(**option), params, tokens())
    assert np.isfinite(loss)
    norms = [float(jnp.sum(g * g)) for g in jax.tree.leaves(grads)]
    assert np.all(np.isfinite(norms)) and sum(n > 0 for n in norms) >= len(norms) - 1
    assert abs(float(loss) - base_loss) > 1e-7


def test_the_future_does_not_reach_the_past():
    first = tokens()
    second = first.at[:, 7].set((first[:, 7] + 1) % V)
    (a, _), params = run(CFG, first)
    (b, _), _ = run(CFG, second, params)
    np.testing.assert_array_equal(a[:, :7], b[:, :7])
    assert float(jnp.max(jnp.abs(a[:, 7:] - b[:, 7:]))) > 1e-3


@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal", "none"])
def test_a_packed_document_equals_the_document_alone(positions):
    cfg = change(positions=positions)
    row = tokens(1)
    segments = jnp.asarray([[1] * 5 + [2] * 5 + [0] * 2], jnp.int32)
    (packed, _), params = run(cfg, row, segments_BT=segments)
    (alone, _), _ = run(cfg, row[:, 5:10], params)
    np.testing.assert_allclose(packed[:, 5:10], alone, atol=1e-5)
    (changed, _), _ = run(cfg, row.at[:, :5].set(0), params, segments_BT=segments)
    np.testing.assert_array_equal(packed[:, 5:10], changed[:, 5:10])


def test_left_padding_changes_nothing():
    row = tokens(1, 8)
    padded = jnp.concatenate([jnp.zeros((1, 4), jnp.int32), row], axis=1)
    segments = jnp.asarray([[0] * 4 + [1] * 8], jnp.int32)
    (alone, _), params = run(CFG, row)
    (left, _), _ = run(CFG, padded, params, segments_BT=segments)
    np.testing.assert_allclose(left[:, 4:], alone, atol=1e-5)


def test_a_token_outside_the_vocabulary_is_nan_not_another_token():
    (logits, _), _ = run(CFG, tokens(2).at[0, -1].set(V))
    assert np.isnan(logits[0, -1]).all() and np.isfinite(logits[1]).all()


def test_bfloat16_is_close_and_returns_float32():
    (full, _), params = run(CFG, tokens())
    (half, _), _ = run(change(dtype="bfloat16"), tokens(), params)
    assert half.dtype == jnp.float32
    assert 0 < float(jnp.max(jnp.abs(full - half))) < 0.05


def test_dropout_needs_a_key_and_depends_on_it():
    cfg = change(dropout=0.3)
    (off, _), params = run(cfg, tokens())
    (plain, _), _ = run(CFG, tokens(), params)
    np.testing.assert_array_equal(off, plain)
    (one, _), _ = run(cfg, tokens(), params, dropout_key=jax.random.key(0))
    (two, _), _ = run(cfg, tokens(), params, dropout_key=jax.random.key(1))
    (same, _), _ = run(cfg, tokens(), params, dropout_key=jax.random.key(0))
    np.testing.assert_array_equal(one, same)
    assert float(jnp.max(jnp.abs(one - two))) > 1e-3


def test_a_traced_scale_equals_the_rule():
    (rule, _), params = run(change(scale="1/d"), tokens())
    (traced, _), _ = run(change(score="dot"), tokens(), params,
                         scale=jnp.asarray(1 / 4, jnp.float32))
    np.testing.assert_allclose(rule, traced, atol=1e-6)


def test_trace_returns_statistics_of_every_layer():
    (_, aux), _ = run(CFG, tokens(), trace=True)
    assert {"logit_variance", "largest_logit", "entropy", "saturated"} <= set(aux)
    assert all(x.shape == (CFG.layers,) and np.isfinite(x).all() for x in aux.values())


def test_queries_start_with_unit_variance():
    cfg = ModelConfig(layers=1, d_model=256, heads=1, positions="none", score="dot")
    model = models.build(cfg, V, 64)
    params = models.init(model, jax.random.key(0))
    _, aux = models.apply(model, params, tokens(4, 64), trace=True)
    # Var(q.k) = d_k; few distinct tokens make the estimate rough.
    assert 0.5 < float(aux["logit_variance"][0]) / 256 < 2.0


def test_program_size_does_not_grow_with_depth():
    def size(layers, scan):
        cfg = change(layers=layers, scan=scan)
        model = models.build(cfg, V, T)
        params = jax.eval_shape(lambda: models.init(model, jax.random.key(0)))
        lowered = jax.jit(lambda p, t: models.apply(model, p, t)[0]).lower(params, tokens())
        return lowered.as_text().count("\n")

    assert size(12, True) == size(2, True)
    assert size(12, False) > 3 * size(2, False)


@pytest.mark.parametrize(("options", "words"), [
    ({"d_model": 30, "heads": 4}, "--model.d_model=30"), ({"kv_heads": 3}, "--model.kv_heads=3"),
    ({"mlp": "swigul"}, "did you mean 'swiglu'"), ({"layers": 0}, "--model.layers=0")])
def test_an_impossible_configuration_is_one_sentence(options, words):
    with pytest.raises(UserError, match=words):
        change(**options)


@pytest.mark.parametrize("options", [{"score": "aditive"}, {"positions": "ropes"},
                                     {"mask": "casual"}, {"attention": "referense"}])
def test_an_unknown_part_is_refused_before_compiling(options):
    with pytest.raises(UserError, match="did you mean"):
        models.build(change(**options), V, T)


def test_the_scale_of_embeddings_is_the_root_of_the_width():
    """A table scaled by hand gives the same; the tied head keeps its own."""
    cfg = ModelConfig(layers=1, d_model=16, heads=2, positions="sinusoidal", embeddings="untied")
    plain, scaled = (models.build(dataclasses.replace(cfg, embedding_scale=name), 5, 4)
                     for name in ("none", "sqrt_d"))
    params, ids = make_params(plain), jnp.arange(4)[None]
    by_hand = models.apply(plain, params | {"embed_VD": 4 * params["embed_VD"]}, ids)[0]
    np.testing.assert_allclose(models.apply(scaled, params, ids)[0], by_hand, rtol=1e-6)


def test_a_token_outside_the_vocabulary_is_nan_on_either_side():
    model = models.build(ModelConfig(layers=1, d_model=16, heads=2), 5, 4)
    params = make_params(model)
    for token in (-1, 5):
        assert np.isnan(models.apply(model, params, jnp.array([[1, token]]))[0][0, 1]).all()


@pytest.mark.parametrize("preset", ["original", "modern"])
def test_named_architectures_can_be_asked_for(preset, capsys):
    import launch

    assert launch.main(["--experiment=language_model", f"--preset={preset}", "--explain"]) == 0
    assert capsys.readouterr().out
