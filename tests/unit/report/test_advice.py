"""What a report says to do next, by what was seen."""

from typing import Any

import pytest

from components.common.contracts.records import AccuracyRow, ClassLoss, Comparison, GateCheck, Recommendation
from components.common.contracts.verdict import Thresholds
from components.validate.report_text import next_steps
from components.validate.schema import Report

LOSS = ClassLoss(name="cat", num_images=40, num_lost=30, num_gained=1, delta_points=-72.5, p_corrected=1e-5)


def judged(
    report: Report,
    check: str,
    verdict: str = "fail",
    *,
    lost: int = 40,
    gained: int = 2,
    export: dict[str, Any] | None = None,
    chosen: bool = True,
    advice: Recommendation | None = None,
    fp16: bool = False,
    **own: Any,
) -> list[str]:
    """The steps after one check of INT8, of 1,000 images, that does not pass."""
    compared = Comparison(
        num_images=1000,
        num_lost=lost,
        num_gained=gained,
        delta_top1_points=(gained - lost) / 10,
        drop_lower_points=0.0,
        drop_upper_points=9.0,
        mcnemar_p=0.5,
        mcnemar_test="chi-square",
    )
    fp32, half, int8 = report.accuracy.rows
    change = {"comparison": compared, "worse_classes": (), "largest_loss": None, **own}
    other = half if fp16 else AccuracyRow(precision="fp16", runtime="n/a", note="needs TensorRT")
    entry = GateCheck(name=check, measured=1.0, threshold=0.5, verdict=verdict, explanation="")  # type: ignore[arg-type]
    calibration = report.calibration if chosen else report.calibration.model_copy(update={"method": "entropy"})
    selection = calibration.selection
    assert selection is not None
    calibration = calibration.model_copy(update={"selection": selection.model_copy(update={"out_of_time": False})})
    configs = {**report.provenance.configs, "export": export or {}}
    rows = (fp32, other, int8.model_copy(update=change))
    return next_steps(
        report.model_copy(
            update={
                "accuracy": report.accuracy.model_copy(update={"rows": rows}),
                "verdict": report.verdict.model_copy(
                    update={"checks": (entry,), "recommendation": advice, "thresholds": Thresholds(min_top1_pct=99.0)}
                ),
                "calibration": calibration,
                "provenance": report.provenance.model_copy(update={"configs": configs}),
            }
        )
    )


FEW = {"verdict": "not enough evidence", "lost": 4, "gained": 3}  # 0.1 points, which are allowed
FP16 = Recommendation(precision="fp16", reason="INT8 is slow")


@pytest.mark.parametrize(
    ("check", "seen", "first", "also"),
    [
        ("top1_drop_points", FEW, "preprocess.val_fraction", "gate.confident=false"),
        ("relative_top1_pct", FEW, "preprocess.val_fraction", ""),
        ("top1_drop_points", {"worse_classes": (LOSS,)}, "cat (30 of 40 images)", "export.num_selection_images"),
        ("top1_drop_points", {}, "export.num_selection_images", ""),
        ("top1_drop_points", {"fp16": True}, "export.num_selection_images", "gate.precision=fp16"),
        ("top1_drop_points", {"export": {"fallback": False}}, "export.fallback=true", ""),
        ("top1_drop_points", {"export": {"calibration_method": "max"}}, "export.calibration_method=auto", ""),
        ("top1_drop_points", {"chosen": False}, "another one", ""),
        ("top1_drop_points", {"top1_pct": None, "note": "sums saturate on AVX2"}, "7-bit", ""),
        ("top1_drop_points", {"top1_pct": None, "note": "it needs a GPU"}, "a machine that runs INT8", ""),
        ("class_drop_points", {"worse_classes": (LOSS,)}, "cat (30 of 40 images)", ""),
        ("class_drop_points", {"verdict": "not enough evidence", "largest_loss": LOSS}, "more images of cat", ""),
        ("above_chance", {}, "Train again", ""),
        ("top1_pct", {}, "Train for longer", ""),
        ("validation_images", {"verdict": "not enough evidence"}, "at least 100 images", ""),
        ("speedup", {"advice": FP16}, "gate.precision=fp16", ""),
        ("speedup_fp16", {"advice": FP16}, "gate.precision=fp16", ""),
        ("speedup", {"verdict": "not enough evidence"}, "validate.benchmark_seconds", ""),
        ("p99_ms", {}, "validate.latency_budget", ""),
        ("size_mb", {}, "--architecture", ""),
    ],
)
def test_each_cause_has_its_remedy(
    check: str, seen: dict[str, Any], first: str, also: str, reports: dict[str, Report]
) -> None:
    steps = judged(reports["ten classes"], check, **seen)
    assert first in steps[0]
    assert also in " ".join(steps[1:])
    assert len(steps) == 1 + bool(also) or check == "relative_top1_pct"


def test_the_number_of_images_decides(reports: dict[str, Report]) -> None:
    """As many times the images with as many times the lost and gained ones are enough, and half of them are not."""
    from components.common.contracts.statistics import drop_upper

    (step, _) = judged(reports["ten classes"], "top1_drop_points", **FEW)
    needed = int(step.split("about ")[1].split(" ")[0].replace(",", ""))
    times = needed / 1000
    assert drop_upper(needed, 4 * times, 3 * times) <= 0.5 < drop_upper(needed / 2, 2 * times, 1.5 * times)


def test_nothing_is_to_be_done_after_a_pass(reports: dict[str, Report]) -> None:
    report = reports["ten classes"]
    verdict = report.verdict.model_copy(update={"passed": True, "checks": ()})
    assert next_steps(report.model_copy(update={"verdict": verdict})) == []
