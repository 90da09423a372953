"""The interface of a task's module."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

if TYPE_CHECKING:  # DALI and ONNX, which are not wherever networks are
    import onnx

    from components.common.data.dali_pipelines import Way


class Task(Protocol):
    """The task's code."""

    def move_label(self) -> "Callable[[Any, Way], Any] | None":
        """Takes a packed label the way of its image in DALI's pipelines; None where none lies on the image."""
        return None

    def labels(self, fetched: torch.Tensor) -> torch.Tensor:
        """A batch's labels as training and validation take them, from what the loader's pipeline yields of them."""
        ...

    def classes(self, fetched: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The classes in a batch's labels, as fetched or not, which the loader checks; -1 or byte 255 for none."""
        return labels

    def loss(self, label_smoothing: float) -> nn.Module:
        """The loss of outputs and labels."""
        ...

    def blank_labels(self, outputs: torch.Tensor) -> torch.Tensor:
        """Labels of a batch with these outputs that say nothing, of a size as usual: a step takes as much memory."""
        ...

    def new_totals(self, num_classes: int, device: torch.device) -> torch.Tensor:
        """Sums of a validation, float64, that processes add up; the first is the loss's, the second that of hits."""
        return torch.zeros(2, dtype=torch.float64, device=device)

    def count(self, totals: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch to the sums."""
        ...

    def result(self, totals: torch.Tensor, num_images: int) -> tuple[float, float]:
        """Mean loss and score in per cent, from the sums."""
        loss, hits = (total / num_images for total in totals.tolist())
        return loss, 100 * hits

    def exported(self, model: "onnx.ModelProto") -> "onnx.ModelProto":
        """The graph of a bundle, from that of the network: it may return less, where predictions need no more."""
        return model
