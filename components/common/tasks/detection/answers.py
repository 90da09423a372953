"""Objects as an answer: class, score and box of each, the surest first."""

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from components.common.tasks.answers import Answer, Answers, View
from components.common.tasks.detection.boxes import detect
from components.common.tasks.drawing import palette, write_name

MIN_SCORE = 0.3  # of objects that are named
_MOST_NAMED = 4  # in a summary


def _answer(output: np.ndarray, classes: Sequence[str], view: View) -> Answer:
    """output: [A, 8 + classes] float. Boxes are x1, y1, x2, y2 in pixels of the image.

    The objects that validation counts, and cut to what the model saw only then: those outside of it have no box left.
    """
    found = detect(output, min_score=MIN_SCORE)
    boxes = np.clip(found.boxes, 0, view.crop_size)
    seen = (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
    return {
        "classes": [classes[index] for index in found.classes[seen]],
        "labels": found.classes[seen].tolist(),
        "scores": [round(float(score), 6) for score in found.scores[seen]],
        "boxes": [[round(float(each), 2) for each in box] for box in view.of_image(boxes[seen])],
    }


def _drawn(image: Image.Image, answer: Answer) -> Image.Image:
    picture, colours = image.copy(), palette()
    draw, width = ImageDraw.Draw(picture), max(2, round(min(image.size) / 160))
    named = zip(answer["classes"], answer["labels"], answer["scores"], answer["boxes"], strict=True)
    for name, label, score, box in reversed(list(named)):  # the surest on top
        colour = tuple(colours[_colour_of(label)].tolist())
        draw.rectangle(box, outline=colour, width=width)
        write_name(draw, box[0], box[1], f"{name} {score:.2f}", colour)
    return picture


def _colour_of(label: int) -> int:
    return label % 254 + 1


def _summary(answer: Answer) -> str:
    named = list(zip(answer["classes"], answer["scores"], strict=True))
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return (", ".join(f"{name} {score:.2f}" for name, score in named[:_MOST_NAMED]) or "no object") + more


ANSWERS = Answers(
    columns={"classes": "texts", "labels": "integers", "scores": "numbers", "boxes": "lists"},
    scored=("classes", "scores"),
    answer=_answer,
    drawn=_drawn,
    summary=_summary,
    colour_of=_colour_of,
)
