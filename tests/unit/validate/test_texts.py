"""What a report says to do next, by what was seen, and how it tells the choice of INT8 and missing engines."""

import html
import re
from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.records import (
    AccuracyRow,
    ClassLoss,
    GateCheck,
    LayerCost,
    PairedComparison,
    Recommendation,
)
from components.common.contracts.statistics import drop_upper
from components.common.contracts.verdict import CHECKS, Thresholds
from components.validate.report import write_report
from components.validate.report_text import limitations, next_steps, ranking_sentences, selection_sentences
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
    fp32, half, int8 = report.accuracy.rows
    other = half if fp16 else AccuracyRow(precision="fp16", runtime="n/a", note="needs TensorRT")
    change = {"comparison": PairedComparison.of(1000, lost, gained), "worse_classes": (), "largest_loss": None, **own}
    rows = (fp32, other, int8.model_copy(update=change))
    entry = GateCheck(name=check, measured=1.0, threshold=0.5, verdict=verdict, explanation="")  # type: ignore[arg-type]
    found = {"checks": (entry,), "recommendation": advice, "thresholds": Thresholds(min_top1_pct=99.0)}
    selection = report.calibration.selection
    assert selection is not None
    selection = selection.model_copy(update={"out_of_time": False})
    accuracy = report.accuracy.model_copy(update={"rows": rows})
    changed_report = report.model_copy(
        update={"accuracy": accuracy, "verdict": report.verdict.model_copy(update=found)}
    )
    calibration = {"selection": selection, **({} if chosen else {"method": "entropy"})}
    return next_steps(exported_with(changed(changed_report, **calibration), **(export or {})))


def changed(report: Report, **calibration: Any) -> Report:
    return report.model_copy(update={"calibration": report.calibration.model_copy(update=calibration)})


def exported_with(report: Report, **config: Any) -> Report:
    configs = {**report.provenance.configs, "export": config}
    return report.model_copy(update={"provenance": report.provenance.model_copy(update={"configs": configs})})


FEW = {"verdict": "not enough evidence", "lost": 4, "gained": 3}  # 0.1 points, which are allowed
FP16 = Recommendation(precision="fp16", reason="INT8 is slow")
FP32 = Recommendation(precision="fp32", reason="INT8 is slow")
REMEDIES: list[tuple[str, dict[str, Any], str, str]] = [
    ("top1_drop_points", FEW, "preprocess.val_fraction", "gate.confident=false"),
    ("relative_top1_pct", FEW, "preprocess.val_fraction", "gate.confident=false"),
    ("top1_drop_points", {"worse_classes": (LOSS,)}, "cat (30 of 40 images)", "export.num_selection_images"),
    ("top1_drop_points", {}, "export.num_selection_images", ""),
    ("top1_drop_points", {"fp16": True}, "export.num_selection_images", "gate.precision=fp16"),
    ("top1_drop_points", {"export": {"fallback": False}}, "export.fallback=true", ""),
    ("top1_drop_points", {"export": {"calibration_method": "max"}}, "export.calibration_method=auto", ""),
    ("top1_drop_points", {"chosen": False}, "another one", ""),
    ("top1_drop_points", {"top1_pct": None, "note": "sums saturate on AVX2"}, "7-bit", ""),
    ("top1_drop_points", {"top1_pct": None, "note": "it needs a GPU"}, "a machine that runs INT8", ""),
    ("top1_drop_points", {"comparison": None}, "Validate again", ""),
    ("class_drop_points", {"worse_classes": (LOSS,)}, "cat (30 of 40 images)", ""),
    ("class_drop_points", {"verdict": "not enough evidence", "largest_loss": LOSS}, "more images of cat", ""),
    ("above_chance", {}, "Train again", ""),
    ("top1_pct", {}, "Train for longer", ""),
    ("validation_images", {"verdict": "not enough evidence"}, "at least 100 images", ""),
    ("speedup", {"advice": FP16}, "gate.precision=fp16", ""),
    ("speedup_fp16", {"advice": FP32}, "Ship FP32", ""),
    ("speedup", {"verdict": "not enough evidence"}, "validate.benchmark_seconds", ""),
    ("p99_ms", {}, "validate.latency_budget", ""),
    ("size_mb", {}, "--architecture", ""),
]


@pytest.mark.parametrize(("check", "seen", "first", "also"), REMEDIES)
def test_each_cause_has_its_remedy(
    check: str, seen: dict[str, Any], first: str, also: str, reports: dict[str, Report]
) -> None:
    steps = judged(reports["ten classes"], check, **seen)
    assert first in steps[0]
    assert also in " ".join(steps[1:])
    assert len(steps) == 1 + bool(also)


def test_every_check_of_the_gate_has_a_remedy(reports: dict[str, Report]) -> None:
    assert {row[0] for row in REMEDIES} == set(CHECKS)
    passed = reports["ten classes"].verdict.model_copy(update={"passed": True, "checks": ()})
    assert next_steps(reports["ten classes"].model_copy(update={"verdict": passed})) == []


def test_the_number_of_images_decides(reports: dict[str, Report]) -> None:
    """As many times the images with as many times the lost and gained ones are enough, and half of them are not."""
    (step, _) = judged(reports["ten classes"], "top1_drop_points", **FEW)
    needed = int(step.split("about ")[1].split(" ")[0].replace(",", ""))
    times = needed / 1000
    assert drop_upper(needed, 4 * times, 3 * times) <= 0.5 < drop_upper(needed / 2, 2 * times, 1.5 * times)


# How INT8 was chosen


def written(report: Report, output: Path) -> tuple[str, str]:
    """The part on calibration, of page and card."""
    write_report(report, {}, output)
    page, card = ((output / name).read_text(encoding="utf-8") for name in ("report.html", "model_card.md"))
    return (
        page[page.index("<h2>Calibration") : page.index("<h2>Training")],
        card[card.index("## Calibration") : card.index("## Training")],
    )


def test_the_chosen_trial_is_marked_once(reports: dict[str, Report], tmp_path: Path) -> None:
    page, card = written(reports["ten classes"], tmp_path)
    assert page.count("(chosen)") == card.count("(chosen)") == 1
    (row,) = re.findall(r'<tr class="chosen">(.*?)</tr>', page)
    cells = ["percentile (chosen)", "8-bit weights, signed activations", "2", "84.42"]
    assert re.findall(r"<td[^>]*>([^<]*)", row)[:4] == cells
    assert f"| {' | '.join(cells)} |" in card
    assert page.count("<svg") == 2
    assert "<dt>kept in float</dt><dd>/conv1/Conv, /fc/Gemm</dd>" in page
    assert "- kept in float: /conv1/Conv, /fc/Gemm" in card


def test_the_choice_is_told_in_words(reports: dict[str, Report]) -> None:
    report = reports["ten classes"]
    compared, chosen, _ = selection_sentences(report)
    assert compared.startswith("2 calibrations measured with every layer in INT8, then 1 set of layers")
    for part in ("percentile with 2 layers in float", "98.28 %", "+0.38 points", "within the budget"):
        assert part in chosen
    outside = selection_sentences(changed(report, method="max", excluded=()))[1]
    assert "\u22121.62 points" in outside
    assert "outside the budget" in outside
    assert len(selection_sentences(changed(report, method="entropy"))) == 2  # as no such trial was measured


def test_of_many_layers_the_costliest_are_shown(reports: dict[str, Report], tmp_path: Path) -> None:
    names = [f"/layer{index}/Conv" for index in range(1, 43)]
    ranking = tuple(LayerCost(name=name, operator="Conv", cost_nats=0.1 / len(name)) for name in names)
    selection = reports["ten classes"].calibration.selection
    assert selection is not None
    excluded = (names[0], names[30], names[40])
    entry = selection.model_copy(update={"ranking": ranking})
    page, card = written(changed(reports["ten classes"], selection=entry, excluded=excluded), tmp_path)
    for text in (page, card):
        assert "The 20 costliest of 42 layers that can run in INT8" in html.unescape(text)
        assert "2 layers kept in float cost less than those shown." in text
        assert names[40] in text
    assert ">layer20 Conv</text>" in page
    assert ">layer21 Conv</text>" not in page


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"num_selection_images": 0, "fallback": True}, ": export.num_selection_images is 0."),
        (
            {"num_selection_images": 2000, "fallback": False, "calibration_method": "mse"},
            ": the method was given (export.calibration_method), and export.fallback is off.",
        ),
        (
            {"num_selection_images": 2000, "fallback": False, "calibration_method": "auto"},
            ": 14,387 training images are too few to calibrate with some and compare on others.",
        ),
        ({}, "."),
    ],
)
def test_where_nothing_was_compared_it_says_why(
    config: dict[str, Any], why: str, reports: dict[str, Report], tmp_path: Path
) -> None:
    page, card = written(exported_with(reports["own model"], **config), tmp_path)
    assert f"<p>No calibrations were compared{why}</p>" in page
    assert f"No calibrations were compared{why}" in card.replace("\\", "")
    for text in (page, card):
        assert not re.search("<svg|<figure|Candidates|Costliest|chosen\\)", text)


def test_without_a_ranking_there_is_no_chart_of_it(reports: dict[str, Report], tmp_path: Path) -> None:
    selection = reports["ten classes"].calibration.selection
    assert selection is not None
    entry = selection.model_copy(update={"ranking": (), "num_ranking_images": 0})
    unranked = changed(reports["ten classes"], selection=entry)
    page, _ = written(unranked, tmp_path)
    assert "<p>Layers were not ranked: the budget holds with all of them in INT8.</p>" in page
    assert page.count("<svg") == 1
    off = ranking_sentences(exported_with(unranked, num_ranking_images=0), 20)
    assert off == ["Layers were not ranked: export.num_ranking_images is 0."]


@pytest.mark.parametrize(
    ("num_built", "said"), [(0, "There are no TensorRT"), (1, "Some TensorRT engines are missing")]
)
def test_all_or_some_engines_are_missing(reports: dict[str, Report], tmp_path: Path, num_built: int, said: str) -> None:
    report = reports["ten classes"]
    missing = {"engines": report.model.engines[:num_built], "layers": (), "engines_missing": "no memory left"}
    report = report.model_copy(update={"model": report.model.model_copy(update=missing)})
    assert any(point.startswith(said) and point.endswith(": no memory left.") for point in limitations(report))
    write_report(report, {}, tmp_path)
    for name in ("report.html", "model_card.md"):
        text = (tmp_path / name).read_text()
        assert said in text
        assert text.count("no memory left") >= 2
