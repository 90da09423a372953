"""Parts of the pages that steps and tools write: templates, and images that stand in them."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from components.common.contracts.errors import visible

_SHARED = Path(__file__).parents[1] / "templates"  # the style sheet


def templates(*folders: Path, filters: dict[str, Callable[..., Any]]) -> Environment:
    """Templates of these folders and the shared ones.

    They escape what is put into them, control characters too, and refuse what is missing.
    """
    found = Environment(
        loader=FileSystemLoader([*folders, _SHARED]),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= filters
    return found


def _visible(value: Any) -> Any:
    return type(value)(visible(value)) if isinstance(value, Markup | str) else value


def data_uri(file: bytes) -> str:
    """A JPEG or PNG as an address that holds it."""
    kind = "png" if file.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"
