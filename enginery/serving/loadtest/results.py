"""Results of a load test as loadtest.json has them: statistics by request rate, and the knee of latency."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import Field

from components.common.contracts.environment import Environment
from components.common.contracts.records import Record
from enginery.serving.loadtest.generator import RequestSamples


class Level(Record):
    """One load, held for some seconds."""

    concurrency: int | None = Field(None, description="Closed loop: clients, each of which waits for its answer.")
    request_rate: float | None = Field(None, description="Open loop: requests per second that were due, on average.")
    images_per_request: int
    duration_s: float = Field(description="Measured time, after the warm-up.")
    num_requests: int = Field(description="Requests that were due in the measured time.")
    errors: dict[str, int] = Field(description="Requests without an answer, by kind.")
    images_per_s: float = Field(description="Images of the answers that came in the measured time, over that time.")
    p50_ms: float | None = Field(description="Latency from when a request was due; time-outs count as long as waited.")
    p95_ms: float | None
    p99_ms: float | None
    max_ms: float | None
    send_lag_p99_ms: float | None = Field(
        description="How late requests were sent. Much of it: the load generator is the limit."
    )
    batches: dict[int, int] = Field(description="Executions of the network by their batch size, from the server.")
    queue_ms: float | None = Field(description="Mean time in the network's queue, from the server.")
    compute_ms: float | None = Field(description="Mean time that a request's batch computed, from the server.")

    @property
    def mean_batch(self) -> float | None:
        """Images per execution of the network; None where nothing ran."""
        executions = sum(self.batches.values())
        return sum(size * count for size, count in self.batches.items()) / executions if executions else None

    @property
    def offered_images_per_s(self) -> float:
        """Images that were due, over the measured time."""
        return self.num_requests * self.images_per_request / self.duration_s

    @property
    def num_errors(self) -> int:
        """Requests without an answer."""
        return sum(self.errors.values())


class Knee(Record):
    """The highest request rate at which all is well: answers keep up, none is missing, and p99 is within the budget."""

    request_rate: float = Field(description="Requests per second.")
    images_per_s: float
    p99_ms: float
    is_highest_tried: bool = Field(description="No higher rate was tried, so the knee may be above.")


class Series(Record):
    """One configuration of the server under all loads."""

    name: str
    batching: dict[str, Any] | None = Field(description="Triton's dynamic_batching settings; None without.")
    closed: tuple[Level, ...]
    open: tuple[Level, ...]
    knee: Knee | None = Field(description="None where even the lowest rate was too much, or none was tried.")


class LoadTest(Record):
    """All of it."""

    schema_version: Literal[1] = 1
    date: str
    url: str
    model: str
    network: str
    sent: str = Field(description="What the requests held, for people.")
    latency_budget_ms: float
    seconds_per_level: float
    client_cores: tuple[int, ...] | None = Field(description="Cores that the load generator was bound to.")
    max_batch_size: int
    instance_group: list[dict[str, Any]]
    series: tuple[Series, ...]
    failures: dict[str, int] = Field({}, description="The five most frequent reasons for no answer, and how often.")
    environment: Environment = Field(description="Of the load generator.")


_ANSWERED = ""


def summarize(
    samples: RequestSamples,
    *,
    window: tuple[float, float],
    images_per_request: int,
    server: Mapping[str, Any],
    concurrency: int | None = None,
    request_rate: float | None = None,
) -> Level:
    """The numbers of one level.

    A latency counts from when its request was due, not from when it was sent: a stalled server, or a generator that
    falls behind, would else hide the waiting of those who came meanwhile (Gil Tene's "coordinated omission").

    Args:
        samples: what became of the requests, those of the warm-up included.
        window: measured time, from and to, in seconds on the clock of the samples.
        images_per_request: as they were sent.
        server: see `server_change`.
        concurrency: of the closed loop, or None.
        request_rate: of the open loop, or None.
    """
    start, end = window
    due, sent, ended = (np.asarray(times, dtype=float) for times in (samples.due, samples.sent, samples.ended))
    kinds = np.asarray(samples.kinds, dtype=object)
    counted = (due >= start) & (due < end)
    timed = counted & ((kinds == _ANSWERED) | (kinds == "timeout"))
    latencies_ms = (ended - due)[timed] * 1e3
    answered = (kinds == _ANSWERED) & (ended >= start) & (ended < end)
    shares = np.percentile(latencies_ms, [50, 95, 99, 100]).tolist() if len(latencies_ms) else [None] * 4
    return Level(
        concurrency=concurrency,
        request_rate=request_rate,
        images_per_request=images_per_request,
        duration_s=end - start,
        num_requests=int(counted.sum()),
        errors={str(kind): count for kind, count in sorted(Counter(kinds[counted & (kinds != _ANSWERED)]).items())},
        images_per_s=int(answered.sum()) * images_per_request / (end - start),
        p50_ms=shares[0],
        p95_ms=shares[1],
        p99_ms=shares[2],
        max_ms=shares[3],
        send_lag_p99_ms=float(np.percentile((sent - due)[counted], 99) * 1e3) if counted.any() else None,
        **server,
    )


def server_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return batches, queue and compute times between two answers of the server's statistics extension."""
    first, second = _counted(before), _counted(after)
    batches = {size: count - first["batches"].get(size, 0) for size, count in second["batches"].items()}
    num = second["num"] - first["num"]
    return {
        "batches": {size: count for size, count in sorted(batches.items()) if count > 0},
        "queue_ms": (second["queue_ns"] - first["queue_ns"]) / num / 1e6 if num > 0 else None,
        "compute_ms": (second["compute_ns"] - first["compute_ns"]) / num / 1e6 if num > 0 else None,
    }


def _counted(statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Counters of one model, over its versions. gRPC writes its integers as text, and leaves zeros out."""
    batches: Counter[int] = Counter()
    num = queue_ns = compute_ns = 0
    for model in statistics.get("model_stats", []):
        for batch in model.get("batch_stats", []):
            batches[int(batch["batch_size"])] += int(batch.get("compute_infer", {}).get("count", 0))
        done = model.get("inference_stats", {})
        num += int(done.get("success", {}).get("count", 0))
        queue_ns += int(done.get("queue", {}).get("ns", 0))
        for part in ("compute_input", "compute_infer", "compute_output"):
            compute_ns += int(done.get(part, {}).get("ns", 0))
    return {"batches": batches, "num": num, "queue_ns": queue_ns, "compute_ns": compute_ns}


KEPT_UP = 0.95  # share of the images that were due that must be answered in the same time
RATE_SHARES = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1)  # rates to try, of the closed loop's best
_GROWTH, _MAX_GROWTHS = 1.3, 5  # above the highest share, as long as the rates are good
_NUM_REFINEMENTS = 2  # rates tried between the last good and the first bad one


def is_good(level: Level, budget_ms: float) -> bool:
    """True if all requests were answered, as fast as they came, and 99 of 100 within the budget."""
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
