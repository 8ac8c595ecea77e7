"""The attention contract: one call, any implementation, the same mathematics or a refusal."""

import hashlib
import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from tx_jax.attention import _check
from tx_jax.attention._bias import Bias
from tx_jax.attention._capabilities import Capabilities, Request
from tx_jax.attention._dropout import Dropout
from tx_jax.attention._scale import parse_scale, resolve_scale
from tx_jax.attention.scores import DotProduct, ScoreFunction, make_score
from tx_jax.errors import UserError, nearest
from tx_jax.masks import Mask, Rule, as_mask

# What an implementation takes besides queries, keys and values.
KEYWORDS = ("mask", "bias", "score", "score_params", "scale", "softcap", "dropout", "sink",
            "q_start")

Implementation = str | Callable[..., jax.Array] | Sequence[Any] | None

# Up to so many logits "auto" takes the reference: they stay in a processor's cache, where keeping
# the weights beats computing them again.
SMALL = 2**17


def attend(q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, *,
           mask: Mask | Rule | None = None, bias: jax.Array | Bias | None = None,
           score: str | ScoreFunction = "scaled_dot", scale: Any = None,
           softcap: float | None = None, dropout: Dropout | None = None,
           sink: jax.Array | None = None, q_start: Any = None,
           implementation: Implementation = None, score_params: Mapping[str, Any] | None = None,
           head_width: int | None = None) -> jax.Array:
    """Attention (Vaswani et al. 2017, equation 1) with the options of its descendants.

    Order: score -> scale -> softcap -> + bias -> mask -> softmax in float32 -> dropout -> weighted
    sum. A row with no allowed key gives zeros, with zero gradients.

    Args:
      q_BTNH: queries, float. k_BSKH: keys, K dividing N; query head n meets key head n // (N/K).
      v_BSKH: values; their width may differ from that of keys. All share one dtype.
      mask: a rule or a `Mask`; None = every query sees every key.
      bias: array that broadcasts to [B, N, T, S] (rank <= 4), where minus infinity forbids a pair;
        or a `Bias`, a function of positions that is never stored whole.
      score: name, call string or object of a score function, see `attention/scores`.
      scale: None (the score's own rule), a number (may be traced), or "none", "1/sqrt(d)", "1/d",
        "log_n(L)".
      softcap: c in c * tanh(logit / c) (Gemma 2).
      dropout: `Dropout(rate, seed)` on the weights.
      sink: [N], a logit per head that joins the softmax without a value (gpt-oss).
      q_start: absolute index of the first query, a scalar or one per example; default S - T, the
        only rule under which cached decoding equals the full forward pass.
      implementation: None or "auto", the best for the device and size; the name of a file of
        `attention/`; "module:function"; a callable; or a list of these, of which the first that can
        do the call is taken.
      score_params: parameters of the score function, from its `init`.
      head_width: the d of the scale rules, where a position scheme has widened queries and keys;
        default: the width of q.

    Returns:
      [B, T, N, width of v] in the dtype of v.

    Raises:
      UserError: an argument is wrong, or the implementation cannot do this combination exactly.
    """
    score = make_score(score)
    mask = None if mask is None else as_mask(mask)
    _check.check_qkv(q_BTNH, k_BSKH, v_BSKH)
    (B, T, N, H), S = q_BTNH.shape, k_BSKH.shape[1]
    q_start, softcap = _check.check_start(q_start, B), _check.check_softcap(softcap)
    bias = _check.check_bias(bias, (B, N, T, S))
    _check.check_options(mask=mask, score=score, score_params=score_params, dropout=dropout,
                         sink=sink, head_width=head_width, sizes=(B, N, T, S, H))
    request = request_of(q_BTNH, k_BSKH, v_BSKH, mask=mask, bias=bias, score=score, scale=scale,
                         softcap=softcap, dropout=dropout, sink=sink, q_start=q_start)
    _, function = resolve(implementation, request)
    scale = resolve_scale(scale, score, head_width or H, mask, T, S, q_start)
    if 0 in (B, T, N, S, v_BSKH.shape[3]):
        return jnp.zeros((B, T, N, v_BSKH.shape[3]), v_BSKH.dtype)
    return function(q_BTNH, k_BSKH, v_BSKH, mask=mask, bias=bias, score=score,
                    score_params=score_params or {}, scale=scale, softcap=softcap,
                    dropout=dropout if dropout is not None and dropout.rate else None, sink=sink,
                    q_start=q_start)


def request_of(q_BTNH: Any, k_BSKH: Any, v_BSKH: Any, *, mask: Any = None, bias: Any = None,
               score: str | ScoreFunction = "scaled_dot", scale: Any = None, softcap: Any = None,
               dropout: Dropout | None = None, sink: Any = None, q_start: Any = None) -> Request:
    """What a call of `attend` with these arguments asks of an implementation.

    Only shapes and dtypes of arrays are read, so `jax.ShapeDtypeStruct` will do.
    """
    score = make_score(score)
    mask = None if mask is None else as_mask(mask)
    rule, value = parse_scale(scale, score)
    kind = bias.kind if isinstance(bias, Bias) else None
    traced_start = isinstance(q_start, jax.Array)
    return Request(
        rules=frozenset() if mask is None else mask.rule.names(),
        segments=mask is not None and mask.q_segments_BT is not None,
        prefix_lengths=mask is not None and mask.prefix_B is not None,
        key_lengths=mask is not None and mask.k_lengths_B is not None,
        bias=bias is not None and kind is None, pair_bias=kind == "pair", row_bias=kind == "rows",
        softcap=softcap is not None, sink=sink is not None,
        dropout=dropout is not None and dropout.rate > 0,
        gqa=q_BTNH.shape[2] != k_BSKH.shape[2], v_width=v_BSKH.shape[3] != k_BSKH.shape[3],
        traced_scale=isinstance(value, jax.Array), row_scale=rule == "log_n",
        shifted=traced_start or q_start not in (None, k_BSKH.shape[1] - q_BTNH.shape[1]),
        traced_start=traced_start, score=score.name,
        queries=q_BTNH.shape[1], logits=math.prod(q_BTNH.shape[:3]) * k_BSKH.shape[1],
        other_score=not isinstance(score, DotProduct),
        projected_score=isinstance(score, DotProduct) and not score.plain,
        float64=q_BTNH.dtype == jnp.float64,
        dtype=jnp.dtype(q_BTNH.dtype).name, width=max(q_BTNH.shape[3], v_BSKH.shape[3]))


def implementations() -> dict[str, Capabilities]:
    """The implementations that come with the project: each file of `attention/` without `_`."""
    here = str(Path(__file__).parent)
    names = sorted(m.name for m in pkgutil.iter_modules([here])
                   if not m.ispkg and not m.name.startswith("_"))
    return {name: importlib.import_module(f"tx_jax.attention.{name}").CAPABILITIES
            for name in names}


def resolve(implementation: Implementation, request: Request
            ) -> tuple[str, Callable[..., jax.Array]]:
    """The name and the function that will run a request.

    Args:
      implementation: as in `attend`. Code from outside takes the arguments of
        `tx_jax.attention.reference.attend` and may carry a `CAPABILITIES`, on the function or in
        its module; without one it is trusted with everything.
      request: from `request_of`.

    Raises:
      UserError: unknown name, or nothing named can do the request exactly; the error says what is
        missing and which implementation can.
    """
    if implementation is None or (isinstance(implementation, str) and implementation == "auto"):
        implementation = ("decode" if request.queries == 1 else
                          "reference" if request.logits <= SMALL else "blockwise")
    if isinstance(implementation, str) or callable(implementation):
        implementation = (implementation,)
    if not isinstance(implementation, Sequence) or not implementation:
        raise UserError(f"implementation {implementation!r} is not a name, a callable, "
                        "'module:function' or a list of these.")
    refusals = []
    for choice in implementation:
        name, function, capabilities = _load(choice)
        missing = capabilities.lacks(request)
        if not missing:
            return name, function
        refusals.append(f"'{name}' cannot do {' with '.join(missing)}")
    raise UserError(f"attention {'; '.join(refusals)}; use {_able(request)}.")


def source_hash(implementation: str) -> str:
    """sha256 of the file behind "module:function", "" for what comes with the project.

    Results that outside code computed are only as current as that code.

    Raises:
      UserError: it cannot be imported.
    """
    if ":" not in implementation:
        return ""
    module = inspect.getmodule(_load(implementation)[1])
    path = getattr(module, "__file__", None)
    return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""


def _able(request: Request) -> str:
    able = [name for name, can in implementations().items() if not can.lacks(request)]
    return f"--model.attention={able[0]}, which can" if able else "fewer options together"


def _load(choice: Any) -> tuple[str, Callable[..., jax.Array], Capabilities]:
    """Name, function and capabilities of one implementation."""
    if callable(choice):
        name = f"{getattr(choice, '__module__', '?')}:{getattr(choice, '__qualname__', choice)}"
        _check_signature(name, choice)
        return name, choice, getattr(choice, "CAPABILITIES", Capabilities.everything())
    if not isinstance(choice, str):
        raise UserError(f"implementation {choice!r} is not a name, a callable or "
                        "'module:function'.")
    if ":" not in choice:
        if choice not in implementations():
            raise UserError(f"there is no attention implementation named '{choice}'"
                            f"{nearest(choice, implementations())}")
        module = importlib.import_module(f"tx_jax.attention.{choice}")
        return choice, module.attend, module.CAPABILITIES
    path, _, attribute = choice.partition(":")
    try:
        module = importlib.import_module(path)
        function = getattr(module, attribute)
    except Exception as error:  # whatever the module does while it is imported
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise UserError(f"attention '{choice}' cannot be imported ({reason}); write it like "
                        "my_package.my_module:my_function.") from None
    _check_signature(choice, function)
    default = getattr(module, "CAPABILITIES", Capabilities.everything())
    return choice, function, getattr(function, "CAPABILITIES", default)


def _check_signature(name: str, function: Any) -> None:
    """Raise UserError unless outside code takes what implementations are given."""
    try:
        inspect.signature(function).bind("q", "k", "v", **dict.fromkeys(KEYWORDS))
    except (TypeError, ValueError) as error:
        raise UserError(f"attention '{name}' does not take the arguments of an implementation "
                        f"({error}); write it as attend(q_BTNH, k_BSKH, v_BSKH, *, "
                        f"{', '.join(KEYWORDS)}).") from None
