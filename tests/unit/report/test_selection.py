"""How INT8 was chosen, as page and card tell it."""

import html
import re
from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.records import LayerCost
from components.validate.report import write_report
from components.validate.report_text import ranking_sentences, selection_sentences
from components.validate.schema import Report


def changed(report: Report, **calibration: Any) -> Report:
    return report.model_copy(update={"calibration": report.calibration.model_copy(update=calibration)})


def exported_with(report: Report, **config: Any) -> Report:
    configs = {**report.provenance.configs, "export": config}
    return report.model_copy(update={"provenance": report.provenance.model_copy(update={"configs": configs})})


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
    assert re.findall(r"<td[^>]*>([^<]*)", row)[:4] == [
        "percentile (chosen)",
        "8-bit weights, signed activations",
        "2",
        "84.42",
    ]
    assert "| percentile (chosen) | 8-bit weights, signed activations | 2 | 84.42 |" in card
    assert page.count("<svg") == 2


def test_the_choice_is_told_in_words(reports: dict[str, Report]) -> None:
    report = reports["ten classes"]
    compared, chosen, images = selection_sentences(report)
    assert "2 calibrations" in compared
    assert "1 set of layers" in compared
    for told in ("percentile with 2 layers in float", "98.28 %", "+0.38 points", "within the budget"):
        assert told in chosen
    assert "training images" in images
    outside = selection_sentences(changed(report, method="max", excluded=()))[1]
    assert "\u22121.62 points" in outside
    assert "outside the budget" in outside
    assert len(selection_sentences(changed(report, method="entropy"))) == 2  # as no such trial was measured


def test_the_layers_kept_in_float_are_named(reports: dict[str, Report], tmp_path: Path) -> None:
    page, card = written(reports["ten classes"], tmp_path)
    assert "<dt>kept in float</dt><dd>/conv1/Conv, /fc/Gemm</dd>" in page
    assert "- kept in float: /conv1/Conv, /fc/Gemm" in card


def test_of_many_layers_the_costliest_are_shown(reports: dict[str, Report], tmp_path: Path) -> None:
    report = reports["ten classes"]
    names = [f"/layer{index}/Conv" for index in range(1, 43)]
    ranking = tuple(LayerCost(name=name, operator="Conv", cost_nats=0.1 / len(name)) for name in names)
    assert report.calibration.selection is not None
    entry = report.calibration.selection.model_copy(update={"ranking": ranking})
    many = changed(report, selection=entry, excluded=(names[0], names[30], names[40]))
    page, card = written(many, tmp_path)
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
    report = reports["ten classes"]
    assert report.calibration.selection is not None
    entry = report.calibration.selection.model_copy(update={"ranking": (), "num_ranking_images": 0})
    unranked = changed(report, selection=entry)
    page, _ = written(unranked, tmp_path)
    assert "<p>Layers were not ranked: the budget holds with all of them in INT8.</p>" in page
    assert page.count("<svg") == 1
    assert ranking_sentences(exported_with(unranked, num_ranking_images=0), 20) == [
        "Layers were not ranked: export.num_ranking_images is 0."
    ]
