"""Verdicts on published claims: what paired seeds say, corrected over the claims of a report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from tx_jax.study.statistics import LEVEL, Paired, holm

_OPEN = "not resolvable with these seeds"


@dataclass(frozen=True)
class Claim:
    """What somebody published about (arm - baseline), and the comparison that tests it.

    Attributes:
      expected: "higher", "lower", "equal" or "not higher".
      margin: for "equal" and "not higher": differences up to this size count as none (the noise
        floor, say); for the others: the effect has to be larger.
    """

    text: str
    comparison: Paired
    expected: str
    margin: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """A published claim against these seeds.

    Attributes:
      outcome: "agrees", "differs" or "not resolvable with these seeds".
      seeds_needed: seeds at which the observed paired spread gives power 0.8; None if resolved or
        unknown.
    """

    claim: str
    outcome: str
    detail: str
    seeds_needed: int | None = None


def judge_all(claims: Sequence[Claim]) -> tuple[Verdict, ...]:
    """Verdicts of the claims of a report, p corrected by Holm over all of them."""
    corrected = holm(dict(enumerate(c.comparison for c in claims)))
    tested = sum(c.p is not None for c in corrected.values())
    return tuple(judge(c.text, corrected[i], c.expected, margin=c.margin, family=max(1, tested))
                 for i, c in enumerate(claims))


def judge(claim: str, comparison: Paired, expected: str, *, margin: float = 0.0,
          family: int = 1) -> Verdict:
    """Verdict of a published claim about (arm - baseline).

    Args:
      expected: "higher", "lower", "equal" or "not higher".
      margin: for "equal": differences up to this size count as none (the noise floor, say); the
        claim agrees when the whole interval lies within it and differs when all of it lies
        without. "not higher" is the same with no bound below. For the others: the claim agrees
        when the whole interval lies beyond it in the claimed direction, and differs when the effect
        has the other direction.
      family: how many claims share the level of 5 %; the seeds needed are for that share of it.
    """
    c = comparison
    if c.n < 2 or c.p is None:
        return Verdict(claim, _OPEN, f"{c.n} pair(s) of seeds; at least 2 are needed, 5 are usual",
                       5)
    text = _said(c)
    if expected in ("equal", "not higher"):
        least = -margin if expected == "equal" else -math.inf
        if c.low is not None and least <= c.low and c.high <= margin:
            return Verdict(claim, "agrees", text)
        outside = (not least <= c.difference <= margin if c.low is None else
                   c.low > margin or c.high < least)
        if c.resolved and outside:
            return Verdict(claim, "differs", text)
        need = seeds_needed(margin, c.std) if c.std is not None and margin else None
        return Verdict(claim, _OPEN, text, need)
    sign = {"higher": 1.0, "lower": -1.0}[expected]
    effect = sign * c.difference
    # The end of the interval nearest to the margin; without an interval the effect itself.
    nearest = effect if c.low is None else min(sign * c.low, sign * c.high)
    if c.resolved and nearest > margin:
        return Verdict(claim, "agrees", text)
    if c.resolved and effect <= 0:
        return Verdict(claim, "differs", text)
    alpha = (1 - LEVEL) / family
    if c.std is not None:  # Resolved: in the claimed direction, but perhaps not beyond the margin.
        return Verdict(claim, _OPEN, text, seeds_needed(effect - margin if c.resolved else effect,
                                                        c.std, alpha=alpha))
    least = math.floor(1 - math.log2(alpha)) + 1  # exact p of n pairs is at least 2^(1-n)
    decided = c.resolved or (not math.isfinite(c.difference) and c.n >= least)
    return Verdict(claim, _OPEN, text, None if decided else max(least, c.n + 1))


def _said(c: Paired) -> str:
    text = f"difference {c.difference:.4g}"
    if c.low is not None:
        text += f" [{c.low:.4g}, {c.high:.4g}]"
    text += f", p {c.p:.2g}" if c.adjusted is None else f", p {c.adjusted:.2g} (Holm)"
    return text + (f", {c.lost} diverged pair(s) not in the mean" if c.lost else "")


def seeds_needed(effect: float, std: float, *, power: float = 0.8, alpha: float = 0.05,
                 most: int = 10_000) -> int | None:
    """Pairs at which a two-sided paired t-test of `effect` with spread `std` has this power.

    None when the effect is zero or more than `most` pairs would be needed.
    """
    if std == 0:
        return 2 if effect else None
    if not (math.isfinite(effect) and math.isfinite(std)) or effect == 0:
        return None

    def reaches(n: int) -> bool:
        t = float(stats.t.ppf(1 - alpha / 2, n - 1))
        shift = abs(effect) / std * math.sqrt(n)
        return float(stats.nct.sf(t, n - 1, shift)) >= power

    if abs(effect) / std > 1e6:  # beyond what the noncentral distribution computes
        return 2
    low, high = 2, 2
    while not reaches(high):
        low, high = high, 2 * high
        if high > 2 * most:
            return None
    while low < high:
        mid = (low + high) // 2
        low, high = (low, mid) if reaches(mid) else (mid + 1, high)
    return low if low <= most else None
