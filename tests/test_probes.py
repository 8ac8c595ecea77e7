"""The probes: tasks recomputed row by row, exact match against decoding, and what is reported."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _probe_training, _probes, _probes_report
from experiments._probes import BEGIN, END, FIRST, KEY, PASSKEY, PLUS, SEPARATOR, TASKS
from experiments._probes_settings import Probes
from tests.helpers import check_study, make_params
from tx_jax import decode, models
from tx_jax.config import ModelConfig
from tx_jax.errors import UserError

SYMBOLS = 40


def solve(task, before):
    """The answer to the tokens before it, by plain loops that know nothing of how rows are made."""
    prompt = before[1:before.index(SEPARATOR)]
    question = before[before.index(SEPARATOR) + 1:]
    if task == "copy":
        return prompt
    if task == "reverse":
        return [prompt[-1 - i] for i in range(len(prompt))]
    if task == "passkey":
        assert question == [KEY] and prompt.count(KEY) == 1
        at = prompt.index(KEY)
        return prompt[at + 1:at + 1 + PASSKEY]
    if task == "recall":
        pairs = dict(zip(prompt[0::2], prompt[1::2], strict=True))
        assert prompt.count(question[0]) == 1 and len(pairs) == len(prompt) // 2
        return [pairs[question[0]]]
    a, b = (int("".join(str(t - FIRST) for t in number))
            for number in (prompt[:prompt.index(PLUS)], prompt[prompt.index(PLUS) + 1:]))
    digits = str(a + b).zfill((len(prompt) - 1) // 2 + 1)
    return [int(d) + FIRST for d in reversed(digits)]


@pytest.mark.parametrize("length", [1, 2, 9])
@pytest.mark.parametrize("task", TASKS)
def test_answers_are_what_a_loop_finds(task, length):
    rows = _probes.draw(task, np.random.default_rng(0), 200, length, SYMBOLS)
    assert rows.tokens_RT.shape == rows.answer_RT.shape == (200, _probes.width(task, length))
    for tokens, asked in zip(rows.tokens_RT.tolist(), rows.answer_RT.tolist(), strict=True):
        first = asked.index(True)
        assert all(asked[first:]) and tokens[0] == BEGIN and tokens[-1] == END
        assert solve(task, tokens[:first]) == tokens[first:-1]
        assert max(tokens) < FIRST + SYMBOLS


@pytest.mark.parametrize("task", TASKS)
def test_the_length_is_what_grows(task):
    """Symbols between BEGIN and SEPARATOR by length: lengths beyond training are longer rows."""
    sizes = [_probes.width(task, n) for n in range(1, 20)]
    assert sizes == sorted(set(sizes))
    tokens = _probes.draw(task, np.random.default_rng(0), 3, 7, SYMBOLS).tokens_RT
    prompt = tokens[:, 1:list(tokens[0]).index(SEPARATOR)]
    assert prompt.shape[1] == {"copy": 7, "reverse": 7, "passkey": 7 + 1 + PASSKEY,
                               "recall": 14, "addition": 15}[task]


def test_a_passkey_may_lie_anywhere_and_does_not_say_where():
    """Depths are uniform, and neither the key nor the filler depends on them."""
    tokens = _probes.draw("passkey", np.random.default_rng(1), 20_000, 4, 10).tokens_RT
    depth = np.argmax(tokens == KEY, axis=1) - 1
    counts = np.bincount(depth, minlength=5)
    assert np.all(np.abs(counts - 4000) < 5 * np.sqrt(4000))
    filler = np.array([np.delete(row[1:9], range(d, d + 4)) for row, d in
                       zip(tokens, depth, strict=True)])
    for values in (tokens[:, -2], tokens[:, -4], *filler.T):
        table = np.zeros((5, 10))
        np.add.at(table, (depth, values - FIRST), 1)
        assert np.all(np.abs(table - 400) < 5 * np.sqrt(400))


def test_every_pair_is_asked_equally_often():
    tokens = _probes.draw("recall", np.random.default_rng(2), 10_000, 5, SYMBOLS).tokens_RT
    asked = np.argmax(tokens[:, 1:11:2] == tokens[:, 12:13], axis=1)
    assert np.all(np.abs(np.bincount(asked, minlength=5) - 2000) < 5 * np.sqrt(2000))
    values, keys = tokens[:, 2:12:2], tokens[:, 1:11:2]
    assert keys.max() < FIRST + SYMBOLS // 2 <= values.min()


def test_training_lengths_are_uniform_and_never_beyond():
    found = _probe_training.training_rows("copy", SYMBOLS, 25, 6, 100, 30, 0)
    assert found["tokens"].shape == (100, 30, 25) and found["tokens"].dtype == np.int8
    lengths = found["answer"].sum(axis=-1).ravel() - 1
    assert np.all(np.abs(np.bincount(lengths)[1:] - 500) < 5 * np.sqrt(500))
    assert lengths.min() == 1 and lengths.max() == 6
    again = _probe_training.training_rows("copy", SYMBOLS, 25, 6, 100, 30, 0)
    other = _probe_training.training_rows("copy", SYMBOLS, 25, 6, 100, 30, 1)
    assert np.array_equal(found["tokens"], again["tokens"])
    assert not np.array_equal(found["tokens"], other["tokens"])
    tests = _probe_training.test_rows("copy", SYMBOLS, 25, (6, 8), 50, 0)
    assert not any((found["tokens"] == row).all(-1).any() for row in tests["tokens"][1])


def model_of(positions, context=20, layers=1):
    cfg = ModelConfig(layers=layers, d_model=16, heads=2, positions=positions, scan=False)
    return models.build(cfg, FIRST + 10, context)


def batch_of(tokens, answer):
    return _probe_training._batch(jnp.asarray(tokens), jnp.asarray(answer))


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["rope_dynamic_ntk(trained=6)", "learned", "cope", "fire"])
def test_padding_changes_no_answer(positions):
    """A test row gives the logits it has alone, also where a scheme follows the row's length."""
    model = model_of(positions)
    params = make_params(model)
    tests = _probe_training.test_rows("reverse", 10, 20, (4, 6), 4, 0)
    width, apply = int(tests["width"][0]), jax.jit(models.apply, static_argnums=0)
    assert width == _probes.width("reverse", 4)
    batch = batch_of(tests["tokens"][0], tests["answer"][0])
    positions_BT = _probe_training.row_positions(batch, width)
    padded, _ = apply(model, params, batch["tokens_BT"], positions_BT=positions_BT)
    alone, _ = apply(model, params, batch["tokens_BT"][:, :width - 1])
    np.testing.assert_allclose(padded[:, :width - 1], alone, atol=2e-5)
    assert not (np.asarray(batch["targets_BT"])[:, width - 1:] >= 0).any()


@pytest.mark.slow
def test_exact_match_is_that_of_free_running_decoding():
    """Answers are what `generate` emits, but every other row has one of them changed."""
    model = model_of("rope")
    params = make_params(model)
    rows = _probes.draw("copy", np.random.default_rng(7), 12, 4, 10)
    prompts = rows.tokens_RT[:, :6].astype(int)
    emitted = decode.generate(model, params, list(prompts), 5, decode.Sampling(temperature=0.0))
    assert len({tuple(row) for row in emitted.tolist()}) > 6  # else the rows say little
    tokens = np.concatenate([prompts, emitted], axis=1)
    for r in range(0, 12, 2):
        place = 6 + r // 2 % 5
        tokens[r, place] = (tokens[r, place] + 1) % model.vocab
    said = _probe_training.exact_match(model, params, batch_of(tokens, rows.answer_RT))
    assert said.tolist() == np.all(emitted == tokens[:, 6:], axis=1).tolist() == [False, True] * 6


def row(task, arm, seed, exact, lr=0.003):
    within = [v for n, v in exact.items() if int(n) <= 8]
    beyond = [v for n, v in exact.items() if int(n) > 8]
    exact = dict(sorted(exact.items()))  # as words: what a ledger does to keys
    metrics = {"exact": exact, "within": float(np.mean(within)), "beyond": float(np.mean(beyond)),
               "solved": float(min(within) >= 0.95), "steps_to_90": 100.0, "final_loss": 0.1,
               "curve": [0.0, 1.0]}
    return {"part": "probes", "arm": arm, "axes": {"lr": lr, "task": task}, "seed": seed,
            "metrics": metrics, "status": "ok", "command": f"run {arm}"}


def grid(levels, tasks=("copy", "recall"), seeds=4):
    """Rows of arms with the given exact match at lengths 8, 16 and 24."""
    noise = np.random.default_rng(0)
    return [row(task, arm, seed, {"8": 1.0, "16": level + 0.01 * noise.random(), "24": level / 2})
            for task in tasks for arm, level in levels.items() for seed in range(seeds)]


def test_a_diverged_seed_is_one_that_did_not_solve():
    rows = grid({"none": 0.9, "rope": 0.1}, tasks=("copy",))
    rows[0] |= {"status": "diverged"}
    assert _probes_report._solved([r for r in rows if r["arm"] == "none"]) == "3/4"
    assert _probes_report._taught([r for r in rows if r["arm"] == "none"])


def test_reciprocal_ranks_are_counted_by_hand():
    rows = [row("copy", arm, 0, {"8": 1.0, "16": x}) for arm, x in
            (("none", 0.9), ("t5", 0.5), ("rope", 0.0), ("sinusoidal", 0.0))]
    rows += [row("recall", arm, 0, {"8": 1.0, "16": x}) for arm, x in
             (("none", 0.1), ("t5", 0.7), ("rope", 0.3), ("sinusoidal", 0.0))]
    found = _probes_report.reciprocal_ranks(rows)
    assert found["none"][0] == pytest.approx((1 + 1 / 3) / 2)
    assert found["t5"][0] == pytest.approx((1 / 2 + 1) / 2)
    assert found["rope"][0] == pytest.approx((1 / 3.5 + 1 / 2) / 2)
    assert found["sinusoidal"][0] == pytest.approx((1 / 3.5 + 1 / 4) / 2)
    del rows[-1]  # an arm lacks a task: the seed does not count
    assert not _probes_report.reciprocal_ranks(rows)["none"]


def test_the_claims_follow_the_rows():
    rows = grid({"none": 0.9, "t5": 0.7, "alibi": 0.4, "rope": 0.1, "sinusoidal": 0.0})
    arms = ("none", "t5", "alibi", "rope", "sinusoidal")
    claims, found, drawn = _probes_report.make_probes(rows, 8, arms, 800)
    assert all(c.comparison.difference > 0 for c in claims if c.expected == "higher")
    at_once = {c.text[6:10]: c.comparison for c in claims if "fails at once" in c.text}
    assert at_once["rope"].low > 0.05 and at_once["sinu"].high < 0.05
    assert any("copy: none extrapolates further than rope" in c.text and "4/4 and 4/4" in c.text
               for c in claims)
    text = found[0].markdown()
    assert "n=8 | n=16 (beyond) | n=24 (beyond)" in text and "4/4 [0.51, 1.00]" in text
    assert "| none | 1 ± 0 | 0.69 |" in found[1].markdown()
    assert drawn[0].png[:4] == b"\x89PNG"


def test_addition_is_judged_against_nobody_extrapolates():
    rows = grid({"none": 0.0, "rope": 0.6}, tasks=("addition",))
    claims, *_ = _probes_report.make_probes(rows, 8, ("none", "rope"), 800)
    by_text = {c.text.split(" does")[0]: c.comparison for c in claims if "addition" in c.text}
    assert by_text["addition: none"].high < 0.05 < by_text["addition: rope"].low


def test_who_did_not_learn_is_not_judged():
    rows = grid({"none": 0.5, "rope": 0.0}, tasks=("copy",))
    for r in [r for r in rows if r["arm"] == "rope"][:2]:
        r["metrics"]["solved"] = 0.0  # two of four
    claims, *_ = _probes_report.make_probes(rows, 8, ("none", "rope"), 800)
    assert not [c for c in claims if c.text.startswith("copy")]


def test_the_learning_rate_is_not_chosen_by_what_is_compared():
    """The lower rate solves the training lengths, the higher happens to do better beyond."""
    rows = [row("copy", "none", s, {"8": within, "16": beyond}, lr)
            for s in range(2) for lr, within, beyond in ((0.001, 1.0, 0.2), (0.01, 0.5, 0.9))]
    _, found, _ = _probes_report.make_probes(rows, 8, ("none",), 800)
    assert "| copy | none | 0.001 |" in found[0].markdown()


@pytest.mark.parametrize(("given", "words"), [
    ({"tasks": ("coppy",)}, "did you mean 'copy'"),
    ({"arms": ("ropes",)}, "did you mean 'rope'"),
    ({"test_lengths": (2, 4)}, "on one side of --probes.train_length=6"),
    ({"heads": 3}, "--probes.d_model=32 is not divisible by --probes.heads=3"),
    ({"test_lengths": (12, 16)}, "give some up to it and some beyond"),
    ({"tasks": ("recall",), "test_lengths": (5, 25)}, "not enough keys for recall with 25 pairs"),
])
def test_a_mistake_is_one_sentence(given, words):
    with pytest.raises(UserError, match=words):
        Probes(**given)


TINY = ["--parts=probes",
        "--probes.tasks=passkey", "--probes.arms=none,learned", "--probes.layers=1",
        "--probes.d_model=8", "--probes.heads=1", "--probes.train_length=2", "--probes.steps=20",
        "--probes.test_lengths=2,3", "--probes.test_rows=8", "--probes.batch=4",
        "--probes.seeds=2", "--strategy=queue"]


@pytest.mark.slow
def test_from_flag_to_report_and_again(capsys, tmp_path):
    check_study("length_extrapolation", TINY, tmp_path, capsys,
                said="4 cells, 0 finished before, 4 to run",
                shown=("trained on lengths 1 to 2", "n=3 (beyond)"))
