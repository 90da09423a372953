"""From single requests to numbers."""

from typing import Any

import numpy as np
import pytest

from enginery.serving.client.transport import parse_address
from enginery.serving.loadtest.generator import Load, Samples
from enginery.serving.loadtest.measuring import share_load
from enginery.serving.loadtest.results import Level, server_change, summarize

SERVER: dict[str, Any] = {"batches": {}, "queue_ms": None, "compute_ms": None}


def level(rows: list[tuple[float, float, float, str]], images_per_request: int = 1) -> Level:
    """rows: due, sent, ended, kind. The window is 1 to 3 s."""
    due, sent, ended, kinds = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [], [])
    samples = Samples(due=due, sent=sent, ended=ended, kinds=kinds)
    return summarize(samples, window=(1.0, 3.0), images_per_request=images_per_request, server=SERVER, request_rate=1.0)


def test_latency_counts_from_when_a_request_was_due() -> None:
    # A server that stalls for a second: requests that came meanwhile were sent late, and waited all the same.
    rows = [(1.0 + 0.1 * index, 2.0, 2.01, "") for index in range(10)]
    measured = level(rows)
    assert measured.p50_ms == pytest.approx(560, abs=1)
    assert measured.max_ms == pytest.approx(1010, abs=1)
    assert measured.send_lag_p99_ms == pytest.approx(991, abs=1)


def test_the_warm_up_does_not_count() -> None:
    measured = level([(0.5, 0.5, 0.9, ""), (0.9, 0.9, 1.5, ""), (1.5, 1.5, 1.51, ""), (2.9, 2.9, 3.5, "")], 4)
    assert measured.num_requests == 2  # those due from 1 s to 3 s
    assert measured.images_per_s == 2 * 4 / 2  # those answered from 1 s to 3 s
    assert measured.offered_images_per_s == 2 * 4 / 2
    assert measured.max_ms == pytest.approx(600)


def test_errors_are_counted_by_kind_and_a_time_out_is_a_latency() -> None:
    rows = [(1.0, 1.0, 1.001, "overloaded"), (1.1, 1.1, 1.101, "overloaded"), (1.2, 1.2, 2.2, "timeout")]
    measured = level([*rows, (1.3, 1.3, 1.31, "")])
    assert measured.errors == {"overloaded": 2, "timeout": 1}
    assert measured.num_errors == 3
    assert measured.max_ms == pytest.approx(1000)
    assert measured.p50_ms == pytest.approx((10 + 1000) / 2)
    assert measured.images_per_s == 0.5


def test_nothing_is_no_number() -> None:
    measured = level([])
    assert (measured.num_requests, measured.images_per_s) == (0, 0)
    assert measured.p99_ms is None
    assert measured.send_lag_p99_ms is None
    assert measured.mean_batch is None


def counters(batches: dict[int, int], num: int, queue_ns: int, infer_ns: int, kind: type = int) -> dict[str, Any]:
    return {
        "model_stats": [
            {
                "batch_stats": [
                    {"batch_size": kind(size), "compute_infer": {"count": kind(count)}}
                    for size, count in batches.items()
                ],
                "inference_stats": {
                    "success": {"count": kind(num)},
                    "queue": {"ns": kind(queue_ns)},
                    "compute_infer": {"ns": kind(infer_ns)},
                },
            }
        ]
    }


@pytest.mark.parametrize("kind", [int, str])  # HTTP's integers, and gRPC's as JSON
def test_what_the_server_did_is_the_difference_of_its_counters(kind: type) -> None:
    before = counters({1: 10, 4: 2}, 12, 5_000_000, 20_000_000, kind)
    after = counters({1: 10, 4: 5, 16: 1}, 20, 13_000_000, 60_000_000, kind)
    change = server_change(before, after)
    assert change == {"batches": {4: 3, 16: 1}, "queue_ms": 1.0, "compute_ms": 5.0}
    measured = summarize(Samples(), window=(0, 1), images_per_request=1, server=change, concurrency=1)
    assert measured.mean_batch == (3 * 4 + 16) / 4
    assert server_change(after, after) == {"batches": {}, "queue_ms": None, "compute_ms": None}
    assert server_change({}, before)["batches"] == {1: 10, 4: 2}


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
