"""Statistics against SciPy and hand-computed values, and the edges: n = 1, no spread, NaN."""

import math

import numpy as np
import pytest
from scipy import stats

from tx_jax.study.statistics import (
    Paired,
    holm,
    noise_floor,
    paired,
    paired_times,
    sign_flip,
    summarize,
    times,
    wilson,
    winners,
)
from tx_jax.study.verdicts import Claim, judge, judge_all, seeds_needed


def _seeds(*values):
    return dict(enumerate(values))


def test_mean_and_t_interval_by_hand():
    s = summarize([1.0, 2.0, 3.0, 4.0, 5.0])
    # std = sqrt(2.5); t(0.975, 4) = 2.776445
    half = 2.7764451 * math.sqrt(2.5) / math.sqrt(5)
    assert s.mean == 3.0 and s.std == pytest.approx(math.sqrt(2.5))
    assert (s.low, s.high) == (pytest.approx(3 - half), pytest.approx(3 + half))
    assert s.low < s.bca_low < 3 < s.bca_high < s.high


def test_the_t_interval_covers_the_mean_at_its_level():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        s = summarize(rng.normal(2.0, 3.0, 5), bootstrap=0)
        hits += s.low <= 2.0 <= s.high
    assert 930 <= hits <= 968  # 950 +- 2.6 standard deviations


def test_edges_of_a_summary():
    one = summarize([2.0])
    assert (one.mean, one.std, one.low, one.n) == (2.0, None, None, 1)
    flat = summarize([2.0, 2.0, 2.0])
    assert (flat.low, flat.high, flat.bca_low) == (2.0, 2.0, 2.0)
    lost = summarize([1.0, math.nan, 3.0, math.inf])
    assert (lost.n, lost.lost, lost.mean) == (2, 2, 2.0)
    none = summarize([math.nan])
    assert none.n == 0 and none.lost == 1 and math.isnan(none.mean)


def test_paired_equals_scipy_and_removes_the_common_part():
    rng = np.random.default_rng(1)
    common = rng.normal(0, 10, 5)
    a, b = common + 1 + rng.normal(0, 0.1, 5), common
    c = paired(_seeds(*a), _seeds(*b))
    want = stats.ttest_rel(a, b)
    assert c.p == pytest.approx(want.pvalue) and c.test == "t"
    assert c.difference == pytest.approx(np.mean(a - b))
    ci = want.confidence_interval(0.95)
    assert (c.low, c.high) == (pytest.approx(ci.low), pytest.approx(ci.high))
    assert c.resolved and stats.ttest_ind(a, b).pvalue > 0.5


def test_unpaired_diverged_single_and_constant_seeds():
    c = paired({0: 1.0, 1: 2.0, 2: math.nan, 9: 5.0}, {0: 0.5, 1: 1.0, 2: 0.0, 3: 1.0})
    assert (c.n, c.lost, c.unpaired) == (2, 1, 2)
    one = paired({0: 1.0}, {0: 0.25})
    assert (one.difference, one.p, one.test, one.low) == (0.75, None, "none", None)
    assert not one.resolved
    same = paired(_seeds(1, 2, 3), _seeds(1, 2, 3))
    assert same.p == 1.0 and same.difference == 0.0
    shifted = paired(_seeds(2.0, 3.0, 4.0), _seeds(1.0, 2.0, 3.0))
    assert shifted.p == 0.25 and not shifted.resolved  # Three equal signs: 2 / 2^3.
    assert paired({}, {}).n == 0


def test_sign_flip_by_hand_and_against_scipy():
    assert sign_flip([1.0, 2.0, 3.0]) == 2 / 8
    assert sign_flip([1.0, -1.0]) == 1.0
    d = np.array([0.3, 1.1, -0.2, 0.8, 0.9, 1.3])
    want = stats.permutation_test((d,), np.sum, permutation_type="samples").pvalue
    assert sign_flip(d) == pytest.approx(want)
    assert sign_flip(np.ones(20)) < 1e-3


def test_the_test_is_not_chosen_by_the_data():
    skewed = _seeds(0.01, 0.02, 0.01, 0.02, 0.015, 0.012, 5.0)
    got = paired(skewed, dict.fromkeys(skewed, 0.0))
    assert got.test == "t" and got.p == pytest.approx(
        stats.ttest_1samp(list(skewed.values()), 0).pvalue)
    assert (got.p < 0.05) == (got.low > 0), "p and interval never contradict each other"


def test_holm_by_hand():
    def with_p(p):
        return Paired(1.0, 1.0, 0.0, 2.0, p, "t", 5)

    got = holm({"a": with_p(0.01), "b": with_p(0.04), "c": with_p(0.03), "d": with_p(None)})
    assert [got[k].adjusted for k in "abcd"] == [pytest.approx(0.03), pytest.approx(0.06),
                                                 pytest.approx(0.06), None]
    assert got["a"].resolved and not got["b"].resolved and not got["d"].resolved


def test_holm_keeps_the_family_error_rate():
    rng = np.random.default_rng(2)
    wrong = 0
    for _ in range(400):
        base = _seeds(*rng.normal(size=5))
        arms = {n: paired(_seeds(*rng.normal(size=5)), base) for n in "abcd"}
        wrong += any(c.resolved for c in holm(arms).values())
    assert wrong / 400 < 0.075


def test_wilson_by_hand():
    low, high = wilson(5, 5)  # n / (n + z^2)
    assert (low, high) == (pytest.approx(5 / (5 + 1.959964 ** 2), rel=1e-6), pytest.approx(1.0))
    assert wilson(0, 0) == (0.0, 1.0)


def test_censored_times():
    t = times([100, 150, math.inf, 200, math.nan], 2000)
    assert (t.median, t.solved, t.n) == (200, 3, 5)
    never = times([100, 5000, math.inf], 2000)
    assert (never.median, never.solved) == (math.inf, 1)
    assert times([100.0, 200.0], 2000).median == 150.0
    assert times([100.0, math.inf], 2000).median == math.inf
    x = list(range(1, 11))
    ten = times(x, 100)  # The 95 % order-statistic interval of ten is (x2, x9).
    assert (ten.low, ten.high) == (2.0, 9.0)
    assert times([1.0, 2.0, 3.0], 10).high == math.inf


def test_paired_times_order_censored_last():
    late = paired_times(_seeds(*[math.inf] * 6), _seeds(100, 150, 100, 120, 130, 140), 2000)
    assert late.difference == math.inf and late.p == pytest.approx(2 / 64) and late.resolved
    both = paired_times(_seeds(math.inf, 9999), _seeds(math.inf, math.inf), 2000)
    assert both.difference == 0.0 and both.p == 1.0
    few = paired_times(_seeds(200, 300), _seeds(100, math.inf), 2000)
    assert few.p == 1.0 and math.isnan(few.difference) is False
    a, b = [3.0, 5.0, 9.0, 14.0, 20.0, 26.0], [1.0, 2.0, 10.0, 4.0, 5.0, 6.0]
    got = paired_times(_seeds(*a), _seeds(*b), 25)  # The last of `a` is censored.
    assert got.test == "signed ranks"
    assert got.p == pytest.approx(stats.wilcoxon(a, b, method="exact").pvalue)
    inf = math.inf
    tied = paired_times(_seeds(inf, 5, 5, inf), _seeds(5, inf, inf, 5), 100)
    assert tied.difference == 0.0 and tied.p == 1.0


def test_uncensored_times_are_compared_by_t_on_their_logs():
    fast = [100.0, 110.0, 95.0, 105.0, 98.0, 102.0]
    slow = [160.0, 190.0, 150.0, 170.0, 150.0, 175.0]
    got = paired_times(_seeds(*slow), _seeds(*fast), 400)
    assert got.test == "t on log" and got.low is None
    assert got.p == pytest.approx(stats.ttest_rel(np.log(slow), np.log(fast)).pvalue)
    assert got.difference == np.median(np.subtract(slow, fast))
    arms = {n: paired_times(_seeds(*slow), _seeds(*fast), 400) for n in "abcdef"}
    assert all(c.resolved for c in holm(arms).values()), "six seeds can resolve six arms"
    assert paired_times(_seeds(*slow), _seeds(*fast), 180).test == "signed ranks"
    twice = paired_times(_seeds(2, 4, 8), _seeds(1, 2, 4), 100)
    assert twice.test == "sign-flip" and twice.p == 0.25  # Equal log differences: no spread.


def test_seeds_needed_reaches_the_power_it_promises():
    n = seeds_needed(1.0, 1.0)
    assert n == 10  # Textbook value for a paired t-test with d = 1, power 0.8, alpha 0.05.
    rng = np.random.default_rng(3)
    x = rng.normal(1.0, 1.0, (4000, n))
    power = np.mean(stats.ttest_1samp(x, 0.0, axis=1).pvalue < 0.05)
    assert 0.78 < power < 0.86
    assert seeds_needed(0.0, 1.0) is None and seeds_needed(1e-9, 1.0) is None
    assert seeds_needed(1.0, 0.0) == 2 and seeds_needed(100.0, 1.0) == 2


def test_verdicts():
    base = _seeds(*[1.0, 1.1, 0.9, 1.05, 0.95])
    up = paired(_seeds(*[2.0, 2.2, 1.9, 2.0, 2.1]), base)
    assert judge("x is higher", up, "higher").outcome == "agrees"
    assert judge("x is lower", up, "lower").outcome == "differs"
    noisy = paired(_seeds(*[1.3, 0.9, 1.2, 0.8, 1.1]), base)
    verdict = judge("x is higher", noisy, "higher")
    assert verdict.outcome == "not resolvable with these seeds" and verdict.seeds_needed > 5
    near = paired(_seeds(*[1.01, 1.1, 0.91, 1.04, 0.95]), base)
    assert judge("no difference", near, "equal", margin=0.1).outcome == "agrees"
    assert judge("no difference", up, "equal", margin=0.1).outcome == "differs"
    assert judge("no difference", noisy, "equal", margin=0.05).outcome.startswith("not resolvable")
    single = judge("x is higher", paired({0: 1.0}, {0: 0.0}), "higher")
    assert single.outcome.startswith("not") and single.seeds_needed == 5


def test_verdicts_correct_p_over_the_claims_of_a_report():
    zero = dict.fromkeys(range(6), 0.0)
    weak = paired(_seeds(1.0, 2.0, 0.1, 1.5, 0.3, 0.9), zero)
    none = paired(_seeds(0.5, -0.4, 0.1, -0.2, 0.3, -0.1), zero)
    assert 0.01 < weak.p < 0.05 and judge("c", weak, "higher").outcome == "agrees"
    alone = judge_all([Claim("c", weak, "higher")])
    assert alone[0].outcome == "agrees"
    first, *rest, lost = judge_all([Claim("c", weak, "higher"), *[Claim("d", none, "higher")] * 4,
                                    Claim("e", paired({0: 1.0}, zero), "lower")])
    assert first.outcome.startswith("not resolvable") and len(rest) == 4
    assert f"p {holm(dict(enumerate([weak, *[none] * 4])))[0].adjusted:.2g} (Holm)" in first.detail
    assert first.seeds_needed == seeds_needed(weak.difference, weak.std, alpha=0.01) > 6
    assert lost.seeds_needed == 5 and "Holm" not in lost.detail
    never = paired_times(_seeds(*[math.inf] * 6), _seeds(100, 150, 100, 120, 130, 140), 2000)
    assert judge("c", never, "higher").outcome == "agrees"
    mixed = paired_times(_seeds(math.inf, *[160] * 5), _seeds(100, 150, 100, 120, 130, 140), 2000)
    over = judge_all([Claim("c", mixed, "higher"), *[Claim("d", none, "higher")] * 4])[0]
    assert over.outcome.startswith("not resolvable")
    assert over.seeds_needed == 8, "2^(1-8) is the first below 5 % of five"


def test_no_winner_inside_the_noise():
    rng = np.random.default_rng(4)
    base = rng.normal(size=5)
    clear = {"a": _seeds(*base), "b": _seeds(*(base - 1 + rng.normal(0, 0.05, 5)))}
    assert winners(clear, lower_is_better=True) == {"b"}
    assert winners(clear, lower_is_better=False) == {"a"}
    assert winners({"a": _seeds(*base), "b": _seeds(*rng.permutation(base))},
                   lower_is_better=True) == set()
    assert winners({"a": {0: 1.0}, "b": {0: 2.0}}, lower_is_better=True) == set()
    lucky = {"a": _seeds(*base), "b": {**clear["b"], 0: math.nan}}
    assert winners(lucky, lower_is_better=True) == set()
    assert noise_floor([1.0, 2.0, 3.0]) == pytest.approx(2.0) and noise_floor([1.0]) is None


def test_equal_differs_only_when_the_whole_interval_lies_outside_the_margin():
    near = paired({0: 1.2, 1: 0.4, 2: 1.9, 3: 1.1}, dict.fromkeys(range(4), 0.0))
    assert near.low < 1.0 < near.difference < near.high and near.resolved
    assert judge("c", near, "equal", margin=1.0).outcome.startswith("not resolvable")
    far = paired({0: 3.2, 1: 3.4, 2: 2.9, 3: 3.1}, dict.fromkeys(range(4), 0.0))
    assert judge("c", far, "equal", margin=1.0).outcome == "differs"


def test_a_direction_with_a_margin_needs_the_whole_interval_beyond_it():
    zero = dict.fromkeys(range(5), 0.0)
    clear = paired(_seeds(3.0, 3.2, 2.9, 3.1, 3.0), zero)
    near = paired(_seeds(0.9, 1.4, 1.1, 1.3, 0.8), zero)
    assert near.resolved and near.low < 1.0 < near.difference
    assert judge("c", clear, "higher", margin=1.0).outcome == "agrees"
    verdict = judge("c", near, "higher", margin=1.0)
    assert verdict.outcome.startswith("not resolvable") and verdict.seeds_needed > 5
    small = judge("c", near, "higher", margin=2.0)
    assert small.outcome.startswith("not resolvable"), "right direction, below the margin"
    assert judge("c", near, "higher").outcome == "agrees"
    assert judge("c", clear, "lower", margin=1.0).outcome == "differs"
    negative = paired(zero, _seeds(3.0, 3.2, 2.9, 3.1, 3.0))
    assert judge("c", negative, "lower", margin=1.0).outcome == "agrees"
    assert judge("c", negative, "higher", margin=1.0).outcome == "differs"
    late = paired_times(_seeds(*[math.inf] * 6), _seeds(100, 150, 100, 120, 130, 140), 2000)
    assert judge("c", late, "higher", margin=50).outcome == "agrees"


def test_nothing_is_bold_below_five_finite_seeds():
    arms = {"a": _seeds(1.0, 1.1, 1.05, 0.98, 1.02), "b": _seeds(2.0, 2.11, 2.04, 1.97, 2.03)}
    assert winners(arms, lower_is_better=True) == {"a"}
    few = {n: dict(list(v.items())[:4]) for n, v in arms.items()}
    assert winners(few, lower_is_better=True) == set()
    lost = {**arms, "b": {**arms["b"], 4: math.nan}}
    assert winners(lost, lower_is_better=True) == set()
    apart = {**arms, "b": {s + 3: v for s, v in arms["b"].items()}}
    assert winners(apart, lower_is_better=True) == set(), "five seeds each, two in common"


def test_not_higher_has_no_bound_below():
    """What gets better by more than the margin has not got worse."""
    start = dict.fromkeys(range(5), 1.0)
    better = paired({s: 0.4 + 0.01 * s for s in range(5)}, start)
    worse = paired({s: 1.2 + 0.01 * s for s in range(5)}, start)
    assert judge("c", better, "not higher", margin=0.1).outcome == "agrees"
    assert judge("c", better, "equal", margin=0.1).outcome == "differs"
    assert judge("c", worse, "not higher", margin=0.1).outcome == "differs"
    assert judge("c", worse, "not higher", margin=0.5).outcome == "agrees"
    assert judge("c", worse, "not higher", margin=0.21).outcome.startswith("not resolvable")
