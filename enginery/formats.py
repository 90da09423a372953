"""Numbers, sizes and times as people read them, and where they read."""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

from components.common.contracts.errors import shown

if TYPE_CHECKING:  # commands that print no record start without it
    from pydantic import BaseModel

_UNWRAPPED = 10_000  # columns


def number(value: float | None, form: str) -> str:
    """A measured value; "n/a" where nothing was measured."""
    return "n/a" if value is None else format(value, form)


def range_text(values: Sequence[float], form: str = ",.0f") -> str:
    """One number, or from the first to the last; large ones without an exponent."""
    texts = [format(value, form) for value in values]
    if form.endswith("g"):
        texts = [format(value, ",.0f") if "e+" in text else text for value, text in zip(values, texts, strict=True)]
    return texts[0] if len(set(texts)) == 1 else f"{texts[0]} to {texts[-1]}"


def verdict_text(verdict: str) -> str:
    """A gate's verdict in its colour, as rich markup."""
    colors = {"pass": "green", "pass, not proved": "yellow", "not enough evidence": "yellow", "fail": "red"}
    return f"[{colors[verdict]}]{verdict}[/]" if verdict in colors else escape(verdict)


def size_text(size_bytes: int) -> str:
    """A size for people, in decimal units."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit in ("B", "kB") or size >= 99.5 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def seconds_in(text: str, unit: str = "") -> float | None:
    """A time such as 7ms, 90s, 1.5h, 2d or 3w; a number alone is of `unit`. None for anything else."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]*)\s*", text.lower())
    return float(match[1]) * _UNITS_S[match[2] or unit] if match and (match[2] or unit) in _UNITS_S else None


def age_text(seconds: float) -> str:
    """Return how long ago, in the largest unit that fits."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return "now"


class _Console(Console):
    """Foreign names in what is printed reach the terminal as text alone; rich's own styles and controls stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)


def new_console(*, stderr: bool = False) -> Console:
    """Standard output, also while steps' output is redirected, or standard error.

    Tables wrap on a terminal alone, and lines where they are printed with soft_wrap=False.
    """
    console = _Console(file=sys.stderr if stderr else sys.stdout, highlight=False, soft_wrap=True)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _UNWRAPPED
    return console


def new_table(*columns: str) -> Table:
    """A table whose cells wrap where the terminal is narrow, so that none is cut off.

    Args:
        columns: their names, with ">" before those of numbers.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left", overflow="fold")
    return table


def echo(text: str, **options: Any) -> None:
    """click.echo for text with something foreign in it."""
    click.echo(shown(text), **options)


def echo_json(record: "BaseModel") -> None:
    """A record as JSON in ASCII: what is foreign in it reaches the terminal escaped."""
    click.echo(record.model_dump_json(indent=1, ensure_ascii=True))
