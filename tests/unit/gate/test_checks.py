"""Each check at its borders, what the evidence is too little for, and what is recommended then."""

from typing import Any

import pytest
from pydantic import ValidationError

from benchmarks.gate_power import shares
from components.common.contracts.records import (
    AccuracyReport,
    BenchmarkReport,
    ClassLoss,
    CorruptedRow,
    GateCheck,
    PairedComparison,
    Speedup,
)
from components.common.contracts.verdict import CHECKS, Thresholds, deciding_images, recommend, run_checks, verdict_note
from components.validate.report_text import number
from tests.unit.measurements import (
    accuracy_report,
    accuracy_row,
    benchmark_report,
    benchmark_row,
    compared_row,
    scored_row,
    speeds,
)

GPU = {"fp32": 1000.0, "fp16": 3000.0, "int8": 4000.0}
OPEN = "not enough evidence"


def check(name: str, accuracy: AccuracyReport, benchmark: BenchmarkReport | None = None, **settings: Any) -> GateCheck:
    """Return the result of one of the checks."""
    checks = run_checks(Thresholds(**settings), accuracy, benchmark or speeds(GPU))
    return next(entry for entry in checks if entry.name == name)


@pytest.mark.parametrize(
    ("name", "fp32", "own", "threshold", "verdict"),
    [
        ("drop_points", 80.0, 79.5, 0.5, "pass"),  # exactly the threshold
        ("drop_points", 80.0, 79.49, 0.5, "fail"),
        ("drop_points", 76.3, 75.8, 0.5, "pass"),  # 76.3 - 75.8 is 0.5000000000000000 and a bit in binary
        ("drop_points", 100 * 0.57, 100 * 0.56, 1.0, "pass"),
        ("drop_points", 80.0, 81.0, 0.0, "pass"),  # better than FP32
        ("drop_points", 80.0, 80.0, 0.0, "pass"),
        ("drop_points", 80.0, 79.99, 0.0, "fail"),
        ("relative_score_pct", 80.0, 79.2, 99, "pass"),
        ("relative_score_pct", 80.0, 79.19, 99, "fail"),
        ("relative_score_pct", 70.0, 69.3, 99, "pass"),
        ("relative_score_pct", 50.0, 60.0, 99, "pass"),
        ("relative_score_pct", 50.0, 0.0, 99, "fail"),
        ("relative_score_pct", 0.0, 0.0, 99, OPEN),  # there is no share of nothing
        ("relative_score_pct", 0.0, 20.0, 99, OPEN),
        ("score_pct", 30.0, 100 * 0.29, 29.0, "pass"),
        ("score_pct", 30.0, 28.99, 29.0, "fail"),
        ("score_pct", 30.0, 29.01, 29.0, "pass"),
    ],
)
def test_what_was_measured_at_the_threshold(name: str, fp32: float, own: float, threshold: float, verdict: str) -> None:
    accuracy = accuracy_report(accuracy_row("fp32", fp32), accuracy_row("int8", own))
    settings = {"max_drop_points": 100.0, "confident": False, CHECKS[name].setting: threshold}
    found = check(name, accuracy, **settings)
    measured = {"drop_points": fp32 - own, "relative_score_pct": 100 * own / fp32 if fp32 else None}.get(name, own)
    assert (found.verdict, found.threshold) == (verdict, threshold)
    assert found.measured == (None if measured is None else pytest.approx(measured))


@pytest.mark.parametrize(("own", "written"), [(80.001, "0.00"), (79.5, "0.50"), (79.499, "0.50100"), (79.4, "0.60")])
def test_a_drop_is_written_without_a_negative_zero_and_apart_from_its_limit(own: float, written: str) -> None:
    accuracy = accuracy_report(accuracy_row("fp32", 80.0), accuracy_row("int8", own))
    assert f"drop {written}, allowed 0.5 points" in check("drop_points", accuracy, confident=False).explanation
    assert number(-0.001) == "0.00"


WOULD_TELL = "validation images would tell"


@pytest.mark.parametrize(
    ("lost", "gained", "num_images", "allowed", "verdict", "said"),
    [
        (3, 0, 1000, 0.5, OPEN, WOULD_TELL),  # 0.3 points measured
        (3, 0, 1000, 1.0, "pass", "with 95 % confidence at most"),
        (6, 0, 1000, 0.5, OPEN, WOULD_TELL),  # 0.6 points measured, and surely 0.3 only
        (16, 0, 1000, 0.5, "fail", "with 95 % confidence at least"),
        (30, 0, 10_000, 0.5, "pass", "with 95 % confidence at most"),  # as 3 of 1,000, on ten times as many images
        (0, 0, 120, 0.5, OPEN, WOULD_TELL),
        (0, 0, 1000, 0.5, "pass", "with 95 % confidence at most"),
        (0, 0, 400, 0.5, OPEN, f"about 600 {WOULD_TELL} (0 regressed and 0 improved of 400)"),  # the rule of three
        (3, 3, 360, 0.5, OPEN, f"about 2,000 {WOULD_TELL} (3 regressed and 3 improved of 360)"),
        (0, 5, 1000, 0.0, OPEN, "no number of images proves a drop of at most 0 points"),
        (0, 0, 1000, 1e-5, OPEN, "no number of images proves a drop of at most 1e-05 points"),  # of ten million
        (5, 0, 1000, 0.5, OPEN, "more images hardly tell, since the drop seen is as large as what is allowed"),
    ],
)
def test_drops_are_proved_or_open(
    lost: int, gained: int, num_images: int, allowed: float, verdict: str, said: str
) -> None:
    accuracy = accuracy_report(compared_row(lost, gained, num_images=num_images))
    found = check("drop_points", accuracy, max_drop_points=allowed)
    assert (found.verdict, found.measured) == (verdict, pytest.approx(100 * (lost - gained) / num_images))
    assert said in found.explanation


@pytest.mark.parametrize(
    ("drop", "std", "allowed", "verdict", "said"),
    [
        (0.2, 0.1, 0.5, "pass", "mIoU drop 0.20, allowed 0.5 points; with 95 % confidence at most 0.36 points"),
        (0.0, 0.0, 0.5, "pass", "with 95 % confidence at most 0.00 points"),
        (1.0, 0.2, 0.5, "fail", "with 95 % confidence at least 0.67 points"),
        # (1.645 * 0.4 / 0.3)^2 = 4.8 times as many
        (0.2, 0.4, 0.5, OPEN, f"about 2,000 {WOULD_TELL} (worse on 90 and better on 70 of 400)"),
        (0.5, 0.4, 0.5, OPEN, "more images hardly tell"),
    ],
)
def test_drops_of_scores_that_are_no_shares(drop: float, std: float, allowed: float, verdict: str, said: str) -> None:
    accuracy = accuracy_report(scored_row(drop, std), task="segmentation")
    found = check("drop_points", accuracy, max_drop_points=allowed)
    assert found.verdict == verdict
    assert said in found.explanation


@pytest.mark.parametrize(("low", "verdict"), [(12.0, "pass"), (9.0, OPEN)])
def test_a_score_that_is_no_share_is_above_chance_by_its_interval(low: float, verdict: str) -> None:
    fp32 = accuracy_row("fp32", 20.0, score_low_pct=15.0)
    accuracy = accuracy_report(fp32, accuracy_row("int8", 14.0, score_low_pct=low), task="segmentation")
    found = check("above_chance", accuracy)
    assert (found.verdict, found.threshold) == (verdict, 10.0)
    assert "always answering 'ant'" in found.explanation
    assert verdict == "pass" or found.explanation.endswith("by chance: at least 9.00 % with 95 % confidence")


@pytest.mark.parametrize(
    ("score", "low", "verdict"), [(0.14, 0.05, "fail"), (1.3, 0.9, OPEN), (1.3, 1.1, "pass"), (64.0, 60.0, "pass")]
)
@pytest.mark.parametrize("task", ["detection", "translation"])
def test_a_model_that_learned_nothing_does_not_pass(task: str, score: float, low: float, verdict: str) -> None:
    rows = (accuracy_row(name, score, score_low_pct=low) for name in ("fp32", "int8"))
    found = check("above_chance", accuracy_report(*rows, task=task, most_frequent_class="", most_frequent_pct=0.0))
    assert (found.verdict, found.threshold) == (verdict, 1.0)


@pytest.mark.parametrize(("share_pct", "verdict"), [(95.9, "pass"), (96.5, OPEN), (98.0, "fail")])
def test_the_share_of_fp32_is_proved_like_the_drop(share_pct: float, verdict: str) -> None:
    """30 of 1,000 are lost: with 95 % confidence at least 2.2 and at most 4.0 %."""
    found = check("relative_score_pct", accuracy_report(compared_row(30)), min_relative_score_pct=share_pct)
    assert found.verdict == verdict


def test_the_number_of_images_that_would_tell_is_one() -> None:
    """Of two limits of the drop that are open, 0.9 points and 99 % of 100 %, the narrower decides both."""
    thresholds = Thresholds(max_drop_points=0.9, min_relative_score_pct=99)
    report = accuracy_report(compared_row(7))
    found = [entry.explanation for entry in run_checks(thresholds, report, speeds(GPU))[:2]]
    needed = deciding_images(thresholds, report, report.row("int8"))
    assert [f"about {needed:,} validation images would tell" in text for text in found] == [True, True]


@pytest.mark.parametrize(
    ("share_pct", "verdict"),
    [(0.5, "pass"), (33.33, "pass"), (88.0, "pass"), (88.5, OPEN), (90.0, "fail"), (95.0, "fail")],
)
@pytest.mark.parametrize("worse", ["fp32", "int8"])
def test_a_model_must_be_better_than_always_the_most_frequent_class(share_pct: float, verdict: str, worse: str) -> None:
    rows = (accuracy_row(name, 90.0 if name == worse else 100.0) for name in ("fp32", "int8"))
    found = check("above_chance", accuracy_report(*rows, most_frequent_pct=share_pct))
    assert (found.verdict, found.threshold) == (verdict, share_pct)
    assert f"of {worse.upper()} 90.00" in found.explanation
    assert ("images prepared in another way" in found.explanation) == (verdict == "fail")


def class_loss(name: str, lost: int, num_images: int = 250, p: float = 0.001) -> ClassLoss:
    return ClassLoss(
        name=name,
        num_images=num_images,
        num_regressed=lost,
        num_improved=0,
        delta_points=-100 * lost / num_images,
        p_corrected=p,
    )


BEE, DOG, FEW = class_loss("bee", 20), class_loss("dog", 40), class_loss("cat", 2, 30, p=0.5)


@pytest.mark.parametrize(
    ("losses", "num_unseen", "verdict", "said"),
    [
        ((), 0, "pass", "no class loses accuracy"),
        ((class_loss("bee", 10),), 0, "pass", "bee by 4.00 points (250 images)"),  # 4 points, though significant
        ((BEE,), 0, "fail", "significantly worse: bee by 8.00 points (250 images); allowed 5"),
        ((DOG, BEE), 0, "fail", "dog by 16.00 points (250 images), bee by 8.00 points (250 images)"),
        ((DOG,) * 8, 0, "fail", "dog by 16.00 points (250 images) and 3 more; allowed"),
        ((FEW,), 0, OPEN, "cat by 6.67 points (30 images); allowed 5 points; it may be chance"),
        ((), 2, OPEN, "; 2 classes have no validation image"),
        ((class_loss("bee", 10),), 1, OPEN, "; 1 class has no validation image"),
        ((), 1200, OPEN, "; 1,200 classes have no validation image"),
        ((BEE,), 2, "fail", "bee by 8.00 points (250 images); allowed 5 points in a class"),
    ],
)
def test_worst_class(losses: tuple[ClassLoss, ...], num_unseen: int, verdict: str, said: str) -> None:
    worse = tuple(entry for entry in losses if entry.p_corrected < 0.05)
    largest = losses[0] if losses else None
    row = compared_row(0, worse_classes=worse, largest_loss=largest, num_unseen_classes=num_unseen)
    found = check("class_drop_points", accuracy_report(row), max_class_drop_points=5)
    assert (found.verdict, found.measured) == (verdict, -largest.delta_points if largest else 0)
    assert said in found.explanation


@pytest.mark.parametrize(
    ("counts", "confident", "verdict", "measured"),
    [
        ((), True, OPEN, None),
        (((0, 0), (2, 0)), True, "pass", 0.2),
        (((0, 0), (8, 0)), True, OPEN, 0.8),
        (((0, 0), (8, 0)), False, "pass", 0.8),
        (((0, 9), (11, 0)), False, "fail", 1.1),
        (((0, 0), (40, 0)), True, "fail", 4.0),
        (((18, 0), *[(0, 0)] * 14), True, OPEN, 1.8),  # surely above 1 point if it were the only one
        (((18, 0),), True, "fail", 1.8),
    ],
)
def test_degraded_images(
    counts: tuple[tuple[int, int], ...], confident: bool, verdict: str, measured: float | None
) -> None:
    """A pass needs all of them within 1 point; a failure allows for their number."""
    pairs = [PairedComparison.of(1000, lost, gained) for lost, gained in counts]
    rows = [CorruptedRow(kind="blur", strength=n, score_pct=90, comparison=pair) for n, pair in enumerate(pairs)]
    accuracy = accuracy_report(compared_row(0, corrupted=tuple(rows)))
    found = check("corrupted_drop_points", accuracy, max_corrupted_drop_points=1.0, confident=confident)
    assert found.verdict == verdict
    assert found.measured == (None if measured is None else pytest.approx(measured))
    assert ("95 % confidence" in found.explanation) == (confident and bool(counts))


@pytest.mark.parametrize(("num_kinds", "verdict"), [(1, "fail"), (15, OPEN)])
def test_degraded_images_of_a_score_that_is_no_share(num_kinds: int, verdict: str) -> None:
    """2 points, and surely 2 - 1.64 * 0.5; of 15 kinds at once surely 2 - 2.71 * 0.5."""
    pair = scored_row(2.0, 0.5).comparison
    rows = tuple(CorruptedRow(kind="blur", strength=n, score_pct=90, comparison=pair) for n in range(num_kinds))
    found = check(
        "corrupted_drop_points", accuracy_report(compared_row(0, corrupted=rows)), max_corrupted_drop_points=1
    )
    assert (found.verdict, found.measured) == (verdict, 2.0)


@pytest.mark.parametrize(("num_images", "verdict"), [(100, "pass"), (99, OPEN)])
def test_too_few_images(num_images: int, verdict: str) -> None:
    found = check("validation_images", accuracy_report(compared_row(0, num_images=num_images)))
    assert (found.verdict, found.measured, found.threshold) == (verdict, num_images, 100)


def ratio(low: float, high: float, doubt: str = "") -> BenchmarkReport:
    """INT8 over FP32 within the turns, on a machine that was too busy to time a batch."""
    over = {"fp32": Speedup(median=(low + high) / 2, low=low, high=high, doubt=doubt)}
    rows = benchmark_row("fp32", 1000, others_pct=31.0), benchmark_row("int8", 1300, others_pct=31.0, over=over)
    return benchmark_report(*rows)


SIZES = (*(benchmark_row(name, 100, 1) for name in GPU), benchmark_row("fp32", 100, 16), benchmark_row("int8", 200, 16))


@pytest.mark.parametrize(
    ("name", "benchmark", "threshold", "verdict", "measured"),
    [
        ("speedup", benchmark_report(*SIZES), 2.0, "pass", 2.0),  # at the largest batch
        ("speedup", benchmark_report(*SIZES), 2.01, "fail", 2.0),
        ("speedup", benchmark_report(*SIZES[:2]), 0.1, OPEN, None),
        ("speedup_fp16", speeds({"fp16": 3000.0, "int8": 3600.0}), 1.2, "pass", 1.2),
        ("speedup_fp16", speeds({"fp16": 3000.0, "int8": 3599.0}), 1.2, "fail", 3599 / 3000),
        ("speedup_fp16", speeds({"fp32": 1000.0, "int8": 4000.0}), 1.2, OPEN, None),
        ("speedup_fp16", speeds({}), 1.2, OPEN, None),
        ("speedup", ratio(1.2, 1.6), 1.2, "pass", 1.4),
        ("speedup", ratio(1.19, 1.6), 1.2, OPEN, 1.395),  # turns on both sides of the threshold
        ("speedup", ratio(1.0, 1.2), 1.2, OPEN, 1.1),
        ("speedup", ratio(1.0, 1.19), 1.2, "fail", 1.095),
        ("speedup", ratio(1.5, 1.6, "it was busy"), 1.2, OPEN, None),
        ("speedup", ratio(0.5, 0.6, "it was busy"), 1.2, OPEN, None),
        ("p99_ms", speeds(GPU), 2.5, "pass", 2.5),
        ("p99_ms", speeds(GPU), 2.4, "fail", 2.5),
        ("p99_ms", ratio(1.0, 1.0), 2.4, OPEN, 2.5),  # it was busy
        ("p99_ms", ratio(1.0, 1.0), 2.5, "pass", 2.5),
        ("size_mb", speeds({}), 26.5, "pass", 26.5),
        ("size_mb", speeds({}), 26.4, "fail", 26.5),
    ],
)
def test_speed_and_size(
    name: str, benchmark: BenchmarkReport, threshold: float, verdict: str, measured: float | None
) -> None:
    found = check(name, accuracy_report(compared_row(0)), benchmark, **{CHECKS[name].setting: threshold})
    assert (found.verdict, found.threshold) == (verdict, threshold)
    assert found.measured == (None if measured is None else pytest.approx(measured))


def test_latency_is_of_the_batch_that_is_asked_for() -> None:
    accuracy = accuracy_report(compared_row(0))
    found = check("p99_ms", accuracy, max_p99_ms=2.4, p99_batch_size=128)
    assert found.explanation == "p99 latency at batch 128 2.50, allowed 2.4 ms"
    others = benchmark_report(*SIZES, benchmark_row("fp32", 100, 32))
    found = check("p99_ms", accuracy, others, max_p99_ms=9, p99_batch_size=8)
    assert found.verdict == OPEN
    assert found.explanation == "the latency of INT8 at batch 8 was not measured, only at 1, 16"
    found = check("speedup", accuracy, others, min_speedup=2)
    assert (found.verdict, found.explanation) == (OPEN, "the speed of INT8 at batch 32 was not measured")


@pytest.mark.parametrize(("fp32", "own", "named"), [(80.0, None, "INT8"), (None, 80.0, "FP32"), (None, None, "INT8")])
def test_accuracy_that_was_not_measured_does_not_pass(fp32: float | None, own: float | None, named: str) -> None:
    accuracy = accuracy_report(accuracy_row("fp32", fp32), accuracy_row("int8", own))
    (found,) = run_checks(Thresholds(max_size_mb=30), accuracy, speeds(GPU))
    assert (found.name, found.verdict, found.measured) == ("drop_points", OPEN, None)
    assert found.explanation == f"{named} was not measured here: needs TensorRT"


def test_what_is_set_is_checked_in_the_order_of_the_table() -> None:
    def names(**settings: Any) -> list[str]:
        checks = run_checks(Thresholds(**settings), accuracy, speeds(GPU))
        assert {entry.verdict for entry in checks} == {"pass"}
        return [entry.name for entry in checks]

    kept = CorruptedRow(kind="jpeg", strength=10, score_pct=90, comparison=PairedComparison.of(10_000, 0, 0))
    accuracy = accuracy_report(compared_row(0, num_images=10_000, corrupted=(kept,)))
    off = {"min_relative_score_pct": 0, "min_validation_images": 0, "require_above_chance": False}
    assert names(**off) == ["drop_points"]
    assert names() == ["drop_points", "relative_score_pct", "above_chance", "validation_images"]
    limits = {"min_score_pct": 50, "max_class_drop_points": 5, "max_p99_ms": 3, "max_size_mb": 30}
    limits["max_corrupted_drop_points"] = 2
    assert names(min_speedup=3, min_speedup_fp16=1.2, **limits) == list(CHECKS)
    with pytest.raises(ValidationError, match="min_speedup_fp16 compares INT8 with FP16"):
        Thresholds(precision="fp16", min_speedup_fp16=1.2)


def test_a_drop_without_a_comparison_is_open() -> None:
    report = accuracy_report(accuracy_row("int8", 80.0))
    for name in ("drop_points", "class_drop_points"):
        unknown = check(name, report, max_class_drop_points=5)
        assert (unknown.verdict, unknown.explanation.endswith("validate again")) == (OPEN, True)


@pytest.mark.parametrize(
    ("num_images", "budget", "discordance"), [(359, 0.5, 2.0), (270, 1.0, 1.0), (719, 1.0, 2.0), (2000, 0.5, 0.5)]
)
def test_a_drop_of_the_whole_budget_passes_in_5_of_100(num_images: int, budget: float, discordance: float) -> None:
    found = shares(num_images, budget, drop_pct=budget, discordance_pct=discordance, num_draws=2000)
    assert found["pass"] <= 6.5  # 5 %, and three standard errors of 2,000 draws


def test_no_drop_passes_on_enough_images() -> None:
    assert shares(5000, 0.5, drop_pct=0.0, discordance_pct=1.0, num_draws=500)["pass"] >= 90


# What to ship

RIGHT, WRONG = compared_row(0, precision="fp16"), compared_row(100, precision="fp16")
SLOW = {**GPU, "int8": 2700.0}
OVER_FP16 = "INT8 runs at 0.90 x the throughput of FP16 at batch 128"
OVER_FP32 = "INT8 runs at 0.90 x the throughput of FP32 at batch 128"
ON_CPU = {"fp32": 100.0, "int8": 90.0}
NEAR = speeds({"fp32": 100.0, "int8": 99.5})
LATE = benchmark_report(*(benchmark_row(name, rate, p99_ms=1e3 / rate) for name, rate in SLOW.items()))


@pytest.mark.parametrize(
    ("lost", "fp16", "benchmark", "settings", "precision", "reason"),
    [
        (0, RIGHT, GPU, {}, "int8", "every check passed"),
        (0, RIGHT, SLOW, {}, "fp16", OVER_FP16),
        (0, RIGHT, SLOW, {"min_speedup_fp16": 1.2}, "fp16", f"not fast enough: {OVER_FP16}"),  # said once
        (0, RIGHT, GPU, {"min_speedup": 5}, "fp16", "throughput over FP32 at batch 128 4.00, at least 5 x"),
        (0, RIGHT, GPU, {"min_speedup_fp16": 2}, "fp16", "throughput over FP16 at batch 128 1.33, at least 2 x"),
        (0, RIGHT, GPU, {"max_p99_ms": 2}, None, ""),  # FP16 takes as long
        (0, RIGHT, LATE, {"max_p99_ms": 0.35}, "fp16", "p99 latency"),  # INT8 takes 0.37 ms, FP16 0.33
        (0, RIGHT, LATE, {"max_p99_ms": 0.30}, None, ""),
        (0, RIGHT, GPU, {"max_size_mb": 20}, None, ""),  # FP16 is larger still
        (0, RIGHT, GPU, {"min_speedup": 5, "max_size_mb": 30}, None, ""),
        (0, RIGHT, SLOW, {"max_size_mb": 50}, "fp16", OVER_FP16),
        (0, RIGHT, SLOW, {"max_size_mb": 30}, "int8", "every check passed"),  # FP16 is faster, and too large
        (0, RIGHT, SLOW, {"min_speedup_fp16": 1.2, "max_size_mb": 30}, None, ""),
        (0, RIGHT, {}, {}, "int8", "every check passed"),
        (0, RIGHT, {}, {"min_speedup": 2}, None, ""),  # not measured
        (100, RIGHT, SLOW, {}, None, ""),
        (0, RIGHT, SLOW, {"min_validation_images": 2000}, None, ""),
        (0, None, ON_CPU, {}, "fp32", OVER_FP32),
        (0, RIGHT, ON_CPU, {}, "fp32", OVER_FP32),  # FP16's speed was not measured
        (0, None, {**ON_CPU, "fp16": 300.0}, {}, "fp32", OVER_FP32),  # FP16's accuracy was not measured
        (0, WRONG, SLOW, {"min_speedup": 5}, "fp32", "throughput over FP32 at batch 128 2.70, at least 5 x"),
        (0, None, NEAR, {}, "fp32", "INT8 runs at 0.99 x the throughput of FP32 at batch 128"),
        (0, None, ratio(0.98, 1.0), {}, "int8", "every check passed"),  # no slower than turns differ
        (0, RIGHT, {"fp32": 100.0, "fp16": 80.0}, {"precision": "fp16"}, "fp32", "FP16 runs at 0.80 x"),
    ],
)
def test_recommendation(
    lost: int, fp16: Any, benchmark: Any, settings: dict[str, Any], precision: str | None, reason: str
) -> None:
    rows = (compared_row(lost), *([fp16] if fp16 else []))
    measured = benchmark if isinstance(benchmark, BenchmarkReport) else speeds(benchmark)
    thresholds, accuracy = Thresholds(**settings), accuracy_report(*rows)
    found = recommend(thresholds, run_checks(thresholds, accuracy, measured), accuracy, measured)
    assert (found.precision if found else None) == precision
    assert found is None or reason in found.reason


@pytest.mark.parametrize(("least", "precision"), [(79.9, "fp32"), (80.0, "int8")])
def test_fp32_is_recommended_with_the_least_top1_alone(least: float, precision: str) -> None:
    thresholds = Thresholds(confident=False, min_score_pct=least)
    accuracy = accuracy_report(accuracy_row("fp32", 79.9), accuracy_row("int8", 80.0))
    benchmark = speeds(ON_CPU)
    found = recommend(thresholds, run_checks(thresholds, accuracy, benchmark), accuracy, benchmark)
    assert found.precision == precision


NAN = "the logits of 4 of 10,000 images hold NaN or infinity, which counts as wrong"
PLANS = "OpenVINO ran the ONNX file, not the plan: it was built elsewhere (GPU; driver)"
FP32 = "FP32, which it is compared with: "
UNPROVED = "not proved: gate.confident is false, so the measured drop alone counts"


@pytest.mark.parametrize(
    ("notes", "num_images", "confident", "said"),
    [
        ({}, 10_000, True, ""),
        ({}, 400, True, "one of 400 validation images is 0.25 points"),
        ({"int8": NAN}, 10_000, False, f"{UNPROVED}; {NAN}"),
        # An image that FP32 gets wrong can't be lost, so that a fault of FP32 hides those of INT8.
        ({"fp32": NAN}, 10_000, True, FP32 + NAN),
        ({"fp32": f"{PLANS}; {NAN}", "int8": PLANS}, 10_000, True, f"{PLANS}; {FP32}{NAN}"),
        ({"fp32": PLANS, "int8": f"{PLANS}. no VNNI"}, 10_000, True, f"{PLANS}. no VNNI"),
        ({"fp16": NAN}, 10_000, True, ""),
    ],
)
def test_doubts_stand_beside_the_verdict(notes: dict[str, str], num_images: int, confident: bool, said: str) -> None:
    rows = (accuracy_row(name, 80.0, num_images=num_images, note=notes.get(name, "")) for name in GPU)
    assert verdict_note(Thresholds(confident=confident), accuracy_report(*rows)) == said


def test_an_image_is_no_share_of_a_score_that_is_no_share_of_images() -> None:
    found = accuracy_report(*(accuracy_row(name, 80.0, num_images=400) for name in GPU))
    assert verdict_note(Thresholds(), found.model_copy(update={"task": "detection"})) == ""


def test_a_number_of_images_that_no_check_can_hold_is_refused() -> None:
    with pytest.raises(ValidationError, match="min_validation_images"):
        Thresholds(min_validation_images=10**400)
