"""Checkpoints: other devices, damage, a full disk, mismatched configurations, paths."""

import dataclasses
import json
import os
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from tx_jax import letters, optim, sharding
from tx_jax.checkpoint import Checkpoints
from tx_jax.config import OptimConfig
from tx_jax.errors import UserError
from tx_jax.train import TrainState

CONFIG = {"--model": {"d_model": 8, "betas": [1, 2]}, "text": "abc"}


def make_state(step=4, width=8):
    rng = np.random.default_rng(step)
    params = {"embed_VD": jnp.asarray(rng.normal(size=(6, width)), jnp.float32),
              "blocks": {"up_DF": jnp.asarray(rng.normal(size=(2, width, 16)), jnp.float32)}}
    opt_state = optim.make_optimizer(OptimConfig(), 1, params).init(params)
    return TrainState(jnp.asarray(step, jnp.int32), params, opt_state, jax.random.key(step))


def placed(state, spec):
    """(the state on a mesh, or on device 0 for None; its shapes with shardings)."""
    if spec is None:
        places = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), state)
    else:
        mesh = sharding.make_mesh(spec)
        whole = NamedSharding(mesh, PartitionSpec())
        places = jax.tree.map(lambda _: whole, state)
        params = jax.tree.map(lambda p: NamedSharding(mesh, p), letters.param_specs(
            state.params, mesh), is_leaf=lambda x: isinstance(x, PartitionSpec))
        places = dataclasses.replace(places, params=params)
    like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state,
                        places)
    return jax.device_put(state, places), like


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("before, after", [
    ("data:2,fsdp:2,tensor:2", None), ("data:2,fsdp:2,tensor:2", "tensor:2"),
    ("data:2,fsdp:2,tensor:2", "fsdp:4,tensor:2"), (None, "data:2,fsdp:2,tensor:2"), (None, None)])
def test_restores_onto_other_devices(tmp_path, before, after):
    """T7: same values, the shardings of the new mesh, the same tree and key."""
    state, _ = placed(make_state(), before)
    Checkpoints(tmp_path).save(state, {"next": 4}, CONFIG)
    _, like = placed(make_state(), after)
    restored = Checkpoints(tmp_path).restore(like, CONFIG, pytest.fail)
    assert_equal(restored.state, make_state())
    assert restored.data_state == {"next": 4} and restored.step == 4
    for leaf, wanted in zip(jax.tree.leaves(restored.state.params), jax.tree.leaves(like.params),
                            strict=True):
        assert leaf.sharding == wanted.sharding


def test_the_newest_two_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path / "new" / "folder")
    _, like = placed(make_state(), None)
    assert checkpoints.restore(like, CONFIG, pytest.fail) is None
    for step in (2, 4, 6):
        checkpoints.save(make_state(step), None, CONFIG)
    assert checkpoints.steps() == [4, 6]
    assert checkpoints.restore(like, CONFIG, pytest.fail).step == 6


@pytest.mark.parametrize("harm", ["flip a byte", "truncate", "delete a file", "no record",
                                  "empty record"])
def test_damage_falls_back_and_says_so(tmp_path, harm):
    checkpoints = Checkpoints(tmp_path)
    for step in (2, 4):
        checkpoints.save(make_state(step), step, CONFIG)
    newest = tmp_path / "step_00000004"
    largest = max((p for p in (newest / "arrays").rglob("*") if p.is_file()),
                  key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    if harm == "flip a byte":
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
    elif harm == "truncate":
        largest.write_bytes(content[:-1])
    elif harm == "delete a file":
        largest.unlink()
    elif harm == "no record":
        (newest / "record.json").unlink()
    else:
        (newest / "record.json").write_text("{}")
    notices = []
    _, like = placed(make_state(), None)
    restored = checkpoints.restore(like, CONFIG, notices.append)
    assert_equal(restored.state, make_state(2))
    assert restored.data_state == restored.step == 2
    assert len(notices) == 1 and str(newest) in notices[0]
    # The next save goes on from the good one and drops the damaged one.
    checkpoints.save(make_state(3), 3, CONFIG)
    assert checkpoints.steps() == [2, 3]
    shutil.rmtree(tmp_path / "step_00000002" / "arrays")
    shutil.rmtree(tmp_path / "step_00000003" / "arrays")
    with pytest.raises(UserError, match="every checkpoint in .* is damaged"):
        checkpoints.restore(like, CONFIG, notices.append)


@pytest.mark.parametrize("change, words", [
    ({"--model": {"d_model": 16, "betas": [1, 2]}}, "--model.d_model=8, not --model.d_model=16"),
    ({"text": "xyz"}, "text=abc, not text=xyz"),
    ({"--model": {"d_model": 8, "betas": [1, 2], "new": 1}}, "new=None, not --model.new=1")])
def test_another_configuration_is_named(tmp_path, change, words):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make_state(), None, CONFIG)
    _, like = placed(make_state(), None)
    with pytest.raises(UserError, match=words):
        checkpoints.restore(like, CONFIG | change, pytest.fail)
    # Tuples and lists are the same to JSON.
    same = CONFIG | {"--model": {"d_model": 8, "betas": (1, 2)}}
    assert checkpoints.restore(like, same, pytest.fail).step == 4


# The library leaves closed event loops behind a failed write, which complain when collected.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_refuses_keeps_the_previous(tmp_path):
    """Files limited to 256 KiB by the system stand for a full disk."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make_state(2), 2, CONFIG)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, hard))
    try:
        with pytest.raises(UserError, match="step 4 could not be written .*step 2 is kept") as e:
            checkpoints.save(make_state(4, width=8192), 4, CONFIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(e.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]
    _, like = placed(make_state(), None)
    assert_equal(checkpoints.restore(like, CONFIG, pytest.fail).state, make_state(2))


def test_a_save_cut_short_leaves_nothing_in_the_way(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(make_state(2), 2, CONFIG)
    shutil.copytree(tmp_path / "step_00000002", tmp_path / "saving_00000004")
    _, like = placed(make_state(), None)
    assert checkpoints.restore(like, CONFIG, pytest.fail).step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def test_relative_and_home_paths(tmp_path, monkeypatch):
    """F4: relative paths, `~`, blanks and a trailing slash, seen from another directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    _, like = placed(make_state(), None)
    for spelled, other in (("runs/my run/", "~/runs/my run"), ("~/x", "./x")):
        Checkpoints(spelled).save(make_state(), None, CONFIG)
        assert Checkpoints(other).restore(like, CONFIG, pytest.fail).step == 4
    relative = Checkpoints("y")
    os.chdir("/")
    relative.save(make_state(), None, CONFIG)
    assert (tmp_path / "y" / "step_00000004").is_dir()


def test_the_record_names_versions(tmp_path):
    path = Checkpoints(tmp_path).save(make_state(), None, CONFIG)
    assert json.loads((path / "record.json").read_text())["versions"]["jax"] == jax.__version__
