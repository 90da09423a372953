"""From single requests to the numbers of a level."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelines.loadtest.generator import Samples
from pipelines.loadtest.record import Level

_ANSWERED = ""


def summarize(
    samples: Samples,
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
    """What the server counted between two answers of its statistics extension: batches, queue and compute times."""
    first, second = _counted(before), _counted(after)
    batches = {size: count - first["batches"].get(size, 0) for size, count in second["batches"].items()}
    num = second["num"] - first["num"]
    return {
        "batches": {size: count for size, count in sorted(batches.items()) if count > 0},
        "queue_ms": (second["queue_ns"] - first["queue_ns"]) / num / 1e6 if num > 0 else None,
        "compute_ms": (second["compute_ns"] - first["compute_ns"]) / num / 1e6 if num > 0 else None,
    }


def _counted(statistics: Mapping[str, Any]) -> dict[str, Any]:
    """Of one model, over its versions. gRPC writes its integers as text, and leaves zeros out."""
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
