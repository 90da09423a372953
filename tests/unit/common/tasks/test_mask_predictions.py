"""mIoU of masks, its paired bootstrap, and what the report shows of them."""

import numpy as np
import pytest
from PIL import Image

from components.common.contracts.transforms import TransformSpec
from components.common.tasks.segmentation.predictions import VOID, MaskPredictions

CLASSES = ("background", "circle", "square", "never")


def labels(num_images: int = 40, side: int = 48, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    found = np.zeros((num_images, side, side), np.uint8)
    for mask in found:
        for value in (1, 2):
            y, x = random.integers(0, side - 12, 2)
            mask[y : y + 12, x : x + 12] = value
        mask[random.random(mask.shape) < 0.02] = VOID
    return found


def outputs(masks: np.ndarray, wrong: float, seed: int = 1) -> np.ndarray:
    """Logits that are largest for the label, but for a share of the pixels."""
    random = np.random.default_rng(seed)
    said = np.where(masks == VOID, 0, masks)
    said = np.where(random.random(masks.shape) < wrong, random.integers(0, 3, masks.shape), said)
    return np.moveaxis(np.eye(len(CLASSES), dtype=np.float32)[said], -1, 1)


def iou_by_hand(said: np.ndarray, masks: np.ndarray, index: int) -> float:
    known = masks != VOID
    a, b = (said == index) & known, (masks == index) & known
    return float((a & b).sum() / (a | b).sum())


def test_miou_is_that_of_all_pixels_of_all_images() -> None:
    masks = labels()
    own = outputs(masks, 0.2)
    found = MaskPredictions.join([MaskPredictions.of(own[:25], masks[:25]), MaskPredictions.of(own[25:], masks[25:])])
    by_hand = [iou_by_hand(own.argmax(axis=1), masks, index) for index in range(3)]
    assert found.score_pct == pytest.approx(100 * np.mean(by_hand))
    assert found.num_unseen(4) == 1
    assert found.num_images == 40
    assert found.score_low_pct < found.score_pct
    one = found.select(slice(3, 4))
    assert one.score_pct == pytest.approx(found.per_image[3])
    name, chance = found.chance(CLASSES)
    assert (name, chance) == ("background", pytest.approx(100 * (masks == 0).sum() / (masks != VOID).sum() / 3))


def test_a_class_that_is_only_predicted_counts_for_no_class_but_costs_the_others() -> None:
    masks = np.zeros((1, 8, 8), np.uint8)
    said = masks.copy()
    said[0, :2] = 3
    found = MaskPredictions.of(np.moveaxis(np.eye(4, dtype=np.float32)[said], -1, 1), masks)
    assert found.score_pct == pytest.approx(75.0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_predicts_nothing(value: float) -> None:
    masks = labels(4)
    own = outputs(masks, 0.0)
    own[1, 2, 5, 7] = value
    found = MaskPredictions.of(own, masks)
    assert found.num_undefined == 1
    assert found.per_image.tolist() == pytest.approx([100.0, 0.0, 100.0, 100.0])


def test_what_is_shown_of_images_that_differ() -> None:
    masks = labels(10)
    fp32 = MaskPredictions.of(outputs(masks, 0.0), masks)
    changed = outputs(masks, 0.0)
    changed[4] = outputs(masks[4:5], 0.4)[0]
    changed[7] = outputs(masks[7:8], 0.1)[0]
    own = MaskPredictions.of(changed, masks)
    assert own.num_differing(fp32) == 2
    assert own.differing(fp32, 24).tolist() == [4, 7]
    assert own.differing(fp32, 1).tolist() == [4]
    assert 95 < own.agreement_pct(fp32) < 100
    label, said = own.described(4, CLASSES)
    assert label == "background, circle, square" or label == "background, square, circle"
    assert said == f"mIoU {own.per_image[4]:.1f} %"
    transform = TransformSpec(resize_size=48, crop_size=48, mean=(0, 0, 0), std=(1, 1, 1))
    picture = own.picture(Image.new("RGB", (96, 64), "blue"), transform, fp32, 4)
    assert picture.size == (4 * 48 + 3 * 2, 48)
    tiles = [np.asarray(picture)[:, start : start + 48] for start in range(0, 200, 50)]
    assert (tiles[0] == (0, 0, 255)).all()
    assert not np.array_equal(tiles[2], tiles[3])
    other = outputs(masks, 0.3)
    assert own.divergence(other, other) == 0.0 < own.divergence(other, changed)
