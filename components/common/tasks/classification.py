"""Classification: one class per image, top-1."""

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    import onnx


class Classification:
    """See Task."""

    def move_label(self) -> None:
        """See Task."""

    def labels(self, fetched: torch.Tensor) -> torch.Tensor:
        """Decimal text of fixed width to numbers. fetched: [B, width] uint8, ASCII digits. Returns [B] int64."""
        digits = fetched.to(torch.int64) - ord("0")
        powers = 10 ** torch.arange(digits.shape[1] - 1, -1, -1, dtype=torch.int64, device=digits.device)
        return (digits * powers).sum(dim=1)

    def loss(self, label_smoothing: float) -> nn.Module:
        """See Task."""
        return nn.CrossEntropyLoss(label_smoothing=label_smoothing)

    def blank_labels(self, outputs: torch.Tensor) -> torch.Tensor:
        """See Task. Class 0."""
        return torch.zeros(len(outputs), dtype=torch.int64, device=outputs.device)

    def new_totals(self, num_classes: int, device: torch.device) -> torch.Tensor:
        """Loss, correct images."""
        return torch.zeros(2, dtype=torch.float64, device=device)

    def count(self, totals: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """See Task."""
        totals[0] += nn.functional.cross_entropy(outputs.float(), labels, reduction="sum")
        totals[1] += (outputs.argmax(dim=1) == labels).sum()

    def result(self, totals: torch.Tensor, num_images: int) -> tuple[float, float]:
        """See Task."""
        loss_sum, correct = (total / num_images for total in totals.tolist())
        return loss_sum, 100 * correct

    def exported(self, model: "onnx.ModelProto") -> "onnx.ModelProto":
        """See Task."""
        return model


TASK = Classification()
