"""Speed of TensorRT engines as validate measures it: power, memory, streams and copies. Fails, never skips."""

from pathlib import Path

import pynvml
import pytest
import torch
from torch import nn

from components.common.contracts.records import BenchmarkReport
from components.common.contracts.transforms import ShapeSpec
from components.common.process.gpu_monitor import monitor_of
from components.common.runtimes.tensorrt import TensorRTRunner, why_unavailable
from components.export.engines import build_engine
from components.export.onnx_export import export_onnx
from components.validate.config import ValidateConfig
from components.validate.speed import measure_speed
from tests.unit.measurements import power_monitor

SHAPES = ShapeSpec(height=64, width=64, min_batch=1, opt_batch=8, max_batch=16)
TIMES = {"warmup_s": 0.05, "duration_s": 0.5, "min_iterations": 10}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FP32 engine of two convolutions."""
    reason = why_unavailable()
    assert reason is None, reason
    folder = tmp_path_factory.mktemp("speed")
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).eval()
    export_onnx(network, folder / "fp32.onnx", SHAPES)
    plan = folder / "fp32.plan"
    build_engine(folder / "fp32.onnx", plan, precision="fp32", shapes=SHAPES, optimization_level=1)
    return plan


def test_memory_grows_with_the_streams(plan: Path) -> None:
    runner = TensorRTRunner(plan, SHAPES)
    alone = runner.memory_bytes
    # At least the two sets of input buffers of the first context.
    assert alone >= 2 * 4 * 16 * 3 * 64 * 64
    runner.measure(8, **TIMES, num_streams=4)
    assert runner.memory_bytes > alone
    runner.close()


@pytest.mark.parametrize("num_streams", [1, 2])
def test_the_monitor_runs_with_the_clock(plan: Path, num_streams: int) -> None:
    runner, monitor = TensorRTRunner(plan, SHAPES), power_monitor()
    timing = runner.measure(4, **TIMES, num_streams=num_streams, monitor=monitor)
    assert monitor.calls == ["start", "stop"]
    assert timing.wall_s >= TIMES["duration_s"]
    runner.close()


def test_every_way_is_a_row(plan: Path) -> None:
    config = ValidateConfig(
        benchmark_batch_sizes=(1, 8, 32),  # the engine takes 16 at most
        benchmark_stream_batch_sizes=(8,),
        benchmark_no_transfer_batch_sizes=(8,),
        benchmark_seconds=1.5,
    )
    runner = TensorRTRunner(plan, SHAPES)
    rows = measure_speed(config, [("fp32", runner)], SHAPES.max_batch, lambda *now: None)
    ways = [(row.batch_size, row.num_streams, row.with_transfers) for row in rows]
    assert ways == [(1, 1, True), (8, 1, True), (8, 1, False), (8, 2, True), (8, 4, True)]
    for row in rows:
        assert (row.num_repeats, len(row.turns_images_per_s)) == (5, 5)
        assert row.lowest_images_per_s <= row.images_per_s <= row.highest_images_per_s
        assert 0 < row.p50_ms <= row.p90_ms <= row.p95_ms <= row.p99_ms
        assert row.memory_bytes > 0
    report = BenchmarkReport(bundle_digest="b", rows=rows)
    with_copies, without = report.row("fp32", 8), rows[2]
    assert without.p50_ms < with_copies.p50_ms
    assert rows[4].memory_bytes > with_copies.memory_bytes
    runner.close()


def _nvml_is_there() -> bool:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def test_power_is_that_of_a_board_at_work(plan: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    monitor = monitor_of(device)
    if not _nvml_is_there():  # some sandboxes hide it; then nothing is told, and nothing fails
        assert monitor is None
        return
    runner = TensorRTRunner(plan, SHAPES)
    runner.measure(16, **TIMES | {"duration_s": 2.0}, monitor=monitor)
    reading = monitor.reading()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    limit_w = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3
    assert 10 < reading.power_w < 1.2 * limit_w
    assert 100 < reading.sm_clock_mhz < 4000
    assert 10 < reading.temperature_c < 110
    runner.close()
