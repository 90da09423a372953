"""Encoded images: the formats that preprocess takes, the errors about others, and where they lie in a shard."""

import io
import json
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image, ImageFile

from components.common.contracts.errors import UserError
from components.common.contracts.transforms import TransformSpec

IMAGE_EXTENSIONS = ("jpg", "png", "webp", "bmp", "tif")  # of members of a shard
# What preprocess takes into a dataset. TIFF also holds what is no picture, such as integers whose scale nobody tells.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF")
TIFF_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "I;16", "I;16B")
_TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_TURNING = (5, 6, 7, 8)  # orientations that swap width and height


def open_image(data: bytes) -> ImageFile.ImageFile:
    """Have Pillow read the header. None of its other plugins, of which there are forty, sees the bytes.

    Raises:
        UnidentifiedImageError: it is no image of the formats that are taken.
        Exception: it is damaged: Pillow's parsers let everything through.
    """
    return Image.open(io.BytesIO(data), formats=_FORMATS)


def orientation(image: Image.Image) -> int:
    """Return the EXIF orientation that DALI applies, 1 to 8; a damaged EXIF block says nothing."""
    for xmp in ("xmp", "XML:com.adobe.xmp"):  # Pillow looks for an orientation there too, and DALI does not
        image.info.pop(xmp, None)
    try:
        found = image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # Pillow's EXIF parser raises anything
        return 1
    return int(found) if found in _TRANSPOSITIONS else 1  # whatever the file says


def upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation, as DALI does."""
    turn = _TRANSPOSITIONS.get(orientation(image))
    return image if turn is None else image.transpose(turn)


def from_16_bit(gray: Image.Image) -> Image.Image:
    """Take the upper bytes, which come first only in I;16B. Without numpy, which every worker would load."""
    upper = gray.tobytes()[gray.mode != "I;16B" :: 2]
    return Image.frombytes("L", gray.size, upper).convert("RGB")


def upright_size(data: bytes) -> tuple[int, int]:
    """Width and height of an image that was checked, upright, without decoding it."""
    image = open_image(data)
    width, height = image.size
    is_turned = orientation(image) in _TURNING and image.format != "TIFF"  # whose size Pillow has turned already
    return (height, width) if is_turned else (width, height)


def upright_rgb(image: Image.Image) -> Image.Image:
    """Upright RGB of an image that is loaded, where Pillow turns a TIFF by itself: as DALI delivers it."""
    turned = upright(image)
    if turned.mode.startswith("I;16"):
        return from_16_bit(turned)
    return turned if turned.mode == "RGB" else turned.convert("RGB")


def rgb(data: bytes) -> Image.Image:
    """Decode an image that was checked: upright RGB."""
    opened = open_image(data)
    opened.load()
    return upright_rgb(opened)


def as_seen(image: Image.Image, transform: TransformSpec) -> Image.Image:
    """About what a model sees of an image: resized, and its central square. For pictures only."""
    scale = transform.resize_size / min(image.size)
    image = image.resize([max(transform.crop_size, round(side * scale)) for side in image.size])
    left, top = ((side - transform.crop_size) // 2 for side in image.size)
    return image.crop((left, top, left + transform.crop_size, top + transform.crop_size))


def encode_image(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The content of a file of this image, such as one of the kind "JPEG" with a quality."""
    encoded = io.BytesIO()
    image.save(encoded, kind, **options)
    return encoded.getvalue()


def thumbnail(image: Image.Image, *, max_side: int, exact_side: int) -> bytes:
    """A small JPEG of an image in RGB; a PNG of one whose sides have `exact_side` pixels or less."""
    is_small = max(image.size) <= exact_side
    image.thumbnail((max_side, max_side))
    return encode_image(image, "PNG" if is_small else "JPEG", quality=80)


def decoder_reason(error: RuntimeError) -> str:
    """The reason in what DALI says, without its pipeline and operators."""
    return " ".join(str(error).rpartition("encountered:")[2].partition("Current pipeline")[0].split())


def undecodable(error: RuntimeError, name: str) -> UserError:
    """The error about an image that DALI refuses all the same."""
    return UserError(
        f"{name} can't be decoded ({decoder_reason(error)}); save it again as JPEG or PNG", code="damaged-image"
    )


def read_samples(shard: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Key, and members by extension, of the samples of a shard whose key is wanted.

    By its DALI index, of which a line is "jpg 512 778 000000000.jpg cls ...": extension, offset, size and name of each.
    """
    with shard.with_suffix(".idx").open(encoding="utf-8") as lines, shard.open("rb") as archive:
        next(lines)  # version and number of samples
        for line in lines:
            parts = list(zip(*[iter(line.split())] * 4, strict=True))
            key = parts[0][3].removesuffix(f".{parts[0][0]}")
            if wanted(key):
                members = {}
                for extension, offset, size, _ in parts:
                    archive.seek(int(offset))
                    members[extension] = archive.read(int(size))
                yield key, members


def read_images(shards: Iterable[Path], keys: Container[str]) -> Iterator[tuple[str, bytes]]:
    """Key and file of these images, from the shards that hold them."""
    for shard in shards:
        for key, members in read_samples(shard, lambda key: key in keys):
            yield from ((key, data) for extension, data in members.items() if extension in IMAGE_EXTENSIONS)


NEAR_DUPLICATES = "near_duplicates.jsonl"
"""Pairs of images of a dataset that are the same but for size, compression, brightness, a mirror or a crop."""


def near_duplicates_of_training(folder: Path) -> list[int]:
    """Positions in val.jsonl of the images that have a near-duplicate in the training split."""
    with (folder / NEAR_DUPLICATES).open("rb") as lines:
        pairs = [json.loads(line)["images"] for line in lines]
    keys = {other["key"] for one, other in pairs if (one["split"], other["split"]) == ("train", "val")}
    with (folder / "val.jsonl").open("rb") as lines:
        entries = [(entry["key"], entry["sha256"]) for entry in map(json.loads, lines)]
    contents = {content for key, content in entries if key in keys}  # a file that is there twice is named once
    return [position for position, (_, content) in enumerate(entries) if content in contents]


def read_listing(file: Path, positions: Collection[int]) -> dict[int, dict[str, Any]]:
    """Entries of a split's listing by their positions in it, read line by line."""
    with file.open("rb") as lines:
        return {position: json.loads(line) for position, line in enumerate(lines) if position in positions}
