"""Detection: boxes with classes, mAP."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from components.common.tasks.detection.average_precision import FOUND, IGNORED, RECALLS, THRESHOLDS
from components.common.tasks.detection.boxes import MAX_CANDIDATES, NUM_BOX_VALUES
from components.common.tasks.detection.loss import DetectionLoss
from components.common.tasks.detection.predictions import BoxPredictions
from components.common.tasks.task import Task

if TYPE_CHECKING:
    import onnx

    from components.common.data.dali_pipelines import Way

_LEAST, _MOST, _NUM_BINS = -3.0, 7.0, 200  # of logits: scores from 0.05 to 0.999
_NUM_COUNTS = len(THRESHOLDS) * 2 * _NUM_BINS  # of a class
_EPSILON = 1e-9
_USUAL_OBJECTS = 32  # of the image of a batch that has most


class Detection(Task):
    """See Task. Labels are [B, M, 6] float32: see Batch."""

    _loss = DetectionLoss()

    def move_label(self) -> "Callable[[Any, Way], Any]":
        """See Task."""
        from components.common.tasks.detection.moves import moved

        return moved

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

    def classes(self, fetched: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """See Task."""
        return labels[..., 4]

    def loss(self, label_smoothing: float) -> nn.Module:
        """See Task. Labels are not smoothed: a score is to be the overlap with its object."""
        return DetectionLoss()

    def blank_labels(self, outputs: torch.Tensor) -> torch.Tensor:
        """See Task. Objects of class 0 without a size."""
        return torch.zeros(len(outputs), _USUAL_OBJECTS, 6, device=outputs.device)

    def new_totals(self, num_classes: int, device: torch.device) -> torch.Tensor:
        """Loss; objects by class; detections by class, threshold, whether they are right, and score."""
        return torch.zeros(1 + num_classes * (1 + _NUM_COUNTS), dtype=torch.float64, device=device)

    def count(self, totals: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor) -> None:
        """See Task. Suppression and matching run on the CPU, on the anchors that it looks at."""
        totals[0] += len(outputs) * self._loss(outputs, labels)
        found = BoxPredictions.of(_likeliest(outputs).float().cpu().numpy(), labels.cpu().numpy()).matches
        with np.errstate(divide="ignore"):
            logits = np.log(found.scores) - np.log1p(-found.scores)
        bins = np.clip((logits - _LEAST) / (_MOST - _LEAST) * _NUM_BINS, 0, _NUM_BINS - 1).astype(np.int64)  # [D]
        rows = found.classes[:, None].astype(np.int64) * len(THRESHOLDS) + np.arange(len(THRESHOLDS))
        codes = (rows * 2 + (found.found == FOUND)) * _NUM_BINS + bins[:, None]  # [D, 10]
        num_classes = found.num_objects.shape[1]
        counts = np.bincount(codes[found.found != IGNORED], minlength=num_classes * _NUM_COUNTS)
        totals[1:] += torch.from_numpy(np.concatenate([found.num_objects.sum(axis=0), counts])).to(totals.device)

    def result(self, totals: torch.Tensor, num_images: int) -> tuple[float, float]:
        """See Task: mAP@[.5:.95], of which scores are known but for the place in their bin."""
        sums = totals.cpu().numpy()
        num_classes = (len(sums) - 1) // (1 + _NUM_COUNTS)
        objects = sums[1 : 1 + num_classes]
        counts = sums[1 + num_classes :].reshape(num_classes, len(THRESHOLDS), 2, _NUM_BINS)[..., ::-1].cumsum(axis=-1)
        shown = np.flatnonzero(objects)
        precisions = [_average_precision(own, objects[index]) for index in shown for own in counts[index]]
        return float(sums[0]) / num_images, 100 * float(np.mean(precisions)) if precisions else 0.0

    def exported(self, model: "onnx.ModelProto") -> "onnx.ModelProto":
        """See Task."""
        from components.common.tasks.detection.candidates import keep_candidates

        return keep_candidates(model)


def _likeliest(outputs: torch.Tensor) -> torch.Tensor:
    """The anchors that `detect` looks at, in their order: on a GPU little else has to come to the host.

    [B, A, 8 + classes] -> [B, at most 1000, 8 + classes].
    """
    largest = outputs[..., NUM_BOX_VALUES:].amax(dim=-1)  # [B, A]
    chosen = largest.topk(min(MAX_CANDIDATES, largest.shape[1]), dim=1).indices.sort(dim=1).values
    return outputs.gather(1, chosen[..., None].expand(-1, -1, outputs.shape[2]))


def _average_precision(counts: np.ndarray, num_objects: float) -> float:
    """Average precision as COCO defines it, where the detections of a bin that are right lie evenly among them.

    Args:
        counts: [2, bins]: wrong and right detections down to the lower end of each bin, the surest first.
        num_objects: 1 or more.
    """
    right, every = counts[1], counts.sum(axis=0)
    ends = np.maximum.accumulate((right / np.maximum(every, 1))[::-1])[::-1]  # best precision at the end of a later bin
    needed = np.maximum(np.ceil(RECALLS * num_objects - _EPSILON), 1)
    needed = needed[needed <= right[-1]]
    bins = np.searchsorted(right, needed)
    right, every = (np.concatenate([[0.0], each]) for each in (right, every))
    share = (needed - right[bins]) / (right[bins + 1] - right[bins])
    within = needed / (every[bins] + share * (every[bins + 1] - every[bins]))
    return float(np.maximum(within, ends[bins]).sum() / len(RECALLS))


def _areas(boxes: torch.Tensor) -> torch.Tensor:
    """[..., 4] -> [...], 0 for boxes of no size."""
    return (boxes[..., 2:4] - boxes[..., :2]).clamp(min=0).prod(dim=-1)


TASK = Detection()
