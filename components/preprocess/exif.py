"""Which side of a picture is up, by its EXIF block: where Pillow and DALI may read different things of it.

What is checked here was found by mutating files of every format (tests/fuzz), and on files that such programs write.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from components.preprocess.structure import Rejected, jpeg_segments, png_chunks, webp_chunks

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
    if _directory(tiff) is None and _speaks_of_orientation(tiff):
        raise Rejected(
            "damaged: its EXIF block is broken, and programs disagree which side of the picture is up; remove the block"
        )


def is_turned_alike(image_format: str, data: bytes, block: bytes, is_turned: bool) -> bool:
    """Whether DALI turns a picture as Pillow does.

    Args:
        image_format: Pillow's name of it.
        data: the whole file.
        block: the EXIF data that Pillow found; empty for none.
        is_turned: whether Pillow turns it.
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
    """Where DALI finds EXIF blocks: "read", "unread" where it fails, or "ignored"; and how many there are."""
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
    # Looking for the block, DALI goes on behind a chunk of odd length without the byte that fills it up, and gets lost.
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
    """Whether every program reads an entry alike."""
    if entry.tag == _ORIENTATION:
        return (entry.kind, entry.num) == (_SHORT, 1)
    if entry.kind not in _BYTES or (entry.tag in _TEXTS and entry.kind != _TEXT):
        return False
    if entry.tag in _RATIONALS and (entry.kind, entry.num) != (_RATIONAL, _RATIONALS[entry.tag]):
        return False
    num_bytes = _BYTES[entry.kind] * entry.num
    return num_bytes <= 4 or entry.place + num_bytes <= len(tiff)


def _speaks_of_orientation(tiff: bytes) -> bool:
    return any(_ORIENTATION.to_bytes(2, order) in tiff for order in ("big", "little"))
