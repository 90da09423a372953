"""Decode every image fully before it is packed: orientation, damage that DALI stops at, sums over pixels."""

import math
from operator import add

from PIL import Image

from components.common.data.image_files import encode_image, open_image
from components.common.data.read_alike import Rejected, check_structure, rejecting
from components.common.dataset.shards import THUMBNAIL_SIDE

# More pixels of one image say next to nothing more about a dataset, and counting all takes a fifth of decoding's time.
_PIXELS_PER_IMAGE = 10_000
_PIXELS_OF_THUMBNAIL = 25_000  # about: a thumbnail of all pixels of a photograph would take three times as long


class PixelSums:
    """Exact sums: of how often each of the 256 values occurs in each channel.

    Of an image with 40,000 pixels or more, those on a regular grid are counted, at least 10,000, each with the weight
    of the pixels that it represents. Smaller images are counted in full.
    """

    def __init__(self) -> None:
        # By weight, [3 x 256]: how often each value occurs.
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
    with rejecting(data):
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
    data = encode_image(image.resize((width, height), Image.Resampling.LANCZOS), "JPEG", quality=quality)
    return data, open_image(data).convert("RGB")
