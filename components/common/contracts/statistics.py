"""Differences between two models that saw the same images, and how certain they are."""

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # the settings of gate need this module, and no arrays
    import numpy as np

SIGNIFICANCE = 0.05  # a p-value below it is no chance
NOTHING_PCT = 1.0  # of a score that is no share of images: up to here a model learned nothing, whatever a guess has

# Added to the images that regressed, over the number of images that the drop means. Without it up to 5.2 % pass at the
# budget where that is few images. Exact counting showed that so much is enough up to 1 point, and decides little else.
_CORRECTION = 0.44
_MIN_CHI_SQUARE = 25  # differing images from which McNemar's test takes the chi-square approximation
MAX_IMAGES_NEEDED = 10_000_000  # that `images_needed` names


def paired_counts(right_reference: "np.ndarray", right_other: "np.ndarray") -> tuple[int, int, int]:
    """Images, and of these those on which only the reference is right (regressed), or only the other (improved).

    Args:
        right_reference: [N] bool, whether the reference's top-1 is the label.
        right_other: [N] bool, the same of the other model, in the same order.
    """
    regressed, improved = right_reference & ~right_other, ~right_reference & right_other
    return len(right_reference), int(regressed.sum()), int(improved.sum())


def difference_interval(num_images: int, num_regressed: int, num_improved: int) -> tuple[float, float]:
    """Ends of the one-sided 95 % intervals of the difference in top-1, in percentage points: see `_upper`."""
    counts = num_images, num_regressed, num_improved
    return -_upper(*counts), -drop_lower(*counts)


def drop_upper(num_images: float, num_regressed: float, num_improved: float) -> float:
    """Upper end of the one-sided 95 % interval of a drop in top-1, in percentage points.

    At least 3 of N, the rule of three: so many images prove no smaller drop, whatever improved on a few of them.

    Args:
        num_images: images that both models saw.
        num_regressed: the reference is right, the other wrong.
        num_improved: the other way round.
    """
    return max(_upper(num_images, num_regressed, num_improved), _upper(num_images, 0, 0))


def drop_lower(num_images: float, num_regressed: float, num_improved: float, *, num_tests: int = 1) -> float:
    """Lower end of the one-sided 95 % interval of a drop in top-1, in percentage points: see `drop_upper`.

    Of so many tests at once: corrected by Bonferroni, so that with 95 % confidence all these ends hold together.
    """
    return -_upper(num_images, num_improved, num_regressed, SIGNIFICANCE / num_tests)


def _upper(num_images: float, num_regressed: float, num_improved: float, level: float = SIGNIFICANCE) -> float:
    """Tango's interval; where none improved the exact one of the share that regressed, where that is longer."""
    if num_images <= 0:
        return 100.0
    upper = tango_upper(num_images, num_regressed, num_improved, level)
    return 100 * (upper if num_improved else max(upper, _exact_upper(num_images, num_regressed, level)))


def tango_upper(num_images: float, num_regressed: float, num_improved: float, level: float = SIGNIFICANCE) -> float:
    """Upper end of the one-sided score interval of the share that regressed minus the share that improved, in -1..1.

    Its confidence is 1 - `level`.

    Tango, "Equivalence test and confidence interval for the difference in proportions for the paired-sample design",
    1998; with a correction for few images, which are counted in whole ones.
    """
    measured, quantile = num_regressed - num_improved, NormalDist().inv_cdf(1 - level)

    def is_within(drop: float) -> bool:
        """True if so small a measured difference is not surprising where the true one is `drop`."""
        # The likeliest share of improved images under that drop, from the quadratic equation of the paper.
        b = (2 * num_images - measured) * drop - num_regressed - num_improved
        root = math.sqrt(max(0.0, b * b + 8 * num_images * num_improved * drop * (1 - drop)))
        improved = (root - b) / (4 * num_images)
        variance = num_images * (2 * improved + drop * (1 - drop))
        correction = _CORRECTION / max(1.0, abs(num_images * drop))
        return measured + correction - num_images * drop >= -quantile * math.sqrt(max(0.0, variance))

    return _last(is_within, measured / num_images, 1.0, tolerance=1e-12)


def _exact_upper(num_images: float, num_regressed: float, level: float) -> float:
    """Upper end of the exact one-sided interval of a share, in 0..1 (Clopper and Pearson, 1934)."""
    if num_regressed >= num_images:
        return 1.0
    return _last(
        lambda share: beta_cdf(share, num_regressed + 1, num_images - num_regressed) <= 1 - level,
        0.0,
        1.0,
        tolerance=1e-10,
    )


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function of `x` in 0..1, a and b above 0: scipy's betainc, without scipy.

    By its continued fraction (DLMF 8.17.22) with Lentz's method. The images of gate and promote have no scipy.
    """
    if not 0 < x < 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction of the other side converges faster
        return 1 - beta_cdf(1 - x, b, a)
    fraction = numerator = 1.0
    denominator, number = 0.0, 0
    while True:
        half = number // 2
        if number == 0:
            term = 1.0
        elif number % 2:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1) * (a + 2 * half))
        denominator = 1 / ((1 + term * denominator) or 1e-300)
        numerator = (1 + term / numerator) or 1e-300
        change = numerator * denominator
        fraction *= change
        number += 1
        if number > 1 and abs(change - 1) < 1e-14:
            break
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(scale) * (fraction - 1) / a


def images_needed(num_images: int, num_regressed: int, num_improved: int, budget_points: float) -> int | None:
    """Images from which on the interval of the drop lies on one side of a budget, if the shares seen stay as they are.

    Returns:
        None where more than ten million would be needed, as for a budget of 0 or a drop that is as large as it.
    """
    regressed, improved = num_regressed / num_images, num_improved / num_images

    def is_open(count: float) -> bool:
        counts = count, regressed * count, improved * count
        return drop_lower(*counts) <= budget_points < drop_upper(*counts)

    enough = 2.0 * num_images
    while is_open(enough):
        if enough > MAX_IMAGES_NEEDED:
            return None
        enough *= 2
    return math.ceil(_last(is_open, enough / 2, enough, tolerance=1e-3))


def _last(holds: Callable[[float], bool], low: float, high: float, *, tolerance: float) -> float:
    """The largest value in low..high for which a condition holds that holds for all smaller ones too."""
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high


def chance_of(num_correct: int, num_images: int, share: float) -> float:
    """Probability that so many images or more are right by chance, where each is with probability `share`.

    The exact one-sided binomial test.
    """
    return beta_cdf(share, num_correct, num_images - num_correct + 1) if num_correct > 0 else 1.0


def is_above_chance(score_pct: float, guess_pct: float, num_images: int, low_pct: float | None = None) -> bool:
    """True if a model learned something: its score is significantly above that of a guess.

    Args:
        score_pct: of the model.
        guess_pct: score of a model that always answers the most frequent class; 0 where there is none.
        num_images: what the score was measured on.
        low_pct: the lower end of the score's interval; None for a share of images, which has an exact test.
    """
    if low_pct is not None:
        return low_pct > max(guess_pct, NOTHING_PCT)
    return chance_of(round(score_pct / 100 * num_images), num_images, guess_pct / 100) < SIGNIFICANCE


def mcnemar(num_regressed: int, num_improved: int) -> tuple[float, Literal["exact binomial", "chi-square"]]:
    """Two-sided p-value of McNemar's test, and how it was computed.

    If two models were equally good, an image that they differ on regresses as often as it improves. Up to 24 take the
    exact binomial test; from there the chi-square approximation with Edwards' continuity correction (McNemar, "Note on
    the sampling error of the difference between correlated proportions", 1947; Edwards, 1948). Without any, p is 1.
    """
    total, smaller = num_regressed + num_improved, min(num_regressed, num_improved)
    if total < _MIN_CHI_SQUARE:
        tail = sum(math.comb(total, count) for count in range(smaller + 1))
        return min(1.0, 2 * tail / 2**total), "exact binomial"
    statistic = max(0, abs(num_regressed - num_improved) - 1) ** 2 / total
    # Of a chi-square variable with one degree of freedom, which is the square of a normal one.
    return math.erfc(math.sqrt(statistic / 2)), "chi-square"


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
