"""Intervals and tests of paired differences, against scipy and against counting by hand."""

import numpy as np
import pytest
from scipy import stats

from components.common.statistics import bootstrap_interval, holm, mcnemar, paired_difference


def rights(lost: int, gained: int, both: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    """Image by image, whether the reference and the other are right."""
    pairs = [(True, False)] * lost + [(False, True)] * gained + [(True, True)] * both + [(False, False)] * neither
    reference, other = np.array(pairs).T
    return reference, other


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (0, 7), (3, 3), (11, 2), (5, 19), (12, 12)])
def test_few_differing_images_are_tested_exactly(lost: int, gained: int) -> None:
    found = mcnemar(lost, gained)
    expected = stats.binomtest(lost, lost + gained, 0.5).pvalue if lost + gained else 1.0
    assert (found.p_value, found.test) == (pytest.approx(expected, rel=1e-12), "exact binomial")


@pytest.mark.parametrize(("lost", "gained"), [(13, 12), (25, 0), (40, 20), (300, 250), (1000, 400), (60, 60)])
def test_many_differing_images_are_tested_by_chi_square(lost: int, gained: int) -> None:
    found = mcnemar(lost, gained)
    statistic = max(0, abs(lost - gained) - 1) ** 2 / (lost + gained)
    assert (found.p_value, found.test) == (pytest.approx(stats.chi2.sf(statistic, 1), rel=1e-9), "chi-square")
    # An approximation of the exact test, which is near it already where it takes over.
    assert found.p_value == pytest.approx(stats.binomtest(lost, lost + gained, 0.5).pvalue, rel=0.25, abs=1e-5)


def test_mcnemar_of_one_direction_counted_by_hand() -> None:
    # Of 5 images all are lost: 2 of the 32 equally likely outcomes are as extreme, all lost and all gained.
    assert mcnemar(5, 0).p_value == mcnemar(0, 5).p_value == 2 / 32


@pytest.mark.parametrize(("lost", "gained", "both", "neither"), [(30, 12, 800, 158), (4, 4, 90, 22), (2, 0, 60, 58)])
def test_the_bootstrap_of_counts_is_that_of_images(lost: int, gained: int, both: int, neither: int) -> None:
    reference, other = rights(lost, gained, both, neither)

    def difference(first: np.ndarray, second: np.ndarray, axis: int) -> np.ndarray:
        return 100 * (second.mean(axis=axis) - first.mean(axis=axis))

    expected = stats.bootstrap(
        (reference, other), difference, paired=True, vectorized=True, method="percentile", n_resamples=9999, rng=1
    ).confidence_interval
    step = 100 / len(reference)  # ends are whole images, and random
    assert bootstrap_interval(len(reference), lost, gained) == pytest.approx(tuple(expected), abs=1.01 * step)


def test_the_bootstrap_is_repeatable_and_needs_no_images() -> None:
    assert bootstrap_interval(1000, 30, 12) == bootstrap_interval(1000, 30, 12)
    assert bootstrap_interval(1000, 30, 12, seed=1) != bootstrap_interval(1000, 30, 12, num_resamples=100, seed=2)
    low, high = bootstrap_interval(10**9, 3_000_000, 1_000_000)  # as quick as for a thousand
    assert (low, high) == pytest.approx((-0.2, -0.2), abs=0.001)
    assert bootstrap_interval(0, 0, 0) == (0.0, 0.0)


@pytest.mark.parametrize("count", [100, 120, 5000])
def test_where_nothing_differs_only_one_interval_says_how_little_is_known(count: int) -> None:
    right = np.ones(count, bool)
    assert bootstrap_interval(count, 0, 0) == (0.0, 0.0)
    difference = paired_difference(right, right)
    assert -difference.low_points == pytest.approx(difference.high_points)
    assert difference.high_points == pytest.approx(100 * 1.959964 * 2**0.5 / (count + 2))


def test_intervals_hold_what_they_promise() -> None:
    """Of 400 drawn data sets, about 95 % have the true difference inside both intervals."""
    random = np.random.default_rng(0)
    draws = random.multinomial(500, [0.04, 0.02, 0.94], size=400)
    inside = np.zeros((400, 2), bool)
    for row, (lost, gained, same) in enumerate(draws.tolist()):
        low, high = bootstrap_interval(500, lost, gained, num_resamples=2000, seed=row)
        other = paired_difference(*rights(lost, gained, same, 0))
        inside[row] = low <= -2 <= high, other.low_points <= -2 <= other.high_points
    assert (inside.mean(axis=0) > 0.92).all()
    assert (inside.mean(axis=0) < 0.98).all()


def test_holm_by_hand() -> None:
    # Sorted: 0.01 x 4, 0.02 x 3, 0.03 x 2, 0.04 x 1; none below the one before it.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    assert holm([0.03]) == [0.03]


def test_holm_raises_few_false_alarms() -> None:
    """Where no class changed, about 5 % of 2,000 families of 50 tests name any; uncorrected, almost all do."""
    p_values = np.random.default_rng(0).random((2000, 50))
    named = [min(holm(row)) < 0.05 for row in p_values.tolist()]
    assert 0.03 < np.mean(named) < 0.06
    assert np.mean(p_values.min(axis=1) < 0.05) > 0.9
