"""Where people read."""

import sys

from rich.console import Console


def new_console() -> Console:
    """Standard output, also while steps' output is redirected."""
    return Console(file=sys.stdout)
