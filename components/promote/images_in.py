"""What a caller of the Python model may send, and the encoded images that it means."""

import base64
import binascii
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from components.common.errors import UserError

COLUMN = "image"  # of a table
TAKEN = (
    "give images as bytes of JPEG, PNG, WebP, BMP or TIFF files, base64 text of such bytes, pathlib.Path objects, or "
    f"uint8 arrays [height, width, 3] in RGB: one, a list, or a pandas DataFrame with the column {COLUMN!r}"
)


def encoded_images(sent: Any) -> list[bytes]:
    """The images in what was sent, each as the content of an image file.

    An array becomes a PNG without loss, so that it takes the same way as a file. Text is base64, as in JSON, and never
    a path: a client of a server could otherwise have it open the server's own files.

    Raises:
        UserError: nothing was sent, or something that holds no image; the message says which one.
    """
    items = list(_items(sent))
    if not items:
        raise UserError(f"no image was sent; {TAKEN}")
    return [_encoded(item, image_name(index)) for index, item in enumerate(items)]


def image_name(index: int) -> str:
    """What errors call one of the images that were sent."""
    return f"image {index}"


def _items(sent: Any) -> Iterable[Any]:
    if isinstance(sent, pd.DataFrame):
        if COLUMN not in sent.columns and len(sent.columns) != 1:
            columns = ", ".join(map(repr, sent.columns)) or "none"
            raise UserError(f"the table has no column {COLUMN!r}, its columns: {columns}; {TAKEN}")
        return list(sent[COLUMN] if COLUMN in sent.columns else sent.iloc[:, 0])
    if isinstance(sent, Mapping):
        if COLUMN not in sent:
            raise UserError(f"there is no key {COLUMN!r}, the keys are {', '.join(map(repr, sent)) or 'none'}; {TAKEN}")
        return _items(sent[COLUMN])
    if isinstance(sent, pd.Series | list | tuple):
        return list(sent)
    if isinstance(sent, np.ndarray):
        return _items_of_array(sent)
    return [sent]


def _items_of_array(sent: np.ndarray) -> Iterable[Any]:
    if sent.dtype.kind == "S":  # NumPy drops zeros at the end of these
        raise UserError(f"an array of {sent.dtype} cuts bytes off; use a list, or an array of dtype object. {TAKEN}")
    if sent.dtype.kind in "OU":  # of files' contents, base64 texts, paths or arrays
        return sent.reshape(-1).tolist()
    return list(sent) if sent.ndim == 4 else [sent]


def _encoded(item: Any, name: str) -> bytes:
    if isinstance(item, bytes | bytearray | memoryview):
        return bytes(item)
    if isinstance(item, str):
        return _from_base64(item, name)
    if isinstance(item, Path):
        return _from_file(item, name)
    if isinstance(item, list):  # pixels, as JSON has them
        try:
            item = np.asarray(item)
        except ValueError:
            raise UserError(f"{name} is a list whose rows differ in length; {TAKEN}") from None
    if isinstance(item, np.ndarray):
        return _from_pixels(item, name)
    raise UserError(f"{name} is a {type(item).__name__}; {TAKEN}")


def _from_base64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        raise UserError(
            f"{name} is the text {shown!r}, which is not base64; to name a file of this machine, give a pathlib.Path"
        ) from None


def _from_file(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{name}: can't read {path}: {error.strerror}; name an image file") from None


def _from_pixels(pixels: np.ndarray, name: str) -> bytes:
    """pixels: [height, width, 3] of 0..255 in RGB."""
    if pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise UserError(f"{name} is an array of shape {pixels.shape}; pixels are [height, width, 3] in RGB")
    if pixels.dtype.kind not in "iu":
        raise UserError(
            f"{name} is an array of {pixels.dtype}; pixels are uint8, 0 to 255, neither scaled nor normalized"
        )
    if pixels.min() < 0 or pixels.max() > 255:
        raise UserError(f"{name} has pixels from {pixels.min()} to {pixels.max()}; they go from 0 to 255")
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()
