"""The gate's step: what is written before it fails, what it says, and what it refuses."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from components.common.contracts.errors import GateFailed
from components.common.contracts.instruction_sets import instruction_set
from components.common.contracts.manifests import ReportManifest, VerdictManifest, load, seal
from components.common.contracts.records import AccuracyRow, BenchmarkReport, CpuModel, Recommendation
from components.common.contracts.verdict import Thresholds
from components.common.process.steplog import StepLog
from components.common.runtimes import openvino
from components.gate.component import gate
from components.gate.config import GateConfig
from components.gate.run import run
from components.validate.config import ValidateConfig
from enginery.local.rendering import _print_recommendation
from enginery.local.summary import SummaryBuilder
from tests.processes import run_python
from tests.unit.measurements import accuracy_report, accuracy_row, compared_row, speeds
from tests.unit.refusals import refuses

GPU = {"fp32": 1000.0, "fp16": 3000.0, "int8": 4000.0}


def report(path: Path, *rows: AccuracyRow, benchmark: BenchmarkReport | None = None, **gate: Any) -> Path:
    """A sealed Report with the verdict of these thresholds."""
    path.mkdir()
    (path / "report.html").write_text("as it was measured")
    config = ValidateConfig(gate=Thresholds(**gate))
    facts = {"accuracy": accuracy_report(*rows), "benchmark": benchmark or speeds(GPU)}
    seal(path, ReportManifest, inputs={}, config=config, **facts)
    return path


def judged(source: Path, **settings: Any) -> tuple[str, VerdictManifest]:
    """Return the gate's message, passed or not, and its verdict."""
    output = source.with_name(f"verdict of {source.name}")
    try:
        said = run(GateConfig(**settings), StepLog("gate"), report=source, output=output)
    except GateFailed as error:
        said = f"{error.code}: {error}"
    return said, load(output, VerdictManifest).manifest


@pytest.mark.parametrize(
    ("num_layers", "how"), [(3, "7-bit weights, unsigned activations"), (0, "no layer in INT8, all compute in FP32")]
)
def test_a_pass_says_what_was_measured_and_how_int8_ran(tmp_path: Path, monkeypatch, num_layers: int, how: str) -> None:
    model = CpuModel(file="int8_cpu_7bit.onnx", weight_bits=7, activations="unsigned", saturates_on=())
    given = {"cpu_models": (model,), "image_shapes": None, "num_quantized_layers": num_layers}
    manifest = SimpleNamespace(models={"int8": "int8.onnx"}, **given)
    monkeypatch.setattr(openvino, "OpenVINORunner", lambda file, shapes: None)
    (note,) = openvino.open_model(SimpleNamespace(file=Path, manifest=manifest), "int8").notes
    assert note == f"{how}, on {instruction_set()}"
    row = compared_row(25, num_images=10_000, fp32_pct=80.0, note=note)
    source = report(tmp_path / "report", accuracy_row("fp32", 80.0, num_images=10_000), row)
    said, verdict = judged(source)
    assert said == (
        "INT8 passed: top-1 drop 0.25, allowed 0.5 points; with 95 % confidence at most 0.35 points; "
        "share of FP32's top-1 99.69, at least 99 %; with 95 % confidence a drop of at most 0.35 points; "
        "top-1 of INT8 79.75, above the 10.00 % of always answering 'ant', the most frequent class; "
        f"10,000 validation images, at least 100 ({note})"
    )
    assert (verdict.passed, verdict.precision, verdict.note, verdict.word) == (True, "int8", note, "pass")
    assert verdict.inputs == {"report": load(source, ReportManifest).digest, "bundle": "sha256:b"}
    assert verdict.checks[0].model_dump() == {
        "name": "drop_points",
        "measured": 0.25,
        "threshold": 0.5,
        "verdict": "pass",
        "explanation": "top-1 drop 0.25, allowed 0.5 points; with 95 % confidence at most 0.35 points",
    }


def test_what_failed_and_what_could_not_be_told_are_said_apart(tmp_path: Path) -> None:
    said, verdict = judged(report(tmp_path / "report", compared_row(5, num_images=50)))
    assert said == (
        "gate-failed: INT8 did not pass: "
        "top-1 drop 10.00, allowed 0.5 points; with 95 % confidence at least 3.41 points; "
        "share of FP32's top-1 90.00, at least 99 %; with 95 % confidence a drop of at least 3.41 points; "
        "not enough evidence: 50 validation images, at least 100 (one of 50 validation images is 2.00 points)"
    )
    assert (verdict.passed, verdict.word) == (False, "fail")
    assert verdict.note == "one of 50 validation images is 2.00 points"


def test_too_little_evidence_and_slow_int8_fail_with_advice(tmp_path: Path) -> None:
    said, verdict = judged(report(tmp_path / "few", compared_row(3)))
    assert said.startswith("gate-failed: INT8 did not pass: not enough evidence: top-1 drop 0.30, ")
    advice = "allow a larger drop (gate.{}), or take the measured drop without a proof: --set gate.confident=false "
    advice += "(python -m components.gate: --confident false)"
    assert said.endswith(advice.format("max_drop_points"))
    assert (verdict.passed, verdict.checks[0].verdict, verdict.recommendation) == (False, "not enough evidence", None)
    assert verdict.word == "not enough evidence"
    share = {"max_drop_points": 50.0, "min_relative_score_pct": 99.5}
    said, _ = judged(report(tmp_path / "share", compared_row(3), **share), **share)
    assert said.endswith(advice.format("min_relative_score_pct"))
    off = {"max_drop_points": 100.0, "require_above_chance": False}
    nothing = accuracy_row("fp32", 0.0), compared_row(0, fp32_pct=0.0)  # of which there is no share
    for rows, settings in (((compared_row(3),), {"min_validation_images": 10**6}), (nothing, off)):
        said, _ = judged(report(tmp_path / f"{len(rows)} rows", *rows, **settings), **settings)
        assert "not enough evidence" in said
        assert "gate.confident" not in said  # which would not be enough
    rows = compared_row(0), compared_row(0, precision="fp16")
    source = report(tmp_path / "slow", *rows, benchmark=speeds({**GPU, "int8": 2700.0}), min_speedup_fp16=1.2)
    said, verdict = judged(source, min_speedup_fp16=1.2)
    assert said.endswith(
        ". Recommended: FP16, since INT8 is accurate enough, but not fast enough: INT8 runs at 0.90 x the throughput "
        "of FP16 at batch 128"
    )
    assert verdict.served_precision == "fp16"
    said, verdict = judged(report(tmp_path / "unproved", compared_row(0), confident=False), confident=False)
    assert verdict.word == "pass, not proved"
    assert "not proved: gate.confident is false" in verdict.note
    assert verdict.note in said


@pytest.mark.parametrize(
    ("row", "advised"),
    [
        (compared_row(3), True),
        (compared_row(5), False),  # as large a drop as is allowed
        (accuracy_row("int8", None), False),  # no number of images measures it
        (compared_row(3, size_bytes=10**9), False),  # nor makes a file smaller
    ],
)
def test_more_images_are_advised_where_they_alone_are_missing(tmp_path: Path, row: AccuracyRow, advised: bool) -> None:
    limits = {"max_size_mb": 100.0}
    said, _ = judged(report(tmp_path / "report", row, **limits), **limits)
    assert ("Validate on more images" in said) == advised


def test_a_report_of_other_thresholds_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    # validate's setting replaces all thresholds, so those that agree must be named too.
    source = report(tmp_path / "report", compared_row(0), max_drop_points=2.0, min_score_pct=60.0)
    with refuses("other-thresholds", "max_drop_points") as caught:
        run(GateConfig(min_score_pct=60.0), StepLog("gate"), report=source, output=tmp_path / "verdict")
    assert "max_drop_points 2.0 there, 0.5 here" in str(caught.value)
    assert "(--max-drop-points 2.0)" in str(caught.value)
    assert "(--gate '{max_drop_points: 0.5, min_score_pct: 60.0}')" in str(caught.value)
    assert not (tmp_path / "verdict").exists()


def test_the_component_judges_by_the_parameter_and_the_settings(tmp_path: Path) -> None:
    """As KFP's executor calls it. The parameter is the pipeline's, which settings can't overrule."""
    source = report(tmp_path / "report", compared_row(0), max_drop_points=2.0, min_score_pct=60.0)
    given, verdict = SimpleNamespace(path=str(source)), SimpleNamespace(path=str(tmp_path / "verdict"))
    settings = {"min_score_pct": 60.0, "max_drop_points": 1.0}
    gate.python_func(report=given, max_drop_points=2.0, settings=settings, verdict=verdict)
    config = load(tmp_path / "verdict", VerdictManifest).manifest.config
    assert (config["max_drop_points"], config["min_score_pct"]) == (2.0, 60.0)


def test_exit_codes_and_messages_of_the_step_itself(tmp_path: Path) -> None:
    def run_step(name: str, *arguments: str) -> tuple[int, str]:
        output = tmp_path / f"verdict of {name}"
        done = run_python("-m", "components.gate", "--output", output, "--report", tmp_path / name, *arguments)
        failure = json.loads((output / "failure.json").read_text())
        assert "Traceback" not in done.stderr
        assert done.returncode == failure["exit_code"]
        assert failure["message"] in done.stderr
        return done.returncode, done.stderr

    report(tmp_path / "bad", compared_row(100))
    code, text = run_step("bad")
    assert code == 3
    assert text.startswith("gate: INT8 did not pass: top-1 drop 10.00, allowed 0.5 points")
    report(tmp_path / "good", compared_row(0))
    assert run_step("good", "--max-drop-points", "3")[0] == 2
    shown = tmp_path / "good" / "report.html"
    shown.write_text("as it was not done")
    code, text = run_step("good")
    assert (code, "report.html" in text) == (1, True)
    shown.write_text("as it was measured")
    manifest = tmp_path / "good" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"score_pct":100.0', '"score_pct":99.0'))
    assert run_step("good")[0] == 1


def test_the_summary_of_a_run_says_what_to_ship() -> None:
    found = Recommendation(precision="fp16", reason="INT8 is [slow]")
    builder = SummaryBuilder(0.0)
    event = {"event": "verdict", "step": "gate", "word": "fail", "precision": "int8", "checks": []}
    builder.handle({**event, "recommendation": found.model_dump()})
    assert Recommendation(**builder.seen["recommendation"]) == found
    for verdict, expected in (("fail", "recommended: FP16, since INT8 is [slow]\n"), ("pass", "")):
        console = Console(file=io.StringIO())
        rows = [SimpleNamespace(precision="fp16" if verdict == "pass" else "int8", verdict=verdict)]
        _print_recommendation(console, SimpleNamespace(recommendation=found, rows=rows))
        assert console.file.getvalue() == expected
