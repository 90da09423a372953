"""gate: Report -> Verdict, or exit code 3."""

from pathlib import Path

from components.common.artifacts import (
    AccuracyRow,
    BenchmarkReport,
    GateCheck,
    ReportManifest,
    VerdictManifest,
    load,
    prepare_directory,
    seal,
)
from components.common.errors import GateFailed
from components.common.steplog import StepLog
from components.gate.config import GateConfig

_DIGITS = 9  # percentages carry rounding noise (100 * 0.29 < 29); a value of exactly the threshold passes


def run(config: GateConfig, log: StepLog, *, report: Path, output: Path) -> str:
    """Check, write the verdict, then fail if it is one. See the package's docstring.

    Raises:
        GateFailed: a check did not pass.
    """
    measured = load(report, ReportManifest)
    prepare_directory(output)
    accuracy = measured.manifest.accuracy
    checks = run_checks(config, accuracy.row("fp32"), accuracy.row(config.precision), measured.manifest.benchmark)
    passed = all(check.verdict == "pass" for check in checks)
    num_images = accuracy.row("fp32").num_images
    note = f"one of {num_images:,} validation images is {100 / num_images:.2f} points" if 0 < num_images < 5000 else ""
    seal(
        output,
        VerdictManifest,
        inputs={"report": measured.digest, "bundle": accuracy.bundle_digest},
        config=config,
        passed=passed,
        precision=config.precision,
        checks=tuple(checks),
        note=note,
    )
    log.event("verdict", passed=passed, precision=config.precision, checks=[check.model_dump() for check in checks])
    log.metrics({"gate_passed": float(passed)})
    reasons = "; ".join(check.explanation for check in checks)
    suffix = f" ({note})" if note else ""
    if not passed:
        failed = "; ".join(check.explanation for check in checks if check.verdict != "pass")
        raise GateFailed(f"{config.precision.upper()} did not pass: {failed}{suffix}")
    return f"{config.precision.upper()} passed: {reasons}{suffix}"


def run_checks(config: GateConfig, fp32: AccuracyRow, own: AccuracyRow, benchmark: BenchmarkReport) -> list[GateCheck]:
    """Every threshold of the config that is set, against what was measured."""
    if fp32.top1_pct is None or own.top1_pct is None:
        missing = own if own.top1_pct is None else fp32
        explanation = f"{missing.precision.upper()} was not measured here: {missing.note}"
        threshold = config.max_top1_drop_points
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
        _at_most("top1_drop_points", drop, config.max_top1_drop_points, "top-1 drop", "points"),
        _at_least("relative_top1_pct", relative, config.min_relative_top1_pct, "share of FP32's top-1", "%"),
    ]
    if config.min_top1_pct > 0:
        checks.append(_at_least("top1_pct", own.top1_pct, config.min_top1_pct, "top-1", "%"))
    if config.min_speedup > 0:
        checks.append(_speedup(config, benchmark))
    return checks


def _speedup(config: GateConfig, benchmark: BenchmarkReport) -> GateCheck:
    largest = max((row.batch_size for row in benchmark.rows), default=0)
    fp32, own = benchmark.row("fp32", largest), benchmark.row(config.precision, largest)
    if fp32 is None or own is None:
        return GateCheck(
            name="speedup",
            measured=None,
            threshold=config.min_speedup,
            verdict="not measured",
            explanation="speed was not measured",
        )
    label = f"throughput over FP32 at batch {largest}"
    return _at_least("speedup", own.images_per_s / fp32.images_per_s, config.min_speedup, label, "x")


def _at_most(name: str, measured: float, threshold: float, label: str, unit: str) -> GateCheck:
    passed = round(measured, _DIGITS) <= threshold
    return _check(name, measured, threshold, passed, f"{label} {measured:.2f}, allowed {threshold:g} {unit}")


def _at_least(name: str, measured: float, threshold: float, label: str, unit: str) -> GateCheck:
    passed = round(measured, _DIGITS) >= threshold
    return _check(name, measured, threshold, passed, f"{label} {measured:.2f}, at least {threshold:g} {unit}")


def _check(name: str, measured: float, threshold: float, passed: bool, explanation: str) -> GateCheck:
    verdict = "pass" if passed else "fail"
    return GateCheck(name=name, measured=measured, threshold=threshold, verdict=verdict, explanation=explanation)
