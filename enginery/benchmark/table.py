"""Rows of the classic table, the published ones among them, as Markdown, CSV and a picture."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, Locator, MaxNLocator, NullLocator

from components.common.contracts.manifests import write_atomically
from enginery.formats import range_text

SOURCE = 'whitepaper "NVIDIA deep learning platform", 2018'
_PUBLISHED = Path(__file__).with_name("whitepaper.csv")
# The whitepaper's names of networks, by ours.
_NAMES = {"alexnet": "AlexNet", "googlenet": "GoogLeNet", "resnet50": "ResNet-50", "vgg19": "VGG-19"}
_HEADINGS = ("device", "precision", "network", "batch", "images/s", "W", "images/s/W", "ms", "per million images")
_DECADE = 10.0
_NAME_SIZE = 7  # points, of the names at grey lines
_JOULES_PER_KWH = 3.6e6
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One network at one batch size on one device."""

    device: str
    precision: str
    network: str
    batch: int
    images_per_s: float
    power_w: float | None
    """Power of the board, or of the module for Jetson; None where nothing measures it."""
    latency_ms: float
    """Latency of a batch: the median of what is measured here, the published value of others."""
    cost: float | None = None
    """Per million images, in the currency of the prices given; None without prices."""

    @property
    def images_per_s_per_w(self) -> float | None:
        """Images per second and watt, which is images per joule."""
        return self.images_per_s / self.power_w if self.power_w else None


def network_name(architecture: str) -> str:
    """Name of an architecture in the table."""
    return _NAMES.get(architecture, architecture)


def published_rows(networks: Sequence[str], batches: Sequence[int]) -> list[Row]:
    """The whitepaper's rows of these networks (by their names in the table) and batch sizes."""
    with _PUBLISHED.open(encoding="utf-8", newline="") as file:
        return [
            Row(
                device=entry["device"],
                precision=entry["precision"],
                network=entry["network"],
                batch=int(entry["batch"]),
                images_per_s=float(entry["items_per_s"]),
                power_w=float(entry["power_w"]),
                latency_ms=float(entry["latency_ms"]),
            )
            for entry in csv.DictReader(file)
            if entry["unit"] == "images" and entry["network"] in networks and int(entry["batch"]) in batches
        ]


def cost_of_a_million(
    images_per_s: float, power_w: float | None, *, price_per_hour: float, price_per_kwh: float
) -> float:
    """The cost of a million images: the machine for as long as they take, and the energy of its GPU.

    Args:
        images_per_s: Throughput.
        power_w: Power while it runs, in W; None counts no energy.
        price_per_hour: Of the machine.
        price_per_kwh: Of electricity.
    """
    seconds = 1e6 / images_per_s
    energy_kwh = seconds * (power_w or 0.0) / _JOULES_PER_KWH
    return seconds / _SECONDS_PER_HOUR * price_per_hour + energy_kwh * price_per_kwh


def cells(row: Row) -> tuple[str, ...]:
    """A row as people read it, in the order of the headings."""
    per_w = row.images_per_s_per_w
    return (
        row.device,
        row.precision,
        row.network,
        str(row.batch),
        f"{row.images_per_s:,.0f}",
        "" if row.power_w is None else f"{row.power_w:,.1f}",
        "" if per_w is None else f"{per_w:,.2f}",
        f"{row.latency_ms:,.2f}",
        "" if row.cost is None else range_text([row.cost], ",.3g"),
    )


def headings(rows: Sequence[Row]) -> tuple[str, ...]:
    """Headings of the columns; the cost only where a row has one."""
    return _HEADINGS if any(row.cost is not None for row in rows) else _HEADINGS[:-1]


def markdown(measured: Sequence[Row], published: Sequence[Row], notes: str) -> str:
    """The table with the measured rows first, and where the others come from."""
    names = headings(measured)
    lines = ["| " + " | ".join(names) + " |", "|---|---|---|" + "--:|" * (len(names) - 3)]
    lines += ["| " + " | ".join(cells(row)[: len(names)]) + " |" for row in (*measured, *published)]
    text = [notes, "", *lines]
    if published:
        text += ["", f"Other devices: {SOURCE}, with random images at batch sizes 1 to 128 and board power by NVML."]
    return "\n".join(text) + "\n"


def as_csv(rows: Sequence[Row]) -> str:
    """All rows with the columns of `Row`, and images per s and W."""
    columns = [field.name for field in fields(Row)]
    columns.insert(columns.index("power_w") + 1, "images_per_s_per_w")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        values = [getattr(row, name) for name in columns]
        writer.writerow("" if value is None else value for value in values)
    return text.getvalue()


def write_picture(measured: Sequence[Row], published: Sequence[Row], path: Path) -> None:
    """Throughput over batch size, one panel per network: lines of what was measured, grey ones of other devices."""
    networks = list(dict.fromkeys(row.network for row in measured))
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.2 * len(networks), 3.4), layout="constrained")
        handles: dict[str, Line2D] = {}
        for axes, network in zip(figure.subplots(1, len(networks), squeeze=False)[0], networks, strict=True):
            for rows, style in ((published, {"color": "0.65", "linewidth": 1.0}), (measured, {"linewidth": 2.0})):
                own = [row for row in rows if row.network == network]
                for device, precision in dict.fromkeys((row.device, row.precision) for row in own):
                    rates = [row for row in own if (row.device, row.precision) == (device, precision)]
                    line = sorted(rates, key=attrgetter("batch"))
                    label = f"{device}, {precision}" if rows is published else precision
                    x, y = [row.batch for row in line], [row.images_per_s for row in line]
                    axes.plot(x, y, marker="o", markersize=3, label=label, **style)
            axes.set(title=network, xscale="log", yscale="log", xlabel="batch size", ylabel="images/s")
            axes.xaxis.set_major_locator(FixedLocator(sorted({row.batch for row in measured})))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_major_locator(_round_numbers(axes))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(
                FuncFormatter(lambda rate, _: f"{rate:,.0f}" if rate >= _DECADE else f"{rate:g}")
            )
            axes.grid(visible=True, color="0.9", linewidth=0.6)
            handles |= {str(line.get_label()): line for line in axes.get_lines() if line.get_color() != "0.65"}
            _name_devices(axes, [row for row in published if row.network == network])
        figure.legend(handles=list(handles.values()), loc="outside upper left", ncols=len(handles), frameon=False)
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=150)
    write_atomically(path, image.getvalue())


def _round_numbers(axes: Axes) -> Locator:
    """1, 2 and 5 times powers of ten within the limits of the vertical axis; more where a single power spans it."""
    low, high = axes.get_ylim()
    digits = (1, 2, 5) if high / low > _DECADE else range(1, 10)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    ticks = [tick for power in powers for digit in digits if low <= (tick := digit * 10.0**power) <= high]
    return FixedLocator(ticks) if len(ticks) > 1 else MaxNLocator(4, steps=[1, 2, 5, 10])


def _name_devices(axes: Axes, published: Sequence[Row]) -> None:
    """Names at the right end of the grey lines, moved apart where they would lie upon each other."""
    devices = dict.fromkeys(row.device for row in published)
    ends = [max((row for row in published if row.device == device), key=attrgetter("batch")) for device in devices]
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]  # places the axes, so that points have pixels
    free = -math.inf
    for row in sorted(ends, key=lambda row: row.images_per_s):
        point = (row.batch, row.images_per_s)
        at = axes.transData.transform(point)[1] * 72 / axes.figure.dpi  # in points, as font sizes are
        free = max(at, free + _NAME_SIZE)
        style: dict[str, Any] = {"color": "0.45", "fontsize": _NAME_SIZE, "ha": "left", "va": "center"}
        axes.annotate(row.device, point, xytext=(6, free - at), textcoords="offset points", **style)
