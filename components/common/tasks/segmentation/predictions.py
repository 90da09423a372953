"""Predictions of masks: counts of pixels by image and class, and a coarse grid of the masks themselves."""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from PIL import Image

from components.common.contracts.transforms import TransformSpec
from components.common.data.image_files import as_seen
from components.common.tasks.drawing import beside, coloured
from components.common.tasks.predictions import ByClass, ByDraws, Predictions, draws, p_values
from components.common.tasks.segmentation import VOID

_GRID = 64  # rows and columns of a mask that are kept
_MAX_NAMES = 4
_EPSILON = 1e-9


@dataclass(frozen=True, kw_only=True)
class MaskPredictions(ByDraws, Predictions):
    """Each image's part of mIoU: its pixels by class. 12 bytes a class and 8 KB an image.

    mIoU is the mean over classes of intersection over union, both summed over all images: see Everingham et al., "The
    PASCAL Visual Object Classes Challenge: A Retrospective", 2015.
    """

    pixels: np.ndarray  # [N, classes, 3] int32: predicted rightly, predicted, labelled; without void
    grid: np.ndarray  # [N, r, c] uint8: the class at every so many pixels, VOID where the outputs held NaN or infinity
    labels: np.ndarray  # [N, r, c] uint8: the same of the labels

    @classmethod
    def of(cls, outputs: np.ndarray, labels: np.ndarray) -> Self:
        """See Predictions. outputs: [B, classes, H, W] logits; labels: [B, H, W], VOID for what doesn't count."""
        num_images, num_classes, *size = outputs.shape
        best = outputs.argmax(axis=1)
        best[~np.isfinite(outputs).all(axis=(1, 2, 3))] = VOID
        rows, columns = (np.arange(0, side, -(-side // _GRID)) for side in size)
        places = np.ix_(np.arange(num_images), rows, columns)
        offsets = num_classes * np.arange(num_images)[:, None, None]

        def count(classes: np.ndarray, which: np.ndarray) -> np.ndarray:
            which = which & (classes < num_classes)
            codes = (classes + offsets)[which]
            return np.bincount(codes, minlength=num_images * num_classes).reshape(num_images, num_classes)

        known, labels = labels != VOID, labels.astype(np.int64)
        counts = [count(best, known & (best == labels)), count(best, known), count(labels, known)]
        return cls(
            pixels=np.stack(counts, axis=-1).astype(np.int32),
            grid=best[places].astype(np.uint8),
            labels=labels[places].astype(np.uint8),
        )

    @property
    def num_images(self) -> int:
        """Images predicted."""
        return len(self.pixels)

    @property
    def num_undefined(self) -> int:
        """Images whose outputs held NaN or infinity: no pixel is right."""
        return int((self.grid == VOID).all(axis=(1, 2)).sum())

    @property
    def score_pct(self) -> float:
        """The mIoU in per cent, over classes that the labels show."""
        return float(_mean(_ious(self.pixels.sum(axis=0, dtype=np.int64)[None]))[0])

    @property
    def scores_by_draw(self) -> np.ndarray:
        """See ByDraws."""
        return _mean(self._by_draw())

    @property
    def per_image(self) -> np.ndarray:
        """[N] the mIoU of each image alone, over classes that its label shows; 100 where it shows none."""
        shows_any = (self.pixels[..., 2] > 0).any(axis=1)
        return np.where(shows_any, _mean(_ious(self.pixels)), 100.0)

    def chance(self, classes: tuple[str, ...]) -> tuple[str, float]:
        """See Predictions: the mIoU of a mask that is this class everywhere."""
        labelled = self.pixels[..., 2].sum(axis=0, dtype=np.int64)
        index = int(labelled.argmax())
        num_seen = max(int((labelled > 0).sum()), 1)
        return classes[index], 100 * float(labelled[index] / max(labelled.sum(), 1)) / num_seen

    def num_unseen(self, num_classes: int) -> int:
        """See Predictions."""
        return num_classes - int((self.pixels[..., 2] > 0).any(axis=0).sum())

    def agreement_pct(self, other: Self) -> float:
        """Share of the grid's pixels on which both predict the same class, in per cent."""
        return 100 * float((self.grid == other.grid).mean())

    def num_differing(self, other: Self) -> int:
        """Images whose grids differ."""
        return int((self.grid != other.grid).any(axis=(1, 2)).sum())

    def differing(self, other: Self, most: int) -> np.ndarray:
        """See Predictions: those that differ most in mIoU, then in pixels."""
        pixels = (self.grid != other.grid).mean(axis=(1, 2))
        return self.most_different(other, pixels, most)

    def described(self, place: int, classes: tuple[str, ...]) -> tuple[str, str]:
        """See Predictions: the classes of the label, the largest first, and the image's mIoU."""
        labelled = self.pixels[place, :, 2]
        shown = [classes[index] for index in np.argsort(-labelled, kind="stable")[:_MAX_NAMES] if labelled[index]]
        return ", ".join(shown) or "no class", f"mIoU {self.per_image[place]:.1f} %"

    def picture(self, image: Image.Image, transform: TransformSpec, fp32: Self, place: int) -> Image.Image:
        """See Predictions: the image as the model sees it, the label's mask, FP32's and this one's, side by side."""
        seen = as_seen(image, transform)
        masks = [self.labels[place], fp32.grid[place], self.grid[place]]
        return beside([seen, *(coloured(mask).resize(seen.size, Image.Resampling.NEAREST) for mask in masks)])

    def select(self, which: "slice | np.ndarray") -> Self:
        """See Predictions."""
        return type(self)(**{entry.name: getattr(self, entry.name)[which] for entry in fields(self)})

    def by_class(self, fp32: Self, num_classes: int) -> ByClass:
        """See Predictions; by the paired bootstrap, each class by its IoU."""
        reference, own = fp32._by_draw(), self._by_draw()  # [1 + R, classes]
        num_images = (self.pixels[..., 2] > 0).sum(axis=0)
        image_fp32, image_own = _ious(fp32.pixels), _ious(self.pixels)  # [N, classes]
        return ByClass(
            num_images=num_images,
            fp32_pct=reference[0],
            own_pct=own[0],
            num_regressed=(image_own < image_fp32).sum(axis=0),
            num_improved=(image_own > image_fp32).sum(axis=0),
            p_values=p_values(own[0] - reference[0], (own - reference)[1:], num_images),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """See Predictions: [N, classes, 3] int32, of which the score and its interval follow."""
        return {"": self.pixels}

    def _by_draw(self) -> np.ndarray:
        """[1 + R, classes] IoU in per cent, of all images and of each draw; NaN for classes without a label."""
        flat = self.pixels.reshape(self.num_images, -1).astype(np.float32)
        sums = [flat.sum(axis=0, dtype=np.float64)[None], *(weights @ flat for weights in draws(self.num_images))]
        return _ious(np.concatenate(sums).reshape(-1, *self.pixels.shape[1:]))


def _ious(pixels: np.ndarray) -> np.ndarray:
    """[..., classes, 3] -> [..., classes] IoU in per cent; NaN for a class that the labels don't show."""
    right, predicted, labelled = (pixels[..., index].astype(np.float64) for index in range(3))
    return np.where(labelled > 0, 100 * right / (predicted + labelled - right + _EPSILON), np.nan)


def _mean(ious: np.ndarray) -> np.ndarray:
    """[R, classes] -> [R], over the classes that are shown; 0 without any."""
    known = ~np.isnan(ious)
    mean: np.ndarray = np.where(known, ious, 0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    return mean
