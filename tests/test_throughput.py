"""The throughput benchmark: the JAX side alone, and the weights it hands to torch."""

import json

import jax
import numpy as np
import pytest

from experiments import _peer, throughput
from tx_jax import letters, models, train
from tx_jax.errors import UserError

TINY = throughput.Settings(layers=2, d_model=8, heads=2, vocab=11, context=6, batch=2, steps=1,
                           rounds=2)


@pytest.fixture
def without_torch(monkeypatch):
    """A Python that cannot import torch, whatever is installed here."""
    monkeypatch.setattr(_peer, "has_torch", lambda python: False)


def test_without_torch_the_jax_side_runs_and_the_table_says_so(without_torch, tmp_path, capsys):
    out = tmp_path / "t.json"
    throughput.main(["--layers=2", "--d_model=8", "--heads=2", "--vocab=11", "--context=6",
                     "--batch=2", "--steps=1", "--rounds=2", f"--out={out}"])
    printed = capsys.readouterr().out
    assert "tx_jax" in printed and "This Python has no torch" in printed
    found = json.loads(out.read_text())
    (row,) = found["sides"]
    assert found["settings"]["layers"] == 2 and "ratio" not in found
    assert len(row["tokens_per_second"]) == 2 and min(row["tokens_per_second"]) > 0
    assert len(row["losses"]) == 3 and np.all(np.isfinite(row["losses"]))


def test_the_ratio_is_the_median_over_rounds():
    sides = [throughput.Side(name, "1", 5, None, seconds, [1.0])
             for name, seconds in (("a", [1.0, 2.0, 4.0]), ("b", [3.0, 3.0, 4.0]))]
    found = throughput.summary(TINY, sides)
    assert found["ratio"] == {"median": 1.5, "low": 1.0, "high": 3.0}
    assert found["sides"][0]["tokens_per_second"] == [12.0, 6.0, 3.0]


def test_an_asked_for_python_without_torch_is_an_error(without_torch):
    with pytest.raises(UserError, match="cannot import torch"):
        throughput.main(["--torch_python=python3"])
    with pytest.raises(UserError, match="is not a program"):
        throughput.main(["--torch_python=/nowhere/python"])
    with pytest.raises(UserError, match="folder that does not exist"):
        throughput.main(["--out=/nowhere/at/all.json"])


def test_default_shape_has_3_7_million_parameters():
    s = throughput.Settings()
    model = models.build(throughput.model_config(s), s.vocab, s.context)
    shapes = jax.eval_shape(lambda: models.init(model, jax.random.key(0)))
    assert 3.65e6 < letters.count(shapes) < 3.75e6


def test_torch_gets_every_parameter_in_its_layout():
    """A forward pass in NumPy on the handed-over arrays, [outputs, inputs], gives our loss."""
    tokens, targets = throughput.make_batches(TINY)
    model = models.build(throughput.model_config(TINY), TINY.vocab, TINY.context)
    state = train.init_state(model, throughput.OPTIM, jax.random.key(0))
    w = {k: x.astype(np.float64) for k, x in
         throughput.torch_arrays(TINY, state.params).items()}
    assert sum(x.size for x in w.values()) == letters.count(state.params)
    x = w["embed.weight"][tokens[0]] + w["positions.weight"][None]
    for layer in range(TINY.layers):
        x = _block(x, {k.split(".", 2)[2]: v for k, v in w.items()
                       if k.startswith(f"blocks.{layer}.")})
    logits = _norm(x, w, "final_norm") @ w["embed.weight"].T
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(log_p, targets[0][..., None], -1).mean()
    batch = {"tokens_BT": tokens[0], "targets_BT": targets[0]}
    nats, count = train.eval_step(model, state.params, batch)
    np.testing.assert_allclose(float(nats) / float(count), expected, rtol=1e-5)


def _norm(x, w, name):
    centred = x - x.mean(-1, keepdims=True)
    return (centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
            * w[f"{name}.weight"] + w[f"{name}.bias"])


def _block(x, w):
    B, T, D = x.shape
    split = (_norm(x, w, "attention_norm") @ w["qkv.weight"].T).reshape(B, T, 3, TINY.heads, -1)
    q, k, v = np.moveaxis(split, 2, 0)
    logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    logits = np.where(np.tri(T, dtype=bool), logits, -np.inf)
    p = np.exp(logits)
    mixed = np.einsum("bnts,bsnh->btnh", p / p.sum(-1, keepdims=True), v).reshape(B, T, D)
    x = x + mixed @ w["out.weight"].T
    up = _norm(x, w, "mlp_norm") @ w["up.weight"].T
    erf = np.asarray(jax.scipy.special.erf(up.astype(np.float32) / np.float32(2**0.5)))
    return x + (0.5 * up * (1 + erf)) @ w["down.weight"].T
