"""Detection: boxes with classes, mAP."""

import torch
from torch import nn

from components.common.tasks.detection.loss import DetectionLoss


class Detection:
    """See Task. Labels are [B, M, 6] float32: see Batch."""

    def labels(self, fetched: torch.Tensor) -> torch.Tensor:
        """Move boxes to where they lie in the model's input, cut them at its edge, and leave out those outside.

        Args:
            fetched: [B, 1 + n, 6] float32. The first row is scale and shift of x, the same of y, the side of the input,
                and the least share of a box's area that must be left; then boxes in pixels of the packed image, their
                class, 1 if ignored. Rows of class -1 are none.

        Returns:
            [B, M, 6] float32, M the most of an image and at least 1; rows of class -1 fill up.
        """
        move, boxes = fetched[:, :1], fetched[:, 1:]
        scale, shift = move[..., [0, 2]], move[..., [1, 3]]  # [B, 1, 2]
        first, second = boxes[..., :2] * scale + shift, boxes[..., 2:4] * scale + shift
        whole = torch.cat([torch.minimum(first, second), torch.maximum(first, second)], dim=-1)  # [B, n, 4]
        inside = torch.minimum(whole.clamp(min=0), move[..., 4:5])
        shares = _areas(inside) / _areas(whole).clamp(min=1e-6)
        kept = (boxes[..., 4] >= 0) & (shares > 0) & (shares >= move[..., 5])  # [B, n]
        rows = torch.cat([inside, boxes[..., 4:]], dim=-1)
        rows[~kept] = torch.tensor([0, 0, 0, 0, -1, 0], dtype=rows.dtype)
        order = kept.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        most = max([1, *kept.sum(dim=1).tolist()])
        return rows.gather(1, order[:, :most, None].expand(-1, -1, rows.shape[2]))

    def loss(self, label_smoothing: float) -> nn.Module:
        """See Task. Labels are not smoothed: a score is to be the overlap with its object."""
        return DetectionLoss()


def _areas(boxes: torch.Tensor) -> torch.Tensor:
    """[..., 4] -> [...], 0 for boxes of no size."""
    return (boxes[..., 2:4] - boxes[..., :2]).clamp(min=0).prod(dim=-1)


TASK = Detection()
