"""The checks that decide whether a precision may be promoted. validate reports them, gate acts on them."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from components.common.contracts.records import (
    AccuracyReport,
    AccuracyRow,
    BenchmarkReport,
    ClassLoss,
    Comparison,
    GateCheck,
    Precision,
    Recommendation,
)
from components.common.contracts.settings import StepConfig
from components.common.contracts.statistics import SIGNIFICANCE, chance_of, images_needed

_DIGITS = 9  # percentages carry rounding noise (100 * 0.29 < 29); a value of exactly the threshold passes
_MANY_IMAGES = 5000  # from here on one image is at most 0.02 points
_MAX_NAMED = 5  # classes named in one explanation
_PROVED = ("top1_drop_points", "relative_top1_pct")  # what `confident` is about
_SPEED = ("speedup", "speedup_fp16", "p99_ms")

Verdict = Literal["pass", "fail", "not enough evidence"]


class Thresholds(StepConfig):
    """What a model must fulfil."""

    precision: Literal["fp16", "int8"] = Field("int8", description="The precision that is to be promoted.")
    max_top1_drop_points: float = Field(
        0.5, ge=0, le=100, description="Most top-1 that the precision may lose against FP32, in percentage points."
    )
    confident: bool = Field(
        True,
        description="Whether max_top1_drop_points and min_relative_top1_pct must hold with 95 % confidence, which "
        "proves them; false judges the measured drop alone.",
    )
    min_relative_top1_pct: float = Field(
        99.0, ge=0, le=100, description="Least top-1 that must remain, as a share of FP32's, in % (MLPerf asks for 99)."
    )
    require_above_chance: bool = Field(
        True,
        description="Whether FP32 and the precision must be right significantly more often than a model that always "
        "answers the most frequent class.",
    )
    min_top1_pct: float = Field(0.0, ge=0, le=100, description="Least top-1 of the precision itself, in %; 0 for none.")
    max_class_drop_points: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Most accuracy that any single class may lose against FP32, in percentage points; 0 for no limit.",
    )
    min_validation_images: int = Field(
        100, ge=0, description="Fewest validation images that a verdict may rest on; 0 for any number."
    )
    min_speedup: float = Field(
        0.0, ge=0, description="Least throughput over FP32 at the largest measured batch, as a ratio; 0 for none."
    )
    min_speedup_fp16: float = Field(
        0.0,
        ge=0,
        description="Least throughput of INT8 over FP16 at the largest measured batch, as a ratio; 0 for none.",
    )
    max_p99_ms: float = Field(
        0.0, ge=0, description="Longest 99th percentile of latency at batch p99_batch_size, in ms; 0 for no limit."
    )
    p99_batch_size: int = Field(1, ge=1, description="Batch that max_p99_ms is about; it must be one that is measured.")
    max_size_mb: float = Field(
        0.0, ge=0, description="Largest file of the model or engine, in units of 1,000,000 bytes; 0 for no limit."
    )

    @model_validator(mode="after")
    def _compare_int8_with_fp16(self) -> "Thresholds":
        if self.min_speedup_fp16 and self.precision == "fp16":
            raise ValueError("min_speedup_fp16 compares INT8 with FP16; set it to 0 where precision is fp16")
        return self

    @classmethod
    def recorded(cls, config: Mapping[str, Any]) -> "Thresholds":
        """The thresholds in a manifest. What one of an earlier version does not name was not asked then."""
        return cls.model_validate({"confident": False, "require_above_chance": False, **config})


def verdict_note(thresholds: Thresholds, accuracy: AccuracyReport) -> str:
    """What a reader of the verdict must know besides: no proof, doubts about the runtime, how much one image is."""
    own, fp32 = accuracy.row(thresholds.precision), accuracy.row("fp32")
    unproved = "" if thresholds.confident else "not proved: gate.confident is false, so the measured drop alone counts"
    doubts = own.note if own.top1_pct is not None else ""
    # What makes FP32 worse makes the precision look better.
    others = (
        [part for part in fp32.note.split("; ") if part and part not in doubts] if fp32.top1_pct is not None else []
    )
    reference = f"FP32, which it is compared with: {'; '.join(others)}" if others else ""
    return "; ".join(filter(None, (unproved, doubts, reference, one_image_note(accuracy))))


def one_image_note(accuracy: AccuracyReport) -> str:
    """How many points one validation image is; empty where there are so many that it does not matter."""
    num_images = accuracy.row("fp32").num_images
    if not 0 < num_images < _MANY_IMAGES:
        return ""
    return f"one of {num_images:,} validation images is {100 / num_images:.2f} points"


def remedy(checks: Sequence[GateCheck]) -> str:
    """What to do where the evidence is too little for a proof; empty where that is not the case."""
    if not any(check.name in _PROVED and check.verdict == "not enough evidence" for check in checks):
        return ""
    return (
        "Validate on more images (a larger validation folder, or preprocess.val_fraction), allow a larger drop "
        "(gate.max_top1_drop_points), or take the measured drop without a proof (--set gate.confident=false)"
    )


def run_checks(thresholds: Thresholds, accuracy: AccuracyReport, benchmark: BenchmarkReport) -> list[GateCheck]:
    """Every threshold that is set, against what was measured: docs/validation.md says how each is judged."""
    own = accuracy.row(thresholds.precision)
    checks = accuracy_checks(thresholds, accuracy, own)
    if accuracy.row("fp32").top1_pct is None or own.top1_pct is None:
        return checks
    if thresholds.min_speedup > 0:
        checks.append(_speedup("speedup", "fp32", thresholds.min_speedup, own.precision, benchmark))
    if thresholds.min_speedup_fp16 > 0:
        checks.append(_speedup("speedup_fp16", "fp16", thresholds.min_speedup_fp16, own.precision, benchmark))
    if thresholds.max_p99_ms > 0:
        checks.append(_p99(thresholds, own.precision, benchmark))
    if thresholds.max_size_mb > 0:
        checks.append(_at_most("size_mb", own.size_bytes / 1e6, thresholds.max_size_mb, "file size", "MB"))
    return checks


def accuracy_checks(thresholds: Thresholds, accuracy: AccuracyReport, own: AccuracyRow) -> list[GateCheck]:
    """The checks that need no speed and no size: whether a precision is as accurate as asked, and surely so."""
    fp32 = accuracy.row("fp32")
    if fp32.top1_pct is None or own.top1_pct is None:
        missing = own if own.top1_pct is None else fp32
        explanation = f"{missing.precision.upper()} was not measured here: {missing.note}"
        return [_no_evidence("top1_drop_points", thresholds.max_top1_drop_points, explanation)]
    would_decide = _deciding_text(thresholds, accuracy, own) if thresholds.confident else ""
    checks = [_top1_drop(thresholds, fp32.top1_pct - own.top1_pct, own, would_decide)]
    if thresholds.min_relative_top1_pct > 0:
        checks.append(_relative(thresholds, fp32.top1_pct, own.top1_pct, own, would_decide))
    if thresholds.require_above_chance:
        checks.append(_above_chance(accuracy, own))
    if thresholds.min_top1_pct > 0:
        checks.append(_at_least("top1_pct", own.top1_pct, thresholds.min_top1_pct, "top-1", "%"))
    if thresholds.max_class_drop_points > 0:
        checks.append(_class_drop(thresholds.max_class_drop_points, own))
    if thresholds.min_validation_images > 0:
        checks.append(_num_images(thresholds.min_validation_images, own.num_images))
    return checks


def recommend(
    thresholds: Thresholds, checks: list[GateCheck], accuracy: AccuracyReport, benchmark: BenchmarkReport
) -> Recommendation | None:
    """What to ship: the judged precision, or FP16 (else FP32) where accuracy passes and speed does not pay for it.

    Speed does not pay where a check on it fails, or where the precision is slower than the one it would be replaced
    by, asked for or not: its fastest repeat below the other's slowest. FP16 must itself be as accurate as asked; FP32
    is what accuracy is measured against. The other must keep to the limits that are set: where it does not, the judged
    precision stays, if it passes.

    Returns:
        None where accuracy does not pass, or where another precision would not help.
    """
    own = thresholds.precision
    if not _passes(accuracy_checks(thresholds, accuracy, accuracy.row(own))):
        return None
    other: Precision = "fp16" if own != "fp16" and _may_replace(thresholds, accuracy, benchmark) else "fp32"
    reasons = [check.explanation for check in checks if check.name in _SPEED and check.verdict == "fail"]
    if slower := _slower_text(benchmark, own, other):
        reasons = [reason for reason in reasons if f"over {other.upper()} " not in reason] + [slower]
    if reasons and _fits(thresholds, accuracy.row(other), benchmark):
        reason = f"{own.upper()} is accurate enough, but not fast enough: {'; '.join(reasons)}"
        return Recommendation(precision=other, reason=reason)
    if _passes(checks):
        return Recommendation(precision=own, reason="every check passed")
    return None


def _may_replace(thresholds: Thresholds, accuracy: AccuracyReport, benchmark: BenchmarkReport) -> bool:
    """Whether FP16 was measured, and is as accurate as is asked."""
    fp16 = next((row for row in accuracy.rows if row.precision == "fp16"), None)
    if fp16 is None or fp16.top1_pct is None or benchmark.row("fp16", largest_batch(benchmark)) is None:
        return False
    return _passes(accuracy_checks(thresholds, accuracy, fp16))


def _passes(checks: list[GateCheck]) -> bool:
    return all(check.verdict == "pass" for check in checks)


def _fits(thresholds: Thresholds, row: AccuracyRow, benchmark: BenchmarkReport) -> bool:
    """Whether a precision that would replace the judged one keeps to the limits of top-1, latency and size."""
    too_large = 0 < thresholds.max_size_mb < row.size_bytes / 1e6
    return (
        reaches_top1(thresholds, row)
        and not too_large
        and (thresholds.max_p99_ms == 0 or _p99(thresholds, row.precision, benchmark).verdict == "pass")
    )


def reaches_top1(thresholds: Thresholds, row: AccuracyRow) -> bool:
    """Whether a precision has the least top-1: all that can be asked of FP32, which the rest is measured against."""
    return row.top1_pct is not None and round(row.top1_pct, _DIGITS) >= thresholds.min_top1_pct


def largest_batch(benchmark: BenchmarkReport) -> int:
    """The largest batch that anything was measured at; 0 where nothing was."""
    return max((row.batch_size for row in benchmark.plain_rows), default=0)


def _top1_drop(thresholds: Thresholds, drop: float, own: AccuracyRow, would_decide: str) -> GateCheck:
    allowed = thresholds.max_top1_drop_points
    check = _at_most("top1_drop_points", drop, allowed, "top-1 drop", "points")
    return _prove(check, allowed, own.comparison, would_decide) if thresholds.confident else check


def _relative(
    thresholds: Thresholds, fp32_pct: float, own_pct: float, own: AccuracyRow, would_decide: str
) -> GateCheck:
    """The share that remains is the drop in other words: FP32's top-1 counts as it was measured."""
    name, threshold = "relative_top1_pct", thresholds.min_relative_top1_pct
    if fp32_pct == 0:
        return _no_evidence(name, threshold, "FP32 gets no image right, so there is no top-1 to keep a share of")
    check = _at_least(name, 100 * own_pct / fp32_pct, threshold, "share of FP32's top-1", "%")
    allowed = drops_allowed(thresholds, fp32_pct)[-1]
    return _prove(check, allowed, own.comparison, would_decide) if thresholds.confident else check


def drops_allowed(thresholds: Thresholds, fp32_pct: float) -> tuple[float, ...]:
    """The drop that each limit allows, in percentage points: max_top1_drop_points, and the share that must remain."""
    share = thresholds.min_relative_top1_pct / 100
    return (thresholds.max_top1_drop_points, *([(1 - share) * fp32_pct] if share else []))


def _prove(check: GateCheck, allowed_points: float, comparison: Comparison | None, would_decide: str) -> GateCheck:
    """A check of the drop by its one-sided 95 % interval: pass if all of it is allowed, fail if none of it is."""
    if comparison is None:
        explanation = f"{check.explanation}; its interval is not in this report, validate again"
        return _no_evidence(check.name, check.threshold, explanation, check.measured)
    lower, upper = comparison.drop_lower_points, comparison.drop_upper_points
    verdict: Verdict = "not enough evidence"
    ends = f"at most {_text(upper, allowed_points)}"
    if round(upper, _DIGITS) <= allowed_points:
        verdict = "pass"
    elif round(lower, _DIGITS) > allowed_points:
        verdict, ends = "fail", f"at least {_text(lower, allowed_points)}"
    of = "" if check.name == "top1_drop_points" else "a drop of "
    text = f"{check.explanation}; with 95 % confidence {of}{ends} points"
    if verdict == "not enough evidence":
        text = f"{text}, and {would_decide}"
    return check.model_copy(update={"verdict": verdict, "explanation": text})


def deciding_images(thresholds: Thresholds, accuracy: AccuracyReport, own: AccuracyRow) -> int | None:
    """About how many validation images decide all that limits the drop and is open, by the discordance that was seen.

    None where nothing is open, or where no number of images tells.
    """
    compared, allowed = own.comparison, _least_open(thresholds, accuracy, own)
    if compared is None or allowed is None:
        return None
    needed = images_needed(compared.num_images, compared.num_lost, compared.num_gained, allowed)
    if needed is None:
        return None
    unit = 10 ** max(0, len(str(needed)) - 2)
    return -(-needed // unit) * unit


def _least_open(thresholds: Thresholds, accuracy: AccuracyReport, own: AccuracyRow) -> float | None:
    """The smallest drop that is allowed and within the interval, in points: the first that needs to be decided."""
    compared = own.comparison
    if compared is None:
        return None
    limits = drops_allowed(thresholds, accuracy.row("fp32").top1_pct or 0.0)
    lower, upper = (round(end, _DIGITS) for end in (compared.drop_lower_points, compared.drop_upper_points))
    return min((limit for limit in limits if lower <= limit < upper), default=None)


def _deciding_text(thresholds: Thresholds, accuracy: AccuracyReport, own: AccuracyRow) -> str:
    """How many images it would take to tell; empty where nothing about the drop is open."""
    compared, allowed = own.comparison, _least_open(thresholds, accuracy, own)
    if compared is None or allowed is None:
        return ""
    lost, gained = compared.num_lost, compared.num_gained
    seen = f"{lost:,} lost and {gained:,} gained of {compared.num_images:,}"
    if needed := deciding_images(thresholds, accuracy, own):
        return f"about {needed:,} validation images would tell ({seen})"
    if allowed <= 0 or lost <= gained:
        return f"no number of images proves a drop of at most {allowed:g} points ({seen})"
    return f"more images hardly tell, since the drop seen is as large as what is allowed ({seen})"


def _above_chance(accuracy: AccuracyReport, own: AccuracyRow) -> GateCheck:
    """FP32 and the precision against a model that always answers the most frequent class: exact binomial test."""
    name, share_pct = "above_chance", accuracy.most_frequent_pct
    if share_pct is None:
        return _no_evidence(name, 0.0, "the most frequent class is not named in this report, validate again")
    row = min(accuracy.row("fp32"), own, key=lambda row: row.top1_pct or 0.0)
    top1 = row.top1_pct or 0.0
    always = f"{share_pct:.2f} % of always answering {accuracy.most_frequent_class!r}, the most frequent class"
    text = f"top-1 of {row.precision.upper()} {_text(top1, round(share_pct, _DIGITS))}"
    p_value = chance_of(round(top1 / 100 * row.num_images), row.num_images, share_pct / 100)
    if p_value < SIGNIFICANCE:
        return _check(name, top1, share_pct, "pass", f"{text}, above the {always}")
    if round(top1, _DIGITS) > share_pct:
        return _no_evidence(name, share_pct, f"{text} may be above the {always}, by chance: p = {p_value:.2g}", top1)
    text = f"{text} is not above the {always}: the model has learned nothing, or its classes are in another order"
    return _check(name, top1, share_pct, "fail", text)


def _class_drop(allowed: float, own: AccuracyRow) -> GateCheck:
    """Fail for classes that significantly lose more than is allowed.

    A loss that is larger but may be chance is neither: it is what was measured, and says too little.
    """
    name, largest = "class_drop_points", own.largest_loss
    if own.comparison is None:
        return _no_evidence(name, allowed, "classes were not compared in this report, validate again")
    beyond = [entry for entry in own.worse_classes if round(-entry.delta_points, _DIGITS) > allowed]
    if beyond:
        named = ", ".join(_class_text(entry, allowed) for entry in beyond[:_MAX_NAMED])
        more = f" and {len(beyond) - _MAX_NAMED} more classes" if len(beyond) > _MAX_NAMED else ""
        text = f"significantly worse: {named}{more}; allowed {allowed:g} points in a class"
        return _check(name, -beyond[0].delta_points, allowed, "fail", text)
    drop = -largest.delta_points if largest is not None else 0.0
    text = f"no class loses accuracy, allowed {allowed:g} points in a class"
    if largest is not None:
        text = f"largest drop of a class: {_class_text(largest, allowed)}; allowed {allowed:g} points"
    if largest is not None and round(drop, _DIGITS) > allowed:
        return _no_evidence(name, allowed, f"{text}; it may be chance, p = {largest.p_corrected:.2g}", drop)
    if own.num_unseen_classes:
        unseen = "1 class has" if own.num_unseen_classes == 1 else f"{own.num_unseen_classes:,} classes have"
        return _no_evidence(name, allowed, f"{text}; {unseen} no validation image", drop)
    return _check(name, drop, allowed, "pass", text)


def _class_text(entry: ClassLoss, allowed: float) -> str:
    return f"{entry.name} by {_text(-entry.delta_points, allowed)} points ({entry.num_images} images)"


def _num_images(threshold: int, num_images: int) -> GateCheck:
    explanation = f"{num_images:,} validation images, at least {threshold:,}"
    verdict: Verdict = "pass" if num_images >= threshold else "not enough evidence"
    return _check("validation_images", num_images, threshold, verdict, explanation)


def _speedup(
    name: str, reference: Precision, threshold: float, precision: Precision, benchmark: BenchmarkReport
) -> GateCheck:
    """Judge by the whole interval of the turns: where it holds the threshold, or is in doubt, nothing is proved."""
    largest = largest_batch(benchmark)
    found = benchmark.speedup(precision, reference, largest)
    if found is None:
        missing = [entry.upper() for entry in (reference, precision) if benchmark.row(entry, largest) is None]
        where = f" of {' and '.join(missing)} at batch {largest}" if largest else ""
        return _no_evidence(name, threshold, f"the speed{where} was not measured")
    label = f"throughput over {reference.upper()} at batch {largest}"
    if found.doubt:
        return _no_evidence(name, threshold, f"{label} is not known, at least {threshold:g} x: {found.doubt}")
    check = _at_least(name, found.median, threshold, label, "x")
    if round(found.low, _DIGITS) < threshold <= round(found.high, _DIGITS):
        turns = f"turns from {_text(found.low, threshold)} to {_text(found.high, threshold)}"
        explanation = f"{check.explanation}; {turns}: raise validate.benchmark_seconds"
        return _no_evidence(name, threshold, explanation, found.median)
    return check


def _slower_text(benchmark: BenchmarkReport, precision: Precision, other: Precision) -> str:
    """How much slower than the other a precision is at the largest batch; empty where it is not, beyond the spread."""
    largest = largest_batch(benchmark)
    found = benchmark.speedup(precision, other, largest)
    if found is None or found.doubt or found.high >= 1:
        return ""
    ratio = _text(found.median, 1.0)
    return f"{precision.upper()} runs at {ratio} x the throughput of {other.upper()} at batch {largest}"


def _p99(thresholds: Thresholds, precision: Precision, benchmark: BenchmarkReport) -> GateCheck:
    name, allowed, batch_size = "p99_ms", thresholds.max_p99_ms, thresholds.p99_batch_size
    row = benchmark.row(precision, batch_size)
    if row is None:
        measured = sorted({entry.batch_size for entry in benchmark.plain_rows if entry.precision == precision})
        text = f"the latency of {precision.upper()} at batch {batch_size} was not measured"
        return _no_evidence(name, allowed, f"{text}, only at {', '.join(map(str, measured))}" if measured else text)
    check = _at_most(name, row.p99_ms, allowed, f"p99 latency at batch {batch_size}", "ms")
    if check.verdict == "fail" and row.busy:
        return _no_evidence(name, allowed, f"{check.explanation}; {row.busy}", row.p99_ms)
    return check


def _at_most(name: str, measured: float, threshold: float, label: str, unit: str) -> GateCheck:
    verdict: Verdict = "pass" if round(measured, _DIGITS) <= threshold else "fail"
    text = f"{label} {_text(measured, threshold)}, allowed {threshold:g} {unit}"
    return _check(name, measured, threshold, verdict, text)


def _at_least(name: str, measured: float, threshold: float, label: str, unit: str) -> GateCheck:
    verdict: Verdict = "pass" if round(measured, _DIGITS) >= threshold else "fail"
    text = f"{label} {_text(measured, threshold)}, at least {threshold:g} {unit}"
    return _check(name, measured, threshold, verdict, text)


def _text(measured: float, threshold: float) -> str:
    """Two decimals, or more where two would make a value that differs from its threshold look equal."""
    decimals = 2 if round(measured, 2) != round(threshold, 2) or round(measured, _DIGITS) == threshold else 5
    return f"{measured:.{decimals}f}"


def _no_evidence(name: str, threshold: float, explanation: str, measured: float | None = None) -> GateCheck:
    return _check(name, measured, threshold, "not enough evidence", explanation)


def _check(name: str, measured: float | None, threshold: float, verdict: Verdict, explanation: str) -> GateCheck:
    return GateCheck(name=name, measured=measured, threshold=threshold, verdict=verdict, explanation=explanation)
