"""`enginery compare`: runs, or versions of registered models, side by side."""

from contextlib import nullcontext

import click
from rich.console import Console
from rich.markup import escape

from components.common.contracts.errors import UserError
from enginery.formats import echo_json, new_console, new_table, number, size_text, verdict_text
from enginery.local.runs import find_summary
from enginery.local.state import StateDirectory
from enginery.registry.compare import MIXED, NOTHING, RunComparison, joined_units
from enginery.registry.compare import compare as compare_runs
from enginery.registry.models import is_reference, open_registry, version_summary


@click.command()
@click.argument("names", nargs=-1, metavar="RUN RUN [RUN ...]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def compare(names: tuple[str, ...], as_json: bool) -> None:
    """Show runs side by side: accuracy, speed, size, verdict, and what differed.

    RUN is an id that `enginery runs` lists, the start of one, `latest`, or the path of a summary.json. Or it is a
    version of a registered model: NAME@champion, NAME/3 or NAME:3.
    """
    if len(names) < 2:
        message = f"compare takes two or more runs, such as ID latest; got {len(names)}. See `enginery runs`"
        raise UserError(message, code="too-few-runs")
    runs = StateDirectory.current().runs
    registry = open_registry() if any(is_reference(name) for name in names) else None
    with registry.reached("nothing is compared") if registry is not None else nullcontext():
        summaries = [
            version_summary(registry, name) if registry is not None and is_reference(name) else find_summary(name, runs)
            for name in names
        ]
    if len({summary.run_id for summary in summaries}) < len(summaries):
        message = f"{', '.join(names)} name the same run twice ({summaries[-1].run_id}); name different ones"
        raise UserError(message, code="same-run-twice")
    result = compare_runs(summaries)
    if as_json:
        echo_json(result)
        return
    console = new_console()
    for run in result.runs:
        if run.registered == run.run_id:
            console.print(f"[bold]{run.label}[/]  {escape(run.registered)}")
            continue
        status = run.status if run.status == "done" else f"[red]{run.status}[/]"
        registered = f", registered as {run.registered}" if run.registered else ""
        console.print(f"[bold]{run.label}[/]  {escape(run.run_id)}  {status}{escape(registered)}")
    _print_measures(console, result)
    differences = (
        ("arguments", result.arguments),
        ("data", result.data),
        ("library versions and hardware", result.versions),
    )
    for title, entries in differences:
        _print_differences(console, title, entries, [run.label for run in result.runs])
    unknown = ["arguments"] if MIXED in result.warnings else []
    same = [title for title, entries in differences if not entries and title not in unknown]
    if same:
        console.print(f"the same in all: {', '.join(same)}", style="dim")
    for warning in result.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=False)


def _print_measures(console: Console, result: RunComparison) -> None:
    if not result.precisions:
        return
    table = new_table(
        "precision", "", ">score %", ">delta", ">p50 ms", f">{escape(joined_units(result.runs))}/s", ">size", "verdict"
    )
    for precision in result.precisions:
        for position, run in enumerate(result.runs):
            row = run.rows.get(precision)
            is_unsure = row and row.score_pct is not None and row.images_per_s is None and row.throughput_batch_size
            table.add_row(
                precision.upper() if position == 0 else "",
                run.label,
                number(row.score_pct if row else None, ".2f"),
                "" if precision == "fp32" else number(row.delta_points if row else None, "+.2f"),
                "unsure" if row and row.latency_doubt else number(row.p50_ms if row else None, ".2f"),
                "unsure" if is_unsure else number(row.images_per_s if row else None, ",.0f"),
                size_text(row.size_bytes) if row and row.size_bytes else "n/a",
                verdict_text(row.verdict) if row else "",
                end_section=run is result.runs[-1],
            )
    console.print(table)


def _print_differences(console: Console, title: str, entries: dict[str, dict[str, str]], labels: list[str]) -> None:
    """Nothing where the runs agree."""
    if not entries:
        return
    table = new_table(f"differing {title}", *labels)
    for name, values in entries.items():
        table.add_row(escape(name), *(escape(values[label]) or NOTHING for label in labels))
    console.print(table)
