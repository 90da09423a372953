"""Networks for segmentation: logits of each pixel, torchvision's with the same weights, and the ONNX file of each."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.models.segmentation

from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.architectures import build_model
from components.common.tasks.segmentation.networks import ARCHITECTURES
from components.export.onnx_export import check_against_torch, export_onnx


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_of_each_pixel_and_the_same_from_onnx(architecture: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = build_model(f"segmentation/{architecture}", 5).eval()
    shapes = ShapeSpec(height=64, width=64)
    images = torch.randn(3, 3, 64, 64)
    with torch.no_grad():
        assert network(images).shape == (3, 5, 64, 64)
    export_onnx(network, tmp_path / "model.onnx", shapes)
    assert check_against_torch(network, tmp_path / "model.onnx", shapes, np.asarray(images)) < 1e-3


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "fpn_small"])
def test_logits_are_those_of_torchvision_with_the_same_weights(architecture: str) -> None:
    torch.manual_seed(1)
    theirs = getattr(torchvision.models.segmentation, architecture)(weights=None, weights_backbone=None, num_classes=3)
    ours = build_model(f"segmentation/{architecture}", 3).eval()
    weights = {name: value for name, value in theirs.state_dict().items() if not name.startswith("aux_classifier.")}
    ours.load_state_dict(weights)
    images = torch.randn(1, 3, 96, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs.eval()(images)["out"])
