"""Histograms, the scales read from them, and the cache that keeps them."""

import itertools
import tracemalloc

import numpy as np
import onnx
import pytest

from components.common.contracts.errors import EngineryError
from components.common.contracts.records import CALIBRATION_METHODS
from components.export.calibration import (
    NUM_BINS,
    ZERO_TENSOR_SCALE,
    Histogram,
    cached_histograms,
    collect_with_onnxruntime,
    compute_scale,
)
from components.export.placement import activation_tensors
from tests.unit.networks import onnx_model
from tests.unit.refusals import refuses


def histogram_of(*batches):
    histogram = Histogram("t")
    for batch in batches:
        histogram.add(np.asarray(batch, np.float32))
    return histogram


def gaussian_with_outliers(num=200_000, outlier=40.0):
    values = np.random.default_rng(0).standard_normal(num).astype(np.float32)
    values[:5] = outlier
    return values


def test_histogram_is_numpys_and_depends_on_neither_batches_nor_order():
    values = (np.random.default_rng(0).standard_normal(300_000) * np.geomspace(1e-3, 50, 300_000)).astype(np.float32)
    whole = histogram_of(values)
    expected, _ = np.histogram(np.abs(values), bins=NUM_BINS, range=(0, 2.0**whole.exponent))
    np.testing.assert_array_equal(whole.counts, expected)
    assert whole.num_values == values.size
    for parts in (np.array_split(values, 7), np.array_split(values[::-1], 300), [values.reshape(10, -1).T]):
        split = histogram_of(*parts)
        assert split.exponent == whole.exponent
        assert split.max_abs == whole.max_abs
        np.testing.assert_array_equal(split.counts, whole.counts)


@pytest.mark.parametrize("values", [[1.0], [0.5, -2.0], [2.0**-60], [1e30], [0.0, 3.0], np.ones((2, 3, 4))])
def test_range_is_the_smallest_power_of_two_that_holds_the_largest_value(values):
    histogram = histogram_of(values)
    largest = np.abs(np.asarray(values, np.float32)).max()
    assert histogram.max_abs == largest
    assert 2.0**histogram.exponent / 2 <= largest < 2.0**histogram.exponent
    assert histogram.num_values == np.size(values)


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
    with pytest.raises(EngineryError, match="'t'") as error:
        histogram_of([1.0, bad, 2.0])
    assert error.value.code == "activation-not-finite"


@pytest.mark.parametrize("percentile", [50.0, 99.0, 99.99, 100.0])
@pytest.mark.parametrize("rectified", [False, True])
def test_percentile_agrees_with_numpy(percentile, rectified):
    values = np.random.default_rng(0).standard_normal(500_000).astype(np.float32)
    if rectified:
        values = np.maximum(values + 1, 0)
    histogram = histogram_of(values)
    amax = compute_scale(histogram, "percentile", percentile) * 127
    assert amax == pytest.approx(np.percentile(np.abs(values), percentile), abs=1.01 * histogram.bin_width)


@pytest.mark.parametrize(
    ("method", "low", "high"),
    [
        ("percentile", 3.5, 4.5),
        ("entropy", 2.5, 8.0),
        # 200,000 roundings err by (amax / 127)**2 / 12 each, five clippings by (40 - amax)**2: least at 31.
        ("mse", 29.0, 33.0),
    ],
)
def test_outliers_are_clipped(method, low, high):
    histogram = histogram_of(gaussian_with_outliers())
    assert low < compute_scale(histogram, method) * 127 < high
    assert compute_scale(histogram, "max") == np.float32(40.0) / 127


@pytest.mark.parametrize("method", list(CALIBRATION_METHODS))
@pytest.mark.parametrize("factor", [2.0**-20, 3.0, 1e4])
def test_scales_follow_the_unit_of_the_tensor(method, factor):
    values = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    power = 2.0 ** np.round(np.log2(factor))
    assert compute_scale(histogram_of(values * power), method) == pytest.approx(
        power * compute_scale(histogram_of(values), method)
    )
    scale = compute_scale(histogram_of(values * np.float32(factor)), method)
    assert 1.5 < scale * 127 / factor < 6.0


@pytest.mark.parametrize("method", list(CALIBRATION_METHODS))
def test_degenerate_tensors(method):
    assert compute_scale(histogram_of(np.zeros(100)), method) == ZERO_TENSOR_SCALE
    for values in ([1.0], [5.0] * 1000, [0.0] * 10**6 + [1.0], np.linspace(0, 1e-3, 50)):
        scale = compute_scale(histogram_of(values), method)
        assert 0 < scale <= np.float32(np.max(values)) / 127 * (1 + 1e-6)
    with refuses("no-calibration-images"):
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


@pytest.mark.parametrize(
    "values",
    [
        np.maximum(gaussian_with_outliers(20_000, 9.0), 0),
        np.abs(np.random.default_rng(0).standard_cauchy(5000)).clip(0, 50),  # the last bin that stays is not empty
    ],
    ids=["far outliers", "long tail"],
)
def test_entropy_equals_the_plain_loop(values):
    histogram = histogram_of(values)
    expected = min(entropy_amax_by_the_book(histogram), histogram.max_abs)
    assert compute_scale(histogram, "entropy") * 127 == pytest.approx(expected)


def test_mse_finds_the_least_error():
    values = gaussian_with_outliers(50_000)
    chosen = compute_scale(histogram_of(values), "mse")

    def error(scale):
        return np.square(np.clip(np.rint(values / scale), -127, 127) * scale - values).sum()

    candidates = np.linspace(0.1, 1.0, 200) * np.abs(values).max() / 127
    assert error(chosen) <= 1.02 * min(error(scale) for scale in candidates)


def test_collected_histograms_do_not_depend_on_the_batches_and_leave_the_file(resnet18):
    path, model, images, _ = resnet18
    tensors = activation_tensors(model)
    seen = []
    whole = collect_with_onnxruntime(path, tensors, [images], seen.append)
    split = collect_with_onnxruntime(path, tensors, iter([images[:3], images[3:]]))
    assert (list(whole), seen[-1]) == (tensors, len(images))
    for name in tensors:
        assert whole[name].num_values == split[name].num_values
        # ONNX Runtime's sums may differ in the last bit between batch sizes, which moves a value to the next bin.
        assert whole[name].max_abs == pytest.approx(split[name].max_abs, rel=1e-4)
    alone = collect_with_onnxruntime(path, ["images"], [images])  # as for a network of one Gemm
    for found in (split, alone):
        np.testing.assert_array_equal(whole["images"].counts, found["images"].counts)
    assert whole["images"].max_abs == np.abs(images).max()
    assert onnx.load(path).SerializeToString() == model.SerializeToString()


def test_what_a_convolution_adds_to_another_is_collected(tmp_path):
    nodes = [
        onnx.helper.make_node("Conv", ["images", "w1", "bias"], ["a"], pads=[1, 1, 1, 1], group=16),
        onnx.helper.make_node("Conv", ["images", "w2", "bias"], ["b"], group=16),
        onnx.helper.make_node("Add", ["a", "b"], ["logits"]),
    ]
    weights = {"w1": np.ones((32, 1, 3, 3)), "w2": np.ones((32, 1, 1, 1)), "bias": np.zeros(32)}
    model = onnx_model(
        nodes,
        {"images": ["N", 16, 8, 8]},
        {"logits": ["N", 32, 8, 8]},
        {name: values.astype(np.float32) for name, values in weights.items()},
    )
    onnx.save(model, tmp_path / "m.onnx")
    found = collect_with_onnxruntime(tmp_path / "m.onnx", ["a", "logits"], [np.ones((2, 16, 8, 8), np.float32)])
    assert [histogram.max_abs for histogram in found.values()] == [9, 10]


@pytest.mark.parametrize(
    ("tensor", "value", "num_images", "code"),
    [
        ("images", np.nan, 2, "activation-not-finite"),
        ("nowhere", 0.0, 2, "unknown-tensor"),
        ("images", 0.0, 0, "no-calibration-images"),
    ],
)
def test_what_can_not_be_collected(resnet18, tensor, value, num_images, code):
    batches = [np.full((1, 3, 64, 64), value, np.float32)] * num_images
    with refuses(code):
        collect_with_onnxruntime(resnet18[0], [tensor, "logits"], batches)


# --- the cache, which believes only what belongs to it

ADDRESS = {"model": "sha256:aa", "images": "sha256:bb", "histograms": {"bins": 2048, "version": 1}}
OTHER = {**ADDRESS, "model": "sha256:cc"}


class Cache:
    """A cache in a folder: how often histograms were collected for it, and what it warned of."""

    def __init__(self, folder):
        self.folder, self.times, self.warnings = folder, 0, []

    def collect(self):
        self.times += 1
        rng = np.random.default_rng(0)
        histograms = {}
        for name, size in (("images", 3.0), ("/conv/Conv_output_0", 70.0)):
            histograms[name] = Histogram(name)
            histograms[name].add(rng.standard_normal(1000) * size)
        histograms["tokens"] = Histogram("tokens", channel_max=np.zeros(8, np.float32))
        histograms["tokens"].add(rng.standard_normal((3, 5, 8)))
        return histograms

    def get(self, address=ADDRESS):
        """Return the ranges in a form that can be compared, and True if they were in the cache."""

        def comparable(h):
            return h.counts.tolist(), h.exponent, h.max_abs, None if h.channel_max is None else [*h.channel_max]

        found, cached = cached_histograms(self.folder, address, self.collect, self.warnings.append)
        return {name: comparable(histogram) for name, histogram in found.items()}, cached


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "new")


def test_kept_and_found_again(cache):
    first, cached = cache.get()
    assert not cached
    assert cache.get() == (first, True)
    assert cache.times == 1
    for number, changed in enumerate(("model", "images"), start=2):
        assert cache.get({**ADDRESS, changed: "sha256:cc"}) == (first, False)
        assert cache.times == number
    assert cache.warnings == []


def test_a_file_moved_to_another_address_is_refused(cache):
    cache.get()
    (file,) = cache.folder.glob("*.npz")
    cache.get(OTHER)
    (stale,) = set(cache.folder.glob("*.npz")) - {file}
    stale.write_bytes(file.read_bytes())
    assert not cache.get(OTHER)[1]
    assert "belongs to another calibration" in cache.warnings[0]


@pytest.mark.parametrize("damage", [lambda content: content[:500], lambda content: b"", lambda content: b"not a cache"])
def test_a_damaged_file_is_replaced(cache, damage):
    first, _ = cache.get()
    (file,) = cache.folder.glob("*.npz")
    file.write_bytes(damage(file.read_bytes()))
    assert cache.get() == (first, False)
    assert "is damaged" in cache.warnings[0]
    assert cache.get() == (first, True)  # the new file is whole


def test_no_damage_gets_through(cache):
    """Whatever byte is wrong, the reader's exception is caught, or the content's digest does not fit."""
    first, _ = cache.get()
    (file,) = cache.folder.glob("*.npz")
    content = file.read_bytes()
    for position in range(0, len(content), 37):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        file.write_bytes(damaged)
        assert cache.get()[0] == first, position


def test_an_unwritable_folder_costs_only_the_cache(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache = Cache(tmp_path / "file" / "cache")
    assert (len(cache.get()[0]), cache.get()[1]) == (3, False)
    assert "can't keep the calibration" in cache.warnings[0]
