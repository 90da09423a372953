"""Records of a model's outputs over some images, by task: enough for the score and its comparison. Numpy alone."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

import numpy as np
from PIL import Image

from components.common.contracts.records import PairedComparison
from components.common.contracts.statistics import beta_cdf, drop_upper
from components.common.contracts.transforms import TransformSpec


@dataclass(frozen=True, kw_only=True)
class ByClass:
    """A precision beside FP32 on each class, [classes] each."""

    num_images: np.ndarray  # images that show the class
    fp32_pct: np.ndarray  # NaN for a class without images
    own_pct: np.ndarray
    num_regressed: np.ndarray  # of these images, those on which the class is worse than with FP32
    num_improved: np.ndarray
    p_values: np.ndarray  # two-sided, of no difference; NaN where nothing differs


class Predictions(Protocol):
    """Predictions of samples, in the loader's order."""

    @classmethod
    def of(cls, outputs: np.ndarray, labels: np.ndarray) -> Self:
        """Those of a batch. outputs: [B, ...] float, as the model gives them; labels: [B, ...], as the loader does."""
        ...

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """The predictions of all parts, one part after the other."""
        return joined(parts)

    @property
    def num_images(self) -> int:
        """Images predicted."""
        ...

    @property
    def num_undefined(self) -> int:
        """Images whose outputs held NaN or infinity, which counts as wrong."""
        ...

    @property
    def score_pct(self) -> float:
        """The task's score, 0 to 100."""
        ...

    @property
    def score_low_pct(self) -> float | None:
        """The lower end of its one-sided 95 % interval; None for a share of images, which has an exact test."""
        return None

    @property
    def right(self) -> np.ndarray | None:
        """[N] bool: whether an image is right; None where it is more or less so."""
        ...

    def measures(self) -> dict[str, float | tuple[float, ...] | None]:
        """Further measures, by their field of AccuracyRow."""
        return {}

    def chance(self, classes: tuple[str, ...]) -> tuple[str, float]:
        """The class that is most frequent in the labels ("" where there is none to guess), and its score if guessed."""
        ...

    def num_unseen(self, num_classes: int) -> int:
        """Classes that no label shows."""
        ...

    def agreement_pct(self, other: Self) -> float:
        """Share of predictions that are equal, in per cent."""
        return 100.0 * (1 - self.num_differing(other) / self.num_images)

    def num_differing(self, other: Self) -> int:
        """Images whose predictions differ."""
        ...

    def differing(self, other: Self, most: int) -> np.ndarray:
        """Up to so many images to look at, of those whose predictions differ: places in order."""
        ...

    def described(self, place: int, classes: tuple[str, ...]) -> tuple[str, str]:
        """An image's label, and what was predicted, in a few words."""
        ...

    def picture(self, image: Image.Image, transform: TransformSpec, fp32: Self, place: int) -> Image.Image:
        """An image of which predictions differ, RGB, with label and predictions where a picture can show them."""
        return image

    def select(self, which: "slice | np.ndarray") -> Self:
        """Those of some images."""
        ...

    def comparison(self, fp32: Self) -> PairedComparison:
        """The difference in score to FP32 on the same images."""
        ...

    def by_class(self, fp32: Self, num_classes: int) -> ByClass:
        """The difference on each class."""
        ...

    @staticmethod
    def divergence(expected: np.ndarray, actual: np.ndarray) -> float:
        """Divergence of the outputs of two models, in nats, averaged over all that they say; 0 for equal."""
        return class_divergence(expected, actual)

    def drop(self, fp32: Self, num_images: int) -> "ScoreDrop | Top1Drop":
        """The drop against FP32, on so many images at best; on these where they are as many."""
        ...

    def arrays(self) -> dict[str, np.ndarray]:
        """Arrays of predictions.npz by name: "" is of these predictions alone, the rest is equal for all."""
        ...


def joined(parts: Sequence[Any]) -> Any:
    """Dataclasses of arrays, or of such dataclasses: every array of all parts, one part after the other."""
    found = {}
    for entry in fields(parts[0]):
        values = [getattr(part, entry.name) for part in parts]
        found[entry.name] = np.concatenate(values) if isinstance(values[0], np.ndarray) else joined(values)
    return type(parts[0])(**found)


def class_divergence(expected: np.ndarray, actual: np.ndarray) -> float:
    """Kullback-Leibler divergence of the classes on axis 1, averaged over the others. [N, classes, ...] logits each."""
    first, second = log_softmax(expected), log_softmax(actual)
    return max(float((np.exp(first) * (first - second)).sum(axis=1).mean()), 0.0)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """[N, classes, ...] float -> the same in float64: logarithms of probabilities."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


NUM_DRAWS = 2000
_SEED = 20
_Z = 1.6448536269514722  # of a one-sided 95 % interval
_MAX_WEIGHTS = 1 << 25  # at once, of 4 bytes


def draws(num_images: int, num_draws: int = NUM_DRAWS) -> Iterator[np.ndarray]:
    """Counts of each image in each draw of the bootstrap (Efron, 1979), [R, N] float32, in parts of R.

    The same for equal numbers of images: models that are compared are drawn together.
    """
    rng = np.random.default_rng(_SEED)
    size = max(1, min(num_draws, _MAX_WEIGHTS // max(num_images, 1)))
    shares = np.full(num_images, 1 / num_images)
    for start in range(0, num_draws, size):
        yield rng.multinomial(num_images, shares, size=min(size, num_draws - start)).astype(np.float32)


def bootstrap_comparison(
    fp32: np.ndarray, own: np.ndarray, per_image_fp32: np.ndarray, per_image_own: np.ndarray
) -> PairedComparison:
    """Compare two models by the paired bootstrap over images.

    The upper end of the drop is drawn with one image more, of which the other model loses FP32's whole score, as in
    Gaffke, "Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative variable",
    2005: few images may show none of those that are lost. N of them without a difference prove a drop of 3 / N.

    Args:
        fp32: [1 + R] scores in points: of all images, then of each draw.
        own: [1 + R], of the same draws.
        per_image_fp32: [N] what each image adds, to count those that are worse or better.
        per_image_own: [N]
    """
    differences = (own - fp32)[1:]
    delta, std = float(own[0] - fp32[0]), float(differences.std())
    num_images = len(per_image_own)
    unseen = np.random.default_rng(_SEED).poisson(size=len(differences)) * fp32[0] / max(num_images, 1)
    low, high = np.quantile(differences - unseen, 0.05), np.quantile(differences, 0.95)
    return PairedComparison(
        num_images=num_images,
        num_regressed=int((per_image_own < per_image_fp32).sum()),
        num_improved=int((per_image_own > per_image_fp32).sum()),
        delta_points=delta,
        # the image itself is in the interval, also where the draws are skewed
        drop_lower_points=-max(float(high), delta),
        drop_upper_points=min(-min(float(low), delta), float(fp32[0])),
        std_points=std,
        mcnemar_p=p_of(delta, std, num_images),
        mcnemar_test="bootstrap",
    )


def p_of(delta: float, std: float, num_images: int) -> float:
    """Two-sided p-value, by Student's t-test, of a difference whose deviation the bootstrap has from so many images.

    At least that of as many images which all regressed, by McNemar's test: a few that agree have hardly a deviation.
    """
    degrees = num_images - 1
    if degrees < 1 or delta == 0:
        return 1.0
    # the bootstrap divides by the number of images
    squared = (delta / std) ** 2 * degrees / num_images if std > 0 else math.inf
    return max(beta_cdf(degrees / (degrees + squared), degrees / 2, 0.5), 0.5**degrees)


def p_values(deltas: np.ndarray, differences: np.ndarray, num_images: np.ndarray) -> np.ndarray:
    """[classes] `p_of` each class, NaN where no draw differs.

    Args:
        deltas: [classes]
        differences: [R, classes], of each draw; NaN where a draw leaves a class without an image.
        num_images: [classes], that show it.
    """
    stds = np.ma.masked_invalid(differences).std(axis=0).filled(0.0)
    differs = (stds > 0) | (np.abs(deltas) > 0)
    each = zip(differs, deltas, stds, num_images.tolist(), strict=True)
    return np.array([p_of(*values) if is_tested else math.nan for is_tested, *values in each])


_Z_HOPELESS = 2.0  # standard deviations: one in 44 of the candidates that would hold is given up each time


@dataclass(frozen=True, kw_only=True)
class Top1Drop:
    """Images that regressed and improved against FP32, which need not be whole numbers."""

    num_images: int
    num_regressed: float
    num_improved: float

    @classmethod
    def of(cls, found: PairedComparison, num_images: int) -> Self:
        """The drop on `num_images` images, of which these are the first, when the rest turns out as one in 44 times."""
        total = max(num_images, found.num_images)
        times = total / found.num_images
        differing = times * (found.num_regressed + found.num_improved)
        # Of what is left and of the rates seen, each image that regressed or improved being as likely the other.
        spread = math.sqrt(
            times * (total - found.num_images) * (found.num_regressed + found.num_improved + 1) / found.num_images
        )
        difference = times * (found.num_regressed - found.num_improved) - _Z_HOPELESS * spread
        num_regressed, num_improved = (max((differing + sign * difference) / 2, 0.0) for sign in (1, -1))
        return cls(num_images=total, num_regressed=num_regressed, num_improved=num_improved)

    @property
    def points(self) -> float:
        """The drop in percentage points; negative for a gain."""
        return 100 * (self.num_regressed - self.num_improved) / self.num_images

    def proved(self, num_images: int, allowed_points: float) -> float:
        """The upper end of the one-sided 95 % interval of the drop on so many images, with the same shares of them.

        The drop itself where so few images can't prove any drop to be within `allowed_points`.
        """
        if drop_upper(num_images, 0, 0) > allowed_points:
            return self.points
        times = num_images / self.num_images
        return drop_upper(num_images, round(times * self.num_regressed), round(times * self.num_improved))


@dataclass(frozen=True, kw_only=True)
class ScoreDrop:
    """A drop in score against FP32 of which the standard deviation is known, on so many images."""

    num_images: int
    points: float
    std_points: float
    unseen_points: float  # see PairedComparison
    least_points: float  # the upper end of a model that is equal to FP32

    @classmethod
    def of(cls, found: PairedComparison, fp32_pct: float, num_images: int) -> Self:
        """The drop as it may turn out at best on `num_images` images, of which these are the first."""
        total = max(num_images, found.num_images)
        std = (found.std_points or 0.0) * math.sqrt(found.num_images / total)
        spread = math.sqrt(max((found.std_points or 0.0) ** 2 - std**2, 0.0))  # between these and all of them
        return cls(
            num_images=total,
            points=-found.delta_points - _Z_HOPELESS * spread,
            std_points=std,
            unseen_points=found.unseen_points * found.num_images / total,
            least_points=3 * fp32_pct / total,
        )

    def proved(self, num_images: int, allowed_points: float) -> float:
        """See Top1Drop."""
        times = self.num_images / num_images
        if self.least_points * times > allowed_points:
            return self.points
        return self.points + math.hypot(_Z * self.std_points * math.sqrt(times), self.unseen_points * times)


class ByDraws:
    """Common part of predictions whose score is no share of images: its interval is by the bootstrap."""

    @property
    def score_pct(self) -> float:
        """See Predictions."""
        raise NotImplementedError

    @property
    def scores_by_draw(self) -> np.ndarray:
        """[1 + R] scores in per cent: of all images, then of each draw."""
        raise NotImplementedError

    @property
    def per_image(self) -> np.ndarray:
        """[N] scores in per cent of each image alone."""
        raise NotImplementedError

    @property
    def right(self) -> None:
        """See Predictions."""
        return None

    @property
    def score_low_pct(self) -> float:
        """See Predictions."""
        return float(np.quantile(self.scores_by_draw[1:], 0.05))

    def comparison(self, fp32: Self) -> PairedComparison:
        """See Predictions; by the paired bootstrap."""
        return bootstrap_comparison(fp32.scores_by_draw, self.scores_by_draw, fp32.per_image, self.per_image)

    def drop(self, fp32: Self, num_images: int) -> ScoreDrop:
        """See Predictions."""
        return ScoreDrop.of(self.comparison(fp32), fp32.score_pct, num_images)

    def most_different(self, other: Self, amounts: np.ndarray, most: int) -> np.ndarray:
        """Up to so many images of which `amounts` ([N], how much they differ) is above 0: places in order.

        Those that differ most in their own scores come first, then those that differ most.
        """
        order = np.lexsort((-amounts, -np.abs(self.per_image - other.per_image)))
        return np.sort(order[amounts[order] > 0][:most])
