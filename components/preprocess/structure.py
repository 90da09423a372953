"""Damage that Pillow reads past and DALI stops at, or reads in another way: one such file would end a training.

What is checked here was found by mutating files of every format (tests/fuzz).
"""

import zlib
from collections.abc import Callable, Iterator

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Rejected(Exception):
    """An image can't be used; the message is the reason."""


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
