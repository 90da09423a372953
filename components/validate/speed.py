"""Measure the speed of every precision in turns: batch sizes, streams, copies, latency budget."""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch

from components.common.contracts.records import (
    PRECISIONS,
    AccuracyReport,
    BenchmarkRow,
    LatencyBudget,
    OperatingPoint,
    Precision,
    Speedup,
)
from components.common.contracts.verdict import Thresholds, is_accurate
from components.common.process.gpu_monitor import GpuReading, monitor_of
from components.common.runtimes import RUNTIMES, Runtime, runs_plans
from components.common.runtimes.runner import PowerMonitor, Timed, Timing
from components.validate.config import ValidateConfig

Progress = Callable[[int, int, str], None]  # measurements done, their number, what is measured now

# A latency budget asks for the best of many ways, and its answer is no better than what is measured.
_CPU_STREAMS, _CPU_BUDGET_STREAMS, _GPU_STREAMS = (1,), (1, 2, 4), (1, 2, 4)
_MIN_TURNS = 5  # fewer give no bound of a median with 95 % confidence
_MAX_SPREAD = 0.25  # of a speed-up: the width of its interval over its median


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One way to run a model."""

    num_streams: int
    without_transfers: bool
    batch_size: int

    def __str__(self) -> str:
        """Return text such as "batch 8, 2 streams"."""
        parts = [f"batch {self.batch_size}"]
        parts += [f"{self.num_streams} streams"] if self.num_streams > 1 else []
        return ", ".join(parts + (["without copies"] if self.without_transfers else []))


class CpuMonitor:
    """Load on the cores of this process by others, between `start` and `stop`. A `PowerMonitor`, which runs another."""

    def __init__(self, other: PowerMonitor | None = None) -> None:
        self._other = other
        self._cores = os.sched_getaffinity(0)
        self._began = (0.0, 0.0, 0.0, 0.0)
        self.seconds = self.others_s = self.steal_s = 0.0  # of all cores, of all spans

    def start(self) -> None:
        """Begin a span."""
        if self._other is not None:
            self._other.start()
        self._began = self._now()

    def stop(self) -> None:
        """End the span."""
        seconds, busy_s, own_s, steal_s = (now - began for now, began in zip(self._now(), self._began, strict=True))
        self.seconds += seconds * len(self._cores)
        self.others_s += max(0.0, busy_s - own_s)
        self.steal_s += steal_s
        if self._other is not None:
            self._other.stop()

    def _now(self) -> tuple[float, float, float, float]:
        """Wall time, and time of the cores: busy for anybody, for this process with its threads, and stolen."""
        times = [entry for index, entry in enumerate(psutil.cpu_times(percpu=True)) if index in self._cores]
        busy_s = sum(entry.user + entry.nice + entry.system + entry.irq + entry.softirq for entry in times)
        return time.perf_counter(), busy_s, time.process_time(), sum(entry.steal for entry in times)


@dataclass(frozen=True, kw_only=True)
class _Turn:
    timing: Timing
    reading: GpuReading | None  # None without a GPU that can be watched
    memory_bytes: int | None


def measure_speed(
    config: ValidateConfig, runners: Sequence[tuple[Precision, Timed]], max_batch: int, progress: Progress
) -> tuple[BenchmarkRow, ...]:
    """Time every runner in every way that the config asks for.

    One precision after the other, and all again in each turn: what drifts, such as a GPU's temperature or the load of
    the machine, reaches every precision alike, and a speed-up compares what was measured within the same second or two.

    Args:
        config: what is measured, and how long.
        runners: by precision; all on one device.
        max_batch: the largest batch that the models take.
        progress: called before each measurement, and after the last.

    Returns:
        A row for each precision and way, by streams, copies and batch size.
    """
    on_gpu = any(runs_plans(runner.runtime) for _, runner in runners)
    ways = [
        (workload, precision, runner)
        for workload in planned_workloads(config, on_gpu, max_batch)
        for precision, runner in runners
        if runs(RUNTIMES[runner.runtime], workload)
    ]
    gpu = monitor_of(torch.device("cuda", torch.cuda.current_device())) if on_gpu else None
    cpus = {(workload, precision): CpuMonitor(gpu) for workload, precision, _ in ways}
    measured: dict[tuple[Workload, Precision], list[_Turn]] = {}
    for turn in range(config.benchmark_repeats):
        for index, (workload, precision, runner) in enumerate(ways):
            progress(turn * len(ways) + index, config.benchmark_repeats * len(ways), f"{precision}, {workload}")
            timing = _measure(config, runner, workload, cpus[workload, precision])
            reading = gpu.reading() if gpu is not None else None
            found = _Turn(timing=timing, reading=reading, memory_bytes=runner.memory_bytes)
            measured.setdefault((workload, precision), []).append(found)
    progress(config.benchmark_repeats * len(ways), config.benchmark_repeats * len(ways), "")
    rows = [
        _row(precision, runner, workload, measured[workload, precision], cpus[workload, precision])
        for workload, precision, runner in ways
    ]
    return tuple(row.model_copy(update={"over": _speedups(row, rows)}) for row in rows)


def _speedups(row: BenchmarkRow, rows: Sequence[BenchmarkRow]) -> dict[Precision, Speedup]:
    """Over each wider precision that was measured in the same way."""
    wider = PRECISIONS[: PRECISIONS.index(row.precision)]
    return {other.precision: speedup(row, other) for other in rows if other.way == row.way and other.precision in wider}


def speedup(own: BenchmarkRow, reference: BenchmarkRow) -> Speedup:
    """The speed-up of one row over another that was measured in the same turns, or why there is none to rely on.

    The bounds are order statistics: a ratio is above the true median as often as below it, so that the lowest of five
    lies above it in 1 of 32 cases (Conover, "Practical Nonparametric Statistics", 1999, section 3.2).
    """
    pairs = zip(own.turns_images_per_s, reference.turns_images_per_s, strict=True)
    ratios = sorted(mine / other for mine, other in pairs)
    median = statistics.median(ratios)
    outside = 0  # ratios on each side that can be left out of the interval
    while sum(math.comb(len(ratios), index) for index in range(outside + 2)) <= 0.05 * 2 ** len(ratios):
        outside += 1
    low, high = ratios[outside], ratios[-1 - outside]
    busiest = max(own, reference, key=lambda row: (row.others_pct or 0.0) + (row.steal_pct or 0.0))
    doubt = busiest.busy
    if not doubt and len(ratios) < _MIN_TURNS:
        turns = "1 turn tells" if len(ratios) == 1 else f"{len(ratios)} turns tell"
        doubt = f"{turns} no spread: set validate.benchmark_repeats to {_MIN_TURNS} or more"
    elif not doubt and (high - low) / median > _MAX_SPREAD:
        doubt = f"the turns scatter by more than {100 * _MAX_SPREAD:.0f} %: raise validate.benchmark_seconds"
    return Speedup(median=median, low=low, high=high, doubt=doubt)


def planned_workloads(config: ValidateConfig, on_gpu: bool, max_batch: int) -> list[Workload]:
    """Ways in which each precision is measured, in order: one stream first, then with the copies, then by batch."""
    on_cpu = _CPU_BUDGET_STREAMS if config.latency_budget else _CPU_STREAMS
    sizes = {size for size in config.batch_sizes(on_gpu=on_gpu) if size <= max_batch}
    streams = set(config.benchmark_streams or (_GPU_STREAMS if on_gpu else on_cpu)) - {1}
    ways = [(1, False, size) for size in sizes]
    ways += [(1, True, size) for size in sizes & set(config.benchmark_no_transfer_batch_sizes)]
    ways += [(number, False, size) for size in sizes & set(config.benchmark_stream_batch_sizes) for number in streams]
    return [
        Workload(num_streams=number, without_transfers=without, batch_size=size)
        for number, without, size in sorted(ways)  # contexts of further streams stay in memory
    ]


def runs(runtime: Runtime, workload: Workload) -> bool:
    """True if a runtime can be measured in this way."""
    streams = workload.num_streams == 1 or runtime.measures_streams
    return streams and (not workload.without_transfers or runtime.measures_without_transfers)


def _measure(config: ValidateConfig, runner: Timed, workload: Workload, monitor: PowerMonitor) -> Timing:
    return runner.measure(
        workload.batch_size,
        warmup_s=config.benchmark_warmup_seconds,
        duration_s=config.benchmark_seconds / config.benchmark_repeats,
        min_iterations=config.min_iterations,
        with_transfers=not workload.without_transfers,
        num_streams=workload.num_streams,
        monitor=monitor,
    )


def _row(
    precision: Precision, runner: Timed, workload: Workload, turns: Sequence[_Turn], cpu: CpuMonitor
) -> BenchmarkRow:
    readings = [turn.reading for turn in turns if turn.reading is not None]
    rates = tuple(turn.timing.images_per_s for turn in turns)
    latencies_ms = np.concatenate([turn.timing.latencies_ms for turn in turns])  # [batches of all turns] float64
    p50_ms, p90_ms, p95_ms, p99_ms = np.percentile(latencies_ms, [50, 90, 95, 99]).tolist()
    images_per_s = statistics.median(rates)
    power_w = _median([reading.power_w for reading in readings])
    clock_mhz = _median([reading.sm_clock_mhz for reading in readings])
    temperature_c = _median([reading.temperature_c for reading in readings])
    return BenchmarkRow(
        precision=precision,
        runtime=runner.runtime,
        batch_size=workload.batch_size,
        num_streams=workload.num_streams,
        with_transfers=not workload.without_transfers,
        num_repeats=len(turns),
        images_per_s=images_per_s,
        turns_images_per_s=rates,
        lowest_images_per_s=min(rates),
        highest_images_per_s=max(rates),
        others_pct=100 * cpu.others_s / cpu.seconds,
        steal_pct=100 * cpu.steal_s / cpu.seconds,
        mean_ms=float(latencies_ms.mean()),
        p50_ms=p50_ms,
        p90_ms=p90_ms,
        p95_ms=p95_ms,
        p99_ms=p99_ms,
        num_iterations=len(latencies_ms),
        power_w=power_w,
        images_per_s_per_w=images_per_s / power_w if power_w else None,
        memory_bytes=turns[0].memory_bytes,  # later turns hold the contexts of several streams too
        sm_clock_mhz=None if clock_mhz is None else round(clock_mhz),
        temperature_c=None if temperature_c is None else round(temperature_c),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


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
    accurate = [row for row in measured if is_accurate(thresholds, accuracy, row.precision)]
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


def _point(row: BenchmarkRow) -> OperatingPoint:
    return OperatingPoint(**row.model_dump(include=set(OperatingPoint.model_fields)))


def budget_text(budget: LatencyBudget, unit: str = "images") -> str:
    """Return text such as "within 7 ms: INT8, batch 8, 2 streams, 12,345 images/s (p99 6.21 ms)"."""
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
        return f"within {limit}: {_point_text(budget.chosen, unit)}{reason}"
    if budget.nearest is not None:
        over = budget.nearest.p99_ms - budget.budget_ms
        nearest = _point_text(budget.nearest, unit)
        return f"nothing within {limit}: nearest is {nearest}, {over:,.3g} ms too long{reason}"
    return f"nothing within {limit}{reason or ': no speed was measured'}"


def _point_text(point: OperatingPoint, unit: str) -> str:
    """Return text such as "INT8, batch 8, 2 streams, 12,345 images/s (p99 6.21 ms)"."""
    streams = f", {point.num_streams} streams" if point.num_streams > 1 else ""
    speed = f"{point.images_per_s:,.0f} {unit}/s (p99 {point.p99_ms:,.2f} ms)"
    return f"{point.precision.upper()}, batch {point.batch_size}{streams}, {speed}"


def budget_metrics(budget: LatencyBudget) -> dict[str, float]:
    """The budget and what it leads to as MLflow metrics; the budget alone where nothing surely stays within."""
    metrics = {"latency_budget_ms": budget.budget_ms}
    if budget.chosen is not None and not budget.doubt:
        point = budget.chosen
        metrics["budget_images_per_s"], metrics["budget_p99_ms"] = point.images_per_s, point.p99_ms
        metrics["budget_batch_size"], metrics["budget_num_streams"] = point.batch_size, point.num_streams
    return metrics
