"""A mask as an answer: a PNG of the classes' numbers, and the share of each class."""

import base64
import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from components.common.data.image_files import open_image
from components.common.tasks.answers import Answer, Answers, View
from components.common.tasks.pictures import coloured

_MOST_NAMED = 4  # in a summary
_OPACITY = 0.55
_MAX_SIDE = 8192  # px


def _answer(output: np.ndarray, classes: Sequence[str], view: View) -> Answer:
    """output: [classes, H, W] logits without NaN. The mask is of `region`, at the model's size."""
    mask = output.argmax(axis=0).astype(np.uint8)  # [H, W]
    encoded = io.BytesIO()
    Image.fromarray(mask).save(encoded, "PNG")
    counts = np.bincount(mask.ravel(), minlength=len(classes))
    order = [int(index) for index in np.argsort(-counts, kind="stable") if counts[index]]
    return {
        "classes": [classes[index] for index in order],
        "shares": [round(float(counts[index] / mask.size), 6) for index in order],
        "mask": base64.b64encode(encoded.getvalue()).decode(),
        "region": view.region(),
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
    mask = Image.fromarray(mask_of(answer)).resize((right - left, bottom - top), Image.Resampling.NEAREST)
    layer = image.copy()
    layer.paste(coloured(np.asarray(mask)), (left, top))
    return Image.blend(image, layer, _OPACITY)


def _summary(answer: Answer) -> str:
    named = zip(answer["classes"], answer["shares"], strict=True)
    return ", ".join(f"{name} {100 * share:.1f} %" for name, share in list(named)[:_MOST_NAMED])


ANSWERS = Answers(
    columns={"classes": "texts", "shares": "numbers", "mask": "text", "region": "numbers"},
    answer=_answer,
    drawn=_drawn,
    summary=_summary,
)
