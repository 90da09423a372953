"""Segmentation's loss and score against their definitions."""

import base64
import io
import math

import numpy as np
import torch
from PIL import Image

from components.common.tasks import load_task
from components.common.tasks.answers import answers_of
from components.common.tasks.segmentation import VOID

TASK = load_task("segmentation")


def test_miou_is_that_of_the_definition_over_classes_that_occur() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, (6, 9, 7))  # class 4 occurs nowhere
    labels[rng.random(labels.shape) < 0.2] = VOID
    outputs = rng.standard_normal((6, 5, 9, 7)).astype(np.float32)
    totals = TASK.new_totals(5, torch.device("cpu"))
    for part in (slice(0, 4), slice(4, 6)):
        TASK.count(totals, torch.from_numpy(outputs[part]), torch.from_numpy(labels[part]))
    loss, score = TASK.result(totals, 6)
    predicted, known = outputs.argmax(axis=1), labels != VOID
    shares = [
        ((predicted == label) & (labels == label)).sum() / (((predicted == label) & known) | (labels == label)).sum()
        for label in range(4)
    ]
    assert math.isclose(score, 100 * float(np.mean(shares)), rel_tol=1e-9)
    wanted = torch.stack(
        [
            torch.nn.functional.cross_entropy(torch.from_numpy(o)[None], torch.from_numpy(t)[None], ignore_index=VOID)
            for o, t in zip(outputs, labels, strict=True)
        ]
    )
    assert math.isclose(loss, wanted.mean().item(), rel_tol=1e-5)


def test_void_alone_costs_nothing_and_has_a_gradient_of_zero() -> None:
    outputs = torch.randn(2, 3, 4, 4, requires_grad=True)
    loss = TASK.loss(0.1)(outputs, torch.full((2, 4, 4), VOID))
    loss.backward()
    assert loss.item() == 0
    assert not outputs.grad.any()
    totals = TASK.new_totals(3, torch.device("cpu"))
    TASK.count(totals, outputs.detach(), torch.full((2, 4, 4), VOID))
    assert TASK.result(totals, 2) == (0.0, 0.0)


def test_the_loss_is_torchs_cross_entropy_and_dice_over_the_classes_shown() -> None:
    torch.manual_seed(0)
    outputs, labels = torch.randn(2, 3, 4, 4), torch.randint(0, 2, (2, 4, 4))  # class 2 is not shown
    shares, dice = outputs.softmax(dim=1), []
    for index in range(2):
        own, truth = shares[:, index], (labels == index).float()
        dice.append(1 - (2 * (own * truth).sum() + 1) / (own.sum() + truth.sum() + 1))
    for smoothing in (0.0, 0.1):
        cross_entropy = torch.nn.functional.cross_entropy(outputs, labels, label_smoothing=smoothing)
        torch.testing.assert_close(TASK.loss(smoothing)(outputs, labels), cross_entropy + sum(dice) / 2)


def test_a_region_of_less_than_a_pixel_is_drawn() -> None:
    mask = io.BytesIO()
    Image.fromarray(np.ones((32, 32), np.uint8)).save(mask, "PNG")
    encoded = base64.b64encode(mask.getvalue()).decode()
    answer = {"classes": ["cat"], "shares": [1.0], "mask": encoded, "region": [79.7, 0, 80.3, 0.6]}
    picture = answers_of("segmentation").drawn(Image.new("RGB", (160, 1)), answer)  # a thumbnail of 4096x16 pixels
    assert picture.getbbox()
