"""Intervals hold the truth as often as they say, and say nothing where nothing is known."""

import math
import sys

import numpy as np
import pytest

from kvpatch.evaluation.intervals import disjoint, mean_interval, paired_bootstrap, proportion_interval


def binomial(hits: int, n: int, p: float) -> float:
    return math.comb(n, hits) * p**hits * (1 - p) ** (n - hits)


def test_bootstrap_intervals_hold_the_true_mean_about_as_often_as_they_say():
    rng = np.random.default_rng(7)
    runs, held = 300, 0
    for run in range(runs):
        # Skewed, as differences of scores are: mostly none, some of them large. True mean -0.3 * 0.5.
        difference = (rng.random(60) < 0.3) * -rng.random(60)
        mean, low, high = paired_bootstrap(difference, resamples=1000, seed=run)
        assert low <= mean <= high
        held += low <= -0.15 <= high
    # 0.95 less what the percentile method lacks at n = 60; three standard errors of 300 runs are 0.04.
    assert 0.90 <= held / runs <= 0.99


def test_pairs_show_what_two_separate_intervals_do_not():
    rng = np.random.default_rng(3)
    hardness = rng.random(50)
    full, cut = hardness, hardness - 0.02 - 0.01 * rng.random(50)
    assert not disjoint(mean_interval(full), mean_interval(cut))
    assert disjoint(paired_bootstrap(cut - full), (0.0, 0.0, 0.0))


def test_the_same_seed_gives_the_same_interval_and_a_wider_level_a_wider_one():
    values = np.random.default_rng(1).random(30)
    narrow, wide = paired_bootstrap(values, level=0.8), paired_bootstrap(values, level=0.99)
    assert paired_bootstrap(values, level=0.8) == narrow == mean_interval(values, level=0.8)
    assert paired_bootstrap(values, level=0.8, seed=1) != narrow
    assert narrow[0] == wide[0] == pytest.approx(values.mean())
    assert wide[1] < narrow[1] < narrow[0] < narrow[2] < wide[2]


def test_more_samples_than_are_drawn_at_a_time():
    values = np.arange(5000.0)
    mean, low, high = mean_interval(values, resamples=900)
    # 1.96 standard errors of a uniform distribution of width 5000: 1.96 * 5000 / sqrt(12 * 5000) = 40.
    assert mean == 2499.5 and low == pytest.approx(mean - 40, abs=6) and high == pytest.approx(mean + 40, abs=6)


@pytest.mark.filterwarnings("error")
def test_degenerate_data():
    assert all(math.isnan(one) for one in paired_bootstrap([]))
    mean, low, high = paired_bootstrap([0.5])
    assert mean == 0.5 and math.isnan(low) and math.isnan(high)
    assert paired_bootstrap([0.1] * 7) == (0.1, 0.1, 0.1)
    assert paired_bootstrap([0, 0]) == (0.0, 0.0, 0.0)
    # One sample of a hundred differs: some draws miss it.
    assert paired_bootstrap([1.0] + [0.0] * 99)[:2] == (0.01, 0.0)
    assert all(math.isnan(one) for one in proportion_interval(0, 0))


def test_proportions_by_hand():
    # Wilson, z = 1.95996, z^2 = 3.84146, p = 1/2, n = 100: centre 1/2 and, on both sides of it,
    # z * sqrt(p (1 - p) / n + z^2 / (4 n^2)) / (1 + z^2 / n) = 1.95996 * sqrt(0.0025 + 0.0000960365) / 1.0384146.
    assert proportion_interval(50, 100) == pytest.approx((0.5, 0.40383, 0.59617), abs=1e-5)
    # Clopper-Pearson without a hit: (1 - high)^10 = 0.025.
    assert proportion_interval(0, 10, method="exact") == pytest.approx((0.0, 0.0, 1 - 0.025**0.1))


def test_exact_proportions_hold_their_level_everywhere_and_wilson_on_average():
    n, shares = 30, np.linspace(0.02, 0.98, 49)
    held = {}
    for method in ("exact", "wilson"):
        intervals = [proportion_interval(hits, n, method=method) for hits in range(n + 1)]
        held[method] = [
            sum(binomial(hits, n, p) for hits, (_, low, high) in enumerate(intervals) if low <= p <= high)
            for p in shares
        ]
    assert min(held["exact"]) >= 0.95
    assert np.mean(held["wilson"]) == pytest.approx(0.95, abs=0.01)


def test_disjoint_intervals_share_no_point():
    assert disjoint((0.1, 0.0, 0.2), (0.4, 0.3, 0.5)) and disjoint((0.4, 0.3, 0.5), (0.1, 0.0, 0.2))
    assert not disjoint((0.1, 0.0, 0.3), (0.4, 0.3, 0.5))
    assert not disjoint((0.1, 0.0, 0.9), (0.4, 0.3, 0.5))
    assert not disjoint((0.1, math.nan, math.nan), (0.4, 0.3, 0.5))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: paired_bootstrap([[1.0, 2.0]]), r"one row, not of shape \(1, 2\)"),
        (lambda: mean_interval([1.0, math.nan]), "number 1 is not"),
        (lambda: paired_bootstrap([1.0, 2.0], level=95), "between 0 and 1, not 95"),
        (lambda: proportion_interval(3, 2), "between 0 and n = 2, not 3"),
        (lambda: proportion_interval(1, 2, method="wald"), "not 'wald'"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_missing_scipy_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "kvpatch\[eval\]"'):
        paired_bootstrap([1.0, 2.0])
