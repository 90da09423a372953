"""Answers of a model about an image, for people and programs: JSON values, and a picture of them. Without torch.

Each task but classification has a module `answers` with `answer` and `drawn`; coordinates are pixels of the image that
was sent, upright.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
from PIL import Image

from components.common.contracts.transforms import TransformSpec
from components.common.tasks import TASKS

Answer = dict[str, Any]  # strings, numbers and lists of them


@dataclass(frozen=True, kw_only=True)
class View:
    """The part of an image that a model sees."""

    region: tuple[float, float, float, float]  # x1, y1, x2, y2 in pixels of the image
    size: tuple[int, int]  # width and height of the image
    crop_size: int  # side of the model's input in pixels

    @classmethod
    def of(cls, size: tuple[int, int], transform: TransformSpec) -> "View":
        """Return the part of an image of this width and height, in whole pixels of the resized image, as it is cut."""
        corners = []
        for side in size:
            resized = side * transform.resize_size // min(size)
            start = round((resized - transform.crop_size) / 2)  # halves to the even pixel
            corners.append([each * side / resized for each in (start, start + transform.crop_size)])
        (left, right), (top, bottom) = corners
        return cls(region=(left, top, right, bottom), size=size, crop_size=transform.crop_size)

    def of_image(self, boxes: np.ndarray) -> np.ndarray:
        """[D, 4] in pixels of the model's input -> the same in those of the image, within it."""
        first, last = np.split(np.array(self.region), 2)  # [2] each
        corners = boxes.astype(np.float64).reshape(-1, 2, 2) * ((last - first) / self.crop_size) + first
        found: np.ndarray = np.clip(corners, 0, self.size).reshape(-1, 4)
        return found


@dataclass(frozen=True, kw_only=True)
class Answers:
    """A task's module."""

    columns: dict[str, str]
    """Keys of an answer, and what each holds: "text", "texts", "integers", "numbers", or "lists" of numbers."""
    scored: tuple[str, str]
    """The keys of the classes' names, and of how sure or large each is; in falling order."""
    answer: Callable[[np.ndarray, Sequence[str], View], Answer]
    """Makes the answer of a model's output for one image, [...] float; the names of classes; and what the model saw."""
    drawn: Callable[[Image.Image, Answer], Image.Image]
    """The image, RGB, with the answer."""
    summary: Callable[[Answer], str]
    """The answer in a few words."""
    colour_of: Callable[[int], int]
    """Returns the number of a class's colour in `palette`."""
    least: float = 0.0
    """The second of `scored` from which on a class counts as shown."""


def answers_of(task: str) -> Answers:
    """A task's answers, by a name that a server may have sent; not of classification.

    Raises:
        ValueError: it is no such name.
    """
    if task not in TASKS or task == "classification":
        raise ValueError(f"{task!r} is no task that answers with boxes or masks")
    found: Answers = import_module(f"components.common.tasks.{task}.answers").ANSWERS
    return found
