"""Decode every image fully before it is packed: orientation, damage that DALI stops at, sums over pixels."""

import io
import math
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import add
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from components.common.contracts.foreign import LFS_POINTER
from components.common.data.image_files import from_16_bit, open_image, upright

THUMBNAIL_SIDE = 48
"""px, of the gray thumbnails that images are compared by."""

# More pixels of one image say next to nothing more about a dataset, and counting all takes a fifth of decoding's time.
_PIXELS_PER_IMAGE = 10_000
_PIXELS_OF_THUMBNAIL = 25_000  # about: a thumbnail of all pixels of a photograph would take three times as long
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PREFIX = b"Exif\x00\x00"
_ENTRY_BYTES = 12
_ORIENTATION = 0x0112
_TURNED = range(2, 9)
_WEBP_FLAGS, _WEBP_HAS_EXIF = 20, 0x08  # place and bit
# Bytes of one value by the type's number.
_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
_SHORT, _TEXT, _RATIONAL = 3, 2, 5
# DALI reads these as such whatever their type is, and gives up the whole block where one lies outside of it.
_TEXTS = (0x010E, 0x010F, 0x0110, 0x0131, 0x0132, 0x8298)
_RATIONALS = {0x011A: 1, 0x011B: 1, 0x013E: 2, 0x013F: 6, 0x0211: 3, 0x0214: 6}  # and so many
# What Pillow, which checks here, and DALI, which decodes later, read alike: the member name that it gets. The others
# are packed as PNG, and so are files of which _is_read_alike says no.
_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp", "BMP": "", "TIFF": ""}
# TIFF holds more than pictures, such as 32-bit integers, whose scale nobody tells.
_TIFF_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "I;16", "I;16B")


class Rejected(Exception):
    """An image can't be used; the message is the reason."""


class PixelSums:
    """Exact sums: of how often each of the 256 values occurs in each channel.

    Of an image with 40,000 pixels or more, those on a regular grid are counted, at least 10,000, each for all that it
    stands for. Smaller images are counted in full.
    """

    def __init__(self) -> None:
        # By how many pixels one stands for, [3 x 256]: how often each value occurs.
        self._counts: dict[int, list[int]] = {}
        self.num_pixels = 0

    def add(self, image: Image.Image) -> None:
        """Count an image in RGB."""
        step = max(1, math.isqrt(image.width * image.height // _PIXELS_PER_IMAGE))
        across, down = min(step, image.width), min(step, image.height)
        weight = across * down
        if weight > 1:
            image = image.resize((image.width // across, image.height // down), Image.Resampling.NEAREST)
        histogram = image.histogram()
        before = self._counts.get(weight)
        self._counts[weight] = histogram if before is None else list(map(add, before, histogram))
        self.num_pixels += weight * image.width * image.height

    def values(self) -> tuple[float, float, float]:
        """Per channel, the sum of values in 0..1."""
        red, green, blue = (sum(map(int.__mul__, own, range(256))) / 255 for own in self._channels())
        return red, green, blue

    def squares(self) -> tuple[float, float, float]:
        """Per channel, the sum of squares of values in 0..1."""
        squares = [value * value for value in range(256)]
        red, green, blue = (sum(map(int.__mul__, own, squares)) / 255**2 for own in self._channels())
        return red, green, blue

    def _channels(self) -> list[list[int]]:
        total = [0] * 768
        for weight, counts in self._counts.items():
            total = [whole + weight * count for whole, count in zip(total, counts, strict=True)]
        return [total[:256], total[256:512], total[512:]]


class _Entry(NamedTuple):
    tag: int
    kind: int
    num: int
    place: int  # of the values, where they don't fit into the entry
    value: bytes  # the last four bytes of the entry


def check_exif(block: bytes) -> None:
    """See that there is a directory in which an orientation can be looked up.

    Args:
        block: EXIF data with or without its prefix; empty for none.

    Raises:
        Rejected: the block is damaged and speaks of an orientation.
    """
    tiff = block.removeprefix(_PREFIX)
    is_named = _ORIENTATION.to_bytes(2, "big") in tiff or _ORIENTATION.to_bytes(2, "little") in tiff
    if _directory(tiff) is None and is_named:
        raise Rejected(
            "damaged: its EXIF block is broken, and programs disagree which side of the picture is up; remove the block"
        )


def is_turned_alike(image_format: str, data: bytes, block: bytes, is_turned: bool) -> bool:
    """True if DALI turns a picture as Pillow does.

    Args:
        image_format: Pillow's name of it.
        data: the whole file.
        block: the EXIF data that Pillow found; empty for none.
        is_turned: True if Pillow turns it.
    """
    if not block and image_format != "WEBP":
        return not is_turned  # by what Pillow alone looks at, such as the text that ImageMagick puts into PNG files
    kind, num_blocks = _place_of_exif(image_format, data)
    if kind == "unread" or num_blocks > 1:
        return False
    tiff = block.removeprefix(_PREFIX)
    entries = list(_entries(tiff))
    said = [entry for entry in entries if entry.tag == _ORIENTATION]
    if not is_turned and not any(byte in _TURNED for entry in said for byte in entry.value):
        return True
    return kind == "read" and len(said) == 1 and all(_is_plain(entry, tiff) for entry in entries)


def _place_of_exif(image_format: str, data: bytes) -> tuple[str, int]:
    """Return how DALI treats EXIF blocks ("read", "unread" where it fails, or "ignored") and how many there are."""
    if image_format == "PNG":
        kinds = list(png_chunks(data))
        return "ignored" if b"acTL" in kinds else "read", kinds.count(b"eXIf")  # of an animation
    if image_format != "WEBP":
        segments = jpeg_segments(data) if image_format in ("JPEG", "MPO") else ()
        return "read", sum(marker == 0xE1 and data.startswith(_PREFIX, at) for marker, at in segments)
    return _place_in_webp(data)


def _place_in_webp(data: bytes) -> tuple[str, int]:
    chunks = list(webp_chunks(data))
    kinds = [kind for kind, _ in chunks]
    num_blocks = kinds.count(b"EXIF")
    if kinds[:1] != [b"VP8X"] or not data[_WEBP_FLAGS] & _WEBP_HAS_EXIF:
        return "ignored", num_blocks
    # Looking for the block, DALI does not skip the byte that fills up a chunk of odd length, and gets lost.
    if not num_blocks or any(length % 2 for _, length in chunks[: kinds.index(b"EXIF")]):
        return "unread", num_blocks
    return "ignored" if b"ANIM" in kinds else "read", num_blocks


def _directory(tiff: bytes) -> tuple[str, int, int] | None:
    """Byte order, place and number of entries; None where they are not there."""
    order = {b"II*\x00": "<", b"MM\x00*": ">"}.get(tiff[:4])
    if order is None or len(tiff) < 8:
        return None
    (start,) = struct.unpack_from(f"{order}I", tiff, 4)
    if start < 8 or start + 2 > len(tiff):
        return None
    (num,) = struct.unpack_from(f"{order}H", tiff, start)
    return (order, start + 2, num) if start + 2 + num * _ENTRY_BYTES <= len(tiff) else None


def _entries(tiff: bytes) -> Iterator[_Entry]:
    order, start, num = _directory(tiff) or ("<", 0, 0)
    for at in range(start, start + num * _ENTRY_BYTES, _ENTRY_BYTES):
        tag, kind, num, place = struct.unpack_from(f"{order}HHII", tiff, at)
        yield _Entry(tag, kind, num, place, tiff[at + 8 : at + _ENTRY_BYTES])


def _is_plain(entry: _Entry, tiff: bytes) -> bool:
    """True if every program reads an entry alike."""
    if entry.tag == _ORIENTATION:
        return (entry.kind, entry.num) == (_SHORT, 1)
    if entry.kind not in _BYTES or (entry.tag in _TEXTS and entry.kind != _TEXT):
        return False
    if entry.tag in _RATIONALS and (entry.kind, entry.num) != (_RATIONAL, _RATIONALS[entry.tag]):
        return False
    num_bytes = _BYTES[entry.kind] * entry.num
    return num_bytes <= 4 or entry.place + num_bytes <= len(tiff)


def check_structure(image_format: str, data: bytes) -> None:
    """Walk through a file's parts.

    Args:
        image_format: Pillow's name of it.
        data: the whole file.

    Raises:
        Rejected: a part is missing, cut or damaged.
    """
    parts: Callable[[bytes], Iterator[object]] | None
    parts = {"PNG": png_chunks, "JPEG": jpeg_segments, "MPO": jpeg_segments}.get(image_format)
    if parts is not None:
        for _ in parts(data):
            pass


def png_chunks(data: bytes) -> Iterator[bytes]:
    """The kind of each chunk.

    Raises:
        Rejected: a chunk is cut, or its checksum wrong, before the end of the picture.
    """
    position = len(_PNG_SIGNATURE)
    while True:
        length, kind = int.from_bytes(data[position : position + 4]), data[position + 4 : position + 8]
        checksum = data[position + 8 + length : position + 12 + length]
        if len(checksum) < 4:
            raise Rejected("damaged: the end of the PNG is missing")
        if zlib.crc32(data[position + 4 : position + 8 + length]) != int.from_bytes(checksum):
            raise Rejected(f"damaged: the checksum of the PNG's chunk {kind!r} is wrong")
        yield kind
        if kind == b"IEND":
            return
        position += 12 + length


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int]]:
    """The marker of each segment before the picture itself, and where its content begins.

    Raises:
        Rejected: what follows a segment is no marker.
    """
    position = 2  # after the start-of-image marker
    while data[position : position + 2] != b"\xff\xda":  # start of scan
        if data[position : position + 1] != b"\xff":
            raise Rejected(f"damaged: no JPEG marker at byte {position}")
        marker = data[position + 1 : position + 2]
        if marker == b"\xff":
            position += 1  # a fill byte
        elif marker < b"\xc0":
            raise Rejected(f"damaged: no JPEG marker at byte {position}")
        else:
            yield marker[0], position + 4
            position += 2 + int.from_bytes(data[position + 2 : position + 4])


def webp_chunks(data: bytes) -> Iterator[tuple[bytes, int]]:
    """The kind of each chunk and its bytes, as far as they are whole."""
    position = 12  # after RIFF, a length and WEBP
    while True:
        length = int.from_bytes(data[position + 4 : position + 8], "little")
        end = position + 8 + length
        if position + 8 > len(data) or end > len(data):
            return
        yield data[position : position + 4], length
        position = end + length % 2


def decode(data: bytes, max_pixels: int) -> tuple[str, Image.Image]:
    """Decode fully. Returns the member's extension and the image as the loader delivers it: upright, RGB.

    The extension is empty where the file can't be packed as it is: see `as_png`.

    Raises:
        Rejected: it can't be used.
    """
    with _rejecting(data):
        image = open_image(data)
        if image.width * image.height > max_pixels:
            raise Rejected(f"{image.width}x{image.height} has more than max_pixels = {max_pixels} pixels")
        if image.format == "TIFF" and image.mode not in _TIFF_MODES:
            raise Rejected(f"TIFF of mode {image.mode} is not supported; convert it to 8 bits per channel")
        kind, is_alike = str(image.format), _is_read_alike(image)
        check_structure(kind, data)
        image.load()
        block = image.info.get("exif", b"")  # of a PNG file it may come behind the picture
        check_exif(block)
        turned = upright(image)
        is_alike &= is_turned_alike(kind, data, block, turned is not image)
        extension = _EXTENSIONS[kind] if is_alike else ""
        if turned.mode.startswith("I;16"):
            return extension, from_16_bit(turned)
        return extension, turned if turned.mode == "RGB" else turned.convert("RGB")


def decode_mask(data: bytes, size: tuple[int, int]) -> Image.Image:
    """Decode a mask, whose values are the pixels of a gray image or the numbers of a palette's colours.

    Args:
        data: the file's content.
        size: width and height of its image, upright.

    Returns:
        An image of mode L or P.

    Raises:
        Rejected: it is no mask of that image.
    """
    with _rejecting(data):
        mask = open_image(data)
        # Pillow scales the values of gray images of fewer bits, and not the numbers of a palette's colours.
        raw_mode = mask.tile[0].args if mask.format == "PNG" else ""
        if (raw_mode != "L" and mask.mode != "P") or mask.format != "PNG":
            kind = f"{mask.format} of {raw_mode or mask.mode}"
            raise Rejected(f"a {kind}; write it as PNG of 8-bit gray or with a palette")
        if mask.size != size:
            turned = "; it does not heed the EXIF orientation" if (mask.height, mask.width) == size else ""
            raise Rejected(
                f"mask of another size: {mask.width}x{mask.height}, an image of {size[0]}x{size[1]} pixels{turned}"
            )
        check_structure("PNG", data)
        mask.load()
        return mask


@contextmanager
def _rejecting(data: bytes) -> Iterator[None]:
    """Turn what goes wrong with a file into Rejected."""
    if not data:
        raise Rejected("empty file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Rejected:
        raise
    except MemoryError:  # what a damaged file asks for, too
        raise Rejected(f"takes more memory than is left ({len(data):,} bytes to decode)") from None
    except UnidentifiedImageError:
        if data.startswith(LFS_POINTER):
            raise Rejected("a pointer of Git LFS, not the image itself; run `git lfs pull` in its repository") from None
        raise Rejected("not an image, or of a format that is not read; convert it to JPEG or PNG") from None
    except Exception as error:  # damaged data: mostly OSError, but Pillow's parsers let everything through
        raise Rejected(f"damaged: {error}") from None


def _is_read_alike(image: Image.Image) -> bool:
    """True if DALI makes the same of a JPEG or PNG file as Pillow."""
    if image.mode == "CMYK" and "adobe" not in image.info:  # DALI takes the inks for inverted, as Adobe writes them
        return False
    return not image.info.get("default_image")  # of an animation, shown where only still pictures are; DALI skips it


def as_png(image: Image.Image) -> bytes:
    """Encode as PNG, which BMP, TIFF and the few other files become that DALI reads in its own way."""
    encoded = io.BytesIO()
    image.info.clear()  # colour profiles and the like, which nobody reads later
    image.save(encoded, "PNG", compress_level=1)
    return encoded.getvalue()


def gray_thumbnail(image: Image.Image) -> bytes:
    """48x48 bytes, whatever the image's shape: what near-duplicates are found by.

    Args:
        image: upright, RGB.
    """
    step = round(math.sqrt(image.width * image.height / _PIXELS_OF_THUMBNAIL)) or 1
    across, down = min(step, image.width), min(step, image.height)
    width, height = image.width // across, image.height // down
    if step > 1:
        image = image.resize((width, height), Image.Resampling.NEAREST, (0, 0, width * across, height * down))
    across, down = max(1, width // THUMBNAIL_SIDE), max(1, height // THUMBNAIL_SIDE)
    gray = image.reduce((across, down)).convert("L")  # its last row and column can stand for less than the others
    box = (0, 0, width / across, height / down)
    return gray.resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.BILINEAR, box).tobytes()


def shrink(image: Image.Image, max_short_side: int, quality: int) -> tuple[bytes, Image.Image]:
    """An image whose shorter side is scaled down to `max_short_side`, as JPEG and as what that decodes to.

    Args:
        image: upright, RGB.
        max_short_side: px; shorter than the image's.
        quality: of the JPEG, 1 to 100.
    """
    scale = max_short_side / min(image.size)
    width, height = (max(max_short_side, round(side * scale)) for side in image.size)
    encoded = io.BytesIO()
    image.resize((width, height), Image.Resampling.LANCZOS).save(encoded, "JPEG", quality=quality)
    return encoded.getvalue(), open_image(encoded.getvalue()).convert("RGB")
