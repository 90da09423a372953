"""Differences between two models that saw the same images, and how certain they are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

SIGNIFICANCE = 0.05  # a p-value below it is no chance
NUM_RESAMPLES = 10_000  # of the bootstrap: its ends are then steady to about a hundredth of the interval

_Z95 = 1.959964  # two-sided 95 % of the normal distribution
_MIN_CHI_SQUARE = 25  # differing images from which McNemar's test takes the chi-square approximation


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """How often one model is right where the other is wrong, and the difference in top-1 with its 95 % interval."""

    num_images: int
    num_lost: int  # the reference is right, the other wrong
    num_gained: int  # the other way round
    delta_points: float  # top-1 of the other minus that of the reference, in percentage points
    low_points: float
    high_points: float


def paired_difference(right_reference: np.ndarray, right_other: np.ndarray) -> PairedDifference:
    """Compare two models image by image.

    Only those images count on which one is right and the other wrong. The interval is that of Bonett and Price,
    "Adjusted Wald confidence interval for a difference of binomial proportions based on paired data" (2012), which
    holds for few images and few differences too.

    Args:
        right_reference: [N] bool, whether the reference's top-1 is the label.
        right_other: [N] bool, the same of the other model, in the same order.
    """
    lost = int((right_reference & ~right_other).sum())
    gained = int((~right_reference & right_other).sum())
    count = len(right_reference)
    share_lost, share_gained = (lost + 1) / (count + 2), (gained + 1) / (count + 2)
    middle = share_gained - share_lost
    margin = _Z95 * math.sqrt((share_gained + share_lost - middle**2) / (count + 2))
    return PairedDifference(
        num_images=count,
        num_lost=lost,
        num_gained=gained,
        delta_points=100 * (gained - lost) / max(count, 1),
        low_points=100 * max(-1.0, middle - margin),
        high_points=100 * min(1.0, middle + margin),
    )


def bootstrap_interval(
    num_images: int, num_lost: int, num_gained: int, *, num_resamples: int = NUM_RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """The 95 % interval of the difference in top-1 by the paired bootstrap, in percentage points.

    Images are drawn with replacement and both models judged on the same draw (Efron and Tibshirani, "An Introduction
    to the Bootstrap", 1993, chapter 13: the percentile interval). A draw's difference depends only on how many of its
    images are lost and how many gained, so these counts are drawn, from their multinomial distribution: the same as
    drawing images, in memory that does not depend on how many there are.

    What did not happen once can't be drawn: without lost and gained images the interval is a point, however few images
    there are. The interval of `paired_difference` allows for what so few images could not show.

    Args:
        num_images: images that both models saw.
        num_lost: the reference is right, the other wrong.
        num_gained: the other way round.
        num_resamples: draws.
        seed: of the draws; the same counts and seed give the same interval.
    """
    if num_images == 0:
        return 0.0, 0.0
    shares = np.array([num_lost, num_gained, num_images - num_lost - num_gained]) / num_images
    draws = np.random.default_rng(seed).multinomial(num_images, shares, size=num_resamples)  # [resamples, 3] int64
    low, high = np.percentile(100 * (draws[:, 1] - draws[:, 0]) / num_images, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True, kw_only=True)
class McNemar:
    """Whether two models that saw the same images differ by more than chance."""

    p_value: float  # two-sided
    test: Literal["exact binomial", "chi-square"]


def mcnemar(num_lost: int, num_gained: int) -> McNemar:
    """McNemar's test: if the models were equally good, an image that they differ on is as often lost as gained.

    Below 25 such images the exact binomial test; from there the chi-square approximation with Edwards' continuity
    correction (McNemar, "Note on the sampling error of the difference between correlated proportions", 1947;
    Edwards, 1948). Without any, p is 1.
    """
    total, smaller = num_lost + num_gained, min(num_lost, num_gained)
    if total < _MIN_CHI_SQUARE:
        tail = sum(math.comb(total, count) for count in range(smaller + 1))
        return McNemar(p_value=min(1.0, 2 * tail / 2**total), test="exact binomial")
    statistic = max(0, abs(num_lost - num_gained) - 1) ** 2 / total
    # Of a chi-square variable with one degree of freedom, which is the square of a normal one.
    return McNemar(p_value=math.erfc(math.sqrt(statistic / 2)), test="chi-square")


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for having made many tests, in the order given.

    Holm's step-down method ("A simple sequentially rejective multiple test procedure", 1979): where nothing is wrong,
    the chance that even one corrected value falls below 0.05 is at most 5 %, however the tests depend on each other.
    Not the method of Benjamini and Hochberg, which bounds the share of false alarms among those raised: a gate stops a
    release for a single class, so a single false alarm counts.
    """
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected, largest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected
