"""Intervals and tests of paired differences, against scipy and against counting by hand."""

import numpy as np
import pytest
from scipy import stats

from components.common.contracts.statistics import (
    beta_cdf,
    chance_of,
    difference_interval,
    drop_lower,
    drop_upper,
    holm,
    images_needed,
    mcnemar,
    paired_counts,
    tango_upper,
)


def rights(lost: int, gained: int, both: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    """Image by image, whether the reference and the other are right."""
    pairs = [(True, False)] * lost + [(False, True)] * gained + [(True, True)] * both + [(False, False)] * neither
    reference, other = np.array(pairs).T
    return reference, other


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (0, 7), (3, 3), (11, 2), (5, 19), (12, 12)])
def test_few_differing_images_are_tested_exactly(lost: int, gained: int) -> None:
    expected = stats.binomtest(lost, lost + gained, 0.5).pvalue if lost + gained else 1.0
    assert mcnemar(lost, gained) == (pytest.approx(expected, rel=1e-12), "exact binomial")


@pytest.mark.parametrize(("lost", "gained"), [(13, 12), (25, 0), (40, 20), (300, 250), (1000, 400), (60, 60)])
def test_many_differing_images_are_tested_by_chi_square(lost: int, gained: int) -> None:
    statistic = max(0, abs(lost - gained) - 1) ** 2 / (lost + gained)
    p_value, test = mcnemar(lost, gained)
    assert (p_value, test) == (pytest.approx(stats.chi2.sf(statistic, 1), rel=1e-9), "chi-square")
    # An approximation of the exact test, which is near it already where it is first used.
    assert p_value == pytest.approx(stats.binomtest(lost, lost + gained, 0.5).pvalue, rel=0.25, abs=1e-5)


@pytest.mark.parametrize(
    ("count", "lost", "gained", "upper"),
    # By hand: lost - N x + 0.44 / (N x) = -1.64485 sqrt(N x (1 - x)) with none gained; with all, the last is 0.44 / N
    [(359, 1, 0, 1.2817), (719, 3, 1, 0.9290), (719, 4, 0, 1.2428), (1000, 0, 0, 0.2985), (100, 0, 100, -94.7224)],
)
def test_tango(count: int, lost: int, gained: int, upper: float) -> None:
    assert 100 * tango_upper(count, lost, gained) == pytest.approx(upper, abs=1e-3)


@pytest.mark.parametrize(
    ("count", "budget", "gained_points"), [(500, 1.0, 1.0), (1000, 0.5, 0.5), (410, 1.0, 1.5), (740, 0.5, 0.75)]
)
def test_a_drop_of_the_budget_passes_in_at_most_5_percent(count: int, budget: float, gained_points: float) -> None:
    """Counted over all that can be seen, where the interval without its correction is too short."""
    passing, share = 0.0, (budget + gained_points) / 100
    for lost in range(25):
        chance = stats.binom.pmf(lost, count, share)
        for gained in range(25):
            if drop_upper(count, lost, gained) <= budget:
                passing += chance * stats.binom.pmf(gained, count - lost, gained_points / 100 / (1 - share))
    assert 0.04 < passing <= 0.05


def test_the_interval_allows_for_what_few_images_can_not_show() -> None:
    """Without gained images the exact interval is longer: N images without a loss are the rule of three."""
    assert drop_upper(1000, 0, 0) == -drop_lower(1000, 0, 0) == pytest.approx(100 * (1 - 0.05**0.001))
    exact = stats.binomtest(4, 719).proportion_ci(0.90, "exact")  # two-sided 90 %, so 95 % on each side
    assert drop_upper(719, 4, 0) == pytest.approx(100 * exact.high)
    assert drop_upper(719, 3, 1) == 100 * tango_upper(719, 3, 1)
    assert drop_upper(359, 0, 9) == drop_upper(359, 0, 0) > 100 * tango_upper(359, 0, 9)
    assert (drop_upper(7, 7, 0), drop_upper(0, 0, 0)) == (100.0, 100.0)
    wald = 1 - 100 * stats.norm.ppf(0.99) * (500 - 1) ** 0.5 / 10_000  # of five tests at once, and many images
    assert drop_lower(10_000, 300, 200, num_tests=5) == pytest.approx(wald, abs=0.02)
    counts = paired_counts(*rights(8, 2, 300, 40))
    assert counts == (350, 8, 2)
    low_points, high_points = difference_interval(*counts)
    assert (low_points, high_points) == (-drop_upper(*counts), -drop_lower(*counts))
    assert low_points < -100 * 6 / 350 < high_points


@pytest.mark.parametrize(("lost", "gained", "budget"), [(0, 0, 0.5), (1, 1, 0.5), (3, 1, 0.9), (3, 0, 0.4)])
def test_images_needed_are_the_fewest_that_decide(lost: int, gained: int, budget: float) -> None:
    needed = images_needed(400, lost, gained, budget)
    assert needed is not None

    def is_open(count: float) -> bool:
        counts = count, lost * count / 400, gained * count / 400
        return drop_lower(*counts) <= budget < drop_upper(*counts)

    assert is_open(needed - 1)
    assert not is_open(needed)


@pytest.mark.parametrize(
    ("num_correct", "count", "share"), [(33, 90, 1 / 3), (40, 90, 1 / 3), (0, 5, 0.5), (1, 5, 0.1), (5, 5, 0.5)]
)
def test_chance_is_the_exact_binomial_tail(num_correct: int, count: int, share: float) -> None:
    expected = stats.binomtest(num_correct, count, share, alternative="greater").pvalue
    assert chance_of(num_correct, count, share) == pytest.approx(expected)


def test_holm_by_hand() -> None:
    # Sorted: 0.01 x 4, 0.02 x 3, 0.03 x 2, 0.04 x 1; none below the one before it.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
    assert holm([0.03]) == [0.03]


def test_the_beta_function_is_that_of_scipy():
    rng = np.random.default_rng(0)
    for a, b, x in zip(10 ** rng.uniform(0, 5, 300), 10 ** rng.uniform(0, 5, 300), rng.uniform(0, 1, 300), strict=True):
        for point in (x, min(a / (a + b) * (0.8 + 0.4 * x), 0.999)):
            assert beta_cdf(point, a, b) == pytest.approx(stats.beta.cdf(point, a, b), abs=1e-8)
    assert (beta_cdf(0.0, 2, 3), beta_cdf(1.0, 2, 3)) == (0.0, 1.0)
