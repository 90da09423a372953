"""loadtest.html: the results of a load test as text and charts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

import components.validate
from components.validate.charts import MARKERS, SERIES, STYLE, TEXT, as_svg, logarithmic, new_axes
from enginery.formats import number
from enginery.serving.loadtest import page_text
from enginery.serving.loadtest.results import Level, LoadTest, Series

_LOOKS = ("int8", "fp32")  # of the first series and the second: the page's colours by these names
_DASHES: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.2}


def latency_chart(result: LoadTest) -> str:
    """Latency over request rate: p99 and p50 of each series, with the budget. SVG; "" without open-loop levels."""
    levels = [level for series in result.series for level in series.open if level.p99_ms]
    if not levels:
        return ""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "loadtest latency"}):
        figure, axes = new_axes("images due per second", "latency in ms")
        for look, series in zip(_LOOKS, result.series, strict=False):
            rows = [level for level in series.open if level.p99_ms]
            x = [level.offered_images_per_s for level in rows]
            color, marker = SERIES[look], MARKERS[look]
            axes.plot(x, [row.p99_ms or 0 for row in rows], color=color, marker=marker, label=f"p99, {series.name}")
            median = [row.p50_ms or 0 for row in rows]
            axes.plot(x, median, color=color, marker=marker, markersize=3, label=f"p50, {series.name}", **_DASHES)
        axes.axhline(result.latency_budget_ms, color=TEXT, linewidth=0.8, label="budget for p99")
        values = [value for level in levels for value in (level.p50_ms, level.p99_ms) if value]
        logarithmic(axes, "y", [*values, result.latency_budget_ms])
        axes.set_xlim(left=0)
        figure.legend(loc="outside upper center", ncols=2, fontsize=9)
        return as_svg(figure)


def throughput_chart(result: LoadTest) -> str:
    """Throughput over the number of clients, a line per series. SVG; "" where there is one number only."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "loadtest throughput"}):
        figure, axes = new_axes("clients that wait for their answers", "images per second")
        num_points = _lines(axes, result, "closed")
        if num_points < 2:
            return ""
        levels = [level for series in result.series for level in series.closed]
        logarithmic(axes, "x", [level.concurrency or 1 for level in levels])
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside upper center", ncols=2, fontsize=9)
        return as_svg(figure)


def batches_chart(levels: Sequence[Level], names: Sequence[str]) -> str:
    """How many images went through the network in batches of which size, for one level per series. SVG."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "loadtest batches"}):
        figure, axes = new_axes("batch size", "share of the images in %")
        width = 0.8 / max(len(levels), 1)
        for index, (look, level, name) in enumerate(zip(_LOOKS, levels, names, strict=False)):
            total = sum(size * count for size, count in level.batches.items()) or 1
            x = [size + (index - (len(levels) - 1) / 2) * width for size in level.batches]
            shares = [100 * size * count / total for size, count in level.batches.items()]
            axes.bar(x, shares, width=width, color=SERIES[look], label=name)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        figure.legend(loc="outside upper center", ncols=2, fontsize=9)
        return as_svg(figure)


def _lines(axes: Axes, result: LoadTest, loop: str) -> int:
    """Throughput of each series; the largest number of points of one."""
    most = 0
    for look, series in zip(_LOOKS, result.series, strict=False):
        levels: Sequence[Level] = getattr(series, loop)
        x, y = [level.concurrency or 0 for level in levels], [level.images_per_s for level in levels]
        axes.plot(x, y, color=SERIES[look], marker=MARKERS[look], label=series.name)
        most = max(most, len(levels))
    return most


_OWN = Path(__file__).with_name("templates")
_REPORT = Path(components.validate.__path__[0]) / "templates"  # its style sheet


def page(result: LoadTest) -> str:
    """One HTML file, complete in itself."""
    templates = Environment(
        loader=FileSystemLoader([_OWN, _REPORT]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["number"] = number
    busiest = [(series.name, level) for series in result.series if (level := _at_knee(series)) is not None]
    charts = {
        "latency": latency_chart(result),
        "throughput": throughput_chart(result),
        "batches": batches_chart([level for _, level in busiest], [name for name, _ in busiest]) if busiest else "",
    }
    return templates.get_template("loadtest.html.j2").render(
        result=result,
        say=page_text,
        batches_at=", ".join(dict.fromkeys(f"{page_text.load_text(level)} ({name})" for name, level in busiest)),
        charts={name: Markup(svg) for name, svg in charts.items()},  # noqa: S704  # drawn here, text escaped
    )


def _at_knee(series: Series) -> Level | None:
    """The level of the knee; without one the last with many clients."""
    if series.knee is not None:
        return next(level for level in series.open if level.request_rate == series.knee.request_rate)
    return series.closed[-1] if series.closed else None
