"""`enginery models`: what is registered."""

import json
import time
from typing import TYPE_CHECKING

import click
from rich.markup import escape

from enginery.formats import age_text, new_console, new_table, number, verdict_text
from enginery.registry.models import list_versions, open_registry

if TYPE_CHECKING:
    from enginery.registry.models import VersionRow


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def models(name: str | None, as_json: bool) -> None:
    """List registered models: versions, aliases, verdicts, accuracy. NAME is one of them; without it, all."""
    registry = open_registry()
    with registry.reached("nothing is listed"):
        rows = list_versions(registry, name)
    if as_json:
        click.echo(json.dumps([row.model_dump(mode="json") for row in rows], indent=1))
        return
    if not rows:
        click.echo(
            f"nothing is registered in MLflow at {registry.uri} yet; `enginery run` registers what passes its gate"
        )
        return
    _show(rows)


def _show(rows: "list[VersionRow]") -> None:
    table = new_table("model", ">version", "aliases", "verdict", "precision", ">score %", "GPU", ">when")
    now, last = time.time(), ""
    for row in rows:
        table.add_row(
            escape(row.model) if row.model != last else "",
            row.version,
            escape(" ".join(f"@{alias}" for alias in row.aliases)),
            verdict_text(row.verdict) or "[dim]unknown[/]",
            escape(row.precision.upper()),
            number(row.score_pct, ".2f"),
            escape(row.gpu) or "[dim]none[/]",
            age_text(now - row.created),
        )
        last = row.model
    console = new_console()
    console.print(table)
    console.print(
        "score: of the recommended precision, such as top-1; GPU: what the TensorRT plans run on", style="dim"
    )
    console.print("why the champion is it: enginery audit NAME", style="dim")
