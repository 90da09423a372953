"""The gate: its thresholds, one table of checks, and what to ship. validate reports the verdict, gate acts on it.

A new check is a field of `Thresholds` and an entry of `_TABLE`, both here, and a remedy in
components/validate/report_text.py. Options, reports, verdicts and summaries follow from them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from components.common.contracts.records import (
    AccuracyReport,
    AccuracyRow,
    BenchmarkReport,
    ClassLoss,
    GateCheck,
    Precision,
    Recommendation,
    Record,
    with_new_names,
)
from components.common.contracts.settings import StepConfig, how_to_set
from components.common.contracts.statistics import NOTHING_PCT, chance_of, is_above_chance
from components.common.tasks import TASKS

_DIGITS = 9  # percentages carry rounding noise (100 * 0.29 < 29); a value of exactly the threshold passes
_MANY_IMAGES = 5000  # from here on one image is at most 0.02 points
_MAX_NAMED = 5  # classes named in one explanation

_Word = Literal["pass", "fail", "not enough evidence"]


class Thresholds(StepConfig):
    """Thresholds of the gate, which a model must meet."""

    precision: Literal["fp16", "int8"] = Field("int8", description="The precision that is to be promoted.")
    max_drop_points: float = Field(
        0.5,
        ge=0,
        le=100,
        description="Most of the score that the precision may lose against FP32, in percentage points.",
    )
    confident: bool = Field(
        True,
        description="Whether max_drop_points and min_relative_score_pct must hold with 95 % confidence, which "
        "proves them; false judges the measured drop alone.",
    )
    min_relative_score_pct: float = Field(
        99.0, ge=0, le=100, description="Least score that must remain, as a share of FP32's, in % (MLPerf asks for 99)."
    )
    require_above_chance: bool = Field(
        True,
        description="Whether FP32 and the precision must be right significantly more often than a model that always "
        f"answers the most frequent class, and have significantly more than {NOTHING_PCT:g} % of mAP, mIoU or BLEU.",
    )
    min_score_pct: float = Field(
        0.0, ge=0, le=100, description="Least score of the precision itself, in %; 0 for none."
    )
    max_class_drop_points: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Most accuracy that any single class may lose against FP32, in percentage points; 0 for no limit.",
    )
    max_corrupted_drop_points: float = Field(
        0.0,
        ge=0,
        le=100,
        description="Most of the score that the precision may lose against FP32 on images degraded in any single way, "
        "in percentage points; 0 for no limit. It needs validate.corruptions.",
    )
    min_validation_images: int = Field(
        100, ge=0, le=10**9, description="Fewest validation images that a verdict may rest on; 0 for any number."
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

    @model_validator(mode="before")
    @classmethod
    def _read_old_names(cls, value: Any) -> Any:
        return with_new_names(value, cls.model_fields)

    @model_validator(mode="after")
    def _compare_int8_with_fp16(self) -> "Thresholds":
        if self.min_speedup_fp16 and self.precision == "fp16":
            raise ValueError("min_speedup_fp16 compares INT8 with FP16; set it to 0 where precision is fp16")
        return self


class Verdict(Record):
    """The answer, and each check behind it. The gate step gives the same one."""

    passed: bool
    precision: Precision
    thresholds: Thresholds
    checks: tuple[GateCheck, ...]
    recommendation: Recommendation | None = Field(None, description="None where the checks do not lead to one.")
    note: str = Field(description="How many points one validation image is; empty where that does not matter.")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Measurements that a check judges, and the precision that it is about."""

    thresholds: Thresholds
    accuracy: AccuracyReport
    benchmark: BenchmarkReport
    own: AccuracyRow

    @property
    def score_pct(self) -> tuple[float, float]:
        """Scores of FP32 and of the precision. Checks run where both were measured."""
        return self.accuracy.row("fp32").score_pct or 0.0, self.own.score_pct or 0.0


@dataclass(frozen=True, kw_only=True)
class CheckSpec:
    """One check of the gate.

    Attributes:
        name: In manifests, reports and summaries.
        unit: Of what is measured and of its threshold.
        setting: The field of `Thresholds` that asks for it; 0 or false does not.
        measure: Judges the evidence by the threshold.
        kind: "drop": loss of the score against FP32, which `confident` wants proved. "accuracy": all else that is
            judged without speed and size.
        reference: The precision that a speed-up compares with.
        is_limit: True if it compares with no other precision, so that it also applies to one that is recommended
            instead of the judged one.
        is_always_asked: True if a threshold of 0 is a limit, and not the absence of one.
    """

    name: str
    unit: str
    setting: str
    measure: Callable[["CheckSpec", Evidence, float], GateCheck]
    kind: Literal["drop", "accuracy", "speedup", "latency", "size"]
    reference: Precision = "fp32"
    is_limit: bool = False
    is_always_asked: bool = False

    def judge(self, evidence: Evidence) -> GateCheck | None:
        """Judge the evidence, or return None where the thresholds do not ask for it."""
        threshold = getattr(evidence.thresholds, self.setting)
        return self.measure(self, evidence, threshold) if threshold > 0 or self.is_always_asked else None

    def at_most(self, threshold: float, label: str, measured: float) -> GateCheck:
        """Pass for a value up to the threshold."""
        text = f"{label} {_text(measured, threshold)}, allowed {threshold:g} {self.unit}"
        return self.found("pass" if round(measured, _DIGITS) <= threshold else "fail", threshold, text, measured)

    def at_least(self, threshold: float, label: str, measured: float) -> GateCheck:
        """Pass for a value from the threshold on."""
        text = f"{label} {_text(measured, threshold)}, at least {threshold:g} {self.unit}"
        return self.found("pass" if round(measured, _DIGITS) >= threshold else "fail", threshold, text, measured)

    def open(self, threshold: float, explanation: str, measured: float | None = None) -> GateCheck:
        """Return the check with the verdict "not enough evidence"."""
        return self.found("not enough evidence", threshold, explanation, measured)

    def found(self, verdict: _Word, threshold: float, explanation: str, measured: float | None) -> GateCheck:
        """The record of what it found."""
        return GateCheck(
            name=self.name, measured=measured, threshold=threshold, verdict=verdict, explanation=explanation
        )


def _text(measured: float, threshold: float) -> str:
    """Two decimals, or more where two would make a value that differs from its threshold look equal."""
    decimals = 2 if round(measured, 2) != round(threshold, 2) or round(measured, _DIGITS) == threshold else 5
    return f"{measured:z.{decimals}f}"


def _score_drop(check: CheckSpec, evidence: Evidence, allowed: float) -> GateCheck:
    fp32_pct, own_pct = evidence.score_pct
    return _proved(
        check.at_most(allowed, f"{evidence.accuracy.score_name} drop", fp32_pct - own_pct), evidence, allowed
    )


def _relative_score(check: CheckSpec, evidence: Evidence, threshold: float) -> GateCheck:
    """The share that remains is the drop in other words: FP32's score counts as it was measured."""
    fp32_pct, own_pct = evidence.score_pct
    if fp32_pct == 0:
        return check.open(
            threshold, f"FP32's {evidence.accuracy.score_name} is 0, so there is nothing to keep a share of"
        )
    judged = check.at_least(threshold, f"share of FP32's {evidence.accuracy.score_name}", 100 * own_pct / fp32_pct)
    return _proved(judged, evidence, drops_allowed(evidence.thresholds, fp32_pct)[-1], of="a drop of ")


def _proved(check: GateCheck, evidence: Evidence, allowed_points: float, of: str = "") -> GateCheck:
    """A check of the drop by its one-sided 95 % interval, where `confident` asks for that.

    Pass if all of the interval is allowed, fail if none of it is.
    """
    if not evidence.thresholds.confident:
        return check
    compared = evidence.own.comparison
    if compared is None:
        text = f"{check.explanation}; its interval is not in this report, validate again"
        return check.model_copy(update={"verdict": "not enough evidence", "explanation": text})
    found = _by_interval(check, compared.drop_lower_points, compared.drop_upper_points, allowed_points, of)
    if found.verdict != "not enough evidence":
        return found
    return found.model_copy(update={"explanation": f"{found.explanation}, and {_deciding_text(evidence)}"})


def _by_interval(check: GateCheck, lower: float, upper: float, allowed: float, of: str = "") -> GateCheck:
    verdict: _Word = "not enough evidence"
    bound = f"at most {_text(upper, allowed)}"
    if round(upper, _DIGITS) <= allowed:
        verdict = "pass"
    elif round(lower, _DIGITS) > allowed:
        verdict, bound = "fail", f"at least {_text(lower, allowed)}"
    text = f"{check.explanation}; with 95 % confidence {of}{bound} points"
    return check.model_copy(update={"verdict": verdict, "explanation": text})


def _above_chance(check: CheckSpec, evidence: Evidence, _: float) -> GateCheck:
    """FP32 and the precision against a model that learned nothing; see `is_above_chance`."""
    share_pct = evidence.accuracy.most_frequent_pct
    row = min(evidence.accuracy.row("fp32"), evidence.own, key=lambda row: row.score_pct or 0.0)
    score = row.score_pct or 0.0
    class_name = evidence.accuracy.most_frequent_class
    is_above = is_above_chance(score, share_pct, row.num_images, row.score_low_pct)
    guess = f"always answering {class_name!r}, the most frequent class" if class_name else "sentences left as they are"
    always = f"the {share_pct:.2f} % of {guess}"
    if row.score_low_pct is not None and share_pct < NOTHING_PCT:
        share_pct, always = NOTHING_PCT, f"{NOTHING_PCT:g} %, which is next to nothing"
    text = f"{evidence.accuracy.score_name} of {row.precision.upper()} {_text(score, round(share_pct, _DIGITS))}"
    if row.score_low_pct is None:
        doubt = f"p = {chance_of(round(score / 100 * row.num_images), row.num_images, share_pct / 100):.2g}"
    else:
        doubt = f"at least {row.score_low_pct:.2f} % with 95 % confidence"
    if is_above:
        return check.found("pass", share_pct, f"{text}, above {always}", score)
    if round(score, _DIGITS) > share_pct:
        return check.open(share_pct, f"{text} may be above {always}, by chance: {doubt}", score)
    classes = ", or its classes are in another order or its images prepared in another way than in its training"
    text = f"{text} is not above {always}: the model has learned nothing{classes if class_name else ''}"
    return check.found("fail", share_pct, text, score)


def _classes(check: CheckSpec, evidence: Evidence, allowed: float) -> GateCheck:
    """Fail for classes that significantly lose more than is allowed.

    A loss that is larger but may be chance is neither: it is what was measured, and says too little.
    """
    own, largest = evidence.own, evidence.own.largest_loss
    if own.comparison is None:
        return check.open(allowed, "classes were not compared in this report, validate again")
    beyond = [entry for entry in own.worse_classes if round(-entry.delta_points, _DIGITS) > allowed]
    if beyond:
        named = ", ".join(_class_text(entry, allowed) for entry in beyond[:_MAX_NAMED])
        more = f" and {len(beyond) - _MAX_NAMED} more" if len(beyond) > _MAX_NAMED else ""
        text = f"significantly worse: {named}{more}; allowed {allowed:g} points in a class"
        return check.found("fail", allowed, text, -beyond[0].delta_points)
    drop, text = 0.0, f"no class loses accuracy, allowed {allowed:g} points in a class"
    if largest is not None:
        drop = -largest.delta_points
        text = f"largest drop of a class: {_class_text(largest, allowed)}; allowed {allowed:g} points"
        if round(drop, _DIGITS) > allowed:
            return check.open(allowed, f"{text}; it may be chance, p = {largest.p_corrected:.2g}", drop)
    if own.num_unseen_classes:
        unseen = "1 class has" if own.num_unseen_classes == 1 else f"{own.num_unseen_classes:,} classes have"
        return check.open(allowed, f"{text}; {unseen} no validation image", drop)
    return check.found("pass", allowed, text, drop)


def _class_text(entry: ClassLoss, allowed: float) -> str:
    return f"{entry.name} by {_text(-entry.delta_points, allowed)} points ({entry.num_images} images)"


def _corrupted(check: CheckSpec, evidence: Evidence, allowed: float) -> GateCheck:
    """Every way to degrade images keeps the limit, or one of them surely does not.

    A pass needs no correction for their number, since the interval of each must be within the limit (an
    intersection-union test; Berger, 1982). A fail does: of many intervals some lie too high by chance.
    """
    own, largest = evidence.own, evidence.own.largest_corrupted_drop
    if largest is None:
        return check.open(allowed, "degraded images were not measured, validate again with validate.corruptions=true")
    judged = check.at_most(allowed, f"largest drop on degraded images, {largest[0]}:", largest[1])
    if not evidence.thresholds.confident:
        return judged
    pairs = [row.comparison for row in own.corrupted if row.comparison]
    lower = max(pair.lower_points(len(pairs)) for pair in pairs)
    return _by_interval(judged, lower, max(pair.drop_upper_points for pair in pairs), allowed)


def _images(check: CheckSpec, evidence: Evidence, least: float) -> GateCheck:
    num_images = evidence.own.num_images
    text = f"{num_images:,} validation {evidence.accuracy.unit}, at least {least:,}"
    return check.found("pass" if num_images >= least else "not enough evidence", least, text, num_images)


def _speedup(check: CheckSpec, evidence: Evidence, threshold: float) -> GateCheck:
    """Judge by the whole interval of the turns: where it holds the threshold, or is in doubt, nothing is proved."""
    benchmark, own, reference = evidence.benchmark, evidence.own.precision, check.reference
    largest = largest_batch(benchmark)
    found = benchmark.speedup(own, reference, largest)
    if found is None:
        missing = [entry.upper() for entry in (reference, own) if benchmark.row(entry, largest) is None]
        where = f" of {' and '.join(missing)} at batch {largest}" if largest else ""
        return check.open(threshold, f"the speed{where} was not measured")
    label = f"throughput over {reference.upper()} at batch {largest}"
    if found.doubt:
        return check.open(threshold, f"{label} is not known, at least {threshold:g} {check.unit}: {found.doubt}")
    judged = check.at_least(threshold, label, found.median)
    if round(found.low, _DIGITS) < threshold <= round(found.high, _DIGITS):
        turns = f"turns from {_text(found.low, threshold)} to {_text(found.high, threshold)}"
        return check.open(
            threshold, f"{judged.explanation}; {turns}: raise validate.benchmark_seconds", judged.measured
        )
    return judged


def _p99(check: CheckSpec, evidence: Evidence, allowed: float) -> GateCheck:
    benchmark, precision, batch_size = evidence.benchmark, evidence.own.precision, evidence.thresholds.p99_batch_size
    row = benchmark.row(precision, batch_size)
    if row is None:
        measured = sorted({entry.batch_size for entry in benchmark.plain_rows if entry.precision == precision})
        text = f"the latency of {precision.upper()} at batch {batch_size} was not measured"
        return check.open(allowed, f"{text}, only at {', '.join(map(str, measured))}" if measured else text)
    judged = check.at_most(allowed, f"p99 latency at batch {batch_size}", row.p99_ms)
    if judged.verdict == "fail" and row.busy:
        return check.open(allowed, f"{judged.explanation}; {row.busy}", row.p99_ms)
    return judged


def _least_score(check: CheckSpec, evidence: Evidence, threshold: float) -> GateCheck:
    return check.at_least(threshold, evidence.accuracy.score_name, evidence.score_pct[1])


def _size(check: CheckSpec, evidence: Evidence, allowed: float) -> GateCheck:
    return check.at_most(allowed, "file size", evidence.own.size_bytes / 1e6)


_TABLE = (
    CheckSpec(
        name="drop_points",
        unit="points",
        setting="max_drop_points",
        measure=_score_drop,
        kind="drop",
        is_always_asked=True,
    ),
    CheckSpec(
        name="relative_score_pct", unit="%", setting="min_relative_score_pct", measure=_relative_score, kind="drop"
    ),
    CheckSpec(name="above_chance", unit="%", setting="require_above_chance", measure=_above_chance, kind="accuracy"),
    CheckSpec(
        name="score_pct", unit="%", setting="min_score_pct", measure=_least_score, kind="accuracy", is_limit=True
    ),
    CheckSpec(
        name="class_drop_points", unit="points", setting="max_class_drop_points", measure=_classes, kind="accuracy"
    ),
    CheckSpec(
        name="corrupted_drop_points",
        unit="points",
        setting="max_corrupted_drop_points",
        measure=_corrupted,
        kind="accuracy",
    ),
    CheckSpec(
        name="validation_images", unit="images", setting="min_validation_images", measure=_images, kind="accuracy"
    ),
    CheckSpec(name="speedup", unit="x", setting="min_speedup", measure=_speedup, kind="speedup"),
    CheckSpec(
        name="speedup_fp16", unit="x", setting="min_speedup_fp16", measure=_speedup, kind="speedup", reference="fp16"
    ),
    CheckSpec(name="p99_ms", unit="ms", setting="max_p99_ms", measure=_p99, kind="latency", is_limit=True),
    CheckSpec(name="size_mb", unit="MB", setting="max_size_mb", measure=_size, kind="size", is_limit=True),
)
CHECKS = {check.name: check for check in _TABLE}  # in the order in which they are shown
SPEED_SETTINGS = tuple(check.setting for check in _TABLE if check.kind in ("speedup", "latency"))


def judge(thresholds: Thresholds, accuracy: AccuracyReport, benchmark: BenchmarkReport) -> Verdict:
    """The verdict on what was measured."""
    checks = run_checks(thresholds, accuracy, benchmark)
    return Verdict(
        passed=_passes(checks),
        precision=thresholds.precision,
        thresholds=Thresholds(**thresholds.model_dump()),
        checks=tuple(checks),
        recommendation=recommend(thresholds, checks, accuracy, benchmark),
        note=verdict_note(thresholds, accuracy),
    )


def run_checks(thresholds: Thresholds, accuracy: AccuracyReport, benchmark: BenchmarkReport) -> list[GateCheck]:
    """Every threshold that is set, against what was measured: docs/validation.md says how each is judged."""
    own = accuracy.row(thresholds.precision)
    return _run(Evidence(thresholds=thresholds, accuracy=accuracy, benchmark=benchmark, own=own), _TABLE)


def accuracy_checks(thresholds: Thresholds, accuracy: AccuracyReport, own: AccuracyRow) -> list[GateCheck]:
    """The checks that need no speed and no size: whether a precision is as accurate as asked, and surely so."""
    nothing = BenchmarkReport(bundle_digest="", rows=())
    evidence = Evidence(thresholds=thresholds, accuracy=accuracy, benchmark=nothing, own=own)
    return _run(evidence, [check for check in _TABLE if check.kind in ("drop", "accuracy")])


def _run(evidence: Evidence, checks: Iterable[CheckSpec]) -> list[GateCheck]:
    """Those of the checks that are asked for; the first one alone where there is no score to judge."""
    for row in (evidence.own, evidence.accuracy.row("fp32")):
        if row.score_pct is None:
            text = f"{row.precision.upper()} was not measured here: {row.note}"
            return [_TABLE[0].open(evidence.thresholds.max_drop_points, text)]
    return [found for check in checks if (found := check.judge(evidence)) is not None]


def _passes(checks: Iterable[GateCheck]) -> bool:
    return all(check.verdict == "pass" for check in checks)


def verdict_note(thresholds: Thresholds, accuracy: AccuracyReport) -> str:
    """Notes beside the verdict: no proof, doubts about the runtime, how much one image is."""
    own, fp32 = accuracy.row(thresholds.precision), accuracy.row("fp32")
    notes = [] if thresholds.confident else ["not proved: gate.confident is false, so the measured drop alone counts"]
    doubts = own.note if own.score_pct is not None else ""
    # What makes FP32 worse makes the precision look better.
    others = [part for part in fp32.note.split("; ") if part not in doubts] if fp32.score_pct is not None else []
    notes += [doubts, f"FP32, which it is compared with: {'; '.join(others)}" if others else ""]
    if 0 < fp32.num_images < _MANY_IMAGES and TASKS[accuracy.task].classifies:
        notes.append(f"one of {fp32.num_images:,} validation images is {100 / fp32.num_images:.2f} points")
    return "; ".join(filter(None, notes))


def remedy(thresholds: Thresholds, accuracy: AccuracyReport, checks: Sequence[GateCheck]) -> str:
    """The fix where a drop was measured and only its proof is missing; empty elsewhere."""
    missing = [check for check in checks if check.verdict != "pass"]
    if not missing or not all(
        CHECKS[check.name].kind == "drop" and check.verdict != "fail" and check.measured is not None
        for check in missing
    ):
        return ""
    more = f"Validate on more {accuracy.unit} (a larger validation set, or preprocess.val_fraction), allow"
    decided_by_more = deciding_images(thresholds, accuracy, accuracy.row(thresholds.precision)) is not None
    limits = ", ".join(f"gate.{CHECKS[check.name].setting}" for check in missing)
    return (
        f"{more if decided_by_more else 'Allow'} a larger drop ({limits}), or take the measured drop "
        f"without a proof: {how_to_set('gate', 'confident', 'false')}"
    )


def recommend(
    thresholds: Thresholds, checks: Sequence[GateCheck], accuracy: AccuracyReport, benchmark: BenchmarkReport
) -> Recommendation | None:
    """Recommend the judged precision, or FP16 (else FP32) where accuracy passes and speed does not pay for it.

    Speed does not pay where a check on it fails, or where the precision is slower than the one it would be replaced
    by, asked for or not: its fastest repeat below the other's slowest. FP16 must itself be as accurate as asked; FP32
    is what accuracy is measured against. The other must keep to the limits that are set: where it does not, the judged
    precision stays, if it passes.

    Returns:
        None where accuracy does not pass, or where another precision would not help.
    """
    own = thresholds.precision
    has_fp16 = own != "fp16" and benchmark.row("fp16", largest_batch(benchmark)) is not None
    other: Precision = "fp16" if has_fp16 and is_accurate(thresholds, accuracy, "fp16") else "fp32"
    if not is_accurate(thresholds, accuracy, own):
        return None
    slower = _slower_text(benchmark, own, other)
    reasons = [
        entry.explanation
        for entry, check in ((entry, CHECKS[entry.name]) for entry in checks)
        if entry.verdict == "fail" and check.kind in ("speedup", "latency")
        if not (slower and check.kind == "speedup" and check.reference == other)  # which says the same
    ]
    reasons += [slower] if slower else []
    replacing = Evidence(thresholds=thresholds, accuracy=accuracy, benchmark=benchmark, own=accuracy.row(other))
    if (
        reasons
        and reaches_score(thresholds, replacing.own)
        and _passes(_run(replacing, [check for check in _TABLE if check.is_limit]))
    ):
        reason = f"{own.upper()} is accurate enough, but not fast enough: {'; '.join(reasons)}"
        return Recommendation(precision=other, reason=reason)
    if _passes(checks):
        return Recommendation(precision=own, reason="every check passed")
    return None


def is_accurate(thresholds: Thresholds, accuracy: AccuracyReport, precision: Precision) -> bool:
    """True if a precision passes the checks on accuracy; FP32, which it is compared with, needs its score alone."""
    row = next((row for row in accuracy.rows if row.precision == precision), None)
    if row is None or precision == "fp32":
        return row is not None and reaches_score(thresholds, row)
    return _passes(accuracy_checks(thresholds, accuracy, row))


def reaches_score(thresholds: Thresholds, row: AccuracyRow) -> bool:
    """True if a precision has the least score: all that can be asked of FP32, which the rest is measured against."""
    return row.score_pct is not None and round(row.score_pct, _DIGITS) >= thresholds.min_score_pct


def largest_batch(benchmark: BenchmarkReport) -> int:
    """The largest batch that anything was measured at; 0 where nothing was."""
    return max((row.batch_size for row in benchmark.plain_rows), default=0)


def _slower_text(benchmark: BenchmarkReport, precision: Precision, other: Precision) -> str:
    """Ratio at which a precision is slower than the other at the largest batch; empty within the spread."""
    largest = largest_batch(benchmark)
    found = benchmark.speedup(precision, other, largest)
    if found is None or found.doubt or found.high >= 1:
        return ""
    ratio = _text(found.median, 1.0)
    return f"{precision.upper()} runs at {ratio} x the throughput of {other.upper()} at batch {largest}"


def drops_allowed(thresholds: Thresholds, fp32_pct: float) -> tuple[float, ...]:
    """The drop that each limit allows, in percentage points: max_drop_points, and the share that must remain."""
    share = thresholds.min_relative_score_pct / 100
    return (thresholds.max_drop_points, *([(1 - share) * fp32_pct] if share else []))


def deciding_images(thresholds: Thresholds, accuracy: AccuracyReport, own: AccuracyRow) -> int | None:
    """About how many validation images decide all that limits the drop and is open, by the discordance that was seen.

    None where nothing is open, or where no number of images tells.
    """
    compared, allowed = own.comparison, _least_open(thresholds, accuracy, own)
    if compared is None or allowed is None:
        return None
    needed = compared.images_needed(allowed)
    if needed is None:
        return None
    unit = 10 ** max(0, len(str(needed)) - 2)
    return -(-needed // unit) * unit


def _least_open(thresholds: Thresholds, accuracy: AccuracyReport, own: AccuracyRow) -> float | None:
    """The smallest drop that is allowed and within the interval, in points: the first that needs to be decided."""
    if own.comparison is None:
        return None
    limits = drops_allowed(thresholds, accuracy.row("fp32").score_pct or 0.0)
    lower, upper = (round(end, _DIGITS) for end in (own.comparison.drop_lower_points, own.comparison.drop_upper_points))
    return min((limit for limit in limits if lower <= limit < upper), default=None)


def _deciding_text(evidence: Evidence) -> str:
    """State how many images would decide; empty where nothing about the drop is open."""
    scope = evidence.thresholds, evidence.accuracy, evidence.own
    compared, allowed = evidence.own.comparison, _least_open(*scope)
    if compared is None or allowed is None:
        return ""
    seen, unit = compared.counts_text, evidence.accuracy.unit
    if needed := deciding_images(*scope):
        return f"about {needed:,} validation {unit} would tell ({seen})"
    if allowed <= 0 or compared.delta_points >= 0:
        return f"no number of {unit} proves a drop of at most {allowed:g} points ({seen})"
    return f"more {unit} hardly tell, since the drop seen is as large as what is allowed ({seen})"
