"""What is recommended where the faster precision breaks a limit, and which doubts stand beside the verdict."""

from typing import Any

import numpy as np
import pytest

from components.common.contracts.records import (
    AccuracyReport,
    AccuracyRow,
    BenchmarkReport,
    BenchmarkRow,
    Recommendation,
)
from components.common.contracts.verdict import Thresholds, recommend, run_checks, verdict_note
from components.common.data.evaluation import Predictions
from components.validate.report import compare

SIZES = {"fp32": 108.0, "fp16": 48.0, "int8": 26.5}  # MB


def accuracy(top1_pct: dict[str, float], notes: dict[str, str] | None = None) -> AccuracyReport:
    rows = tuple(
        AccuracyRow(
            precision=precision,
            runtime="tensorrt",
            num_images=10_000,
            top1_pct=value,
            size_bytes=int(1e6 * SIZES[precision]),
            note=(notes or {}).get(precision, ""),
        )
        for precision, value in top1_pct.items()
    )
    return AccuracyReport(dataset_digest="d", split_digest="s", bundle_digest="b", rows=rows, most_frequent_pct=1.0)


def advice(measured: AccuracyReport, images_per_s: dict[str, float], **settings: Any) -> Recommendation | None:
    rows = tuple(
        BenchmarkRow(
            precision=precision,
            runtime="tensorrt",
            batch_size=1,
            images_per_s=speed,
            p50_ms=1000 / speed,
            p90_ms=1000 / speed,
            p99_ms=1000 / speed,
            num_iterations=10,
        )
        for precision, speed in images_per_s.items()
    )
    benchmark, thresholds = BenchmarkReport(bundle_digest="b", rows=rows), Thresholds(confident=False, **settings)
    checks = run_checks(thresholds, measured, benchmark)
    return recommend(thresholds, checks, measured, benchmark)


@pytest.mark.parametrize(
    ("settings", "precision"),
    [
        ({}, "fp16"),
        ({"max_size_mb": 50}, "fp16"),
        ({"max_size_mb": 30}, "int8"),  # FP16 is faster, and larger than what is allowed
        ({"max_size_mb": 20}, None),  # so is INT8
        ({"max_p99_ms": 0.35}, "fp16"),  # INT8 takes 0.37 ms, FP16 0.33
        ({"max_p99_ms": 0.30}, None),
        ({"max_p99_ms": 0.35, "max_size_mb": 30}, None),
        ({"min_speedup_fp16": 1.2, "max_size_mb": 30}, None),
    ],
)
def test_what_breaks_a_limit_is_not_recommended(settings: dict[str, float], precision: str | None) -> None:
    measured = accuracy({"fp32": 80.0, "fp16": 80.0, "int8": 79.8})
    found = advice(measured, {"fp32": 1000.0, "fp16": 3000.0, "int8": 2700.0}, **settings)
    assert (found.precision if found else None) == precision


@pytest.mark.parametrize(("least", "precision"), [(79.9, "fp32"), (80.0, "int8")])
def test_fp32_is_recommended_with_the_least_top1_alone(least: float, precision: str) -> None:
    found = advice(accuracy({"fp32": 79.9, "int8": 80.0}), {"fp32": 100.0, "int8": 90.0}, min_top1_pct=least)
    assert found is not None
    assert found.precision == precision


NAN = "the logits of 4 of 10,000 images hold NaN, which counts as wrong"
PLANS = "OpenVINO ran the ONNX file, not the plan: it was built elsewhere (GPU; driver)"


@pytest.mark.parametrize(
    ("notes", "said"),
    [
        ({}, ""),
        ({"int8": NAN}, NAN),
        ({"fp32": NAN}, f"FP32, which it is compared with: {NAN}"),
        ({"fp32": f"{PLANS}; {NAN}", "int8": PLANS}, f"{PLANS}; FP32, which it is compared with: {NAN}"),
        ({"fp32": PLANS, "int8": f"{PLANS}. no VNNI"}, f"{PLANS}. no VNNI"),
        ({"fp16": NAN}, ""),
    ],
)
def test_doubts_about_fp32_stand_beside_the_verdict(notes: dict[str, str], said: str) -> None:
    """An image that FP32 gets wrong can't be lost, so that a fault of FP32 hides those of INT8."""
    measured = accuracy({"fp32": 80.0, "fp16": 80.0, "int8": 80.0}, notes)
    assert verdict_note(Thresholds(), measured) == said


@pytest.mark.parametrize(
    ("unseen", "said"), [(1, "1 class has no validation image"), (1200, "1,200 classes have no validation image")]
)
def test_classes_without_images_are_counted(unseen: int, said: str) -> None:
    measured = accuracy({"fp32": 80.0, "int8": 80.0})
    fp32, int8 = measured.rows
    same = predictions_all_right(50)
    own = int8.model_copy(update={"num_unseen_classes": unseen, "comparison": compare(same, same)})
    measured = measured.model_copy(update={"rows": (fp32, own)})
    checks = run_checks(Thresholds(max_class_drop_points=5), measured, BenchmarkReport(bundle_digest="b", rows=()))
    found = next(entry for entry in checks if entry.name == "class_drop_points")
    assert found.verdict == "not enough evidence"
    assert found.explanation.endswith(f"; {said}")


def predictions_all_right(count: int) -> Predictions:
    return Predictions(top=np.zeros((count, 1), np.int16), labels=np.zeros(count, np.int32))
