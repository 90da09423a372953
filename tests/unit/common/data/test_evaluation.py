"""Predictions of several runners over one split."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from components.common.contracts.records import PairedComparison
from components.common.contracts.transforms import transform_for
from components.common.data.evaluation import (
    ClassPredictions,
    confidences_and_entropies,
    predict,
    predict_in_parts,
    probabilities,
    top_classes,
)
from components.common.data.loader import Batch, Loader
from components.common.tasks.predictions import Top1Drop, class_divergence
from tests.conftest import Dataset

SPEC = transform_for(32, resize_ratio=1.0)


class Recorder:
    """A runner that keeps what it sees; its logits come from the mean of the image, or say nothing at all."""

    runtime = "fake"
    device = "none"

    def __init__(self, *, flat: bool = False) -> None:
        self.batches: list[np.ndarray] = []
        self._flat = flat

    def infer(self, images: np.ndarray) -> np.ndarray:
        self.batches.append(images.copy())
        logits = np.zeros((len(images), 10), np.float32)
        if not self._flat:
            logits[np.arange(len(images)), np.abs(images.mean(axis=(1, 2, 3)) * 1e4).astype(int) % 10] = 1
        return logits

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([0, 3, 1, 3, 2, -1, 3], [1, 3, 6, 4, 2]),  # sorted, ties to the lower index
        ([1, 1, 1, 1, 1, 1, 1], [0, 1, 2, 3, 4]),
        ([-np.inf, 1, -np.inf, 2, -np.inf, -np.inf], [3, 1, 0, 2, 4]),
        ([np.nan, 1, 2, 3, 4, 5], [-1, -1, -1, -1, -1]),
        ([np.inf, 1, 2, 3, 4, 5], [-1, -1, -1, -1, -1]),
        ([-np.inf] * 5, [-1, -1, -1, -1, -1]),
        ([1, 2], [1, 0]),
    ],
)
def test_top_classes(logits: list[float], expected: list[int]) -> None:
    top = top_classes(np.array([logits], np.float32))
    assert (top.tolist(), top.dtype) == ([expected], np.int32)
    equal = np.random.default_rng(0).integers(0, 4, (200, 30)).astype(np.float32)
    assert (top_classes(equal) == np.argsort(-equal, axis=1, kind="stable")[:, :5]).all()


def test_shares_are_of_all_images() -> None:
    top = np.array([[0, 1, 2, 3, 4], [1, 0, 2, 3, 4], [5, 1, 2, 3, 4], [0, 1, 2, 3, 4]], np.int32)
    predictions = ClassPredictions(top=top, labels=np.array([0, 0, 0, 5], np.int32))
    assert (predictions.num_images, predictions.score_pct, predictions.top5_pct) == (4, 25.0, 50.0)
    other = ClassPredictions(top=np.roll(top, 1, axis=1), labels=predictions.labels)
    assert (predictions.agreement_pct(predictions), predictions.agreement_pct(other)) == (100.0, 0.0)
    # Without a prediction an image is wrong, whatever its label.
    logits = np.array([[np.nan, np.nan], [2, 1], [1, np.nan], [np.inf, 0]], np.float32)
    predictions = ClassPredictions(top=top_classes(logits), labels=np.array([0, 0, 1, 0], np.int32))
    assert predictions.right.tolist() == [False, True, False, False]
    assert (predictions.num_undefined, predictions.score_pct, predictions.top5_pct) == (3, 25.0, 25.0)


@pytest.mark.parametrize(
    ("regressed", "improved", "num_images", "expected"),
    [
        (10, 4, 1000, (10, 4)),
        (10, 4, 500, (10, 4)),
        # 80 and 32 as before, of the rest in one of 44 cases at best 2 sqrt(8 * 7000 * 15 / 1000) fewer that regressed
        (10, 4, 8000, (80 - 840**0.5, 32 + 840**0.5)),
        (0, 3, 8000, (0, 24 + 224**0.5)),  # not below 0
    ],
)
def test_a_drop_on_more_images_at_best(
    regressed: int, improved: int, num_images: int, expected: tuple[float, float]
) -> None:
    found = Top1Drop.of(PairedComparison.of(1000, regressed, improved), num_images)
    assert (found.num_regressed, found.num_improved) == pytest.approx(expected)
    assert found.num_images == max(num_images, 1000)
    assert found.points == pytest.approx(100 * (expected[0] - expected[1]) / found.num_images)


def test_every_runner_sees_every_image_once_and_in_the_order_of_the_listing(digits_dataset: Dataset) -> None:
    loader = Loader(digits_dataset, "val", SPEC, batch_size=50)
    runners = {"fp32": Recorder(), "int8": Recorder(flat=True)}
    seen: list[tuple[int, int]] = []
    results = predict(runners, loader, loader.num_images, lambda done, total: seen.append((done, total)))
    assert [len(batch) for batch in runners["fp32"].batches] == [50, 50, 20]
    for first, second in zip(runners["fp32"].batches, runners["int8"].batches, strict=True):
        assert first.flags.c_contiguous
        assert first.dtype == np.float32
        np.testing.assert_array_equal(first, second)
    listing = [json.loads(line)["label"] for line in digits_dataset.file("val.jsonl").read_text().splitlines()]
    assert [results[name].labels.tolist() for name in runners] == [listing, listing]
    assert seen == [(50, 120), (100, 120), (120, 120)]
    # A runner that knows nothing says class 0, by the rule on ties.
    assert results["int8"].score_pct == pytest.approx(100 * listing.count(0) / 120)
    found = results["fp32"]
    logits = np.concatenate([Recorder().infer(batch) for batch in runners["fp32"].batches])
    assert found.top[:, 0].tolist() == logits.argmax(axis=1).tolist()
    sizes = [each.nbytes for each in (found.top, found.labels, found.confidences, found.entropies)]
    assert sizes == [10 * 120, 4 * 120, 4 * 120, 4 * 120]  # all that grows with the images
    assert found.confidences == pytest.approx(confidences_and_entropies(logits)[0])


def test_confidence_is_the_softmax_of_the_best_class() -> None:
    logits = 4 * np.random.default_rng(0).standard_normal((40, 10)).astype(np.float32)
    shares = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True)
    entropies = -(shares * np.log(shares)).sum(axis=1) / np.log(10)
    for same in (logits, shares.astype(np.float32)):  # a model that ends in a softmax says the same
        found = confidences_and_entropies(same)
        assert found[0] == pytest.approx(shares.max(axis=1), rel=1e-5)
        assert found[1] == pytest.approx(entropies, abs=1e-5)
    nats = (shares[:20] * np.log(shares[:20] / shares[20:])).sum(axis=1).mean()
    assert class_divergence(logits[:20], logits[20:]) == pytest.approx(nats, rel=1e-5)
    for row, expected in zip(logits, shares, strict=True):
        assert probabilities(row) == pytest.approx(expected, rel=1e-5)
        assert probabilities(expected) == pytest.approx(expected)
    odd = np.array([[0, 0], [1e4, -1e4], [np.inf, 0], [np.nan, 0], [3, -np.inf]], np.float32)
    assert [each.tolist() for each in confidences_and_entropies(odd)] == [[0.5, 1, 0, 0, 1], [1, 0, 0, 0, 0]]
    assert confidences_and_entropies(np.ones((2, 1), np.float32))[1].tolist() == [0, 0]  # of a single class
    assert np.isnan(probabilities(np.array([1, np.nan], np.float32))).all()


def test_calibration_error() -> None:
    def ece_pct(confidences: np.ndarray, right: np.ndarray) -> float | None:
        top = np.where(right, 0, 1)[:, None]
        return ClassPredictions(top=top, labels=np.zeros(len(right), np.int32), confidences=confidences).ece_pct

    assert ece_pct(np.zeros(0), np.zeros(0, bool)) is None
    # Mean confidence 0.96, accuracy 0.5; and a bin of its own: 0.5 and 1.
    found = ece_pct(np.array([0.95, 0.97, 0.5]), np.array([True, False, True]))
    assert found == pytest.approx(100 * (2 / 3 * 0.46 + 1 / 3 * 0.5))
    random = np.random.default_rng(0)
    confidences, right = random.random(500), random.random(500) < 0.5
    own_bin = np.digitize(confidences, np.arange(1, 15) / 15, right=True)  # above i/15, up to (i+1)/15
    members = [own_bin == index for index in range(15)]
    expected = sum(own.mean() * abs(confidences[own].mean() - right[own].mean()) for own in members if own.any())
    assert ece_pct(confidences, right) == pytest.approx(100 * expected)


@pytest.mark.parametrize("num_parts", [2, 3])
def test_parts_together_are_the_whole_split(digits_dataset: Dataset, num_parts: int) -> None:
    def loader(**options: Any) -> Loader:
        return Loader(digits_dataset, "val", SPEC, batch_size=16, **options)

    expected = predict({"fp32": Recorder()}, loader(), 120, lambda done, total: None, SPEC)["fp32"]
    parts = [({"fp32": Recorder()}, loader(shard_id=part, num_shards=num_parts)) for part in range(num_parts)]
    seen: list[tuple[int, int]] = []
    found = predict_in_parts(parts, 120, lambda done, total: seen.append((done, total)), SPEC)["fp32"]
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_array_equal(found.top, expected.top)
    np.testing.assert_array_equal(found.confidences, expected.confidences)
    np.testing.assert_allclose(found.image_statistics, expected.image_statistics, rtol=1e-6)
    assert found.image_statistics.shape == (120, 3)
    assert seen == sorted(seen)
    assert seen[-1] == (120, 120)


def test_a_part_that_fails_ends_the_others() -> None:
    class Broken(Recorder):
        def infer(self, images: np.ndarray) -> np.ndarray:
            raise RuntimeError("out of memory")

    begun = threading.Event()
    batch = Batch(images=torch.zeros(2, 3, 8, 8), labels=torch.zeros(2, dtype=torch.int64))

    def endless() -> Iterator[Batch]:
        while True:
            begun.set()
            yield batch

    def once() -> Iterator[Batch]:
        assert begun.wait(10)
        yield batch

    parts = [({"fp32": Recorder()}, endless()), ({"fp32": Broken()}, once())]
    with pytest.raises(RuntimeError, match="out of memory"):
        predict_in_parts(parts, 4, lambda done, total: None)
