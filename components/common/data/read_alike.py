"""The files that Pillow, which checks images, and DALI, which decodes them later, read alike; PNG of the others."""

import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from PIL import Image, UnidentifiedImageError

from components.common.contracts.errors import UserError
from components.common.contracts.foreign import LFS_POINTER, MAX_ASPECT_RATIO, MAX_PIXELS
from components.common.data.image_files import TIFF_MODES, encode_image, open_image, orientation, upright_rgb

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PREFIX = b"Exif\x00\x00"
_ENTRY_BYTES = 12
_ORIENTATION = 0x0112
_TURNED = range(2, 9)
_WEBP_FLAGS, _WEBP_HAS_EXIF = 20, 0x08  # place and bit
_MAX_SCANS = 100  # of a JPEG, as libtiff allows: each of some bytes passes over the whole picture; encoders write 10
_MARKER = re.compile(rb"\xff+([^\x00\x01\xd0-\xd7\xff])")  # with a length behind it
# Bytes of one value by the type's number.
_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4}
_SHORT, _TEXT, _RATIONAL = 3, 2, 5
# DALI reads these as such whatever their type is, and gives up the whole block where one lies outside of it.
_TEXTS = (0x010E, 0x010F, 0x0110, 0x0131, 0x0132, 0x8298)
_RATIONALS = {0x011A: 1, 0x011B: 1, 0x013E: 2, 0x013F: 6, 0x0211: 3, 0x0214: 6}  # and so many
# What Pillow, which checks here, and DALI, which decodes later, read alike: the member name that it gets. The others
# are packed as PNG, and so are files of which is_read_alike says no.
EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp", "BMP": "", "TIFF": ""}


_ACCEPTED = "take a JPEG, PNG, WebP, BMP or TIFF of 8 bits per channel"


class Rejected(Exception):
    """An image can't be used; the message is the reason."""


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


def check_scans(image_format: str, data: bytes) -> None:
    """See that decoding ends.

    Raises:
        Rejected: a JPEG has too many scans before its end.
    """
    if image_format not in ("JPEG", "MPO") or data.count(b"\xff\xda") <= _MAX_SCANS:
        return
    num_scans, position = 0, 2
    while (found := _MARKER.search(data, position)) and found[1] != b"\xd9":  # behind which other files may lie
        num_scans += found[1] == b"\xda"
        position = found.end() + int.from_bytes(data[found.end() : found.end() + 2])
    if num_scans > _MAX_SCANS:
        raise Rejected(f"damaged: {num_scans:,} scans, and a JPEG may have {_MAX_SCANS}")


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


def is_read_alike(image: Image.Image, data: bytes) -> bool:
    """True if DALI makes the same of a JPEG, PNG or WebP file as Pillow.

    Args:
        image: opened and loaded by Pillow, since in a PNG file the EXIF block may come behind the picture.
        data: the whole file.
    """
    if image.mode == "CMYK" and "adobe" not in image.info:  # DALI takes the inks for inverted, as Adobe writes them
        return False
    if image.info.get("default_image"):  # of an animation, shown where only still pictures are; DALI skips it
        return False
    return is_turned_alike(str(image.format), data, image.info.get("exif", b""), orientation(image) in _TURNED)


def decode(data: bytes, max_pixels: int) -> tuple[str, Image.Image]:
    """Decode fully. Returns the member's extension and the image as the loader delivers it: upright, RGB.

    The extension is empty where the file can't be packed as it is: see `as_png`.

    Raises:
        Rejected: it can't be used.
    """
    with rejecting(data):
        image = open_image(data)
        if image.width * image.height > max_pixels:
            raise Rejected(f"{image.width}x{image.height} has more than max_pixels = {max_pixels} pixels")
        if max(image.size) > MAX_ASPECT_RATIO * min(image.size):
            raise Rejected(f"{image.width}x{image.height} has a side of more than {MAX_ASPECT_RATIO} times the other")
        if image.format == "TIFF" and image.mode not in TIFF_MODES:
            raise Rejected(f"TIFF of mode {image.mode} is not supported; convert it to 8 bits per channel")
        check_structure(str(image.format), data)
        check_scans(str(image.format), data)
        image.load()
        check_exif(image.info.get("exif", b""))
        extension = EXTENSIONS[str(image.format)] if is_read_alike(image, data) else ""
        return extension, upright_rgb(image)


@contextmanager
def rejecting(data: bytes) -> Iterator[None]:
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


def as_png(image: Image.Image) -> bytes:
    """Encode as PNG, which BMP, TIFF and the few other files become that DALI reads in its own way."""
    image.info.clear()  # colour profiles and the like, which nobody reads later
    return encode_image(image, "PNG", compress_level=1)


def check_encoded(data: bytes, name: str) -> tuple[bytes, int]:
    """Refuse what DALI stops at without a word that helps; what it reads otherwise than preprocess becomes PNG.

    Args:
        data: a file's content.
        name: what to call it: a path, or which one of several images it is.

    Returns:
        The file, or a PNG of what preprocess would make of it, and how many pixels it has.

    Raises:
        UserError: it is not an image that preprocess takes.
    """
    try:
        with open_image(data) as image:
            if image.format == "TIFF" and image.mode not in TIFF_MODES:
                message = f"{name} is a TIFF of mode {image.mode}, which is not supported; {_ACCEPTED}"
                raise UserError(message, code="unsupported-tiff")
            if (num_pixels := image.width * image.height) > MAX_PIXELS:
                raise UserError(
                    f"{name} is too large: {num_pixels:,} pixels, at most {MAX_PIXELS:,} are taken; make it smaller",
                    code="image-too-large",
                )
            if max(image.size) > MAX_ASPECT_RATIO * min(image.size):
                raise UserError(
                    f"{name} has {image.width}x{image.height} pixels, and a side may be up to {MAX_ASPECT_RATIO} times "
                    "as long as the other; crop it",
                    code="image-too-long",
                )
            check_scans(str(image.format), data)
            image.load()
            is_alike = EXTENSIONS[str(image.format)] and is_read_alike(image, data)
            return (data if is_alike else as_png(upright_rgb(image)), num_pixels)
    except UserError:
        raise
    except UnidentifiedImageError:
        if data.startswith(LFS_POINTER):
            text = f"{name} is a pointer of Git LFS, not the image itself; run `git lfs pull` in its repository"
            raise UserError(text, code="git-lfs-pointer") from None
        raise UserError(f"{name} is not an image; {_ACCEPTED}", code="not-an-image") from None
    except Image.DecompressionBombError:
        message = f"{name} is too large: at most {MAX_PIXELS:,} pixels are taken; make it smaller"
        raise UserError(message, code="image-too-large") from None
    except Exception as error:  # Pillow's parsers let everything through
        reason = str(error).removeprefix("damaged: ")
        raise UserError(f"{name} is damaged: {reason}; save it again as JPEG or PNG", code="damaged-image") from None
