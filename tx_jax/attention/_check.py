"""Argument checks of `attend`: a wrong argument is named, with the shapes on both sides."""

import math
from typing import Any

import jax
import jax.numpy as jnp

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
    if isinstance(value, jax.Array):
        return f"an array of {value.dtype} {tuple(value.shape)}"
    return repr(value) if isinstance(value, (str, int, float)) else type(value).__name__


def check_bias(bias: Any, shape_BNTS: tuple[int, ...]) -> jax.Array | Bias | None:
    """A bias function, or the bias as a rank-4 array that broadcasts to [B, N, T, S]."""
    if bias is None:
        return None
    if isinstance(bias, Bias):
        bias.check(shape_BNTS[0], *shape_BNTS[2:])
        return bias
    if not isinstance(bias, jax.Array) or not jnp.issubdtype(bias.dtype, jnp.floating):
        raise UserError(f"bias must be a floating-point array, not {_kind(bias)}; give True/False "
                        "masks as mask and functions as Bias(function, params).")
    fits = len(bias.shape) <= 4 and all(
        b in (1, full) for b, full in zip(bias.shape[::-1], shape_BNTS[::-1], strict=False))
    if not fits:
        raise UserError(f"bias has shape {tuple(bias.shape)}, which does not broadcast to "
                        f"(B, N, T, S) = {shape_BNTS}.")
    return bias.reshape((1,) * (4 - bias.ndim) + bias.shape)


def check_options(*, mask: Mask | None, score: ScoreFunction, score_params: Any, softcap: Any,
                  dropout: Any, sink: Any, q_start: Any, shape_BNTS: tuple[int, ...]) -> None:
    """Raise UserError at the first option that cannot be meant."""
    B, N, T, S = shape_BNTS
    if mask is not None:
        check_mask(mask, T, S)
        for name in ("q_segments_BT", "k_segments_BS", "prefix_B", "k_lengths_B"):
            array = getattr(mask, name)
            if array is not None and array.shape[0] not in (1, B):
                raise UserError(f"{name} of the mask has shape {tuple(array.shape)} but the batch "
                                f"has {B} examples.")
    expected = jax.eval_shape(lambda key: score.init(key, {"N": N, "H": 1}), jax.random.key(0))
    missing = sorted(set(expected) - set(score_params or {}))
    if missing:
        raise UserError(f"the score '{score.name}' needs its parameter {missing[0]}; make them "
                        "with make_score(...).init(key, sizes) and give them as score_params.")
    if softcap is not None and not isinstance(softcap, jax.Array) and not (
            isinstance(softcap, (int, float)) and math.isfinite(softcap) and softcap > 0):
        raise UserError(f"softcap {softcap!r} must be a number above 0, or None for no cap.")
    if dropout is not None:
        if not isinstance(dropout, Dropout):
            raise UserError(f"dropout must be Dropout(rate, seed), not {_kind(dropout)}.")
        dropout.check()
    if sink is not None and tuple(jnp.shape(sink)) != (N,):
        raise UserError(f"sink has shape {tuple(jnp.shape(sink))} but must be ({N},): one logit "
                        "per query head.")
    if q_start is not None:
        start = jnp.asarray(q_start)
        if not jnp.issubdtype(start.dtype, jnp.integer) or start.shape not in ((), (B,)):
            raise UserError(f"q_start has shape {start.shape} and dtype {start.dtype}; give one "
                            f"integer, or one per example ({B}).")
