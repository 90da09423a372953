"""mAP of boxes, its paired bootstrap, and what the report shows of them."""

import time

import numpy as np
import pytest
from PIL import Image

from components.common.contracts.transforms import TransformSpec
from components.common.tasks import predictions_of
from components.common.tasks.detection.average_precision import Matches
from components.common.tasks.detection.predictions import BoxPredictions
from tests.unit.common.tasks.test_average_precision import by_pycocotools, made_up

CLASSES = ("circle", "square", "star", "never")
SIDE = 96


def labels(num_images: int = 60, seed: int = 0) -> np.ndarray:
    """[N, 5, 6] objects of three classes that do not overlap, some of them ignored, some images without any."""
    random = np.random.default_rng(seed)
    found = np.full((num_images, 5, 6), -1, np.float32)
    cells = np.array([(x, y) for x in (2, 34, 66) for y in (2, 34, 66)])
    for image in found:
        number = int(random.integers(0, 5))
        corners = cells[random.permutation(9)[:number]] + random.uniform(0, 6, (number, 2))
        image[:number, :2], image[:number, 2:4] = corners, corners + random.uniform(12, 22, (number, 2))
        image[:number, 4], image[:number, 5] = random.integers(0, 3, number), random.random(number) < 0.1
    return found


def output_of(boxes: np.ndarray, classes: np.ndarray, logits: np.ndarray, num_anchors: int = 12) -> np.ndarray:
    """[A, 8 + classes] of which the first anchors are the boxes, and the others find nothing."""
    found = np.full((num_anchors, 8 + len(CLASSES)), -9, np.float32)
    found[:, :4], found[:, 4:8] = (0, 0, 8, 8), 0.5
    found[: len(boxes), :4] = boxes
    found[np.arange(len(boxes)), 8 + classes.astype(int)] = logits
    return found


def outputs(objects: np.ndarray, noise: float, seed: int = 1) -> np.ndarray:
    """Detections about the objects, off by `noise` pixels, with strays."""
    random, found = np.random.default_rng(seed), []
    for image in objects:
        own = image[image[:, 4] >= 0]
        strays = random.uniform(0, 60, (2, 2))
        boxes = np.concatenate(
            [own[:, :4] + random.normal(0, noise, (len(own), 4)), np.tile(strays, 2) + np.array([0, 0, 15, 15])]
        )
        classes = np.concatenate([own[:, 4], random.integers(0, 3, 2)])
        logits = np.concatenate([random.normal(2, 1, len(own)), random.normal(-2, 1, 2)])
        found.append(output_of(boxes, classes, logits))
    return np.stack(found)


def predicted(objects: np.ndarray, noise: float, seed: int = 1) -> BoxPredictions:
    return BoxPredictions.of(outputs(objects, noise, seed), objects)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_map_is_that_of_pycocotools_over_parts(seed: int, ties: bool) -> None:
    images = made_up(seed, ties=ties)
    most = max(len(objects) for _, objects in images)
    padded = np.full((len(images), most, 6), -1, np.float32)
    raw = np.full((len(images), 40, 12), -9, np.float32)
    raw[:, :, :4], raw[:, :, 4:8] = (0, 0, 8, 8), 0.5
    for own, row, (found, objects) in zip(padded, raw, images, strict=True):
        own[: len(objects)] = objects
        scores = found.scores.clip(0.02, 0.98)  # rounded ones may be 0 or 1
        row[: len(found)] = output_of(found.boxes, found.classes, np.log(scores / (1 - scores)), len(found))
    whole = BoxPredictions.join([BoxPredictions.of(raw[part], padded[part]) for part in (slice(0, 25), slice(25, 40))])
    assert predictions_of("detection") is BoxPredictions
    assert whole.num_images == 40
    # what suppression left of the detections
    ends = np.cumsum(whole.matches.counts)[:-1]
    boxes, scores, classes = (np.split(one, ends) for one in (whole.boxes, whole.matches.scores, whole.matches.classes))
    kept = [
        (type(found)(boxes=own[0], scores=own[1], classes=own[2]), objects)
        for (found, objects), own in zip(images, zip(boxes, scores, classes, strict=True), strict=True)
    ]
    theirs = by_pycocotools(kept)
    assert 0.05 < np.nanmean(theirs) < 0.95
    np.testing.assert_allclose(whole.matches.average_precisions()[0], theirs, rtol=0, atol=1e-9)
    np.testing.assert_allclose(whole.matches.curve().mean(axis=1), theirs[0], rtol=0, atol=1e-9)
    assert whole.score_pct == pytest.approx(100 * np.nanmean(theirs), abs=1e-7)
    assert whole.measures()["score50_pct"] == pytest.approx(100 * np.nanmean(theirs[0]))
    assert np.mean(whole.precision_by_recall()) == pytest.approx(100 * np.nanmean(theirs[0]))
    assert whole.score_low_pct < whole.score_pct
    assert whole.num_unseen(4) == 1
    assert whole.chance(CLASSES) == ("", 0.0)
    for which in (np.arange(40) % 2 == 0, np.array([3, 1, 11])):
        some = by_pycocotools([kept[index] for index in np.arange(40)[which]])
        np.testing.assert_allclose(whole.matches.select(which).average_precisions()[0], some, rtol=0, atol=1e-9)
        assert whole.select(which).score_pct == pytest.approx(100 * np.nanmean(some))
    assert whole.select(slice(3, 4)).per_image.tolist() == [whole.per_image[3]]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_finds_nothing(value: float) -> None:
    objects = labels(8, seed=2)
    raw = outputs(objects, 0.5)
    assert (objects[4, :, 4] >= 0).any()
    raw[4, 7, 2] = value
    found, whole = BoxPredictions.of(raw, objects), predicted(objects, 0.5)
    assert found.num_undefined == 1
    assert found.matches.counts[4] == 0 < whole.matches.counts[4]
    assert found.per_image[4] == 0.0
    assert found.described(4, CLASSES)[1] == "nothing (NaN or infinity)"
    assert found.num_differing(whole) == 1
    assert found.score_pct < whole.score_pct


def test_detections_agree_that_have_the_class_and_half_the_area_in_common() -> None:
    box = np.array([[10, 10, 30, 30]], np.float32)
    none = np.full((1, 1, 6), -1, np.float32)

    def one(boxes: np.ndarray, index: int, logit: float) -> BoxPredictions:
        return BoxPredictions.of(output_of(boxes, np.array([index]), np.array([logit]))[None], none)

    fp32 = one(box, 1, 2.0)
    others = {"equal": one(box, 1, 1.0), "near": one(box + 2, 1, 2.0), "far": one(box + 12, 1, 2.0)}
    others |= {"class": one(box, 2, 2.0), "unsure": one(box, 1, -1.5)}
    agreed = {name: (own.agreement_pct(fp32), own.num_differing(fp32)) for name, own in others.items()}
    assert agreed == {"equal": (100.0, 0), "near": (100.0, 0), "far": (0.0, 1), "class": (0.0, 1), "unsure": (0.0, 1)}
    assert others["unsure"].agreement_pct(others["unsure"]) == 100.0


def test_what_is_shown_of_images_that_differ() -> None:
    objects = labels(10, seed=3)
    raw = outputs(objects, 0.5)
    counted = (objects[..., 4] >= 0) & (objects[..., 5] <= 0)
    places = np.flatnonzero(counted.sum(axis=1) >= 2)[:2].tolist()
    changed = raw.copy()
    changed[places[0], :, 8:] = -9  # finds nothing
    first = int(np.flatnonzero(counted[places[1]])[0])
    changed[places[1], first, 8:] = -9  # finds all but one
    fp32, own = (BoxPredictions.of(each, objects) for each in (raw, changed))
    assert own.num_differing(fp32) == 2
    assert own.differing(fp32, 24).tolist() == sorted(places)
    assert own.differing(fp32, 1).tolist() == places[:1]
    assert 50 < own.agreement_pct(fp32) < 100
    number = int(counted[places[0]].sum())
    assert own.described(places[0], CLASSES) == (f"{number} objects", f"{number} missed")
    assert "1 missed" in own.described(places[1], CLASSES)[1]
    assert "missed" not in fp32.described(places[1], CLASSES)[1]
    transform = TransformSpec(resize_size=SIDE, crop_size=SIDE, mean=(0, 0, 0), std=(1, 1, 1))
    picture = own.picture(Image.new("RGB", (144, 96), "blue"), transform, fp32, places[0])
    assert picture.size == (3 * SIDE + 2 * 2, SIDE)
    tiles = [np.asarray(picture)[:, start : start + SIDE] for start in range(0, 3 * (SIDE + 2), SIDE + 2)]
    drawn = [(tile != (0, 0, 255)).any() for tile in tiles]
    assert drawn == [True, True, False]


def test_divergence_is_that_of_detections_and_not_of_anchors() -> None:
    objects = labels(6, seed=4)
    raw = outputs(objects, 0.5)
    assert BoxPredictions.divergence(raw, raw) == 0.0
    surer, moved = raw.copy(), raw.copy()
    surer[..., 8:] += 0.3
    moved[:, :4, 4:8] += 0.02
    more = moved.copy()
    more[:, :4, 4:8] += 0.02
    values = [BoxPredictions.divergence(raw, each) for each in (surer, moved, more)]
    assert min(values) > 0.001
    assert values[2] > 2 * values[1]
    padded = [np.concatenate([each, np.tile(raw[:, -1:], (1, 500, 1))], axis=1) for each in (raw, moved)]
    assert BoxPredictions.divergence(*padded) == pytest.approx(values[1])


def test_score_and_interval_of_many_images_and_classes_take_seconds() -> None:
    rng = np.random.default_rng(0)
    num_images, num_classes = 2000, 80
    counts = np.full(num_images, 25, np.int32)
    total = int(counts.sum())
    found = (rng.random((total, 1)) > np.linspace(0.6, 0.95, 10)).astype(np.int8)
    own = BoxPredictions(
        boxes=np.zeros((total, 4), np.float32),
        matches=Matches(
            counts=counts,
            scores=rng.random(total).astype(np.float32),
            classes=rng.integers(0, num_classes, total).astype(np.int16),
            found=found,
            num_objects=rng.poisson(0.2, (num_images, num_classes)).astype(np.int32),
        ),
        objects=np.zeros((0, 6), np.float32),
        object_counts=np.zeros(num_images, np.int32),
        undefined=np.zeros(num_images, bool),
    )
    start = time.process_time()
    assert own.score_low_pct < own.score_pct
    assert time.process_time() - start < 20
    assert {name: len(array) for name, array in own.arrays().items()} == {"": total, "objects": 0}
