"""Argument checks of `attend`: a wrong argument is named, with the shapes on both sides."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.attention._bias import Bias
from tx_jax.attention._dropout import Dropout
from tx_jax.attention.scores import ScoreFunction
from tx_jax.errors import UserError
from tx_jax.masks import Mask, check_mask


def check_qkv(q: jax.Array, k: jax.Array, v: jax.Array | None = None) -> None:
    """Raise UserError unless queries, keys and values fit together."""
    arrays = {"q_BTNH": q, "k_BSKH": k} | ({} if v is None else {"v_BSKH": v})
    shapes = " and ".join(f"{name} {tuple(a.shape)}" for name, a in arrays.items())
    if any(a.ndim != 4 for a in arrays.values()):
        raise UserError(f"attention takes arrays of rank 4, not {shapes}; the axes are batch, "
                        "length, head, width.")
    if len({a.dtype for a in arrays.values()}) > 1 or not jnp.issubdtype(q.dtype, jnp.floating):
        raise UserError("queries, keys and values must share one floating-point dtype, not "
                        f"{', '.join(str(a.dtype) for a in arrays.values())}; cast them first.")
    if len({a.shape[0] for a in arrays.values()}) > 1:
        raise UserError(f"the batch sizes of {shapes} differ; they must be equal.")
    if v is not None and k.shape[1:3] != v.shape[1:3]:
        raise UserError(f"keys and values differ in length or heads: {shapes}; they must be equal.")
    if q.shape[3] != k.shape[3]:
        raise UserError(f"queries and keys differ in width: {shapes}; they must be equal.")
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise UserError(f"{q.shape[2]} query heads are not a multiple of {k.shape[2]} key heads "
                        f"({shapes}); change one of them.")


def _kind(value: Any) -> str:
    """What a value is, in a few words on one line."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"an array of {value.dtype} {tuple(value.shape)}"
    return repr(value) if isinstance(value, (str, int, float)) else type(value).__name__


def check_bias(bias: Any, shape_BNTS: tuple[int, ...]) -> jax.Array | Bias | None:
    """A bias function, or the bias as a rank-4 array that broadcasts to [B, N, T, S]."""
    if bias is None:
        return None
    if isinstance(bias, Bias):
        bias.check(*shape_BNTS)
        return bias
    if isinstance(bias, np.ndarray):
        bias = jnp.asarray(bias)
    if not isinstance(bias, jax.Array) or not jnp.issubdtype(bias.dtype, jnp.floating):
        raise UserError(f"bias must be a floating-point array, not {_kind(bias)}; give True/False "
                        "masks as mask and functions as Bias(function, params).")
    fits = len(bias.shape) <= 4 and all(
        b in (1, full) for b, full in zip(bias.shape[::-1], shape_BNTS[::-1], strict=False))
    if not fits:
        raise UserError(f"bias has shape {tuple(bias.shape)}, which does not broadcast to "
                        f"(B, N, T, S) = {shape_BNTS}.")
    return bias.reshape((1,) * (4 - bias.ndim) + bias.shape)


def check_start(q_start: Any, B: int) -> Any:
    """q_start as None, a Python integer or an integer array, () or [B]; else UserError."""
    if q_start is None or isinstance(q_start, bool):
        bad = q_start is not None
    elif isinstance(q_start, (int, np.integer)):
        q_start, bad = int(q_start), not -2**30 < q_start < 2**30
    else:
        bad = (not isinstance(q_start, (jax.Array, np.ndarray))
               or not jnp.issubdtype(q_start.dtype, jnp.integer)
               or tuple(q_start.shape) not in ((), (B,)))
    if bad:
        raise UserError(f"q_start {_kind(q_start)} must be one integer below 2^30, or an integer "
                        f"array with one per example ({B},).")
    return q_start if q_start is None or isinstance(q_start, int) else jnp.asarray(q_start)


def check_softcap(softcap: Any) -> Any:
    """The cap as None, a Python float or a floating-point scalar array; else UserError."""
    if softcap is None:
        return None
    if isinstance(softcap, jax.Array):
        if softcap.ndim or not jnp.issubdtype(softcap.dtype, jnp.floating):
            raise UserError(f"softcap {_kind(softcap)} must be one floating-point number.")
        return softcap
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float, np.number)) or not (
            math.isfinite(softcap) and softcap > 0):
        raise UserError(f"softcap {softcap!r} must be a number above 0, or None for no cap.")
    return float(softcap)


def check_options(*, mask: Mask | None, score: ScoreFunction, score_params: Any, dropout: Any,
                  sink: Any, head_width: Any, sizes: tuple[int, ...]) -> None:
    """Raise UserError at the first option that cannot be meant; sizes are B, N, T, S and H."""
    B, N, T, S, H = sizes
    if not H:
        raise UserError("queries and keys have heads of width 0; give at least 1 column.")
    if head_width is not None and (isinstance(head_width, bool) or not isinstance(head_width, int)
                                   or head_width < 1):
        raise UserError(f"head_width {head_width!r} must be a whole number above 0.")
    if mask is not None:
        check_mask(mask, T, S)
        for name in ("q_segments_BT", "k_segments_BS", "prefix_B", "k_lengths_B"):
            array = getattr(mask, name)
            if array is not None and array.shape[0] not in (1, B):
                raise UserError(f"{name} of the mask has shape {tuple(array.shape)} but the batch "
                                f"has {B} examples.")
    _check_score(score, score_params or {}, N, H)
    if dropout is not None:
        if not isinstance(dropout, Dropout):
            raise UserError(f"dropout must be Dropout(rate, seed), not {_kind(dropout)}.")
        dropout.check()
    check_sink(sink, N)


def check_sink(sink: Any, N: int) -> None:
    """Raise UserError unless the sink has a logit per query head."""
    if sink is not None and (not isinstance(sink, (jax.Array, np.ndarray))
                             or tuple(sink.shape) != (N,)):
        raise UserError(f"sink {_kind(sink)} must be an array ({N},): one logit per query head.")


def _check_score(score: ScoreFunction, params: Any, N: int, H: int) -> None:
    expected = jax.eval_shape(lambda key: score.init(key, {"N": N, "H": H}), jax.random.key(0))
    for name, spec in sorted(expected.items()):
        if name not in params:
            raise UserError(f"the score '{score.name}' needs its parameter {name}; make them "
                            "with make_score(...).init(key, sizes) and give them as score_params.")
        if tuple(jnp.shape(params[name])) != spec.shape:
            raise UserError(f"the parameter {name} of the score '{score.name}' has shape "
                            f"{tuple(jnp.shape(params[name]))} but must be {spec.shape} for {N} "
                            f"heads of width {H}.")
