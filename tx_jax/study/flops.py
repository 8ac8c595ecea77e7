"""Floating-point operations of a function, counted from its traced program."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

_FREE = frozenset(
    "broadcast_in_dim reshape transpose squeeze slice dynamic_slice dynamic_update_slice gather "
    "concatenate pad rev copy convert_element_type bitcast_convert_type iota stop_gradient "
    "split random_wrap random_unwrap random_seed random_split random_fold_in random_bits "
    "threefry2x32 copy_p device_put optimization_barrier sharding_constraint".split())


def count_flops(fn: Callable[..., Any], *args: Any) -> int:
    """Count the operations of `fn(*args)`: 2 per multiply-add, 1 per other arithmetic result.

    Unlike XLA's own analysis, a scan counts its body once per iteration. A `while` with an unknown
    trip count counts its body once; of the branches of a `cond` the dearest counts; data movement
    and random bits are free. Nothing is compiled or run; `args` may be `ShapeDtypeStruct`s.
    """
    return _count(jax.make_jaxpr(fn)(*args).jaxpr)


def _count(jaxpr: Jaxpr) -> int:
    return sum(_equation(eqn) for eqn in jaxpr.eqns)


def _equation(eqn: Any) -> int:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contract, _), _ = params["dimension_numbers"]
        lhs = eqn.invars[0].aval.shape
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[i] for i in contract)
    if name == "conv_general_dilated":
        kernel, out = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
        features = kernel[params["dimension_numbers"].rhs_spec[0]]
        return 2 * math.prod(out) * math.prod(kernel) // features
    inner = list(_jaxprs(params))
    if inner:
        if name == "cond":
            return max(_count(j) for j in inner)
        times = params["length"] if name == "scan" else 1
        if name == "pallas_call":
            times = math.prod(params["grid_mapping"].grid)
        return times * sum(_count(j) for j in inner)
    if name in _FREE:
        return 0
    sizes = (math.prod(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars))
    reduces = name.startswith(("reduce_", "cum", "arg", "sort"))
    return max(sizes) if reduces else sum(
        math.prod(getattr(v.aval, "shape", ())) for v in eqn.outvars)


def _jaxprs(value: Any) -> Iterator[Jaxpr]:
    """Every program nested in the parameters of an equation (branches, loop bodies, calls)."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _jaxprs(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _jaxprs(item)
