"""Decoding and suppression: as torchvision's, and with hostile outputs."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.ops import batched_nms, box_iou

from components.common.contracts.transforms import transform_for
from components.common.data.dali_pipelines import load_image
from components.common.data.image_files import encode_image
from components.common.tasks.answers import View, answers_of
from components.common.tasks.detection.boxes import decode, detect, overlap


def output(seed: int, num_anchors: int = 400, num_classes: int = 3) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres, sides = rng.uniform(0, 128, (num_anchors, 2)), rng.uniform(8, 60, (num_anchors, 2))
    anchors = np.concatenate([centres - sides / 2, centres + sides / 2], axis=1)
    distances, logits = rng.uniform(0.1, 1.2, (num_anchors, 4)), rng.normal(-2, 2, (num_anchors, num_classes))
    return np.concatenate([anchors, distances, logits], axis=1).astype(np.float32)


def test_boxes_are_at_distances_in_sides_of_the_anchor() -> None:
    found = decode(np.array([10, 20, 30, 60, 0.5, 0.25, 1, 0, 3], np.float32))  # centre 20, 40; sides 20, 40
    np.testing.assert_array_equal(found, [10, 30, 40, 40])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_classes", [3, 20])  # all overlaps are found, or those of a class
def test_suppression_is_that_of_torchvision(seed: int, num_classes: int) -> None:
    raw = output(seed, num_classes=num_classes)
    ours = detect(raw, max_detections=50)
    boxes = torch.from_numpy(decode(raw))
    scores = torch.from_numpy(raw[:, 8:]).sigmoid()
    anchors, classes = torch.nonzero(scores > 0.05, as_tuple=True)
    real = (boxes[anchors, 2] > boxes[anchors, 0]) & (boxes[anchors, 3] > boxes[anchors, 1])
    anchors, classes = anchors[real], classes[real]
    kept = batched_nms(boxes[anchors], scores[anchors, classes], classes, 0.6)[:50]
    assert len(kept) > 20
    np.testing.assert_allclose(ours.boxes, boxes[anchors[kept]], atol=1e-4)
    np.testing.assert_allclose(ours.scores, scores[anchors[kept], classes[kept]], atol=1e-6)
    np.testing.assert_array_equal(ours.classes, classes[kept])
    np.testing.assert_allclose(
        overlap(ours.boxes, ours.boxes), box_iou(*2 * (torch.from_numpy(ours.boxes),)), atol=1e-5
    )


def test_outputs_that_are_no_numbers_find_nothing() -> None:
    raw = output(0)
    raw[:, 9:] = -20
    for place, value in ((8, np.nan), (4, np.inf), (0, np.nan), (6, -np.inf)):
        damaged = raw.copy()
        damaged[:, 8] = 5
        damaged[:, place] = value
        assert len(detect(damaged)) == 0
    assert len(detect(raw[:0])) == 0


def test_of_very_many_candidates_the_surest_are_looked_at() -> None:
    raw = output(1, 3000)
    raw[:, 8:] = np.linspace(0, 5, 3000)[:, None]
    found = detect(raw)
    assert found.scores[0] == pytest.approx(1 / (1 + np.exp(-5)), abs=1e-4)
    assert (np.diff(found.scores) <= 0).all()
    assert len(found) == 100


def test_an_answer_has_the_objects_that_validation_counts_cut_to_what_was_seen() -> None:
    raw = np.full((3, 9), 3.0, np.float32)
    raw[:, 4:8] = 0.5  # anchors that are their objects
    raw[:, :4] = [-60, 0, 20, 20], [-2, 0, 20, 20], [100, 0, 120, 20]  # the first two are alike once they are cut
    assert len(detect(raw)) == 3
    view = View(region=(32, 0, 128, 96), size=(160, 96), crop_size=96)
    answer = answers_of("detection").answer(raw, ["square"], view)
    assert answer["boxes"] == [[32, 0, 52, 20], [32, 0, 52, 20]]  # nothing is left of what was not seen
    assert len(answer["classes"]) == len(answer["labels"]) == len(answer["scores"]) == 2


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (107, 64), (64, 64)])
def test_boxes_come_back_the_way_that_the_image_went(size: tuple[int, int]) -> None:
    transform = transform_for(64, resize_ratio=0.875)
    middle = [side // 2 for side in size]
    image = Image.new("RGB", size)
    image.paste((255, 255, 255), (middle[0] - 12, middle[1] - 12, middle[0] + 12, middle[1] + 12))
    pixels = load_image(encode_image(image, "PNG"), transform)[0, 0]
    light = pixels - pixels.min()
    places = np.arange(64) + 0.5
    x, y = (light.sum(axis=axis) @ places / light.sum() for axis in (0, 1))  # the middle of what is white
    (found,) = View.of(size, transform).of_image(np.array([[x, y, x, y]]))
    np.testing.assert_allclose(found, [*middle, *middle], atol=0.05)
