"""Damage that Pillow reads past and DALI stops at, or reads in another way: one such file would end a training.

What is checked here was found by mutating files of every format (tests/fuzz).
"""

import zlib

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_EXIF_PREFIX = b"Exif\x00\x00"
_IFD_ENTRY_BYTES = 12
_ORIENTATION = 0x0112


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
    if image_format == "PNG":
        _check_png(data)
    elif image_format in ("JPEG", "MPO"):
        _check_jpeg(data)


def _check_png(data: bytes) -> None:
    """Every chunk is whole, and its checksum right, up to the end of the picture."""
    position = len(_PNG_SIGNATURE)
    while True:
        length, kind = int.from_bytes(data[position : position + 4]), data[position + 4 : position + 8]
        checksum = data[position + 8 + length : position + 12 + length]
        if len(checksum) < 4:
            raise Rejected("damaged: the end of the PNG is missing")
        if zlib.crc32(data[position + 4 : position + 8 + length]) != int.from_bytes(checksum):
            raise Rejected(f"damaged: the checksum of the PNG's chunk {kind!r} is wrong")
        if kind == b"IEND":
            return
        position += 12 + length


def _check_jpeg(data: bytes) -> None:
    """Markers follow each other up to the picture itself."""
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
            position += 2 + int.from_bytes(data[position + 2 : position + 4])


def check_exif(block: bytes) -> None:
    """See that the orientation is beyond doubt: of a damaged block, programs read different things.

    Args:
        block: EXIF data with or without its prefix; empty for none.

    Raises:
        Rejected: the block is damaged and speaks of an orientation.
    """
    tiff = block.removeprefix(_EXIF_PREFIX)
    order = {b"II*\x00": "little", b"MM\x00*": "big"}.get(tiff[:4])
    if order is not None:
        start = int.from_bytes(tiff[4:8], order)  # type: ignore[arg-type]  # one of the two
        count = int.from_bytes(tiff[start : start + 2], order)  # type: ignore[arg-type]
        if start >= 8 and start + 2 + count * _IFD_ENTRY_BYTES <= len(tiff):
            return
    if any(_ORIENTATION.to_bytes(2, order) in tiff for order in ("big", "little")):
        raise Rejected(
            "damaged: its EXIF block is broken, and programs disagree which side of the picture is up; remove the block"
        )
