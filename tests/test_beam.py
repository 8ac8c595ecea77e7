"""Beam search: one beam is greedy, scores, lengths, the stop token; rows do not see each other."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import make_params, random_params
from tx_jax import beam, decode, models, seq2seq
from tx_jax.beam import Beam, search
from tx_jax.config import EncoderConfig, ModelConfig
from tx_jax.errors import UserError
from tx_jax.sampling import Sampling

V, STOP, BEGIN, NEW = 6, 0, 1, 5
CFG = ModelConfig(layers=1, d_model=16, heads=2, d_ff=16, embeddings="untied", norm="layer")
PROMPTS = [[3, 1, 4], [2, 5, 1, 3, 2], [4]]


def table(logp):
    """A decoder whose next logits depend on the last token alone: (step, logits [B, V], state)."""
    logp = jnp.log(jnp.asarray(logp, jnp.float32))
    return (lambda token_R, state: (logp[token_R], state)), logp[BEGIN][None], jnp.zeros((1, 1))


def run(logp, beams, n, penalty=1.0):
    step, first, state = table(logp)
    tokens, scores = jax.jit(lambda f, s: beam.run(step, f, s, Beam(beams, penalty), n, STOP))(
        first, state)
    return np.asarray(tokens)[0], np.asarray(scores)[0]


def every(logp, n, penalty):
    """Every hypothesis of up to n tokens with its score, from the best on: (score, tokens)."""
    found = []
    for length in range(1, n + 1):
        for ids in itertools.product(range(len(logp)), repeat=length):
            inside = STOP not in ids[:-1]
            if inside and (ids[-1] == STOP or length == n):
                total = sum(np.log(logp[a][b]) for a, b in
                            zip((BEGIN, *ids), ids, strict=False))
                found.append((total / length**penalty, [*ids] + [STOP] * (n - length)))
    return sorted(found, reverse=True)


@pytest.fixture
def chain():
    rng = np.random.default_rng(1)
    logp = rng.dirichlet(np.ones(4), 4)
    return logp / logp.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
def test_as_many_beams_as_hypotheses_find_the_best_of_all(chain, penalty):
    tokens, scores = run(chain, 4**3, 3, penalty)
    best = every(chain, 3, penalty)
    np.testing.assert_allclose(scores[:len(best)], [s for s, _ in best], rtol=1e-5)
    assert tokens[:3].tolist() == [ids for _, ids in best[:3]]
    assert np.all(scores[len(best):] == -np.inf), "each hypothesis once"


def test_the_length_penalty_chooses_between_a_short_and_a_long_one():
    """K9: sums -0.8 for one token and -1.5 for three: without penalty the first, else the other."""
    logp = np.full((4, 4), 1e-9)
    logp[BEGIN, STOP], logp[BEGIN, 2] = np.exp(-0.8), np.exp(-0.6)
    logp[2, 3], logp[3, STOP] = np.exp(-0.5), np.exp(-0.4)
    logp[:, BEGIN] = 1 - logp.sum(axis=1)
    short, long = [STOP] * 3, [2, 3, STOP]
    for penalty, ids, score in ((0.0, short, -0.8), (1.0, long, -0.5)):
        tokens, scores = run(logp, 2, 3, penalty)
        assert tokens[0].tolist() == ids and np.isclose(scores[0], score, atol=1e-4)


def test_finished_hypotheses_are_not_continued(chain):
    tokens, scores = run(chain, 8, 4)
    for row, score in zip(tokens, scores, strict=True):
        if score > -np.inf and STOP in row:
            assert (row[row.tolist().index(STOP):] == STOP).all()


@pytest.mark.parametrize("seed", range(8))
def test_more_beams_are_never_below_greedy(seed):
    """A chain in which beams drop the greedy hypothesis is found among random ones."""
    logp = np.random.default_rng(seed).dirichlet(np.full(5, 0.3), 5) + 1e-6
    logp /= logp.sum(axis=1, keepdims=True)
    greedy = run(logp, 1, 6, 0.7)[1][0]
    for beams in (2, 3, 5):
        scores = run(logp, beams, 6, 0.7)[1]
        assert scores[0] >= greedy - 1e-5 and (np.diff(scores[scores > -np.inf]) <= 0).all()


@pytest.fixture(scope="module")
def decoder():
    model = models.build(CFG, V, 16)
    return model, jax.tree.map(lambda x: 3 * x, make_params(model))


@pytest.fixture(scope="module")
def translator():
    model = seq2seq.build(CFG, EncoderConfig(), V, 16)
    return model, random_params(model)


def test_one_beam_is_greedy(decoder):
    model, params = decoder
    found = search(model, params, PROMPTS, NEW, STOP, Beam(1))
    greedy = decode.generate(model, params, PROMPTS, NEW, Sampling(temperature=0), stop=STOP)
    assert found.best_BT.tolist() == greedy.tolist()


def test_one_beam_of_an_encoder_decoder_is_greedy(translator):
    model, params = translator
    found = search(model, params, PROMPTS, NEW, STOP, Beam(1), begin=BEGIN)
    forward = jax.jit(seq2seq.apply, static_argnums=0)
    for prompt, row in zip(PROMPTS, found.best_BT.tolist(), strict=True):
        source = jnp.array([prompt + [0] * (5 - len(prompt))])
        segments, ids = jnp.array([[1] * len(prompt) + [0] * (5 - len(prompt))]), [BEGIN]
        for _ in range(NEW):
            target = jnp.array([ids + [0] * (NEW - len(ids))])
            logits = forward(model, params, source, target, source_segments_BS=segments)
            ids.append(int(jnp.argmax(logits[0, len(ids) - 1])) if STOP not in ids[1:] else STOP)
            if len(ids) > NEW:
                break
        assert row == ids[1:]


@pytest.mark.parametrize("beams", [1, 3])
def test_a_batch_of_ragged_rows_equals_one_by_one(decoder, translator, beams):
    for (model, params), more in ((decoder, {}), (translator, {"begin": BEGIN})):
        together = search(model, params, PROMPTS, NEW, STOP, Beam(beams), **more)
        for i, prompt in enumerate(PROMPTS):
            alone = search(model, params, [prompt], NEW, STOP, Beam(beams), **more)
            assert together.tokens_BRT[i].tolist() == alone.tokens_BRT[0].tolist()
            np.testing.assert_allclose(together.scores_BR[i], alone.scores_BR[0], atol=1e-5)


@pytest.fixture(scope="module")
def learned_cross():
    """Positions of the source with a table of parameters, which is no row of a batch."""
    model = seq2seq.build(CFG, EncoderConfig(cross_positions="t5(bidirectional=True)"), V, 16)
    return model, random_params(model)


@pytest.mark.parametrize("name", ["translator", "learned_cross"])
def test_scores_are_those_of_one_pass(name, request):
    model, params = request.getfixturevalue(name)
    found = search(model, params, PROMPTS[:1], NEW, STOP, Beam(3, 0.0), begin=BEGIN)
    row = found.best_BT[0]
    logits = seq2seq.apply(model, params, jnp.array(PROMPTS[:1]), jnp.array([[BEGIN, *row[:-1]]]))
    logp = jax.nn.log_softmax(logits)[0][jnp.arange(NEW), row]
    count = row.tolist().index(STOP) + 1 if STOP in row else NEW
    np.testing.assert_allclose(found.scores_BR[0, 0], logp[:count].sum(), atol=1e-4)


@pytest.mark.parametrize(("change", "words"), [
    ({"beams": V + 1}, "--beams=7 is more than the 6 tokens"),
    ({"new_tokens": 0}, "new_tokens=0"), ({"stop": V}, "stop=6 lies outside"),
    ({"begin": None}, "give begin"), ({"prompts": []}, "there are no prompts"),
    ({"prompts": [[]]}, "prompt 1 is no list"), ({"prompts": [[1], [-1, 2]]}, "token -1, outside"),
    ({"prompts": [[V]]}, "token 6, outside"), ({"prompts": [[1.5]]}, "prompt 1 is no list")],
    ids=str)
def test_a_mistake_is_one_sentence(translator, change, words):
    model, params = translator
    options = {"prompts": PROMPTS, "new_tokens": NEW, "stop": STOP, "begin": BEGIN,
               "beams": 4} | change
    beams = options.pop("beams")
    with pytest.raises(UserError, match=words):
        search(model, params, beam=Beam(beams), **options)


def test_logits_that_are_no_numbers_are_an_error(decoder):
    model, params = decoder
    with pytest.raises(UserError, match="not numbers"):
        search(model, params | {"head_DV": params["head_DV"] * jnp.nan}, PROMPTS, NEW, STOP)


def test_no_number_in_any_beam_is_seen():
    """Only what follows token 2 is broken, which is the second beam."""
    logits = jnp.zeros((4, 4)).at[2].set(jnp.nan)
    first = jnp.array([[-9.0, 3.0, 2.0, -9.0]])
    tokens, _ = beam.run(lambda token_R, state: (logits[token_R], state), first, jnp.zeros((1, 1)),
                         Beam(2), 4, STOP)
    assert (np.asarray(tokens)[0, 0] < 0).any()


def test_one_beam_follows_the_largest_logit_however_long_the_sum():
    logits = jnp.array([-9.0, 0.0, 0.0, 1e-6])
    tokens, _ = beam.run(lambda token_R, state: (logits[None], state), logits[None],
                         jnp.zeros((1, 1)), Beam(1), 100, STOP)
    assert (np.asarray(tokens) == 3).all()


def test_settings_are_checked():
    with pytest.raises(UserError, match="--beams=0 is too small"):
        Beam(0)
    assert dataclasses.asdict(Beam()) == {"beams": 4, "length_penalty": 1.0}
