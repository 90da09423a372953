"""Masks as pictures. A colour each for up to 254 classes, the same everywhere."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

_GAP = 2  # px between pictures


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


def beside(pictures: Sequence[Image.Image]) -> Image.Image:
    """Pictures of one size from left to right."""
    width, height = pictures[0].size
    whole = Image.new("RGB", (len(pictures) * (width + _GAP) - _GAP, height), "white")
    for place, picture in enumerate(pictures):
        whole.paste(picture, (place * (width + _GAP), 0))
    return whole
