"""Damaged image files: preprocess must reject each, or DALI must decode it to the size that preprocess noted.

python -m benchmarks.fuzz images --machine NAME --num-cases 10000
"""

import io
import random
from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image

from components.common.data.read_alike import Rejected, as_png, decode
from tests.fuzz.running import limited

BATCH = 50


@cache
def originals() -> list[bytes]:
    """Small files of the kinds that preprocess takes."""
    chance = np.random.default_rng(0)
    files = []
    for height, width in ((24, 40), (33, 17), (64, 64)):
        y, x = np.mgrid[0:height, 0:width]
        pixels = np.stack([4 * x, 4 * y, 2 * (x + y)], axis=2) + chance.integers(0, 20, (height, width, 3))
        color = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        exif = Image.Exif()
        exif[0x0112] = 6  # orientation
        camera = Image.Exif()
        camera.update({0x0112: 6, 0x010F: "a camera", 0x011A: 72.0, 0x0131: "a program"})
        ways: list[tuple[Image.Image, str, dict[str, object]]] = [
            (color, "JPEG", {"quality": 90}),
            (color, "JPEG", {"quality": 75, "progressive": True}),
            (color, "JPEG", {"quality": 90, "restart_marker_blocks": 2, "exif": exif}),
            (color, "JPEG", {"exif": camera}),
            (color.convert("L"), "JPEG", {}),
            (color.convert("CMYK"), "JPEG", {}),
            (color, "PNG", {}),
            (color.convert("RGBA"), "PNG", {}),
            (color.convert("P"), "PNG", {}),
            (Image.fromarray((pixels[:, :, 0] * 200).astype(np.uint16)), "PNG", {}),
            (color, "PNG", {"exif": exif}),
            (color, "WEBP", {"quality": 80}),
            (color, "WEBP", {"quality": 80, "exif": camera}),
            (color, "WEBP", {"lossless": True}),
            (color, "WEBP", {"lossless": True, "exif": exif}),
            (color.convert("RGBA"), "WEBP", {"quality": 80, "exif": exif}),
            (color, "BMP", {}),
            (color.convert("L"), "BMP", {}),
            (color, "TIFF", {}),
            (color, "TIFF", {"compression": "tiff_lzw"}),
        ]
        for image, kind, options in ways:
            encoded = io.BytesIO()
            image.save(encoded, kind, **options)
            files.append(encoded.getvalue())
    return files


def mutate(chance: random.Random, data: bytearray, donors: Sequence[bytes]) -> None:
    """Change, cut, repeat or put in some bytes, or swap them for a donor's."""
    start = chance.randrange(len(data)) if data else 0
    end = min(len(data), start + chance.choice((1, 2, 8, 64, 512, 2048)))
    way = chance.randrange(8)
    if way == 0 and data:
        data[start] ^= 1 << chance.randrange(8)
    elif way == 1 and data:
        data[start] = chance.choice((0, 0x20, 0x30, 0x39, 0xFF, 0xD8, 0xD9, 0xDA, 0xC0, chance.randrange(256)))
    elif way == 2:
        data[start:end] = chance.choice((b"\0", b"\xff", b"7", b"9", b"\x80")) * (end - start)
    elif way == 3:
        del data[start:]
    elif way == 4:
        del data[start:end]
    elif way == 5:
        data[start:start] = data[start:end] * chance.choice((1, 1, 40))
    elif way == 6:
        data[start:start] = chance.randbytes(end - start)
    else:
        data[start:end] = chance.choice(donors)[start:end]


def damaged(number: int, seed: int, files: list[bytes]) -> bytes:
    """Case `number`: one of the files, damaged."""
    chance = random.Random(f"{seed}:{number}")
    data = bytearray(chance.choice(files))
    for _ in range(chance.choice((1, 1, 1, 2, 4, 16))):
        mutate(chance, data, files)
    return bytes(data)


def check_batch(numbers: range, seed: int) -> dict[int, str]:
    """Failures by case; empty where preprocess and DALI agree."""
    files, wrong = originals(), {}
    accepted: list[tuple[int, bytes, tuple[int, int]]] = []
    Image.MAX_IMAGE_PIXELS = None
    for number in numbers:
        data = damaged(number, seed, files)
        with limited(number, "an image", wrong):
            try:
                extension, image = decode(data, max_pixels=1_000_000)
                accepted.append((number, data if extension else as_png(image), (image.height, image.width)))
            except Rejected:
                pass
            except Exception as error:
                wrong[number] = f"preprocess raised {type(error).__name__}: {error}"
    with limited(numbers.start, f"DALI and the images {numbers.start} to {numbers.stop - 1}", wrong):
        different = _against_dali(accepted)
    return wrong | different


def _against_dali(cases: list[tuple[int, bytes, tuple[int, int]]]) -> dict[int, str]:
    """All at once, and halves of what fails: DALI does not say which image it was."""
    if not cases:
        return {}
    try:
        sizes = _dali_sizes([data for _, data, _ in cases])
    except RuntimeError as error:
        if len(cases) == 1:
            lines = [line for line in str(error).splitlines() if "rror" in line] or [str(error)]
            return {cases[0][0]: f"DALI can't decode it: {lines[0][:200]}"}
        half = len(cases) // 2
        return _against_dali(cases[:half]) | _against_dali(cases[half:])
    return {
        number: f"preprocess noted {noted}, DALI delivers {size}"
        for (number, _, noted), size in zip(cases, sizes, strict=True)
        if size != noted
    }


def _dali_sizes(images: list[bytes]) -> list[tuple[int, int]]:
    from nvidia.dali import fn, pipeline_def, types

    encoded = [np.frombuffer(data, np.uint8) for data in images]

    @pipeline_def(batch_size=len(images), num_threads=1, device_id=None, prefetch_queue_depth=1)
    def decoding():
        raw = fn.external_source(source=lambda: encoded, dtype=types.UINT8)
        return fn.decoders.image(raw, device="cpu", output_type=types.RGB), fn.peek_image_shape(raw)

    pipe = decoding()
    pipe.build()
    decoded, peeked = pipe.run()
    sizes = [tuple(decoded.at(index).shape[:2]) for index in range(len(images))]
    shapes = [tuple(peeked.at(index)[:2].tolist()) for index in range(len(images))]
    return [size if size == shape else (-1, -1) for size, shape in zip(sizes, shapes, strict=True)]


def is_rejected(data: bytes) -> bool:
    """True if preprocess would leave a file out."""
    try:
        decode(data, max_pixels=1_000_000)
    except Rejected:
        return True
    return False
