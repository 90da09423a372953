"""A model's answer to a frame, by task: its line, the classes that it shows, and a picture."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from components.analyze.config import AnalyzeConfig
from components.common.contracts.manifests import BundleManifest
from components.common.data.evaluation import most_likely, names_class
from components.common.tasks import TASKS
from components.common.tasks.answers import Answer, Answers, View, answers_of
from components.common.tasks.drawing import palette


class FrameAnswers:
    """The answers of a bundle's model. For several threads."""

    def __init__(self, bundle: BundleManifest, config: AnalyzeConfig) -> None:
        self.classes = bundle.classes
        self.shows_one = TASKS[bundle.task].classifies  # class in a frame
        self._top_k = config.top_k
        self._task = _of_classes(config.top_k) if self.shows_one else answers_of(bundle.task)
        self._least = max(config.min_probability, self._task.least)
        self._transform = bundle.image_transform

    def answer(self, output: np.ndarray, size: tuple[int, int]) -> Answer:
        """The model's output of a frame of this width and height as an answer, without entries where it is no number.

        Args:
            output: of the network, [...] float32.
            size: of the frame.
        """
        if not (names_class(output) if self.shows_one else np.isfinite(output).all()):
            return {name: [] for name in self._task.columns}
        return self._task.answer(output, self.classes, View.of(size, self._transform))

    def answers(self, outputs: np.ndarray, sizes: Sequence[tuple[int, int]]) -> list[Answer]:
        """The answers of several frames; see `answer`."""
        if self.shows_one and names_class(outputs).all():  # together, since each frame's time counts
            return _likeliest(outputs, self.classes, self._top_k)
        return [self.answer(*each) for each in zip(outputs, sizes, strict=True)]

    def line(self, answer: Answer) -> Answer:
        """Return what stands in a frame's line: an answer without its mask."""
        return {name: answer[name] for name, kind in self._task.columns.items() if kind != "text"}

    def shown(self, answer: Answer) -> list[str]:
        """Return the classes that a frame shows, the surest or largest first."""
        names, scores = (answer[column] for column in self._task.scored)
        pairs = list(zip(names, scores, strict=True))[: 1 if self.shows_one else None]
        return list(dict.fromkeys(name for name, score in pairs if score >= self._least))

    def caption(self, answer: Answer) -> str:
        """Return the answer in a few words."""
        return self._task.summary(answer) if not self.shows_one or self.shown(answer) else "no class"

    def drawn(self, image: Image.Image, answer: Answer) -> Image.Image:
        """Return a frame with its boxes or its mask."""
        return self._task.drawn(image, answer) if answer[self._task.scored[0]] else image

    def colour(self, name: str, rank: int) -> str:
        """Return the colour in which a class is drawn, for CSS; where no picture shows it, one by its rank from 0."""
        index = rank if self.shows_one else self.classes.index(name)
        red, green, blue = palette()[self._task.colour_of(index)].tolist()
        return f"#{red:02x}{green:02x}{blue:02x}"


def _of_classes(top_k: int) -> Answers:
    """A classifier's answers: its likeliest classes, which no picture shows."""
    return Answers(
        columns={"labels": "texts", "probabilities": "numbers"},
        scored=("labels", "probabilities"),
        answer=lambda output, classes, _: _likeliest(output[None], classes, top_k)[0],
        drawn=lambda image, _: image,
        summary=lambda answer: f"{answer['labels'][0]} {100 * answer['probabilities'][0]:.1f} %",
        colour_of=lambda index: index % 254 + 1,
    )


def _likeliest(outputs: np.ndarray, classes: Sequence[str], top_k: int) -> list[Answer]:
    """outputs: [B, classes] float."""
    labels, shares = most_likely(outputs, top_k)
    return [
        {"labels": [classes[index] for index in row], "probabilities": [round(share, 6) for share in likely]}
        for row, likely in zip(labels.tolist(), shares.tolist(), strict=True)
    ]
