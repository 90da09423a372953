"""Orientations that Pillow and DALI read in different ways: what is packed shows the same side up to both."""

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageOps

from components.common.contracts.transforms import TransformSpec
from components.common.data.loader import load_image
from components.preprocess.decoding import as_png, decode

SIDE = 24
PLAIN = TransformSpec(resize_size=SIDE, crop_size=SIDE, mean=(0, 0, 0), std=(1 / 255, 1 / 255, 1 / 255))
MAKE, X_RESOLUTION, ORIENTATION, SOFTWARE = 0x10F, 0x11A, 0x112, 0x131
TURNED = (ORIENTATION, 3, 1, struct.pack(">HH", 6, 0))
FAR = struct.pack(">I", 5000)  # a place behind the end


def block(*entries: tuple[int, int, int, bytes]) -> bytes:
    """A big-endian EXIF block of entries: tag, type, count, value."""
    listed = b"".join(struct.pack(">HHI", *entry[:3]) + entry[3] for entry in entries)
    return b"Exif\0\0MM\0*" + struct.pack(">IH", 8, len(entries)) + listed + bytes(4)


def saved(kind: str, **options: object) -> bytes:
    y, x = np.mgrid[0:SIDE, 0:40]
    picture = Image.fromarray(np.stack([6 * x, 10 * y, 3 * (x + y)], axis=2).astype(np.uint8))
    encoded = io.BytesIO()
    picture.save(encoded, kind, **options)
    return encoded.getvalue()


def jpeg(*blocks: bytes) -> bytes:
    data = saved("JPEG", quality=95)
    segments = b"".join(b"\xff\xe1" + struct.pack(">H", len(one) + 2) + one for one in blocks)
    return data[:20] + segments + data[20:]


def png(*chunks: tuple[bytes, bytes], before: bytes = b"IDAT") -> bytes:
    data = saved("PNG")
    place = data.index(before) - 4
    added = b"".join(
        struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )
    return data[:place] + added + data[place:]


def imagemagick_png() -> bytes:
    exif = block(TURNED)
    return png((b"tEXt", b"Raw profile type exif\0\nexif\n%8d\n" % len(exif) + exif.hex().encode() + b"\n"))


def webp_without_its_block() -> bytes:
    data = saved("WEBP", quality=95, exif=block(TURNED))
    return data.replace(b"EXIF", b"EXI_")


def webp_without_its_flag() -> bytes:
    data = saved("WEBP", quality=95, exif=block(TURNED))
    return data[:20] + bytes([data[20] & ~0x08]) + data[21:]


AS_IT_IS: dict[str, Callable[[], bytes]] = {
    "turned": lambda: jpeg(block(TURNED)),
    "with others": lambda: jpeg(
        block((MAKE, 2, 4, b"abc\0"), TURNED, (X_RESOLUTION, 5, 1, struct.pack(">I", 8)), (0xC000, 1, 1, bytes(4)))
    ),
    "upright, damaged elsewhere": lambda: jpeg(
        block((MAKE, 2, 40, FAR), (ORIENTATION, 3, 1, struct.pack(">HH", 1, 0)))
    ),
    "PNG": lambda: png((b"eXIf", block(TURNED)[6:])),
    "PNG, behind the picture": lambda: png((b"eXIf", block(TURNED)[6:]), before=b"IEND"),
    "lossy WebP": lambda: saved("WEBP", quality=95, exif=block(TURNED)),
    "lossless WebP": lambda: saved("WEBP", lossless=True),
    "even WebP": lambda: saved("WEBP", quality=95, icc_profile=b"even", exif=block(TURNED)),
    "odd WebP without a block": lambda: saved("WEBP", quality=95, icc_profile=b"odd"),
    "WebP that does not say it has a block": webp_without_its_flag,
}
AS_PNG: dict[str, Callable[[], bytes]] = {
    "long": lambda: jpeg(block((ORIENTATION, 4, 1, struct.pack(">I", 6)))),
    "many": lambda: jpeg(block((ORIENTATION, 3, 8193, TURNED[3]))),
    "no type": lambda: jpeg(block((ORIENTATION, 0, 1, TURNED[3]))),
    "two blocks": lambda: jpeg(block(TURNED), block((ORIENTATION, 3, 1, struct.pack(">HH", 1, 0)))),
    "a text outside": lambda: jpeg(block((MAKE, 2, 40, FAR), TURNED)),
    "a later text outside": lambda: jpeg(block(TURNED, (SOFTWARE, 2, 40, FAR))),
    "a text of another type": lambda: jpeg(block((MAKE, 3, 3, FAR), TURNED)),
    "a fraction of another type": lambda: jpeg(block(TURNED, (X_RESOLUTION, 3, 1, struct.pack(">HH", 72, 0)))),
    "ImageMagick's PNG": imagemagick_png,
    "PNG with two blocks": lambda: png(*2 * [(b"eXIf", block(TURNED)[6:])]),
    "odd WebP": lambda: saved("WEBP", quality=95, icc_profile=b"odd", exif=block(TURNED)),
    "odd WebP, upright": lambda: saved("WEBP", quality=95, icc_profile=b"odd", exif=block((MAKE, 2, 4, b"abc\0"))),
    "animated PNG": lambda: saved(
        "PNG", save_all=True, append_images=[Image.new("RGB", (40, SIDE))], exif=block(TURNED)
    ),
    "WebP that only says it has a block": webp_without_its_block,
    "animated WebP": lambda: saved(
        "WEBP", save_all=True, append_images=[Image.new("RGB", (40, SIDE))], lossless=True, exif=block(TURNED)
    ),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about damaged blocks
@pytest.mark.parametrize(
    ("make", "becomes_png"),
    [
        *[pytest.param(make, False, id=name) for name, make in AS_IT_IS.items()],
        *[pytest.param(make, True, id=f"{name} becomes PNG") for name, make in AS_PNG.items()],
    ],
)
def test_the_loader_shows_the_side_up_that_preprocess_saw(make: Callable[[], bytes], becomes_png: bool) -> None:
    data = make()
    extension, image = decode(data, max_pixels=1_000_000)
    assert (extension == "") == becomes_png
    with Image.open(io.BytesIO(data)) as opened:
        opened.load()
        expected = ImageOps.exif_transpose(opened).convert("RGB")
    assert image.tobytes() == expected.tobytes()
    seen = load_image(as_png(image) if becomes_png else data, PLAIN)[0]  # [3, 24, 24]
    left, top = ((side - SIDE) // 2 for side in expected.size)
    pixels = np.asarray(expected.crop((left, top, left + SIDE, top + SIDE))).transpose(2, 0, 1)
    assert np.abs(seen - pixels).max() <= 3
