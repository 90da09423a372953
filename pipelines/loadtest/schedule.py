"""When requests are due."""

import numpy as np


def poisson_arrivals(rate: float, duration_s: float, rng: np.random.Generator) -> np.ndarray:
    """Due times of a Poisson process: independent users, who do not wait for each other.

    Args:
        rate: requests per second on average.
        duration_s: how long they go on arriving.
        rng: where the randomness comes from.

    Returns:
        [N] float64, seconds from the start, ascending, all below `duration_s`. N is random, with mean rate x duration.
    """
    expected = rate * duration_s
    arrivals = np.empty(0)
    while not len(arrivals) or arrivals[-1] < duration_s:
        last = arrivals[-1] if len(arrivals) else 0.0
        gaps = rng.exponential(1 / rate, size=int(expected + 4 * np.sqrt(expected) + 8))
        arrivals = np.concatenate([arrivals, last + np.cumsum(gaps)])
    return arrivals[arrivals < duration_s]
