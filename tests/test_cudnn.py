"""cuDNN attention without a GPU: what it refuses, which flags it sets, what is handed to CUDA."""

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn_jax

from tx_jax.attention import Bias, Dropout, attend, cudnn, implementations, request_of, resolve
from tx_jax.attention.scores import make_score
from tx_jax.errors import UserError
from tx_jax.masks import Causal, Full, Mask, Prefix, Window, dense_mask

Q = jnp.ones((2, 6, 4, 16), jnp.bfloat16)
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 0], [0, 1, 1, 1, 1, 1]])


def request(q=Q, v=Q, **options):
    return replace(request_of(q, q[:, :, :2], v[:, :, :2], **options), platform="cuda")


def test_a_cpu_is_refused_with_what_it_needs():
    with pytest.raises(UserError, match=r"'cudnn' cannot do the device cpu \(it needs an NVIDIA "
                                        r"GPU\); use --model.attention=blockwise"):
        attend(Q, Q, Q, implementation="cudnn")
    assert resolve(["cudnn", "blockwise"], request_of(Q, Q, Q))[0] == "blockwise"
    assert resolve("cudnn", request())[0] == "cudnn"


@pytest.mark.parametrize("options, says", [
    ({"q": Q.astype(jnp.float32)}, "float32 (it takes bfloat16 and float16)"),
    ({"v": jnp.ones((2, 6, 4, 136), jnp.bfloat16)}, "heads of width 136 (it takes up to 128)"),
    ({"bias": jnp.zeros((6, 6))}, "a dense bias"), ({"bias": Bias(max)}, "a bias function"),
    ({"softcap": 3.0}, "a soft cap"), ({"sink": jnp.zeros(4)}, "sinks"),
    ({"dropout": Dropout(0.1, jnp.uint32(0))}, "dropout"),
    ({"scale": jnp.float32(1)}, "a traced scale"), ({"scale": "log_n(4)"}, "a scale per row"),
    ({"score": "additive"}, "a score that is not a dot product")])
def test_what_cudnn_cannot_do_is_named(options, says):
    missing = implementations()["cudnn"].lacks(request(**options))
    assert len(missing) == 1 and missing[0].startswith(says)


@pytest.mark.parametrize("options", [
    {}, {"mask": Causal() & Window(3)}, {"mask": ~Prefix(2)}, {"q": Q.astype(jnp.float16)},
    {"mask": Mask(Causal(), SEGMENTS, SEGMENTS)}, {"mask": Mask(Full(), k_lengths_B=jnp.ones(2))},
    {"q_start": jnp.int32(3)}])
def test_what_cudnn_can_do(options):
    assert not implementations()["cudnn"].lacks(request(**options))


@pytest.mark.parametrize("platform, can", [("cpu", False), ("tpu", False), ("rocm", False),
                                           ("cuda", True)])
def test_only_nvidia_will_do(platform, can):
    asked = replace(request_of(Q, Q, Q), platform=platform)
    assert (not implementations()["cudnn"].lacks(asked)) == can


def meaning(flags, T, S):
    """The table [T, S] that jax.nn documents for its flags: aligned at key 0."""
    q, k = np.arange(T)[:, None], np.arange(S)[None, :]
    allowed = k <= q if flags.get("is_causal") else np.ones((T, S), bool)
    if "local_window_size" in flags:
        left, right = flags["local_window_size"]
        allowed = allowed & (k >= q - left) & (k <= q + right if right else True)
    return allowed


@pytest.mark.parametrize("rule", [Full(), Causal(), Window(1), Window(3), Causal() & Window(2),
                                  Window(4) & Causal(), Window(3) & Window(2), Window(99)])
def test_flags_mean_the_mask(rule):
    flags = cudnn.own_flags(Mask(rule), 6, 6, None)
    np.testing.assert_array_equal(meaning(flags, 6, 6), dense_mask(rule, 6, 6)[0])
    if rule != Full():
        assert cudnn.own_flags(Mask(rule), 4, 6, None) is None
        assert cudnn.own_flags(Mask(rule), 6, 6, 1) is None
        assert cudnn.own_flags(Mask(rule), 6, 6, jnp.int32(0)) is None
    assert cudnn.own_flags(Mask(rule, SEGMENTS, SEGMENTS), 6, 6, None) is None
    assert cudnn.own_flags(Mask(rule, k_lengths_B=jnp.ones(2, int)), 6, 6, None) is None


@pytest.mark.parametrize("rule", [Causal() | Prefix(2), ~Causal(), Causal() & Prefix(2)])
def test_other_rules_become_tables(rule):
    assert cudnn.own_flags(Mask(rule), 6, 6, None) is None


# What reaches CUDA, seen in the lowered program.

@pytest.fixture
def lowered(monkeypatch):
    """The StableHLO for CUDA of values and gradients; only the version of cuDNN is made up."""
    monkeypatch.setattr(cudnn_jax, "check_cudnn_version", lambda: 91000)

    def lower(q, k, v, **options):
        call = dict(mask=None, bias=None, score=make_score("scaled_dot"), score_params={},
                    scale=0.25, softcap=None, dropout=None, sink=None, q_start=None) | options

        def loss(q, k, v):
            out = cudnn.attend(q, k, v, **call)
            assert out.shape == (*q.shape[:3], v.shape[3]) and out.dtype == v.dtype
            return jnp.sum(out.astype(jnp.float32))

        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, v)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    return lower


def configs(text):
    """(target, configuration) of the forward and the backward custom call."""
    found = re.findall(r'custom_call @(__cudnn\$\w+)\(.*?backend_config = "(.*?[^\\])"', text)
    return [(name, json.loads(config.replace("\\22", '"').replace('\\"', '"'))
             ["cudnn_fmha_backend_config"]) for name, config in found]


@pytest.mark.parametrize("mask, kind, window", [
    (None, "NO_MASK", 0), (Mask(Causal()), "CAUSAL", 0), (Mask(Causal() & Window(3)), "CAUSAL", 3)])
@pytest.mark.parametrize("T, H, V", [(6, 16, 16), (5, 12, 3)])
def test_plain_masks_reach_cuda_as_flags(lowered, mask, kind, window, T, H, V):
    q, v = jnp.ones((2, T, 4, H), jnp.bfloat16), jnp.ones((2, T, 2, V), jnp.bfloat16)
    (forward, config), (backward, _) = configs(lowered(q, q[:, :, :2], v, mask=mask))
    table = "ScaleBias" if mask is None and T % 2 else ""  # hides the key that evens the length
    assert (forward, backward) == (f"__cudnn$fmha{table}Softmax",
                                   f"__cudnn$fmha{table}SoftmaxBackward")
    assert config["mask_type"] == kind and config["sliding_window_length"] == window
    assert config["fmha_scale"] == 0.25 and config["dropout_rate"] == 0


@pytest.mark.parametrize("mask, T, S, q_start", [
    (Mask(Causal()), 4, 6, None), (Mask(Causal()), 6, 4, None), (Mask(Causal()), 5, 5, 1),
    (Mask(Causal(), SEGMENTS[:, :5], SEGMENTS[:, :5]), 5, 5, None),
    (Mask(Full(), k_lengths_B=jnp.array([3, 0])), 5, 7, None)])
def test_other_masks_reach_cuda_as_tables_of_even_sides(lowered, mask, T, S, q_start):
    q, k = jnp.ones((2, T, 4, 8), jnp.float16), jnp.ones((2, S, 4, 8), jnp.float16)
    (forward, config), (backward, _) = configs(lowered(q, k, k, mask=mask, q_start=q_start))
    assert (forward, backward) == ("__cudnn$fmhaScaleBiasSoftmax",
                                   "__cudnn$fmhaScaleBiasSoftmaxBackward")
    assert config["mask_type"] == "NO_MASK"
    sides = config["intermediate_tensor_shape"]["dimensions"][2:]
    assert sides == [str(T + T % 2), str(S + S % 2)]


@pytest.mark.parametrize("mask, T, S, q_start", [
    (None, 4, 6, None), (None, 5, 7, None), (Mask(Causal() & Window(2)), 5, 5, None),
    (Mask(Causal()), 5, 3, None),
    (Mask(Causal()), 3, 5, 1), (Mask(Causal(), SEGMENTS, SEGMENTS), 6, 6, None),
    (Mask(Full(), k_lengths_B=jnp.array([3, 0])), 5, 7, None)])
def test_around_the_kernel_everything_is_the_contract(monkeypatch, mask, T, S, q_start, key):
    """Padding, tables and empty rows, with XLA in the place of cuDNN."""
    original = jax.nn.dot_product_attention

    def stand_in(q, k, v, *, implementation, **options):
        high = [x.astype(jnp.float32) for x in (q, k, v)]
        return original(*high, implementation="xla", **options).astype(v.dtype)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    keys = jax.random.split(key, 3)
    q = jax.random.normal(keys[0], (2, T, 4, 12), jnp.float16)
    k = jax.random.normal(keys[1], (2, S, 2, 12), jnp.float16)
    v = jax.random.normal(keys[2], (2, S, 2, 5), jnp.float16)
    poison = jnp.zeros((2, S, 1, 1), jnp.float16)
    if mask is not None and mask.q_segments_BT is not None:
        poison = jnp.where(SEGMENTS[..., None, None] == 0, jnp.nan, poison)

    def call(implementation, bad):
        def loss(q, k, v):
            out = attend(q, k + bad, v + bad, mask=mask, q_start=q_start,
                         implementation=implementation)
            return jnp.sum(jnp.sin(out.astype(jnp.float32))), out
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)

    (_, out), grads = call(cudnn.attend, poison)
    (_, expected), expected_grads = call("reference", jnp.zeros_like(poison))
    np.testing.assert_allclose(out, expected, atol=2e-3)
    for a, b in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-2)
