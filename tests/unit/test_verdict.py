"""Each check passes, fails or says that the evidence is too little; and what is recommended then."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from rich.console import Console

from components.common.contracts.digests import canonical_json
from components.common.contracts.errors import GateFailed
from components.common.contracts.manifests import VerdictManifest, load, seal, seal_of
from components.common.contracts.records import (
    AccuracyReport,
    AccuracyRow,
    BenchmarkReport,
    BenchmarkRow,
    GateCheck,
    Recommendation,
    Speedup,
)
from components.common.contracts.statistics import drop_upper
from components.common.contracts.verdict import Thresholds, deciding_images, recommend, run_checks
from components.common.data.evaluation import Predictions
from components.common.process.steplog import StepLog
from components.gate.config import GateConfig
from components.gate.run import run
from components.validate.report import class_changes, class_losses, compare
from enginery.local.rendering import _print_recommendation
from enginery.local.summary import SummaryBuilder

CLASSES = ("ant", "bee", "cat", "dog")
GPU_SPEEDS = {"fp32": 1000.0, "fp16": 3000.0, "int8": 4000.0}


def predictions(right: dict[str, list[bool]]) -> Predictions:
    """One that predicts each class right or wrong as listed; wrong is the next class."""
    labels = np.repeat(np.arange(len(CLASSES)), [len(right[name]) for name in CLASSES])
    wrong = ~np.concatenate([right[name] for name in CLASSES])
    top = np.where(wrong, (labels + 1) % len(CLASSES), labels)
    return Predictions(top=top[:, None].astype(np.int16), labels=labels.astype(np.int32))


def model(lost: dict[str, int], *, per_class: int = 250) -> Predictions:
    """FP32's predictions, which are all right, but for so many images of some classes."""
    return predictions(
        {name: [False] * lost.get(name, 0) + [True] * (per_class - lost.get(name, 0)) for name in CLASSES}
    )


def accuracy(precision: str, own: Predictions, size_bytes: int = 26_500_000) -> AccuracyRow:
    fp32 = predictions({name: [True] * int((own.labels == index).sum()) for index, name in enumerate(CLASSES)})
    worse, largest = class_losses(class_changes(CLASSES, fp32, own))
    return AccuracyRow(
        precision=precision,
        runtime="tensorrt",
        num_images=own.num_images,
        top1_pct=own.top1_pct,
        size_bytes=size_bytes,
        comparison=compare(fp32, own) if precision != "fp32" else None,
        worse_classes=worse,
        largest_loss=largest,
    )


def speeds(images_per_s: dict[str, float], batch_sizes: tuple[int, ...] = (1, 128), p99_ms: float = 2.5) -> Any:
    rows = tuple(
        BenchmarkRow(
            precision=precision,
            runtime="tensorrt",
            batch_size=batch_size,
            images_per_s=speed,
            p50_ms=2.0,
            p90_ms=2.2,
            p99_ms=p99_ms,
            num_iterations=10,
        )
        for batch_size in batch_sizes
        for precision, speed in images_per_s.items()
    )
    return BenchmarkReport(bundle_digest="sha256:b", rows=rows)


def check(name: str, own: Predictions, benchmark: BenchmarkReport | None = None, **settings: Any) -> GateCheck:
    fp32 = accuracy("fp32", model({}, per_class=own.num_images // 4))
    checks = run_checks(GateConfig(**settings), measured(fp32, accuracy("int8", own)), benchmark or speeds(GPU_SPEEDS))
    return next(entry for entry in checks if entry.name == name)


def measured(*rows: AccuracyRow) -> AccuracyReport:
    digests = {"dataset_digest": "d", "split_digest": "s", "bundle_digest": "sha256:b"}
    return AccuracyReport(rows=rows, most_frequent_class="ant", most_frequent_pct=25.0, **digests)


# Each check


@pytest.mark.parametrize(
    ("lost", "per_class", "allowed", "confident", "verdict"),
    [
        (3, 250, 0.5, False, "pass"),  # 0.3 points measured
        (3, 250, 0.5, True, "not enough evidence"),
        (3, 250, 1.0, True, "pass"),
        (6, 250, 0.5, True, "not enough evidence"),  # 0.6 points measured, and surely 0.3 only
        (6, 250, 0.5, False, "fail"),
        (16, 250, 0.5, True, "fail"),
        (30, 2500, 0.5, True, "pass"),  # the same 0.3 points on ten times as many images
        (0, 30, 0.5, True, "not enough evidence"),  # nothing lost, on 120 images
        (0, 250, 0.5, True, "pass"),
    ],
)
def test_top1_drop(lost: int, per_class: int, allowed: float, confident: bool, verdict: str) -> None:
    own = model({"ant": lost}, per_class=per_class)
    found = check("top1_drop_points", own, max_top1_drop_points=allowed, confident=confident)
    assert (found.verdict, found.measured) == (verdict, pytest.approx(100 * lost / (4 * per_class)))
    assert ("with 95 % confidence at most" in found.explanation) == (confident and verdict != "fail")
    assert ("with 95 % confidence at least" in found.explanation) == (confident and verdict == "fail")
    assert ("validation images would tell" in found.explanation) == (verdict == "not enough evidence")


@pytest.mark.parametrize(
    ("lost", "gained", "total", "allowed", "told"),
    [
        (0, 0, 400, 0.5, "about 600 validation images would tell (0 lost and 0 gained of 400)"),  # the rule of three
        (3, 3, 360, 0.5, "about 2,000 validation images would tell (3 lost and 3 gained of 360)"),
        (0, 5, 1000, 0.0, "no number of images proves a drop of at most 0 points"),
        (5, 0, 1000, 0.5, "more images hardly tell, since the drop seen is as large as what is allowed"),
    ],
)
def test_too_little_evidence_names_the_images_that_would_tell(
    lost: int, gained: int, total: int, allowed: float, told: str
) -> None:
    right = np.arange(total) >= gained, np.arange(total) < total - lost
    fp32, own = (Predictions(top=np.where(entry, 0, 1)[:, None], labels=np.zeros(total, int)) for entry in right)
    rows = (
        AccuracyRow(precision=name, runtime="openvino", num_images=total, top1_pct=entry.top1_pct)
        for name, entry in (("fp32", fp32), ("int8", own))
    )
    report = measured(*(row.model_copy(update={"comparison": compare(fp32, own)}) for row in rows))
    (found, *_) = run_checks(GateConfig(max_top1_drop_points=allowed), report, speeds({}))
    assert found.verdict == "not enough evidence"
    assert told in found.explanation


@pytest.mark.parametrize(("share_pct", "verdict"), [(95.9, "pass"), (96.5, "not enough evidence"), (98.0, "fail")])
def test_the_share_of_fp32_is_proved_like_the_drop(share_pct: float, verdict: str) -> None:
    """30 of 1,000 are lost: with 95 % confidence at least 2.2 and at most 4.0 %."""
    found = check("relative_top1_pct", model({"ant": 30}), min_relative_top1_pct=share_pct, max_top1_drop_points=9)
    assert found.verdict == verdict


@pytest.mark.parametrize(
    ("share_pct", "verdict"),
    [(33.33, "pass"), (88.5, "not enough evidence"), (90.0, "fail"), (95.0, "fail"), (None, "not enough evidence")],
)
@pytest.mark.parametrize("worse", ["fp32", "int8"])
def test_a_model_must_be_better_than_always_the_most_frequent_class(
    share_pct: float | None, verdict: str, worse: str
) -> None:
    """The worse of FP32 and INT8 is right on 900 of 1,000 images."""
    rows = (accuracy(name, model({"ant": 100 if name == worse else 0})) for name in ("fp32", "int8"))
    report = measured(*rows).model_copy(update={"most_frequent_pct": share_pct})
    checks = {entry.name: entry for entry in run_checks(Thresholds(), report, speeds({}))}
    assert checks["above_chance"].verdict == verdict
    assert share_pct is None or f"of {worse.upper()} 90.00" in checks["above_chance"].explanation
    assert "above_chance" not in {
        entry.name for entry in run_checks(Thresholds(require_above_chance=False), report, speeds({}))
    }


def test_the_interval_of_an_older_report_is_not_there() -> None:
    fp32, own = (
        AccuracyRow(precision=name, runtime="openvino", top1_pct=80.0, num_images=500) for name in ("fp32", "int8")
    )
    config = GateConfig(max_class_drop_points=5)
    found = {entry.name: entry for entry in run_checks(config, measured(fp32, own), speeds({}))}
    for name in ("top1_drop_points", "class_drop_points"):
        assert found[name].verdict == "not enough evidence"
        assert found[name].explanation.endswith("validate again")


@pytest.mark.parametrize(
    ("lost", "per_class", "verdict", "named"),
    [
        ({}, 250, "pass", "no class loses accuracy"),
        ({"bee": 10}, 250, "pass", "bee by 4.00 points (250 images)"),  # 4 points, though significant
        ({"bee": 20, "cat": 3}, 250, "fail", "significantly worse: bee by 8.00 points (250 images); allowed 5"),
        ({"bee": 20, "dog": 40}, 250, "fail", "dog by 16.00 points (250 images), bee by 8.00 points (250 images)"),
        ({"cat": 2}, 30, "not enough evidence", "cat by 6.67 points (30 images); allowed 5 points; it may be chance"),
    ],
)
def test_worst_class(lost: dict[str, int], per_class: int, verdict: str, named: str) -> None:
    found = check("class_drop_points", model(lost, per_class=per_class), max_class_drop_points=5)
    assert found.verdict == verdict
    assert named in found.explanation
    assert found.measured == pytest.approx(100 * max(lost.values(), default=0) / per_class)


@pytest.mark.parametrize(
    ("lost", "verdict"), [({}, "not enough evidence"), ({"bee": 10}, "not enough evidence"), ({"bee": 20}, "fail")]
)
def test_classes_without_validation_images_leave_the_worst_class_open(lost: dict[str, int], verdict: str) -> None:
    row = accuracy("int8", model(lost)).model_copy(update={"num_unseen_classes": 2})
    rows = measured(accuracy("fp32", model({})), row)
    checks = run_checks(GateConfig(max_class_drop_points=5), rows, speeds(GPU_SPEEDS))
    found = next(entry for entry in checks if entry.name == "class_drop_points")
    assert found.verdict == verdict
    assert ("2 classes have no validation image" in found.explanation) == (verdict != "fail")


def test_many_lost_classes_are_counted() -> None:
    changes = class_changes(tuple(map(str, range(8))), *two_of(8, lost=40))
    worse, largest = class_losses(changes)
    row = accuracy("int8", model({})).model_copy(update={"worse_classes": worse, "largest_loss": largest})
    rows = measured(accuracy("fp32", model({})), row)
    checks = run_checks(GateConfig(max_class_drop_points=5), rows, speeds({}))
    found = next(entry for entry in checks if entry.name == "class_drop_points")
    assert "4 by 16.00 points (250 images) and 3 more classes; allowed" in found.explanation


def two_of(num_classes: int, lost: int) -> tuple[Predictions, Predictions]:
    labels = np.repeat(np.arange(num_classes, dtype=np.int32), 250)
    wrong = np.tile(np.arange(250) < lost, num_classes)
    own = np.where(wrong, (labels + 1) % num_classes, labels)
    return Predictions(top=labels[:, None], labels=labels), Predictions(top=own[:, None], labels=labels)


@pytest.mark.parametrize(("per_class", "fewest", "verdict"), [(25, 100, "pass"), (24, 100, "not enough evidence")])
def test_too_few_images(per_class: int, fewest: int, verdict: str) -> None:
    found = check("validation_images", model({}, per_class=per_class), min_validation_images=fewest)
    assert (found.verdict, found.measured, found.threshold) == (verdict, 4 * per_class, fewest)


@pytest.mark.parametrize(
    ("images_per_s", "verdict", "measured"),
    [
        ({"fp16": 3000.0, "int8": 3600.0}, "pass", 1.2),
        ({"fp16": 3000.0, "int8": 3599.0}, "fail", 3599 / 3000),
        ({"fp32": 1000.0, "int8": 4000.0}, "not enough evidence", None),
        ({}, "not enough evidence", None),
    ],
)
def test_speedup_over_fp16(images_per_s: dict[str, float], verdict: str, measured: float | None) -> None:
    found = check("speedup_fp16", model({}), speeds(images_per_s), min_speedup_fp16=1.2)
    assert (found.verdict, found.measured) == (verdict, None if measured is None else pytest.approx(measured))
    if images_per_s:
        assert "at batch 128" in found.explanation
    with pytest.raises(ValidationError, match="min_speedup_fp16 compares INT8 with FP16"):
        Thresholds(precision="fp16", min_speedup_fp16=1.2)


@pytest.mark.parametrize(
    ("low", "high", "doubt", "verdict"),
    [
        (1.2, 1.6, "", "pass"),
        (1.19, 1.6, "", "not enough evidence"),
        (1.0, 1.2, "", "not enough evidence"),
        (1.0, 1.19, "", "fail"),
        (1.5, 1.6, "it was busy", "not enough evidence"),
        (0.5, 0.6, "it was busy", "not enough evidence"),
    ],
)
def test_turns_on_both_sides_of_a_threshold_prove_nothing(low: float, high: float, doubt: str, verdict: str) -> None:
    ratio = Speedup(median=(low + high) / 2, low=low, high=high, doubt=doubt)
    measured = speeds({"fp32": 1000.0, "int8": 1300.0})
    rows = [
        row.model_copy(update={"over": {"fp32": ratio}} if row.precision == "int8" else {}) for row in measured.rows
    ]
    benchmark = measured.model_copy(update={"rows": tuple(rows)})
    found = check("speedup", model({}), benchmark, min_speedup=1.2)
    assert (found.verdict, doubt in found.explanation) == (verdict, True)
    busy = [row.model_copy(update={"others_pct": 31.0}) for row in rows]
    late = check("p99_ms", model({}), measured.model_copy(update={"rows": tuple(busy)}), max_p99_ms=2.4)
    assert late.verdict == "not enough evidence"


@pytest.mark.parametrize(("allowed", "batch_size", "verdict"), [(2.5, 1, "pass"), (2.4, 128, "fail"), (9.0, 8, "none")])
def test_latency(allowed: float, batch_size: int, verdict: str) -> None:
    found = check("p99_ms", model({}), max_p99_ms=allowed, p99_batch_size=batch_size)
    if verdict == "none":
        assert (found.verdict, found.measured) == ("not enough evidence", None)
        assert found.explanation == "the latency of INT8 at batch 8 was not measured, only at 1, 128"
    else:
        assert (found.verdict, found.measured) == (verdict, 2.5)
        assert f"p99 latency at batch {batch_size} 2.50, allowed {allowed:g} ms" in found.explanation


@pytest.mark.parametrize(("allowed", "verdict"), [(26.5, "pass"), (26.4, "fail")])
def test_size(allowed: float, verdict: str) -> None:
    found = check("size_mb", model({}), max_size_mb=allowed)
    assert (found.verdict, found.measured) == (verdict, 26.5)


def test_everything_may_be_asked_at_once() -> None:
    settings = {"min_top1_pct": 50, "max_class_drop_points": 5, "min_speedup": 3, "min_speedup_fp16": 1.2}
    limits = {"max_p99_ms": 3, "max_size_mb": 30}
    rows = measured(accuracy("fp32", model({})), accuracy("int8", model({}, per_class=2500)))
    checks = run_checks(Thresholds(**settings, **limits), rows, speeds(GPU_SPEEDS))
    assert {entry.verdict for entry in checks} == {"pass"}
    assert len(checks) == 10


# The gate acts on them


def sealed(path: Path, own: Predictions, benchmark: BenchmarkReport, config: Thresholds) -> Path:
    from components.common.contracts.manifests import ReportManifest
    from components.validate.config import ValidateConfig

    path.mkdir()
    rows = tuple(accuracy(name, own if name == "int8" else model({})) for name in ("fp32", "fp16", "int8"))
    settings = ValidateConfig(gate=Thresholds(**config.model_dump()))
    seal(path, ReportManifest, inputs={}, config=settings, accuracy=measured(*rows), benchmark=benchmark)
    return path


def test_too_little_evidence_does_not_pass(tmp_path: Path) -> None:
    config = GateConfig()
    report = sealed(tmp_path / "report", model({"ant": 3}), speeds(GPU_SPEEDS), config)
    with pytest.raises(
        GateFailed,
        match=r"INT8 did not pass: not enough evidence: top-1 drop 0\.30, .* \(--set gate\.confident=false\)$",
    ):
        run(config, StepLog("gate"), report=report, output=tmp_path / "verdict")
    verdict = load(tmp_path / "verdict", VerdictManifest).manifest
    assert (verdict.passed, verdict.checks[0].verdict) == (False, "not enough evidence")
    assert verdict.recommendation is None


def test_slow_int8_is_accurate_and_fp16_recommended(tmp_path: Path) -> None:
    config = GateConfig(min_speedup_fp16=1.2)
    report = sealed(tmp_path / "report", model({}), speeds({**GPU_SPEEDS, "int8": 2700.0}), config)
    with pytest.raises(GateFailed) as caught:
        run(config, StepLog("gate"), report=report, output=tmp_path / "verdict")
    assert str(caught.value).endswith(
        ". Recommended: FP16, since INT8 is accurate enough, but not fast enough: INT8 runs at 0.90 x the throughput "
        "of FP16 at batch 128"
    )
    verdict = load(tmp_path / "verdict", VerdictManifest).manifest
    assert verdict.recommendation is not None
    assert verdict.recommendation.precision == "fp16"


def test_a_verdict_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """Without the settings and fields that came later, and with "not measured" as a verdict."""
    report = sealed(tmp_path / "report", model({}), speeds(GPU_SPEEDS), GateConfig())
    run(GateConfig(), StepLog("gate"), report=report, output=tmp_path / "verdict")
    file = tmp_path / "verdict" / "manifest.json"
    old = json.loads(file.read_text())
    del old["recommendation"]
    old["passed"], old["checks"] = False, [{**old["checks"][0], "measured": None, "verdict": "not measured"}]
    old["config"] = {"precision": "int8", "max_top1_drop_points": 0.5, "min_relative_top1_pct": 99.0}
    file.write_bytes(canonical_json({**old, "seal": seal_of(old)}))
    verdict = load(tmp_path / "verdict", VerdictManifest).manifest
    assert verdict.checks[0].verdict == "not enough evidence"
    assert verdict.recommendation is None
    assert verdict.word == "fail"
    assert Thresholds.recorded(old["config"]) == Thresholds(confident=False, require_above_chance=False)


@pytest.mark.parametrize(("confident", "word"), [(True, "pass"), (False, "pass, not proved")])
def test_a_pass_without_proof_says_so(tmp_path: Path, confident: bool, word: str) -> None:
    config = GateConfig(confident=confident)
    report = sealed(tmp_path / "report", model({}), speeds(GPU_SPEEDS), config)
    said = run(config, StepLog("gate"), report=report, output=tmp_path / "verdict")
    verdict = load(tmp_path / "verdict", VerdictManifest).manifest
    assert (verdict.word, "not proved: gate.confident is false" in verdict.note) == (word, not confident)
    assert verdict.note in said


# What to ship


def advice(
    own: Predictions, images_per_s: dict[str, float], fp16: Predictions | None = None, **settings: Any
) -> Recommendation | None:
    thresholds = Thresholds(**settings)
    rows = [accuracy("fp32", model({}), 108_000_000), accuracy("int8", own)]
    if fp16 is not None:
        rows.insert(1, accuracy("fp16", fp16, 48_000_000))
    report, benchmark = measured(*rows), speeds(images_per_s)
    return recommend(thresholds, run_checks(thresholds, report, benchmark), report, benchmark)


SLOW = {**GPU_SPEEDS, "int8": 2700.0}
ON_CPU = {"fp32": 100.0, "int8": 90.0}


@pytest.mark.parametrize(
    ("images_per_s", "settings", "precision", "reason"),
    [
        (GPU_SPEEDS, {}, "int8", "every check passed"),
        (SLOW, {}, "fp16", "INT8 runs at 0.90 x the throughput of FP16 at batch 128"),
        (SLOW, {"min_speedup_fp16": 1.2}, "fp16", "INT8 runs at 0.90 x the throughput of FP16 at batch 128"),
        (GPU_SPEEDS, {"min_speedup": 5}, "fp16", "throughput over FP32 at batch 128 4.00, at least 5 x"),
        (GPU_SPEEDS, {"min_speedup_fp16": 2}, "fp16", "throughput over FP16 at batch 128 1.33, at least 2 x"),
        (GPU_SPEEDS, {"max_p99_ms": 2}, None, ""),  # FP16 takes as long
        (GPU_SPEEDS, {"max_size_mb": 20}, None, ""),  # FP16 is larger still
        (GPU_SPEEDS, {"min_speedup": 5, "max_size_mb": 30}, None, ""),
        ({}, {}, "int8", "every check passed"),
        ({}, {"min_speedup": 2}, None, ""),  # not measured
    ],
)
def test_accurate_int8(images_per_s: dict[str, float], settings: Any, precision: str | None, reason: str) -> None:
    found = advice(model({}), images_per_s, model({}), **settings)
    assert (found.precision if found else None) == precision
    assert found is None or found.reason.endswith(reason)


def test_the_number_of_images_that_would_tell_is_one() -> None:
    """Of two limits of the drop that are open, 0.9 points and 99 % of 100 %, the narrower decides both."""
    thresholds = GateConfig(max_top1_drop_points=0.9, min_relative_top1_pct=99)
    report = measured(accuracy("fp32", model({})), accuracy("int8", model({"ant": 7})))
    found = [check.explanation for check in run_checks(thresholds, report, speeds(GPU_SPEEDS))[:2]]
    needed = deciding_images(thresholds, report, report.row("int8"))
    assert [f"about {needed:,} validation images would tell" in text for text in found] == [True, True]


def test_without_fp16_it_is_fp32() -> None:
    found = advice(model({}), ON_CPU)
    assert found is not None
    assert (found.precision, "0.90 x the throughput of FP32" in found.reason) == ("fp32", True)
    unmeasured = advice(model({}), {**ON_CPU, "fp16": 300.0})
    assert unmeasured is not None
    assert unmeasured.precision == "fp32"
    inaccurate = advice(model({}), SLOW, model({"ant": 100}), min_speedup=5)
    assert inaccurate is not None
    assert inaccurate.precision == "fp32"  # FP16 is not as accurate as asked


def test_inaccurate_int8_leads_to_no_recommendation() -> None:
    assert advice(model({"ant": 100}), SLOW, model({})) is None
    assert advice(model({}, per_class=20), SLOW, model({}), min_validation_images=100) is None


def test_slow_fp16_is_replaced_by_fp32() -> None:
    found = advice(model({}), {"fp32": 100.0, "fp16": 80.0}, model({}), precision="fp16")
    assert found is not None
    assert (found.precision, "FP16 runs at 0.80 x" in found.reason) == ("fp32", True)


def test_a_difference_within_the_spread_is_none() -> None:
    """Half a per cent slower, where repeats differ by two: INT8 is as fast."""
    near = speeds({"fp32": 100.0, "int8": 99.5})
    spread = [
        row.model_copy(
            update={"lowest_images_per_s": row.images_per_s - 1, "highest_images_per_s": row.images_per_s + 1}
        )
        for row in near.rows
    ]
    rows = (accuracy("fp32", model({})), accuracy("int8", model({})))
    report = measured(*rows)
    for benchmark, precision in ((near, "fp32"), (near.model_copy(update={"rows": tuple(spread)}), "int8")):
        found = recommend(Thresholds(), run_checks(Thresholds(), report, benchmark), report, benchmark)
        assert found is not None
        assert found.precision == precision


# Classes


def test_classes_against_fp32_by_hand() -> None:
    """6 of 6 lost is p = 2 / 2^6, times the 2 classes that differ; 1 gained is p = 1."""
    fp32 = predictions({"ant": [True] * 10, "bee": [True] * 10, "cat": [False, True], "dog": [True]})
    own = predictions({"ant": [True] * 10, "bee": [True] * 4 + [False] * 6, "cat": [True, True], "dog": [True]})
    changes = {entry.name: entry for entry in class_changes(CLASSES, fp32, own)}
    assert list(changes) == ["bee", "ant", "dog", "cat"]
    bee = changes["bee"]
    assert (bee.num_lost, bee.num_gained, bee.delta_points, bee.significant) == (6, 0, -60.0, False)
    assert bee.p_corrected == pytest.approx(2 * 2 / 64)
    assert (changes["cat"].num_gained, changes["cat"].p_corrected, changes["dog"].p_corrected) == (1, 1.0, 1.0)
    worse, largest = class_losses(tuple(changes.values()))
    assert worse == ()
    assert largest is not None
    assert largest.name == "bee"


def test_a_class_that_gets_better_is_no_loss() -> None:
    worse, own = model({"ant": 100}), model({})
    (better, *_) = (entry for entry in class_changes(CLASSES, worse, own) if entry.name == "ant")
    assert better.significant
    assert class_losses(class_changes(CLASSES, worse, own)) == ((), None)


def test_the_summary_of_a_run_says_what_to_ship() -> None:
    found = Recommendation(precision="fp16", reason="INT8 is [slow]")
    builder = SummaryBuilder(0.0)
    event = {"event": "verdict", "step": "gate", "word": "fail", "precision": "int8", "checks": []}
    builder.handle({**event, "recommendation": found.model_dump()})
    assert builder.recommendation == found
    for verdict, expected in (("fail", "recommended: FP16, since INT8 is [slow]\n"), ("pass", "")):
        console = Console(file=io.StringIO())
        rows = [SimpleNamespace(precision="fp16" if verdict == "pass" else "int8", verdict=verdict)]
        _print_recommendation(console, SimpleNamespace(recommendation=builder.recommendation, rows=rows))  # type: ignore[arg-type]
        assert console.file.getvalue() == expected  # type: ignore[attr-defined]


def test_a_report_of_an_earlier_version_gets_the_interval_from_its_counts() -> None:
    """The published example has the intervals of version 0.1 and does not name the most frequent class."""
    example = Path(__file__).resolve().parents[2] / "docs/examples/h200/report.json"
    old = json.loads(example.read_text())["accuracy"]
    assert "bootstrap_low_points" in old["rows"][-1]["comparison"]
    report = AccuracyReport.model_validate(old)
    found = report.row("int8").comparison
    assert found is not None
    assert found.drop_upper_points == drop_upper(found.num_images, found.num_lost, found.num_gained)
    drop, *_, chance, _ = run_checks(Thresholds(), report, speeds({}))
    assert (drop.verdict, chance.name, chance.verdict) == ("pass", "above_chance", "not enough evidence")
    assert "above_chance" not in {entry.name for entry in run_checks(Thresholds.recorded({}), report, speeds({}))}
