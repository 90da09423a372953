"""Boxes of a detector's outputs: decoding, non-maximum suppression, overlaps. On CPUs, with numpy.

A detector's output describes itself: [A, 8 + classes] float for an image and its A anchors. Of each anchor: its corners
x1, y1, x2, y2 in pixels of the input; the distances of the object's left, top, right and bottom edge from the anchor's
centre, in units of the anchor's sides; and a logit for each class, each of them a sigmoid's. Files of a bundle
return those anchors alone that `detect` looks at: see `candidates`.
"""

from dataclasses import dataclass

import numpy as np

NUM_BOX_VALUES = 8
"""Values of an anchor before its logits."""

MIN_SCORE = 0.05
NMS_IOU = 0.6
MAX_CANDIDATES = 1000  # per image, before suppression
MAX_DETECTIONS = 100  # per image, as COCO counts


@dataclass(frozen=True, kw_only=True)
class Detections:
    """Objects found in an image, the surest first."""

    boxes: np.ndarray  # [D, 4] float32: x1, y1, x2, y2 in pixels of the model's input
    scores: np.ndarray  # [D] float32, 0..1
    classes: np.ndarray  # [D] int16

    def __len__(self) -> int:
        return len(self.scores)


def decode(output: np.ndarray) -> np.ndarray:
    """Corners of the objects. [..., 8 or more] float -> [..., 4] float32, pixels."""
    anchors, distances = output[..., :4].astype(np.float32), output[..., 4:8].astype(np.float32)
    centres = (anchors[..., :2] + anchors[..., 2:]) / 2
    sides = anchors[..., 2:] - anchors[..., :2]
    return np.concatenate([centres - distances[..., :2] * sides, centres + distances[..., 2:] * sides], axis=-1)


def detect(output: np.ndarray, *, min_score: float = MIN_SCORE, max_detections: int = MAX_DETECTIONS) -> Detections:
    """Objects in an image, by class-wise non-maximum suppression.

    Args:
        output: [A, 8 + classes] float; anchors with NaN or infinity find nothing.
        min_score: less sure ones are left out.
        max_detections: that are kept.
    """
    logits = output[:, NUM_BOX_VALUES:]
    least = np.log(min_score / (1 - min_score))
    with np.errstate(invalid="ignore"):
        anchors, classes = np.divmod(np.flatnonzero(logits > least), max(logits.shape[1], 1))
    values = logits[anchors, classes].astype(np.float32)
    if len(values) > MAX_CANDIDATES:
        best = _largest(values, MAX_CANDIDATES)
        anchors, classes, values = anchors[best], classes[best], values[best]
    boxes = decode(output[anchors])
    known = np.isfinite(boxes).all(axis=1) & (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    order = np.argsort(-values, kind="stable")
    order = order[known[order]]
    boxes, classes, values = boxes[order], classes[order], values[order]
    kept = suppress(boxes, classes, NMS_IOU, max_detections)
    scores = (1 / (1 + np.exp(-values[kept]))).astype(np.float32)
    return Detections(boxes=boxes[kept], scores=scores, classes=classes[kept].astype(np.int16))


def _largest(values: np.ndarray, num_kept: int) -> np.ndarray:
    """[num_kept] indices of the largest values, in order; of equals the first, whatever a sort makes of them."""
    least = np.partition(values, -num_kept)[-num_kept]
    above, equal = np.flatnonzero(values > least), np.flatnonzero(values == least)
    return np.sort(np.concatenate([above, equal[: num_kept - len(above)]]))


_BLOCK = 128  # boxes of which all overlaps are found at once: a step for each would take longer


def suppress(boxes: np.ndarray, classes: np.ndarray, iou: float, max_kept: int) -> np.ndarray:
    """Indices of the boxes that no earlier one of their class overlaps by more than `iou`.

    Args:
        boxes: [D, 4] float32, the surest first.
        classes: [D] integers.
        iou: 0..1.
        max_kept: ends when so many are found.
    """
    left, top, right, bottom = np.ascontiguousarray(boxes.T)
    # intersection / union > iou, without a division: intersection > iou / (1 + iou) * (area + area)
    least = (right - left) * (bottom - top) * np.float32(iou / (1 + iou))
    kept = np.zeros(0, np.int64)
    for start in range(0, len(boxes), _BLOCK):
        if len(kept) >= max_kept:
            break
        places = np.arange(start, min(start + _BLOCK, len(boxes)))
        before = np.concatenate([kept, places])
        first = before[:, None]
        shared = np.minimum(right[first], right[places])
        shared -= np.maximum(left[first], left[places])
        heights = np.minimum(bottom[first], bottom[places])
        heights -= np.maximum(top[first], top[places])
        shared *= np.maximum(heights, 0)
        # [kept and places, places]: True where the first one takes the place of the second
        covers = shared > least[first] + least[places]
        covers &= (classes[first] == classes[places]) & (first < places)
        free = ~covers[: len(kept)].any(axis=0)
        own = covers[len(kept) :]
        for place in np.flatnonzero(own.any(axis=1)).tolist():  # the others cover none
            if free[place]:
                free &= ~own[place]
        kept = np.concatenate([kept, places[free]])
    return kept[:max_kept]


def overlap(first: np.ndarray, second: np.ndarray, of_first: np.ndarray | None = None) -> np.ndarray:
    """Intersection over union of boxes: [D, 4] and [G, 4] -> [D, G] float64.

    Where `of_first` ([G] bool) is set, the intersection over the first one's area instead: how much of it lies within a
    region.
    """
    return _shares(first.T[..., None], second.T[:, None], of_first)


def overlap_of_pairs(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Intersection over union of each box with its other: [P, 4] and [P, 4] -> [P] float64."""
    return _shares(first.T, second.T, None)


def _shares(first: np.ndarray, second: np.ndarray, of_first: np.ndarray | None) -> np.ndarray:
    """See `overlap`. [4, ...] each."""
    one, other = first.astype(np.float64), second.astype(np.float64)
    width = np.minimum(one[2], other[2]) - np.maximum(one[0], other[0])
    height = np.minimum(one[3], other[3]) - np.maximum(one[1], other[1])
    inside = np.maximum(width, 0) * np.maximum(height, 0)
    areas, other_areas = ((each[2] - each[0]) * (each[3] - each[1]) for each in (one, other))
    united = areas + other_areas - inside
    if of_first is not None:
        united = np.where(of_first, areas, united)
    shares: np.ndarray = np.divide(inside, united, out=np.zeros_like(inside), where=united > 0)
    return shares
