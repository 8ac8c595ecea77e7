"""Every pair of options of the attention contract, values and gradients, against loops."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention_loops import PAIRS, make_call, slow_attend, split
from tx_jax.attention import (
    attend,
    implementations,
    request_of,
)
from tx_jax.errors import UserError

NAMES = sorted(name for name, can in implementations().items() if not can.platforms)


def run(args, options, implementation=None):
    """Output and gradients to q, k, v, bias, sink and score parameters, compiled as one."""
    arrays, rest = split(args, options, jnp.float32)

    def loss(arrays):
        out = attend(*arrays["args"], **arrays["options"], **rest, implementation=implementation)
        weight = jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape)
        return jnp.sum(out * weight), out

    grads, out = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    return out, grads


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_every_pair_of_options_gives_the_loops_of_the_contract(number):
    args, options = make_call(PAIRS[number], seed=number)
    with jax.enable_x64():
        arrays, rest = split(args, options, jnp.float64)
        out = jax.jit(lambda arrays: attend(*arrays["args"], **arrays["options"], **rest))(arrays)
        assert out.dtype == jnp.float64
    # The factor of log_n is float32 in every precision.
    atol = 1e-6 if options["scale"] == "log_n(2)" else 1e-12
    np.testing.assert_allclose(out, slow_attend(*args, **options), atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_gradients_of_every_pair_of_options(number):
    """Float32 gradients against central differences of the loops, along random directions."""
    args, options = make_call(PAIRS[number], seed=number)
    out, all_grads = run(args, options)
    arg_grads, traced_grads = all_grads["args"], all_grads["options"]
    np.testing.assert_allclose(out, slow_attend(*args, **options), atol=5e-6)
    weight = np.cos(np.arange(out.size)).reshape(out.shape)
    traced = {n: options[n] for n in traced_grads}
    rng, step = np.random.default_rng(1), 1e-4
    for grads, values, rebuild in (
            (arg_grads, args, lambda new: (new, options)),
            (traced_grads, traced, lambda new: (args, options | new))):
        leaves, tree = jax.tree.flatten(values)
        for i, grad in enumerate(jax.tree.leaves(grads)):
            direction = rng.normal(size=leaves[i].shape)
            sides = []
            for sign in (1, -1):
                moved = list(leaves)
                moved[i] = np.float64(leaves[i]) + sign * step * direction
                a, o = rebuild(jax.tree.unflatten(tree, moved))
                sides.append(np.sum(slow_attend(*a, **o) * weight))
            slope = (sides[0] - sides[1]) / (2 * step)
            np.testing.assert_allclose(np.sum(np.float64(grad) * direction), slope, atol=2e-4)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "reference"])
@pytest.mark.parametrize("number", range(0, len(PAIRS), 6))
def test_other_implementations_agree_or_refuse(name, number):
    args, options = make_call(PAIRS[number], seed=number)
    request = request_of(*args, **{n: o for n, o in options.items() if n != "score_params"})
    if implementations()[name].lacks(request):
        with pytest.raises(UserError, match=f"'{name}' cannot do .*attention=blockwise"):
            run(args, options, name)
        clean = {n: None for n in ("softcap", "sink", "dropout")}
        simple = PAIRS[number] | clean | {"v_width": 4, "score": "scaled_dot"}
        args, options = make_call(simple, seed=number)
    out, grads = run(args, options, name)
    expected, expected_grads = run(args, options, "reference")
    np.testing.assert_allclose(out, expected, atol=2e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6), grads, expected_grads)
