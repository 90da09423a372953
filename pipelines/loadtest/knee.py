"""How much a server takes before latency runs away."""

import math
from collections.abc import Callable, Sequence

from pipelines.loadtest.record import Knee, Level

KEPT_UP = 0.95  # share of the images that were due that must be answered in the same time
_SHARES = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)  # of the closed loop's best throughput
_GROWTH, _MAX_GROWTHS = 1.3, 5  # above the highest share, as long as the rates are good
_NUM_REFINEMENTS = 2  # rates tried between the last good and the first bad one


def is_good(level: Level, budget_ms: float) -> bool:
    """Whether all requests were answered, as fast as they came, and 99 of 100 within the budget."""
    if level.num_errors or level.p99_ms is None or level.p99_ms > budget_ms:
        return False
    return level.images_per_s >= KEPT_UP * level.offered_images_per_s


def find_knee(levels: Sequence[Level], budget_ms: float) -> Knee | None:
    """The highest good rate below the lowest bad one; None where the lowest is bad already, or there is none."""
    ordered = sorted(levels, key=lambda level: level.request_rate or 0)
    good = None
    for level in ordered:
        if not is_good(level, budget_ms):
            break
        good = level
    if good is None or good.request_rate is None or good.p99_ms is None:
        return None
    return Knee(
        request_rate=good.request_rate,
        images_per_s=good.images_per_s,
        p99_ms=good.p99_ms,
        is_highest_tried=good is ordered[-1],
    )


def measure_rates(
    rates: Sequence[float], refine: bool, budget_ms: float, measure: Callable[[float], Level]
) -> list[Level]:
    """A level for each rate, and where asked for some more around the knee.

    A rate that is bad is measured once more, and the better level counts: the first could have met a hiccup of the
    machine, which says nothing of the server. Above the first bad rate one more is measured, to show what happens
    there.

    Args:
        rates: requests per second.
        refine: halve the interval between the last good and the first bad rate, twice.
        budget_ms: see `is_good`.
        measure: holds one rate.

    Returns:
        By rate, ascending.
    """
    levels: list[Level] = []
    good, bad, num_bad = 0.0, math.inf, 0

    def hold(rate: float) -> None:
        nonlocal good, bad, num_bad
        level = measure(rate)
        if not is_good(level, budget_ms):
            again = measure(rate)
            level = again if is_good(again, budget_ms) else level
        levels.append(level)
        if not is_good(level, budget_ms):
            bad, num_bad = min(bad, rate), num_bad + 1
        elif rate < bad:
            good = max(good, rate)

    for rate in sorted(rates):
        if not (refine and num_bad > 1):
            hold(rate)
    for _ in range(_MAX_GROWTHS if refine and rates else 0):
        if bad == math.inf:
            hold(_GROWTH * good)
    for _ in range(_NUM_REFINEMENTS if refine and bad < math.inf else 0):
        hold((good + bad) / 2)
    return sorted(levels, key=lambda level: level.request_rate or 0)


def rates_to_try(best_requests_per_s: float) -> list[float]:
    """Rates around what the closed loop reached at its best."""
    return [share * best_requests_per_s for share in _SHARES]
