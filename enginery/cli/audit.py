"""`enginery audit`: why the champion is it, and every change of an alias."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from components.common.contracts.digests import short
from components.common.contracts.errors import without_secrets
from enginery.formats import echo_json, new_console
from enginery.registry.models import open_registry

if TYPE_CHECKING:
    from components.common.registry.audit_log import Entry
    from enginery.registry.audit import Audit

_MAX_WHY = 500  # characters


@click.command()
@click.argument("name")
@click.option("--files", is_flag=True, help="Read every file of the champion, too; a server sends them all.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def audit(name: str, files: bool, as_json: bool) -> None:
    """Show why the champion of the registered model NAME is it: from its data's digest to every change of an alias.

    Its approvals are among it, each with the reason where this machine's trust policy refuses it.

    The exit code is 1 when something does not fit together: an alias that the log does not explain, or digests that
    contradict each other. Of the champion the manifests are read, which hold the digests of all other files; those are
    read with --files, and whenever a version is promoted, loaded or released.
    """
    registry = open_registry()
    from enginery.registry.audit import trace

    with registry.reached("nothing is shown"):
        found = trace(registry, name, files=files)
    if as_json:
        echo_json(found)
    else:
        _show(new_console(), found)
    sys.exit(1 if found.problems else 0)


def _show(console: Console, found: "Audit") -> None:
    aliases = "  ".join(f"@{alias} {number}" for alias, number in found.aliases.items()) or "no aliases"
    console.print(f"[bold]{escape(found.model)}[/]  {escape(aliases)}\n")
    if found.chain:
        table = Table.grid(padding=(0, 2))
        for column in ("name", "digest", "note"):
            table.add_column(no_wrap=column == "name", overflow="fold")
        for link in found.chain:
            digest = link.digest if link.digest.isdigit() else short(link.digest)
            table.add_row(link.name, digest, f"[dim]{escape(link.note)}[/]")
        console.print(table)
    else:
        console.print("no champion" if not found.version else f"version {found.version}")
    console.print()
    for entry in found.entries:
        _show_entry(console, entry)
    if not found.entries:
        console.print("the audit log is empty: no alias was changed by enginery", style="dim")
    for problem in found.problems:
        console.print(f"[yellow]problem:[/] {escape(problem)}")
    console.print(f"\nchecked: {_checked(found)}", style="dim")


def _checked(found: "Audit") -> str:
    log = "that the log is whole and explains every alias"
    if not found.chain:
        return log
    if found.files_checked:
        return f"{log}; every file of the champion"
    return f"{log}; the manifests of the champion, not its other files (--files reads those, too)"


def _show_entry(console: Console, entry: dict[str, Any]) -> None:
    changes = ", ".join(
        f"@{alias} {change['before'] or 'none'} -> {change['after'] or 'none'}"
        for alias, change in sorted(entry["changes"].items())
    )
    forced = "  [red]forced[/]" if entry["forced"] else ""
    console.print(
        f"[bold]{entry['number']:3d}[/]  {escape(entry['when'])}  {escape(entry['who'])}  {entry['kind']}{forced}  "
        f"{escape(changes)}"
    )
    console.print(f"     {escape(entry['why'])}")
    if entry["overruled"]:
        console.print(f"     overruled: {escape(entry['overruled'])}")
    if paired := (entry["comparison"] or {}).get("paired"):
        console.print(
            f"     {paired['num_regressed']} images regressed, {paired['num_improved']} improved against the champion, "
            f"with 95 % confidence at least {paired['low_points']:+.2f} points, McNemar's p {paired['mcnemar_p']:.2g}",
            style="dim",
        )


def why_option(*, required: bool = False, text: str = "Reason, for the audit log.") -> Callable[[Any], Any]:
    """--why, of the commands that change an alias or an environment: `text` is its help."""

    def check(context: click.Context, parameter: click.Parameter, value: str | None) -> str:
        why = " ".join((value or "").split())  # a line of the log
        if required and not why:
            raise click.BadParameter("say why, for the audit log")
        if len(why) > _MAX_WHY:
            raise click.BadParameter(f"at most {_MAX_WHY} characters, got {len(why)}")
        try:
            return without_secrets(why)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return click.option("--why", required=required, metavar="TEXT", callback=check, help=text)


def changed_text(entry: "Entry") -> str:
    """Return the result of a change, for the person who asked for it."""
    parts = [
        f"{entry.change.model}@{alias}: version {change.before or 'none'} -> {change.after or 'none'}"
        for alias, change in entry.change.changes.items()
    ]
    forced = f" [red]forced[/], overruling: {escape(entry.change.overruled)}" if entry.change.forced else ""
    where = f"entry {entry.number} of the audit log (enginery audit {entry.change.model})"
    return f"{escape(', '.join(parts))}{forced}\n{where}"
