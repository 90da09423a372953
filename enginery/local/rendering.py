"""Display of a local run: progress bars, a line per finished step, and the table at the end."""

import contextlib
import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from components.common.process.steplog import EVENT_PREFIX, LinePace, progress_text
from enginery.formats import new_table, number, size_text, verdict_text
from enginery.local.summary import RunSummary

_PLAIN_INTERVAL_S = 10.0  # between progress lines where the output is no terminal


class RunLog(io.TextIOBase):
    """The file run.log. It takes what the disk takes: a full one must not end a run that only wanted to say something.

    Unbuffered, so that a killed run leaves all its lines.
    """

    def __init__(self, path: Path) -> None:
        """Make the file."""
        try:
            self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError:
            self._file = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def write(self, text: str) -> int:
        """Append, as far as there is room."""
        with contextlib.suppress(OSError):
            os.write(self._file, text.encode(errors="backslashreplace"))
        return len(text)

    def close(self) -> None:
        """Close the file, once."""
        if not self.closed:
            os.close(self._file)
        super().close()


class EventStream(io.TextIOBase):
    """Takes the steps' output line by line: events go to `on_event`, everything goes to the log."""

    def __init__(self, log: io.TextIOBase, on_event: Callable[[dict[str, Any]], None]) -> None:
        self._log = log
        self._on_event = on_event
        self._partial = ""

    def write(self, text: str) -> int:
        """Split into lines; a line that is no event is only logged."""
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            text_of_step = line.lstrip()  # KFP indents what a step prints
            event = _event(text_of_step.removeprefix(EVENT_PREFIX)) if text_of_step.startswith(EVENT_PREFIX) else None
            if event is None:
                self._log.write(line + "\n")
            else:
                self._on_event(event)
        return len(text)

    def flush(self) -> None:
        """Make the log readable up to here."""
        self._log.flush()


def _event(text: str) -> dict[str, Any] | None:
    """An event, or None for a line that a killed step left half-written."""
    try:
        event = json.loads(text)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


class Renderer:
    """Shows events. Bars where the output is a terminal, occasional lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("[bold]{task.fields[step]:>10}[/]"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeRemainingColumn(),
            TextColumn("{task.fields[detail]}", style="dim"),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task: TaskID | None = None
        self._phase = ""
        self._step_started = time.time()
        self._pace = LinePace(_PLAIN_INTERVAL_S, share=0.2)

    def __enter__(self) -> "Renderer":
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def handle(self, event: dict[str, Any]) -> None:
        """Show one event."""
        kind, step = event["event"], event["step"]
        if kind == "started":
            self._step_started = event["process_started"]
            self._show_progress(step, "starting", 0, 1)
        elif kind == "progress":
            self._show_progress(step, event["phase"], event["done"], event["total"], event["unit"], event["detail"])
        elif kind == "note":
            self._console.print(f"[bold]{step:>10}[/] {escape(event['text'])}", style="dim")
        elif kind == "warning":
            self._console.print(f"[bold]{step:>10}[/] [yellow]warning:[/] {escape(event['text'])}")
        elif kind == "finished":
            self._close(step, "[green]done[/]  ", event["outcome"], event["time"])
        elif kind == "failed":
            self._close(step, "[red]failed[/]", event["message"], event["time"], event.get("code", ""))

    def show_reused(self, step: str, run_id: str) -> None:
        """A step that need not run: its inputs, settings, code and machine are those of an earlier run."""
        self._console.print(f"[bold]{step:>10}[/] [green]reused[/]          from {run_id}")

    def _show_progress(self, step: str, phase: str, done: int, total: int, unit: str = "", detail: str = "") -> None:
        if not self._console.is_terminal:
            if done and self._pace.is_due(step + phase, done, total):
                text = f"{step:>10} {progress_text(phase, done, total, unit, detail)}"
                self._console.print(text, markup=False)
            return
        if self._task is None or self._phase != step + phase:
            self._remove_bar()
            self._phase = step + phase
            self._task = self._progress.add_task("", total=None, step=step, detail="")
        self._progress.update(
            self._task,
            description=progress_text(phase, done, total, unit),
            completed=done,
            total=total if total > 1 else None,  # a phase of one piece shows that it lives, no share
            detail=detail,
        )

    def _remove_bar(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None

    def _close(self, step: str, mark: str, text: str, now: float, code: str = "") -> None:
        self._remove_bar()
        seconds = now - self._step_started
        shown_code = f" [dim]{escape(f'[{code}]')}[/]" if code else ""
        self._console.print(f"[bold]{step:>10}[/] {mark} {seconds:6.1f} s  {escape(text)}{shown_code}")


def print_summary(console: Console, summary: RunSummary) -> None:
    """The table that a run ends with, of the precisions that something here runs."""
    if not summary.rows:
        return
    numbers = (f">{summary.score_name} %", ">delta", ">p50 ms", f">{summary.unit}/s", ">over FP32", ">size")
    table = new_table("precision", *numbers, "verdict")
    for row in summary.rows:
        if row.score_pct is None:
            continue
        is_reference, over = row.precision == "fp32", row.speedup
        table.add_row(
            row.precision.upper(),
            number(row.score_pct, ".2f"),
            "" if is_reference else number(row.delta_points, "+.2f"),
            "unsure" if row.latency_doubt else number(row.p50_ms, ".2f"),
            "unsure" if row.images_per_s is None and row.throughput_batch_size else number(row.images_per_s, ",.0f"),
            "" if is_reference else "n/a" if over is None else "unsure" if over.doubt else f"{over.median:.2f}x",
            size_text(row.size_bytes) if row.size_bytes else "n/a",
            verdict_text(row.verdict),
        )
    console.print()
    console.print(table)
    _print_legend(console, summary)
    _print_recommendation(console, summary)


def _print_legend(console: Console, summary: RunSummary) -> None:
    """The meaning of the table's numbers, and what is missing in it."""
    num_images = max(row.num_images for row in summary.rows)
    where = next((f"{row.device} ({row.runtime})" for row in summary.rows if row.device), "nothing")
    batch_size = next((row.throughput_batch_size for row in summary.rows if row.throughput_batch_size), None)
    speed = f"p50 latency at batch 1, {summary.unit}/s at batch {batch_size}"
    speed = "no speed was measured" if batch_size is None else speed
    lines = [
        f"{summary.score_name} on {num_images:,} validation {summary.unit}; delta to FP32 in percentage points",
        f"{speed}, on {where}",
    ]
    for row in summary.rows:
        name, ratio = row.precision.upper(), row.speedup
        if row.score_pct is None:
            lines.append(f"{name} was not measured: {row.note}")
        elif row.note:
            lines.append(f"{name}: {row.note}")
        if ratio is not None and ratio.doubt:
            lines.append(f"{name} over FP32 is unsure: {ratio.doubt}")
        elif ratio is not None:
            lines.append(f"{name} over FP32: {ratio.low:.2f}x to {ratio.high:.2f}x in the turns measured")
    for line in lines:
        console.print(line, style="dim", markup=False)


def _print_recommendation(console: Console, summary: RunSummary) -> None:
    """The precision to ship, where that is not the one that was judged."""
    advice = summary.recommendation
    passed = [row.precision for row in summary.rows if row.verdict.startswith("pass")]
    if advice is not None and advice.precision not in passed:
        console.print(f"[bold]recommended: {advice.precision.upper()}[/], since {escape(advice.reason)}")
