"""The charts of odd runs: one epoch, many, one batch size, none; of candidates near and far, of layers by any name."""

import re
from collections.abc import Callable
from itertools import pairwise

import pytest

from components.common.contracts.records import (
    BenchmarkReport,
    BenchmarkRow,
    EpochRecord,
    LayerCost,
    SelectionEntry,
    Trial,
)
from components.validate.charts import (
    confusion_picture,
    corruption_chart,
    layers_chart,
    lengths_chart,
    short_names,
    speed_chart,
    training_chart,
    trials_chart,
)
from components.validate.schema import Report

History = Callable[[int], tuple[EpochRecord, ...]]


def texts(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


@pytest.mark.parametrize("num_epochs", [1, 2, 3, 16, 90])
def test_curves_have_whole_epochs_on_their_axes(num_epochs: int, make_history: History) -> None:
    svg = training_chart(make_history(num_epochs), "top-1")
    loss, top1, _ = svg.split(">epoch<")
    for part in (loss, top1[top1.index(">loss<") :]):
        ticks = [text for text in texts(part) if text.isdigit()]
        assert "1" in ticks or num_epochs > 3
        assert all(int(tick) <= num_epochs for tick in ticks[: len(ticks) // 2]), ticks
    # A single epoch has no curve: it shows its values.
    assert ({"2.307", "2.197", "81.51"} <= set(texts(svg))) == (num_epochs == 1)


def test_speed_is_drawn_between_round_numbers(speeds: tuple[BenchmarkRow, ...]) -> None:
    svg = speed_chart(BenchmarkReport(bundle_digest="b", rows=speeds))
    shown = texts(svg)
    assert {"0.2", "50", "20,000", "FP32", "FP16", "INT8"} <= set(shown)
    # Of eight batch sizes four are named at each line: all of them would run into each other.
    assert [shown.count(size) for size in ("1", "4", "32", "128", "16", "64")] == [4, 3, 3, 3, 0, 0]  # 1 ms, too
    hollow = "fill: var(--ground); stroke: var(--int8)"  # several streams
    plain = speed_chart(BenchmarkReport(bundle_digest="b", rows=tuple(row for row in speeds if row.is_plain)))
    assert (hollow in svg, hollow in plain) == (True, False)
    single = texts(speed_chart(BenchmarkReport(bundle_digest="b", rows=speeds[:1])))
    assert {"2", "5"} <= set(single)  # 2.85 ms lies between
    assert speed_chart(BenchmarkReport(bundle_digest="b", rows=())) == ""
    busy = [row.model_copy(update={"others_pct": 50.0}) if row.precision == "int8" else row for row in speeds]
    left = texts(speed_chart(BenchmarkReport(bundle_digest="b", rows=tuple(busy))))
    assert ("FP32" in left, "INT8" in left) == (True, False)  # a picture gives a number, too
    without = tuple(row for row in speeds if not row.with_transfers)
    assert speed_chart(BenchmarkReport(bundle_digest="b", rows=without)) == ""


def test_latencies_by_length_are_drawn_but_for_those_of_a_busy_machine(reports: dict[str, Report]) -> None:
    benchmark = reports["translation"].benchmark
    assert {"FP32, median", "INT8, p99"} <= set(texts(lengths_chart(benchmark)))
    for precisions, left in (({"int8"}, {"FP32, median", "FP32, p99"}), ({"fp32", "int8"}, set())):
        rows = tuple(
            row.model_copy(update={"steal_pct": 40.0 if row.precision in precisions else 0.0}) for row in benchmark.rows
        )
        shown = texts(lengths_chart(benchmark.model_copy(update={"rows": rows})) or "<svg/>")
        assert {text for text in shown if "," in text} == left


@pytest.fixture
def selection(reports: dict[str, Report]) -> SelectionEntry:
    found = reports["ten classes"].calibration.selection
    assert found is not None
    return found


def axis(svg: str, label: str) -> dict[float, float]:
    """The place of each number of the horizontal axis."""
    ticks = re.findall(r'x="([\d.]+)"[^>]*>([+\u2212]?[\d.]+)</text>', svg[: svg.index(f">{label}")])
    return {float(text.replace("\N{MINUS SIGN}", "-")): float(x) for x, text in ticks}


def dashed_at(svg: str) -> float | None:
    """The value at which a dashed line stands."""
    places = axis(svg, "top-1 against FP32")
    (first, first_x), *_, (last, last_x) = places.items()
    lines = re.findall(r'<path d="M ([\d.]+) [\d.]+ \nL \1 [\d.]+ \n"[^>]*stroke-dasharray', svg)
    assert len(lines) <= 1
    return first + (float(lines[0]) - first_x) / (last_x - first_x) * (last - first) if lines else None


def bold(svg: str) -> list[str]:
    return re.findall(r'<text style="font-weight: 700[^>]*>([^<]*)<', svg)


def test_the_chosen_candidate_is_marked(selection: SelectionEntry) -> None:
    for trial, name in zip(selection.trials, ("max", "percentile", "percentile, 2 in float"), strict=True):
        svg = trials_chart(selection, trial, "top-1")
        assert bold(svg) == [name]
        assert re.findall(r"fill: var\(--int8\); opacity", svg) == ["fill: var(--int8); opacity"]
    assert texts(svg).count("percentile") == 1
    unknown = trials_chart(selection, None, "top-1")
    assert bold(unknown) == []
    assert "opacity" not in unknown


def test_the_budget_is_a_line_at_the_tighter_limit(selection: SelectionEntry) -> None:
    for points, relative_pct, limit in ((0.73, 98.6, -0.73), (0.73, 99.6, -0.33614), (5.0, 98.6, -1.17649)):
        update = {"max_drop_points": points, "min_relative_score_pct": relative_pct}
        svg = trials_chart(selection.model_copy(update=update), selection.trials[2], "top-1")
        assert dashed_at(svg) == pytest.approx(limit, abs=0.01)
        assert f"budget: \N{MINUS SIGN}{-limit:.2f} points" in texts(svg)
    update = {"max_drop_points": 50.0, "min_relative_score_pct": 10.0}
    svg = trials_chart(selection.model_copy(update=update), selection.trials[2], "top-1")
    assert dashed_at(svg) is None
    assert "budget: \N{MINUS SIGN}50.00 points, off the axis" in texts(svg)


def test_a_ruined_candidate_does_not_flatten_the_others(selection: SelectionEntry) -> None:
    update = {"method": "mse", "delta_points": -67.6, "low_points": -69.7, "high_points": -65.37}
    ruined = selection.trials[0].model_copy(update=update)
    with_it = selection.model_copy(update={"trials": (ruined, *selection.trials)})
    label = "top-1 against FP32"
    svg = trials_chart(with_it, selection.trials[2], "top-1")
    assert axis(svg, label) == axis(trials_chart(selection, selection.trials[2], "top-1"), label)
    written = "\N{BLACK LEFT-POINTING TRIANGLE} \u221267.60 (\u221269.70 to \u221265.37)"
    assert written in texts(svg)
    # Where everything is ruined, the axis reaches down to it.
    svg = trials_chart(selection.model_copy(update={"trials": (ruined,)}), ruined, "top-1")
    assert min(axis(svg, label)) <= -60
    assert written not in texts(svg)


def test_thirty_candidates_have_a_row_each(selection: SelectionEntry) -> None:
    def tried(number_of: int) -> tuple[Trial, ...]:
        names = tuple(f"/layer{index}/Conv" for index in range(number_of))
        return tuple(selection.trials[1].model_copy(update={"excluded": names[:index]}) for index in range(number_of))

    svg = trials_chart(selection.model_copy(update={"trials": tried(31)}), None, "top-1")
    rows = [float(y) for y in re.findall(r'y="([\d.]+)"[^>]*>percentile[^<]*</text>', svg)]
    assert len(rows) == 31
    assert min(below - above for above, below in pairwise(rows)) > 12  # of text 9 high
    assert {"percentile", "percentile, 1 in float", "percentile, 30 in float"} <= set(texts(svg))


def test_degraded_images_have_a_row_each(reports: dict[str, Report]) -> None:
    accuracy = reports["degraded images"].accuracy
    svg = corruption_chart(accuracy, "int8", 2.5)
    names = ["as they are", "noise 0.38", "blur 6", "jpeg 40"]
    assert [text for text in texts(svg) if text in names] == names
    assert "allowed: \N{MINUS SIGN}2.50 points" in texts(svg)
    assert "stroke-dasharray" not in corruption_chart(accuracy, "int8", 0.0)
    assert corruption_chart(reports["ten classes"].accuracy, "int8", 2.5) == ""


def test_layers_in_float_are_hatched(selection: SelectionEntry) -> None:
    def bars(svg: str) -> list[str]:
        return re.findall(r"clip-path[^>]*fill: (url|var\(--int8\))", svg)

    kept = ("/conv1/Conv", "/fc/Gemm")
    svg = layers_chart(selection.ranking, kept, 20)
    assert sorted(bars(svg)) == ["url"] * 2 + ["var(--int8)"] * 6
    assert {"conv1 Conv", "layer1.0.conv1 Conv", "fc Gemm", "kept in float", "in INT8"} <= set(texts(svg))
    few = layers_chart(selection.ranking, kept, 3)
    assert sorted(bars(few)) == ["url"] + ["var(--int8)"] * 2
    assert "kept in float" not in texts(layers_chart(selection.ranking, (), 20))


def test_costs_are_on_the_scale_they_need() -> None:
    def shown(*costs: float) -> list[str]:
        ranking = [LayerCost(name=f"/layer{n}/Conv", operator="Conv", cost_nats=cost) for n, cost in enumerate(costs)]
        return texts(layers_chart(ranking, (), 20))

    assert {"0", "1e-03", "2e-03", "cost in nats"} <= set(shown(2.7e-3, 1.1e-3, 3e-4))
    wide = shown(2.7e-3, 1.1e-5, 0.0)
    assert {"1e-03", "1e-04", "1e-05", "cost in nats, on a logarithmic scale"} <= set(wide)
    assert sum(text.startswith("1e-") for text in shown(2.7e-3, 1e-20)) <= 6
    assert "cost in nats" in shown(0.0, 0.0)


def test_short_names_keep_layers_apart() -> None:
    exported = ["/features/features.7/features.7.0/block/block.1/block.1.0/Conv", "/fc/Gemm", "/Add", "Conv_12", "/"]
    assert short_names(exported) == ["features.7.0.block.1.0 Conv", "fc Gemm", "Add", "Conv_12", "/"]
    same = ["/a/a.1/Conv", "/a.1/Conv", "/a.1/Add"]
    assert short_names(same) == ["/a/a.1/Conv", "/a.1/Conv", "a.1 Add"]
    long = [f"/encoder_{stage}/{'very_' * 12}deep_{n}/Conv" for stage in range(3) for n in range(20)]
    short = short_names(long)
    assert len(set(short)) == len(long)
    assert max(map(len, short)) == 32
    middle = [f"{'x' * 40}{n}{'y' * 60}" for n in range(3)]
    assert len(set(short_names(middle))) == 3
    assert short_names([]) == []


def test_a_name_is_no_formula() -> None:
    ranking = [LayerCost(name=r"/$a_{$/$\frac$", operator="Conv", cost_nats=0.1)]
    assert r"$a_{$ $\frac$" in texts(layers_chart(ranking, (), 20))
    assert r"$\frac$" in texts(confusion_picture([[1, 0], [0, 1]], [r"$\frac$", "b"], "int8"))
