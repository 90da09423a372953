"""Detection's validation in training: mAP from sums that processes add up."""

import numpy as np
import pytest
import torch

from components.common.tasks import load_task
from components.common.tasks.detection.loss import DetectionLoss
from components.common.tasks.detection.predictions import BoxPredictions
from tests.unit.common.tasks.test_box_predictions import labels, outputs

TASK = load_task("detection")
CPU = torch.device("cpu")


@pytest.mark.parametrize("noise", [0.5, 1.5])
@pytest.mark.parametrize("num_images", [12, 300])
def test_the_score_is_map_to_half_a_point_and_sums_add_up(num_images: int, noise: float) -> None:
    objects = labels(num_images)
    raw = outputs(objects, noise)
    raw[..., 8:] = raw[..., 8:].clip(-9, 3) * 1.5  # also scores that lie close together
    whole, parts = TASK.new_totals(4, CPU), [TASK.new_totals(4, CPU) for _ in range(2)]
    batches = [(torch.from_numpy(raw[part]), torch.from_numpy(objects[part])) for part in (slice(0, 7), slice(7, None))]
    for (images, truth), part in zip(batches, parts, strict=True):
        TASK.count(whole, images, truth)
        TASK.count(part, images, truth)
    loss, score = TASK.result(whole, num_images)
    exact = BoxPredictions.of(raw, objects).score_pct
    assert 10 < exact < 99
    assert score == pytest.approx(exact, abs=0.5)
    assert TASK.result(parts[0] + parts[1], num_images) == pytest.approx((loss, score))
    wanted = sum(len(images) * DetectionLoss()(images, truth).item() for images, truth in batches)
    assert loss == pytest.approx(wanted / num_images, rel=1e-5)


def test_of_many_anchors_those_count_that_suppression_looks_at() -> None:
    objects = labels(4, seed=2)
    raw = outputs(objects, 0.5)
    many = np.concatenate([np.tile(raw[:, -1:], (1, 3000, 1)), raw], axis=1)
    totals = [TASK.new_totals(4, CPU) for _ in range(2)]
    for own, images in zip(totals, (raw, many), strict=True):
        TASK.count(own, torch.from_numpy(images), torch.from_numpy(objects))
    torch.testing.assert_close(totals[0][1:], totals[1][1:])


def test_nothing_to_find_scores_nothing() -> None:
    totals = TASK.new_totals(4, CPU)
    assert TASK.result(totals, 1) == (0.0, 0.0)
    objects = labels(3)
    blank = outputs(objects, 0.5)
    blank[..., 8:] = -9
    TASK.count(totals, torch.from_numpy(blank).half(), torch.from_numpy(objects))
    assert TASK.result(totals, 3)[1] == 0.0
