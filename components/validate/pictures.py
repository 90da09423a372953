"""Thumbnails of validation images, taken from the shards."""

import base64
import io
from collections.abc import Iterable

import numpy as np
from PIL import Image, ImageOps

from components.common.artifacts import Artifact, DatasetManifest
from components.common.image_files import open_image
from components.common.shard_index import image_places

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
            for key, offset, size in image_places(data.file(shard).with_suffix(".idx")):
                if key in wanted:
                    archive.seek(offset)
                    found[key] = _data_uri(archive.read(size))
    return found


def _data_uri(data: bytes) -> str:
    """A small JPEG, or a PNG of an image that is small already. `data` was decoded once by preprocess."""
    image = _rgb(open_image(data))
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
