"""The factor on the scores: a number, or a rule that gives one."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tx_jax.attention.scores import ScoreFunction
from tx_jax.errors import UserError, nearest
from tx_jax.masks import Mask, dense_mask

RULES = ("none", "1/sqrt(d)", "1/d", "log_n(L)")


def parse_scale(scale: Any, score: ScoreFunction) -> tuple[str, Any]:
    """Read a scale into (rule, value): the rule is one of RULES without arguments, or "number".

    Args:
      scale: None or "default" (the score's own rule), a rule, a number, the text of a number, or a
        scalar array, which may be traced. "log_n(L)" is 1/sqrt(d) times max(1, ln n / ln L), n
        being the keys visible to the row, L a length such as the one trained at (Chiang and Cholak
        2022; Su 2021).

    Raises:
      UserError: unknown rule, not a finite number, or a rule that contradicts the score.
    """
    if scale is None or (isinstance(scale, str) and scale.strip() == "default"):
        scale = score.default_scale
    if isinstance(scale, str):
        rule, value = _parse_text(scale)
    elif isinstance(scale, jax.Array):
        if scale.ndim or not jnp.issubdtype(scale.dtype, jnp.floating):
            raise UserError(f"scale has shape {tuple(scale.shape)} and dtype {scale.dtype}; give "
                            "one floating-point number.")
        return "number", scale
    else:
        rule, value = "number", _number(scale)
    if rule in score.refused_scales:
        raise UserError(f"scale '{scale}' contradicts the score '{score.name}': "
                        f"{score.refused_scales[rule]}.")
    return rule, value


def _parse_text(text: str) -> tuple[str, Any]:
    text = text.replace(" ", "")
    if text in ("none", "1/sqrt(d)", "1/d"):
        return text, None
    if text.startswith("log_n(") and text.endswith(")"):
        length = _number(text[len("log_n("):-1])
        if not length > 1:
            raise UserError(f"log_n({length}) needs a length above 1, such as the trained one.")
        return "log_n", length
    try:
        return "number", _number(text)
    except UserError:
        raise UserError(f"there is no scale '{text}'{nearest(text, RULES)}") from None


def _number(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"scale {value!r} is not a finite number; give a number or one of: "
                        f"{', '.join(RULES)}.")
    return number


def resolve_scale(scale: Any, score: ScoreFunction, d: int, mask: Mask | None, T: int, S: int,
                  q_start: ArrayLike | None = None) -> float | jax.Array:
    """The factor as a float, a scalar array, or (log_n) an array [1|B, 1, T, 1].

    Args:
      scale, score: see `parse_scale`.
      d: true head width of queries and keys, not a padded one.
      mask, T, S, q_start: they give n, the number of keys visible to each row.
    """
    rule, value = parse_scale(scale, score)
    match rule:
        case "number":
            return value
        case "none":
            return 1.0
        case "1/sqrt(d)":
            return d**-0.5
        case "1/d":
            return 1.0 / d
    if mask is None:
        return d**-0.5 * max(1.0, math.log(max(S, 1)) / math.log(value))
    n_BT = jnp.sum(dense_mask(mask, T, S, q_start), axis=-1).astype(jnp.float32)
    factor_BT = jnp.maximum(1.0, jnp.log(jnp.maximum(n_BT, 1.0)) / math.log(value))
    return d**-0.5 * factor_BT[:, None, :, None]
