"""The loss of a detector's output, and which anchors are to find which object."""

import torch
from torch import nn

_TOP_K = 10  # anchors that may find an object
_ALPHA, _BETA = 1.0, 6.0  # of score and overlap in how well an anchor fits
_GAMMA = 2.0  # of the focal loss
_BOX_WEIGHT = 2.0
_EPSILON = 1e-9


class DetectionLoss(nn.Module):
    """Quality focal loss of the classes and GIoU loss of the boxes, over task-aligned anchors.

    An anchor's score is to be the overlap that its box has with its object: no centerness, and the same rule for
    networks with and without shapes of anchors.

    Source: Feng et al., "TOOD: Task-aligned One-stage Object Detection", 2021; Li et al., "Generalized Focal Loss",
    2020; Rezatofighi et al., "Generalized Intersection over Union", 2019.
    """

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss.

        Args:
            outputs: [B, A, 8 + classes] in any float type: see `boxes`.
            labels: [B, M, 6] float32: x1, y1, x2, y2 in pixels of the input, class, ignored; class -1 is padding.
        """
        outputs = outputs.float()
        logits, boxes = outputs[..., 8:], corners(outputs)
        with torch.no_grad():
            targets, owners = assign(logits.sigmoid(), boxes, centres(outputs), labels)
        total = targets.sum().clamp(min=1)
        scores = logits.sigmoid()
        cross_entropy = nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        class_loss = ((targets - scores).abs() ** _GAMMA * cross_entropy).sum() / total
        weights = targets.amax(dim=-1)  # [B, A]
        own = labels[..., :4].gather(1, owners[..., None].expand(-1, -1, 4))  # [B, A, 4]
        box_loss = (weights * (1 - generalized_iou(boxes, own))).sum() / total
        return class_loss + _BOX_WEIGHT * box_loss


def centres(outputs: torch.Tensor) -> torch.Tensor:
    """[..., 8 or more] -> [..., 2] centres of the anchors."""
    return (outputs[..., :2] + outputs[..., 2:4]) / 2


def corners(outputs: torch.Tensor) -> torch.Tensor:
    """[..., 8 or more] -> [..., 4] corners of the objects, in pixels: `boxes.decode` with a gradient."""
    middle, sides = centres(outputs), outputs[..., 2:4] - outputs[..., :2]
    return torch.cat([middle - outputs[..., 4:6] * sides, middle + outputs[..., 6:8] * sides], dim=-1)


def assign(
    scores: torch.Tensor, boxes: torch.Tensor, middles: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the anchors that are to find each object: the best of those whose centre is in it.

    Args:
        scores: [B, A, classes] 0..1.
        boxes: [B, A, 4] what the anchors find now.
        middles: [B, A, 2] their centres.
        labels: [B, M, 6].

    Returns:
        The scores to have, [B, A, classes], 0 for all but the classes of chosen anchors; the object of each anchor,
        [B, A] int64, of meaning only where it was chosen.
    """
    real = (labels[..., 4] >= 0) & (labels[..., 5] == 0)  # [B, M]
    classes = labels[..., 4].clamp(min=0).long()
    objects = labels[..., None, :4]  # [B, M, 1, 4]
    common, united, _ = _areas(boxes[:, None], objects)
    overlaps = (common / united.clamp(min=_EPSILON)).clamp(min=0)  # [B, M, A]
    own = scores.transpose(1, 2).gather(1, classes[..., None].expand(-1, -1, scores.shape[1]))  # [B, M, A]
    points = middles[:, None]
    offsets = torch.cat([points - objects[..., :2], objects[..., 2:] - points], dim=-1)
    inside = offsets.amin(dim=-1) > 0  # [B, M, A]
    # An object between the centres has the nearest anchor.
    distances = (points - (objects[..., :2] + objects[..., 2:]) / 2).square().sum(dim=-1)
    nearest = torch.zeros_like(inside).scatter_(-1, distances.argmin(dim=-1, keepdim=True), True)
    inside = torch.where(inside.any(dim=-1, keepdim=True), inside, nearest) & real[..., None]
    fit = own**_ALPHA * overlaps**_BETA + _EPSILON * overlaps + _EPSILON**2
    fit = torch.where(inside, fit, -1.0)
    best, places = fit.topk(min(_TOP_K, fit.shape[-1]), dim=-1)
    chosen = torch.zeros_like(fit).scatter_(-1, places, (best > 0).to(fit.dtype)) > 0  # [B, M, A]
    # An anchor that several objects chose is that one's which it overlaps most.
    owners = torch.where(chosen, overlaps, -1.0).argmax(dim=1)  # [B, A]
    chosen &= torch.zeros_like(chosen).scatter_(1, owners[:, None], True)
    fit = torch.where(chosen, fit, 0.0)
    # The best anchor of an object is to have its largest overlap as score, the others less by their fit.
    largest = torch.where(chosen, overlaps, 0.0).amax(dim=-1, keepdim=True)
    quality = (fit / fit.amax(dim=-1, keepdim=True).clamp(min=_EPSILON**2) * largest).amax(dim=1)  # [B, A]
    one_hot = nn.functional.one_hot(classes.gather(1, owners), scores.shape[-1])
    return quality[..., None] * one_hot, owners


def generalized_iou(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[..., 4] and [..., 4] -> [...] in -1..1."""
    inside, united, hull = _areas(first, second)
    return inside / united.clamp(min=_EPSILON) - (hull - united) / hull.clamp(min=_EPSILON)


def _areas(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Areas of the intersection, the union, and the smallest box about both."""
    common = torch.minimum(first[..., 2:], second[..., 2:]) - torch.maximum(first[..., :2], second[..., :2])
    hull = torch.maximum(first[..., 2:], second[..., 2:]) - torch.minimum(first[..., :2], second[..., :2])
    inside = common.clamp(min=0).prod(dim=-1)
    own = (first[..., 2:] - first[..., :2]).clamp(min=0).prod(dim=-1)
    other = (second[..., 2:] - second[..., :2]).clamp(min=0).prod(dim=-1)
    return inside, own + other - inside, hull.clamp(min=0).prod(dim=-1)
