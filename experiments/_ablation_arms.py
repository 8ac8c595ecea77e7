"""The arms of the block ablation, by family: what each changes in the model it is compared with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

COLD = {"warmup": 0.0}
WARM = {"warmup": 0.3}  # Post-LN: the warm-up is part of the arm (Xiong et al. 2020).


@dataclass(frozen=True)
class Arm:
    """One change of the block.

    Attributes:
      change: (layers, deep, width) -> fields of ModelConfig.
      optim: fields of OptimConfig.
      few: trained on the first tokens of the text only, which are then read many times.
      unit: branches start at unit gain, as in the papers, not (2L)^-1/2 smaller.
    """

    change: Callable[[int, int, int], Mapping[str, Any]]
    optim: Mapping[str, Any] = field(default_factory=dict)
    few: bool = False
    unit: bool = False


def _same(**fields: Any) -> Callable[[int, int, int], Mapping[str, Any]]:
    return lambda layers, deep, width: fields


def _deep(**fields: Any) -> Callable[[int, int, int], Mapping[str, Any]]:
    return lambda layers, deep, width: {"layers": deep} | fields


def _heads(heads: int, share: int = 1) -> Arm:
    """Learned positions: a rotation has H / 2 frequencies, ALiBi a slope per head, and either would
    change with the number of heads. Sinusoids of amplitude 1 do not, but drown embeddings of 0.02
    for hundreds of steps."""
    return Arm(lambda layers, deep, width: {
        "heads": heads, "head_dim": width // heads // share, "positions": "learned"})


# Gated layers have three matrices: 2/3 of the width gives equal parameters (Shazeer 2020, 2).
def _gated(mlp: str) -> Arm:
    return Arm(lambda layers, deep, width: {"mlp": mlp, "d_ff": round(8 * width / 3)})


ARMS = {
    "pre_layer": Arm(_deep()),
    "pre_layer_cold": Arm(_deep(), COLD),
    "pre_rms": Arm(_deep(norm="rms")),
    "sandwich": Arm(_deep(norm_position="sandwich")),
    "post_layer": Arm(_deep(norm_position="post"), WARM),
    "post_layer_cold": Arm(_deep(norm_position="post"), COLD),
    "post_unit": Arm(_deep(norm_position="post"), WARM, unit=True),
    "post_unit_cold": Arm(_deep(norm_position="post"), COLD, unit=True),
    "post_rms": Arm(_deep(norm_position="post", norm="rms"), WARM),
    "no_norm": Arm(_deep(norm="none")),
    "no_residual": Arm(_deep(residual=False)),
    "base": Arm(_same()),
    "attention_only": Arm(_same(mlp="none")),
    # 12 L d^2 = 4 (3 L) d^2.
    "attention_only_3x": Arm(lambda layers, deep, width: {"mlp": "none", "layers": 3 * layers}),
    # 12 L d^2 = 8 (3/2 L) d^2.
    "narrow_deep": Arm(lambda layers, deep, width: {"layers": 3 * layers // 2, "d_ff": 2 * width}),
    "ffn_1x": Arm(lambda layers, deep, width: {"d_ff": width}),
    "ffn_2x": Arm(lambda layers, deep, width: {"d_ff": 2 * width}),
    "ffn_8x": Arm(lambda layers, deep, width: {"d_ff": 8 * width}),
    "relu": Arm(_same(mlp="relu")),
    "swiglu": _gated("swiglu"),
    "geglu": _gated("geglu"),
    "reglu": _gated("reglu"),
    **{f"heads_{n}": _heads(n) for n in (8, 1, 2, 4, 16, 32)},
    "key_half": _heads(8, 2),
    "key_quarter": _heads(8, 4),
    "depth_half": Arm(lambda layers, deep, width: {"layers": layers // 2}),
    "depth_double": Arm(lambda layers, deep, width: {"layers": 2 * layers}),
    "smoothing": Arm(_same(), {"label_smoothing": 0.1}),
    "few": Arm(_same(), few=True),
    "few_dropout_1": Arm(_same(dropout=0.1), few=True),
    "few_dropout_3": Arm(_same(dropout=0.3), few=True),
    "few_smoothing": Arm(_same(), {"label_smoothing": 0.1}, few=True),
}

# The first of a family is what the others are compared with.
FAMILIES = {
    "norms and residual": ("pre_layer", "pre_layer_cold", "pre_rms", "sandwich", "post_layer",
                           "post_layer_cold", "post_unit", "post_unit_cold", "post_rms", "no_norm",
                           "no_residual"),
    "feed-forward": ("base", "attention_only", "attention_only_3x", "narrow_deep", "ffn_1x",
                     "ffn_2x", "ffn_8x", "relu", "swiglu", "geglu", "reglu"),
    "heads and key width": ("heads_8", "heads_1", "heads_2", "heads_4", "heads_16", "heads_32",
                            "key_half", "key_quarter"),
    "depth": ("base", "depth_half", "depth_double"),
    "label smoothing": ("base", "smoothing"),
    "little text": ("few", "few_dropout_1", "few_dropout_3", "few_smoothing"),
}
