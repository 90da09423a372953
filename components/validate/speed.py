"""Measure the speed of every precision: batch sizes, streams, with and without copies, repeated."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from components.common.gpu_monitor import GpuMonitor, GpuReading, monitor_of
from components.common.records import BenchmarkRow, Precision
from components.common.runners import Runner, Timing
from components.validate.config import ValidateConfig

Progress = Callable[[int, int, str], None]  # measurements done, their number, what is measured now

_CPU_BATCHES, _GPU_BATCHES = (1, 16), (1, 2, 4, 8, 16, 32, 64, 128)
_CPU_STREAMS, _GPU_STREAMS = (1,), (1, 2, 4)
# A latency budget asks for the best of many ways, and its answer is no better than what is measured.
_CPU_BUDGET_BATCHES, _CPU_BUDGET_STREAMS = (1, 2, 4, 8, 16), (1, 2, 4)
_CPU_REPEATS, _GPU_REPEATS = 1, 3
_CPU_SECONDS, _GPU_SECONDS = 3.0, 2.0  # in all repeats
_WITH_STREAMS = ("openvino", "tensorrt")  # the runtimes that run several batches at the same time
_WITH_TRANSFERS = ("tensorrt",)  # the runtimes that can leave the copies out


@dataclass(frozen=True, kw_only=True, order=True)
class Load:
    """One way to run a model. In the order in which they are measured: contexts of further streams stay in memory."""

    num_streams: int
    without_transfers: bool
    batch_size: int

    def __str__(self) -> str:
        """Such as "batch 8, 2 streams"."""
        parts = [f"batch {self.batch_size}"]
        parts += [f"{self.num_streams} streams"] if self.num_streams > 1 else []
        return ", ".join(parts + (["without copies"] if self.without_transfers else []))


@dataclass(frozen=True, kw_only=True)
class _Repeat:
    timing: Timing
    reading: GpuReading | None  # None without a GPU that can be watched
    memory_bytes: int | None


def measure_speed(
    config: ValidateConfig, runners: Sequence[tuple[Precision, Runner]], max_batch: int, progress: Progress
) -> tuple[BenchmarkRow, ...]:
    """Time every runner in every way that the config asks for.

    All of them in turn, then all again: what drifts, such as a GPU's temperature, then reaches every precision alike.

    Args:
        config: what is measured, and how long.
        runners: by precision; all on one device.
        max_batch: the largest batch that the models take.
        progress: told before each measurement.

    Returns:
        A row for each precision and way, by streams, copies and batch size.
    """
    on_gpu = any(runner.runtime == "tensorrt" for _, runner in runners)
    ways = [
        (load, precision, runner)
        for load in planned_loads(config, on_gpu, max_batch)
        for precision, runner in runners
        if runs(runner.runtime, load)
    ]
    num_repeats = config.benchmark_repeats or (_GPU_REPEATS if on_gpu else _CPU_REPEATS)
    seconds = config.benchmark_seconds or (_GPU_SECONDS if on_gpu else _CPU_SECONDS)
    monitor = monitor_of(torch.device("cuda", torch.cuda.current_device())) if on_gpu else None
    measured: dict[tuple[Load, Precision], list[_Repeat]] = {}
    for repeat in range(num_repeats):
        for index, (load, precision, runner) in enumerate(ways):
            progress(repeat * len(ways) + index, num_repeats * len(ways), f"{precision}, {load}")
            found = _measure(config, runner, load, seconds / num_repeats, monitor)
            measured.setdefault((load, precision), []).append(found)
    return tuple(_row(precision, runner, load, measured[load, precision]) for load, precision, runner in ways)


def planned_loads(config: ValidateConfig, on_gpu: bool, max_batch: int) -> list[Load]:
    """What is measured of each precision, in order: one stream first, then with the copies first, then by batch."""
    on_cpu = (_CPU_BUDGET_BATCHES, _CPU_BUDGET_STREAMS) if config.latency_budget else (_CPU_BATCHES, _CPU_STREAMS)
    default_sizes, default_streams = (_GPU_BATCHES, _GPU_STREAMS) if on_gpu else on_cpu
    sizes = {size for size in config.benchmark_batch_sizes or default_sizes if size <= max_batch}
    streams = set(config.benchmark_streams or default_streams) - {1}
    loads = [Load(num_streams=1, without_transfers=False, batch_size=size) for size in sizes]
    loads += [
        Load(num_streams=1, without_transfers=True, batch_size=size)
        for size in sizes & set(config.benchmark_no_transfer_batch_sizes)
    ]
    loads += [
        Load(num_streams=number, without_transfers=False, batch_size=size)
        for size in sizes & set(config.benchmark_stream_batch_sizes)
        for number in streams
    ]
    return sorted(loads)


def runs(runtime: str, load: Load) -> bool:
    """Whether a runtime can be measured in this way."""
    streams = load.num_streams == 1 or runtime in _WITH_STREAMS
    return streams and (not load.without_transfers or runtime in _WITH_TRANSFERS)


def _measure(
    config: ValidateConfig, runner: Runner, load: Load, duration_s: float, monitor: GpuMonitor | None
) -> _Repeat:
    timing = runner.measure(
        load.batch_size,
        warmup_s=config.benchmark_warmup_seconds,
        duration_s=duration_s,
        min_iterations=config.min_iterations,
        with_transfers=not load.without_transfers,
        num_streams=load.num_streams,
        meter=monitor,
    )
    reading = monitor.reading() if monitor is not None else None
    return _Repeat(timing=timing, reading=reading, memory_bytes=runner.memory_bytes)


def _row(precision: Precision, runner: Runner, load: Load, repeats: Sequence[_Repeat]) -> BenchmarkRow:
    timings = [repeat.timing for repeat in repeats]
    readings = [repeat.reading for repeat in repeats if repeat.reading is not None]
    rates = [timing.images_per_s for timing in timings]
    images_per_s = statistics.median(rates)
    power_w = _median([reading.power_w for reading in readings])
    clock_mhz = _median([reading.sm_clock_mhz for reading in readings])
    temperature_c = _median([reading.temperature_c for reading in readings])

    def percentile_ms(percent: float) -> float:
        return statistics.median(timing.percentile_ms(percent) for timing in timings)

    return BenchmarkRow(
        precision=precision,
        runtime=runner.runtime,
        batch_size=load.batch_size,
        num_streams=load.num_streams,
        with_transfers=not load.without_transfers,
        num_repeats=len(repeats),
        images_per_s=images_per_s,
        lowest_images_per_s=min(rates),
        highest_images_per_s=max(rates),
        mean_ms=statistics.median(timing.mean_ms for timing in timings),
        p50_ms=percentile_ms(50),
        p90_ms=percentile_ms(90),
        p95_ms=percentile_ms(95),
        p99_ms=percentile_ms(99),
        num_iterations=sum(len(timing.latencies_ms) for timing in timings),
        power_w=power_w,
        images_per_s_per_w=images_per_s / power_w if power_w else None,
        memory_bytes=repeats[0].memory_bytes,  # later repeats hold the contexts of several streams too
        sm_clock_mhz=None if clock_mhz is None else round(clock_mhz),
        temperature_c=None if temperature_c is None else round(temperature_c),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
