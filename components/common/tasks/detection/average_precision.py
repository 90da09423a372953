"""Average precision of detections as COCO defines it, for any weights of the images: the paired bootstrap needs many.

Equal to pycocotools 2.0 at area "all" and 100 detections per image.

Source: Lin et al., "Microsoft COCO: Common Objects in Context", 2014, and the COCO API's cocoeval.py.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from components.common.tasks.detection.boxes import Detections, overlap

THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""Overlaps (IoU) from which a detection finds an object."""

RECALLS = np.linspace(0, 1, 101)
_MOST_VALUES = 1 << 18  # of weights at once, so that they stay in the processor's cache
_EPSILON = float(np.spacing(1))

FOUND, WRONG, IGNORED = 1, 0, -1


def match(detections: Detections, objects: np.ndarray) -> np.ndarray:
    """Tell which detections of an image find an object of their class, at each threshold.

    The surest detection takes the object that it overlaps most; an object is found once. Detections within an ignored
    object of their class (a crowd, a difficult one) don't count.

    Args:
        detections: of the image.
        objects: [G, 6] float: x1, y1, x2, y2, class, ignored.

    Returns:
        [D, 10] int8: FOUND, WRONG or IGNORED.
    """
    found = np.zeros((len(detections), len(THRESHOLDS)), np.int8)
    if not len(detections) or not len(objects):
        return found
    # pycocotools takes the last of equals among those that count, and those that are ignored only after them
    objects = objects[np.argsort(objects[:, 5], kind="stable")]
    ignored = objects[:, 5] > 0
    shares = overlap(detections.boxes, objects[:, :4], ignored)
    shares[detections.classes[:, None] != objects[None, :, 4]] = -1  # [D, G]
    limits = np.minimum(THRESHOLDS, 1 - 1e-10)
    taken = np.zeros((len(THRESHOLDS), len(objects)), bool)
    rows = np.arange(len(THRESHOLDS))
    num_counted = int((~ignored).sum())
    for place in np.flatnonzero(shares.max(axis=1) >= limits[0]):
        matched = np.zeros(len(THRESHOLDS), bool)
        if num_counted:
            free = np.where(taken[:, :num_counted], -1, shares[place, :num_counted])  # [T, G]
            best = num_counted - 1 - free[:, ::-1].argmax(axis=1)
            matched = free[rows, best] >= limits
            taken[rows[matched], best[matched]] = True
            found[place, matched] = FOUND
        if num_counted < len(objects):
            within = shares[place, num_counted:].max() >= limits
            found[place, within & ~matched] = IGNORED
    return found


@dataclass(frozen=True, kw_only=True)
class Matches:
    """Detections of images, in the images' order, and which of them are right."""

    counts: np.ndarray  # [N] int32: detections of each image
    scores: np.ndarray  # [D] float32, 0..1
    classes: np.ndarray  # [D] int16
    found: np.ndarray  # [D, 10] int8: see `match`
    num_objects: np.ndarray  # [N, classes] int32: of each image and class, without ignored ones

    @property
    def num_images(self) -> int:
        """Images, those without detections included."""
        return len(self.counts)

    @cached_property
    def images(self) -> np.ndarray:
        """[D]: the image of each detection."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def select(self, which: "slice | np.ndarray") -> Self:
        """Those of some images, by a slice, a mask or indices."""
        chosen = np.arange(self.num_images)[which]
        rows = rows_of(self.counts, chosen)
        return type(self)(
            counts=self.counts[chosen],
            scores=self.scores[rows],
            classes=self.classes[rows],
            found=self.found[rows],
            num_objects=self.num_objects[chosen],
        )

    def average_precisions(self, weights: np.ndarray | None = None) -> np.ndarray:
        """[R, 10, classes] float64 in 0..1: of each threshold and class, NaN for a class without objects.

        Args:
            weights: [R, N] float, how often each image counts in each of R draws; None for once.
        """
        if weights is None:
            weights = np.ones((1, self.num_images))
        totals = weights @ self.num_objects.astype(weights.dtype)  # [R, classes]
        result = np.full((len(weights), len(THRESHOLDS), totals.shape[1]), np.nan)
        for index, rows in enumerate(self._by_class):
            images, found = self.images[rows], self.found[rows]
            draws = max(1, _MOST_VALUES // max(len(rows), 1))
            for start in range(0, len(weights), draws):
                part = slice(start, start + draws)
                result[part, :, index] = _precisions(weights[part], images, found, totals[part, index])
        return result

    @cached_property
    def _by_class(self) -> list[np.ndarray]:
        """Detections of each class, the surest first, of equals in their order."""
        order = np.lexsort((-self.scores.astype(np.float64), self.classes))
        ends = np.cumsum(np.bincount(self.classes, minlength=self.num_objects.shape[1]))
        return np.split(order, ends[:-1])

    def curve(self) -> np.ndarray:
        """[classes, 101]: the precision at each of RECALLS at an overlap of 0.5, NaN for a class without objects."""
        totals = self.num_objects.sum(axis=0)
        curves = np.full((len(totals), len(RECALLS)), np.nan)
        for index in np.flatnonzero(totals):
            found = self.found[self._by_class[index], 0]
            right, wrong = np.cumsum(found == FOUND), np.cumsum(found == WRONG)
            best = np.maximum.accumulate((right / (right + wrong + _EPSILON))[::-1])[::-1]
            places = np.searchsorted(right / totals[index], RECALLS, side="left")
            curves[index] = np.append(best, 0)[places]
        return curves


def rows_of(counts: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Rows of some images where each has so many, one image after the other. [N], [n] -> [rows] int64."""
    own = counts[chosen].astype(np.int64)
    starts = (np.cumsum(counts, dtype=np.int64) - counts)[chosen]
    return np.repeat(starts - np.cumsum(own) + own, own) + np.arange(own.sum())


def _precisions(weights: np.ndarray, images: np.ndarray, found: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Average precisions of a class.

    Recall rises, and the best precision at some recall is reached, only at detections that find an object: only these
    are looked at, and each counts for the recalls that it is the first to reach.

    Args:
        weights: [R, N] float.
        images: [D], of detections, the surest first.
        found: [D, 10] int8.
        totals: [R], weights of all objects.

    Returns:
        [R, 10] float64; NaN where there are no objects.
    """
    result = np.zeros((len(weights), found.shape[1]))
    of_all = np.where(totals > 0, totals, 1).astype(np.float64)
    right = found == FOUND
    ever = np.flatnonzero(right.any(axis=1))  # [K]
    if len(ever):
        own = weights.take(images[: ever[-1] + 1], axis=1)  # [R, D]
        # the weights of all detections up to each of these
        upto = np.add.reduceat(own, np.concatenate([[0], ever[:-1] + 1]), axis=1).cumsum(axis=1)  # [R, K]
    for threshold in np.flatnonzero(right.any(axis=0)).tolist():
        which = np.flatnonzero(right[ever, threshold])
        reached = own.take(ever[which], axis=1).cumsum(axis=1)  # [R, right]
        counted = upto.take(which, axis=1)
        ignored = np.flatnonzero(found[: ever[-1], threshold] == IGNORED)
        if len(ignored):
            sums = np.concatenate([0 * upto[:, :1], own[:, ignored].cumsum(axis=1)], axis=1)
            counted -= sums[:, np.searchsorted(ignored, ever[which])]
        precision = reached / (counted + _EPSILON)
        best = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
        ends = np.searchsorted(RECALLS, reached / of_all[:, None], side="right")  # recalls reached so far
        # a detection of weight zero reaches nothing, and the first one does not reach recall 0 for it
        steps = np.diff(ends * (reached > 0), axis=1, prepend=0)
        result[:, threshold] = (steps * best).sum(axis=1) / len(RECALLS)
    result[totals == 0] = np.nan
    return result


def mean_precision(precisions: np.ndarray) -> np.ndarray:
    """[R]: the mean over thresholds and classes with objects of [R, T, classes]; 0 without any."""
    known = ~np.isnan(precisions)
    total = np.where(known, precisions, 0).sum(axis=(1, 2))
    mean: np.ndarray = total / np.maximum(known.sum(axis=(1, 2)), 1)
    return mean
