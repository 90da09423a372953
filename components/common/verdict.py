"""The checks that decide whether a precision may be promoted. validate reports them, gate acts on them."""

from typing import Literal

from pydantic import Field

from components.common.records import AccuracyReport, AccuracyRow, BenchmarkReport, GateCheck, Precision
from components.common.settings import StepConfig

_DIGITS = 9  # percentages carry rounding noise (100 * 0.29 < 29); a value of exactly the threshold passes
_MANY_IMAGES = 5000  # from here on one image is at most 0.02 points


class Thresholds(StepConfig):
    """What a model must fulfil."""

    precision: Literal["fp16", "int8"] = Field("int8", description="The precision that is to be promoted.")
    max_top1_drop_points: float = Field(
        0.5, ge=0, le=100, description="Most top-1 that the precision may lose against FP32, in percentage points."
    )
    min_relative_top1_pct: float = Field(
        99.0, ge=0, le=100, description="Least top-1 that must remain, as a share of FP32's, in % (MLPerf asks for 99)."
    )
    min_top1_pct: float = Field(0.0, ge=0, le=100, description="Least top-1 of the precision itself, in %; 0 for none.")
    min_speedup: float = Field(
        0.0, ge=0, description="Least throughput over FP32 at the largest measured batch, as a ratio; 0 for none."
    )


def verdict_note(accuracy: AccuracyReport, precision: Precision) -> str:
    """What a reader of the verdict must know besides: doubts about the runtime, and how much one image is."""
    own = accuracy.row(precision)
    doubts = own.note if own.top1_pct is not None else ""
    return "; ".join(filter(None, (doubts, one_image_note(accuracy))))


def one_image_note(accuracy: AccuracyReport) -> str:
    """How many points one validation image is; empty where there are so many that it does not matter."""
    num_images = accuracy.row("fp32").num_images
    if not 0 < num_images < _MANY_IMAGES:
        return ""
    return f"one of {num_images:,} validation images is {100 / num_images:.2f} points"


def run_checks(
    thresholds: Thresholds, fp32: AccuracyRow, own: AccuracyRow, benchmark: BenchmarkReport
) -> list[GateCheck]:
    """Every threshold that is set, against what was measured."""
    if fp32.top1_pct is None or own.top1_pct is None:
        missing = own if own.top1_pct is None else fp32
        explanation = f"{missing.precision.upper()} was not measured here: {missing.note}"
        threshold = thresholds.max_top1_drop_points
        return [
            GateCheck(
                name="top1_drop_points",
                measured=None,
                threshold=threshold,
                verdict="not measured",
                explanation=explanation,
            )
        ]
    drop = fp32.top1_pct - own.top1_pct
    relative = 100 * own.top1_pct / fp32.top1_pct if fp32.top1_pct > 0 else 0.0
    checks = [
        _at_most("top1_drop_points", drop, thresholds.max_top1_drop_points, "top-1 drop", "points"),
        _at_least("relative_top1_pct", relative, thresholds.min_relative_top1_pct, "share of FP32's top-1", "%"),
    ]
    if thresholds.min_top1_pct > 0:
        checks.append(_at_least("top1_pct", own.top1_pct, thresholds.min_top1_pct, "top-1", "%"))
    if thresholds.min_speedup > 0:
        checks.append(_speedup(thresholds, benchmark))
    return checks


def _speedup(thresholds: Thresholds, benchmark: BenchmarkReport) -> GateCheck:
    largest = max((row.batch_size for row in benchmark.rows), default=0)
    fp32, own = benchmark.row("fp32", largest), benchmark.row(thresholds.precision, largest)
    if fp32 is None or own is None:
        return GateCheck(
            name="speedup",
            measured=None,
            threshold=thresholds.min_speedup,
            verdict="not measured",
            explanation="speed was not measured",
        )
    label = f"throughput over FP32 at batch {largest}"
    return _at_least("speedup", own.images_per_s / fp32.images_per_s, thresholds.min_speedup, label, "x")


def _at_most(name: str, measured: float, threshold: float, label: str, unit: str) -> GateCheck:
    passed = round(measured, _DIGITS) <= threshold
    return _check(
        name, measured, threshold, passed, f"{label} {_text(measured, threshold)}, allowed {threshold:g} {unit}"
    )


def _at_least(name: str, measured: float, threshold: float, label: str, unit: str) -> GateCheck:
    passed = round(measured, _DIGITS) >= threshold
    return _check(
        name, measured, threshold, passed, f"{label} {_text(measured, threshold)}, at least {threshold:g} {unit}"
    )


def _text(measured: float, threshold: float) -> str:
    """Two decimals, or more where two would make a value that differs from its threshold look equal."""
    decimals = 2 if round(measured, 2) != round(threshold, 2) or round(measured, _DIGITS) == threshold else 5
    return f"{measured:.{decimals}f}"


def _check(name: str, measured: float, threshold: float, passed: bool, explanation: str) -> GateCheck:
    verdict = "pass" if passed else "fail"
    return GateCheck(name=name, measured=measured, threshold=threshold, verdict=verdict, explanation=explanation)
