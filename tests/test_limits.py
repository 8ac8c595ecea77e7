"""Closed forms of memory and operations against real caches, weights and programs."""

import math

import jax
import pytest

from experiments._decoding import counted_flops, generation_memory, model_of
from experiments.kv_cache import Settings
from tx_jax import decode, limits, models
from tx_jax.cache import empty_cache, places_of
from tx_jax.config import ModelConfig
from tx_jax.errors import UserError
from tx_jax.limits import Fit, cache_bytes, largest_batch, largest_context, predict, weight_bytes

KIB, GIB = 2**10, 2**30
LLAMA_1 = ModelConfig(layers=32, d_model=4096, heads=32, dtype="bfloat16")
LLAMA_3 = ModelConfig(layers=32, d_model=4096, heads=32, kv_heads=8, dtype="bfloat16")


@pytest.mark.parametrize(("cfg", "size", "expected"), [
    (LLAMA_1, 1, 512 * KIB), (LLAMA_1, 4096, 2 * GIB), (LLAMA_3, 1, 128 * KIB),
    (LLAMA_3, 8192, GIB), (LLAMA_3, 128 * KIB, 16 * GIB)])
def test_known_models_take_the_bytes_they_are_known_for(cfg, size, expected):
    """16-bit caches of models of 7B and 8B."""
    assert cache_bytes(cfg, 1, size) == expected


@pytest.mark.parametrize("kind", ["model", "int8"])
@pytest.mark.parametrize("options", [
    {}, {"kv_heads": 1, "layers": 3}, {"kv_heads": 2, "head_dim": 24}, {"dtype": "bfloat16"},
    {"mask": "causal & window(8)"}, {"mask": "causal & window(64)"},
    {"mask": "causal & (window(8) | global(2))"}], ids=str)
def test_cache_bytes_are_those_of_a_cache(options, kind):
    cfg = ModelConfig(**{"layers": 2, "d_model": 32, **options})
    cache = empty_cache(cfg, 3, 20, kind)
    assert cache_bytes(cfg, 3, 20, kind) == cache.nbytes
    assert places_of(cfg, 20) == cache.places


@pytest.mark.parametrize("options", [
    {}, {"embeddings": "untied", "mlp": "swiglu", "norm": "layer", "positions": "learned"},
    {"score": "qk_norm", "norm_position": "sandwich", "kv_heads": 2},
    {"score": "bilinear", "positions": "fire", "mlp": "none"},
    {"variant": "differential", "positions": "transformer_xl"}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weight_bytes_are_those_of_the_unstacked_tree(options, dtype):
    model = models.build(ModelConfig(layers=2, d_model=32, dtype=dtype, **options), 19, 12)
    shapes = jax.eval_shape(lambda: decode.unstack(model, models.init(model, jax.random.key(0))))
    assert weight_bytes(model) == sum(math.prod(x.shape) * x.dtype.itemsize
                                      for x in jax.tree.leaves(shapes))
    matrices = sum(leaf.size for path, leaf in jax.tree_util.tree_flatten_with_path(shapes)[0]
                   if path[-1].key in ("q_DNH", "k_DKH", "v_DKH", "o_NHD", "up_DF", "down_FD",
                                       "gate_DF", "head_DV"))
    assert limits.products(model) == matrices


@pytest.mark.parametrize("arm", ["no_cache", "mha", "mqa", "window"])
def test_operations_are_what_xla_counts(arm):
    """Within 15 %, and from below: norms and softmax come on top."""
    settings = Settings(layers=2, d_model=64, window=32)
    model = model_of(settings, arm, 128)
    formula = limits.flops_per_token(model, 128, cached=arm != "no_cache")
    assert 0.85 < formula / counted_flops(settings, arm, 128) < 1


def test_operations_by_hand():
    model = models.build(ModelConfig(layers=3, d_model=8, heads=2, kv_heads=1, d_ff=10,
                                     mask="causal & window(5)"), 7, 64)
    weights = 3 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 2 * 8 * 10) + 7 * 8
    assert limits.flops_per_token(model, 4) == 2 * weights + 4 * 3 * 8 * 4
    assert limits.flops_per_token(model, 40) == 2 * weights + 4 * 3 * 8 * 5
    assert limits.flops_per_token(model, 40, cached=False) == 40 * (2 * weights + 4 * 3 * 8 * 40)


TINY = models.build(ModelConfig(layers=2, d_model=16, heads=2), 11, 50)


@pytest.mark.parametrize("chunk", [0, 4])
def test_the_largest_that_fits_is_found(chunk):
    """Against trying one after another."""
    for device in (10_000, 60_000, 123_456):
        n = largest_context(TINY, device, 2, chunk=chunk).holds
        assert n == max((i for i in range(1, 400) if predict(TINY, 2, i, chunk=chunk).total
                         <= device), default=0)
        rows = largest_batch(TINY, device, 16, chunk=chunk).holds
        assert rows == max((i for i in range(1, 99) if predict(TINY, i, 16, chunk=chunk).total
                            <= device), default=0)
    assert n > 20 and rows > 2


def test_what_holds_is_told_from_what_is_defined_and_trained():
    learned = models.build(ModelConfig(layers=1, d_model=16, heads=2, positions="learned"), 11, 50)
    room = predict(TINY, 1, 60).total
    assert largest_context(TINY, 5_000).bound == "hardware"
    assert str(largest_context(TINY, 5_000)) == "the hardware does not hold a single token"
    small, large = largest_context(TINY, room - 8 * 256), largest_context(TINY, 10 * room)
    assert (small.holds < 60, large.bound, large.defined) == (True, "training", None)
    assert largest_context(learned, 10 * room).bound == "positions"
    assert largest_context(learned, 10 * room).defined == 50
    rows = largest_batch(learned, 10 * room, 40)
    assert rows.bound == "hardware" and "rows of 40 tokens" in str(rows)
    assert "any position, the model was trained on 50 tokens" in str(large)
    assert Fit(9, "token", 9, 20, 10).bound == "hardware"
    assert Fit(30, "token", 30, 20, 10).bound == "training"


def test_a_bigger_request_takes_more():
    base = predict(TINY, 2, 64)
    assert base.total == base.weights + base.cache + base.work
    for other in (predict(TINY, 4, 64), predict(TINY, 2, 128), predict(TINY, 2, 64, chunk=0)):
        assert other.total >= base.total
    assert predict(TINY, 2, 64, "int8").cache < base.cache


@pytest.mark.slow
@pytest.mark.parametrize(("arm", "batch", "chunk"), [
    ("mha", 1, 0), ("mha", 2, 64), ("mqa", 4, 64), ("window", 1, 64), ("int8", 2, 64)])
def test_the_prediction_is_what_xla_plans(arm, batch, chunk):
    """Within 10 % of arguments, results and temporaries of the compiled generation."""
    settings = Settings(layers=2, d_model=64, heads=2, window=128, groups=1)
    model, kind = model_of(settings, arm, 1024), decode_kind(arm)
    planned = generation_memory(model, batch, 1024, kind, chunk)
    # Without chunks the compiled generation reads its whole prompt, half of the context.
    assert predict(model, batch, 1024, kind, chunk or 512).total == pytest.approx(planned, rel=0.1)


def decode_kind(arm):
    return "int8" if arm == "int8" else "model"


def test_this_machine_and_the_table_have_memory():
    assert limits.device_bytes("this") > 2**28
    assert limits.device_bytes("H200") == 141 * 10**9


@pytest.mark.parametrize(("call", "words"), [
    (lambda: limits.device_bytes("H20"), "the device 'H20' is unknown, did you mean 'H200'?"),
    (lambda: cache_bytes(TINY.cfg, 1, 8, "int4"), "'int4' is unknown; choose from model, int8"),
    (lambda: predict(TINY, 0, 8), "batch=0 must be a whole number of at least 1"),
    (lambda: predict(TINY, 1, 8, chunk=-1), "chunk=-1 must be a whole number of at least 0"),
    (lambda: largest_context(TINY, 1.5), "device_bytes=1.5 must be a whole number"),
    (lambda: largest_batch(TINY, 10**6, True), "size=True must be")])
def test_a_mistake_is_one_sentence(call, words):
    with pytest.raises(UserError) as error:
        call()
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("solve", ["context", "batch"])
def test_the_largest_is_the_largest_where_the_prediction_falls_in_between(solve):
    """`auto` leaves the reference at some size, and from there on needs less."""
    model = models.build(ModelConfig(layers=4, d_model=128, heads=4), 256, 1024)
    sizes, weights = range(100, 700) if solve == "context" else range(1, 40), weight_bytes(model)

    def total(batch, size):
        return weights + cache_bytes(model.cfg, batch, size) + limits.work_bytes(
            model, batch, size, "model", limits.CHUNK)

    need = {n: total(1, n) if solve == "context" else total(n, 100) for n in sizes}
    found = largest_context if solve == "context" else (
        lambda m, room: largest_batch(m, room, 100))
    falls = [n for n in list(sizes)[1:] if need[n] < need[n - 1]]
    assert falls, "the case this test is for"
    for room in {need[n - 1] - 1 for n in falls} | {need[n] for n in falls} | {need[sizes[3]]}:
        assert found(model, room).holds == max(n for n in sizes if need[n] <= room)
