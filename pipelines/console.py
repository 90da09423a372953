"""Where people read."""

import sys
from collections.abc import Iterable
from typing import Any

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from components.common.shown import shown


class _Console(Console):
    """Foreign names in what is printed reach the terminal as text alone; rich's own styles and controls stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)


def new_console(*, stderr: bool = False) -> Console:
    """Standard output, also while steps' output is redirected, or standard error."""
    return _Console(file=sys.stderr if stderr else sys.stdout)


def echo(text: str, **options: Any) -> None:
    """click.echo for text with something foreign in it."""
    click.echo(shown(text), **options)
