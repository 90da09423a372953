"""Sums over the pixels of images, for the mean and deviation of a data set."""

from math import isqrt
from operator import add

from PIL import Image

# More pixels of one image say next to nothing more about a data set, and counting all takes a fifth of decoding's time.
_PIXELS_PER_IMAGE = 10_000


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
        step = max(1, isqrt(image.width * image.height // _PIXELS_PER_IMAGE))
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
