"""Write the report for people and programs: report.html, model_card.md, report.json."""

import html
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from components.common.contracts.manifests import write_atomically
from components.validate import report_text, speed_text
from components.validate.charts import confusion_picture, layers_chart, speed_chart, training_chart, trials_chart
from components.validate.report_text import next_steps
from components.validate.schema import Report

REPORT_FILES = ("report.html", "report.json", "model_card.md")
_MAX_CLASS_ROWS = 20
_MAX_LAYERS = 20  # of the ranking, in its chart
_MAX_NUMBERED = 50  # classes whose confusion matrix is a table; above, a picture
_MAX_NUMBERED_IN_CARD = 20
_SPECIAL = re.compile(r"([\\`*_\[\]|~])")


def write_report(report: Report, pictures: Mapping[int, str], output: Path) -> None:
    """Write the three files.

    Args:
        report: what they say.
        pictures: data URI of each disagreement's image, by its index.
        output: directory of the Report artifact.
    """
    values = {
        "report": report,
        "say": report_text,
        "speed": speed_text,
        "next_steps": next_steps(report),
        "max_class_rows": _MAX_CLASS_ROWS,
        "max_layers": _MAX_LAYERS,
        "max_numbered": _MAX_NUMBERED,
        "max_numbered_in_card": _MAX_NUMBERED_IN_CARD,
    }
    charts = {name: Markup(svg) for name, svg in _charts(report).items()}  # noqa: S704  # drawn here, text escaped
    templates = _templates()
    page = templates.get_template("report.html.j2").render(**values, charts=charts, pictures=pictures)
    card = templates.get_template("model_card.md.j2").render(**values)
    write_atomically(output / "report.html", page.encode())
    write_atomically(output / "model_card.md", card.encode())
    write_atomically(output / "report.json", report.model_dump_json(indent=1).encode())


def _charts(report: Report) -> dict[str, str]:
    history = report.training.history if report.training else ()
    classes, precision = report.model.classes, report.verdict.precision
    matrix, others = (report.confusion.matrix, report.confusion.others) if report.confusion else (None, {})
    matrices = {precision: matrix, **others} if matrix is not None and len(matrix) > _MAX_NUMBERED else {}
    calibration = report.calibration
    selection = calibration.selection
    ranking = selection.ranking if selection else ()
    return {
        "speed": speed_chart(report.benchmark),
        "training": training_chart(history) if history else "",
        "trials": trials_chart(selection, calibration.chosen) if selection and selection.trials else "",
        "layers": layers_chart(ranking, calibration.excluded, _MAX_LAYERS) if ranking else "",
        **{f"confusion {name}": confusion_picture(entry, classes, name) for name, entry in matrices.items()},
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
        "number": report_text.number,
        "signed": report_text.signed,
        "probability": report_text.probability,
        "count": report_text.count,
        "megabytes": report_text.megabytes,
        "short": report_text.short,
        "yaml": _yaml,
        "markdown": _markdown,
        "markdown_code": _markdown_code,
    }
    return templates


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=True, allow_unicode=True).strip()


def _markdown(value: Any) -> Markup:
    """Text that Markdown shows as it is, also in a table's cell."""
    line = _SPECIAL.sub(r"\\\1", " ".join(str(value).split()))
    return Markup(html.escape(line, quote=False))  # noqa: S704  # Markdown shows entities as what they stand for


def _markdown_code(value: str) -> Markup:
    """An indented block, which no content can end; Markdown shows it as it is, entities too."""
    return Markup("\n".join(f"    {line}" for line in value.splitlines()))  # noqa: S704
