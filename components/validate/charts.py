"""The report's charts, as inline SVG whose colours are the page's CSS variables, so that both schemes are readable."""

import io
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from components.common.contracts.records import (
    AccuracyReport,
    BenchmarkReport,
    EpochRecord,
    LayerCost,
    PlacementEntry,
    Precision,
    SelectionEntry,
    Trial,
)
from components.validate.report_text import signed

# Matplotlib knows no CSS: it draws in these colours, which stand for nothing else, and they are replaced in the SVG.
_CSS = {
    "#010101": "currentColor",
    "#010102": "var(--line)",
    "#010103": "var(--fp32)",
    "#010104": "var(--fp16)",
    "#010105": "var(--int8)",
    "#010106": "var(--ground)",
}
TEXT, LINE, GROUND = "#010101", "#010102", "#010106"
SERIES = {"fp32": "#010103", "fp16": "#010104", "int8": "#010105"}
DASHES: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.2}
MARKERS = {"fp32": "o", "fp16": "^", "int8": "s"}  # distinct without colour, too, as in a black and white print
_MAX_TICKS = 9  # of a logarithmic axis
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the page's font
    "text.parse_math": False,  # in a name a dollar is a dollar
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": LINE,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": LINE,
    "grid.linewidth": 0.5,
    "xtick.color": LINE,
    "ytick.color": LINE,
    "xtick.labelcolor": TEXT,
    "ytick.labelcolor": TEXT,
    "legend.frameon": False,
}


def new_axes(x_label: str, y_label: str, width: float = 4.6, height: float = 3.1) -> tuple[Figure, Axes]:
    """A chart of some inches, which the page scales, with its axes named."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlabel=x_label, ylabel=y_label)
    return figure, axes


def logarithmic(axes: Axes, name: Literal["x", "y"], values: Sequence[float], max_ticks: int = _MAX_TICKS) -> None:
    """A logarithmic scale from one round number to another around the values, with round numbers in plain digits."""
    low, high = min(values) / 1.15, max(values) * 1.15
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    numbers = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    first = max(number for number in numbers if number <= low)
    last = min(number for number in numbers if number >= high)
    ticks = [number for number in numbers if first <= number <= last]
    if len(ticks) > max_ticks:
        ticks = [number for number in ticks if f"{number:e}".startswith("1")]
    axes.set(**{f"{name}scale": "log", f"{name}lim": (first, last)})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def as_svg(figure: Figure) -> str:
    """The <svg> element alone: no XML head, no metadata, no namespaces (HTML knows them), no fixed size."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text)
    text = re.sub(r'<g id="[a-z0-9]+(?:\.[a-z]+)?_\d+"(/?)>', r"<g\1>", text)  # the same in every chart of a page
    for color, css in _CSS.items():
        text = text.replace(color, css)
    return text


_MAX_LAYER_NAME = 32  # characters


def short_names(names: Sequence[str]) -> list[str]:
    """A short name for each node of a graph, no two of them the same.

    An exported node is named by the modules around it, each with the names of those that hold it:
    `/features/features.7/features.7.0/Conv` is the `features.7.0 Conv`. A name that would be another's too stays as
    it is, and one that is still long loses what lies left of its middle.
    """
    short = [_collapsed(name) for name in names]
    times = Counter(short)
    short = [name if times[brief] > 1 else brief for name, brief in zip(names, short, strict=True)]
    longest = max(map(len, short), default=0)
    for length in range(_MAX_LAYER_NAME, longest):
        cut = [_cut(name, length) for name in short]
        if len(set(cut)) == len(set(short)):
            return cut
    return short


def _collapsed(name: str) -> str:
    *scopes, node = [part for part in name.split("/") if part] or [name]
    held = pairwise([*scopes, ""])
    kept = [scope for scope, inner in held if inner != scope and not inner.startswith(f"{scope}.")]
    return f"{'.'.join(kept)} {node}" if kept else node


def _cut(name: str, length: int) -> str:
    if len(name) <= length:
        return name
    start = length // 3
    return f"{name[:start]}…{name[start + 1 - length :]}"


_HIT, _MISS = (22 / 255, 163 / 255, 74 / 255), (220 / 255, 38 / 255, 38 / 255)  # --hit and --miss of the page
_MAX_MARKERS = 30  # points of a curve, above which only its line is drawn
_MAX_BATCHES = 4  # batch sizes written at their points
_MAX_NAMED = 20  # classes named beside a picture of a confusion matrix
_MAX_RATIO = 20  # of costs, above which the small ones could not be seen on a linear scale
_WIDTH_INCHES = 9.2  # the page's full width, at which the text has the size of the page's
_ROW_INCHES = 0.23  # of a chart with a row for each trial or layer
# Where a point's label goes: another side for each, since precisions lie close together.
_PLACES: dict[str, dict[str, Any]] = {
    "fp32": {"xytext": (5, -11), "ha": "left"},
    "fp16": {"xytext": (7, -7), "ha": "left"},
    "int8": {"xytext": (-6, 3), "ha": "right"},
}


def speed_chart(benchmark: BenchmarkReport, unit: str = "images") -> str:
    """Throughput over latency: a line per precision, a point per batch size. SVG, or "" where nothing is sure.

    Both scales are logarithmic: from batch 1 to batch 128, either value grows by a factor of ten or more. Several
    streams are hollow points, and what is unsure or leaves the copies out is not drawn.
    """
    sure = [row for row in benchmark.rows if benchmark.sure_images_per_s(row) is not None]
    shown = [row for row in sure if row.with_transfers]
    if not shown:
        return ""
    named = _named_batches([row.batch_size for row in shown if row.is_plain])
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "speed"}):
        figure, axes = new_axes("median latency of a batch in ms", f"{unit} per second", _WIDTH_INCHES, 4.2)
        for precision, color in SERIES.items():
            streams = [row for row in shown if row.precision == precision and row.num_streams > 1]
            hollow: dict[str, Any] = {"linestyle": "", "markerfacecolor": GROUND, "markersize": 5, "zorder": 3}
            x, y = [row.p50_ms for row in streams], [row.images_per_s for row in streams]
            axes.plot(x, y, color=color, marker=MARKERS[precision], **hollow)
            rows = sorted(
                (row for row in shown if row.precision == precision and row.is_plain), key=lambda row: row.batch_size
            )
            if not rows:
                continue
            x, y = [row.p50_ms for row in rows], [row.images_per_s for row in rows]
            axes.plot(x, y, color=color, marker=MARKERS[precision], label=precision.upper())
            for row in rows:
                place, text = (row.p50_ms, row.images_per_s), str(row.batch_size) if row.batch_size in named else ""
                axes.annotate(text, place, textcoords="offset points", fontsize=9, **_PLACES[precision])
        logarithmic(axes, "x", [row.p50_ms for row in shown])
        logarithmic(axes, "y", [row.images_per_s for row in shown])
        figure.legend(loc="outside upper center", ncols=3)
        return as_svg(figure)


def lengths_chart(report: BenchmarkReport) -> str:
    """Latency of sentences alone over their length: the median as a line, and p99 as its points above. SVG, or "".

    Without what was measured on a busy machine.
    """
    busy = {row.precision for row in report.rows if row.batch_size == 1 and row.busy}
    rows = [row for row in report.lengths if row.precision not in busy]
    if not rows:
        return ""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "lengths"}):
        figure, axes = new_axes("tokens of the sentence", "latency in ms", _WIDTH_INCHES, 3.4)
        for precision, color in SERIES.items():
            own = [row for row in rows if row.precision == precision]
            if own:
                x = [(row.min_tokens + row.max_tokens) / 2 for row in own]
                marker, name = MARKERS[precision], precision.upper()
                axes.plot(x, [row.p50_ms for row in own], color=color, marker=marker, label=f"{name}, median")
                far: dict[str, Any] = {"linestyle": ":", "markerfacecolor": GROUND, "markersize": 5}
                axes.plot(x, [row.p99_ms for row in own], color=color, marker=marker, label=f"{name}, p99", **far)
        axes.set_ylim(0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside upper center", ncols=6)
        return as_svg(figure)


def _named_batches(batch_sizes: Sequence[int]) -> set[int]:
    """The batch sizes that are written at their points: more than four would run into each other."""
    sizes = sorted(set(batch_sizes))
    if len(sizes) <= _MAX_BATCHES:
        return set(sizes)
    return {sizes[index] for index in np.linspace(0, len(sizes) - 1, _MAX_BATCHES).round().astype(int).tolist()}


def training_chart(history: Sequence[EpochRecord], score_name: str) -> str:
    """Loss of training and validation by epoch, and beside it the score on the validation split."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "training"}):
        figure = Figure(figsize=(_WIDTH_INCHES, 3.2), layout="constrained")
        loss, score = figure.subplots(1, 2)
        loss.set(xlabel="epoch", ylabel="loss")
        score.set(xlabel="epoch", ylabel=f"{score_name} in %")
        _curve(loss, [entry.train_loss for entry in history], "fp32", "training", "{:.3f}")
        _curve(loss, [entry.val_loss for entry in history], "int8", "validation", "{:.3f}")
        _curve(score, [entry.val_score_pct for entry in history], "int8", "validation", "{:.2f}")
        loss.set_ylim(0, 1.12 * max(max(entry.train_loss, entry.val_loss or 0.0) for entry in history))
        if len(history) == 1:
            score.set_ylim(0, 108)
        figure.legend(*loss.get_legend_handles_labels(), loc="outside upper center", ncols=2)
        return as_svg(figure)


def confusion_picture(matrix: Sequence[Sequence[int]], classes: Sequence[str], precision: Precision) -> str:
    """Confusion matrix without numbers: a cell per label (row) and prediction (column), in the table's colours."""
    counts = np.asarray(matrix, dtype=float)
    share = np.sqrt(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))  # the root makes rare confusions visible
    diagonal = np.eye(len(counts), dtype=bool)
    cells = np.where(diagonal[..., None], _HIT, _MISS)  # [N, N, 3], 0..1
    opacity = np.where(diagonal, 0.8 * share, np.where(counts > 0, 0.35 + 0.65 * share, 0))
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": f"confusion {precision}", "axes.grid": False}):
        figure, axes = new_axes("prediction, in the same order", "label", _WIDTH_INCHES, 7.4)
        axes.imshow(np.dstack([cells, opacity]), interpolation="none")
        named = np.unique(np.linspace(0, len(classes) - 1, _MAX_NAMED).round().astype(int)).tolist()
        axes.set_yticks(named, [shortened(classes[index]) for index in named], fontsize=8.5)
        axes.set_xticks([])
        return as_svg(figure)


def recall_chart(accuracy: AccuracyReport) -> str:
    """Precision by recall of each precision's boxes at an overlap of 0.5. SVG, or "" for other tasks."""
    rows = [row for row in accuracy.rows if row.precision_by_recall_pct]
    if not rows:
        return ""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "recall"}):
        figure, axes = new_axes("recall in %", "precision in %", _WIDTH_INCHES, 3.4)
        for row, style in zip(rows, ("-", "--", ":"), strict=False):
            curve = row.precision_by_recall_pct
            axes.plot(range(len(curve)), curve, style, color=SERIES[row.precision], label=row.precision.upper())
        axes.set(xlim=(0, 100), ylim=(0, 105))
        axes.legend()
        return as_svg(figure)


def trials_chart(selection: SelectionEntry, chosen: Trial | None, score_name: str) -> str:
    """Draw the cost of each candidate in score, with its interval and the budget: a row each, in the order of trying.

    The axis spans what lies near the chosen one. A candidate far below it, which would press all others into one
    line, is written at the edge instead.
    """
    trials = selection.trials
    nearest = chosen or max(trials, key=lambda trial: trial.delta_points)
    low, high = min(nearest.low_points, 0.0), max(nearest.high_points, 0.0)
    reach = low - 2 * (high - low)
    near = [trial for trial in trials if trial.delta_points >= reach]
    # The largest drop that both limits allow
    relative = (1 - selection.min_relative_score_pct / 100) * selection.fp32_score_pct
    budget = min(selection.max_drop_points, relative)
    low = min(low, *(trial.low_points for trial in near), *([-budget] if -budget >= reach else []))
    high = max(high, *(trial.high_points for trial in near))
    margin = 0.06 * (high - low)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "trials"}):
        excluded = [f", {len(trial.excluded):,} in float" if trial.excluded else "" for trial in trials]
        names = [trial.method + text for trial, text in zip(trials, excluded, strict=True)]
        figure, (axes,) = _rows(names, f"{score_name} against FP32, in points")
        axes.set_xlim(low - margin, high + margin)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: signed(value, 1 if high - low > 1 else 2)))
        axes.axvline(0, color=SERIES["fp32"], linewidth=1, zorder=1.5)
        for row, trial in enumerate(trials):
            _draw_trial(axes, row, trial, is_chosen=trial == chosen, is_near=trial in near)
        # What the legend names is drawn once more, out of sight: its order and marks are then always the same.
        _point(axes, (math.nan, 0), "chosen", label="chosen")
        _point(axes, (math.nan, 0), "within", label="within the budget")
        _point(axes, (math.nan, 0), "outside", label="outside")
        beyond = "" if -budget >= low else ", off the axis"
        name = f"budget: {signed(-budget)} points{beyond}"
        axes.axvline(-budget if not beyond else math.nan, color=TEXT, label=name, zorder=1.5, **DASHES)  # below points
        figure.legend(loc="outside upper center", ncols=4, fontsize=9)
        return as_svg(figure)


def layers_chart(ranking: Sequence[LayerCost], excluded: Sequence[str], max_layers: int) -> str:
    """The costliest layers, a bar each; those kept in float by colour and by hatch."""
    names = short_names([layer.name for layer in ranking])[:max_layers]
    costs = [layer.cost_nats for layer in ranking[:max_layers]]
    in_float = [layer.name in excluded for layer in ranking[:max_layers]]
    positive = [cost for cost in costs if cost > 0]
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "layers", "hatch.linewidth": 1.2}):
        figure, (axes,) = _rows(names, "cost in nats")
        if positive and max(positive) > _MAX_RATIO * min(positive):
            # What costs less than a ten thousandth of the costliest has no bar: the scale is for the others.
            logarithmic(axes, "x", [max(cost, max(positive) / 1e4) for cost in positive], max_ticks=5)
            axes.set_xlabel("cost in nats, on a logarithmic scale")
        else:
            axes.set_xlim(0, 1.05 * max(costs) or 1)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _scientific(value)))
        for label, color, hatch, wanted in (("in INT8", "int8", "", False), ("kept in float", "fp16", "////", True)):
            rows = [row for row, is_float in enumerate(in_float) if is_float == wanted]
            if rows:
                widths, edge = [costs[row] for row in rows], SERIES[color]
                face = "none" if hatch else edge
                axes.barh(rows, widths, height=0.62, facecolor=face, edgecolor=edge, hatch=hatch, label=label)
        figure.legend(loc="outside upper center", ncols=2, fontsize=9)
        return as_svg(figure)


def corruption_chart(accuracy: AccuracyReport, precision: Precision, limit_points: float) -> str:
    """Draw the score on degraded images, and beside it the change against FP32 with its interval: a row for each way.

    The first row is of the images as they are. With a limit above 0 the drop that it allows is a line. SVG, or ""
    without measurements.
    """
    fp32, own = accuracy.row("fp32"), accuracy.row(precision)
    names = ["as they are", *(row.name for row in own.corrupted)]
    pairs = [own.comparison, *(row.comparison for row in own.corrupted)]
    compared = [pair for pair in pairs if pair is not None]
    if len(names) == 1 or len(compared) < len(names):
        return ""
    rows = range(len(names))
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "corruptions"}):
        figure, (score, change) = _rows(names, f"{accuracy.score_name} in %", "change against FP32, in points")
        for series, measured in (("fp32", fp32), (precision, own)):
            values = [measured.score_pct or 0.0, *(one.score_pct for one in measured.corrupted)]
            style: dict[str, Any] = (
                {"markersize": 9, "markerfacecolor": GROUND} if series == "fp32" else {"markersize": 4}
            )
            color, marker = SERIES[series], MARKERS[series]
            score.plot(values, rows, color=color, marker=marker, linestyle="", label=series.upper(), **style)
        score.set_xlim(0, 104)
        change.axvline(0, color=SERIES["fp32"], linewidth=1, zorder=1.5)
        if limit_points:
            label = f"allowed: {signed(-limit_points)} points"
            change.axvline(-limit_points, color=TEXT, label=label, zorder=1.5, **DASHES)
        for row, (before, after) in enumerate(pairwise(["", *(one.kind for one in own.corrupted)])):
            if before != after:
                for axes in (score, change):
                    axes.axhline(row + 0.5, color=LINE, linewidth=0.5)
        for row, pair in enumerate(compared):
            ends = (-pair.drop_upper_points, -pair.drop_lower_points)
            change.plot(ends, (row, row), color=SERIES[precision], marker="|", markersize=5, linewidth=1.4)
            change.plot(pair.delta_points, row, color=SERIES[precision], marker=MARKERS[precision], markersize=5)
        change.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
        change.xaxis.set_major_formatter(FuncFormatter(lambda value, _: signed(value, 1)))
        figure.legend(loc="outside upper center", ncols=3, fontsize=9)
        return as_svg(figure)


def placement_chart(placement: PlacementEntry) -> str:
    """Draw the candidates of the search for the blocks in INT8: time of a batch against agreement with FP32."""
    trials = placement.trials
    agreement = [100.0 if trial.agreement_pct is None else trial.agreement_pct for trial in trials]
    known = any(trial.agreement_pct is not None for trial in trials)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "placement"}):
        x_label = f"time of a batch of {placement.batch_size}, in ms"
        figure, axes = new_axes(x_label, "same as FP32, in %" if known else "", _WIDTH_INCHES)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5))
        if not known:
            axes.set_yticks([])
        for trial, y in zip(trials, agreement, strict=True):
            style: Literal["chosen", "within", "outside"] = "outside" if trial.within_budget is False else "within"
            _point(axes, (trial.latency_ms, y), "chosen" if trial.chosen else style)
            text = f"{trial.name} (chosen)" if trial.chosen else trial.name
            axes.annotate(
                text, (trial.latency_ms, y), textcoords="offset points", xytext=(0, 7), ha="center", fontsize=9
            )
        axes.margins(0.2, 0.25)
        return as_svg(figure)


def _curve(axes: Axes, values: Sequence[float | None], series: str, label: str, form: str) -> None:
    """A value by epoch. A single epoch has no curve: its point gets its value."""
    points = [float("nan") if value is None else value for value in values]
    marker = MARKERS[series] if len(points) <= _MAX_MARKERS else None
    axes.plot(range(1, len(points) + 1), points, color=SERIES[series], marker=marker, label=label)
    if len(points) == 1:
        axes.set_xlim(0.5, 1.5)
        axes.set_xticks([1])
        if values[0] is not None:
            place = {"fp32": {"xytext": (-8, -4), "ha": "right"}, "int8": {"xytext": (8, -4), "ha": "left"}}[series]
            axes.annotate(form.format(values[0]), (1, values[0]), textcoords="offset points", **place)  # type: ignore[arg-type]
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _draw_trial(axes: Axes, row: int, trial: Trial, *, is_chosen: bool, is_near: bool) -> None:
    """Interval and difference, or both in words at the edge if they lie far below the axis."""
    style: Literal["chosen", "within", "outside"] = "within" if trial.within_budget else "outside"
    if is_chosen:
        style = "chosen"
        axes.axhspan(row - 0.5, row + 0.5, color=SERIES["int8"], alpha=0.15, linewidth=0)
        axes.get_yticklabels()[row].set_fontweight("bold")
    if is_near:
        color = SERIES["int8" if is_chosen else "fp32"]
        ends = (trial.low_points, trial.high_points)
        axes.plot(ends, (row, row), color=color, marker="|", markersize=5, linewidth=1.4)
        _point(axes, (trial.delta_points, row), style)
        return
    interval = f"{signed(trial.low_points)} to {signed(trial.high_points)}"
    left = axes.get_xlim()[0]
    text = f"\N{BLACK LEFT-POINTING TRIANGLE} {signed(trial.delta_points)} ({interval})"
    axes.annotate(text, (left, row), textcoords="offset points", xytext=(3, 0), va="center", fontsize=9)


def _point(
    axes: Axes, place: tuple[float, float], style: Literal["chosen", "within", "outside"], label: str | None = None
) -> None:
    """A candidate: what is chosen by form and colour, what is outside the budget hollow."""
    color, marker = (SERIES["int8"], "s") if style == "chosen" else (SERIES["fp32"], "o")
    face = GROUND if style == "outside" else color
    x, y = place
    axes.plot([x], [y], color=color, marker=marker, markerfacecolor=face, linestyle="", markersize=6, label=label)


def shortened(name: str, max_length: int = 18) -> str:
    """A name cut to a number of characters."""
    return name if len(name) <= max_length else f"{name[: max_length - 1]}…"


def _scientific(value: float) -> str:
    """Format a number like 2e-04, with the digits that it has."""
    digits, _, exponent = f"{value:.3e}".partition("e")
    return f"{float(digits):g}e{exponent}" if value else "0"


def _rows(names: Sequence[str], *x_labels: str) -> tuple[Figure, list[Axes]]:
    """A row for each name, the first one on top, in as many charts beside each other as there are labels."""
    figure = Figure(figsize=(_WIDTH_INCHES, 1.0 + _ROW_INCHES * len(names)), layout="constrained")
    charts: list[Axes] = list(figure.subplots(1, len(x_labels), sharey=True, squeeze=False)[0])
    for axes, x_label in zip(charts, x_labels, strict=True):
        axes.set_xlabel(x_label)
        axes.set_yticks(range(len(names)), names, fontsize=9)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_axisbelow(True)
    return figure, charts
