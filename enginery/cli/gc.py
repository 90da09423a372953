"""`enginery gc`: remove old runs of this machine."""

import sys
import time

import click
from rich.console import Console
from rich.markup import escape

from components.common.contracts.errors import UserError
from enginery.formats import new_console, new_table, size_text
from enginery.local.gc import RemovalPlan, Rules, delete, in_use, leftovers, parse_age, parse_size, plan, remove
from enginery.local.runs import PastRun, past_runs
from enginery.local.state import StateDirectory


@click.command()
@click.option("--older-than", metavar="AGE", help="Remove runs that began longer ago: 30d, 12h, 2w, 90min.")
@click.option("--keep", type=int, metavar="N", help="Remove all but the newest N runs.")
@click.option("--max-size", metavar="SIZE", help="Remove the oldest runs until the rest fit: 50GB, 500MB, 1TiB.")
@click.option("--dry-run", is_flag=True, help="Only print what would go.")
@click.option("--yes", is_flag=True, help="Don't ask.")
def gc(older_than: str | None, keep: int | None, max_size: str | None, dry_run: bool, yes: bool) -> None:
    """Remove old runs of this machine.

    A run goes when any of the rules says so. Never a run that an alias of a registered model points to, or one that
    is still going. Steps whose cached results go with a run are simply run again; MLflow keeps its records and files.
    """
    rules = Rules(
        older_than_s=parse_age(older_than) if older_than else None,
        keep=keep,
        max_size_bytes=parse_size(max_size) if max_size else None,
    )
    state = StateDirectory.current()
    console = new_console()
    found = past_runs(state.runs)
    if not dry_run:
        for path in leftovers(state.runs):
            size_bytes = PastRun(path).size_bytes
            delete(path)
            console.print(f"{size_text(size_bytes)} freed that a gc cut short had left")
    decided = plan(found, rules, in_use(state, found), time.time())
    _show(console, decided, len(found))
    if dry_run or not decided.remove:
        return
    if not yes:
        if not sys.stdin.isatty():
            text = "gc asks before it removes, and there is no terminal to ask on; add --yes or --dry-run"
            raise UserError(text, code="no-terminal", setting="--yes")
        click.confirm(f"Remove {_runs(len(decided.remove))}?", abort=True)
    freed_bytes = 0
    for run, _ in decided.remove:
        if remove(run, lambda run, reason: console.print(f"kept {run.name}: {reason}")):
            freed_bytes += run.size_bytes
    console.print(f"{size_text(freed_bytes)} freed")


def _show(console: Console, decided: RemovalPlan, num_runs: int) -> None:
    for run, reason in decided.keep:
        console.print(f"kept {run.name}: {escape(reason)}", style="dim")
    if not decided.remove:
        console.print(f"nothing to remove; {_runs(num_runs)}, {size_text(decided.total_bytes)}")
        return
    table = new_table("to remove", ">size", "why")
    for run, reason in decided.remove:
        table.add_row(run.name, size_text(run.size_bytes), reason)
    console.print(table)
    console.print(
        f"{len(decided.remove)} of {_runs(num_runs)}, {size_text(decided.freed_bytes)} of "
        f"{size_text(decided.total_bytes)}"
    )


def _runs(count: int) -> str:
    return "1 run" if count == 1 else f"{count} runs"
