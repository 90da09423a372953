"""Charts as inline SVG whose colours are the page's CSS variables, so that both schemes are readable."""

import io
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

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
MARKERS = {"fp32": "o", "fp16": "^", "int8": "s"}  # told apart without colour too, as in a black and white print
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


def new_axes(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    """A chart of the usual size with its axes named."""
    figure = Figure(figsize=(4.6, 3.1), layout="constrained")  # inches; as SVG the page scales it
    axes = figure.add_subplot()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
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
