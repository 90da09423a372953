"""Differences between two models that saw the same images, and how certain they are."""

import math
from dataclasses import dataclass

import numpy as np

_Z95 = 1.959964  # two-sided 95 % of the normal distribution


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
