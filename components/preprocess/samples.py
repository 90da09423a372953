"""Choose a few images of a packed split to look at, and make thumbnails of them."""

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from components.common.shard_index import image_places
from components.preprocess.decoding import decode
from components.preprocess.structure import Rejected

_MAX_CLASSES = 10
_MAX_PER_CLASS = 6
_MAX_SIDE = 112  # pixels; sixty pictures of this size stay far below a megabyte, noise too
_SMALL_SIDE = 40  # pictures up to this size stay exact
_ANY_SIZE = 1 << 62  # pixels; what is packed was let in


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A thumbnail of one image."""

    path: str
    label: int
    data: bytes
    """JPEG or PNG file."""


def sample_positions(labels: np.ndarray, num_classes: int) -> list[int]:
    """Which images of a split to show, at most 60: up to six of each class, spread over the listing.

    Of more than ten classes with images, the five largest and the five smallest are shown.

    Args:
        labels: [N] integers, in the order of the listing.
        num_classes: more than any label.

    Returns:
        Positions in the listing, in ascending order.
    """
    counts = np.bincount(labels, minlength=num_classes)
    by_size = [label for label in np.argsort(-counts, kind="stable").tolist() if counts[label]]
    half = _MAX_CLASSES // 2
    chosen = by_size if len(by_size) <= _MAX_CLASSES else [*by_size[:half], *by_size[-half:]]
    positions = []
    for label in chosen:
        own = np.flatnonzero(labels == label)
        spread = np.linspace(0, len(own) - 1, min(_MAX_PER_CLASS, len(own))).round().astype(int)
        positions += own[spread].tolist()
    return sorted(positions)


def read_pictures(folder: Path, split: str, positions: Sequence[int]) -> tuple[Picture, ...]:
    """Thumbnails of images of a split, in the order of its listing.

    Args:
        folder: with the split's shards, their indexes and its listing.
        split: train or val.
        positions: in the listing.
    """
    wanted = set(positions)
    with (folder / f"{split}.jsonl").open("rb") as lines:
        entries = [json.loads(line) for position, line in enumerate(lines) if position in wanted]
    thumbnails = _thumbnails(folder, split, {entry["key"] for entry in entries})
    return tuple(
        Picture(path=entry["path"], label=entry["label"], data=thumbnails[entry["key"]])
        for entry in entries
        if entry["key"] in thumbnails
    )


def _thumbnails(folder: Path, split: str, keys: set[str]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for shard in sorted(folder.glob(f"{split}-*.tar")):
        places = [place for place in image_places(shard.with_suffix(".idx")) if place[0] in keys]
        if not places:
            continue
        with shard.open("rb") as archive:
            for key, offset, size in places:
                archive.seek(offset)
                try:
                    found[key] = thumbnail(archive.read(size))
                except Rejected:  # an image of a size that Pillow refuses in this process: a picture less
                    continue
    return found


def thumbnail(data: bytes) -> bytes:
    """A small JPEG of an image file, or a PNG where the image is small already.

    Raises:
        Rejected: it can't be decoded.
    """
    _, image = decode(data, _ANY_SIZE)
    exact = max(image.size) <= _SMALL_SIDE
    image.thumbnail((_MAX_SIDE, _MAX_SIDE))
    encoded = io.BytesIO()
    image.save(encoded, "PNG" if exact else "JPEG", quality=78)
    return encoded.getvalue()
