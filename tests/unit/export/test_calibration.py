"""Histograms and the scales read from them."""

import itertools
import tracemalloc

import numpy as np
import onnx
import pytest

from components.common.contracts.errors import EngineryError
from components.export.calibration import (
    NUM_BINS,
    ZERO_TENSOR_SCALE,
    CalibrationMethod,
    Histogram,
    collect_with_onnxruntime,
    compute_scale,
)
from components.export.placement import activation_tensors


def histogram_of(*batches):
    histogram = Histogram("t")
    for batch in batches:
        histogram.add(np.asarray(batch, np.float32))
    return histogram


def gaussian_with_outliers(num=200_000, outlier=40.0):
    values = np.random.default_rng(0).standard_normal(num).astype(np.float32)
    values[:5] = outlier
    return values


def test_histogram_depends_on_neither_batches_nor_order():
    values = (np.random.default_rng(0).standard_normal(300_000) * np.geomspace(1e-3, 50, 300_000)).astype(np.float32)
    whole = histogram_of(values)
    for parts in (np.array_split(values, 7), np.array_split(values[::-1], 300), [values.reshape(10, -1)]):
        split = histogram_of(*parts)
        assert split.exponent == whole.exponent
        assert split.max_abs == whole.max_abs
        np.testing.assert_array_equal(split.counts, whole.counts)


def test_histogram_equals_numpys():
    values = gaussian_with_outliers()
    histogram = histogram_of(*np.array_split(values, 3))
    expected, _ = np.histogram(np.abs(values), bins=NUM_BINS, range=(0, 2.0**histogram.exponent))
    np.testing.assert_array_equal(histogram.counts, expected)
    assert histogram.num_values == values.size


@pytest.mark.parametrize("values", [[1.0], [0.5, -2.0], [2.0**-60], [1e30], [0.0, 3.0], np.ones((2, 3, 4))])
def test_range_is_the_smallest_power_of_two_that_holds_the_largest_value(values):
    histogram = histogram_of(values)
    largest = np.abs(np.asarray(values, np.float32)).max()
    assert histogram.max_abs == largest
    assert 2.0**histogram.exponent / 2 <= largest < 2.0**histogram.exponent
    assert histogram.num_values == np.size(values)


def test_half_precision_and_strided_values():
    values = gaussian_with_outliers(1000).astype(np.float16).reshape(10, 100)
    np.testing.assert_array_equal(histogram_of(values.T).counts, histogram_of(values).counts)


def test_memory_does_not_grow_with_samples():
    batch = np.random.default_rng(0).standard_normal((4, 64, 32, 32)).astype(np.float32)
    histogram = histogram_of(batch)
    tracemalloc.start()
    histogram.add(batch)
    _, peak_of_one = tracemalloc.get_traced_memory()
    for _ in range(50):
        histogram.add(batch)
    current, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= peak_of_one + 100_000
    assert current < 100_000


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_name_the_tensor(bad):
    with pytest.raises(EngineryError, match="tensor 't' holds a NaN or infinite"):
        histogram_of([1.0, bad, 2.0])


def test_max_is_exact():
    histogram = histogram_of([0.1, -3.7], [2.0])
    assert compute_scale(histogram, CalibrationMethod.MAX) == np.float32(3.7) / 127


@pytest.mark.parametrize("percentile", [50.0, 99.0, 99.99, 100.0])
@pytest.mark.parametrize("rectified", [False, True])
def test_percentile_agrees_with_numpy(percentile, rectified):
    values = np.random.default_rng(0).standard_normal(500_000).astype(np.float32)
    if rectified:
        values = np.maximum(values + 1, 0)
    histogram = histogram_of(values)
    amax = compute_scale(histogram, CalibrationMethod.PERCENTILE, percentile) * 127
    assert amax == pytest.approx(np.percentile(np.abs(values), percentile), abs=1.01 * histogram.bin_width)


@pytest.mark.parametrize("percentile", [0.0, -1.0, 100.1])
def test_percentile_out_of_range(percentile):
    with pytest.raises(EngineryError, match="expected 0 < percentile <= 100"):
        compute_scale(histogram_of([1.0]), CalibrationMethod.PERCENTILE, percentile)


@pytest.mark.parametrize(
    ("method", "low", "high"),
    [
        (CalibrationMethod.PERCENTILE, 3.5, 4.5),
        (CalibrationMethod.ENTROPY, 2.5, 8.0),
        # 200,000 roundings err by (amax / 127)**2 / 12 each, five clippings by (40 - amax)**2: least at 31.
        (CalibrationMethod.MSE, 29.0, 33.0),
    ],
)
def test_outliers_are_clipped(method, low, high):
    histogram = histogram_of(gaussian_with_outliers())
    assert low < compute_scale(histogram, method) * 127 < high
    assert compute_scale(histogram, CalibrationMethod.MAX) * 127 == pytest.approx(40.0)


@pytest.mark.parametrize("method", list(CalibrationMethod))
@pytest.mark.parametrize("factor", [2.0**-20, 3.0, 1e4])
def test_scales_follow_the_unit_of_the_tensor(method, factor):
    values = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    power = 2.0 ** np.round(np.log2(factor))
    assert compute_scale(histogram_of(values * power), method) == pytest.approx(
        power * compute_scale(histogram_of(values), method)
    )
    scale = compute_scale(histogram_of(values * np.float32(factor)), method)
    assert 1.5 < scale * 127 / factor < 6.0


@pytest.mark.parametrize("method", list(CalibrationMethod))
def test_degenerate_tensors(method):
    assert compute_scale(histogram_of(np.zeros(100)), method) == ZERO_TENSOR_SCALE
    for values in ([1.0], [5.0] * 1000, [0.0] * 10**6 + [1.0], np.linspace(0, 1e-3, 50)):
        scale = compute_scale(histogram_of(values), method)
        assert 0 < scale <= np.float32(np.max(values)) / 127 * (1 + 1e-6)
    with pytest.raises(EngineryError, match="no samples"):
        compute_scale(Histogram("t"), method)


def entropy_amax_by_the_book(histogram):
    """The loop of S. Migacz' GTC 2017 talk, with plain sums."""
    counts = histogram.counts.astype(np.float64)
    counts[0] = counts[1]
    best, best_divergence = None, np.inf
    for num_bins in range(128, int(np.flatnonzero(counts)[-1]) + 2):
        p = counts[:num_bins].copy()
        p[-1] += counts[num_bins:].sum()
        q = np.zeros(num_bins)
        edges = np.arange(129) * num_bins // 128
        for low, high in itertools.pairwise(edges):
            used = counts[low:high] > 0
            q[low:high][used] = counts[low:high].sum() / max(used.sum(), 1)
        p, q = p / p.sum(), q / q.sum()
        if (q[p > 0] == 0).any():
            continue
        divergence = (p[p > 0] * np.log(p[p > 0] / q[p > 0])).sum()
        if divergence <= best_divergence + 1e-12:
            best, best_divergence = num_bins, divergence
    return best * histogram.bin_width


@pytest.mark.parametrize("outlier", [6.0, 9.0])
def test_entropy_equals_the_plain_loop(outlier):
    histogram = histogram_of(np.maximum(gaussian_with_outliers(20_000, outlier), 0))
    expected = min(entropy_amax_by_the_book(histogram), histogram.max_abs)
    assert compute_scale(histogram, CalibrationMethod.ENTROPY) * 127 == pytest.approx(expected)


def test_mse_finds_the_least_error():
    values = gaussian_with_outliers(50_000)
    chosen = compute_scale(histogram_of(values), CalibrationMethod.MSE)

    def error(scale):
        return np.square(np.clip(np.rint(values / scale), -127, 127) * scale - values).sum()

    candidates = np.linspace(0.1, 1.0, 200) * np.abs(values).max() / 127
    assert error(chosen) <= 1.02 * min(error(scale) for scale in candidates)


class TestCollection:
    def test_histograms_do_not_depend_on_the_batches(self, resnet18):
        path, model, images, _ = resnet18
        tensors = activation_tensors(model)
        seen = []
        whole = collect_with_onnxruntime(path, tensors, [images], seen.append)
        split = collect_with_onnxruntime(path, tensors, iter([images[:3], images[3:]]))
        assert list(whole) == tensors
        assert seen[-1] == len(images)
        for name in tensors:
            assert whole[name].num_values == split[name].num_values
            # ONNX Runtime's sums may differ in the last bit between batch sizes, which moves a value to the next bin.
            assert whole[name].max_abs == pytest.approx(split[name].max_abs, rel=1e-4)
        np.testing.assert_array_equal(whole["images"].counts, split["images"].counts)
        assert whole["images"].max_abs == np.abs(images).max()

    def test_non_finite_activations(self, resnet18):
        path, model, images, _ = resnet18
        with pytest.raises(EngineryError, match="tensor 'images' holds a NaN"):
            collect_with_onnxruntime(path, activation_tensors(model), [np.full_like(images, np.nan)])

    def test_unknown_tensor_and_no_images(self, resnet18):
        path, _, images, _ = resnet18
        with pytest.raises(EngineryError, match=r"has no tensor named \['nowhere'\]"):
            collect_with_onnxruntime(path, ["nowhere"], [images])
        with pytest.raises(EngineryError, match="no images"):
            collect_with_onnxruntime(path, ["images"], [])

    def test_the_file_is_not_changed(self, resnet18):
        path, model, images, _ = resnet18
        collect_with_onnxruntime(path, activation_tensors(model), [images[:1]])
        assert onnx.load(path).SerializeToString() == model.SerializeToString()
