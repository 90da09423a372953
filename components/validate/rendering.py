"""Write the report for people and programs: report.html, model_card.md, report.json."""

import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from components.common.artifacts import write_atomically
from components.validate.charts import loss_chart, speed_chart, top1_chart
from components.validate.schema import Report

REPORT_FILES = ("report.html", "report.json", "model_card.md")
_MAX_CLASS_ROWS = 20
_MINUS = "\N{MINUS SIGN}"
_SPECIAL = re.compile(r"([\\`*_\[\]|~])")


def write_report(report: Report, pictures: Mapping[int, str], output: Path) -> None:
    """Write the three files.

    Args:
        report: what they say.
        pictures: data URI of each disagreement's image, by its index.
        output: directory of the Report artifact.
    """
    history = report.training.history if report.training else ()
    charts = {
        "speed": speed_chart(report.benchmark),
        "loss": loss_chart(history) if history else "",
        "top1": top1_chart(history) if history else "",
    }
    values = {"report": report, "speedups": _speedups(report), "max_class_rows": _MAX_CLASS_ROWS}
    for_page = {"charts": {name: Markup(svg) for name, svg in charts.items()}, "pictures": pictures}  # noqa: S704
    templates = _templates()
    page = templates.get_template("report.html.j2").render(**values, **for_page)
    card = templates.get_template("model_card.md.j2").render(**values)
    write_atomically(output / "report.html", page.encode())
    write_atomically(output / "model_card.md", card.encode())
    write_atomically(output / "report.json", report.model_dump_json(indent=1).encode())


def _speedups(report: Report) -> dict[tuple[str, int], float]:
    """Throughput over FP32's, by precision and batch size."""
    rows = report.benchmark.rows
    fp32 = {row.batch_size: row.images_per_s for row in rows if row.precision == "fp32"}
    return {
        (row.precision, row.batch_size): row.images_per_s / fp32[row.batch_size]
        for row in rows
        if row.batch_size in fp32
    }


def _templates() -> Environment:
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters |= {
        "number": _number,
        "signed": _signed,
        "count": lambda value: f"{value:,}",
        "megabytes": lambda value: f"{value / 1e6:,.1f}",
        "short": lambda digest: digest.removeprefix("sha256:")[:12],
        "yaml": lambda value: yaml.safe_dump(value, sort_keys=True, allow_unicode=True).strip(),
        "markdown": _markdown,
    }
    return templates


def _number(value: float | None, digits: int = 2) -> str:
    return "\N{EN DASH}" if value is None else f"{value:,.{digits}f}"


def _signed(value: float | None, digits: int = 2) -> str:
    """With its sign; zero has none."""
    if value is None:
        return "\N{EN DASH}"
    text = f"{abs(value):,.{digits}f}"
    if not float(text.replace(",", "")):
        return text
    return f"{_MINUS if value < 0 else '+'}{text}"


def _markdown(value: Any) -> Markup:
    """Text that Markdown shows as it is, also in a table's cell."""
    line = _SPECIAL.sub(r"\\\1", " ".join(str(value).split()))
    return Markup(html.escape(line, quote=False))  # noqa: S704  # Markdown shows entities as what they stand for
