"""Values and gradients against the loops in float64, and the error that each dtype may make."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.conformance.loops import slow_attend
from tx_jax.conformance.options import (
    OPTIONS,
    Call,
    all_pairs,
    covers,
    join,
    make_call,
    sensible,
    split,
)
from tx_jax.conformance.subject import (
    EPSILON,
    Check,
    Failure,
    Skip,
    Subject,
    close,
    weights_of,
)
from tx_jax.dtypes import wide
from tx_jax.masks import Causal

Runner = Callable[..., tuple[Any, jax.Array]]


def make_runner(subject: Subject, static: dict[str, Any]) -> Runner:
    """Compile (slopes, traced) -> (gradients of a weighted sum of the output, output)."""
    def run(slopes, traced):
        def loss(slopes):
            args, options = join(slopes, traced, static)
            out = subject(*args, **options)
            high = wide(out.dtype)
            return jnp.sum(out.astype(high) * weights_of(out.shape).astype(high)), out
        return jax.grad(loss, has_aux=True)(slopes)
    return jax.jit(run)


def compare(subject: Subject, call: Call, dtype: Any, runner: Runner | None = None) -> None:
    """Raise Failure unless output and gradients of a call are those of the loops.

    Gradients are compared along a random direction with central differences; on a difference each
    array is tried alone, to name the one at fault.
    """
    dtype, plain = jnp.dtype(dtype), _to_numpy(call)
    slopes, traced, static = split(call, dtype)
    grads, out = (runner or make_runner(subject, static))(slopes, traced)
    args, options = plain
    # The factor of log_n is float32 in every precision.
    rough = 1e5 if dtype == jnp.float64 and str(options["scale"]).startswith("log_n") else 1.0
    if out.dtype != dtype:
        raise Failure(f"the output is {out.dtype} for inputs of {dtype}")
    close(out, slow_attend(*args, **options), "output", slack=rough)
    values, traced, static = split(call, np.float32)
    values, rng = jax.tree.map(np.float64, values), np.random.default_rng(1)
    directions = jax.tree.map(lambda x: rng.normal(size=x.shape), values)
    weight = np.asarray(weights_of(out.shape), np.float64)
    traced = _to_numpy(traced)

    def loss(values):
        args, options = join(values, traced, static)
        return np.sum(slow_attend(*args, **options) * weight)

    def side(directions, step):
        return loss(jax.tree.map(lambda x, d: x + step * d, values, directions))

    def off(grads, directions):
        slope = (side(directions, 1e-5) - side(directions, -1e-5)) / 2e-5
        terms = np.concatenate([np.ravel(np.float64(g) * d) for g, d in zip(
            jax.tree.leaves(grads), jax.tree.leaves(directions), strict=True)])
        limit = rough * EPSILON[dtype.name] * (1 + np.abs(terms).sum()) + 1e-9
        return "" if abs(terms.sum() - slope) <= limit else (
            f"slope {terms.sum():.6g} instead of {slope:.6g}")

    if off(grads, directions):
        raise Failure(_name_fault(off, grads, directions))


def _to_numpy(tree: Any) -> Any:
    """JAX arrays as NumPy ones, which Python loops read much faster."""
    return jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, tree)


def _name_fault(off: Callable[..., str], grads: Any, directions: Any) -> str:
    leaves, tree = jax.tree.flatten(directions)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(directions)]
    for i, path in enumerate(paths):
        alone = [d if i == j else 0 * d for j, d in enumerate(leaves)]
        if problem := off(grads, jax.tree.unflatten(tree, alone)):
            name = {"['args'][0]": "q", "['args'][1]": "k", "['args'][2]": "v"}.get(path, path)
            return f"gradient of {name}: {problem}"
    return f"gradient: {off(grads, directions)}"


def describe(choice: dict[str, Any]) -> str:
    """The options of a combination that are not plain, in short."""
    return ", ".join(f"{n}={choice[n]}" for n in choice
                     if n in ("heads", "lengths") or choice[n] != OPTIONS[n][0])


def compare_choice(subject: Subject, choice: dict[str, Any], seed: int,
                   runner: Runner | None = None, dtype: Any = None, **sizes: Any) -> None:
    """`compare` on random data of a combination of options; a Failure names the combination."""
    try:
        compare(subject, make_call(choice, seed, **sizes), dtype or choice["dtype"], runner)
    except Failure as failure:
        raise Failure(f"{failure} ({describe(choice)}, seed {seed})") from None


def option_pairs(subject: Subject, rows: slice = slice(None)) -> str:
    """Values and gradients of every pair of declared options equal loops in float64."""
    choices = all_pairs(subject.capabilities)[rows]
    for number, choice in enumerate(choices):
        compare_choice(subject, choice, number)
    return f"{len(choices)} combinations"


def random_choice(subject: Subject, rng: np.random.Generator) -> dict[str, Any]:
    """A random combination of declared options, with random lengths and heads."""
    choice: dict[str, Any] = {}
    for name in rng.permutation(list(OPTIONS)):
        values = OPTIONS[name]
        if name == "lengths":
            values = [tuple(int(x) for x in rng.integers(1, 10, 2))]
        elif name == "heads":
            K = int(rng.integers(1, 4))
            values = [(K * int(rng.integers(1, 4)), K)]
        able = [v for v in values if sensible(choice | {name: v})
                and covers(choice | {name: v}, subject.capabilities)]
        if not able:
            able = [OPTIONS[name][0]]
        choice[str(name)] = able[rng.integers(len(able))]
    return choice


def random_cases(subject: Subject, cases: int = 4, seed: int = 0) -> str:
    """Values and gradients of random options, shapes and data equal loops in float64."""
    rng = np.random.default_rng(seed)
    for case in range(cases):
        choice = random_choice(subject, rng)
        compare_choice(subject, choice, case, batch=int(rng.integers(1, 4)),
                       width=int(rng.integers(1, 9)), forbid=float(rng.choice([0, 0.3])))
    return f"{cases} cases"


def double_precision(subject: Subject) -> str:
    """Float64 inputs are computed in float64."""
    rows = [c for c in all_pairs(subject.capabilities) if c["dtype"] == "float32"][::7]
    with jax.enable_x64():
        for number, choice in enumerate(rows):
            compare_choice(subject, choice, number, dtype=jnp.float64)
    return f"{len(rows)} combinations"


def naive(q_BTNH: jax.Array, k_BSNH: jax.Array, v_BSNH: jax.Array, causal: bool = True
          ) -> jax.Array:
    """Textbook attention, every step in the dtype of its inputs."""
    logits = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSNH) * (q_BTNH.shape[3] ** -0.5)
    if causal:
        T, S = logits.shape[2:]
        logits = jnp.where(jnp.tril(jnp.ones((T, S), bool))[None, None], logits, -jnp.inf)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.einsum("BNTS,BSNH->BTNH", weights, v_BSNH)


def error_budget(subject: Subject, factor: float = 4.0) -> str:
    """Errors are at most 4 times those of textbook attention computed in the same dtype."""
    causal, seen = subject.can("causal"), []
    options = {"mask": Causal()} if causal else {}
    dtypes = [d for d in ("float32", "bfloat16", "float16")
              if covers({"dtype": d}, subject.capabilities)]

    def run(function, arrays):
        def both(*args):
            out, pull = jax.vjp(function, *args)
            return out, *pull(weights_of(out.shape).astype(out.dtype))
        return [np.asarray(x, np.float64) for x in jax.jit(both)(*arrays)]

    for dtype in dtypes:
        rng = np.random.default_rng(0)
        arrays = [jnp.asarray(rng.normal(size=(1, 64, 2, 16)), dtype) for _ in range(3)]
        with jax.enable_x64():
            exact = run(partial(naive, causal=causal), [x.astype(jnp.float64) for x in arrays])
        rough = run(partial(naive, causal=causal), arrays)
        ours = run(lambda *a: subject(*a, **options), arrays)
        for name, e, r, o in zip(("output", "dq", "dk", "dv"), exact, rough, ours, strict=True):
            budget, error = np.abs(r - e).max(), np.abs(o - e).max()
            if not error <= factor * budget:
                raise Failure(f"{name} in {dtype} is off by {error:.2g}, textbook attention by "
                              f"{budget:.2g}")
            seen.append(error / budget)
    if not seen:
        raise Skip("it declares no dtype that is known here")
    return f"at most {max(seen):.1f} times"


CHECKS = (Check(option_pairs), Check(random_cases), Check(double_precision, ("float64",)),
          Check(error_budget))
