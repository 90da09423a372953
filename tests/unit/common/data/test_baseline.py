"""Histograms of validation, and the distances from them that chance explains."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

from components.common.contracts.transforms import transform_for
from components.common.data.baseline import (
    FALSE_ALARMS,
    Baseline,
    Comparison,
    divergences,
    image_statistics,
    make_baseline,
    read_baseline,
    thresholds,
)
from tests.unit.refusals import refuses

RANDOM = np.random.default_rng(0)


def population(num: int, *, num_classes: int = 1000, dark: float = 1.0) -> dict[str, np.ndarray]:
    """Images of a world in which classes are of very different sizes."""
    classes = RANDOM.zipf(1.3, 4 * num)
    return {
        "class": classes[classes <= num_classes][:num] - 1,
        "confidence": RANDOM.beta(8, 0.5, num),
        "brightness": dark * RANDOM.normal(0.5, 0.1, num),
        "size": RANDOM.choice([640 * 480, 1920 * 1080], num),
    }


def windows(baseline: Baseline, num: int, size: int, **changed: float) -> list[bool]:
    """Of so many windows, whether each alarms."""
    comparison = Comparison(baseline, size)
    found = []
    for _ in range(num):
        values = population(size, **changed)
        counts = {each.name: each.count(values[each.name]) for each in baseline.statistics}
        found.append(any(each.drifted for each in comparison.compare(counts)))
    return found


def test_small_classes_share_bins_and_each_bin_has_images() -> None:
    values = population(5000)
    baseline = make_baseline("int8", values)
    for each in baseline.statistics:
        assert sum(each.counts) == baseline.num_images == 5000
    classes, confidence, _, size = baseline.statistics
    assert len(classes.counts) <= 32
    assert min(classes.counts) >= 5000 / 32
    names = [f"c{index}" for index in range(1000)]
    assert classes.label(0, names) == "c0"  # more than 1 in 32 images on its own
    assert classes.label(len(classes.counts) - 1, names).endswith(" to c999")
    # Below and above all that was seen is a bin each; between them bins of about equally many images.
    assert (confidence.counts[0], confidence.counts[-1]) == (0, 0)
    assert min(confidence.counts[1:-1]) >= 500
    # Of a few values each has one.
    labels = [size.label(index) for index in range(len(size.counts))]
    assert labels == ["below 307,200", "307,200", "307,201 to 2,073,599", "2,073,600", "2,073,601 or more"]
    assert size.count(np.array([1, 640 * 480, 10**6, 1920 * 1080, 10**9])).tolist() == [1, 1, 1, 1, 1]


@pytest.mark.parametrize("num_validation", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_false_alarms_are_rare_whichever_images_validation_got(num_validation: int) -> None:
    """Each of 10 baselines is a sample of its own; of 400 windows 1 in 1,000 may alarm."""
    alarms = sum(sum(windows(make_baseline("int8", population(num_validation)), 40, 500)) for _ in range(10))
    assert alarms <= 4  # more have a chance of 1 in 10,000


def test_a_change_alarms() -> None:
    assert all(windows(make_baseline("int8", population(2000)), 5, 1000, dark=0.8))


def test_thresholds_are_rare_quantiles() -> None:
    for baseline in (np.array([0, *[36] * 10, 0]), np.array([0, 1024, 0])):
        limits = thresholds(baseline, 1000, 7)
        windows = RANDOM.multinomial(1000, RANDOM.dirichlet(baseline + 1.0, 500_000))
        for found, limit in zip(divergences(windows, baseline), limits, strict=True):
            assert 0.3 < (found > limit).mean() / (FALSE_ALARMS / 14) < 2


def test_distances_are_as_defined() -> None:
    counts, baseline = np.array([[59, 19, 19], [29, 29, 39]]), np.array([19, 39, 39])
    p, q = np.array([0.2, 0.4, 0.4]), np.array([[0.6, 0.2, 0.2], [0.3, 0.3, 0.4]])  # with one image more in each bin
    psi, js = divergences(counts, baseline)
    assert psi == pytest.approx(((q - p) * np.log(q / p)).sum(-1))
    assert js == pytest.approx(jensenshannon(p[None], q, base=2, axis=-1) ** 2)


def test_image_statistics_are_in_units_of_black_and_white_on_both_sides() -> None:
    """The same by NumPy in the server and by torch in validation."""
    transform = transform_for(224, resize_ratio=1.0)
    stripes = np.tile(np.repeat([[0.25, 0.75]], 112, axis=0).reshape(-1), (3, 224, 1)).astype(np.float32)
    flat = np.full((3, 224, 224), 0.5, np.float32)
    images = np.stack([stripes, flat])
    mean, std = (np.array(each, np.float32)[:, None, None] for each in (transform.mean, transform.std))
    normalized = (images - mean) / std
    expected = [[0.5, 0.25, 0.5], [0.5, 0, 0]]
    for same in (normalized, torch.from_numpy(normalized)):
        found = np.stack([np.asarray(each) for each in image_statistics(same, transform)], axis=1)
        np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize(
    "text",
    [
        b"{}",
        b"[" * 100_000,
        b'{"num_images": ' + b"9" * 5000 + b"}",
        b" " * (2 << 20),
        b'{"precision": "int8", "num_images": 3, "statistics": [{"name": "size", "edges": [NaN], "counts": [1, 2]}]}',
        b'{"precision": "int8", "num_images": 3, "statistics": [{"name": "size", "edges":[2,1],"counts":[1,1,1]}]}',
        b'{"precision": "int8", "num_images": 4, "statistics": [{"name": "size", "edges": [1], "counts": [1, 2]}]}',
        b'{"precision": "int8", "num_images": 1, "statistics": [{"name": "size", "edges": [1], "counts": [2, -1]}]}',
        b'{"precision": "int8", "num_images": 1, "statistics": [{"name": "size", "edges": [], "counts": []}]}',
        b'{"precision": "int8", "num_images": %b, "statistics": [{"name": "size", "edges": [], "counts": [%b]}]}'
        % (b"9" * 20, b"9" * 20),
    ],
)
def test_what_is_no_baseline_is_refused(text: bytes, tmp_path: Path) -> None:
    file = tmp_path / "baseline_int8.json"
    file.write_bytes(text)
    with refuses("invalid-baseline"):
        read_baseline(file)
    good = make_baseline("int8", population(100))
    file.write_text(good.model_dump_json())
    assert read_baseline(file) == good
