"""The load test's arithmetic on invented requests: arrivals, statistics, the knee, and what people read."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.common.contracts.environment import environment
from enginery.serving.client.transport import parse_address
from enginery.serving.loadtest.generator import Load, RequestSamples, poisson_arrivals
from enginery.serving.loadtest.measuring import share_load
from enginery.serving.loadtest.page import caution_text, gain_text, knee_text, load_text, page
from enginery.serving.loadtest.results import (
    RATE_SHARES,
    Knee,
    Level,
    LoadTest,
    Series,
    find_knee,
    is_good,
    measure_rates,
    server_change,
    summarize,
)
from tests.unit.registered import enginery, refuses

BUDGET_MS = 50.0
SERVER: dict[str, Any] = {"batches": {}, "queue_ms": None, "compute_ms": None}


def level(rate: float | None, images_per_s: float, p99_ms: float, **changed: Any) -> Level:
    values = {
        "request_rate": rate,
        "images_per_request": 1,
        "duration_s": 10,
        "num_requests": round(10 * (rate or images_per_s)),
        "errors": {},
        "images_per_s": images_per_s,
        "p50_ms": p99_ms / 2,
        "p95_ms": 0.9 * p99_ms,
        "p99_ms": p99_ms,
        "max_ms": 2 * p99_ms,
        "send_lag_p99_ms": 0.5,
        "batches": {1: 30, 16: 4},
        "queue_ms": 1.25,
        "compute_ms": 3.5,
    }
    return Level(**values | changed)


# Arrivals.


def test_arrivals_are_a_poisson_process() -> None:
    arrivals = poisson_arrivals(200.0, 100.0, np.random.default_rng(1))
    assert len(arrivals) == pytest.approx(20_000, rel=0.03)
    gaps = np.diff(arrivals)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 200, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 200, rel=0.05)  # of an exponential distribution it is the mean
    assert np.bincount(arrivals.astype(int)).var() == pytest.approx(200, rel=0.4)  # of a Poisson one, too
    assert arrivals[-1] < 100
    for rate in (0.01, 1.0):  # few, and a seed repeats them
        found = [poisson_arrivals(rate, 1.0, np.random.default_rng(seed)) for seed in (*range(400), 399)]
        assert np.mean([len(times) for times in found]) == pytest.approx(rate, abs=0.15)
        assert min(map(len, found)) == 0
        assert np.array_equal(found[-1], found[-2])


def test_processes_share_a_load() -> None:
    address = parse_address("localhost")
    load = Load(address=address, model="m", requests=[b""], start_at=0, duration_s=1, timeout_s=1)
    closed = share_load(load, 3, 5.0, 1, 7, None)
    assert [part.concurrency for part in closed] == [3, 2, 2]
    assert {part.start_at for part in closed} == {5.0}
    assert [part.concurrency for part in share_load(load, 4, 5.0, 1, 2, None)] == [1, 1]
    rates = share_load(load, 4, 5.0, 1, None, 100.0)
    assert np.allclose([part.request_rate for part in rates], 25)
    assert len({part.seed for part in [*rates, *share_load(load, 4, 5.0, 2, None, 100.0)]}) == 8


# Statistics. A row is: due, sent, ended, kind; the measured time is 1 to 3 s.


def summary(rows: list[tuple[float, float, float, str]], images_per_request: int = 1) -> Level:
    due, sent, ended, kinds = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [], [])
    samples = RequestSamples(due=due, sent=sent, ended=ended, kinds=kinds)
    return summarize(samples, window=(1.0, 3.0), images_per_request=images_per_request, server=SERVER, request_rate=1.0)


def test_latency_counts_from_when_a_request_was_due_and_the_warm_up_does_not() -> None:
    # A server stalls for a second: requests that came meanwhile were sent late, and waited all the same.
    measured = summary([(1.0 + 0.1 * index, 2.0, 2.01, "") for index in range(10)])
    assert [measured.p50_ms, measured.max_ms, measured.send_lag_p99_ms] == pytest.approx([560, 1010, 991], abs=1)
    measured = summary([(0.5, 0.5, 0.9, ""), (0.9, 0.9, 1.5, ""), (1.5, 1.5, 1.51, ""), (2.9, 2.9, 3.5, "")], 4)
    assert measured.num_requests == 2  # those due from 1 s to 3 s
    assert measured.images_per_s == 2 * 4 / 2  # those answered from 1 s to 3 s
    assert measured.offered_images_per_s == 2 * 4 / 2
    assert measured.max_ms == pytest.approx(600)
    nothing = summary([])
    assert (nothing.num_requests, nothing.images_per_s) == (0, 0)
    assert (nothing.p99_ms, nothing.send_lag_p99_ms, nothing.mean_batch) == (None, None, None)


def test_errors_are_counted_by_kind_and_a_time_out_is_a_latency() -> None:
    rows = [(1.0, 1.0, 1.001, "overloaded"), (1.1, 1.1, 1.101, "overloaded"), (1.2, 1.2, 2.2, "timeout")]
    measured = summary([*rows, (1.3, 1.3, 1.31, "")])
    assert measured.errors == {"overloaded": 2, "timeout": 1}
    assert (measured.num_errors, measured.images_per_s) == (3, 0.5)
    assert [measured.p50_ms, measured.max_ms] == pytest.approx([(10 + 1000) / 2, 1000])


def counters(batches: dict[int, int], num: int, queue_ns: int, infer_ns: int, kind: type = int) -> dict[str, Any]:
    done = {"success": {"count": kind(num)}, "queue": {"ns": kind(queue_ns)}, "compute_infer": {"ns": kind(infer_ns)}}
    sizes = [{"batch_size": kind(size), "compute_infer": {"count": kind(count)}} for size, count in batches.items()]
    return {"model_stats": [{"batch_stats": sizes, "inference_stats": done}]}


@pytest.mark.parametrize("kind", [int, str])  # HTTP's integers, and gRPC's as JSON
def test_the_server_s_part_is_the_difference_of_its_counters(kind: type) -> None:
    before = counters({1: 10, 4: 2}, 12, 5_000_000, 20_000_000, kind)
    after = counters({1: 10, 4: 5, 16: 1}, 20, 13_000_000, 60_000_000, kind)
    change = server_change(before, after)
    assert change == {"batches": {4: 3, 16: 1}, "queue_ms": 1.0, "compute_ms": 5.0}
    measured = summarize(RequestSamples(), window=(0, 1), images_per_request=1, server=change, concurrency=1)
    assert measured.mean_batch == (3 * 4 + 16) / 4
    assert server_change(after, after) == SERVER
    assert server_change({}, before)["batches"] == {1: 10, 4: 2}


# The knee of a server with one worker and random service times: its mean latency is 1 / (capacity - rate).


def queued(rate: float, *, capacity: float = 100.0, **changed: Any) -> Level:
    latency_ms = 1e3 / (capacity - rate) if rate < 0.999 * capacity else 1e4
    return level(rate, min(rate, capacity), latency_ms, **changed)


def knee_rate(levels: list[Level]) -> float | None:
    knee = find_knee(levels, BUDGET_MS)
    return knee.request_rate if knee else None


def test_the_knee_is_the_highest_good_rate_below_the_first_bad_one() -> None:
    """Good is in time, complete and without errors."""
    assert is_good(queued(70), BUDGET_MS)
    assert not is_good(queued(90), BUDGET_MS)  # 100 ms
    for change in ({"errors": {"overloaded": 1}}, {"images_per_s": 60.0}, {"p99_ms": None}):
        assert not is_good(queued(70).model_copy(update=change), BUDGET_MS)
    knee = find_knee([queued(rate) for rate in (90, 20, 60, 75)], BUDGET_MS)
    assert (knee.request_rate, knee.is_highest_tried, knee.p99_ms) == (75, False, pytest.approx(40))
    assert knee_rate([queued(20), queued(90), queued(95).model_copy(update={"p99_ms": 10.0})]) == 20  # luck
    alone = find_knee([queued(20)], BUDGET_MS)
    assert alone.is_highest_tried
    assert knee_rate([queued(90)]) is knee_rate([]) is None


@pytest.mark.parametrize(("capacity", "low", "high"), [(100, 75, 80), (200, 160, 180)])  # in truth capacity - 20
def test_the_search_comes_close_to_the_true_knee_and_stops_above_it(capacity: int, low: int, high: int) -> None:
    tried: list[float] = []

    def measure(rate: float) -> Level:
        tried.append(rate)
        return queued(rate, capacity=capacity)

    levels = measure_rates([share * 100 for share in RATE_SHARES], True, BUDGET_MS, measure)
    assert low <= (knee_rate(levels) or 0) <= high
    assert [entry.request_rate for entry in levels] == sorted(set(tried))
    assert max(tried) < 1.2 * capacity  # one above the first bad rate, not all


def test_given_rates_are_all_measured_and_a_hiccup_again() -> None:
    seen: dict[float, int] = {}

    def measure(rate: float) -> Level:
        seen[rate] = seen.get(rate, 0) + 1
        return queued(99 if rate == 40 and seen[rate] == 1 else rate).model_copy(update={"request_rate": rate})

    levels = measure_rates([20, 40, 60, 95, 300], False, BUDGET_MS, measure)
    assert seen == {20: 1, 40: 2, 60: 1, 95: 2, 300: 2}
    assert knee_rate(levels) == 60


# What people read.


def series(name: str, factor: float) -> Series:
    errors = {"overloaded": 7, "timeout": 2}
    rates = [level(100, 100, 12), level(400 * factor, 400 * factor, 48), level(1200, 500 * factor, 900, errors=errors)]
    return Series(
        name=name,
        batching={"preferred_batch_size": [16], "max_queue_delay_microseconds": 2000} if factor > 1 else None,
        closed=(level(None, 200, 6, concurrency=1), level(None, 500 * factor, 60, concurrency=32)),
        open=tuple(rates),
        knee=Knee(request_rate=400 * factor, images_per_s=400 * factor, p99_ms=48, is_highest_tried=False),
    )


@pytest.fixture
def result() -> LoadTest:
    return LoadTest(
        date="2026-11-22T09:00:00+00:00",
        url="http://localhost:8000",
        model="<digits>",
        network="digits_model",
        sent="random tensors",
        latency_budget_ms=BUDGET_MS,
        seconds_per_level=5,
        client_cores=(1,),
        max_batch_size=128,
        instance_group=[{"count": 1, "kind": "KIND_CPU"}],
        series=(series("dynamic batching", 2.0), series("without", 1.0)),
        environment=environment(),
    )


def test_the_page_shows_each_level_and_needs_nothing_else(result: LoadTest) -> None:
    text = page(result.model_copy(update={"failures": {"<model> refused it": 1200}}))
    assert "1,200 times: &lt;model&gt; refused it" in text
    assert "&lt;digits&gt;" in text
    assert "<digits>" not in text
    assert text.count("<svg") == 3
    assert not re.search(r'(?:src|href)="(?!#|data:)', text)
    rows = re.findall(r"<tr[^>]*><th>(.*?)</th>", text)
    assert rows.count("1 client") == rows.count("1,200 requests/s") == 2
    assert len(re.findall(r'<tr class="chosen">', text)) == 2


def test_words_fit_the_results(result: LoadTest) -> None:
    assert "(2.00 times as much)" in str(gain_text(result))
    assert gain_text(result.model_copy(update={"series": result.series[:1]})) is None
    assert caution_text(result) is None
    late = result.series[0].model_copy(update={"open": (level(900, 900, 20, send_lag_p99_ms=15.0),)})
    assert "from 900 requests/s on" in str(caution_text(result.model_copy(update={"series": (late,)})))
    without = result.series[0].model_copy(update={"knee": None})
    assert "100 requests/s, the lowest rate tried" in knee_text(without, BUDGET_MS)
    untried = without.model_copy(update={"open": ()})
    assert "no request rate was tried" in knee_text(untried, BUDGET_MS)
    assert page(result.model_copy(update={"series": (untried,)}))
    nobody = without.open[0].model_copy(update={"request_rate": 0.5, "num_requests": 0, "p50_ms": None, "p99_ms": None})
    assert "no request was due" in knee_text(without.model_copy(update={"open": (nobody,)}), BUDGET_MS)
    assert load_text(nobody) == "0.5 requests/s"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--concurrency", "0"], "invalid-numbers"),
        (["--concurrency", "1,x"], "invalid-numbers"),
        (["--rates", "5,-1"], "invalid-numbers"),
        (["--rates", "nan"], "invalid-numbers"),
        (["--cores", "100000"], "invalid-numbers"),
        (["--latency-budget", "7 hours"], "invalid-numbers"),
        (["--tensors", "--data", "."], "conflicting-options"),
    ],
)
def test_options_that_can_not_be_are_refused(arguments: list[str], code: str, tmp_path: Path) -> None:
    with refuses(code):
        enginery("loadtest", *arguments, "--output", tmp_path / "new")
    assert not (tmp_path / "new").exists()
