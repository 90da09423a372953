"""With weights mAP is that of repeated images, by pycocotools. Without: test_box_predictions.py."""

import contextlib
import io
from typing import Any

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from components.common.tasks.detection.average_precision import Matches, match, mean_precision
from components.common.tasks.detection.boxes import Detections

NUM_CLASSES = 4


def made_up(seed: int, num_images: int = 40, *, ties: bool = False) -> list[tuple[Detections, np.ndarray]]:
    """Images with objects, some of them crowds, and detections about them, some of them doubles and strays."""
    rng = np.random.default_rng(seed)
    images = []
    for _ in range(num_images):
        num_objects = int(rng.integers(0, 7))
        corners, sides = rng.uniform(0, 80, (num_objects, 2)), rng.uniform(4, 40, (num_objects, 2))
        classes = rng.integers(0, NUM_CLASSES - 1, num_objects)  # the last class has no objects
        crowds = rng.random(num_objects) < 0.2
        objects = np.column_stack([corners, corners + sides, classes, crowds]).astype(np.float32)
        near = np.repeat(objects, rng.integers(0, 4, num_objects), axis=0)
        near[:, :4] += rng.normal(0, 2.5, (len(near), 4))
        flipped = rng.random(len(near)) < 0.1
        near[flipped, 4] = rng.integers(0, NUM_CLASSES, flipped.sum())
        strays = rng.uniform(0, 90, (int(rng.integers(0, 5)), 2))
        strays = np.column_stack([strays, strays + 10, rng.integers(0, NUM_CLASSES, len(strays)), strays[:, 0] * 0])
        boxes = np.concatenate([near, strays])
        boxes[:, 2:4] = np.maximum(boxes[:, 2:4], boxes[:, :2] + 1)
        scores = rng.random(len(boxes))
        if ties:
            scores = np.round(scores, 1)
        order = np.argsort(-scores, kind="stable")
        found = Detections(
            boxes=boxes[order, :4].astype(np.float32),
            scores=scores[order].astype(np.float32),
            classes=boxes[order, 4].astype(np.int16),
        )
        images.append((found, objects))
    return images


def gathered(images: list[tuple[Detections, np.ndarray]]) -> Matches:
    counted = [objects[objects[:, 5] == 0, 4].astype(int) for _, objects in images]
    return Matches(
        counts=np.array([len(found) for found, _ in images], np.int32),
        scores=np.concatenate([found.scores for found, _ in images]),
        classes=np.concatenate([found.classes for found, _ in images]),
        found=np.concatenate([match(*image) for image in images]),
        num_objects=np.array([np.bincount(classes, minlength=NUM_CLASSES) for classes in counted]),
    )


def by_pycocotools(images: list[tuple[Detections, np.ndarray]]) -> np.ndarray:
    """[10, classes] average precisions, NaN for a class without objects."""
    objects: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for index, (found, own) in enumerate(images, 1):
        for x1, y1, x2, y2, category, crowd in own.astype(float).tolist():
            box = [x1, y1, x2 - x1, y2 - y1]
            entry = {"image_id": index, "category_id": int(category) + 1, "bbox": box, "area": box[2] * box[3]}
            objects.append({**entry, "id": len(objects) + 1, "iscrowd": int(crowd)})
        for (x1, y1, x2, y2), score, category in zip(
            found.boxes.astype(float).tolist(), found.scores.tolist(), found.classes.tolist(), strict=True
        ):
            box = [x1, y1, x2 - x1, y2 - y1]
            results.append({"image_id": index, "category_id": category + 1, "bbox": box, "score": score})
    coco = COCO()
    coco.dataset = {
        "images": [{"id": index} for index in range(1, len(images) + 1)],
        "annotations": objects,
        "categories": [{"id": index + 1, "name": str(index)} for index in range(NUM_CLASSES)],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    precision = evaluation.eval["precision"][:, :, :, 0, 2]  # [T, recalls, classes], area all, 100 detections
    return np.where(precision[:, 0] < 0, np.nan, precision.mean(axis=1))


def test_an_image_of_weight_three_counts_as_three_images() -> None:
    images = made_up(7)
    weights = np.random.default_rng(0).integers(0, 4, (3, len(images)))
    weighted = gathered(images).average_precisions(weights.astype(float))
    for row, own in zip(weights, weighted, strict=True):
        repeated = [image for image, times in zip(images, row, strict=True) for _ in range(times)]
        np.testing.assert_allclose(own, by_pycocotools(repeated), rtol=0, atol=1e-9)


def test_nothing_found_and_nothing_to_find() -> None:
    nothing = Detections(boxes=np.zeros((0, 4), np.float32), scores=np.zeros(0, np.float32), classes=np.zeros(0, int))
    objects = np.array([[0, 0, 10, 10, 1, 0]], np.float32)
    precisions = gathered([(nothing, objects), (nothing, objects[:0])]).average_precisions()
    assert (precisions[:, :, 1] == 0).all()
    assert np.isnan(precisions[:, :, [0, 2, 3]]).all()
    assert mean_precision(precisions)[0] == 0
    assert mean_precision(np.full((1, 10, 4), np.nan))[0] == 0
