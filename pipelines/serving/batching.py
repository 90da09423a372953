"""How a served model forms batches, from what was measured of it and the latency budget."""

import math
from collections.abc import Sequence

from components.common.records import Batching, BenchmarkReport, BenchmarkRow, Precision

UNMEASURED_QUEUE_SIZE = 128
LARGEST_QUEUE_SIZE = 1024  # what waits is in memory
DEFAULT_MAX_WAIT_S = 2.0
_GOOD_SHARE = 0.95  # of the highest throughput: a larger batch for the rest only makes everybody wait longer


def batching_for(
    precision: Precision, runtime: str, benchmark: BenchmarkReport | None, *, max_wait_s: float = DEFAULT_MAX_WAIT_S
) -> Batching:
    """Batch size, queue delay and the bounds of the queue.

    In a busy server a request waits for others (the queue delay), then for the batch that runs, then for its own. So
    with a latency budget the preferred batch is the fastest measured one of which p99 fits twice into the budget, and
    the delay at most what is then left. Without a budget it is the smallest one with 95 % of the highest throughput.
    The delay is never longer than a single image takes (p50), so that a request that comes alone takes at most twice
    its time. On a CPU, and where nothing was measured, nobody waits for others, and batches are what has come
    meanwhile: a CPU's batch takes long enough for the next one to gather, and Triton makes batches of the preferred
    size only where there is no delay; other sizes cost OpenVINO more.

    As many requests may wait as the model serves in `max_wait_s` at the measured speed, between 4 batches and 1,024:
    what comes on top is refused at once.

    Args:
        precision: what is served.
        runtime: "tensorrt" or "openvino"; rows of others tell nothing about it.
        benchmark: the report on the bundle; None for a bundle without one.
        max_wait_s: longest time in the queue.
    """
    rows = [
        row
        for row in (benchmark.rows if benchmark is not None else ())
        if row.precision == precision
        and row.runtime == runtime
        and row.with_transfers
        # The Python backend runs one batch at a time.
        and (runtime == "tensorrt" or row.num_streams == 1)
    ]
    if not rows:
        return Batching(
            preferred_batch_size=None,
            queue_delay_us=0,
            max_queue_size=UNMEASURED_QUEUE_SIZE,
            num_instances=1,
            reason=f"no speed of {precision.upper()} by {runtime} was measured: no request waits for others",
        )
    budget_ms = benchmark.latency_budget.budget_ms if benchmark and benchmark.latency_budget else None
    row, why = _operating_point(rows, budget_ms)
    single = min(rows, key=lambda other: (other.num_streams, other.batch_size))
    delay_ms = single.p50_ms / single.batch_size
    if budget_ms is not None:
        delay_ms = max(0.0, min(delay_ms, budget_ms - 2 * row.p99_ms))
    waits = row.batch_size > 1 and runtime == "tensorrt"
    served = math.ceil(row.images_per_s * max_wait_s)
    return Batching(
        preferred_batch_size=row.batch_size,
        queue_delay_us=round(1e3 * delay_ms) if waits else 0,
        max_queue_size=min(LARGEST_QUEUE_SIZE, max(4 * row.batch_size, served)),
        num_instances=row.num_streams,
        reason=f"{why}: batch {row.batch_size}, {row.images_per_s:,.0f} images/s (p99 {row.p99_ms:,.2f} ms)",
    )


def _operating_point(rows: Sequence[BenchmarkRow], budget_ms: float | None) -> tuple[BenchmarkRow, str]:
    """The row that the server is set up for, and why."""
    if budget_ms is None:
        enough = _GOOD_SHARE * max(row.images_per_s for row in rows)
        good = [row for row in rows if row.images_per_s >= enough]
        return min(good, key=lambda row: (row.num_streams * row.batch_size, -row.images_per_s)), "no latency budget"
    inside = [row for row in rows if 2 * row.p99_ms <= budget_ms]
    if inside:
        return max(inside, key=lambda row: (row.images_per_s, -row.p99_ms)), f"within {budget_ms:g} ms"
    nearest = min(rows, key=lambda row: row.p99_ms)
    return nearest, f"two batches take longer than the budget of {budget_ms:g} ms whatever their size"
