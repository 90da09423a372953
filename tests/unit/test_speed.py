"""Speed: what is measured by default and on demand, by the real CPU runners, and what a latency budget leads to."""

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console

from components.common.errors import UserError
from components.common.records import AccuracyReport, AccuracyRow, BenchmarkReport, BenchmarkRow, LatencyBudget
from components.common.runners import Runner
from components.common.runners.onnxruntime import OnnxRuntimeRunner
from components.common.runners.openvino import OpenVINORunner
from components.common.serving import Serving
from components.common.settings import resolve
from components.common.shapes import ShapeSpec
from components.common.steplog import StepLog
from components.common.verdict import Thresholds
from components.validate.config import ValidateConfig
from components.validate.run import _benchmark
from components.validate.speed import measure_speed, planned_loads, runs
from components.validate.speed_budget import budget_metrics, budget_text, within_budget
from pipelines.rendering import _print_legend

SHAPES = ShapeSpec(height=16, width=16, opt_batch=4, max_batch=8)
TIMES = {"warmup_s": 0.0, "duration_s": 0.02, "min_iterations": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A convolution and a pooling: images [B, 3, 16, 16] to logits [B, 4]."""
    weights = np.random.default_rng(0).standard_normal((4, 3, 3, 3), dtype=np.float32)
    nodes = [
        helper.make_node("Conv", ["images", "weights"], ["features"]),
        helper.make_node("GlobalAveragePool", ["features"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 16, 16])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 4])],
        [numpy_helper.from_array(weights, "weights")],
    )
    path = tmp_path_factory.mktemp("speed") / "small.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture(params=[OpenVINORunner, OnnxRuntimeRunner])
def runner(request: pytest.FixtureRequest, model: Path) -> Runner:
    return request.param(model, SHAPES)


class Meter:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def stop(self) -> None:
        self.calls.append("stop")


def test_a_runner_counts_batches_and_tells_the_meter(runner: Runner) -> None:
    meter = Meter()
    timing = runner.measure(4, **TIMES, meter=meter)
    assert meter.calls == ["start", "stop"]
    assert timing.wall_s >= TIMES["duration_s"]
    assert len(timing.latencies_ms) >= 5
    assert timing.images_per_s == pytest.approx(4 * len(timing.latencies_ms) / timing.wall_s)
    assert timing.latencies_ms.sum() == pytest.approx(1e3 * timing.wall_s)  # one call after another
    assert timing.latencies_ms.min() <= timing.mean_ms <= timing.latencies_ms.max()
    assert runner.memory_bytes is None


def test_a_signal_after_runners_of_openvino(model: Path) -> None:
    """In a process of its own, which it ended: OpenVINO had left the handlers' stack in memory that was gone."""
    code = """
import os, signal, sys
import subprocess
import sys
from pathlib import Path
from components.common.runners.openvino import OpenVINORunner
from components.common.shapes import ShapeSpec

signal.signal(signal.SIGTERM, lambda number, frame: print("heard"))
shapes = ShapeSpec.model_validate_json(sys.argv[2])
first, second = (OpenVINORunner(Path(sys.argv[1]), shapes) for _ in range(2))
first.close()
second.close()
os.kill(os.getpid(), signal.SIGTERM)
"""
    command = [sys.executable, "-X", "faulthandler", "-c", code, str(model), SHAPES.model_dump_json()]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    assert (ended.returncode, ended.stdout) == (0, "heard\n"), ended.stderr


def test_openvino_runs_several_batches_at_the_same_time(model: Path) -> None:
    runner, meter = OpenVINORunner(model, SHAPES), Meter()
    images = np.random.default_rng(1).standard_normal(SHAPES.input_shape(5), dtype=np.float32)
    before = runner.infer(images)
    for num_streams in (2, 3, 2):
        timing = runner.measure(8, **TIMES, num_streams=num_streams, meter=meter)
        assert timing.batch_size == 8
        assert len(timing.latencies_ms) >= 5
        assert timing.wall_s >= TIMES["duration_s"]
        assert (timing.latencies_ms > 0).all()
        # No more than so many batches can have been under way at any moment (and 10 % for the clock).
        assert timing.latencies_ms.sum() / 1e3 < 1.1 * num_streams * (timing.wall_s + timing.latencies_ms.max() / 1e3)
    assert meter.calls == ["start", "stop"] * 3
    np.testing.assert_array_equal(runner.infer(images), before)


def test_a_runtime_without_streams_says_so(model: Path) -> None:
    with pytest.raises(UserError, match="one batch at a time, got num_streams 2; set it to 1"):
        OnnxRuntimeRunner(model, SHAPES).measure(1, **TIMES, num_streams=2)


def as_text(config: ValidateConfig, *, on_gpu: bool, max_batch: int = 128) -> list[str]:
    return [str(load) for load in planned_loads(config, on_gpu, max_batch)]


def test_defaults_measure_much_on_gpus_and_little_on_cpus() -> None:
    assert as_text(ValidateConfig(), on_gpu=False) == [
        "batch 1",
        "batch 16",
        "batch 1, without copies",  # of which a CPU runs none
    ]
    assert as_text(ValidateConfig(), on_gpu=True) == [
        *(f"batch {size}" for size in (1, 2, 4, 8, 16, 32, 64, 128)),
        "batch 1, without copies",
        "batch 128, without copies",
        "batch 1, 2 streams",
        "batch 8, 2 streams",
        "batch 128, 2 streams",
        "batch 1, 4 streams",
        "batch 8, 4 streams",
        "batch 128, 4 streams",
    ]
    # A budget is the wish for the best of many.
    assert as_text(ValidateConfig(latency_budget="7ms", benchmark_no_transfer_batch_sizes=()), on_gpu=False) == [
        *(f"batch {size}" for size in (1, 2, 4, 8, 16)),
        *(f"batch {size}, {number} streams" for number in (2, 4) for size in (1, 8)),
    ]
    loads = planned_loads(ValidateConfig(), False, 128)
    assert [runs("openvino", load) for load in loads] == [True, True, False]
    assert all(runs("tensorrt", load) for load in planned_loads(ValidateConfig(), True, 128))


def test_every_part_is_a_setting() -> None:
    config = ValidateConfig(
        benchmark_batch_sizes=(8, 2, 2, 64),
        benchmark_streams=(1, 3),
        benchmark_stream_batch_sizes=(2, 4),  # 4 is not measured at all
        benchmark_no_transfer_batch_sizes=(),
    )
    assert as_text(config, on_gpu=True, max_batch=32) == ["batch 2", "batch 8", "batch 2, 3 streams"]
    alone = config.model_copy(update={"benchmark_streams": (1,)})
    assert as_text(alone, on_gpu=True) == ["batch 2", "batch 8", "batch 64"]


def test_rows_of_real_runners(model: Path) -> None:
    config = ValidateConfig(
        benchmark_batch_sizes=(1, 4),
        benchmark_streams=(2,),
        benchmark_stream_batch_sizes=(4,),
        benchmark_repeats=3,
        benchmark_seconds=0.06,
        benchmark_warmup_seconds=0,
        min_iterations=3,
    )
    said: list[tuple[int, int, str]] = []
    runners = [("fp32", OpenVINORunner(model, SHAPES)), ("int8", OnnxRuntimeRunner(model, SHAPES))]
    rows = measure_speed(config, runners, 8, lambda *now: said.append(now))
    assert [(row.precision, row.batch_size, row.num_streams) for row in rows] == [
        ("fp32", 1, 1),
        ("int8", 1, 1),
        ("fp32", 4, 1),
        ("int8", 4, 1),
        ("fp32", 4, 2),
    ]
    assert said[0] == (0, 15, "fp32, batch 1")
    assert said[14] == (14, 15, "fp32, batch 4, 2 streams")
    for row in rows:
        assert (row.num_repeats, row.with_transfers) == (3, True)
        assert row.num_iterations >= 9
        assert row.lowest_images_per_s <= row.images_per_s <= row.highest_images_per_s
        assert 0 < row.p50_ms <= row.p90_ms <= row.p95_ms <= row.p99_ms
        assert (row.power_w, row.images_per_s_per_w, row.memory_bytes, row.sm_clock_mhz) == (None, None, None, None)
    report = BenchmarkReport(bundle_digest="b", rows=rows)
    assert report.row("fp32", 4) == rows[2]  # one stream
    assert report.row("int8", 8) is None
    assert report.plain_rows == rows[:4]


def test_rows_of_older_reports_are_read() -> None:
    old = {"precision": "int8", "runtime": "openvino", "batch_size": 1, "images_per_s": 9.0, "num_iterations": 7}
    row = BenchmarkRow.model_validate({**old, "p50_ms": 1.0, "p90_ms": 2.0, "p99_ms": 3.0})
    assert row.is_plain
    report = BenchmarkReport.model_validate({"bundle_digest": "b", "rows": [row.model_dump()]})
    assert report.latency_budget is None


@pytest.mark.parametrize(
    ("typed", "milliseconds"),
    [("7ms", 7), ("7", 7), (7, 7), (2.5, 2.5), ("0.5 s", 500), (".5s", 500), ("700us", 0.7), (" 1.25 ms ", 1.25)],
)
def test_a_budget_is_read(typed: object, milliseconds: float) -> None:
    config = resolve(ValidateConfig, "validate", {"latency_budget": typed})
    assert config.latency_budget_ms == pytest.approx(milliseconds)
    assert config == resolve(ValidateConfig, "validate", {"latency_budget": config.latency_budget})
    assert ValidateConfig().latency_budget_ms is None


@pytest.mark.parametrize("typed", ["fast", "0", "0ms", "-1ms", "7 min", "ms", "nan", "1e999s", "9" * 400, [7], True])
def test_nonsense_is_no_budget(typed: object) -> None:
    with pytest.raises(UserError) as refused:
        resolve(ValidateConfig, "validate", {"latency_budget": typed})
    assert str(refused.value).startswith(f"validate.latency_budget: can't read {typed!r} as a latency; write a number")
    assert "such as 7ms, 0.5s or 700us" in str(refused.value)


def row(
    precision: str, batch: int, rate: float, p99_ms: float, *, streams: int = 1, copies: bool = True
) -> BenchmarkRow:
    return BenchmarkRow(
        precision=precision,
        runtime="tensorrt",
        batch_size=batch,
        num_streams=streams,
        with_transfers=copies,
        images_per_s=rate,
        p50_ms=p99_ms / 2,
        p90_ms=p99_ms / 2,
        p99_ms=p99_ms,
        num_iterations=9,
    )


ROWS = (
    row("fp32", 1, 300, 4),
    row("fp32", 8, 900, 9),
    row("fp16", 8, 4000, 3),
    row("int8", 8, 8000, 2),
    row("int8", 64, 20_000, 7.5),
    row("int8", 64, 40_000, 5, copies=False),
    row("int8", 8, 12_000, 7, streams=2),
)


def budget(
    budget_ms: float, *, int8_pct: float = 79.9, fp16_pct: float | None = 80.0, min_top1_pct: float = 0
) -> LatencyBudget:
    measured = {"fp32": 80.0, "fp16": fp16_pct, "int8": int8_pct}
    accuracy = AccuracyReport(
        dataset_digest="d",
        split_digest="s",
        bundle_digest="b",
        rows=tuple(
            AccuracyRow(precision=name, runtime="tensorrt", num_images=1000, top1_pct=pct)
            for name, pct in measured.items()
        ),
    )
    thresholds = Thresholds(max_top1_drop_points=0.5, min_relative_top1_pct=99, min_top1_pct=min_top1_pct)
    return within_budget(budget_ms, ROWS, accuracy, thresholds)


def test_the_fastest_within_the_budget_is_chosen() -> None:
    found = budget(7)
    assert budget_text(found) == "within 7 ms: INT8, batch 8, 2 streams, 12,000 images/s (p99 7.00 ms)"
    assert (found.nearest, found.left_out) == (None, ())
    assert budget_metrics(found) == {
        "latency_budget_ms": 7,
        "budget_images_per_s": 12_000,
        "budget_p99_ms": 7,
        "budget_batch_size": 8,
        "budget_num_streams": 2,
    }
    assert budget_text(budget(8)) == "within 8 ms: INT8, batch 64, 20,000 images/s (p99 7.50 ms)"


def test_nothing_within_the_budget_tells_how_far_the_best_is() -> None:
    found = budget(0.5)
    assert found.chosen is None
    assert budget_text(found) == (
        "nothing within 0.5 ms: nearest is INT8, batch 8, 8,000 images/s (p99 2.00 ms), 1.5 ms too long"
    )
    assert budget_metrics(found) == {"latency_budget_ms": 0.5}


def test_only_accurate_precisions_are_recommended() -> None:
    left_out = "; INT8 left out: does not pass the checks on accuracy"
    chosen = "within 7 ms: FP16, batch 8, 4,000 images/s (p99 3.00 ms)"
    assert budget_text(budget(7, int8_pct=79.49)) == chosen + left_out
    assert budget_text(budget(7, int8_pct=79.5)).startswith("within 7 ms: INT8")  # exactly what is allowed
    found = budget(7, int8_pct=10.0, fp16_pct=None)
    assert found.left_out == ("fp16", "int8")
    assert budget_text(found).endswith("; FP16 and INT8 left out: do not pass the checks on accuracy")
    assert budget_text(found).startswith("within 7 ms: FP32, batch 1, 300 images/s")


def test_without_speed_there_is_nothing_to_choose() -> None:
    accuracy = AccuracyReport(dataset_digest="d", split_digest="s", bundle_digest="b", rows=())
    found = within_budget(7, (), accuracy, Thresholds())
    assert budget_text(found) == "nothing within 7 ms: no speed was measured"


@pytest.mark.parametrize(("least", "left_out"), [(80.0, ()), (80.5, ("fp32", "fp16", "int8"))])
def test_fp32_needs_the_least_top1_too(least: float, left_out: tuple[str, ...]) -> None:
    found = budget(0.5, min_top1_pct=least, int8_pct=80.0)
    assert found.left_out == left_out
    said = "; FP32 and FP16 and INT8 left out: do not pass the checks on accuracy"
    assert budget_text(found).endswith("1.5 ms too long" if not left_out else f"nothing within 0.5 ms{said}")


@pytest.mark.parametrize(
    ("kind", "sizes", "measured", "said"),
    [
        (OpenVINORunner, (1, 8, 16, 64), {1, 8}, "the speed of batch 16, 64 is not measured: the models take up to 8"),
        (OnnxRuntimeRunner, (1, 8), set(), ""),  # a numerical reference, on whose speed no check may rest
    ],
)
def test_what_is_not_measured(
    kind: type[OpenVINORunner], sizes: tuple[int, ...], measured: set[int], said: str, model: Path, capsys: Any
) -> None:
    settings = {"benchmark_batch_sizes": sizes, "benchmark_seconds": 0.01, "benchmark_warmup_seconds": 0}
    config = resolve(ValidateConfig, "validate", settings)
    serving = Serving(precision="fp32", file=model, runner=kind(model, SHAPES), note="")
    bundle: Any = SimpleNamespace(digest="b", manifest=SimpleNamespace(shapes=SHAPES))
    accuracy = AccuracyReport(dataset_digest="d", split_digest="s", bundle_digest="b", rows=())
    found = _benchmark(config, [serving], bundle, accuracy, StepLog("validate"))
    assert {entry.batch_size for entry in found.rows} == measured
    told = capsys.readouterr().err
    assert said in told
    assert ("is not measured" in told) == bool(said)


@pytest.mark.parametrize(
    ("batch_size", "said"), [(None, "no speed was measured, on CPU"), (16, "images/s at batch 16, on")]
)
def test_the_summary_of_a_run_without_speed(batch_size: int | None, said: str) -> None:
    line = SimpleNamespace(num_images=120, device="CPU", throughput_batch_size=batch_size)
    console = Console(file=io.StringIO())
    _print_legend(console, SimpleNamespace(rows=[line]))  # type: ignore[arg-type]
    assert said in console.file.getvalue()  # type: ignore[attr-defined]
