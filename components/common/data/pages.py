"""Parts of the pages that steps and tools write: templates, and images that stand in them."""

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from PIL import Image


def templates(*folders: Path, filters: dict[str, Callable[..., Any]]) -> Environment:
    """Templates of these folders, which escape what is put into them and refuse what is missing."""
    found = Environment(
        loader=FileSystemLoader(folders),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters |= filters
    return found


def thumbnail(image: Image.Image, *, max_side: int, exact_side: int) -> bytes:
    """A small JPEG of an image in RGB; a PNG of one whose sides have `exact_side` pixels or less."""
    is_small = max(image.size) <= exact_side
    image.thumbnail((max_side, max_side))
    encoded = io.BytesIO()
    image.save(encoded, "PNG" if is_small else "JPEG", quality=80)
    return encoded.getvalue()


def data_uri(file: bytes) -> str:
    """A JPEG or PNG as an address that holds it."""
    kind = "png" if file.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"
