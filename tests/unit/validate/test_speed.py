"""Speed: what is measured by default and on demand, by the real CPU runners, and what a latency budget leads to."""

import io
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from components.common.contracts.records import BenchmarkReport, LatencyBudget, Speedup
from components.common.contracts.settings import resolve
from components.common.contracts.transforms import ShapeSpec
from components.common.contracts.verdict import Thresholds
from components.common.process.steplog import StepLog
from components.common.runtimes import RUNTIMES
from components.common.runtimes.onnxruntime import OnnxRuntimeRunner
from components.common.runtimes.openvino import OpenVINORunner
from components.common.runtimes.runner import Runner
from components.common.runtimes.selection import RuntimeSelection
from components.validate.config import ValidateConfig
from components.validate.run import _benchmark
from components.validate.speed import (
    CpuMonitor,
    budget_metrics,
    budget_text,
    measure_speed,
    planned_workloads,
    runs,
    speedup,
    within_budget,
)
from components.validate.speed_text import main_table
from enginery.formats import new_console
from enginery.local.rendering import print_summary
from tests.processes import run_python
from tests.unit.measurements import accuracy_report, accuracy_row, benchmark_row, power_monitor
from tests.unit.refusals import refuses
from tests.unit.registered import constant_model

SHAPES = ShapeSpec(height=16, width=16, opt_batch=4, max_batch=8)
TIMES = {"warmup_s": 0.0, "duration_s": 0.02, "min_iterations": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images [B, 3, 16, 16] to logits [B, 4]."""
    path = tmp_path_factory.mktemp("speed") / "small.onnx"
    path.write_bytes(constant_model(1, 4))
    return path


@pytest.fixture(params=[OpenVINORunner, OnnxRuntimeRunner])
def runner(request: pytest.FixtureRequest, model: Path) -> Runner:
    return request.param(model, SHAPES)


def test_a_runner_counts_batches_and_tells_the_meter(runner: Runner) -> None:
    monitor = power_monitor()
    timing = runner.measure(4, **TIMES, monitor=monitor)
    assert monitor.calls == ["start", "stop"]
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
from pathlib import Path
from components.common.runtimes.openvino import OpenVINORunner
from components.common.contracts.transforms import ShapeSpec

signal.signal(signal.SIGTERM, lambda number, frame: print("heard"))
shapes = ShapeSpec.model_validate_json(sys.argv[2])
first, second = (OpenVINORunner(Path(sys.argv[1]), shapes) for _ in range(2))
first.close()
second.close()
os.kill(os.getpid(), signal.SIGTERM)
"""
    ended = run_python("-X", "faulthandler", "-c", code, model, SHAPES.model_dump_json())
    assert (ended.returncode, ended.stdout) == (0, "heard\n"), ended.stderr


def test_openvino_runs_several_batches_at_the_same_time(model: Path) -> None:
    runner, monitor = OpenVINORunner(model, SHAPES), power_monitor()
    images = np.random.default_rng(1).standard_normal(SHAPES.input_shape(5), dtype=np.float32)
    before = runner.infer(images)
    for num_streams in (2, 3, 2):
        timing = runner.measure(8, **TIMES, num_streams=num_streams, monitor=monitor)
        assert timing.batch_size == 8
        assert len(timing.latencies_ms) >= 5
        assert timing.wall_s >= TIMES["duration_s"]
        assert (timing.latencies_ms > 0).all()
        # No more than so many batches can have been under way at any moment (and 10 % for the clock).
        assert timing.latencies_ms.sum() / 1e3 < 1.1 * num_streams * (timing.wall_s + timing.latencies_ms.max() / 1e3)
    assert monitor.calls == ["start", "stop"] * 3
    np.testing.assert_array_equal(runner.infer(images), before)


def test_a_runtime_without_streams_says_so(model: Path) -> None:
    with refuses("one-stream-only"):
        OnnxRuntimeRunner(model, SHAPES).measure(1, **TIMES, num_streams=2)


def as_text(config: ValidateConfig, *, on_gpu: bool, max_batch: int = 128) -> list[str]:
    return [str(load) for load in planned_workloads(config, on_gpu, max_batch)]


def test_defaults_measure_much_on_gpus_and_little_on_cpus() -> None:
    on_cpu = as_text(ValidateConfig(), on_gpu=False)
    assert on_cpu == ["batch 1", "batch 16", "batch 1, without copies"]  # of which a CPU runs none
    assert as_text(ValidateConfig(), on_gpu=True) == [
        *(f"batch {size}" for size in (1, 2, 4, 8, 16, 32, 64, 128)),
        *(f"batch {size}, without copies" for size in (1, 128)),
        *(f"batch {size}, {number} streams" for number in (2, 4) for size in (1, 8, 128)),
    ]
    # A budget is the wish for the best of many.
    assert as_text(ValidateConfig(latency_budget="7ms", benchmark_no_transfer_batch_sizes=()), on_gpu=False) == [
        *(f"batch {size}" for size in (1, 2, 4, 8, 16)),
        *(f"batch {size}, {number} streams" for number in (2, 4) for size in (1, 8)),
    ]
    loads = planned_workloads(ValidateConfig(), False, 128)
    assert [runs(RUNTIMES["openvino"], load) for load in loads] == [True, True, False]
    assert all(runs(RUNTIMES["tensorrt"], load) for load in planned_workloads(ValidateConfig(), True, 128))


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
    ways = [(row.precision, row.batch_size, row.num_streams) for row in rows]
    assert ways == [("fp32", 1, 1), ("int8", 1, 1), ("fp32", 4, 1), ("int8", 4, 1), ("fp32", 4, 2)]
    assert said[0] == (0, 15, "fp32, batch 1")
    assert said[14:] == [(14, 15, "fp32, batch 4, 2 streams"), (15, 15, "")]
    for row in rows:
        assert (row.num_repeats, row.with_transfers) == (3, True)
        assert row.num_iterations >= 9
        assert (row.lowest_images_per_s, row.images_per_s, row.highest_images_per_s) == tuple(
            sorted(row.turns_images_per_s)
        )
        assert row.others_pct >= 0
        assert row.steal_pct >= 0
        assert 0 < row.p50_ms <= row.p90_ms <= row.p95_ms <= row.p99_ms
        assert (row.power_w, row.images_per_s_per_w, row.memory_bytes, row.sm_clock_mhz) == (None, None, None, None)
    # Within each turn, and over what was measured in the same way alone.
    assert [list(row.over) for row in rows] == [[], ["fp32"], [], ["fp32"], []]
    ratios = [own / fp32 for own, fp32 in zip(rows[3].turns_images_per_s, rows[2].turns_images_per_s, strict=True)]
    found = rows[3].over["fp32"]
    assert (found.low, found.median, found.high) == pytest.approx(sorted(ratios))
    assert found.doubt  # of three turns nothing is certain
    report = BenchmarkReport(bundle_digest="b", rows=rows)
    assert BenchmarkReport.model_validate_json(report.model_dump_json()) == report
    assert report.speedup("int8", "fp32", 4) == found
    assert report.row("fp32", 4) == rows[2]  # one stream
    assert report.row("int8", 8) is None
    assert report.plain_rows == rows[:4]


FP32_TURNS = (500.0, 498.0, 503.0, 490.0, 510.0)
DRIFT = (1.0, 0.8, 0.6, 0.5, 0.4)  # both at the same time


@pytest.mark.parametrize(
    ("own", "reference", "load", "expected", "doubt"),
    [
        ((1028, 1112, 1061, 1050, 1090), FP32_TURNS, {}, (2.056, 2.137, 2.233), ""),
        (tuple(1000 * d for d in DRIFT), tuple(500 * d for d in DRIFT), {}, (2, 2, 2), ""),
        ((825, 1830, 1000, 1500, 1200), (500,) * 5, {}, (1.65, 2.4, 3.66), "benchmark_seconds"),
        ((1000,) * 5, (500,) * 5, {"others_pct": 31.0}, (2, 2, 2), "idle machine"),
        ((1000,) * 5, (500,) * 5, {"steal_pct": 12.0}, (2, 2, 2), "idle machine"),
        ((1000,) * 5, (500,) * 5, {"others_pct": 6.0, "steal_pct": 3.0}, (2, 2, 2), ""),
        ((1000,) * 4, (500,) * 4, {}, (2, 2, 2), "benchmark_repeats"),
        # Of nine turns an odd one on either side does not count.
        ((50, 990, 995, 998, 1000, 1002, 1005, 1010, 9000), (500,) * 9, {}, (1.98, 2, 2.02), ""),
    ],
)
def test_recorded_turns_lead_to_a_speedup_or_to_none(
    own: tuple[float, ...], reference: tuple[float, ...], load: dict[str, float], expected: Any, doubt: str
) -> None:
    rows = [
        benchmark_row(name, turns[0], 8, turns_images_per_s=turns, **load)
        for name, turns in (("int8", own), ("fp32", reference))
    ]
    found = speedup(*rows)
    assert (found.low, found.median, found.high) == pytest.approx(expected, abs=1e-3)
    assert (doubt in found.doubt) if doubt else found.doubt == ""
    # Where the ratio is unsure, what it follows from is, too: neither stands anywhere as a number.
    report = BenchmarkReport(bundle_digest="", rows=(rows[0].model_copy(update={"over": {"fp32": found}}), rows[1]))
    sure = [row.images_per_s if not doubt else None for row in rows]
    assert [report.sure_images_per_s(row) for row in report.rows] == sure
    (line, _) = main_table(SimpleNamespace(benchmark=report, accuracy=SimpleNamespace(unit="images"))).lines
    assert (line.cells[1] == "unsure") == bool(doubt)
    is_busy = "idle" in doubt  # when a latency is unsure, too
    assert [cell == "unsure" for cell in line.cells[3:5]] == [is_busy] * 2
    assert rows[0].sure_p50_ms == (None if is_busy else 1.0)
    bounds = f"({found.low:.2f} to {found.high:.2f})"
    assert (line.cells[2] == "unsure", line.cells[2].endswith(bounds)) == (bool(doubt), not doubt)


def test_the_work_of_another_process_is_seen() -> None:
    """It works for half a second of its own CPU time while this process waits for it."""
    other = power_monitor()  # such as a GPU's, which is watched in the same spans
    monitor = CpuMonitor(other)
    code = "import time\nwhile time.process_time() < 0.5: pass"
    monitor.start()
    assert run_python("-c", code).returncode == 0
    monitor.stop()
    assert other.calls == ["start", "stop"]
    assert monitor.others_s > 0.4  # the kernel counts in hundredths
    assert monitor.seconds > 0.5 * len(os.sched_getaffinity(0))


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
    with refuses("invalid-setting", "validate.latency_budget"):
        resolve(ValidateConfig, "validate", {"latency_budget": typed})


ROWS = (
    benchmark_row("fp32", 300, 1, p99_ms=4),
    benchmark_row("fp32", 900, 8, p99_ms=9),
    benchmark_row("fp16", 4000, 8, p99_ms=3),
    benchmark_row("int8", 8000, 8, p99_ms=2),
    benchmark_row("int8", 20_000, 64, p99_ms=7.5),
    benchmark_row("int8", 40_000, 64, p99_ms=5, with_transfers=False),
    benchmark_row("int8", 12_000, 8, p99_ms=7, num_streams=2),
)


def budget(
    budget_ms: float, *, int8_pct: float = 79.9, fp16_pct: float | None = 80.0, min_score_pct: float = 0
) -> LatencyBudget:
    measured = (("fp32", 80.0), ("fp16", fp16_pct), ("int8", int8_pct))
    accuracy = accuracy_report(*(accuracy_row(name, pct) for name, pct in measured))
    return within_budget(budget_ms, ROWS, accuracy, Thresholds(confident=False, min_score_pct=min_score_pct))


LEFT_OUT = "do not pass the checks on accuracy"
AT_7_MS = "within 7 ms: INT8, batch 8, 2 streams, 12,000 images/s (p99 7.00 ms)"
FP16 = "within 7 ms: FP16, batch 8, 4,000 images/s (p99 3.00 ms)"
FP32 = "within 7 ms: FP32, batch 1, 300 images/s (p99 4.00 ms)"
NEAREST = "nothing within 0.5 ms: nearest is INT8, batch 8, 8,000 images/s (p99 2.00 ms), 1.5 ms too long"
NONE = f"nothing within 0.5 ms; FP32 and FP16 and INT8 left out: {LEFT_OUT}"


@pytest.mark.parametrize(
    ("budget_ms", "settings", "left_out", "said"),
    [
        (7, {}, (), AT_7_MS),
        (8, {}, (), "within 8 ms: INT8, batch 64, 20,000 images/s (p99 7.50 ms)"),
        (0.5, {}, (), NEAREST),
        (7, {"int8_pct": 79.49}, ("int8",), f"{FP16}; INT8 left out: does not pass the checks on accuracy"),
        (7, {"int8_pct": 79.5}, (), AT_7_MS),  # exactly what is allowed
        (7, {"int8_pct": 10, "fp16_pct": None}, ("fp16", "int8"), f"{FP32}; FP16 and INT8 left out: {LEFT_OUT}"),
        (0.5, {"min_score_pct": 80.5}, ("fp32", "fp16", "int8"), NONE),
        (0.5, {"min_score_pct": 80, "int8_pct": 80}, (), NEAREST),
    ],
)
def test_the_fastest_accurate_way_wins(
    budget_ms: float, settings: dict[str, Any], left_out: tuple[str, ...], said: str
) -> None:
    found = budget(budget_ms, **settings)
    assert budget_text(found) == said
    assert found.left_out == left_out
    assert (found.chosen is None) == said.startswith("nothing")
    assert found.chosen is None or found.nearest is None


def test_the_budget_in_mlflow_and_where_nothing_is_sure() -> None:
    found = budget(7)
    chosen = {"budget_images_per_s": 12_000, "budget_p99_ms": 7, "budget_batch_size": 8, "budget_num_streams": 2}
    assert budget_metrics(found) == {"latency_budget_ms": 7, **chosen}
    unsure = found.model_copy(update={"doubt": "other processes took 50 % of the cores' time"})
    assert budget_text(unsure) == "within 7 ms: unsure, other processes took 50 % of the cores' time"
    assert budget_metrics(unsure) == {"latency_budget_ms": 7}
    assert budget_metrics(budget(0.5)) == {"latency_budget_ms": 0.5}
    nothing = within_budget(7, (), accuracy_report(accuracy_row("fp32", 80.0)), Thresholds())
    assert budget_text(nothing) == "nothing within 7 ms: no speed was measured"


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
    serving = RuntimeSelection(precision="fp32", file=model, runner=kind(model, SHAPES), note="")
    bundle: Any = SimpleNamespace(digest="b", manifest=SimpleNamespace(image_shapes=SHAPES))
    accuracy = accuracy_report(accuracy_row("fp32", 80.0))
    found = _benchmark(config, [serving], bundle, accuracy, StepLog("validate"))
    assert {entry.batch_size for entry in found.rows} == measured
    warned = capsys.readouterr().err
    assert said in warned
    assert ("is not measured" in warned) == bool(said)


@pytest.mark.parametrize(
    ("score_pct", "ratio", "shown", "hidden"),
    [
        (90.0, (2.13, ""), ("2.13x", "2.06x to 2.23x", "1.23"), ("n/a",)),
        (90.0, (2.13, "it was busy"), ("unsure: it was busy",), ("2.13", "n/a")),
        (90.0, None, ("no speed was measured",), ()),
        (None, None, ("INT8 was not measured: needs [/TensorRT]",), ("n/a",)),
    ],
)
def test_the_table_of_a_run_gives_no_number_where_there_is_none_to_rely_on(
    score_pct: float | None, ratio: tuple[float, str] | None, shown: tuple[str, ...], hidden: tuple[str, ...]
) -> None:
    found = Speedup(median=ratio[0], low=2.06, high=2.23, doubt=ratio[1]) if ratio else None
    doubt = ratio[1] if ratio else ""
    common = {"runtime": "openvino", "device": "CPU", "num_images": 120, "delta_points": 0.0}
    common |= {"p50_ms": None if doubt else 1.23, "latency_doubt": doubt}
    common |= {"images_per_s": 1000.0, "throughput_batch_size": 16 if ratio else None, "size_bytes": 1, "verdict": ""}
    fp32 = SimpleNamespace(precision="fp32", score_pct=90.0, speedup=None, note="", **common)
    int8 = SimpleNamespace(precision="int8", score_pct=score_pct, speedup=found, note="needs [/TensorRT]", **common)
    console = Console(file=io.StringIO(), width=120)
    print_summary(console, SimpleNamespace(score_name="top-1", unit="images", rows=[fp32, int8], recommendation=None))
    text = console.file.getvalue()
    assert all(part in text for part in shown)
    assert not any(part in text for part in hidden)


@pytest.mark.parametrize(("width", "verdict"), [(80, "not enough"), (None, "not enough evidence")])
def test_the_table_of_a_run_has_all_values_at_any_width(width: int | None, verdict: str, capsys, monkeypatch) -> None:
    """On a narrow terminal cells wrap at spaces; elsewhere there are no widths."""
    common = {"runtime": "onnxruntime", "device": "CPU", "num_images": 120, "score_pct": 91.23, "p50_ms": 123.45}
    common |= {"latency_doubt": ""}
    common |= {"delta_points": -10.12, "images_per_s": 12345.0, "throughput_batch_size": 16, "note": ""}
    speedup = Speedup(median=2.13, low=2.0, high=2.2, doubt="")
    rows = [
        SimpleNamespace(precision=name, size_bytes=size, verdict="not enough evidence", speedup=speedup, **common)
        for name, size in (("fp32", 25_600_000), ("int8", 12_345))
    ]
    monkeypatch.delenv("COLUMNS", raising=False)
    console = new_console()
    console.width = width or console.width
    print_summary(console, SimpleNamespace(score_name="top-1", unit="images", rows=rows, recommendation=None))
    values = ["INT8", "(onnxruntime)", "precision", "91.23", "-10.12", "123.45", "12,345", "2.13x", "25.6 MB", "12 kB"]
    text = capsys.readouterr().out
    assert [value for value in (*values, verdict) if value not in text] == []
