"""Histograms of validation that travel with a model, and the distance from them that chance explains.

Of each image its predicted class, confidence and entropy, and brightness, contrast, sharpness and size of the input.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import first_problem
from components.common.contracts.records import Precision, Record
from components.common.contracts.transforms import TransformSpec

StatisticName = Literal["class", "confidence", "entropy", "brightness", "contrast", "sharpness", "size"]


@dataclass(frozen=True)
class _Kind:
    """One number of each image."""

    meaning: str
    grid: int  # steps of 1 / grid: differences below say nothing
    num_bins: int  # at most, of about equally many images
    open_ended: bool  # with a bin below and one above all that validation saw


STATISTICS: Mapping[StatisticName, _Kind] = {
    "class": _Kind("predicted class", 1, 32, False),
    "confidence": _Kind("probability of the predicted class", 10_000, 10, True),
    "entropy": _Kind("entropy of all classes' probabilities over the largest possible, 0 to 1", 10_000, 10, True),
    "brightness": _Kind("mean luminance of the model's input, 0 to 1", 10_000, 10, True),
    "contrast": _Kind("standard deviation of the luminance", 10_000, 10, True),
    "sharpness": _Kind("mean difference of the luminance of neighbours in a row", 10_000, 10, True),
    "size": _Kind("pixels of the image that was sent", 1, 10, True),
}
IMAGE_STATISTICS: tuple[StatisticName, ...] = ("brightness", "contrast", "sharpness", "size")
WINDOW = 1000  # images that a server compares at a time
MIN_IMAGES = 200  # below, a comparison says little
MAX_IMAGES = 10**12  # in a bin; far more could not be added up in 64 bits
# Share of the comparisons that alarm where nothing changed, all statistics together, over all samples that validation
# may have got. With an unlucky one it is several times as high, and then to be 1 % at most.
FALSE_ALARMS = 0.001
_TAIL = 0.01  # of the draws, from which rarer ones are extrapolated
_MIN_PER_BIN = 10  # of validation's images
_NUM_DRAWS = 20_000
_LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601
_ROWS = 56  # of an image that are looked at: all of a small one, each fourth of 224
_MAX_BYTES = 1 << 20
_MAX_BINS = 64


class StatisticHistogram(Record):
    """One statistic over validation."""

    name: StatisticName
    edges: tuple[float, ...] = Field(description="Between the bins, ascending; an edge belongs to the bin above it.")
    counts: tuple[int, ...] = Field(min_length=1, max_length=_MAX_BINS, description="Images by bin.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.counts) != len(self.edges) + 1 or min(self.counts) < 0:
            raise ValueError(f"{self.name}: counts must be one more than edges, and 0 or more each")
        if not all(map(math.isfinite, self.edges)) or any(np.diff(self.edges) <= 0):
            raise ValueError(f"{self.name}: edges must be finite and ascend")
        return self

    def count(self, values: np.ndarray) -> np.ndarray:
        """Images by bin, [bins] int64, of a value for each image, [N]."""
        return np.bincount(self.bins(values), minlength=len(self.counts))

    def bins(self, values: np.ndarray) -> np.ndarray:
        """Index of each value's bin, [N] int64."""
        return np.searchsorted(self.edges, np.asarray(values, np.float64), side="right")

    def label(self, index: int, classes: Sequence[str] = ()) -> str:
        """A bin for people. `classes`: their names, for the statistic "class"."""
        low = self.edges[index - 1] if index else None
        high = self.edges[index] if index < len(self.edges) else None
        if self.name == "class":
            first, last = int(low or 0), int(high) - 1 if high is not None else len(classes) - 1
            names = classes[first : last + 1] or ("?",)
            return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        if low is None or high is None:
            return f"below {high:,.10g}" if low is None else f"{low:,.10g} or more"
        step = 1 / STATISTICS[self.name].grid
        return f"{low:,.10g}" if high - low < 1.5 * step else f"{low:,.10g} to {high - step:,.10g}"


class Baseline(Record):
    """Histograms of the validation images and of a precision's predictions on them."""

    schema_version: Literal[1] = 1
    precision: Precision
    num_images: int = Field(ge=1, le=MAX_IMAGES)
    statistics: tuple[StatisticHistogram, ...] = Field(min_length=1, max_length=len(STATISTICS))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len({statistic.name for statistic in self.statistics}) < len(self.statistics):
            raise ValueError("each statistic may be there once")
        if wrong := [each.name for each in self.statistics if sum(each.counts) != self.num_images]:
            raise ValueError(f"{wrong[0]}: its counts do not add up to num_images")
        return self

    def no_counts(self) -> dict[StatisticName, np.ndarray]:
        """Zeros in place of images by bin of each statistic, [bins] int64."""
        return {each.name: np.zeros(len(each.counts), np.int64) for each in self.statistics}


def baseline_file(precision: str) -> str:
    """Its name in a report and in a model repository."""
    return f"baseline_{precision}.json"


def example_name(statistic: str, index: int) -> str:
    """File of the example image of a bin."""
    return f"{statistic}-{index:02d}.jpg"


def read_baseline(file: Path) -> Baseline:
    """Read a baseline whose digest was checked.

    Raises:
        EngineryError: it is none.
    """
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
        return Baseline.model_validate_json(file.read_bytes())
    except ValueError as error:
        problem = first_problem(error) if isinstance(error, ValidationError) else str(error)
        raise EngineryError(
            f"{file} is not a baseline ({problem}). Validate again, and export the model repository from that report",
            code="invalid-baseline",
        ) from None


def make_baseline(precision: Precision, values: Mapping[StatisticName, np.ndarray]) -> Baseline:
    """Histograms of validation.

    Bins hold about equally many images each, at least 10, and small classes share one with their neighbours in the
    order of classes: there are at most 32 bins for 1,000 classes. Below and above all that was seen is a bin each, and
    where there are up to 10 values, such as of size, each has one.

    Args:
        precision: what predicted.
        values: of each statistic one for each image, [N]; at least one image.
    """
    histograms = []
    for name, each in values.items():
        kind = STATISTICS[name]
        grid = np.floor(np.asarray(each, np.float64) * kind.grid).astype(np.int64)  # [N]
        distinct, counts = (found.tolist() for found in np.unique(grid, return_counts=True))
        if kind.open_ended and len(distinct) <= kind.num_bins:  # such as of size: each a bin, and what lies between
            inner = sorted({edge for value in distinct for edge in (value, value + 1)})
        else:
            starts = _starts(distinct, counts, max(len(grid) / kind.num_bins, _MIN_PER_BIN))
            inner = [*starts, distinct[-1] + 1] if kind.open_ended else starts[1:]
        empty = StatisticHistogram(
            name=name, edges=tuple(edge / kind.grid for edge in inner), counts=(0,) * (len(inner) + 1)
        )
        histograms.append(empty.model_copy(update={"counts": tuple(empty.count(each).tolist())}))
    return Baseline(precision=precision, num_images=len(each), statistics=tuple(histograms))


def _starts(values: Sequence[int], counts: Sequence[int], target: float) -> list[int]:
    """First value of each bin, so that each holds `target` images or more. `counts`: images by value."""
    starts, held = [values[0]], 0
    for value, count in zip(values, counts, strict=True):
        if held >= target:
            starts.append(value)
            held = 0
        held += count
    return starts if held >= target or len(starts) == 1 else starts[:-1]


def image_statistics(images: Any, transform: TransformSpec) -> tuple[Any, Any, Any]:
    """Brightness, contrast and sharpness of each image, [B] float32 each.

    Args:
        images: [B, 3, H, W] float32, normalized; of NumPy or torch, on any device, as is what is returned.
        transform: by which they were normalized.
    """
    step = max(1, images.shape[2] // _ROWS)
    gray = sum(  # [B, H / step, W], black 0 and white 1
        weight * std * images[:, channel, ::step] + weight * mean
        for channel, (weight, mean, std) in enumerate(zip(_LUMINANCE, transform.mean, transform.std, strict=True))
    )
    brightness = gray.mean((1, 2))
    contrast = ((gray * gray).mean((1, 2)) - brightness * brightness).clip(0) ** 0.5
    return brightness, contrast, abs(gray[:, :, 1:] - gray[:, :, :-1]).mean((1, 2))


# --- distances


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Distance of one statistic from the baseline, and the largest that chance explains."""

    statistic: StatisticName
    psi: float
    psi_threshold: float
    js: float
    js_threshold: float

    @property
    def drifted(self) -> bool:
        """True if one of the two is above its threshold."""
        return self.psi > self.psi_threshold or self.js > self.js_threshold


def divergences(counts: np.ndarray, baseline: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The population stability index and the Jensen-Shannon divergence in bits, 0..1, [...] float64 each.

    One image is added to each bin, so that an empty one has a share.

    Args:
        counts: [..., bins] images.
        baseline: [bins] images.
    """
    p, q = ((each + 1) / (each.sum(-1, keepdims=True) + each.shape[-1]) for each in (baseline, counts))
    middle = (p + q) / 2
    psi = ((q - p) * np.log(q / p)).sum(-1)
    return psi, (p * np.log2(p / middle) + q * np.log2(q / middle)).sum(-1) / 2


def thresholds(baseline: np.ndarray, num_images: int, num_statistics: int) -> tuple[float, float]:
    """The PSI and Jensen-Shannon divergence that so many images of validation's kind rarely exceed.

    Validation is resampled: in each draw its images get random weights (the Bayesian bootstrap of Rubin, 1981), since
    they are a sample, too; an image of a kind that it never saw has the weight of one. The window is drawn by these.
    The quantile is Bonferroni's for both distances of all statistics. It is rarer than there are draws for, so beyond
    the largest hundredth the tail is taken for exponential (peaks over threshold: Pickands, 1975).

    Args:
        baseline: [bins] images.
        num_images: of the window.
        num_statistics: that are compared at the same time.
    """
    random = np.random.default_rng(0)
    windows = random.multinomial(num_images, random.dirichlet(baseline + 1.0, _NUM_DRAWS))  # [draws, bins]
    further = np.log(_TAIL * 2 * num_statistics / FALSE_ALARMS)  # mean excesses beyond the tail's start
    tails = [np.sort(each)[-round(_TAIL * _NUM_DRAWS) :] for each in divergences(windows, baseline)]
    psi, js = (float(tail[0] + further * (tail.mean() - tail[0])) for tail in tails)
    return psi, js


class Comparison:
    """Compares windows of the same number of images with a baseline."""

    def __init__(self, baseline: Baseline, num_images: int) -> None:
        self._counts = {each.name: np.array(each.counts) for each in baseline.statistics}
        self._thresholds = {
            name: thresholds(counts, num_images, len(self._counts)) for name, counts in self._counts.items()
        }

    def compare(self, counts: Mapping[StatisticName, np.ndarray]) -> tuple[Divergence, ...]:
        """`counts`: of each statistic images by bin, [bins]."""
        found = []
        for name, own in self._counts.items():
            psi, js = map(float, divergences(counts[name], own))
            most_psi, most_js = self._thresholds[name]
            found.append(Divergence(statistic=name, psi=psi, psi_threshold=most_psi, js=js, js_threshold=most_js))
        return tuple(found)
