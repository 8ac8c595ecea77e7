"""The interface of a variant of attention: the call of `attend`, and refusals."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.attention import _check
from tx_jax.attention._bias import Bias
from tx_jax.attention._dropout import Dropout
from tx_jax.attention._scale import resolve_scale
from tx_jax.attention.scores import ScoreFunction, make_score
from tx_jax.errors import UserError
from tx_jax.masks import Mask, Rule, as_mask

# The options of `attend` that a variant may refuse, and the values that ask for nothing.
NEUTRAL = {"bias": None, "score": "scaled_dot", "scale": None, "softcap": None, "dropout": None,
           "sink": None, "implementation": None, "score_params": None, "head_width": None}


@dataclass(frozen=True)
class Variant:
    """Attention that is not a softmax over scores.

    Attributes:
      refuses: options of `attend` that contradict the variant, each with the reason.
      paired_heads: two heads of queries and keys share one head of values, twice as wide.
    """

    paired_heads: ClassVar[bool] = False

    refuses: ClassVar[Mapping[str, str]] = {}

    @property
    def name(self) -> str:
        """The name of its file."""
        return type(self).__module__.rsplit(".", 1)[-1]

    def init(self, key: jax.Array, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
        """Parameters, float32, named with their letters; `sizes` gives N, H and, where it is not
        the usual one, the width W of values."""
        return {}

    def attend(self, q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, *,
               params: Mapping[str, Any] | None = None, mask: Mask | Rule | str | None = None,
               bias: jax.Array | Bias | None = None, score: str | ScoreFunction = "scaled_dot",
               scale: Any = None, softcap: float | None = None, dropout: Dropout | None = None,
               sink: jax.Array | None = None, q_start: Any = None, implementation: Any = None,
               score_params: Mapping[str, Any] | None = None, head_width: int | None = None
               ) -> jax.Array:
        """The arguments of `tx_jax.attention.attend`, and the parameters of the variant.

        Raises:
          UserError: an argument is wrong or contradicts the variant.
        """
        options = {"bias": bias, "score": score, "scale": scale, "softcap": softcap,
                   "dropout": dropout, "sink": sink, "implementation": implementation,
                   "score_params": score_params or None, "head_width": head_width}
        self.refuse(options)
        sizes = dict.fromkeys("NKHW", 2)
        needed = jax.eval_shape(lambda key: self.init(key, sizes), jax.random.key(0))
        missing = sorted(set(needed) - set(params or {}))
        if missing:
            raise UserError(f"the attention variant '{self.name}' needs its parameter "
                            f"{missing[0]}; make them with make_variant(...).init(key, sizes) and "
                            "give them as params.")
        mask = None if mask is None else as_mask(mask)
        return self.compute(params or {}, q_BTNH, k_BSKH, v_BSKH, mask=mask, q_start=q_start,
                            **{n: o for n, o in options.items() if n not in self.refuses})

    def refuse(self, options: Mapping[str, Any]) -> None:
        """Raise UserError at the first option that contradicts the variant."""
        for option, value in options.items():
            neutral = NEUTRAL[option]
            if isinstance(value, Dropout) and not value.rate:
                value = None
            if isinstance(value, ScoreFunction):
                value = value.name
            if option in self.refuses and not (value is neutral or (
                    isinstance(value, str) and value == neutral)):
                raise UserError(f"the attention variant '{self.name}' takes no {option}, as "
                                f"{self.refuses[option]}; leave it out.")

    def compute(self, params: Mapping[str, Any], q_BTNH: jax.Array, k_BSKH: jax.Array,
                v_BSKH: jax.Array, **options: Any) -> jax.Array:
        """The output [B, T, N, width of v], from the options it does not refuse."""
        raise NotImplementedError

    def slow(self, params: Mapping[str, Any], q_BTNH: np.ndarray, k_BSKH: np.ndarray,
             v_BSKH: np.ndarray, *, allowed_BNTS: np.ndarray, logits_BNTS: np.ndarray,
             sink: np.ndarray | None = None) -> np.ndarray:
        """The same as loops in float64: the variant's own reference.

        Args:
          allowed_BNTS: which pairs may meet.
          logits_BNTS: score, scale, softcap and bias of the contract.
          sink: a logit per head.
        """
        raise NotImplementedError


def checked(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, *, mask: Mask | None,
            q_start: Any, bias: Any = None, score: str | ScoreFunction = "scaled_dot",
            scale: Any = None, softcap: Any = None, dropout: Dropout | None = None,
            sink: Any = None, score_params: Any = None, head_width: int | None = None
            ) -> dict[str, Any]:
    """The options as implementations get them, after the checks of `attend`."""
    score = make_score(score)
    _check.check_qkv(q_BTNH, k_BSKH, v_BSKH)
    (B, T, N, H), S = q_BTNH.shape, k_BSKH.shape[1]
    q_start, softcap = _check.check_start(q_start, B), _check.check_softcap(softcap)
    bias = _check.check_bias(bias, (B, N, T, S))
    _check.check_options(mask=mask, score=score, score_params=score_params, dropout=dropout,
                         sink=sink, head_width=head_width, sizes=(B, N, T, S, H))
    scale = resolve_scale(scale, score, head_width or H, mask, T, S, q_start)
    dropout = dropout if dropout is not None and dropout.rate else None
    return {"mask": mask, "bias": bias, "score": score, "score_params": score_params or {},
            "scale": scale, "softcap": softcap, "dropout": dropout, "sink": sink,
            "q_start": q_start}


def empty(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array | None:
    """The output where there is nothing to compute, else None."""
    shape = (*q_BTNH.shape[:3], v_BSKH.shape[3])
    if 0 in shape or not k_BSKH.shape[1]:
        return jnp.zeros(shape, v_BSKH.dtype)
    return None
