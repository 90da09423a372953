"""Results of a load test for people: text, charts, and loadtest.html."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from markupsafe import Markup
from matplotlib.ticker import MaxNLocator

from components.common.data.pages import templates
from components.validate.charts import DASHES, MARKERS, SERIES, STYLE, TEXT, as_svg, logarithmic, new_axes
from enginery.formats import number
from enginery.serving.loadtest.results import Level, LoadTest, Series

_STYLES = ("int8", "fp32")  # of the first series and the second: the page's colours by these names
_FEW_REQUESTS = 10  # a second; below, the digits behind the point count
_MUCH_LAG = 0.2  # of the median latency
_SOME_LAG_MS = 5.0  # below which nothing is said: timers are no better where a machine is busy


def load_text(level: Level) -> str:
    """Return the load in words."""
    if level.concurrency is not None:
        return "1 client" if level.concurrency == 1 else f"{level.concurrency:,} clients"
    return rate_text(level.request_rate or 0)


def rate_text(rate: float) -> str:
    """Requests per second."""
    return f"{rate:,.0f} requests/s" if rate >= _FEW_REQUESTS else f"{rate:.2g} requests/s"


def knee_text(series: Series, budget_ms: float) -> str:
    """Return the load that this configuration takes."""
    within = f"{budget_ms:,.3g} ms at p99"
    if series.knee is None:
        lowest = min((level.request_rate or 0 for level in series.open), default=None)
        if lowest is None:
            return "no knee: no request rate was tried"
        if not any(level.num_requests for level in series.open):
            return "no knee: no request was due in the time; take more --seconds or higher --rates"
        return f"no knee: {rate_text(lowest)}, the lowest rate tried, was too much for {within}"
    knee = series.knee
    above = "; no higher rate was tried" if knee.is_highest_tried else ""
    return f"knee: {knee.images_per_s:,.0f} images/s within {within} (measured {knee.p99_ms:,.1f} ms){above}"


def gain_text(result: LoadTest) -> str | None:
    """Compare with and without dynamic batching; None where it was not compared."""
    if len(result.series) < 2:
        return None
    best = [max((level.images_per_s for level in series.closed), default=0.0) for series in result.series[:2]]
    text = f"Dynamic batching: {best[0]:,.0f} images/s at most, {best[1]:,.0f} without"
    if best[1]:
        text += f" ({best[0] / best[1]:.2f} times as much)"
    knees = [series.knee for series in result.series[:2]]
    if knees[0] is not None and knees[1] is not None:
        text += f"; at the knee {knees[0].images_per_s:,.0f} and {knees[1].images_per_s:,.0f}"
    return f"{text}."


def caution_text(result: LoadTest) -> str | None:
    """Warn that the load generator may have been the limit; None where it was not."""
    late = [
        level.request_rate or 0
        for series in result.series
        for level in series.open
        if level.send_lag_p99_ms
        and level.p50_ms
        and level.send_lag_p99_ms > max(_MUCH_LAG * level.p50_ms, _SOME_LAG_MS)
    ]
    if not late:
        return None
    return (
        f"Requests were sent late at some rates, from {min(late):,.0f} requests/s on: there the load generator was a "
        "limit, too. The latencies contain it. More --processes, on cores of their own, help."
    )


def latency_chart(result: LoadTest) -> str:
    """Latency over request rate: p99 and p50 of each series, with the budget. SVG; "" without open-loop levels."""
    levels = [level for series in result.series for level in series.open if level.p99_ms]
    if not levels:
        return ""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "loadtest latency"}):
        figure, axes = new_axes("images due per second", "latency in ms")
        for style, series in zip(_STYLES, result.series, strict=False):
            rows = [level for level in series.open if level.p99_ms]
            x = [level.offered_images_per_s for level in rows]
            color, marker = SERIES[style], MARKERS[style]
            axes.plot(x, [row.p99_ms or 0 for row in rows], color=color, marker=marker, label=f"p99, {series.name}")
            median = [row.p50_ms or 0 for row in rows]
            axes.plot(x, median, color=color, marker=marker, markersize=3, label=f"p50, {series.name}", **DASHES)
        axes.axhline(result.latency_budget_ms, color=TEXT, linewidth=0.8, label="budget for p99")
        values = [value for level in levels for value in (level.p50_ms, level.p99_ms) if value]
        logarithmic(axes, "y", [*values, result.latency_budget_ms])
        axes.set_xlim(left=0)
        figure.legend(loc="outside upper center", ncols=2, fontsize=9)
        return as_svg(figure)


def throughput_chart(result: LoadTest) -> str:
    """Throughput over the number of clients, a line per series. SVG; "" where there is one number only."""
    if all(len(series.closed) < 2 for series in result.series):
        return ""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "loadtest throughput"}):
        figure, axes = new_axes("clients that wait for their answers", "images per second")
        for style, series in zip(_STYLES, result.series, strict=False):
            x, y = [level.concurrency or 0 for level in series.closed], [level.images_per_s for level in series.closed]
            axes.plot(x, y, color=SERIES[style], marker=MARKERS[style], label=series.name)
        levels = [level for series in result.series for level in series.closed]
        logarithmic(axes, "x", [level.concurrency or 1 for level in levels])
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside upper center", ncols=2, fontsize=9)
        return as_svg(figure)


def batches_chart(levels: Sequence[Level], names: Sequence[str]) -> str:
    """Share of the images by the batch size that the network saw, for one level per series. SVG."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "loadtest batches"}):
        figure, axes = new_axes("batch size", "share of the images in %")
        width = 0.8 / max(len(levels), 1)
        for index, (style, level, name) in enumerate(zip(_STYLES, levels, names, strict=False)):
            total = sum(size * count for size, count in level.batches.items()) or 1
            x = [size + (index - (len(levels) - 1) / 2) * width for size in level.batches]
            shares = [100 * size * count / total for size, count in level.batches.items()]
            axes.bar(x, shares, width=width, color=SERIES[style], label=name)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        figure.legend(loc="outside upper center", ncols=2, fontsize=9)
        return as_svg(figure)


_OWN = Path(__file__).with_name("templates")


def page(result: LoadTest) -> str:
    """One HTML file, complete in itself."""
    busiest = [(series.name, level) for series in result.series if (level := _at_knee(series)) is not None]
    charts = {
        "latency": latency_chart(result),
        "throughput": throughput_chart(result),
        "batches": batches_chart([level for _, level in busiest], [name for name, _ in busiest]) if busiest else "",
    }
    found = templates(_OWN, filters={"number": number})
    return found.get_template("loadtest.html.j2").render(
        result=result,
        **{function.__name__: function for function in (load_text, knee_text, gain_text, caution_text)},
        batches_at=", ".join(dict.fromkeys(f"{load_text(level)} ({name})" for name, level in busiest)),
        charts={name: Markup(svg) for name, svg in charts.items()},  # noqa: S704  # drawn here, text escaped
    )


def _at_knee(series: Series) -> Level | None:
    """The level of the knee; without one the last with many clients."""
    if series.knee is not None:
        return next(level for level in series.open if level.request_rate == series.knee.request_rate)
    return series.closed[-1] if series.closed else None
