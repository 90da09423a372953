"""Segmentation: a class for each pixel, mIoU."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from components.common.tasks.segmentation import VOID
from components.common.tasks.task import Task

if TYPE_CHECKING:
    from components.common.data.dali_pipelines import Way


class PixelLoss(nn.Module):
    """Mean cross entropy of the pixels plus soft Dice loss of the classes, both without VOID; 0 where all is VOID.

    Dice counts every class alike, as mIoU does, however few its pixels are. Over the classes of a batch's labels.

    Source: Milletari et al., "V-Net", 2016.
    """

    def __init__(self, label_smoothing: float) -> None:
        super().__init__()
        self._label_smoothing = label_smoothing

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """outputs: [B, classes, H, W] logits, labels: [B, H, W] int64."""
        outputs, known = outputs.float(), labels != VOID
        total = nn.functional.cross_entropy(
            outputs, labels, ignore_index=VOID, reduction="sum", label_smoothing=self._label_smoothing
        )
        shares = outputs.softmax(dim=1) * known[:, None]  # [B, classes, H, W]
        truth = nn.functional.one_hot(labels.where(known, 0), outputs.shape[1]).movedim(-1, 1) * known[:, None]
        common, both, own = ((shares * truth).sum((0, 2, 3)), shares.sum((0, 2, 3)), truth.sum((0, 2, 3)))
        dice = (2 * common + 1) / (both + own + 1)  # [classes]
        shown = own > 0
        return total / known.sum().clamp(min=1) + ((1 - dice) * shown).sum() / shown.sum().clamp(min=1)


class Segmentation(Task):
    """See Task. Outputs are [B, classes, H, W] logits, labels [B, H, W] int64 with VOID where no class is."""

    def move_label(self) -> "Callable[[Any, Way], Any]":
        """See Task."""
        from components.common.tasks.segmentation.moves import moved

        return moved

    def labels(self, fetched: torch.Tensor) -> torch.Tensor:
        """Masks as numbers. fetched: [B, H, W, 1] uint8. Returns [B, H, W] int64."""
        return fetched.squeeze(-1).to(torch.int64)

    def classes(self, fetched: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """See Task. As bytes, which takes a third of the time; VOID is none."""
        return fetched

    def loss(self, label_smoothing: float) -> nn.Module:
        """See Task."""
        return PixelLoss(label_smoothing)

    def blank_labels(self, outputs: torch.Tensor) -> torch.Tensor:
        """See Task. Class 0 everywhere."""
        return torch.zeros_like(outputs[:, 0], dtype=torch.int64)

    def new_totals(self, num_classes: int, device: torch.device) -> torch.Tensor:
        """Loss, then the confusion counts by rows: pixels of each class (row) that got each class (column)."""
        return torch.zeros(1 + num_classes**2, dtype=torch.float64, device=device)

    def count(self, totals: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch: the sum over images of the mean loss of an image's pixels, and its confusion counts."""
        pixel_losses = nn.functional.cross_entropy(outputs.float(), labels, ignore_index=VOID, reduction="none")
        known = labels != VOID  # [B, H, W]
        totals[0] += (pixel_losses.sum(dim=(1, 2)) / known.sum(dim=(1, 2)).clamp(min=1)).sum()
        num_classes = outputs.shape[1]
        pairs = labels[known] * num_classes + outputs.argmax(dim=1)[known]
        totals[1:] += torch.bincount(pairs, minlength=num_classes**2)

    def result(self, totals: torch.Tensor, num_images: int) -> tuple[float, float]:
        """Mean loss, and the mean over classes that occur in the labels of intersection over union, in per cent."""
        counts = totals[1:].reshape(2 * (round((len(totals) - 1) ** 0.5),))  # [classes, classes]
        hits, pixels = counts.diagonal(), counts.sum(dim=1)
        occurs = pixels > 0
        shares = hits / (pixels + counts.sum(dim=0) - hits).clamp(min=1)
        score = shares[occurs].mean().item() if occurs.any() else 0.0
        return totals[0].item() / num_images, 100 * score


TASK = Segmentation()
