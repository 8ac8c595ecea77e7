"""The study of tokenizers: same text for all, unknown words pay, budgets are equal, claims."""

import math

import numpy as np
import pytest

from experiments import _tokens_text, tokenizers
from experiments._tokens_report import make_report
from tests.helpers import check_refused, check_study
from tx_jax.errors import UserError
from tx_jax.study.report import markdown


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "owl.txt"
    path.write_text("the owl and the cat went to sea. " * 300 + "a zebra sang ünder ice. " * 100)
    return str(path)


def settings(text, **options):
    return tokenizers.Settings(text=text, scored=300, steps=20, layers=1, d_model=8, heads=2,
                               reference="char", arms=("char", "word(vocab=12)"), **options)


def test_every_tokenizer_is_scored_on_the_same_characters(text):
    cuts = [settings(text).cut(arm) for arm in ("char", "word(vocab=12)", "bpe(vocab=300)")]
    for part in ("tuning", "test"):
        found = [getattr(cut, part) for cut in cuts]
        assert {part.characters for part in found} == {300}
        assert len({int(part.bytes_.sum()) for part in found}) == 1
    assert cuts[0].bytes_per_token < cuts[2].bytes_per_token
    assert not cuts[2].test.spelling.any() and not cuts[0].test.spelling.any()


def test_an_unknown_word_pays_for_its_letters(text):
    """Frequencies of the letters of unknown training pieces, one added, by hand."""
    cut = settings(text).cut("word(vocab=12)")
    unknown = cut.test.tokens == cut.tokenizer.unk_id
    assert unknown.any() and (cut.test.spelling > 0).tolist() == unknown.tolist()
    train, held, _ = _tokens_text.texts(text, 0.1)
    price = _tokens_text._spelling(
        _tokens_text._unknown(cut.tokenizer, train, cut.train).values())
    assert math.isclose(sum(math.exp(-nats) for nats in price.values()), 1.0)
    raw, ends = held[len(held) // 2:].encode(), np.cumsum(cut.test.bytes_)
    i = int(np.flatnonzero(unknown)[-1])
    piece = raw[ends[i] - cut.test.bytes_[i]:ends[i]].decode()
    want = sum(price.get(c, price[""]) for c in piece) + price["end"]
    assert math.isclose(cut.test.spelling[i], want)


def test_a_uniform_model_takes_the_bits_that_it_must(text):
    """With no weights every token takes log V nats."""
    import jax

    from tx_jax import models

    own = settings(text)
    task, cut = own.task("word(vocab=12)", 20), own.cut("word(vocab=12)")
    shapes = jax.eval_shape(lambda: models.init(task.build(), jax.random.key(0)))
    found = tokenizers._score(task, jax.tree.map(lambda x: np.zeros(x.shape, np.float32), shapes),
                              cut.test)
    n, size = len(cut.test.tokens) - 1, int(cut.test.bytes_[1:].sum())
    assert math.isclose(found["perplexity"], 12, rel_tol=1e-4)
    assert math.isclose(found["bpb_free"], n * math.log2(12) / size, rel_tol=1e-4)
    spelled = cut.test.spelling[1:].sum() / math.log(2) / size
    assert math.isclose(found["bpb"] - found["bpb_free"], spelled, rel_tol=1e-4)


def test_steps_follow_the_budget(text):
    own = settings(text)
    assert tokenizers.steps_of(own, "word(vocab=12)", "bytes") == 20
    wide = tokenizers.Settings(text=text, scored=300, steps=1000, reference="char")
    ratio = tokenizers.step_flops(wide, "char") / tokenizers.step_flops(wide, "word(vocab=12)")
    assert abs(tokenizers.steps_of(wide, "word(vocab=12)", "flops") - 1000 * ratio) <= 5
    assert tokenizers.steps_of(wide, "char", "flops") == 1000


def test_too_little_text_is_refused(text):
    with pytest.raises(UserError, match="--scored=90000 is more than half of the"):
        tokenizers.Settings(text=text, scored=90_000).cut("char")


def row(arm, budget, seed, vocabulary, bpb, free):
    return {"part": "models", "arm": arm, "axes": {"budget": budget, "lr": 0.01}, "seed": seed,
            "metrics": {"bpb": bpb, "bpb_free": free, "perplexity": float(vocabulary), "tuning": 1,
                        "vocabulary": vocabulary, "unknown": 0.1, "characters_per_token": 2.0,
                        "context": 4, "parameters": 10, "layers": 5, "flops_per_byte": 1.0,
                        "steps": 10},
            "seconds": 1.0, "compile_seconds": 1.0, "device": "cpu x2", "versions": {"jax": "0"},
            "kernel": "reference", "strategy": "queue", "settings": {}, "code": "c", "data": "d",
            "status": "ok", "command": f"run {arm}"}


@pytest.mark.slow
def test_verdicts_follow_the_rows():
    noise = np.random.default_rng(0)
    levels = {"char": (82, 3.0, 3.0), "bpe(vocab=512)": (512, 2.8, 2.8),
              "bpe(vocab=1024)": (1024, 2.5, 2.5), "bpe(vocab=4096)": (4096, 2.7, 2.7),
              "word(vocab=5000)": (5000, 2.9, 2.0)}

    def outcomes(sign):
        rows = [row(arm, budget, seed, v, 2.7 + sign * (b - 2.7) + 0.01 * noise.normal(),
                    2.5 + sign * (f - 2.5) + 0.01 * noise.normal())
                for budget in ("bytes", "flops") for arm, (v, b, f) in levels.items()
                for seed in range(5)]
        text = markdown(make_report(rows, tuple(levels), "bpe(vocab=1024)"))
        return [line.split("**")[1] for line in text.splitlines() if ", equal " in line
                and "**" in line and "Perplexity" not in line]

    assert outcomes(1) == ["agrees"] * 8
    assert outcomes(-1) == ["differs"] * 8


@pytest.mark.slow
def test_from_flag_to_report_and_again(capsys, tmp_path, text):
    check_study("tokenizers", [f"--text={text}", "--scored=300"], tmp_path, capsys,
                said="8 cells, 0 finished before, 8 to run",
                shown=("| char | bytes |",))


@pytest.mark.parametrize(("flag", "words"), [
    ("--arms=char,bpe(vocab=3)", "too small"), ("--budgets=tokens", "'tokens'"),
    ("--reference=wrod", "wrod")])
def test_a_mistake_is_one_sentence(flag, words, capsys):
    check_refused("tokenizers", [flag], words, capsys)
