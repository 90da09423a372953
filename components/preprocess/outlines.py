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


Region = tuple[slice, slice]  # rows and columns


def outline_of(packed: bytes, size: tuple[int, int]) -> tuple[Region, np.ndarray]:
    """Find the pixels of an object in an image of this width and height.

    Returns:
        The part of the image that it is in, and whether each of the part's pixels is the object's: [h, w] bool.

    Raises:
        ValueError, TypeError, OverflowError: it is neither polygons nor run lengths of such an image.
    """
    outline = json.loads(zlib.decompress(packed))
    width, height = size
    if isinstance(outline, Mapping):
        return (slice(height), slice(width)), _of_runs(outline, width, height)
    polygons = []
    for polygon in outline:
        corners = np.array(polygon, np.float64)
        if corners.ndim != 1 or len(corners) < 6 or len(corners) % 2 or not (np.abs(corners) < _MAX_CORNER).all():
            raise ValueError("a polygon that is no list of three corners or more")
        polygons.append(corners.reshape(-1, 2))
    every = np.concatenate(polygons)
    edges = np.floor(every.min(axis=0)), np.ceil(every.max(axis=0))
    (left, top), (right, bottom) = (np.clip(edge, 0, size).astype(int).tolist() for edge in edges)
    region = slice(top, bottom), slice(left, right)
    found = np.zeros((bottom - top, right - left), bool)
    for corners in polygons:
        found |= _filled(corners, *region)
    return region, found


def paint(mask: np.ndarray, label: int, pixels: np.ndarray) -> None:
    """Give pixels ([H, W] bool) of a mask ([H, W] uint8) a class; VOID where another one has them.

    Source of the rule for overlaps: torchvision's references/segmentation.
    """
    own = mask[pixels]
    mask[pixels] = np.where((own == 0) | (own == label), label, VOID)


def _filled(corners: np.ndarray, rows_of: slice, columns_of: slice) -> np.ndarray:
    """[h, w] bool: pixels of a region whose centre is in a polygon, by even and odd crossings.

    Args:
        corners: [P, 2] x, y.
        rows_of: of the region.
        columns_of: of the region.
    """
    ends = np.roll(corners, -1, axis=0)
    upper, lower = (
        np.clip(np.ceil(edge(corners[:, 1], ends[:, 1]) - 0.5), rows_of.start, rows_of.stop)
        for edge in (np.minimum, np.maximum)
    )
    counts = (lower - upper).astype(np.int64)  # rows whose centres an edge crosses
    if counts.sum() > _MAX_CROSSINGS:
        raise ValueError("a polygon with too many corners")
    edges = np.repeat(np.arange(len(corners)), counts)
    rows = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + upper[edges].astype(np.int64)
    slopes = (ends[edges, 0] - corners[edges, 0]) / (ends[edges, 1] - corners[edges, 1])
    x = corners[edges, 0] + (rows + 0.5 - corners[edges, 1]) * slopes
    columns = np.clip(np.ceil(x - 0.5), columns_of.start, columns_of.stop).astype(np.int64) - columns_of.start
    height, width = rows_of.stop - rows_of.start, columns_of.stop - columns_of.start + 1
    places = (rows - rows_of.start) * width + columns
    is_odd = (np.bincount(places, minlength=height * width).astype(np.uint8) & 1).view(bool).reshape(height, width)
    inside: np.ndarray = np.logical_xor.accumulate(is_odd, axis=1)[:, :-1]
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
