"""The report's charts as inline SVG whose colours are the page's CSS variables, so that both schemes are readable."""

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

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
# Where a point's label goes: another side for each, since precisions lie close together.
_PLACES: dict[str, dict[str, Any]] = {
    "fp32": {"xytext": (5, -11), "ha": "left"},
    "fp16": {"xytext": (8, -3), "ha": "left"},
    "int8": {"xytext": (-5, 5), "ha": "right"},
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
    """Throughput over latency: a line per precision, a point per batch size. SVG, or "" without measurements."""
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
                axes.annotate(str(row.batch_size), place, textcoords="offset points", fontsize=8, **_PLACES[precision])
        axes.set_xlim(0, 1.08 * max(row.p50_ms for row in benchmark.rows))
        axes.set_ylim(0, 1.12 * max(row.images_per_s for row in benchmark.rows))
        axes.legend(loc="best", title="batch size at each point", title_fontsize=8)
        return _svg(figure)


def loss_chart(history: Sequence[EpochRecord]) -> str:
    """Loss of training and validation by epoch."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": "loss"}):
        figure, axes = _axes("epoch", "loss")
        epochs = range(1, len(history) + 1)
        axes.plot(epochs, [entry.train_loss for entry in history], color=_SERIES["fp32"], marker="o", label="training")
        validation = [float("nan") if entry.val_loss is None else entry.val_loss for entry in history]
        axes.plot(epochs, validation, color=_SERIES["int8"], marker="s", label="validation")
        axes.set_ylim(0, 1.08 * max(max(entry.train_loss, entry.val_loss or 0.0) for entry in history))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="best")
        return _svg(figure)


def top1_chart(history: Sequence[EpochRecord]) -> str:
    """Top-1 on the validation split by epoch."""
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": "top1"}):
        figure, axes = _axes("epoch", "top-1 in %")
        epochs = range(1, len(history) + 1)
        axes.plot(epochs, [entry.val_top1_pct for entry in history], color=_SERIES["int8"], marker="s")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return _svg(figure)


def _axes(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.0, 3.1), layout="constrained")  # inches; as SVG the page scales it
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
    text = re.sub(r'<g id="[a-z]+(?:\.[a-z]+)?_\d+">', "<g>", text)  # the same ones in every chart of the page
    for color, css in _CSS.items():
        text = text.replace(color, css)
    return text
