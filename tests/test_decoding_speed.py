"""The decoding benchmark: what is timed, what is refused, and what its table says."""

import json
import sys

import jax
import numpy as np
import pytest

from experiments import _peer
from experiments import decoding_speed as ds
from tx_jax import decode, models
from tx_jax.errors import UserError

TINY = ds.Settings(layers=2, d_model=16, heads=4, kv_heads=2, d_ff=24, vocab=31, batches=(1, 2),
                   prompt=3, new_tokens=4, contexts=(5,), rounds=2)


@pytest.mark.slow
def test_without_a_peer_it_says_so(tmp_path, capsys):
    path = tmp_path / "numbers.json"
    ds.main(["--layers=1", "--d_model=16", "--heads=4", "--kv_heads=2", "--d_ff=24", "--vocab=31",
             "--batches=1,2", "--prompt=3", "--new_tokens=4", "--contexts=5", "--rounds=2",
             f"--out={path}"])
    found = json.loads(path.read_text())
    assert [case["batch"] for case in found["calls"]] == [1, 2]
    assert all(len(case["seconds"][0]) == 2 for case in found["calls"] + found["steps"])
    assert "This Python has no torch" in capsys.readouterr().out


def test_a_peer_does_not_find_the_modules_beside_it(tmp_path, monkeypatch):
    """A study named like a package must not be imported by the libraries of the peer."""
    (tmp_path / "tokenizers.py").write_text("")
    (tmp_path / "peer.py").write_text(
        "import importlib.util, json, sys\n"
        "found = importlib.util.find_spec('tokenizers')\n"
        "print(json.dumps({'got': json.loads(sys.argv[1]), 'at': found and found.origin}))\n")
    monkeypatch.setattr(_peer, "__file__", str(tmp_path / "_peer.py"))
    monkeypatch.chdir(tmp_path)
    peer = _peer.Peer(sys.executable, "peer.py", {"threads": 2})
    peer.close()
    assert peer.ready["got"] == {"threads": 2}
    assert not (peer.ready["at"] or "").startswith(str(tmp_path))


def test_the_peer_gets_every_weight_in_the_layout_of_a_linear_layer():
    model = ds.llama(TINY)
    params = models.init(model, jax.random.key(0))
    arrays = ds.torch_arrays(TINY, params)
    assert sum(x.size for x in arrays.values()) == sum(x.size for x in jax.tree.leaves(params))
    x_D = np.random.default_rng(0).normal(size=16).astype(np.float32)
    q_DNH = params["blocks"]["attention"]["q_DNH"][1]
    np.testing.assert_allclose(arrays["model.layers.1.self_attn.q_proj.weight"] @ x_D,
                               np.einsum("D,DNH->NH", x_D, q_DNH).reshape(-1), rtol=1e-5)
    o_NHD = params["blocks"]["attention"]["o_NHD"][0]
    np.testing.assert_allclose(arrays["model.layers.0.self_attn.o_proj.weight"] @ x_D,
                               np.einsum("NH,NHD->D", x_D.reshape(4, 4), o_NHD), rtol=1e-5)


def side(tokens, seconds):
    return ds.Side("side", lambda prompts, new: (seconds, tokens))


def test_other_tokens_are_not_timed_and_turns_alternate():
    same = compare = [[1, 2, 3]]
    with pytest.raises(UserError, match="only 33% of the tokens agree"):
        ds.compare([side(same, 1.0), side([[1, 5, 6]], 2.0)], [[0]], 3, 2)
    assert ds.compare([side(same, 1.0), side(compare, 2.0)], [[0]], 3, 2) == [[1.0, 1.0],
                                                                             [2.0, 2.0]]
    assert ds._ratio([[1.0, 2.0, 1.0], [4.0, 6.0, 2.0]]) == "3.0x [2.0..4.0]"


def test_the_model_is_a_llama():
    cfg = ds.llama(TINY).cfg
    assert (cfg.mlp, cfg.norm, cfg.positions, cfg.embeddings) == ("swiglu", "rms", "rope", "untied")
    assert decode.init_cache(ds.llama(TINY), 1, 4).places == 4
