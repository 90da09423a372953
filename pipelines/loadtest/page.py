"""loadtest.html: what a load test measured, for people."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

import components.validate
from pipelines.formats import number
from pipelines.loadtest import wording
from pipelines.loadtest.charts import batches_chart, latency_chart, throughput_chart
from pipelines.loadtest.record import Level, LoadTest, Series

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
        say=wording,
        batches_at=", ".join(dict.fromkeys(f"{wording.load_text(level)} ({name})" for name, level in busiest)),
        charts={name: Markup(svg) for name, svg in charts.items()},  # noqa: S704  # drawn here, text escaped
    )


def _at_knee(series: Series) -> Level | None:
    """The level of the knee; without one the last with many clients."""
    if series.knee is not None:
        return next(level for level in series.open if level.request_rate == series.knee.request_rate)
    return series.closed[-1] if series.closed else None
