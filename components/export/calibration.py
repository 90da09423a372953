"""Streaming histograms of activations, and the INT8 scale that each calibration method reads from one.

A histogram takes the same memory for ten images as for ten thousand, and depends on neither the order nor the
batching of the samples: bins are a power of two wide, so growing the range only adds neighbours together.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import torch

from components.common.errors import EngineryError

NUM_BINS = 2048
INT8_MAX = 127
# Scale of a tensor that was always zero. Any positive number would do; this one is also normal in float16.
ZERO_TENSOR_SCALE = 2.0**-14

_MIN_EXPONENT = -100  # keeps NUM_BINS / 2**exponent finite in float32
_CHUNK = 1 << 17  # values binned at a time: temporaries stay in the CPU's cache, 5x faster than whole tensors
_NUM_INT8_LEVELS = 128  # magnitudes of a symmetric INT8 code, and the smallest range that entropy tries, in bins
_MSE_STRIDE = 8  # bins between the ranges that `mse` tries


class CalibrationMethod(StrEnum):
    """How a histogram becomes a scale. None wins on every network: measure, then choose."""

    MAX = "max"
    PERCENTILE = "percentile"
    ENTROPY = "entropy"
    MSE = "mse"


@dataclass
class Histogram:
    """Magnitudes of one tensor over all samples: bin i counts |x| in [i, i + 1) * `bin_width`."""

    name: str
    counts: np.ndarray = field(default_factory=lambda: np.zeros(NUM_BINS, np.int64))
    exponent: int = _MIN_EXPONENT
    """The bins cover [0, 2**exponent), the smallest such range that holds `max_abs`."""
    max_abs: float = 0.0

    @property
    def bin_width(self) -> float:
        """Width of a bin, in the tensor's units."""
        return 2.0**self.exponent / NUM_BINS

    @property
    def num_values(self) -> int:
        """Values counted so far."""
        return int(self.counts.sum())

    def add(self, values: np.ndarray) -> None:
        """Counts `values` (any shape, floating point).

        Raises:
            EngineryError: a value is NaN or infinite.
        """
        flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
        if flat.size == 0:
            return
        low, high = float(flat.min()), float(flat.max())  # a NaN anywhere makes both NaN
        self._grow(low, high)
        # Multiplying by a power of two is exact, so a value's bin is the same whatever batch it arrives in.
        bins_per_unit = np.float32(1.0 / self.bin_width)
        offset = NUM_BINS if low < 0 else 0
        for start in range(0, flat.size, _CHUNK):
            codes = (flat[start : start + _CHUNK] * bins_per_unit).astype(np.intp)  # towards zero
            if offset:
                signed = np.bincount(codes + offset, minlength=2 * NUM_BINS)
                self.counts += signed[NUM_BINS:]
                self.counts[1:] += signed[NUM_BINS - 1 : 0 : -1]
            else:
                self.counts += np.bincount(codes, minlength=NUM_BINS)

    def add_tensor(self, values: torch.Tensor) -> None:
        """Counts `values` where they lie, on a GPU or the CPU, into the same bins as `add`.

        Raises:
            EngineryError: a value is NaN or infinite.
        """
        flat = values.detach().float().flatten()
        if flat.numel() == 0:
            return
        low, high = (float(bound) for bound in torch.aminmax(flat))
        self._grow(low, high)
        codes = (flat.abs() * (1.0 / self.bin_width)).to(torch.int32)  # towards zero
        self.counts += torch.bincount(codes, minlength=NUM_BINS).cpu().numpy()

    def _grow(self, low: float, high: float) -> None:
        """Widens the range to hold `low` and `high`, by adding neighbouring bins together."""
        if not (np.isfinite(low) and np.isfinite(high)):
            raise EngineryError(
                f"calibration: tensor '{self.name}' holds a NaN or infinite value (range [{low}, {high}]). "
                "Check the checkpoint and the calibration images: the FP32 model must be finite on them."
            )
        self.max_abs = max(self.max_abs, -low, high)
        exponent = max(int(np.frexp(self.max_abs)[1]), _MIN_EXPONENT)
        doublings = exponent - self.exponent
        if doublings <= 0:
            return
        merged = np.zeros_like(self.counts)
        bins_per_bin = min(2**doublings, NUM_BINS)
        merged[: NUM_BINS // bins_per_bin] = self.counts.reshape(-1, bins_per_bin).sum(axis=1)
        self.counts, self.exponent = merged, exponent


def compute_scale(histogram: Histogram, method: CalibrationMethod, percentile: float = 99.99) -> float:
    """The symmetric INT8 scale (real value of code 1) of a tensor.

    Args:
        histogram: the tensor's magnitudes over the calibration samples.
        method: `max` keeps the largest magnitude; `percentile` clips above that percentile of magnitudes; `mse`
            minimizes the squared rounding and clipping error; `entropy` minimizes the Kullback-Leibler divergence
            between the tensor's distribution and its INT8 image (S. Migacz, "8-bit Inference with TensorRT",
            GTC 2017).
        percentile: in (0, 100], for `percentile` only.

    Raises:
        EngineryError: no samples, or `percentile` out of range.
    """
    if histogram.num_values == 0:
        raise EngineryError(
            f"calibration: tensor '{histogram.name}' saw no samples. Give at least one batch of images."
        )
    if histogram.max_abs == 0.0:
        return ZERO_TENSOR_SCALE
    match method:
        case CalibrationMethod.MAX:
            amax = histogram.max_abs
        case CalibrationMethod.PERCENTILE:
            amax = _percentile_amax(histogram, percentile)
        case CalibrationMethod.ENTROPY:
            amax = _entropy_amax(histogram)
        case CalibrationMethod.MSE:
            amax = _mse_amax(histogram)
    return min(amax, histogram.max_abs) / INT8_MAX


def _percentile_amax(histogram: Histogram, percentile: float) -> float:
    """The magnitude below which `percentile` % of all values (zeros included) lie, linear inside a bin."""
    if not 0.0 < percentile <= 100.0:
        raise EngineryError(f"calibration: percentile is {percentile}, expected 0 < percentile <= 100 (usual: 99.99).")
    below = np.cumsum(histogram.counts)
    target = percentile / 100.0 * below[-1]
    index = int(np.searchsorted(below, target))
    inside = 1.0 - (below[index] - target) / histogram.counts[index]
    # A percentile inside bin 0 (nearly all zeros) would make the scale vanish: half a bin is the floor.
    return float(max(index + inside, 0.5) * histogram.bin_width)


def _entropy_amax(histogram: Histogram) -> float:
    """The range whose 128-level quantization loses least information.

    For a range of i bins, P is the histogram with everything above clipped into bin i - 1, and Q spreads each of
    the 128 levels evenly over its non-empty bins. KL(P, Q) needs only sums over levels, which are differences of
    cumulative sums, so that all ranges are evaluated at once: 5 ms a tensor where the loop takes a second.
    """
    counts = histogram.counts.astype(np.float64)
    counts[0] = counts[1]  # the zeros after a ReLU are exact at any scale and would drown the rest
    num_used = int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 0
    if num_used <= _NUM_INT8_LEVELS:
        return histogram.max_abs

    def cumulative(values: np.ndarray) -> np.ndarray:
        return np.concatenate(([0.0], np.cumsum(values)))

    below, below_nonzero = cumulative(counts), cumulative(counts > 0)
    below_plogp = cumulative(_xlogy(counts, counts))
    ranges = np.arange(_NUM_INT8_LEVELS, num_used + 1)  # [R] bins
    edges = ranges[:, None] * np.arange(_NUM_INT8_LEVELS + 1) // _NUM_INT8_LEVELS  # [R, 129]
    level_sum = np.diff(below[edges], axis=1)  # [R, 128]
    level_bins = np.diff(below_nonzero[edges], axis=1)
    level_q = level_sum / np.maximum(level_bins, 1.0)

    total, inside, last = below[-1], below[ranges], counts[ranges - 1]
    clipped = total - inside
    sum_plogp = below_plogp[ranges] - _xlogy(last, last) + _xlogy(last + clipped, last + clipped)
    sum_plogq = _xlogy(level_sum, level_q).sum(axis=1) + _xlogy(clipped, level_q[:, -1])
    divergence = (sum_plogp - sum_plogq) / total - np.log(total) + np.log(np.maximum(inside, 1.0))
    divergence[(last == 0) & (clipped > 0)] = np.inf  # Q is zero where P is not
    best = len(ranges) - 1 - int(np.argmin(divergence[::-1]))  # of equals the widest, as NVIDIA's tools do
    return float(ranges[best]) * histogram.bin_width


def _mse_amax(histogram: Histogram) -> float:
    """The range with the least squared quantization error, each bin standing for its centre."""
    centres = (np.arange(NUM_BINS) + 0.5) * histogram.bin_width  # [2048]
    centres[0] = 0.0  # mostly exact zeros (ReLU, padding), which every scale represents exactly
    used = np.flatnonzero(histogram.counts)
    centres, counts = centres[used], histogram.counts[used].astype(np.float64)
    ranges = np.arange(_MSE_STRIDE, used[-1] + 1 + _MSE_STRIDE, _MSE_STRIDE) * histogram.bin_width  # [R]
    scales = (ranges / INT8_MAX)[:, None]
    error = np.minimum(np.rint(centres / scales), INT8_MAX) * scales - centres  # [R, used]
    return float(ranges[int(np.argmin((error * error) @ counts))])


def _xlogy(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Elementwise x * log(y), and 0 where x is 0."""
    return np.where(x > 0, x * np.log(np.where(y > 0, y, 1.0)), 0.0)
