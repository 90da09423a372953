"""Translation in training: cross-entropy by token, and how many of the next tokens are right."""

import torch
from torch import nn

from components.common.tasks.task import Task
from components.common.tasks.translation.vocabulary import PAD


class Translation(Task):
    """See Task."""

    def labels(self, fetched: torch.Tensor) -> torch.Tensor:
        """[B, L] int64, as the loader has them."""
        return fetched

    def loss(self, label_smoothing: float) -> nn.Module:
        """Return the mean over tokens that are no padding, of logits [B, L, V] and labels [B, L]."""
        return _TokenLoss(label_smoothing)

    def blank_labels(self, outputs: torch.Tensor) -> torch.Tensor:
        """See Task."""
        return torch.zeros(outputs.shape[:2], dtype=torch.int64, device=outputs.device)

    def count(self, totals: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Mean loss of each sentence's tokens, and the share that is right of its next tokens.

        Sentences count alike, whatever their lengths, so that parts of a split add up.
        """
        known = labels != PAD
        lengths = known.sum(dim=1).clamp(min=1)
        losses = nn.functional.cross_entropy(
            outputs.float().transpose(1, 2), labels, ignore_index=PAD, reduction="none"
        )
        totals[0] += (losses.sum(dim=1) / lengths).sum()
        totals[1] += (((outputs.argmax(dim=2) == labels) & known).sum(dim=1) / lengths).sum()


class _TokenLoss(nn.Module):
    def __init__(self, label_smoothing: float) -> None:
        super().__init__()
        self._label_smoothing = label_smoothing

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """[B, L, V], [B, L] -> []."""
        return nn.functional.cross_entropy(
            outputs.flatten(0, 1), labels.flatten(), ignore_index=PAD, label_smoothing=self._label_smoothing
        )


TASK = Translation()
