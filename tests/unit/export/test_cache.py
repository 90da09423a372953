"""The calibration cache believes only what belongs to it."""

import numpy as np
import pytest

from components.export.calibration import Histogram, cached_histograms

ADDRESS = {"model": "sha256:aa", "images": "sha256:bb", "histograms": {"bins": 2048, "version": 1}}


@pytest.fixture
def collect():
    """Collects two histograms, and counts how often."""

    def collected():
        collected.times += 1
        histograms = {}
        for name, size in (("images", 3.0), ("/conv/Conv_output_0", 70.0)):
            histograms[name] = Histogram(name)
            histograms[name].add(np.random.default_rng(0).standard_normal(1000) * size)
        return histograms

    collected.times = 0
    return collected


def equal(first, second):
    return list(first) == list(second) and all(
        (a.counts == b.counts).all() and (a.exponent, a.max_abs) == (b.exponent, b.max_abs)
        for a, b in zip(first.values(), second.values(), strict=True)
    )


def test_kept_and_found_again(tmp_path, collect):
    first, cached = cached_histograms(tmp_path / "new", ADDRESS, collect, pytest.fail)
    assert not cached
    again, cached = cached_histograms(tmp_path / "new", ADDRESS, collect, pytest.fail)
    assert cached
    assert collect.times == 1
    assert equal(first, again)


@pytest.mark.parametrize("changed", ["model", "images"])
def test_another_model_or_other_images_are_another_address(tmp_path, collect, changed):
    cached_histograms(tmp_path, ADDRESS, collect, pytest.fail)
    _, cached = cached_histograms(tmp_path, {**ADDRESS, changed: "sha256:cc"}, collect, pytest.fail)
    assert not cached
    assert collect.times == 2


def test_a_file_moved_to_another_address_is_refused(tmp_path, collect):
    cached_histograms(tmp_path, ADDRESS, collect, pytest.fail)
    (file,) = tmp_path.glob("*.npz")
    other = {**ADDRESS, "model": "sha256:cc"}
    cached_histograms(tmp_path, other, collect, pytest.fail)
    (stale,) = set(tmp_path.glob("*.npz")) - {file}
    stale.write_bytes(file.read_bytes())
    warnings = []
    _, cached = cached_histograms(tmp_path, other, collect, warnings.append)
    assert not cached
    assert "belongs to another calibration" in warnings[0]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text"])
def test_a_damaged_file_is_replaced(tmp_path, collect, damage):
    first, _ = cached_histograms(tmp_path, ADDRESS, collect, pytest.fail)
    (file,) = tmp_path.glob("*.npz")
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    file.write_bytes(
        {
            "truncated": content[:middle],
            "flipped": content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :],
            "empty": b"",
            "text": b"not a cache",
        }[damage]
    )
    warnings = []
    again, cached = cached_histograms(tmp_path, ADDRESS, collect, warnings.append)
    assert not cached
    assert equal(first, again)
    assert "is damaged" in warnings[0]
    assert "calibrating anew" in warnings[0]
    assert cached_histograms(tmp_path, ADDRESS, collect, pytest.fail)[1]  # the new file is whole


def test_no_damage_gets_through(tmp_path, collect):
    """Whatever byte is wrong, the reader's exception is caught, or the content's digest does not fit."""
    first, _ = cached_histograms(tmp_path, ADDRESS, collect, pytest.fail)
    (file,) = tmp_path.glob("*.npz")
    content = file.read_bytes()
    for position in range(0, len(content), 37):
        damaged = bytearray(content)
        damaged[position] ^= 0xFF
        file.write_bytes(damaged)
        again, _ = cached_histograms(tmp_path, ADDRESS, collect, lambda text: None)
        assert equal(first, again), position


def test_an_unwritable_folder_costs_only_the_cache(tmp_path, collect):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    warnings = []
    histograms, cached = cached_histograms(blocked / "cache", ADDRESS, collect, warnings.append)
    assert len(histograms) == 2
    assert not cached
    assert "can't keep the calibration" in warnings[0]
