"""Every tokenizer: round trips, closed vocabularies, special tokens, tiktoken's traps, speed."""

import json
import logging
import lzma
import math
import pickle
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from tx_jax.data import load_parallel, load_text
from tx_jax.errors import UserError
from tx_jax.tokenizers import bits_per_byte, from_json, make_tokenizer, make_trainer
from tx_jax.tokenizers import gpt2 as gpt2_module
from tx_jax.tokenizers._bytepair import GPT2_PATTERN, LONGEST_RUN, cut_runs
from tx_jax.tokenizers.bpe import TrainedPairs

SAMPLE = ("The cat sat on the mat; the dog didn't.\n\n  \"Où vas-tu?\" said Zoë\t- 12 times, 3.5.\n"
          "고양이가 앉았다 \U0001f600 <|endoftext|> \x1c\x00 end   \n") * 3
SPECS = ("char", "word(vocab=500)", "bpe(vocab=300)", "gpt2")
ANY = st.characters(exclude_categories=["Cs"])
TEXT = st.text(st.one_of(ANY, st.sampled_from(" \n'aé<|>")))


@pytest.fixture(scope="module", params=SPECS)
def tok(request):
    return make_tokenizer(request.param, [SAMPLE])


@pytest.fixture(scope="module")
def gpt2():
    return make_tokenizer("gpt2", [])


@pytest.fixture(scope="module")
def pairs(gpt2):
    return gpt2, make_tokenizer("bpe(vocab=300)", [SAMPLE])


@pytest.fixture(scope="module")
def closed():
    return make_tokenizer("char", ["ab é"]), make_tokenizer("word", ["a b é"])


# ---- every tokenizer

def test_round_trip_of_the_training_text(tok):
    ids = tok.encode(SAMPLE)
    assert ids.dtype == np.int32 and ids.ndim == 1 and ids.max() < tok.vocab_size
    assert tok.decode(ids) == SAMPLE and tok.decode(ids.tolist()) == SAMPLE
    assert tok.unknown(SAMPLE) == []


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_round_trip_of_any_text(data):
    text = data.draw(TEXT)
    for spec in SPECS[:2]:  # closed vocabularies, learnt from this very text
        tok = make_tokenizer(spec, [text])
        assert tok.decode(tok.encode(text)) == text and tok.unknown(text) == []
        assert from_json(tok.to_json()) == tok


@settings(deadline=None, max_examples=150)
@given(text=TEXT)
def test_round_trip_of_any_text_in_bytes(text, pairs):
    for tok in pairs:
        ids = tok.encode(text)
        assert tok.decode(ids) == text and tok.eos_id not in ids
        assert tok.byte_lengths(text).sum() == len(text.encode())


@settings(deadline=None, max_examples=100)
@given(text=TEXT)
def test_byte_lengths_cover_the_text_even_where_unknown(text, closed):
    for tok in closed:
        lengths = tok.byte_lengths(text)
        assert lengths.shape == tok.encode(text).shape and lengths.sum() == len(text.encode())


def test_text_cannot_inject_end_of_text(tok):
    text = "a<|endoftext|>b <|endoftext|>"
    assert tok.eos_id not in tok.encode(text)
    assert tok.decode([tok.eos_id]) == "<|endoftext|>"
    learnt = make_tokenizer(tok.name, [text])
    assert learnt.eos_id not in learnt.encode(text) and learnt.decode(learnt.encode(text)) == text


def test_decode_out_of_range(tok):
    for bad in (-1, tok.vocab_size, 10**9, -10**9):
        with pytest.raises(UserError, match=f"token id {bad} is outside .*{tok.vocab_size} tokens"):
            tok.decode([0, bad])
    with pytest.raises(UserError, match="integers, not float"):
        tok.decode([0.5])
    assert tok.decode([]) == "" and tok.decode(np.zeros(0)) == ""
    assert isinstance(tok.decode(range(tok.vocab_size)), str)  # every id reads as something


def test_empty_text(tok):
    assert tok.encode("").shape == (0,) and tok.encode("").dtype == np.int32
    assert tok.byte_lengths("").shape == (0,)


def test_lone_surrogate(tok):
    with pytest.raises(UserError, match="character 2 .*surrogate"):
        tok.encode("ab\ud800")


def test_json_pickle_and_fingerprint(tok):
    for copy in (from_json(tok.to_json()), pickle.loads(pickle.dumps(tok))):
        assert copy == tok and copy.fingerprint == tok.fingerprint and copy.name == tok.name
        assert (copy.encode(SAMPLE) == tok.encode(SAMPLE)).all()
        assert copy.vocab_size == tok.vocab_size and copy.eos_id == tok.eos_id
    assert len(tok.fingerprint) == 64


def test_fingerprint_tells_vocabularies_apart():
    prints = [make_tokenizer(spec, [text]).fingerprint for spec in SPECS[:3]
              for text in (SAMPLE, SAMPLE + "zebra zebra zebra!@")]
    assert len(set(prints)) == len(prints)


def test_training_is_deterministic_in_any_order(tok):
    texts = [SAMPLE[:80], SAMPLE[80:160], SAMPLE[160:]]
    for spec in SPECS:
        assert make_tokenizer(spec, texts) == make_tokenizer(spec, texts[::-1])


@pytest.mark.parametrize("spec, message", [
    ("chars", "did you mean 'char'"), ("bpe(vocb=300)", "did you mean 'vocab'"),
    ("char(vocab=3)", "no option 'vocab'"), ("bpe(vocab=256)", "at least 257"),
    ("bpe(vocab=0)", "too small"), ("bpe(vocab='x')", "whole number"),
    ("word(vocab=2)", "at least 3"),
    ("bpe(vocab=True)", "whole number"), ("word(1, 2)", "value too many"), ("bpe(", "form name"),
])
def test_bad_call_strings(spec, message):
    with pytest.raises(UserError, match=message):
        make_trainer(spec)


@pytest.mark.parametrize("text", [
    "", "{", "[]", '"x"', '{"kind": "nope"}', '{"kind": "char"}', '{"kind": 3}',
    '{"kind": "char", "characters": "ba"}', '{"kind": "word", "words": ["a", "a"]}',
    '{"kind": "bpe", "pattern": "a", "tokens": ["YQ=="]}',
    '{"kind": "bpe", "pattern": "a", "tokens": [1]}',
    '{"kind": "gpt2", "sha256": "0"}',
])
def test_bad_descriptions(text):
    with pytest.raises(UserError):
        from_json(text)


def test_bits_per_byte():
    assert bits_per_byte(math.log(2) * 24, 8) == pytest.approx(3.0)
    with pytest.raises(UserError, match="0 bytes"):
        bits_per_byte(1.0, 0)


# ---- closed vocabularies

def test_unknown_characters():
    tok = make_tokenizer("char", ["ab\n"])
    assert tok.vocab_size == 5 and tok.unk_id == 3 and tok.eos_id == 4
    assert tok.encode("abZé\U0001f600\x00").tolist() == [1, 2, 3, 3, 3, 3]
    assert tok.decode(tok.encode("abZé")) == "ab\ufffd\ufffd"
    assert tok.unknown("abZéZ") == ["Z", "é"]
    assert tok.byte_lengths("bé고\U0001f600").tolist() == [1, 2, 3, 4]
    assert make_tokenizer("char", []).encode("a").tolist() == [0]


def test_unknown_words():
    tok = make_tokenizer("word(vocab=5)", ["to be or not to be"])
    assert tok.words == [" be", " not", " or"] and tok.vocab_size == 5  # ties: smaller string
    assert tok.encode("to be or").tolist() == [3, 0, 2]
    assert tok.decode(tok.encode("to be or")) == "\ufffd be or"
    assert tok.unknown("to be, to") == ["to", ",", " to"]
    small = make_tokenizer("word(vocab=8192)", ["a b"])
    assert small.vocab_size == 4 and small.name == "word(vocab=4)"


# ---- byte pairs

def test_gpt2_ids():
    """Ids of the published vocabulary (data.md, section 3)."""
    tok = make_tokenizer("gpt2", [])
    assert tok.vocab_size == 50257 and tok.eos_id == 50256
    assert tok.encode("Hello world").tolist() == [15496, 995]


def test_gpt2_needs_no_network_and_leaves_its_file_alone(monkeypatch, tmp_path):
    """tiktoken's own loader asks the network, and deletes a file whose hash is wrong."""
    def refuse(*args, **kwargs):
        raise AssertionError("network used")

    monkeypatch.setattr(socket, "socket", refuse)
    make_tokenizer("gpt2", [])
    raw = bytearray(lzma.decompress(gpt2_module._FILE.read_bytes()))
    raw[0] ^= 1
    for content, fault in ((lzma.compress(bytes(raw)), "damaged"), (b"no xz", "cannot be read")):
        (tmp_path / "copy.xz").write_bytes(content)
        monkeypatch.setattr(gpt2_module, "_FILE", tmp_path / "copy.xz")
        with pytest.raises(UserError, match=f"copy.xz .*{fault}"):
            make_tokenizer("gpt2", [])
        assert (tmp_path / "copy.xz").read_bytes() == content


def test_git_leaves_the_vocabulary_files_as_they_are():
    text = (Path(__file__).parent.parent / ".gitattributes").read_text(encoding="utf-8")
    assert {"*.tiktoken -text", "*.xz binary"} <= set(text.split("\n"))


def test_many_short_documents_encode_quickly(gpt2):
    """tiktoken's batch call takes seconds here; one call a document does not."""
    verses = load_parallel("en", "fr").first
    begin = time.process_time()
    n = sum(len(gpt2.encode(verse)) for verse in verses)
    assert time.process_time() - begin < 3.0 and n == pytest.approx(987_000, rel=0.01)


def test_byte_pairs_equal_tiktoken_on_real_text():
    texts = [text[:60_000] for text in load_text("shakespeare").documents[:3]]
    tok = make_tokenizer("bpe(vocab=600)", texts)
    ranks = {token: i for i, token in enumerate(tok.tokens)}
    plain = tiktoken.Encoding("plain", pat_str=GPT2_PATTERN, mergeable_ranks=ranks,
                              special_tokens={})
    assert tok.vocab_size == 600
    assert tok.encode(texts[0]).tolist() == plain.encode_ordinary(texts[0])
    assert len(tok.encode(texts[0])) < 0.6 * len(texts[0])


def test_small_corpus_ends_early_and_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        tok = make_tokenizer("bpe(vocab=1000)", ["hello hello hello"])
    assert 257 <= tok.vocab_size < 1000 and tok.name == f"bpe(vocab={tok.vocab_size})"
    assert f"gives only {tok.vocab_size} tokens" in caplog.text
    assert make_tokenizer("bpe(vocab=257)", []).vocab_size == 257
    assert make_tokenizer("bpe(vocab=257)", ["aa"]).decode([97, 256]) == "a<|endoftext|>"


def test_vocabulary_without_all_bytes_is_refused():
    with pytest.raises(UserError, match="no token for byte 1"):
        TrainedPairs([b"\x00"])
    with pytest.raises(UserError, match="twice"):
        TrainedPairs([bytes([b]) for b in range(256)] + [b"a"])


def test_panic_becomes_an_error(monkeypatch):
    import tx_jax.tokenizers._bytepair as module
    tok = make_tokenizer("bpe(vocab=257)", [])
    monkeypatch.setattr(module, "cut_runs", lambda text: [text])
    with pytest.raises(UserError, match="could not encode a text of 1000001 characters"):
        tok.encode("\n" * 1_000_000 + "a")


def test_retraining_gives_the_new_vocabulary():
    """tiktoken's loader would give the old one: it caches local files by path."""
    first, second = (make_tokenizer("bpe(vocab=270)", [t * 9]) for t in ("abcdef ", "stuvwx "))
    assert from_json(first.to_json()).tokens != from_json(second.to_json()).tokens


def test_cut_runs():
    run = "a" * (2 * LONGEST_RUN + 5)
    assert [len(part) for part in cut_runs(run)] == [LONGEST_RUN, LONGEST_RUN, 5]
    text = "b " * 9 + run + "\n" + " " * (LONGEST_RUN + 1) + "c"
    assert "".join(cut_runs(text)) == text and len(list(cut_runs(text))) == 4
    for whole in ("", "a" * LONGEST_RUN, "a b " * LONGEST_RUN):
        assert list(cut_runs(whole)) == [whole]


RUNS = {"one letter": "a" * 200_000, "carets": "^" * 1_000_000, "spaces": " " * 1_000_000,
        "lines": "\n" * 1_000_000 + "a", "no space": "abcdefghij" * 100_000,
        "a long line": "word " * 1_000_000}


@pytest.mark.parametrize("kind", RUNS)
def test_long_runs_encode_and_train_quickly(kind, gpt2):
    text = RUNS[kind]
    for tok in (gpt2, make_tokenizer("bpe(vocab=300)", [text]), make_tokenizer("word", [text]),
                make_tokenizer("char", [text])):
        begin = time.process_time()
        ids = tok.encode(text)
        assert time.process_time() - begin < 5.0
        assert tok.decode(ids) == text


def test_encoding_time_is_linear(gpt2):
    def seconds(n):
        begin = time.process_time()
        for _ in range(3):
            gpt2.encode("a" * n)
        return time.process_time() - begin

    seconds(1000)
    assert min(seconds(400_000) for _ in range(2)) < 4 * max(seconds(200_000) for _ in range(2))


def test_description_is_plain_json():
    data = json.loads(make_tokenizer("char", ["ab"]).to_json())
    assert data == {"kind": "char", "characters": "ab"}
