"""Meshes from flags: the same loss and gradients as one device, and errors in one sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import make_params
from tx_jax import letters, models, sharding
from tx_jax.config import ModelConfig
from tx_jax.errors import UserError
from tx_jax.train import loss_and_grads

CFG = ModelConfig(layers=2, d_model=16, heads=4, kv_heads=2, remat="block")
V, T, B = 10, 8, 8


@pytest.fixture(scope="module")
def problem():
    model = models.build(CFG, V, T)
    params = make_params(model)
    tokens = jax.random.randint(jax.random.key(1), (B, T), 0, V, jnp.int32)
    batch = {"tokens_BT": tokens, "targets_BT": jnp.roll(tokens, -1, axis=1).at[:, -1].set(-1)}

    def step(params, batch):
        return loss_and_grads(model, params, batch, jax.random.key(0))

    return params, batch, step, jax.jit(step)(params, batch)


@pytest.mark.parametrize("spec", [
    *(pytest.param(s, marks=pytest.mark.slow) for s in
      ("data:8", "fsdp:8", "tensor:2", "fsdp:4,tensor:2")), "data:2,fsdp:2,tensor:2"])
def test_a_mesh_gives_the_loss_and_gradients_of_one_device(spec, problem):
    params, batch, step, (loss, grads, _) = problem
    mesh = sharding.make_mesh(spec)
    sharding.check_divides(mesh, CFG, B)
    placed = sharding.shard(params, letters.param_specs(params, mesh), mesh)
    with jax.set_mesh(mesh):
        rows = jax.device_put(batch, sharding.batch_spec(mesh))
        other, other_grads, _ = jax.jit(step)(placed, rows)
    np.testing.assert_allclose(other, loss, atol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_parameters_really_lie_apart(problem):
    params, *_ = problem
    mesh = sharding.make_mesh("data:2,fsdp:2,tensor:2")
    placed = sharding.shard(params, letters.param_specs(params, mesh), mesh)
    q_LDNH = placed["blocks"]["attention"]["q_DNH"]
    assert q_LDNH.shape == (2, 16, 4, 4)
    assert q_LDNH.addressable_shards[0].data.shape == (2, 8, 2, 4)


def test_an_odd_vocabulary_is_replicated():
    mesh = sharding.make_mesh("tensor:2,fsdp:2")
    spec = letters.param_specs({"embed_VD": jax.ShapeDtypeStruct((83, 16), jnp.float32)}, mesh)
    assert tuple(spec["embed_VD"]) == (None, "fsdp")


@pytest.mark.parametrize(("spec", "words"), [
    ("dat:2", "did you mean 'data'"), ("data:2,data:2", "twice"), ("data", "write it like"),
    ("data:0", "write it like"), ("data:16", "needs 16 devices but there are 8")])
def test_a_bad_mesh_is_one_sentence(spec, words):
    with pytest.raises(UserError, match=words):
        sharding.make_mesh(spec)


@pytest.mark.parametrize(("spec", "rows", "words"), [
    ("tensor:4", 8, "kv_heads=2"), ("data:8", 4, "rows per micro-batch=4"),
    ("fsdp:3", 6, "d_model=16")])
def test_a_mesh_that_does_not_divide_is_refused(spec, rows, words):
    with pytest.raises(UserError, match=words):
        sharding.check_divides(sharding.make_mesh(spec), CFG, rows)
