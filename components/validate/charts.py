"""The report's charts as inline SVG whose colours are the page's CSS variables, so that both schemes are readable."""

import io
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from components.common.artifacts import BenchmarkReport, EpochRecord

# Matplotlib knows no CSS: it draws in these colours, which stand for nothing else, and they are replaced in the SVG.
_CSS = {
    "#010101": "currentColor",
    "#010102": "var(--line)",
    "#010103": "var(--fp32)",
    "#010104": "var(--fp16)",
    "#010105": "var(--int8)",
}
_TEXT, _LINE = "#010101", "#010102"
_SERIES = {"fp32": "#010103", "fp16": "#010104", "int8": "#010105"}
_MARKERS = {"fp32": "o", "fp16": "^", "int8": "s"}  # told apart without colour too, as in a black and white print
_HIT, _MISS = (22 / 255, 163 / 255, 74 / 255), (220 / 255, 38 / 255, 38 / 255)  # --hit and --miss of the page
_MAX_MARKERS = 30  # points of a curve, above which only its line is drawn
_MAX_TICKS = 9  # of a logarithmic axis
_MAX_NAMED = 20  # classes named beside a picture of a confusion matrix
_MAX_NAME = 18  # characters
# Where a point's label goes: another side for each, since precisions lie close together.
_PLACES: dict[str, dict[str, Any]] = {
    "fp32": {"xytext": (5, -11), "ha": "left"},
    "fp16": {"xytext": (7, -7), "ha": "left"},
    "int8": {"xytext": (-6, 3), "ha": "right"},
}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the page's font
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _LINE,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _LINE,
    "grid.linewidth": 0.5,
    "xtick.color": _LINE,
    "ytick.color": _LINE,
    "xtick.labelcolor": _TEXT,
    "ytick.labelcolor": _TEXT,
    "legend.frameon": False,
}


def speed_chart(benchmark: BenchmarkReport) -> str:
    """Throughput over latency: a line per precision, a point per batch size. SVG, or "" without measurements.

    Both scales are logarithmic: from batch 1 to batch 128, either value grows by a factor of ten or more.
    """
    if not benchmark.rows:
        return ""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": "speed"}):
        figure, axes = _axes("median latency of a batch in ms", "images per second")
        for precision, color in _SERIES.items():
            rows = sorted((row for row in benchmark.rows if row.precision == precision), key=lambda row: row.batch_size)
            if not rows:
                continue
            x, y = [row.p50_ms for row in rows], [row.images_per_s for row in rows]
            axes.plot(x, y, color=color, marker=_MARKERS[precision], label=precision.upper())
            for row in rows:
                place = (row.p50_ms, row.images_per_s)
                axes.annotate(str(row.batch_size), place, textcoords="offset points", fontsize=9, **_PLACES[precision])
        _logarithmic(axes, "x", [row.p50_ms for row in benchmark.rows])
        _logarithmic(axes, "y", [row.images_per_s for row in benchmark.rows])
        figure.legend(loc="outside upper center", ncols=3)
        return _svg(figure)


def loss_chart(history: Sequence[EpochRecord]) -> str:
    """Loss of training and validation by epoch."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": "loss"}):
        figure, axes = _axes("epoch", "loss")
        _curve(axes, [entry.train_loss for entry in history], "fp32", "training", "{:.3f}")
        _curve(axes, [entry.val_loss for entry in history], "int8", "validation", "{:.3f}")
        axes.set_ylim(0, 1.12 * max(max(entry.train_loss, entry.val_loss or 0.0) for entry in history))
        figure.legend(loc="outside upper center", ncols=2)
        return _svg(figure)


def top1_chart(history: Sequence[EpochRecord]) -> str:
    """Top-1 on the validation split by epoch."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": "top1"}):
        figure, axes = _axes("epoch", "top-1 in %")
        _curve(axes, [entry.val_top1_pct for entry in history], "int8", "validation", "{:.2f}")
        if len(history) == 1:
            axes.set_ylim(0, 108)
        figure.legend(loc="outside upper center")
        return _svg(figure)


def confusion_picture(matrix: Sequence[Sequence[int]], classes: Sequence[str]) -> str:
    """Confusion matrix without numbers: a cell per label (row) and prediction (column), in the table's colours."""
    counts = np.asarray(matrix, dtype=float)
    share = np.sqrt(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1))  # the root makes rare confusions visible
    diagonal = np.eye(len(counts), dtype=bool)
    cells = np.where(diagonal[..., None], _HIT, _MISS)  # [N, N, 3], 0..1
    opacity = np.where(diagonal, 0.8 * share, np.where(counts > 0, 0.35 + 0.65 * share, 0))
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": "confusion", "axes.grid": False}):
        figure = Figure(figsize=(5.0, 4.3), layout="constrained")
        axes = figure.add_subplot()
        axes.imshow(np.dstack([cells, opacity]), interpolation="none")
        named = np.unique(np.linspace(0, len(classes) - 1, _MAX_NAMED).round().astype(int)).tolist()
        axes.set_yticks(named, [_shortened(classes[index]) for index in named], fontsize=8.5)
        axes.set_xticks([])
        axes.set_xlabel("prediction, in the same order")
        axes.set_ylabel("label")
        return _svg(figure)


def _curve(axes: Axes, values: Sequence[float | None], series: str, label: str, form: str) -> None:
    """A value by epoch. A single epoch has no curve: its point gets its value."""
    points = [float("nan") if value is None else value for value in values]
    marker = _MARKERS[series] if len(points) <= _MAX_MARKERS else None
    axes.plot(range(1, len(points) + 1), points, color=_SERIES[series], marker=marker, label=label)
    if len(points) == 1:
        axes.set_xlim(0.5, 1.5)
        axes.set_xticks([1])
        if values[0] is not None:
            place = {"fp32": {"xytext": (-8, -4), "ha": "right"}, "int8": {"xytext": (8, -4), "ha": "left"}}[series]
            axes.annotate(form.format(values[0]), (1, values[0]), textcoords="offset points", **place)  # type: ignore[arg-type]
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _logarithmic(axes: Axes, name: Literal["x", "y"], values: Sequence[float]) -> None:
    """A logarithmic scale from one round number to another around the values, with round numbers in plain digits."""
    low, high = min(values) / 1.15, max(values) * 1.15
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    numbers = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    first = max(number for number in numbers if number <= low)
    last = min(number for number in numbers if number >= high)
    ticks = [number for number in numbers if first <= number <= last]
    if len(ticks) > _MAX_TICKS:
        ticks = [number for number in ticks if f"{number:e}".startswith("1")]
    axes.set(**{f"{name}scale": "log", f"{name}lim": (first, last)})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _shortened(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…"


def _axes(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4.6, 3.1), layout="constrained")  # inches; as SVG the page scales it
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def _svg(figure: Figure) -> str:
    """The <svg> element alone: no XML head, no metadata, no namespaces (HTML knows them), no fixed size."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text)
    text = re.sub(r'<g id="[a-z0-9]+(?:\.[a-z]+)?_\d+">', "<g>", text)  # the same ones in every chart of the page
    for color, css in _CSS.items():
        text = text.replace(color, css)
    return text
