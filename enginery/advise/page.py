"""Advice as a page: cost against throughput, the roofline of the kernels, and the table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup

from components.common.data.pages import templates
from components.validate.charts import GROUND, MARKERS, SERIES, STYLE, TEXT, as_svg, logarithmic, new_axes
from enginery.advise.answers import FITTED_ON, ModelCounts, Question, counted, remarks
from enginery.advise.roofline import Device, devices, kernel_bytes, kernel_seconds, load_coefficients
from enginery.formats import range_text

_OWN = Path(__file__).with_name("templates")
_KINDS = ("convolution", "grouped", "matrix product", "depthwise", "wide depthwise")
_NAME_HEIGHT = 0.055  # of a device's name beside a chart, as a share of its height
_SHAPES = ("o", "^", "s", "D", "v")


def cost_chart(rows: Sequence[dict[str, Any]], cost: str, label: str) -> str:
    """Cost over images per second of one device, with ranges. SVG; "" where fewer than two have a price."""
    priced = [row for row in rows if row.get(cost)]
    if len(priced) < 2:
        return ""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "advise cost"}):
        figure, axes = new_axes("images per second of one device", label)
        for row in priced:
            color = SERIES[row["precision"]]
            axes.plot([row["low"], row["high"]], [row[cost]] * 2, color=color, linewidth=0.8)
            axes.plot(row["images_per_s"], row[cost], color=color, marker=MARKERS[row["precision"]], linestyle="none")
        logarithmic(axes, "x", [row[name] for row in priced for name in ("low", "high")], 5)
        logarithmic(axes, "y", [row[cost] for row in priced])
        bottom, top = np.log(axes.get_ylim())
        height = -1.0  # of the name below, as a share of the axis
        for row in sorted(priced, key=lambda row: float(row[cost])):
            height = max(height + _NAME_HEIGHT, (np.log(row[cost]) - bottom) / (top - bottom))
            place: dict[str, Any] = {"xytext": (1.03, height), "textcoords": "axes fraction", "va": "center"}
            line = {"arrowstyle": "-", "color": TEXT, "linewidth": 0.3}
            axes.annotate(row["gpu"], (row["high"], row[cost]), fontsize=8, arrowprops=line, **place)
        for style in sorted({row["precision"] for row in priced}):
            axes.plot([], [], color=SERIES[style], marker=MARKERS[style], linestyle="none", label=style.upper())
        figure.legend(loc="outside upper center", ncols=3, fontsize=9)
        return as_svg(figure)


def roofline_chart(model: ModelCounts, device: Device, precision: str, batch: int) -> str:
    """Predicted FLOP/s of each kernel that multiplies, over its FLOPs per byte, under the data sheet's roof. SVG."""
    work = model.work
    fitted = load_coefficients()[0][device.kind][precision]
    arithmetic, memory, waiting = kernel_seconds(work, device, precision, batch, fitted)
    multiplies = work.flops > 0
    seconds = (np.maximum(arithmetic, memory) + waiting)[multiplies]
    flops = batch * work.flops[multiplies]
    x, y = flops / kernel_bytes(work, precision, batch)[multiplies], flops / seconds / 1e12
    kinds, size = work.kind[multiplies], 12 + 200 * seconds / seconds.sum()
    peak, bandwidth = device.peak(precision) / 1e12, device.bandwidth_gb_per_s / 1e3
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "advise roofline"}):
        figure, axes = new_axes("FLOPs per byte", "TFLOP/s" if precision != "int8" else "TOP/s")
        logarithmic(axes, "x", [float(x.min()), float(x.max()), peak / bandwidth])
        logarithmic(axes, "y", [float(y.min()), peak])
        roof = np.geomspace(*axes.get_xlim(), 100)
        axes.plot(roof, np.minimum(peak, roof * bandwidth), color=TEXT, linewidth=1, label="data sheet")
        for kind, (name, shape) in enumerate(zip(_KINDS, _SHAPES, strict=True)):
            chosen = kinds == kind
            if chosen.any():
                color = SERIES[("int8", "fp16", "fp32", "fp16", "fp16")[kind]]
                axes.scatter(
                    x[chosen], y[chosen], s=size[chosen], marker=shape, color=color, edgecolors=GROUND,
                    linewidths=0.4, label=name,
                )  # fmt: skip
        handles, labels = axes.get_legend_handles_labels()
        legend = figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=9)
        for handle in legend.legend_handles[1:]:
            handle.set(sizes=[30])  # type: ignore[union-attr]
        return as_svg(figure)


def page(rows: Sequence[dict[str, Any]], workload: str, question: Question, prices: str) -> str:
    """One HTML file, complete in itself."""
    model, best = counted(question), next((row for row in rows if row["max_q"]), None)
    cost, label = ("cost", "cost of the training")
    if workload == "serve":
        cost, label = ("cost_per_million", "cost of a million images")
    charts = {"cost": cost_chart(rows, cost, label), "roofline": ""}
    if best is not None and model.work.flops.any():
        device = devices()[best["gpu"]]
        charts["roofline"] = roofline_chart(model, device, best["precision"], best["batch"])
    found = templates(_OWN, filters={"range": range_text}).get_template("advise.html.j2")
    return found.render(
        rows=rows,
        workload=workload,
        question=question,
        counted=model.text,
        remarks=remarks(list(rows), question),
        best=best,
        prices=prices,
        fitted_on=FITTED_ON,
        sheets=devices(),
        charts={name: Markup(svg) for name, svg in charts.items()},  # noqa: S704  # drawn here, text escaped
    )
