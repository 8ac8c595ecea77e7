"""Statistics of a study: intervals, paired comparisons, censored times (claims: `verdicts.py`).

Seeds that diverged (NaN) are never dropped silently: every summary counts them.
"""

import itertools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95
LEAST_SEEDS = 5  # Below this many per arm no table prints a winner.


@dataclass(frozen=True)
class Summary:
    """One arm. `low`/`high` is the t-interval of the mean (None with fewer than two finite seeds);
    `bca_low`/`bca_high` the bootstrap BCa interval; `std` the sample standard deviation.
    """

    mean: float
    std: float | None
    low: float | None
    high: float | None
    bca_low: float | None
    bca_high: float | None
    n: int
    lost: int

    @property
    def half(self) -> float | None:
        """Half width of the t-interval."""
        return None if self.high is None else self.high - self.mean


@dataclass(frozen=True)
class Paired:
    """An arm minus the baseline over common seeds.

    Attributes:
      p: two-sided; by `test` = "t", "t on log", "signed ranks" (exact), "sign-flip" (exact), or
        "none" (under 2 pairs).
      adjusted: p after Holm's correction over a family: the arms of a table, the claims of a report
        (None until `holm`).
      lost: pairs in which one side diverged; unpaired: seeds that only one side has.
    """

    difference: float
    std: float | None
    low: float | None
    high: float | None
    p: float | None
    test: str
    n: int
    lost: int = 0
    unpaired: int = 0
    adjusted: float | None = None

    @property
    def resolved(self) -> bool:
        """The corrected p is below 5 %."""
        p = self.p if self.adjusted is None else self.adjusted
        return p is not None and p < 1 - LEVEL


@dataclass(frozen=True)
class Times:
    """Censored time to solve: `median` is inf when half of the seeds or more never solved."""

    median: float
    low: float
    high: float
    solved: int
    n: int
    fraction_low: float
    fraction_high: float
    budget: float


def summarize(values: Sequence[float], *, bootstrap: int = 2000, seed: int = 0) -> Summary:
    """Mean with 95 % intervals; non-finite values are counted in `lost`."""
    x = np.asarray(values, float)
    ok = x[np.isfinite(x)]
    n, lost = len(ok), len(x) - len(ok)
    if n == 0:
        return Summary(math.nan, None, None, None, None, None, 0, lost)
    mean = float(ok.mean())
    if n == 1:
        return Summary(mean, None, None, None, None, None, 1, lost)
    std = float(ok.std(ddof=1))
    low, high = _t_interval(mean, std, n)
    bca = (mean, mean) if std == 0 else _bca(ok, bootstrap, seed)
    return Summary(mean, std, low, high, *bca, n, lost)


def _t_interval(mean: float, std: float, n: int) -> tuple[float, float]:
    half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * std / math.sqrt(n)
    return mean - half, mean + half


def _bca(x: np.ndarray, count: int, seed: int) -> tuple[float | None, float | None]:
    if count < 1:
        return None, None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Degenerate resamples give NaN, turned into None below.
        ci = stats.bootstrap((x,), np.mean, n_resamples=count, confidence_level=LEVEL,
                             method="BCa", rng=np.random.default_rng(seed)).confidence_interval
    bounds = float(ci.low), float(ci.high)
    return bounds if all(map(math.isfinite, bounds)) else (None, None)


def paired(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Paired:
    """Compare two arms seed by seed (seed -> value).

    Always the paired t-test: a test chosen by looking at the data (a check of normality first) does
    not hold its level, and would let p contradict the t-interval beside it. Only differences
    without any spread, for which t is infinite, take the exact sign-flip test instead.
    """
    common = sorted(set(arm) & set(baseline))
    unpaired = len(set(arm) ^ set(baseline))
    d = np.array([arm[s] - baseline[s] for s in common], float)
    ok = d[np.isfinite(d)]
    n, lost = len(ok), len(d) - len(ok)
    if n < 2:
        mean = float(ok[0]) if n else math.nan
        return Paired(mean, None, None, None, None, "none", n, lost, unpaired)
    mean, std = float(ok.mean()), float(ok.std(ddof=1))
    if std <= 1e-12 * float(np.abs(ok).max()):
        # No spread: the t statistic is infinite, which n equal numbers do not prove. Count signs.
        p = 1.0 if mean == 0 else sign_flip(ok)
        return Paired(mean, std, mean, mean, p, "sign-flip", n, lost, unpaired)
    low, high = _t_interval(mean, std, n)
    p = 2 * float(stats.t.sf(abs(mean) / std * math.sqrt(n), n - 1))
    return Paired(mean, std, low, high, p, "t", n, lost, unpaired)


def sign_flip(differences: Sequence[float], limit: int = 16) -> float:
    """Two-sided sign-flip permutation p of mean zero; exact to `limit` pairs, else 2^16 draws."""
    d = np.asarray(differences, float)
    n = len(d)
    if n <= limit:
        signs = np.array(list(itertools.product((1.0, -1.0), repeat=n)))
    else:
        signs = np.random.default_rng(0).choice((1.0, -1.0), size=(2 ** limit, n))
        signs[0] = 1.0
    sums, seen = np.abs(signs @ d), abs(float(d.sum()))
    return float(np.mean(sums >= seen - 1e-12 * float(np.abs(d).sum())))


def holm[K](comparisons: Mapping[K, Paired]) -> dict[K, Paired]:
    """Fill `adjusted` with Holm's step-down p over the comparisons that have one."""
    tested = sorted(((c.p, name) for name, c in comparisons.items() if c.p is not None),
                    key=lambda pair: pair[0])
    adjusted, worst = {}, 0.0
    for rank, (p, name) in enumerate(tested):
        worst = max(worst, min(1.0, (len(tested) - rank) * p))
        adjusted[name] = worst
    return {name: Paired(**{**c.__dict__, "adjusted": adjusted.get(name)})
            for name, c in comparisons.items()}


def wilson(solved: int, n: int) -> tuple[float, float]:
    """Wilson 95 % interval of a fraction; (0, 1) without data."""
    if n == 0:
        return 0.0, 1.0
    ci = stats.binomtest(solved, n).proportion_ci(LEVEL, method="wilson")
    return float(ci.low), float(ci.high)


def times(values: Sequence[float], budget: float) -> Times:
    """Time to solve with censoring: inf, NaN or anything above `budget` never solved within it.

    The median's interval takes order statistics (exact binomial coverage of at least 95 %).
    """
    x = np.sort(np.where(np.isfinite(values), values, math.inf).astype(float))
    x = np.where(x > budget, math.inf, x)
    n, solved = len(x), int(np.isfinite(x).sum())
    if n == 0:
        return Times(math.nan, math.nan, math.nan, 0, 0, 0.0, 1.0, budget)
    middle = x[(n - 1) // 2: n // 2 + 1]
    k = int(stats.binom.ppf((1 - LEVEL) / 2, n, 0.5))
    # P(at most k - 1 below the median) must stay below 2.5 %; with few seeds the interval is open.
    low, high = (float(x[k - 1]), float(x[n - k])) if k >= 1 else (0.0, math.inf)
    return Times(float(middle.mean()), low, high, solved, n, *wilson(solved, n), budget)


def paired_times(arm: Mapping[int, float], baseline: Mapping[int, float],
                 budget: float) -> Paired:
    """Paired comparison of times of which some may be censored.

    Without a censored time p is the paired t-test of log(times): exact ranks of n pairs cannot go
    below 2^(1-n), which Holm's correction over a few arms lifts above 5 %. With one, both sides
    censored counts as equal and one side as later than any time: differences are replaced by their
    signed ranks (Wilcoxon), and p is the exact sign-flip permutation of these.
    `difference` is the median difference of the times themselves, without interval: +-inf when
    censoring decides it, 0 when the two middle ones are censored on opposite sides.
    """
    common = sorted(set(arm) & set(baseline))
    unpaired = len(set(arm) ^ set(baseline))

    def clip(v: float) -> float:
        return v if math.isfinite(v) and v <= budget else math.inf

    a, b = (np.array([clip(m[s]) for s in common]) for m in (arm, baseline))
    same = np.isinf(a) & np.isinf(b)
    d = np.where(same, 0.0, np.where(same, 0.0, a) - np.where(same, 0.0, b))
    if len(d) == 0:
        return Paired(math.nan, None, None, None, None, "none", 0, 0, unpaired)
    ordered = np.sort(d)
    middle = ordered[(len(d) - 1) // 2: len(d) // 2 + 1]
    if middle[0] == middle[-1]:
        difference = float(middle[0])
    else:
        difference = 0.0 if np.isinf(middle).all() else float(middle.mean())
    if len(d) < 2:
        return Paired(difference, None, None, None, None, "none", 1, 0, unpaired)
    if np.isfinite(a).all() and np.isfinite(b).all() and min(a.min(), b.min()) > 0:
        logs = paired(dict(enumerate(np.log(a))), dict(enumerate(np.log(b))))
        test = "t on log" if logs.test == "t" else logs.test
        return Paired(difference, None, None, None, logs.p, test, len(d), 0, unpaired)
    moved = d[d != 0]
    ranks = np.sign(moved) * stats.rankdata(np.abs(moved)) if len(moved) else np.zeros(1)
    p = sign_flip(ranks) if len(moved) else 1.0
    return Paired(difference, None, None, None, p, "signed ranks", len(d), 0, unpaired)


def noise_floor(values: Sequence[float]) -> float | None:
    """Twice the sample standard deviation of the baseline over seeds (T5's rule); None below 2."""
    return None if (s := summarize(values, bootstrap=0)).std is None else 2 * s.std


def winners(arms: Mapping[str, Mapping[int, float]], *, lower_is_better: bool) -> set[str]:
    """Arms to print bold: the best mean, if it beats every other arm after Holm's correction.

    Empty when the lead is inside the noise, when an arm with diverged seeds has the best mean, or
    when a compared arm has fewer than 5 finite seeds.
    """
    means = {name: summarize(list(v.values()), bootstrap=0) for name, v in arms.items()}
    finite = {n: s for n, s in means.items() if math.isfinite(s.mean)}
    if len(finite) < 2 or min(s.n for s in finite.values()) < LEAST_SEEDS:
        return set()
    best = (min if lower_is_better else max)(finite, key=lambda n: finite[n].mean)
    if finite[best].lost:
        return set()
    rivals = holm({n: paired(arms[n], arms[best]) for n in finite if n != best})
    return {best} if all(c.resolved and c.n >= LEAST_SEEDS for c in rivals.values()) else set()
