"""A load test in words."""

from enginery.serving.loadtest.results import Level, LoadTest, Series

_FEW_REQUESTS = 10  # a second; below, the digits behind the point count
_MUCH_LAG = 0.2  # of the median latency
_SOME_LAG_MS = 5.0  # below which nothing is said: timers are no better where a machine is busy


def load_text(level: Level) -> str:
    """Which load it was."""
    if level.concurrency is not None:
        return "1 client" if level.concurrency == 1 else f"{level.concurrency:,} clients"
    return rate_text(level.request_rate or 0)


def rate_text(rate: float) -> str:
    """Requests per second."""
    return f"{rate:,.0f} requests/s" if rate >= _FEW_REQUESTS else f"{rate:.2g} requests/s"


def knee_text(series: Series, budget_ms: float) -> str:
    """How much this configuration takes."""
    within = f"{budget_ms:,.3g} ms at p99"
    if series.knee is None:
        lowest = min((level.request_rate or 0 for level in series.open), default=None)
        if lowest is None:
            return "no knee: no request rate was tried"
        if not any(level.num_requests for level in series.open):
            return "no knee: no request was due in the time; take more --seconds or higher --rates"
        return f"no knee: {rate_text(lowest)}, the lowest rate tried, was too much for {within}"
    knee = series.knee
    above = "; no higher rate was tried" if knee.is_highest_tried else ""
    return f"knee: {knee.images_per_s:,.0f} images/s within {within} (measured {knee.p99_ms:,.1f} ms){above}"


def gain_text(result: LoadTest) -> str | None:
    """What dynamic batching brings; None where it was not compared."""
    if len(result.series) < 2:
        return None
    best = [max((level.images_per_s for level in series.closed), default=0.0) for series in result.series[:2]]
    text = f"Dynamic batching: {best[0]:,.0f} images/s at most, {best[1]:,.0f} without"
    if best[1]:
        text += f" ({best[0] / best[1]:.2f} times as much)"
    knees = [series.knee for series in result.series[:2]]
    if knees[0] is not None and knees[1] is not None:
        text += f"; at the knee {knees[0].images_per_s:,.0f} and {knees[1].images_per_s:,.0f}"
    return f"{text}."


def caution_text(result: LoadTest) -> str | None:
    """Where the load generator may have been the limit; None where it was not."""
    late = [
        level.request_rate or 0
        for series in result.series
        for level in series.open
        if level.send_lag_p99_ms
        and level.p50_ms
        and level.send_lag_p99_ms > max(_MUCH_LAG * level.p50_ms, _SOME_LAG_MS)
    ]
    if not late:
        return None
    return (
        f"Requests were sent late at some rates, from {min(late):,.0f} requests/s on: there the load generator was a "
        "limit, too. The latencies contain it. More --processes, on cores of their own, help."
    )
