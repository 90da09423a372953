"""Where latency runs away."""

import pytest

from enginery.serving.loadtest.results import Level, find_knee, is_good, measure_rates, rates_to_try

BUDGET_MS = 50.0


def level(rate: float, *, capacity: float = 100.0, errors: int = 0) -> Level:
    """Of a server with one worker and random service times: its mean latency is 1 / (capacity - rate)."""
    latency_ms = 1e3 / (capacity - rate) if rate < 0.999 * capacity else 1e4
    return Level(
        request_rate=rate,
        images_per_request=1,
        duration_s=10,
        num_requests=round(rate * 10),
        errors={"overloaded": errors} if errors else {},
        images_per_s=min(rate, capacity),
        p50_ms=latency_ms * 0.7,
        p95_ms=latency_ms,
        p99_ms=latency_ms,
        max_ms=latency_ms,
        send_lag_p99_ms=0.1,
        batches={},
        queue_ms=None,
        compute_ms=None,
    )


def test_good_is_in_time_complete_and_without_errors() -> None:
    assert is_good(level(70), BUDGET_MS)
    assert not is_good(level(90), BUDGET_MS)  # 100 ms
    assert not is_good(level(10, errors=1), BUDGET_MS)
    behind = level(70).model_copy(update={"images_per_s": 60.0})
    assert not is_good(behind, BUDGET_MS)
    assert not is_good(level(70).model_copy(update={"p99_ms": None}), BUDGET_MS)


def test_the_knee_is_the_highest_good_rate_below_the_first_bad_one() -> None:
    knee = find_knee([level(rate) for rate in (90, 20, 60, 75)], BUDGET_MS)
    assert knee is not None
    assert (knee.request_rate, knee.is_highest_tried) == (75, False)
    assert knee.p99_ms == pytest.approx(40)
    lucky = [level(20), level(90), level(95).model_copy(update={"p99_ms": 10.0})]
    found = find_knee(lucky, BUDGET_MS)
    assert found is not None
    assert found.request_rate == 20
    alone = find_knee([level(20)], BUDGET_MS)
    assert alone is not None
    assert alone.is_highest_tried
    assert find_knee([level(90)], BUDGET_MS) is None
    assert find_knee([], BUDGET_MS) is None


def test_the_search_comes_close_to_the_true_knee() -> None:
    tried: list[float] = []

    def measure(rate: float) -> Level:
        tried.append(rate)
        return level(rate)

    levels = measure_rates(rates_to_try(100), True, BUDGET_MS, measure)
    knee = find_knee(levels, BUDGET_MS)
    assert knee is not None
    assert 75 <= knee.request_rate <= 80  # in truth 1 / (100 - 80) is 50 ms
    assert [entry.request_rate for entry in levels] == sorted(set(tried))
    assert max(tried) == pytest.approx(100)  # one above the first bad rate, not all


def test_the_search_goes_on_above_where_everything_is_good() -> None:
    levels = measure_rates(rates_to_try(100), True, BUDGET_MS, lambda rate: level(rate, capacity=200))
    knee = find_knee(levels, BUDGET_MS)
    assert knee is not None
    assert not knee.is_highest_tried
    assert 160 <= knee.request_rate <= 180


def test_given_rates_are_all_measured_and_no_others() -> None:
    levels = measure_rates([50, 95, 200, 300], False, BUDGET_MS, level)
    assert [entry.request_rate for entry in levels] == [50, 95, 200, 300]


def test_a_hiccup_is_measured_again() -> None:
    seen: dict[float, int] = {}

    def measure(rate: float) -> Level:
        seen[rate] = seen.get(rate, 0) + 1
        return level(99 if rate == 40 and seen[rate] == 1 else rate).model_copy(update={"request_rate": rate})

    levels = measure_rates([20, 40, 60], False, BUDGET_MS, measure)
    assert seen == {20: 1, 40: 2, 60: 1}
    knee = find_knee(levels, BUDGET_MS)
    assert knee is not None
    assert knee.request_rate == 60
