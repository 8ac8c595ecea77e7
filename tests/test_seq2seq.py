"""The encoder-decoder: what sees what, shared parts, its parameters, and decoding with a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import make_params, random_params
from tx_jax import decode, letters, models, seq2seq
from tx_jax.config import EncoderConfig, ModelConfig
from tx_jax.errors import UserError

V, S, T = 13, 7, 6
CFG = ModelConfig(layers=2, d_model=16, heads=4, kv_heads=2, d_ff=24)


def make(encoder=None, **options):
    model = seq2seq.build(dataclasses.replace(CFG, **options), encoder or EncoderConfig(), V, 16)
    return model, random_params(model, 0.3)


forward = jax.jit(seq2seq.apply, static_argnums=0)
read = jax.jit(seq2seq.read, static_argnums=0)
step = jax.jit(decode.extend, static_argnums=0)


def tokens(rows, length, seed=0):
    return jax.random.randint(jax.random.key(seed), (rows, length), 1, V, jnp.int32)


def changed(model, params, source, target, other_source=None, other_target=None):
    """Which target positions a change of the source or of the target reaches, bool [T]."""
    before = forward(model, params, source, target)
    after = forward(model, params, source if other_source is None else other_source,
                    target if other_target is None else other_target)
    return np.asarray(jnp.any(before != after, axis=(0, 2)))


def test_every_source_token_reaches_every_target_and_no_later_target_an_earlier_one():
    model, params = make()
    source, target = tokens(1, S), tokens(1, T, 1)
    for j in range(S):
        assert changed(model, params, source, target, source.at[0, j].add(-1)).all()
    for j in range(T):
        reached = changed(model, params, source, target, None, target.at[0, j].add(-1))
        assert not reached[:j].any() and reached[j:].all()


def test_padding_of_the_source_does_not_matter():
    model, params = make(positions="t5")
    source, target = tokens(2, S), tokens(2, T, 1)
    segments = jnp.array([[1] * 5 + [0, 0], [0, 0, 0] + [1] * 4])

    def run(source):
        return forward(model, params, source, target, source_segments_BS=segments)

    poisoned = jnp.where(segments == 0, V + 5, source)  # no token at all: NaN where it is read
    np.testing.assert_array_equal(run(source), run(poisoned))
    alone = forward(model, params, source[:1, :5], target[:1])
    np.testing.assert_allclose(run(source)[:1], alone, atol=1e-5)


def test_packed_pairs_equal_single_ones():
    model, params = make(positions="rope")
    source, target = tokens(1, S), tokens(1, T, 1)
    both = forward(model, params, source, target,
                         source_segments_BS=jnp.array([[1, 1, 1, 2, 2, 2, 2]]),
                         target_segments_BT=jnp.array([[1, 1, 2, 2, 2, 2]]))
    first = forward(model, params, source[:, :3], target[:, :2])
    second = forward(model, params, source[:, 3:], target[:, 2:])
    np.testing.assert_allclose(both, jnp.concatenate([first, second], axis=1), atol=1e-5)


def test_the_order_of_the_output_of_the_encoder_does_not_matter():
    """Exact check of experiments b.2: without positions, keys and values are a set."""
    model, params = make()
    memory = read(model, params, tokens(1, S))
    target, cache = tokens(1, T, 1), decode.init_cache(model.decoder, 1, T)
    weights, order = seq2seq.decoder_params(params), jnp.array([3, 0, 6, 2, 1, 5, 4])
    turned = dataclasses.replace(memory, held=jax.tree.map(lambda x: x[:, order], memory.held))
    logits = [step(model.decoder, weights, target, cache, memory=m)[0]
              for m in (memory, turned)]
    np.testing.assert_allclose(*logits, atol=1e-5)


@pytest.mark.parametrize(("options", "encoder"), [
    ({"positions": "rope", "mlp": "swiglu"}, {}),
    *(pytest.param(*both, marks=pytest.mark.slow) for both in (
        ({"positions": "t5", "scale": "none"}, {"weights": "shared"}),
        ({"positions": "sinusoidal", "norm": "layer", "norm_position": "post", "mlp": "relu"},
         {"layers": 1, "embeddings": "own"}),
        ({"positions": "learned"}, {"cross_positions": "rope", "positions": "alibi"})))], ids=str)
def test_steps_with_a_cache_equal_one_pass(options, encoder):
    model, params = make(EncoderConfig(**encoder), **options)
    source, target = tokens(2, S), tokens(2, T, 1)
    segments = jnp.array([[1] * 4 + [0] * 3, [1] * 7])
    full = forward(model, params, source, target, source_segments_BS=segments)
    memory = read(model, params, source, segments)
    weights, decoder = seq2seq.decoder_params(params), model.decoder
    cache = decode.init_cache(decoder, 2, T)
    first, cache = step(decoder, weights, target[:, :3], cache, memory=memory)
    steps = [first]
    for t in range(3, T):
        logits, cache = step(decoder, weights, target[:, t:t + 1], cache, memory=memory)
        steps.append(logits)
    np.testing.assert_allclose(jnp.concatenate(steps, axis=1), full, atol=2e-5)


def test_parameters_of_the_layers_follow_the_closed_forms():
    """28 L d^2 of L + L layers against 12 L d^2 (experiments b.2); norms come on top."""
    cfg = ModelConfig(layers=3, d_model=16, heads=4, norm="none", positions="none", mlp="relu")
    d2 = cfg.d_model**2

    def count(model, init):
        return letters.count(jax.eval_shape(lambda: init(model, jax.random.key(0))),
                             embedding=False)

    both = seq2seq.build(cfg, EncoderConfig(), V, 8)
    assert count(both, seq2seq.init) == 28 * 3 * d2
    shared = seq2seq.build(cfg, EncoderConfig(weights="shared"), V, 8)
    assert count(shared, seq2seq.init) == 16 * 3 * d2
    alone = models.build(dataclasses.replace(cfg, layers=7), V, 8)
    assert count(alone, models.init) == count(both, seq2seq.init), "L_dec = 7 L / 3"


def test_shared_parts_get_the_gradients_of_both_sides():
    model, params = make(EncoderConfig(weights="shared"))
    assert set(params["encoder"]) == {"final_norm"}
    grads = jax.jit(jax.grad(lambda p: seq2seq.apply(model, p, tokens(1, S), tokens(1, T, 1)
                                                     ).sum()))(params)
    assert all(np.isfinite(x).all() and np.any(x != 0) for x in jax.tree.leaves(grads))


def test_dropout_differs_by_key_and_off_by_default():
    model, params = make(dropout=0.5)
    source, target = tokens(1, S), tokens(1, T, 1)
    first, second, none = (forward(model, params, source, target, dropout_key=key)
                           for key in (jax.random.key(0), jax.random.key(1), None))
    assert np.any(first != second) and np.any(first != none)


@pytest.mark.parametrize("cross", ["xpos(scale_base=4)", "rope_dynamic_ntk(trained=4)"])
def test_positions_that_follow_the_length_take_that_of_the_source(cross):
    """Later targets then change nothing before them."""
    model, params = make(EncoderConfig(cross_positions=cross))
    source, target = tokens(1, S), tokens(1, T, 1)
    both = [forward(model, params, source, target[:, :n])[:, :2] for n in (2, T)]
    np.testing.assert_allclose(*both, atol=1e-5)


@pytest.mark.parametrize(("encoder", "options", "words"), [
    ({"layers": 3, "weights": "shared"}, {}, "--encoder.layers=3 and --model.layers=2"),
    ({"weights": "shared", "positions": "cope"}, {}, "needs the same positions on both sides"),
    ({"cross_positions": "sinusoidal"}, {}, "adds positions to embeddings"),
    ({"cross_positions": "learned"}, {}, "adds positions to embeddings")], ids=str)
def test_what_cannot_be_is_refused(encoder, options, words):
    with pytest.raises(UserError, match=words):
        seq2seq.build(dataclasses.replace(CFG, **options), EncoderConfig(**encoder), V, 8)


def test_a_memory_belongs_to_an_encoder_decoder():
    """Not given where it is needed, given where it is not, or not read yet."""
    model, params = make()
    weights, ids = seq2seq.decoder_params(params), tokens(1, 2)
    memory = seq2seq.encode(model, params, tokens(1, S))
    cache = decode.init_cache(model.decoder, 1, 4)
    for call in (lambda: decode.extend(model.decoder, weights, ids, cache),
                 lambda: decode.extend(model.decoder, weights, ids, cache, memory=memory),
                 lambda: decode.generate(model.decoder, weights, [[1]], 2),
                 lambda: decode.generate(model, params, [[1]], 2),
                 lambda: models.apply(model.decoder, weights, ids)):
        with pytest.raises(UserError, match="encoder-decoder"):
            call()
    with pytest.raises(UserError, match="cross_mask=causal counts from the start of a row"):
        other, params = make(EncoderConfig(cross_mask="causal"))
        seq2seq.apply(other, params, tokens(1, S), ids, target_segments_BT=jnp.array([[1, 2]]))


@pytest.mark.parametrize("positions", ["rope", "t5(bidirectional=True)", "learned"])
def test_a_prefix_turns_a_causal_model_into_a_bidirectional_one(positions):
    """Exact checks of experiments b.2: prefix 0 is causal bit for bit, a whole prefix sees all."""
    model = models.build(dataclasses.replace(CFG, positions=positions), V, 8)
    params = make_params(model)
    full = models.build(dataclasses.replace(CFG, positions=positions, mask="full"), V, 8)
    ids = tokens(2, 8)
    run = jax.jit(lambda prefix: models.apply(model, params, ids, prefix_B=prefix)[0])
    causal, both = (jax.jit(lambda p, m=m: models.apply(m, p, ids)[0])(params)
                    for m in (model, full))
    np.testing.assert_array_equal(run(jnp.array([0, 0])), causal)
    np.testing.assert_allclose(run(jnp.array([8, 8])), both, atol=1e-5)
    mixed = run(jnp.array([0, 8]))
    np.testing.assert_allclose(mixed[0], causal[0], atol=1e-6)
    np.testing.assert_allclose(mixed[1], both[1], atol=1e-5)


def test_beyond_the_prefix_no_token_sees_a_later_one():
    cfg = dataclasses.replace(CFG, embeddings="untied")
    model = models.build(cfg, 8, 8)
    params = make_params(model)

    def logits(embed_VD):
        return models.apply(model, params | {"embed_VD": embed_VD}, jnp.arange(8)[None],
                            prefix_B=jnp.array([3]))[0][0].sum(-1)

    seen = np.any(jax.jit(jax.jacobian(logits))(params["embed_VD"]) != 0, axis=-1)
    expected = np.tril(np.ones((8, 8), bool)) | (np.arange(8) < 3)[None]
    np.testing.assert_array_equal(seen, expected)
