"""Predictions of boxes: detections after suppression, which of them are right, and the objects of the labels."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from PIL import Image, ImageDraw

from components.common.contracts.transforms import TransformSpec
from components.common.data.image_files import as_seen
from components.common.tasks.detection.average_precision import FOUND, WRONG, Matches, match, mean_precision, rows_of
from components.common.tasks.detection.boxes import NUM_BOX_VALUES, detect, overlap_of_pairs
from components.common.tasks.drawing import beside, palette
from components.common.tasks.predictions import ByClass, ByDraws, Predictions, draws, p_values

SURE = 0.3
"""The score from which a detection is shown, counted in an image, and compared with another model's. mAP takes all."""

_ALIKE_IOU = 0.5  # from which two models' detections are the same
_NUM_DRAWS = 500  # of mAP, each of which sorts out every detection again; the mean over classes is near normal
_MAX_ROWS = 1 << 14  # detections that are compared at once
_MIN_LOGIT = -4.6  # of a score of 1 %: scores that are lower in both models are not compared
_SPREAD = 0.1  # of an edge, as a share of the object's side: the scale of its Laplace distribution


@dataclass(frozen=True, kw_only=True)
class BoxPredictions(ByDraws, Predictions):
    """Each image's part of mAP: up to 100 detections of 32 bytes, its objects, and 4 bytes a class.

    An image alone is measured by the F1 of its detections that are SURE, with an overlap of 0.5: mAP has no share of an
    image. It counts images that regressed and improved, and orders those to look at; the gate judges mAP.
    """

    boxes: np.ndarray  # [D, 4] float32: x1, y1, x2, y2 in pixels of the model's input
    matches: Matches  # of these detections
    objects: np.ndarray  # [O, 6] float32: x1, y1, x2, y2, class, ignored
    object_counts: np.ndarray  # [N] int32: objects of each image, ignored ones included
    undefined: np.ndarray  # [N] bool: the outputs held NaN or infinity, which finds nothing

    @classmethod
    def of(cls, outputs: np.ndarray, labels: np.ndarray) -> Self:
        """See Predictions. outputs: [B, A, 8 + classes], as `boxes` has it; labels: [B, M, 6], class -1 is padding."""
        num_classes = outputs.shape[2] - NUM_BOX_VALUES
        undefined = ~np.isfinite(outputs).all(axis=(1, 2))
        real = labels[..., 4] >= 0
        objects = [own[which].astype(np.float32) for own, which in zip(labels, real, strict=True)]
        found = [
            detect(output if known else output[:0])
            for output, known in zip(outputs, (~undefined).tolist(), strict=True)
        ]
        counted = [own[own[:, 5] == 0, 4].astype(int) for own in objects]
        return cls(
            boxes=np.concatenate([own.boxes for own in found]),
            matches=Matches(
                counts=np.array([len(own) for own in found], np.int32),
                scores=np.concatenate([own.scores for own in found]),
                classes=np.concatenate([own.classes for own in found]),
                found=np.concatenate([match(*pair) for pair in zip(found, objects, strict=True)]),
                num_objects=np.stack([np.bincount(own, minlength=num_classes) for own in counted]).astype(np.int32),
            ),
            objects=np.concatenate(objects),
            object_counts=real.sum(axis=1, dtype=np.int32),
            undefined=undefined,
        )

    @property
    def num_images(self) -> int:
        """Images predicted."""
        return self.matches.num_images

    @property
    def num_undefined(self) -> int:
        """Images whose outputs held NaN or infinity: nothing is found."""
        return int(self.undefined.sum())

    @property
    def score_pct(self) -> float:
        """The mAP@[.5:.95] in per cent, over classes that have objects."""
        return 100 * float(mean_precision(self._precisions[None])[0])

    @property
    def score_low_pct(self) -> float:
        """See Predictions."""
        draws = self.scores_by_draw[1:]
        # less their mean: repeated images raise the precision that is reached at some recall
        return self.score_pct + float(np.quantile(draws - draws.mean(), 0.05))

    @property
    def per_image(self) -> np.ndarray:
        """[N] F1 in per cent of each image's detections that are SURE, at an overlap of 0.5; 100 where nothing is."""
        found, wrong, objects = (each.sum(axis=1) for each in self._counts)
        return np.where(self.undefined, 0.0, _f1(found, wrong, objects))

    def measures(self) -> dict[str, float | tuple[float, ...] | None]:
        """See Predictions: the mAP at an overlap of 0.5, and the curve that it is the mean of."""
        curve = tuple(round(value, 2) for value in self.precision_by_recall())
        return {
            "score50_pct": 100 * float(mean_precision(self._precisions[None, :1])[0]),
            "precision_by_recall_pct": curve,
        }

    def precision_by_recall(self) -> tuple[float, ...]:
        """The precision in per cent at recalls of 0, 1, ... 100 %, at an overlap of 0.5; the mean over classes."""
        curves = self.matches.curve()  # [classes, 101]
        known = ~np.isnan(curves[:, 0])
        return tuple((100 * curves[known].sum(axis=0) / max(known.sum(), 1)).tolist())

    def chance(self, classes: tuple[str, ...]) -> tuple[str, float]:
        """See Predictions: there is nothing to guess."""
        return "", 0.0

    def num_unseen(self, num_classes: int) -> int:
        """See Predictions."""
        return num_classes - int((self.matches.num_objects > 0).any(axis=0).sum())

    def agreement_pct(self, other: Self) -> float:
        """Share of both models' detections, of those that are SURE, that the other one has, too, in per cent.

        The same detection has the same class and an overlap of at least 0.5.
        """
        alike = np.concatenate([each[own._sure] for own, each in zip((self, other), self._alike(other), strict=True)])
        return 100 * float(alike.mean()) if len(alike) else 100.0

    def num_differing(self, other: Self) -> int:
        """Images of which one model has a SURE detection that the other has not, or says nothing."""
        return int((self._num_different(other) > 0).sum())

    def differing(self, other: Self, most: int) -> np.ndarray:
        """See Predictions: those that differ most in F1, then in detections."""
        different = self._num_different(other)
        return self.most_different(other, different, most)

    def described(self, place: int, classes: tuple[str, ...]) -> tuple[str, str]:
        """See Predictions: how many objects there are, and how many of them are found."""
        found, wrong, objects = (int(each[place].sum()) for each in self._counts)
        label = f"{objects:,} object{'' if objects == 1 else 's'}" if objects else "no object"
        if self.undefined[place]:
            return label, "nothing (NaN or infinity)"
        parts = {"found": found, "missed": objects - found, "wrong": wrong}
        return label, ", ".join(f"{number:,} {name}" for name, number in parts.items() if number) or "nothing found"

    def picture(self, image: Image.Image, transform: TransformSpec, fp32: Self, place: int) -> Image.Image:
        """See Predictions: the image as the model sees it with the label's boxes, FP32's and this one's, side by side.

        Of detections those that are SURE; a colour for each class; ignored objects are thin.
        """
        seen = as_seen(image, transform)
        rows = rows_of(self.object_counts, np.array([place]))
        sets = [(self.objects[rows, :4], self.objects[rows, 4], self.objects[rows, 5] > 0)]
        for own in (fp32, self):
            rows = rows_of(own.matches.counts, np.array([place]))
            rows = rows[own._sure[rows]]
            sets.append((own.boxes[rows], own.matches.classes[rows], np.zeros(len(rows), bool)))
        return beside([_outlined(seen, *each) for each in sets])

    def select(self, which: "slice | np.ndarray") -> Self:
        """See Predictions."""
        chosen = np.arange(self.num_images)[which]
        return type(self)(
            boxes=self.boxes[rows_of(self.matches.counts, chosen)],
            matches=self.matches.select(chosen),
            objects=self.objects[rows_of(self.object_counts, chosen)],
            object_counts=self.object_counts[chosen],
            undefined=self.undefined[chosen],
        )

    def by_class(self, fp32: Self, num_classes: int) -> ByClass:
        """See Predictions; by the paired bootstrap, each class by its average precision."""
        reference, own = fp32._by_draw, self._by_draw  # [1 + R, classes]
        shown = self.matches.num_objects > 0  # [N, classes]
        num_images = shown.sum(axis=0)
        image_fp32, image_own = (_f1(*each._counts) for each in (fp32, self))  # [N, classes]
        return ByClass(
            num_images=num_images,
            fp32_pct=reference[0],
            own_pct=own[0],
            num_regressed=(shown & (image_own < image_fp32)).sum(axis=0),
            num_improved=(shown & (image_own > image_fp32)).sum(axis=0),
            p_values=p_values(own[0] - reference[0], (own - reference)[1:], num_images),
        )

    @staticmethod
    def divergence(expected: np.ndarray, actual: np.ndarray) -> float:
        """See Predictions. [B, A, 8 + classes] each.

        Most anchors find nothing, so sums over anchors are divided by the sum of the expected scores. Classes count as
        Bernoulli distributions. Edges count as Laplace distributions with a scale of a tenth of the object's side,
        weighted by the largest score of their anchor.
        """
        first, second = expected[..., NUM_BOX_VALUES:], actual[..., NUM_BOX_VALUES:]
        # not (a > b or ...): NaN is compared, too
        compared = ~((first <= _MIN_LOGIT) & (second <= _MIN_LOGIT))
        one, other = first[compared].astype(np.float64), second[compared].astype(np.float64)
        scores = 1 / (1 + np.exp(-one))
        total = float((scores * (one - other) + np.logaddexp(0, other) - np.logaddexp(0, one)).sum())
        anchors = compared.any(axis=-1)
        largest = 1 / (1 + np.exp(-first[anchors].max(axis=-1).astype(np.float64)))
        edges, moved = (each[anchors, 4:NUM_BOX_VALUES].astype(np.float64) for each in (expected, actual))
        sides = np.abs(edges[:, :2] + edges[:, 2:]) + 1e-6  # width and height, in sides of the anchor
        shifts = np.abs(edges - moved) / (_SPREAD * np.tile(sides, 2))
        total += float((largest[:, None] * (shifts + np.exp(-shifts) - 1)).sum())
        return max(total / max(float(largest.sum()), 1.0), 0.0)

    def arrays(self) -> dict[str, np.ndarray]:
        """See Predictions: [D, 7] float32, image, x1, y1, x2, y2, score, class; objects with ignored as the last."""
        own = self.matches
        return {
            "": np.column_stack([own.images, self.boxes, own.scores, own.classes]).astype(np.float32),
            "objects": np.column_stack(
                [np.repeat(np.arange(self.num_images), self.object_counts), self.objects]
            ).astype(np.float32),
        }

    @cached_property
    def _precisions(self) -> np.ndarray:
        """[10, classes]: see `Matches.average_precisions`."""
        return self.matches.average_precisions()[0]

    @cached_property
    def _by_draw(self) -> np.ndarray:
        """[1 + R, classes] average precision in per cent, of all images and of each draw; NaN without objects."""
        weighted = [self.matches.average_precisions(weights) for weights in draws(self.num_images, _NUM_DRAWS)]
        found: np.ndarray = 100 * np.concatenate([self._precisions[None], *weighted]).mean(axis=1)
        return found

    @property
    def scores_by_draw(self) -> np.ndarray:
        """See ByDraws."""
        return mean_precision(self._by_draw[:, None])

    @property
    def _sure(self) -> np.ndarray:
        """[D] bool."""
        sure: np.ndarray = self.matches.scores >= SURE
        return sure

    @cached_property
    def _counts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[N, classes] each: SURE detections that are right, and wrong, at an overlap of 0.5; objects."""
        own = self.matches
        num_images, num_classes = own.num_objects.shape
        codes, state = own.images * num_classes + own.classes, own.found[:, 0]
        found, wrong = (
            np.bincount(codes[self._sure & (state == kind)], minlength=num_images * num_classes)
            for kind in (FOUND, WRONG)
        )
        return found.reshape(num_images, -1), wrong.reshape(num_images, -1), own.num_objects

    def _alike(self, other: Self) -> tuple[np.ndarray, np.ndarray]:
        """[D] of this and [D] of the other one, bool: SURE detections that both have."""
        own, its = (np.flatnonzero(each._sure) for each in (self, other))
        counts = np.bincount(other.matches.images[its], minlength=other.num_images)
        alike, its_alike = np.zeros(len(self.boxes), bool), np.zeros(len(other.boxes), bool)
        for start in range(0, len(own), _MAX_ROWS):
            rows = own[start : start + _MAX_ROWS]
            images = self.matches.images[rows]
            first, second = np.repeat(rows, counts[images]), its[rows_of(counts, images)]
            same = self.matches.classes[first] == other.matches.classes[second]
            first, second = first[same], second[same]
            same = overlap_of_pairs(self.boxes[first], other.boxes[second]) >= _ALIKE_IOU
            alike[first[same]] = True
            its_alike[second[same]] = True
        return alike, its_alike

    def _num_different(self, other: Self) -> np.ndarray:
        """[N] SURE detections that only one has; one more where only one says nothing."""
        different = (self.undefined != other.undefined).astype(np.int64)
        for own, alike in zip((self, other), self._alike(other), strict=True):
            different += np.bincount(own.matches.images[own._sure & ~alike], minlength=self.num_images)
        return different


def _f1(found: np.ndarray, wrong: np.ndarray, objects: np.ndarray) -> np.ndarray:
    """F1 in per cent, 100 where there is nothing to find and nothing found."""
    of_all = found + wrong + objects
    return np.where(of_all > 0, 200 * found / np.maximum(of_all, 1), 100.0)


def _outlined(image: Image.Image, boxes: np.ndarray, classes: np.ndarray, thin: np.ndarray) -> Image.Image:
    """The image with a rectangle about each box, in the colour of its class."""
    picture, colours = image.copy(), palette()
    draw, width = ImageDraw.Draw(picture), max(1, round(max(image.size) / 100))
    for box, index, is_thin in zip(boxes.tolist(), classes.astype(int).tolist(), thin.tolist(), strict=True):
        colour = tuple(colours[1 + index % 254].tolist())  # neither dark gray nor white, which stand for other things
        draw.rectangle(box, outline=colour, width=1 if is_thin else width)
    return picture
