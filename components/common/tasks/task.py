"""What a task's module provides."""

from typing import Protocol, Self

import numpy as np
import torch
from torch import nn

from components.common.contracts.statistics import PairedDifference


class Drop(Protocol):
    """The drop of a score against FP32, as it may turn out at best on more images of the same kind."""

    @property
    def points(self) -> float:
        """The drop in percentage points; negative for a gain."""
        ...

    def proved(self, num_images: int, allowed_points: float) -> float:
        """The end of the one-sided 95 % interval of the drop on so many images, in points.

        The drop itself where so few images can't prove any drop to be within `allowed_points`.
        """
        ...


class Predictions(Protocol):
    """What is kept of a model's outputs over some images, in the loader's order: enough for the score."""

    @property
    def num_images(self) -> int:
        """Images predicted."""
        ...

    @property
    def num_undefined(self) -> int:
        """Images whose outputs held NaN, which counts as wrong."""
        ...

    @property
    def score_pct(self) -> float:
        """The task's score, 0 to 100."""
        ...

    def agreement_pct(self, other: Self) -> float:
        """Share of predictions that are equal, in per cent."""
        ...

    def select(self, which: "slice | np.ndarray") -> Self:
        """Those of some images."""
        ...

    def difference(self, fp32: Self) -> PairedDifference:
        """The difference to FP32 on the same images."""
        ...

    def drop(self, fp32: Self, num_images: int) -> Drop:
        """The drop against FP32, on so many images at best; on these where they are as many."""
        ...

    def __add__(self, other: Self) -> Self:
        """The predictions of these images, then the other's."""
        ...


class Task(Protocol):
    """The task's code."""

    def labels(self, fetched: torch.Tensor) -> torch.Tensor:
        """A batch's labels as training and validation take them, from what the loader's pipeline yields of them."""
        ...

    def loss(self, label_smoothing: float) -> nn.Module:
        """The loss of outputs and labels."""
        ...

    def new_totals(self, num_classes: int, device: torch.device) -> torch.Tensor:
        """Sums of a validation, float64, that processes add up; the first is that of the loss."""
        ...

    def count(self, totals: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch to the sums."""
        ...

    def result(self, totals: torch.Tensor, num_images: int) -> tuple[float, float]:
        """Mean loss and score in per cent, from the sums."""
        ...
