"""`enginery doctor`: what this machine can do."""

import sys

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelines.diagnosis.checks import Check
from pipelines.diagnosis.report import Diagnosis, diagnose

_MARKS = {
    "ok": "[green]ok[/]",
    "warning": "[yellow]warning[/]",
    "missing": "[red]missing[/]",
    "absent": "[dim]not here[/]",
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(as_json: bool) -> None:
    """Say what this machine can do, and how to fix what is missing.

    The exit code is 1 when something that every run needs is missing.
    """
    if as_json:
        diagnosis = diagnose()
        click.echo(diagnosis.model_dump_json(indent=1))
    else:
        with Console(stderr=True).status("looking; about 10 seconds"):
            diagnosis = diagnose()
        _show(Console(file=sys.stdout), diagnosis)
    sys.exit(diagnosis.exit_code)


def _show(console: Console, diagnosis: Diagnosis) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for group in dict.fromkeys(check.group for check in diagnosis.checks):
        table.add_row(f"[bold]{group}[/]")
        checks = [check for check in diagnosis.checks if check.group == group]
        # What depends on something that is not here says nothing by itself.
        dependent = [check for check in checks if check.status == "absent" and not check.fix]
        for check in checks:
            if check not in dependent:
                table.add_row(_MARKS[check.status], check.name, _told(check))
        if dependent:
            table.add_row("", "not checked", f"{', '.join(check.name for check in dependent)}: {dependent[0].found}")
        table.add_row()
    console.print(table, highlight=False)
    console.print(f"[bold]{escape(diagnosis.conclusion)}[/]", highlight=False)
    worse = [check.name for check in diagnosis.checks if check.status in ("missing", "warning")]
    if worse and not diagnosis.exit_code:
        console.print(f"Could be better, with the fix above: {', '.join(worse)}.", highlight=False)


def _told(check: Check) -> str:
    found = escape(check.found)
    if not check.fix:
        return found
    return f"{found}\n[cyan]{'fix: ' if check.status != 'absent' else ''}{escape(check.fix)}[/]"
