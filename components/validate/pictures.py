"""Thumbnails of validation images, taken from the shards."""

import base64
import io
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from components.common.artifacts import Artifact, DatasetManifest

_MAX_SIDE = 160  # pixels
_SMALL_SIDE = 64  # pictures up to this size stay exact


def thumbnails(data: Artifact[DatasetManifest], keys: Iterable[str]) -> dict[str, str]:
    """Data URIs of validation images by their key in val.jsonl."""
    wanted = set(keys)
    found: dict[str, str] = {}
    for shard in data.manifest.splits["val"].shards:
        if len(found) == len(wanted):
            break
        with data.file(shard).open("rb") as archive:
            for key, offset, size in _places(data.file(shard).with_suffix(".idx")):
                if key in wanted:
                    archive.seek(offset)
                    found[key] = _data_uri(archive.read(size))
    return found


def _places(index: Path) -> Iterator[tuple[str, int, int]]:
    """Key, offset and size of each image of a shard, from its DALI index: "jpg 512 778 000000000.jpg cls ..."."""
    with index.open(encoding="utf-8") as lines:
        next(lines)  # version and number of samples
        for line in lines:
            parts = line.split()
            for extension, offset, size, name in zip(*[iter(parts)] * 4, strict=True):
                if extension != "cls":
                    yield name.removesuffix(f".{extension}"), int(offset), int(size)


def _data_uri(data: bytes) -> str:
    """A small JPEG, or a PNG of an image that is small already. `data` was decoded once by preprocess."""
    image = _rgb(Image.open(io.BytesIO(data)))
    exact = max(image.size) <= _SMALL_SIDE
    image.thumbnail((_MAX_SIDE, _MAX_SIDE))
    encoded = io.BytesIO()
    image.save(encoded, "PNG" if exact else "JPEG", quality=82)
    kind = "png" if exact else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(encoded.getvalue()).decode()}"


def _rgb(image: Image.Image) -> Image.Image:
    """Upright RGB, as the loader delivers it; 16-bit gray is cut to its upper 8 bits."""
    upright = ImageOps.exif_transpose(image)
    if upright.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8)).convert("RGB")
    return upright.convert("RGB")
