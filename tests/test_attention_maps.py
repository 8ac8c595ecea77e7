"""Attention maps: what is traced, what is drawn, and a run or a sentence that cannot be used."""

import base64
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launch
from experiments import attention_maps
from experiments._attention_page import draw_maps, render_page
from tx_jax import models
from tx_jax.attention import attend, trace_attention
from tx_jax.config import ModelConfig
from tx_jax.errors import UserError
from tx_jax.masks import Mask, parse_mask

pytestmark = pytest.mark.slow

CFG = ModelConfig(layers=2, d_model=16, heads=2)


def qkv(T=5, S=7, N=4, K=2, H=8):
    keys = jax.random.split(jax.random.key(0), 3)
    return (jax.random.normal(keys[0], (2, T, N, H)), jax.random.normal(keys[1], (2, S, K, H)),
            jax.random.normal(keys[2], (2, S, K, H)))


@pytest.mark.parametrize("name", ["reference", "blockwise", "jax_nn"])
@pytest.mark.parametrize("options", [{}, {"mask": "causal"}, {"mask": "window(2)", "scale": 0.3}])
def test_a_trace_ends_in_what_every_implementation_gives(name, options):
    q, k, v = qkv()
    found = jax.jit(lambda q, k, v: trace_attention(q, k, v, **options))(q, k, v)
    out = jax.jit(lambda q, k, v: attend(q, k, v, implementation=name, **options))(q, k, v)
    np.testing.assert_allclose(found["out_BTNH"], out, atol=2e-6)
    assert found["weights_BNTS"].shape == found["logits_BNTS"].shape == (2, 4, 5, 7)
    np.testing.assert_allclose(found["weights_BNTS"].sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(jax.nn.softmax(found["logits_BNTS"], -1), found["weights_BNTS"],
                               atol=1e-6)


def test_a_trace_of_cross_attention_keeps_padding_out():
    """Queries and keys of different lengths; the keys of the second example end after 3."""
    q, k, v = qkv()
    mask = Mask(parse_mask("full"), k_lengths_B=jnp.array([7, 3]))
    bad = v.at[1, 3:].set(jnp.nan)
    found = trace_attention(q, k, bad, mask=mask, sink=jnp.zeros(4))
    assert not found["weights_BNTS"][1, :, :, 3:].any()
    assert np.isfinite(found["out_BTNH"]).all()
    assert (found["weights_BNTS"].sum(-1) < 1).all(), "a sink takes its share"


@pytest.mark.parametrize("changes", [{}, {"positions": "cope", "kv_heads": 1, "scan": False,
                                          "mask": "window(3)"}])
def test_the_weights_of_a_model_sum_to_one_and_see_no_future(changes):
    model = models.build(ModelConfig(layers=2, d_model=16, heads=2, **changes), 11, 8)
    params = models.init(model, jax.random.key(1))
    tokens = jnp.array([[1, 2, 3, 4, 5, 6]])
    trace = jax.jit(lambda t: models.apply(model, params, t, trace="weights")[1]["weights_BNTS"])
    weights = trace(tokens)
    assert weights.shape == (2, 1, 2, 6, 6)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert not np.triu(weights, 1).any()
    other = trace(tokens.at[0, 4].set(9))
    np.testing.assert_array_equal(other[..., :4, :], weights[..., :4, :])
    assert np.abs(other - weights)[..., 4:, :].max() > 1e-6


def test_an_unknown_trace_is_refused():
    model = models.build(CFG, 11, 8)
    with pytest.raises(UserError, match="trace='weigths' is unknown"):
        models.apply(model, {}, jnp.zeros((1, 2), jnp.int32), trace="weigths")


ROWS, COLUMNS = ["The", " cat", "."], ["Le", " chat", "$a$", "<b>", "\n"]


def test_a_rectangle_is_drawn(tmp_path):
    """As cross-attention has it; signs of markup are plain text."""
    weights = np.random.default_rng(0).dirichlet(np.ones(5), (6, 3))
    path = draw_maps(weights, ROWS, COLUMNS, tmp_path / "map.png", title="$x$ <b>")
    assert path.read_bytes()[:4] == b"\x89PNG"
    draw_maps(np.ones((1, 1, 1)), ["\u4e2d"], ["a"], path)  # a script that the font may lack
    draw_maps(np.full((1, 100, 2), 0.5), ["x"] * 100, ["y"] * 2, path)
    with pytest.raises(ValueError, match="3 rows and 4 columns"):
        draw_maps(weights, ROWS, COLUMNS[:4], path)


def test_a_page_holds_the_weights_and_loads_nothing():
    weights = np.random.default_rng(0).dirichlet(np.ones(5), (2, 4, 3))
    page = render_page(weights, ROWS, COLUMNS, title="<script>", about=("a & b",))
    assert not re.search(r"https?:|src=|@import|url\(|href", page)
    assert "<h1>&lt;script&gt;</h1>" in page and "a &amp; b" in page
    data = json.loads(re.search(r"const D = (.*?), \[L", page)[1])
    assert data["rows"][1] == "\u2423cat" and data["columns"][3:] == ["<b>", "\u23ce"]
    found = np.frombuffer(base64.b64decode(data["weights"]), "<u2").reshape(data["shape"]) / 65535
    np.testing.assert_allclose(found, weights, atol=1e-5)


def maps(run, *flags):
    return launch.main(["--experiment=attention_maps", f"--run={run}", "--cpu_devices=8", *flags])


def test_the_maps_of_a_run(trained, tmp_path, capsys):
    flags = ["--text=the cat and the owl.", f"--workdir={tmp_path / 'run'}"]
    assert maps(trained, *flags) == 0, capsys.readouterr().err
    [folder] = (tmp_path / "run" / "maps").iterdir()
    assert sorted(p.name for p in folder.iterdir()) == ["attention.html", "layer_1.png",
                                                        "layer_2.png"]
    assert f"maps: {folder / 'attention.html'}" in capsys.readouterr().out
    row = json.loads((tmp_path / "run" / "results.jsonl").read_text())
    assert len(row["metrics"]["entropy"]) == 2 and row["metrics"]["tokens"][3] == "\u2423"
    assert str(folder) in (tmp_path / "run" / "report.html").read_text()
    [cell] = (trained / "cells").iterdir()
    assert maps(cell, *flags) == 0 and "1 finished before" in capsys.readouterr().out
    assert maps(trained, "--text=the sea", flags[1]) == 0
    assert len(list((tmp_path / "run" / "maps").iterdir())) == 2


@pytest.mark.parametrize(("flags", "words"), [
    (["--text="], "--text is empty"), (["--text=  "], "--text is empty"),
    (["--text=the Zebra!"], "--text holds 'Z', 'b', 'r', '!', unknown to the tokenizer char"),
    (["--text=" + "the owl " * 5], "has 40 tokens, but the model has seen rows of at most 32"),
    (["--steps=5"], "that model is trained already")])
def test_a_text_that_cannot_be_drawn_is_one_sentence(flags, words, trained, capsys, monkeypatch,
                                                     tmp_path):
    monkeypatch.chdir(tmp_path)
    assert maps(trained, *flags) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_run_that_cannot_be_read_is_one_sentence(trained, tmp_path, capsys):
    assert maps(tmp_path, "--text=the") == 2
    assert "holds no checkpoint of a language model" in capsys.readouterr().err
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    shutil.rmtree(copy / "cache")
    assert maps(copy, "--text=the") == 2
    assert "no longer holds the tokenizer" in capsys.readouterr().err


def test_a_page_too_large_is_refused():
    tokenizer = attention_maps._small_tokenizer()
    with pytest.raises(UserError, match="a page with 800 heads holds at most 102; shorten it"):
        attention_maps.encode("word " * 40, tokenizer, 1024, 800)


def test_without_a_run_a_small_model_is_trained(tmp_path, capsys):
    flags = ["--experiment=attention_maps", "--preset=smoke", "--steps=2", "--cpu_devices=8",
             f"--workdir={tmp_path / 'run'}"]
    assert launch.main(flags) == 0
    assert "no --run was given: training a small model" in capsys.readouterr().out
    assert launch.main([*flags, "--text=Once more"]) == 0
    assert len(list((tmp_path / "run" / "model").iterdir())) == 1, "trained once for all sentences"
