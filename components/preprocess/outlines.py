"""Masks from COCO's polygons and run lengths."""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from components.common.tasks.segmentation import VOID

_MAX_BITS = 40  # of a run length
_MAX_CORNER = 1e9  # px
_MAX_CROSSINGS = 1 << 25  # of a polygon's edges with rows of pixels


def packed_outline(outline: Any) -> bytes:
    """An object's `segmentation` in few bytes; empty for none."""
    return zlib.compress(json.dumps(outline).encode(), 1) if isinstance(outline, list | dict) and outline else b""


def outline_of(packed: bytes, size: tuple[int, int]) -> np.ndarray:
    """Pixels of an object, [H, W] bool, of an image of this width and height.

    Raises:
        ValueError, TypeError, OverflowError: it is neither polygons nor run lengths of such an image.
    """
    outline = json.loads(zlib.decompress(packed))
    width, height = size
    if isinstance(outline, Mapping):
        return _of_runs(outline, width, height)
    found = np.zeros((height, width), bool)
    for polygon in outline:
        corners = np.array(polygon, np.float64)
        if corners.ndim != 1 or len(corners) < 6 or len(corners) % 2 or not (np.abs(corners) < _MAX_CORNER).all():
            raise ValueError("a polygon that is no list of three corners or more")
        found |= _filled(corners.reshape(-1, 2), width, height)
    return found


def paint(mask: np.ndarray, label: int, pixels: np.ndarray) -> None:
    """Give pixels ([H, W] bool) of a mask ([H, W] uint8) a class; VOID where another one has them.

    Source of the rule for overlaps: torchvision's references/segmentation.
    """
    mask[pixels] = np.where(np.isin(mask[pixels], (0, label)), label, VOID)


def _filled(corners: np.ndarray, width: int, height: int) -> np.ndarray:
    """[H, W] bool: pixels whose centre is in a polygon, by even and odd crossings. corners: [P, 2] x, y."""
    ends = np.roll(corners, -1, axis=0)
    upper, lower = (
        np.clip(np.ceil(edge(corners[:, 1], ends[:, 1]) - 0.5), 0, height) for edge in (np.minimum, np.maximum)
    )
    counts = (lower - upper).astype(np.int64)  # rows whose centres an edge crosses
    if counts.sum() > _MAX_CROSSINGS:
        raise ValueError("a polygon with too many corners")
    edges = np.repeat(np.arange(len(corners)), counts)
    rows = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + upper[edges].astype(np.int64)
    slopes = (ends[edges, 0] - corners[edges, 0]) / (ends[edges, 1] - corners[edges, 1])
    x = corners[edges, 0] + (rows + 0.5 - corners[edges, 1]) * slopes
    columns = np.clip(np.ceil(x - 0.5), 0, width).astype(np.int64)
    flips = np.bincount(rows * (width + 1) + columns, minlength=height * (width + 1)).reshape(height, width + 1)
    inside: np.ndarray = flips.cumsum(axis=1)[:, :-1] % 2 == 1
    return inside


def _of_runs(outline: Mapping[str, Any], width: int, height: int) -> np.ndarray:
    """Source: maskApi.c of the COCO API: runs by columns, the first of pixels outside."""
    counts = outline.get("counts")
    runs = _decoded(counts) if isinstance(counts, str) else counts
    if not isinstance(runs, list) or not all(isinstance(run, int) and run >= 0 for run in runs):
        raise ValueError("run lengths that are none")
    if (size := outline.get("size")) != [height, width]:
        raise ValueError(f"run lengths of [height, width] {str(size)[:40]}, an image of [{height}, {width}]")
    if sum(runs) != width * height:
        raise ValueError(f"run lengths of {sum(runs):,} pixels, an image of {width * height:,}")
    flat = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return flat.reshape(width, height).T


def _decoded(text: str) -> list[int]:
    """Numbers of 5 bits a character from 48 on, the sixth for "more follows"; from the fourth on differences."""
    runs: list[int] = []
    value, shift = 0, 0
    for character in text.encode():
        bits = character - 48
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32 and shift < _MAX_BITS:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value, shift = 0, 0
    return runs
