"""The gate: thresholds at their borders, and what is written before it fails."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.common.contracts.errors import GateFailed, UserError
from components.common.contracts.instruction_sets import instruction_set
from components.common.contracts.manifests import ReportManifest, VerdictManifest, load, seal
from components.common.contracts.records import (
    AccuracyReport,
    AccuracyRow,
    BenchmarkReport,
    BenchmarkRow,
    Comparison,
    CpuModel,
    GateCheck,
)
from components.common.contracts.statistics import drop_lower, drop_upper, mcnemar
from components.common.contracts.verdict import run_checks
from components.common.process.steplog import StepLog
from components.common.runtimes import openvino
from components.gate.config import GateConfig
from components.gate.run import run
from components.validate.config import ValidateConfig

REPOSITORY = Path(__file__).resolve().parents[2]


def accuracy(precision: str, top1_pct: float | None, num_images: int = 10_000) -> AccuracyRow:
    if top1_pct is None:
        return AccuracyRow(precision=precision, runtime="n/a", note="needs TensorRT")
    return AccuracyRow(precision=precision, runtime="openvino", top1_pct=top1_pct, num_images=num_images)


def measured(fp32: AccuracyRow, *others: AccuracyRow) -> AccuracyReport:
    """Each of the others loses as many images as its top-1 says, and gains none."""
    digests = {"dataset_digest": "d", "split_digest": "s", "bundle_digest": "sha256:b"}
    rows = (fp32, *(row.model_copy(update={"comparison": comparison(fp32, row)}) for row in others))
    return AccuracyReport(rows=rows, most_frequent_class="ant", most_frequent_pct=10.0, **digests)


def comparison(fp32: AccuracyRow, own: AccuracyRow) -> Comparison | None:
    if fp32.top1_pct is None or own.top1_pct is None:
        return None
    change = round((own.top1_pct - fp32.top1_pct) / 100 * own.num_images)
    lost, gained = max(0, -change), max(0, change)
    test = mcnemar(lost, gained)
    return Comparison(
        num_images=own.num_images,
        num_lost=lost,
        num_gained=gained,
        delta_top1_points=own.top1_pct - fp32.top1_pct,
        drop_lower_points=drop_lower(own.num_images, lost, gained),
        drop_upper_points=drop_upper(own.num_images, lost, gained),
        mcnemar_p=test.p_value,
        mcnemar_test=test.test,
    )


def speed(precision: str, batch_size: int, images_per_s: float) -> BenchmarkRow:
    return BenchmarkRow(
        precision=precision,
        runtime="openvino",
        batch_size=batch_size,
        images_per_s=images_per_s,
        p50_ms=1,
        p90_ms=1,
        p99_ms=1,
        num_iterations=10,
    )


def benchmark(*rows: BenchmarkRow) -> BenchmarkReport:
    return BenchmarkReport(bundle_digest="sha256:b", rows=rows)


def check(
    name: str, fp32: float | None, own: float | None, *rows: BenchmarkRow, **settings: Any
) -> tuple[str, float | None]:
    """By what was measured, without its interval: see test_verdict.py for that."""
    config = GateConfig(**{"confident": False, **settings})
    checks = run_checks(config, measured(accuracy("fp32", fp32), accuracy("int8", own)), benchmark(*rows))
    found = next(entry for entry in checks if entry.name == name)
    return found.verdict, found.measured


@pytest.mark.parametrize(
    ("fp32", "own", "allowed", "verdict"),
    [
        (80.0, 79.5, 0.5, "pass"),  # exactly the threshold
        (80.0, 79.49, 0.5, "fail"),
        (76.3, 75.8, 0.5, "pass"),  # 76.3 - 75.8 is 0.5000000000000000 and a bit in binary
        (100 * 0.57, 100 * 0.56, 1.0, "pass"),
        (80.0, 81.0, 0.0, "pass"),  # better than FP32
        (80.0, 80.0, 0.0, "pass"),
        (80.0, 79.99, 0.0, "fail"),
    ],
)
def test_drop_in_points(fp32: float, own: float, allowed: float, verdict: str) -> None:
    found = check("top1_drop_points", fp32, own, max_top1_drop_points=allowed, min_relative_top1_pct=0)
    assert found == (verdict, pytest.approx(fp32 - own))


@pytest.mark.parametrize(
    ("fp32", "own", "verdict"),
    [(80.0, 79.2, "pass"), (80.0, 79.19, "fail"), (70.0, 69.3, "pass"), (50.0, 60.0, "pass"), (50.0, 0.0, "fail")],
)
def test_share_of_fp32(fp32: float, own: float, verdict: str) -> None:
    assert check("relative_top1_pct", fp32, own, min_relative_top1_pct=99, max_top1_drop_points=100)[0] == verdict


@pytest.mark.parametrize("own", [0.0, 20.0])
def test_there_is_no_share_of_nothing(own: float) -> None:
    assert check("relative_top1_pct", 0.0, own) == ("not enough evidence", None)


def test_a_share_that_is_not_asked_for_is_no_check() -> None:
    config = GateConfig(min_relative_top1_pct=0, min_validation_images=0, require_above_chance=False)
    checks = run_checks(config, measured(accuracy("fp32", 80.0), accuracy("int8", 80.0)), benchmark())
    assert [entry.name for entry in checks] == ["top1_drop_points"]


@pytest.mark.parametrize(("own", "verdict"), [(100 * 0.29, "pass"), (28.99, "fail"), (29.01, "pass")])
def test_least_top1(own: float, verdict: str) -> None:
    assert check("top1_pct", 30.0, own, min_top1_pct=29.0)[0] == verdict


def test_thresholds_that_are_not_set_are_not_checked() -> None:
    checks = run_checks(GateConfig(), measured(accuracy("fp32", 80.0), accuracy("int8", 80.0)), benchmark())
    names = ["top1_drop_points", "relative_top1_pct", "above_chance", "validation_images"]
    assert [entry.name for entry in checks] == names


def test_speedup_is_taken_at_the_largest_batch() -> None:
    rows = (speed("fp32", 1, 100), speed("int8", 1, 900), speed("fp32", 16, 100), speed("int8", 16, 200))
    assert check("speedup", 80, 80, *rows, min_speedup=2.0) == ("pass", 2.0)
    assert check("speedup", 80, 80, *rows, min_speedup=2.01) == ("fail", 2.0)


def test_speed_that_was_not_measured_does_not_pass() -> None:
    assert check("speedup", 80, 80, min_speedup=0.1) == ("not enough evidence", None)
    only_fp32 = (speed("fp32", 16, 100), speed("int8", 1, 100))
    assert check("speedup", 80, 80, *only_fp32, min_speedup=0.1) == ("not enough evidence", None)


@pytest.mark.parametrize(("fp32", "own", "named"), [(80.0, None, "INT8"), (None, 80.0, "FP32"), (None, None, "INT8")])
def test_accuracy_that_was_not_measured_does_not_pass(fp32: float | None, own: float | None, named: str) -> None:
    checks = run_checks(GateConfig(), measured(accuracy("fp32", fp32), accuracy("int8", own)), benchmark())
    assert [(entry.verdict, entry.measured) for entry in checks] == [("not enough evidence", None)]
    assert checks[0].explanation == f"{named} was not measured here: needs TensorRT"


def report(
    path: Path,
    fp32: float | None,
    int8: float | None,
    num_images: int = 10_000,
    config: ValidateConfig | None = None,
    int8_note: str = "",
) -> Path:
    """A sealed Report."""
    path.mkdir()
    own = accuracy("int8", int8, num_images)
    own = own.model_copy(update={"note": int8_note}) if int8_note else own
    rows = (accuracy("fp32", fp32, num_images), accuracy("fp16", None), own)
    seal(
        path,
        ReportManifest,
        inputs={},
        config=config or ValidateConfig(),
        accuracy=measured(*rows),
        benchmark=benchmark(),
    )
    return path


def verdict_of(path: Path) -> VerdictManifest:
    return load(path, VerdictManifest).manifest


def test_a_pass_says_what_was_measured(tmp_path: Path) -> None:
    source = report(tmp_path / "report", 80.0, 79.75)
    outcome = run(GateConfig(), StepLog("gate"), report=source, output=tmp_path / "verdict")
    assert outcome == (
        "INT8 passed: top-1 drop 0.25, allowed 0.5 points; with 95 % confidence at most 0.35 points; "
        "share of FP32's top-1 99.69, at least 99 %; with 95 % confidence a drop of at most 0.35 points; "
        "top-1 of INT8 79.75, above the 10.00 % of always answering 'ant', the most frequent class; "
        "10,000 validation images, at least 100"
    )
    verdict = verdict_of(tmp_path / "verdict")
    assert (verdict.passed, verdict.precision, verdict.note) == (True, "int8", "")
    assert verdict.inputs == {"report": load(source, ReportManifest).digest, "bundle": "sha256:b"}
    assert verdict.checks[0] == GateCheck(
        name="top1_drop_points",
        measured=0.25,
        threshold=0.5,
        verdict="pass",
        explanation="top-1 drop 0.25, allowed 0.5 points; with 95 % confidence at most 0.35 points",
    )


def test_a_fail_is_written_before_it_is_raised(tmp_path: Path) -> None:
    source = report(tmp_path / "report", 80.0, 77.0, num_images=400)
    with pytest.raises(GateFailed) as caught:
        run(GateConfig(), StepLog("gate"), report=source, output=tmp_path / "verdict")
    assert caught.value.exit_code == 3
    assert str(caught.value).startswith("INT8 did not pass: top-1 drop 3.00, allowed 0.5 points; with 95 %")
    assert str(caught.value).endswith("(one of 400 validation images is 0.25 points)")
    verdict = verdict_of(tmp_path / "verdict")
    assert (verdict.passed, verdict.note) == (False, "one of 400 validation images is 0.25 points")


def test_what_failed_and_what_could_not_be_told_are_said_apart(tmp_path: Path) -> None:
    source = report(tmp_path / "report", 80.0, 70.0, num_images=50)
    with pytest.raises(GateFailed) as caught:
        run(GateConfig(), StepLog("gate"), report=source, output=tmp_path / "verdict")
    assert str(caught.value) == (
        "INT8 did not pass: top-1 drop 10.00, allowed 0.5 points; with 95 % confidence at least 3.41 points; "
        "share of FP32's top-1 87.50, at least 99 %; with 95 % confidence a drop of at least 3.41 points; "
        "not enough evidence: 50 validation images, at least 100 (one of 50 validation images is 2.00 points)"
    )


def test_a_doubt_about_the_runtime_stands_beside_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How INT8 ran on this CPU is in the verdict and in what the gate says."""
    monkeypatch.setattr(openvino, "OpenVINORunner", lambda file, shapes: None)
    model = CpuModel(file="int8_cpu_7bit.onnx", weight_bits=7, activations="unsigned", saturates_on=())
    manifest = SimpleNamespace(models={"int8": "int8.onnx"}, int8_on_cpus=(model,), shapes=None)
    bundle = SimpleNamespace(file=Path, manifest=manifest)
    (note,) = openvino.open_model(bundle, "int8").notes  # type: ignore[arg-type]  # only what it reads
    assert note == f"7-bit weights, unsigned activations, on {instruction_set()}"
    source = report(tmp_path / "report", 80.0, 79.75, int8_note=note)
    outcome = run(GateConfig(), StepLog("gate"), report=source, output=tmp_path / "verdict")
    assert verdict_of(tmp_path / "verdict").note == note
    assert outcome.endswith(f"({note})")


@pytest.mark.parametrize(("fp32", "int8"), [(80.0, None), (None, 80.0)])
def test_what_was_not_measured_fails_with_a_verdict(tmp_path: Path, fp32: float | None, int8: float | None) -> None:
    source = report(tmp_path / "report", fp32, int8)
    with pytest.raises(GateFailed, match="was not measured here: needs TensorRT"):
        run(GateConfig(), StepLog("gate"), report=source, output=tmp_path / "verdict")
    assert not verdict_of(tmp_path / "verdict").passed


def test_a_report_of_other_thresholds_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    config = ValidateConfig(gate={"max_top1_drop_points": 2.0})  # type: ignore[arg-type]
    source = report(tmp_path / "report", 80.0, 79.0, config=config)
    with pytest.raises(UserError) as caught:
        run(GateConfig(), StepLog("gate"), report=source, output=tmp_path / "verdict")
    assert caught.value.exit_code == 2
    assert "max_top1_drop_points 2.0 there, 0.5 here" in str(caught.value)
    assert "Run the gate with the report's (--max-top1-drop-points 2.0)" in str(caught.value)
    assert "or validate again with the gate's (--gate '{max_top1_drop_points: 0.5}')" in str(caught.value)
    assert not (tmp_path / "verdict").exists()
    with pytest.raises(UserError):
        run(GateConfig(min_speedup=1.0), StepLog("gate"), report=source, output=tmp_path / "verdict")
    # validate's setting replaces all thresholds, so those that agree must be named too.
    both = ValidateConfig(gate={"max_top1_drop_points": 2.0, "min_top1_pct": 60.0})  # type: ignore[arg-type]
    source = report(tmp_path / "other", 80.0, 79.0, config=both)
    with pytest.raises(UserError, match=r"--gate '{max_top1_drop_points: 0.5, min_top1_pct: 60.0}'"):
        run(GateConfig(min_top1_pct=60.0), StepLog("gate"), report=source, output=tmp_path / "verdict")


def test_exit_codes_and_messages_of_the_step_itself(tmp_path: Path) -> None:
    def gate(name: str, *arguments: str) -> tuple[int, str, dict[str, Any]]:
        output = tmp_path / f"verdict of {name}"
        command = [sys.executable, "-m", "components.gate", "--output", str(output), "--report", str(tmp_path / name)]
        done = subprocess.run([*command, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr, json.loads((output / "failure.json").read_text())

    report(tmp_path / "bad", 80.0, 70.0)
    code, text, failure = gate("bad")
    assert (code, failure["exit_code"]) == (3, 3)
    assert text.startswith("gate: INT8 did not pass: top-1 drop 10.00, allowed 0.5 points")
    assert failure["message"] in text
    report(tmp_path / "good", 80.0, 80.0)
    code, text, failure = gate("good", "--max-top1-drop-points", "3")
    assert (code, failure["exit_code"]) == (2, 2)
    assert "shows the verdict of other thresholds" in text
    manifest = tmp_path / "good" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"top1_pct":80.0', '"top1_pct":99.0'))
    code, text, failure = gate("good")
    assert (code, failure["exit_code"]) == (1, 1)
    assert "was edited after it was sealed" in text
