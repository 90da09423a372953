"""Masks as pictures. A colour each for up to 254 classes, the same everywhere."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_GAP = 2  # px between pictures
_LEAST_TEXT = 10  # px


def palette() -> np.ndarray:
    """[256, 3] uint8: class 0 dark gray, then hues that lie far apart; 255, void, white."""
    places = np.arange(256)
    hues = (places * 0.618033988749895) % 1  # the golden ratio's part: neighbours differ most
    values = np.where(places % 2, 0.95, 0.7)
    sectors = (hues[:, None] * 6 + np.array([5, 3, 1])) % 6  # as in the definition of HSV
    colours = values[:, None] * (1 - 0.75 * np.clip(np.minimum(sectors, 4 - sectors), 0, 1))
    table: np.ndarray = (255 * colours).round().astype(np.uint8)
    table[0], table[255] = 50, 255
    return table


def coloured(mask: np.ndarray) -> Image.Image:
    """[H, W] uint8 classes -> an RGB picture."""
    return Image.fromarray(palette()[mask])


def write_name(
    draw: ImageDraw.ImageDraw, x: float, y: float, name: str, colour: Sequence[int], *, is_middle: bool = False
) -> None:
    """A name on a ground of its colour, of a size that suits the picture, and within it.

    Args:
        draw: of the picture.
        x: left of the ground.
        y: bottom of the ground.
        name: of a class.
        colour: RGB.
        is_middle: `x` and `y` are its middle.
    """
    width, height = draw.im.size
    font = ImageFont.load_default(max(_LEAST_TEXT, min(width, height) // 36))
    _, _, right, bottom = draw.textbbox((0, 0), name, font)
    right, bottom = right + 2, bottom + 2  # with a margin
    x, y = (x - right / 2, y + bottom / 2) if is_middle else (x, y)
    left, top = max(0, min(x, width - right)), max(0, min(y, height) - bottom)
    draw.rectangle((left, top, left + right, top + bottom), fill=tuple(colour))
    is_light = np.dot(colour, (0.299, 0.587, 0.114)) > 128  # brightness of ITU-R BT.601
    draw.text((left + 1, top), name, fill="black" if is_light else "white", font=font)


def beside(pictures: Sequence[Image.Image]) -> Image.Image:
    """Pictures of one size from left to right."""
    width, height = pictures[0].size
    whole = Image.new("RGB", (len(pictures) * (width + _GAP) - _GAP, height), "white")
    for place, picture in enumerate(pictures):
        whole.paste(picture, (place * (width + _GAP), 0))
    return whole
