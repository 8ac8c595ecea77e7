"""Published claims about blocks, and the paired comparisons that test them.

Margins: what is said to cost nothing may cost 0.05 nats, five per cent of the perplexity. Slopes of
gradients are those of the three deepest models, and may be off by 0.15.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tx_jax.study import statistics as st
from tx_jax.study.verdicts import Claim, Verdict

Row = dict[str, Any]
Seen = dict[int, float]
FLAT, SLOPE, APART = 0.05, 0.15, 0.1
_DONG, _XIONG, _VASWANI = "Dong et al. 2021", "Xiong et al. 2020", "Vaswani et al. 2017"
_NARANG = "Narang et al. 2021"


def at_layer(rows: Sequence[Row], arm: str, layer: int) -> Seen:
    """seed -> share of the stream that differs between tokens after `layer` blocks."""
    return {r["seed"]: r["metrics"]["ratio"][layer] for r in rows if r["arm"] == arm}


def rank(rows: Sequence[Row]) -> list[Claim]:
    """Claims about random blocks without training."""
    last = len(rows[0]["metrics"]["ratio"]) - 1

    def log(arm: str, layer: int) -> Seen:
        return {s: math.log(max(v, 1e-30)) for s, v in at_layer(rows, arm, layer).items()}

    def fall(arm: str, layer: int) -> Seen:
        before = log(arm, layer - 1)
        return {seed: value - before[seed] for seed, value in log(arm, layer).items()}

    # Of layers 1 and 2 only: the third ends where float32 rounds.
    found = [
        Claim(f"Attention alone loses the differences between tokens faster than exponentially "
              f"({_DONG}): fall of the logarithm in layer 2 against layer 1",
              st.paired(fall("attention", 2), fall("attention", 1)), "lower"),
        Claim(f"A skip connection stops the collapse ({_DONG}): attention with skip against "
              f"without, after {last} layers",
              st.paired(at_layer(rows, "attention_skip", last), at_layer(rows, "attention", last)),
              "higher", APART),
        Claim(f"Feed-forward layers slow the collapse ({_DONG}): logarithm after 2 layers, against "
              "attention alone", st.paired(log("attention_ffn", 2), log("attention", 2)),
              "higher")]
    for arm, name in (("attention_pre_norm", "before"), ("attention_post_norm", "after")):
        seen = at_layer(rows, arm, last)
        found.append(Claim(
            f"A norm {name} attention does not stop the collapse ({_DONG}; .01 allowed): share "
            f"left after {last} layers without skip", st.paired(seen, dict.fromkeys(seen, 0.0)),
            "not higher", 0.01))
    return found


def slopes(rows: Sequence[Row], arm: str, metric: str = "last") -> Seen:
    """seed -> slope of the logarithm of a gradient norm in that of depth, three deepest models."""
    depths = sorted({r["axes"]["layers"] for r in rows})[-3:]
    by_seed: dict[int, dict[int, float]] = {}
    for r in rows:
        if r["arm"] == arm:
            by_seed.setdefault(r["seed"], {})[r["axes"]["layers"]] = r["metrics"][metric]
    return {seed: float(np.polyfit(np.log(depths), np.log([seen[d] for d in depths]), 1)[0])
            for seed, seen in by_seed.items() if set(depths) <= set(seen)}


def gradient(rows: Sequence[Row]) -> list[Claim]:
    """Claims about gradients before training."""
    if len({r["axes"]["layers"] for r in rows}) < 2:
        return []
    pre, post = slopes(rows, "pre"), slopes(rows, "post")
    return [
        Claim(f"Pre-LN: the gradient of the last W_down falls as L^-1/2 ({_XIONG}; exponent within "
              f"{SLOPE:g}): slope of the logarithms against -1/2",
              st.paired(pre, dict.fromkeys(pre, -0.5)), "equal", SLOPE),
        Claim(f"Post-LN: it does not depend on depth ({_XIONG}; within {SLOPE:g}): slope against 0",
              st.paired(post, dict.fromkeys(post, 0.0)), "equal", SLOPE),
        Claim(f"It falls faster with Pre-LN than with Post-LN ({_XIONG}): slopes",
              st.paired(pre, post), "lower")]


# (text, arm, baseline, expected, margin); those that lack an arm are left out.
TRAINED = (
    (f"Without skip connections a deep stack does not train ({_DONG})", "no_residual", "pre_layer",
     "higher", APART),
    (f"Post-LN needs a warm-up ({_XIONG}), branches at unit gain: without against with",
     "post_unit_cold", "post_unit", "higher", 0.0),
    (f"Pre-LN needs none ({_XIONG}; {FLAT:g} nats allowed): without against with",
     "pre_layer_cold", "pre_layer", "not higher", FLAT),
    (f"Stacks without norms are behind ({_NARANG}: ReZero, Fixup)", "no_norm", "pre_layer",
     "higher", 0.0),
    ("Without feed-forward layers the loss is higher at equal depth (Pires et al. 2023: a modest "
     "drop)", "attention_only", "base", "higher", 0.0),
    (f"Their parameters are as well spent elsewhere (Pires et al. 2023; {FLAT:g} nats allowed): "
     "attention only, 3 times the layers", "attention_only_3x", "base", "not higher", FLAT),
    (f"A narrower feed-forward layer is worse ({_VASWANI}, table 3 C): d_ff = 2 d", "ffn_2x",
     "base", "higher", 0.0),
    (f"A wider one is better ({_VASWANI}, table 3 C): d_ff = 8 d", "ffn_8x", "base", "lower", 0.0),
    (f"SwiGLU is better at equal parameters (Shazeer 2020; {_NARANG}: -0.055 nats)", "swiglu",
     "base", "lower", 0.0),
    (f"GeGLU is better at equal parameters (Shazeer 2020; {_NARANG}: -0.052 nats)", "geglu",
     "base", "lower", 0.0),
    (f"A single head is worse than 8 ({_VASWANI}, table 3 A: -0.9 BLEU)", "heads_1", "heads_8",
     "higher", 0.0),
    (f"32 heads are worse than 8 ({_VASWANI}, table 3 A: -0.4 BLEU)", "heads_32", "heads_8",
     "higher", 0.0),
    (f"Narrower keys are worse ({_VASWANI}, table 3 B: -0.7 BLEU at a quarter; here the values are "
     "narrower too)", "key_quarter", "heads_8", "higher", 0.0),
    (f"Half the depth is worse ({_VASWANI}, table 3 C)", "depth_half", "base", "higher", 0.0),
    (f"Twice the depth is better ({_VASWANI}, table 3 C)", "depth_double", "base", "lower", 0.0),
    (f"Label smoothing raises the plain cross-entropy ({_VASWANI}, 5.4)", "smoothing", "base",
     "higher", 0.0),
    (f"Dropout keeps from over-fitting ({_VASWANI}, table 3 D): on little text", "few_dropout_1",
     "few", "lower", 0.0),
)
# What models of this size cannot say, whatever the p-value: the effect is below the spread between
# seeds, or it shows elsewhere.
BEYOND = (
    (f"RMSNorm is ahead of LayerNorm ({_NARANG}: -0.017 nats at 223 M parameters)", "pre_rms",
     "pre_layer"),
    ("Post-LN ends lower than Pre-LN where both train (Takase et al. 2022; Liu et al. 2020); a "
     "short run shows which learns faster", "post_layer", "pre_layer"),
    ("Post-LN fails at 18 layers (Takase et al. 2022); here at the depth of the family, branches "
     "at unit gain, no warm-up", "post_unit_cold", "pre_layer_cold"),
    (f"16 heads are as good as 8 ({_VASWANI}, table 3 A): where the best number lies", "heads_16",
     "heads_8"),
    (f"Label smoothing raises BLEU ({_VASWANI}, 5.4)", "smoothing", "base"),
)


def trained(rows: Sequence[Row]) -> list[Claim]:
    """Claims about trained models whose arms are there."""
    found = []
    for text, arm, baseline, expected, margin in TRAINED:
        a, b = losses(rows, arm), losses(rows, baseline)
        if a and b:
            found.append(Claim(text, st.paired(a, b), expected, margin))
    return found


def beyond(rows: Sequence[Row]) -> list[Verdict]:
    """What a run of this size does not decide, with the difference seen."""
    found = []
    for text, arm, baseline in BEYOND:
        a, b = losses(rows, arm), losses(rows, baseline)
        if a and b:
            c = st.paired(a, b)
            seen = f"difference {c.difference:.3f} nats" + (
                "" if c.low is None else f" [{c.low:.3f}, {c.high:.3f}]")
            seen = "BLEU is not measured" if "BLEU" in text else seen
            found.append(Verdict(text, "not resolvable at this size", seen))
    return found


def losses(rows: Sequence[Row], arm: str) -> Seen:
    """seed -> held-out loss of an arm at its learning rate; NaN where it diverged."""
    return {r["seed"]: r["metrics"]["loss"] if r["status"] == "ok" else math.nan
            for r in rows if r["arm"] == arm}
