"""A mask as an answer: a PNG of the classes' numbers, and the share of each class."""

import base64
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from components.common.data.image_files import encode_image, open_image
from components.common.tasks.answers import Answer, Answers, View
from components.common.tasks.drawing import coloured, palette, write_name

_MIN_AREA = 0.01  # of a mask, from which on a class counts as shown
_MOST_NAMED = 4  # in a summary
_OPACITY = 0.55
_MAX_SIDE = 8192  # px


def _answer(output: np.ndarray, classes: Sequence[str], view: View) -> Answer:
    """output: [classes, H, W] logits without NaN. The mask is of `region`, at the model's size."""
    mask = output.argmax(axis=0).astype(np.uint8)  # [H, W]
    counts = np.bincount(mask.ravel(), minlength=len(classes))
    order = [int(index) for index in np.argsort(-counts, kind="stable") if counts[index]]
    return {
        "classes": [classes[index] for index in order],
        "shares": [round(float(counts[index] / mask.size), 6) for index in order],
        "mask": base64.b64encode(encode_image(Image.fromarray(mask), "PNG")).decode(),
        "region": [round(each, 2) for each in view.region],
    }


def mask_of(answer: Answer) -> np.ndarray:
    """[H, W] uint8: the number of each pixel's class.

    Raises:
        ValueError: it is no such mask; a server may send anything.
    """
    image = open_image(base64.b64decode(answer["mask"], validate=True))
    if image.mode != "L" or max(image.size) > _MAX_SIDE:
        raise ValueError(f"a mask of {image.size[0]}x{image.size[1]} pixels in mode {image.mode}")
    return np.asarray(image)


def _drawn(image: Image.Image, answer: Answer) -> Image.Image:
    within = np.clip(answer["region"], 0, [*image.size, *image.size])
    left, top, right, bottom = (round(each) for each in within.tolist())
    mask, layer = mask_of(answer), image.copy()
    size = max(1, right - left), max(1, bottom - top)  # of a thumbnail a very wide image leaves a row
    layer.paste(coloured(mask).resize(size, Image.Resampling.NEAREST), (left, top))
    picture = Image.blend(image, layer, _OPACITY)
    draw, colours = ImageDraw.Draw(picture), palette()
    order = np.argsort(-np.bincount(mask.ravel()), kind="stable").tolist()  # of the classes in the answer
    for index, name, share in zip(order, answer["classes"], answer["shares"], strict=False):
        if share >= _MIN_AREA:  # in the middle of its middle row
            rows, columns = np.nonzero(mask == index)
            row = rows[len(rows) // 2]
            column = np.median(columns[rows == row])
            x, y = left + column * (right - left) / mask.shape[1], top + row * (bottom - top) / mask.shape[0]
            write_name(draw, x, y, name, colours[index].tolist(), is_middle=True)
    return picture


def _summary(answer: Answer) -> str:
    named = zip(answer["classes"], answer["shares"], strict=True)
    return ", ".join(f"{name} {100 * share:.1f} %" for name, share in list(named)[:_MOST_NAMED])


ANSWERS = Answers(
    columns={"classes": "texts", "shares": "numbers", "mask": "text", "region": "numbers"},
    scored=("classes", "shares"),
    answer=_answer,
    drawn=_drawn,
    summary=_summary,
    colour_of=lambda label: label,
    least=_MIN_AREA,
)
