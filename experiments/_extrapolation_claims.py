"""Published claims about positions and length, and the paired comparisons that test them.

Margins: what is called flat may rise by 0.05 nats, five per cent of the perplexity, and fall by any
amount; what is said to break has to rise by more than that.
"""

from collections.abc import Sequence
from typing import Any

from experiments._extrapolation_settings import Settings
from tx_jax.study import statistics as st
from tx_jax.study.verdicts import Claim

Row = dict[str, Any]
Seen = dict[int, float]
FLAT = 0.05
_PRESS, _HAVIV = "Press et al. 2022", "Haviv et al. 2022"
_CHEN, _PENG = "Chen et al. 2023", "Peng et al. 2023"


def schemes(rows: Sequence[Row], settings: Settings) -> list[Claim]:
    """Claims that these rows can test: arms and lengths that are absent drop theirs."""
    L, found = settings.context, []
    far = settings.lengths[-1]

    def loss(arm: str, protocol: str, length: float) -> Seen:
        return {r["seed"]: r["metrics"][protocol][str(round(length))] for r in rows
                if r["arm"] == arm and str(round(length)) in r["metrics"][protocol]}

    def rise(arm: str, protocol: str, length: float) -> Seen:
        start = loss(arm, protocol, L)
        return {seed: nats - start[seed] for seed, nats in loss(arm, protocol, length).items()}

    def claim(text: str, a: Seen, b: Seen, expected: str, margin: float = 0.0) -> None:
        if a and b and a is not b:
            found.append(Claim(text, st.paired(a, b), expected, margin))

    def grows(arm: str, factor: float, text: str, expected: str, protocol: str = "windows",
              margin: float = 0.0) -> None:
        if factor > 1:
            claim(f"{text}: {protocol} at {factor:g} L against L", loss(arm, protocol, factor * L),
                  loss(arm, protocol, L), expected, margin)

    grows("sinusoidal", 1.25, f"Sinusoidal positions break within a quarter ({_PRESS})", "higher",
          margin=FLAT)
    grows("learned", 1.25, "Learned positions break as soon as their rows are untrained", "higher",
          margin=FLAT)
    grows("rope", 1.5, f"RoPE holds a little beyond L ({_PRESS}; {FLAT:g} nats allowed)",
          "not higher", margin=FLAT)
    grows("rope", 4, f"RoPE breaks further out ({_PRESS})", "higher", margin=FLAT)
    claim(f"T5's bias rises less than RoPE ({_PRESS}): rise of windows from L to 4 L",
          rise("t5", "windows", 4 * L), rise("rope", "windows", 4 * L), "lower")
    claim(f"T5's bias rises more than ALiBi ({_PRESS}): rise of windows from L to 4 L",
          rise("t5", "windows", 4 * L), rise("alibi", "windows", 4 * L), "higher")
    grows("alibi", far / L, f"ALiBi's loss in windows falls with their length ({_PRESS})", "lower")
    grows("alibi", far / L, f"ALiBi stays flat with full context ({_PRESS}; {FLAT:g} nats "
          "allowed)", "not higher", "sliding", FLAT)
    if far > L:
        gain = [{s: -v for s, v in rise("alibi", p, far).items()} for p in ("windows", "sliding")]
        claim(f"ALiBi's gain in windows is that of early tokens, not of context ({_PRESS}): gain "
              f"from L to {far / L:g} L in windows against sliding", *gain, "higher")
    grows("kerple", far / L, f"KERPLE stays flat (Chi et al. 2022; {FLAT:g} nats allowed)",
          "not higher", "sliding", FLAT)
    claim(f"FIRE is ahead of ALiBi far out (Li et al. 2024): sliding at {far / L:g} L",
          loss("fire", "sliding", far), loss("alibi", "sliding", far), "lower")
    claim(f"Small models pay for having no positions ({_HAVIV}): windows at L against sinusoidal",
          loss("none", "windows", L), loss("sinusoidal", "windows", L), "higher")
    return found


def extension(rows: Sequence[Row], settings: Settings) -> list[Claim]:
    """Claims about zero-shot extension and about fine-tuning, at the last factor."""
    factor, found = max(settings.extend.factors), []
    rows = [r for r in rows if r["axes"]["factor"] == factor]
    base, far = str(settings.context), str(factor * settings.context)
    steps = settings.extend.steps

    def at(method: str, length: str = far) -> Seen:
        return {r["seed"]: r["metrics"]["sliding"][length] for r in rows if r["arm"] == method}

    def tuned(method: str) -> Seen:
        return {r["seed"]: r["metrics"]["tuned"] for r in rows
                if r["arm"] == method and "tuned" in r["metrics"]}

    def claim(text: str, a: Seen, b: Seen, expected: str, margin: float = 0.0) -> None:
        if a and b:
            found.append(Claim(text, st.paired(a, b), expected, margin))

    zero, after = f"zero-shot, sliding at {factor} L", f"after {steps} steps, sliding at {factor} L"
    claim(f"NTK-aware scaling is better than PI ({_PENG}, 3.1): {zero}", at("ntk"), at("pi"),
          "lower")
    claim(f"By parts is better than NTK-aware, alpha:beta chosen ({_PENG}, 3.2): {zero}",
          at("by_parts"), at("ntk"), "lower")
    claim(f"YaRN is better than NTK-aware, alpha:beta chosen ({_PENG}, 3.4): {zero}", at("yarn"),
          at("ntk"), "lower")
    claim(f"YaRN's temperature helps ({_PENG}, 3.4): yarn against by_parts, {zero}", at("yarn"),
          at("by_parts"), "lower")
    claim(f"Untuned, PI is better than nothing ({_CHEN}: perplexity 16 against > 1000): {zero}",
          at("pi"), at("none"), "lower")
    for method, who in (("pi", _CHEN), ("yarn", _PENG)):
        claim(f"{method} is recovered by a short fine-tuning ({who}; {2 * FLAT:g} nats allowed): "
              f"{after}, against the checkpoint at L", tuned(method), at("none", base),
              "not higher", 2 * FLAT)
    claim(f"PI is ahead of plain fine-tuning ({_CHEN}): {after}", tuned("pi"),
          tuned("none"), "lower")
    claim(f"Once tuned, PI is ahead of NTK-aware ({_PENG}, 3.1): {after}", tuned("pi"),
          tuned("ntk"), "lower")
    claim(f"YaRN is ahead of PI ({_PENG}): {after}", tuned("yarn"), tuned("pi"), "lower")
    return found
