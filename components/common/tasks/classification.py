"""Classification: one class per image, top-1."""

import torch
from torch import nn

from components.common.tasks.task import Task


class Classification(Task):
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

    def count(self, totals: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """See Task."""
        totals[0] += nn.functional.cross_entropy(outputs.float(), labels, reduction="sum")
        totals[1] += (outputs.argmax(dim=1) == labels).sum()


TASK = Classification()
