"""The fastest way to run a model whose latency stays within a budget."""

from components.common.records import AccuracyReport, BenchmarkRow, LatencyBudget, OperatingPoint, Precision
from components.common.verdict import Thresholds, accuracy_checks, reaches_top1


def within_budget(
    budget_ms: float, rows: tuple[BenchmarkRow, ...], accuracy: AccuracyReport, thresholds: Thresholds
) -> LatencyBudget:
    """Precision, batch size and number of streams with the highest throughput whose p99 is at most `budget_ms`.

    Rows without the copies to and from the GPU don't count, since whoever serves has to make them.

    Args:
        budget_ms: longest p99 latency of a batch, in milliseconds.
        rows: what was measured.
        accuracy: says with `thresholds` which precisions are accurate enough to be recommended.
        thresholds: the gate's.
    """
    measured = [row for row in rows if row.with_transfers]
    accurate = [row for row in measured if is_accurate(accuracy, row.precision, thresholds)]
    inside = [row for row in accurate if row.p99_ms <= budget_ms]
    chosen = max(inside, key=lambda row: (row.images_per_s, -row.p99_ms), default=None)
    nearest = min(accurate, key=lambda row: row.p99_ms, default=None) if chosen is None else None
    known = {row.precision for row in accurate}
    return LatencyBudget(
        budget_ms=budget_ms,
        doubt=next((row.busy for row in accurate if row.busy), ""),
        chosen=_point(chosen) if chosen else None,
        nearest=_point(nearest) if nearest else None,
        left_out=tuple(dict.fromkeys(row.precision for row in measured if row.precision not in known)),
    )


def is_accurate(accuracy: AccuracyReport, precision: Precision, thresholds: Thresholds) -> bool:
    """Whether a precision passes the gate's checks on accuracy; FP32, which it is compared with, needs its top-1."""
    if precision == "fp32":
        return reaches_top1(thresholds, accuracy.row("fp32"))
    checks = accuracy_checks(thresholds, accuracy, accuracy.row(precision))
    return all(check.verdict == "pass" for check in checks)


def _point(row: BenchmarkRow) -> OperatingPoint:
    return OperatingPoint(**row.model_dump(include=set(OperatingPoint.model_fields)))


def budget_text(budget: LatencyBudget) -> str:
    """What a person is told, such as "within 7 ms: INT8, batch 8, 2 streams, 12,345 images/s (p99 6.21 ms)"."""
    limit = f"{budget.budget_ms:g} ms"
    names = " and ".join(precision.upper() for precision in budget.left_out)
    reason = (
        f"; {names} left out: {'do' if len(budget.left_out) > 1 else 'does'} not pass the checks on accuracy"
        if names
        else ""
    )
    if budget.doubt:
        return f"within {limit}: unsure, {budget.doubt}"
    if budget.chosen is not None:
        return f"within {limit}: {point_text(budget.chosen)}{reason}"
    if budget.nearest is not None:
        over = budget.nearest.p99_ms - budget.budget_ms
        nearest = point_text(budget.nearest)
        return f"nothing within {limit}: nearest is {nearest}, {over:,.3g} ms too long{reason}"
    return f"nothing within {limit}{reason or ': no speed was measured'}"


def point_text(point: OperatingPoint) -> str:
    """Such as "INT8, batch 8, 2 streams, 12,345 images/s (p99 6.21 ms)"."""
    streams = f", {point.num_streams} streams" if point.num_streams > 1 else ""
    speed = f"{point.images_per_s:,.0f} images/s (p99 {point.p99_ms:,.2f} ms)"
    return f"{point.precision.upper()}, batch {point.batch_size}{streams}, {speed}"


def budget_metrics(budget: LatencyBudget) -> dict[str, float]:
    """The budget and what it leads to as MLflow metrics; the budget alone where nothing surely stays within."""
    metrics = {"latency_budget_ms": budget.budget_ms}
    if budget.chosen is not None and not budget.doubt:
        point = budget.chosen
        metrics["budget_images_per_s"], metrics["budget_p99_ms"] = point.images_per_s, point.p99_ms
        metrics["budget_batch_size"], metrics["budget_num_streams"] = point.batch_size, point.num_streams
    return metrics
