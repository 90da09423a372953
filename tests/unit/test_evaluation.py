"""Predictions of several runners over one split."""

import json
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from components.common.contracts.manifests import Artifact, DatasetManifest
from components.common.contracts.transforms import transform_for
from components.common.data.evaluation import (
    ConfidenceBins,
    Predictions,
    predict,
    predict_in_parts,
    probabilities,
    top_classes,
    top_confidences,
)
from components.common.data.loader import Batch, Loader
from components.common.runtimes.runner import Timing


class Recorder:
    """A runner that keeps what it sees; its logits come from the mean of the image, or say nothing at all."""

    runtime = "fake"
    device = "none"

    def __init__(self, *, flat: bool) -> None:
        self.batches: list[np.ndarray] = []
        self._flat = flat

    def infer(self, images: np.ndarray) -> np.ndarray:
        self.batches.append(images.copy())
        logits = np.zeros((len(images), 10), np.float32)
        if not self._flat:
            logits[np.arange(len(images)), np.abs(images.mean(axis=(1, 2, 3)) * 1e4).astype(int) % 10] = 1
        return logits

    def measure(self, batch_size: int, *, warmup_s: float, duration_s: float, min_iterations: int) -> Timing:
        raise NotImplementedError

    def close(self) -> None:
        pass


def test_top_classes_are_sorted_and_ties_go_to_the_lower_index() -> None:
    logits = np.array([[0, 3, 1, 3, 2, -1, 3], [1, 1, 1, 1, 1, 1, 1]], np.float32)
    assert top_classes(logits).tolist() == [[1, 3, 6, 4, 2], [0, 1, 2, 3, 4]]
    assert top_classes(logits).dtype == np.int32


@pytest.mark.parametrize("num_classes", [2, 4, 5, 6])
def test_fewer_than_five_classes(num_classes: int) -> None:
    logits = np.random.default_rng(0).standard_normal((20, num_classes)).astype(np.float32)
    top = top_classes(logits)
    assert top.shape == (20, min(5, num_classes))
    predictions = Predictions(top=top, labels=np.arange(20, dtype=np.int32) % num_classes)
    if num_classes <= 5:
        assert predictions.top5_pct == 100.0
    expected = 100 * np.mean(logits.argmax(axis=1) == np.arange(20) % num_classes)
    assert predictions.top1_pct == pytest.approx(expected)


def test_shares_are_of_all_images() -> None:
    top = np.array([[0, 1, 2, 3, 4], [1, 0, 2, 3, 4], [5, 1, 2, 3, 4], [0, 1, 2, 3, 4]], np.int32)
    predictions = Predictions(top=top, labels=np.array([0, 0, 0, 5], np.int32))
    assert (predictions.num_images, predictions.top1_pct, predictions.top5_pct) == (4, 25.0, 50.0)
    other = Predictions(top=np.roll(top, 1, axis=1), labels=predictions.labels)
    assert predictions.agreement_pct(predictions) == 100.0
    assert predictions.agreement_pct(other) == 0.0


def test_every_runner_sees_every_image_once_and_in_the_order_of_the_listing(
    digits_dataset: Artifact[DatasetManifest],
) -> None:
    loader = Loader(digits_dataset, "val", transform_for(32, resize_ratio=1.0), batch_size=50)
    runners = {"fp32": Recorder(flat=False), "int8": Recorder(flat=True)}
    seen: list[tuple[int, int]] = []
    results = predict(runners, loader, loader.num_images, lambda done, total: seen.append((done, total)))

    assert [len(batch) for batch in runners["fp32"].batches] == [50, 50, 20]
    for first, second in zip(runners["fp32"].batches, runners["int8"].batches, strict=True):
        assert first.flags.c_contiguous
        assert first.dtype == np.float32
        np.testing.assert_array_equal(first, second)
    listing = [json.loads(line)["label"] for line in digits_dataset.file("val.jsonl").read_text().splitlines()]
    for name in runners:
        assert results[name].labels.tolist() == listing
    assert seen == [(50, 120), (100, 120), (120, 120)]
    # A runner that knows nothing says class 0, by the rule on ties.
    assert results["int8"].top1_pct == pytest.approx(100 * listing.count(0) / 120)
    logits = np.concatenate([Recorder(flat=False).infer(batch) for batch in runners["fp32"].batches])
    assert results["fp32"].top[:, 0].tolist() == logits.argmax(axis=1).tolist()


def test_confidence_is_the_softmax_of_the_best_class() -> None:
    logits = 5 * np.random.default_rng(0).standard_normal((40, 10)).astype(np.float32)
    shares = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True)
    assert top_confidences(logits) == pytest.approx(shares.max(axis=1), rel=1e-5)
    # A model that ends in a softmax says the same.
    assert top_confidences(shares.astype(np.float32)) == pytest.approx(shares.max(axis=1), rel=1e-5)
    odd = np.array([[0, 0], [1e4, -1e4], [np.inf, 0], [np.nan, 0]], np.float32)
    assert top_confidences(odd).tolist() == [0.5, 1.0, 0.0, 0.0]


def test_calibration_error_by_hand() -> None:
    bins = ConfidenceBins()
    assert bins.ece_pct is None
    bins.add(np.array([0.95, 0.97]), np.array([True, False]))  # mean confidence 0.96, accuracy 0.5
    bins.add(np.array([0.5]), np.array([True]))  # a bin of its own: 0.5 and 1
    assert bins.ece_pct == pytest.approx(100 * (2 / 3 * 0.46 + 1 / 3 * 0.5))
    assert bins.counts.tolist() == [0] * 7 + [1] + [0] * 6 + [2]


def test_calibration_error_does_not_depend_on_the_batches() -> None:
    random = np.random.default_rng(0)
    confidences, right = random.random(500), random.random(500) < 0.5
    edges = np.arange(1, 15) / 15
    expected = 0.0
    for index in range(15):
        inside = np.digitize(confidences, edges, right=True) == index  # above i/15, up to (i+1)/15
        if inside.any():
            expected += inside.mean() * abs(confidences[inside].mean() - right[inside].mean())
    for size in (1, 64, 500):
        bins = ConfidenceBins()
        for start in range(0, 500, size):
            bins.add(confidences[start : start + size], right[start : start + size])
        assert bins.ece_pct == pytest.approx(100 * expected)


def test_best_classes_of_odd_logits() -> None:
    logits = np.array([[-np.inf, 1, -np.inf, 2, -np.inf, -np.inf], [np.nan, 1, 2, 3, 4, 5]], np.float32)
    assert top_classes(logits).tolist() == [[3, 1, 0, 2, 4], [-1, -1, -1, -1, -1]]
    equal = np.random.default_rng(0).integers(0, 4, (200, 30)).astype(np.float32)
    assert (top_classes(equal) == np.argsort(-equal, axis=1, kind="stable")[:, :5]).all()


def test_an_image_without_a_prediction_is_wrong_whatever_its_label() -> None:
    logits = np.array([[np.nan, np.nan], [2, 1], [1, np.nan], [np.inf, 0]], np.float32)
    predictions = Predictions(top=top_classes(logits), labels=np.array([0, 0, 1, 0], np.int32))
    assert predictions.right.tolist() == [False, True, False, True]
    assert (predictions.num_undefined, predictions.top1_pct, predictions.top5_pct) == (2, 50.0, 50.0)


def test_probabilities_of_one_image_are_those_that_its_confidence_is_taken_from() -> None:
    logits = 4 * np.random.default_rng(0).standard_normal((9, 6)).astype(np.float32)
    for row, confidence in zip(logits, top_confidences(logits), strict=True):
        shares = probabilities(row)
        assert (shares.sum(), shares.max()) == (pytest.approx(1), pytest.approx(confidence, rel=1e-5))
        assert probabilities(shares) == pytest.approx(shares)  # of a model that ends in a softmax
    assert np.isnan(probabilities(np.array([1, np.nan], np.float32))).all()


def test_an_image_takes_ten_bytes_and_its_label_four(digits_dataset: Artifact[DatasetManifest]) -> None:
    loader = Loader(digits_dataset, "val", transform_for(32, resize_ratio=1.0), batch_size=50)
    found = predict({"fp32": Recorder(flat=False)}, loader, loader.num_images, lambda done, total: None)["fp32"]
    assert (found.top.nbytes, found.labels.nbytes) == (10 * 120, 4 * 120)
    assert found.bins.counts.sum() == 120
    assert found.bins.rights.sum() == found.right.sum()


@pytest.mark.parametrize("num_parts", [2, 3])
def test_parts_together_are_the_whole_split(digits_dataset: Artifact[DatasetManifest], num_parts: int) -> None:
    spec = transform_for(32, resize_ratio=1.0)
    whole = Loader(digits_dataset, "val", spec, batch_size=50)
    expected = predict({"fp32": Recorder(flat=False)}, whole, 120, lambda done, total: None)["fp32"]
    seen: list[tuple[int, int]] = []
    parts = [
        (
            {"fp32": Recorder(flat=False)},
            Loader(digits_dataset, "val", spec, batch_size=16, shard_id=part, num_shards=num_parts),
        )
        for part in range(num_parts)
    ]
    found = predict_in_parts(parts, 120, lambda done, total: seen.append((done, total)))["fp32"]
    np.testing.assert_array_equal(found.labels, expected.labels)
    np.testing.assert_array_equal(found.top, expected.top)
    np.testing.assert_array_equal(found.bins.counts, expected.bins.counts)
    assert found.bins.ece_pct == pytest.approx(expected.bins.ece_pct)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (120, 120)


def test_a_part_that_fails_ends_the_others() -> None:
    class Broken(Recorder):
        def infer(self, images: np.ndarray) -> np.ndarray:
            raise RuntimeError("out of memory")

    begun = threading.Event()

    def endless() -> Iterator[Batch]:
        while True:
            begun.set()
            yield Batch(images=torch.zeros(2, 3, 8, 8), labels=torch.zeros(2, dtype=torch.int64))

    def once() -> Iterator[Batch]:
        assert begun.wait(10)
        yield Batch(images=torch.zeros(2, 3, 8, 8), labels=torch.zeros(2, dtype=torch.int64))

    parts = [({"fp32": Recorder(flat=True)}, endless()), ({"fp32": Broken(flat=True)}, once())]
    with pytest.raises(RuntimeError, match="out of memory"):
        predict_in_parts(parts, 4, lambda done, total: None)
