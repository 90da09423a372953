"""`enginery runs`: what ran on this machine."""

import json
import time
from typing import Any

import click

from enginery.formats import age_text, new_console, new_table, number, size_text, verdict_text
from enginery.local.runs import PastRun, past_runs
from enginery.local.state import StateDirectory

_WIDE = 100  # columns from which on the pipeline has a column of its own; a run's id begins with it


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def runs(as_json: bool) -> None:
    """List the runs of this machine, the newest first."""
    directory = StateDirectory.current().runs
    now = time.time()
    entries = [_entry(run, now) for run in past_runs(directory)]
    if as_json:
        click.echo(json.dumps(entries, indent=1))
        return
    if not entries:
        click.echo(f"no runs in {directory} yet; start one: enginery run resnet50 --data DIR")
        return
    console = new_console()
    wide = ("pipeline",) if console.width >= _WIDE else ()
    table = new_table("run", *wide, "status", ">INT8 %", ">delta", "gate", ">when", ">size")
    for entry in entries:
        table.add_row(
            entry["run"],
            *(entry[name] for name in wide),
            {"done": "done", "going": "[cyan]going[/]"}.get(entry["status"], f"[red]{entry['status']}[/]"),
            number(entry["int8_score_pct"], ".2f"),
            number(entry["int8_delta_points"], "+.2f"),
            verdict_text(entry["verdict"]),
            age_text(now - entry["started"]),
            size_text(entry["size_bytes"]),
        )
    console.print(table)
    console.print("INT8 %: its score, such as top-1; delta to FP32 in percentage points", style="dim")
    console.print("side by side: enginery compare RUN RUN", style="dim")


def _entry(run: PastRun, now: float) -> dict[str, Any]:
    rows = run.summary.rows if run.summary else []
    int8 = next((row for row in rows if row.precision == "int8"), None)
    return {
        "run": run.name,
        "pipeline": run.summary.pipeline if run.summary else run.pipeline,
        "status": run.status(now),
        "int8_score_pct": int8.score_pct if int8 else None,
        "int8_delta_points": int8.delta_points if int8 else None,
        "verdict": int8.verdict if int8 else "",
        "registered": run.summary.registered if run.summary else "",
        "started": run.started,
        "size_bytes": run.size_bytes,
    }
