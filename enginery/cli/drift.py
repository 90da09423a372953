"""`enginery drift`: what a model server was sent beside the model's validation."""

from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.markup import escape

from components.common.contracts.errors import GateFailed, UserError
from components.common.contracts.records import PRECISIONS, Precision
from enginery.cli.options import PATH, timeout, write_output
from enginery.formats import echo, echo_json, new_console, new_table

if TYPE_CHECKING:
    from enginery.serving.drift import Drift


@click.command()
@click.argument("model", metavar="NAME@ALIAS|NAME/VERSION|DIR")
@click.option(
    "--metrics",
    multiple=True,
    default=["http://localhost:8002/metrics"],
    show_default=True,
    metavar="URL|FILE",
    help="Where the server's metrics are; those of several servers are added up.",
)
@click.option(
    "--since",
    multiple=True,
    metavar="FILE",
    help="Metrics of the same servers, saved earlier: leave out what was counted then.  [default: count all]",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="The one that is served.  [default: what the verdict says to ship]",
)
@click.option("--json", "as_json", is_flag=True, help="Write JSON instead of a table.")
@click.option("--html", type=PATH, metavar="FILE", help="Also write a page with charts.")
@click.option(
    "--examples",
    type=PATH,
    metavar="DIR",
    help="Show images on the page: those in the folder that the server keeps them in (enginery serve --examples).",
)
@timeout(10.0)
def drift(
    model: str,
    metrics: tuple[str, ...],
    since: tuple[str, ...],
    precision: Precision | None,
    as_json: bool,
    html: Path | None,
    examples: Path | None,
    timeout: float,
) -> None:
    """Compare what a model server was sent with the model's validation, statistic by statistic.

    MODEL is what the server serves: a registered version, or the folder of a release or of a model repository. The
    server counts its images by predicted class, confidence, entropy, brightness, contrast, sharpness and size. A
    statistic drifted if chance does not explain its distance from validation; the exit code is then 3.
    """
    if examples is not None and (html is None or not examples.is_dir()):
        message = f"there is no folder {examples}; name the one that `enginery serve --examples` got"
        if html is None:
            message = "--examples are shown on a page; name it with --html"
        raise UserError(message, code="no-examples", setting="--examples")
    from enginery.serving.drift import compare, counts_of, find_baseline, page, read_metrics

    served = find_baseline(model, precision)
    now, before = (
        [counts_of(read_metrics(each, timeout), each, served) for each in dict.fromkeys(places)]
        for places in (metrics, since)
    )
    result = compare(served, now, before)
    if html is not None:
        write_output(html, page(result, examples).encode(), "--html")
    if as_json:
        echo_json(result)
    else:
        _print(result)
        if html is not None:
            echo(f"{html} written")
    if result.drifted:
        raise GateFailed(f"{', '.join(result.drifted)} drifted from the validation of {result.model}", code="drifted")


def _print(result: "Drift") -> None:
    console = new_console()
    console.print(
        f"[bold]{escape(result.model)}[/], {result.precision.upper()}: {result.num_images:,} images, against "
        f"{result.num_validation_images:,} of validation"
    )
    table = new_table("statistic", "", ">PSI", ">at most", ">Jensen-Shannon", ">at most", "largest change")
    for each in result.statistics:
        distances = [f"{value:.4f}" for value in (each.psi, each.psi_threshold, each.js, each.js_threshold)]
        most = each.most_changed
        change = f"{most.bin}: {most.baseline_pct:.1f} % to {most.served_pct:.1f} %"
        verdict = "[red]drifted[/]" if each.drifted else "[green]as validated[/]"
        table.add_row(each.statistic, verdict, *distances, escape(change))
    console.print(table)
