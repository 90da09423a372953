"""Arrivals are those of a Poisson process."""

import numpy as np
import pytest

from enginery.serving.loadtest.generator import poisson_arrivals


def test_gaps_are_exponential_and_the_rate_is_kept() -> None:
    arrivals = poisson_arrivals(200.0, 100.0, np.random.default_rng(1))
    assert len(arrivals) == pytest.approx(20_000, rel=0.03)
    gaps = np.diff(arrivals)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 200, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 200, rel=0.05)  # of an exponential distribution it is the mean
    counts = np.bincount(arrivals.astype(int), minlength=100)
    assert counts.var() == pytest.approx(200, rel=0.4)  # of a Poisson distribution it is the mean, too
    assert arrivals[-1] < 100


@pytest.mark.parametrize("rate", [0.01, 1.0])
def test_few_arrivals_are_possible_too(rate: float) -> None:
    lengths = [len(poisson_arrivals(rate, 1.0, np.random.default_rng(seed))) for seed in range(400)]
    assert np.mean(lengths) == pytest.approx(rate, abs=0.15)
    assert min(lengths) == 0


def test_a_seed_repeats_and_another_does_not() -> None:
    first, second, other = (poisson_arrivals(50, 2, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert np.array_equal(first, second)
    assert not np.array_equal(first[:5], other[:5])
