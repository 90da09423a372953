"""Networks and loss of detection: what they return, what they learn, and the ONNX file that they become."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.architectures import build_model
from components.common.tasks.detection.boxes import decode, detect
from components.common.tasks.detection.loss import DetectionLoss, assign, centres, corners, generalized_iou
from components.common.tasks.detection.networks import ARCHITECTURES, FcosSmall
from components.export.onnx_export import check_against_torch, export_onnx
from tests.unit.networks import random_images
from tests.unit.refusals import refuses

NUM_ANCHORS = {  # at 64 px
    "fcos_small": 8 * 8 + 4 * 4 + 2 * 2,
    "fcos_resnet50_fpn": 8 * 8 + 4 * 4 + 2 * 2 + 1 + 1,
    "retinanet_resnet50_fpn": 9 * (8 * 8 + 4 * 4 + 2 * 2 + 1 + 1),
    "ssdlite320_mobilenet_v3_large": 6 * (4 * 4 + 2 * 2 + 1 + 1 + 1 + 1),
    "fcos_fpn/timm/convnext_atto": 8 * 8 + 4 * 4 + 2 * 2 + 1 + 1,
    "retinanet_fpn/timm/mobilenetv3_small_050": 9 * (8 * 8 + 4 * 4 + 2 * 2 + 1 + 1),
    "fcos_fpn/timm/swin_tiny_patch4_window7_224": 8 * 8 + 4 * 4 + 2 * 2 + 1 + 1,  # whose maps are channels last
}


def labels(*objects: tuple[float, ...], num: int = 4) -> torch.Tensor:
    padded = torch.zeros(1, num, 6)
    padded[..., 4] = -1
    for place, each in enumerate(objects):
        padded[0, place] = torch.tensor(each)
    return padded


@pytest.mark.parametrize("architecture", NUM_ANCHORS)
def test_anchors_cover_the_image_and_the_loss_has_gradients(architecture: str) -> None:
    torch.manual_seed(0)
    model = build_model(f"detection/{architecture}", 3).eval()
    outputs = model(torch.randn(2, 3, 64, 64))
    assert outputs.shape == (2, NUM_ANCHORS[architecture], 8 + 3)
    anchors = outputs[0, :, :4].detach()
    assert torch.equal(anchors, outputs[1, :, :4])
    assert torch.equal(anchors.half().float(), anchors) or architecture.startswith("ssd")
    middles = centres(outputs[0]).detach()
    assert middles.min() < 9
    assert middles.max() > 50
    np.testing.assert_allclose(corners(outputs).detach(), decode(outputs.detach().numpy()), rtol=1e-5, atol=1e-4)
    truth = labels((15, 20, 35, 45, 1, 0), (50, 4, 55, 10, 2, 0), (0, 0, 64, 64, 0, 1)).repeat(2, 1, 1)
    loss = DetectionLoss()(outputs, truth)
    loss.backward()
    assert 0 < loss.item() < 20
    with_gradient = {name for name, each in model.named_parameters() if each.grad is not None and each.grad.any()}
    without = {name for name, _ in model.named_parameters()} - with_gradient
    # no box is learned at sizes without objects
    assert not {name for name in without if not any(part in name for part in ("box", "distances", "regression"))}
    assert any("distances" in name or "regression" in name for name in with_gradient)
    assert not model.state_dict().keys() & {"anchors.shapes"}  # weights alone


@pytest.mark.parametrize("architecture", ["retinanet_resnet50_fpn", "ssdlite320_mobilenet_v3_large"])
def test_boxes_are_those_of_torchvision_with_the_same_weights(architecture: str) -> None:
    from torchvision.models import detection
    from torchvision.models.detection.image_list import ImageList

    torch.manual_seed(1)
    network = getattr(detection, architecture)(weights=None, weights_backbone=None, num_classes=3).eval()
    ours = ARCHITECTURES[architecture](3).eval()
    ours.load_state_dict(network.state_dict())
    side = 128 if "retina" in architecture else 320
    images = torch.randn(1, 3, side, side)
    with torch.no_grad():
        features = list(network.backbone(images).values())
        raw = network.head(features)
        (anchors,) = network.anchor_generator(ImageList(images, [(side, side)]), features)
        theirs = network.box_coder.decode_single(raw["bbox_regression"][0], anchors)
        outputs = ours(images)
    torch.testing.assert_close(outputs[0, :, 8:], raw["cls_logits"][0])
    # anchors of SSDlite are rounded here
    torch.testing.assert_close(corners(outputs)[0], theirs, rtol=0, atol=0.01 if "retina" in architecture else 2.0)


@pytest.mark.parametrize(
    ("architecture", "code"),
    [
        ("segmentation/unet", "unknown-architecture"),
        ("detection/resnet50", "unknown-architecture"),
        ("detection/fcos_small/timm/resnet18", "unknown-architecture"),
        ("detection/fcos_fpn/timm/NAME", "unknown-architecture"),
        ("detection/fcos_fpn/timm/", "unknown-architecture"),
        ("detection/fcos_fpn/timm/vit_tiny_patch16_224", "backbone-without-strides"),
        ("detection/retinanet_fpn/timm/nest_tiny", "backbone-without-strides"),  # 4, 8 and 16
    ],
)
def test_networks_that_there_are_not(architecture: str, code: str) -> None:
    with refuses(code, "architecture"):
        build_model(architecture, 3)


def test_each_object_gets_anchors_and_padding_and_ignored_ones_none() -> None:
    model = FcosSmall(3).eval()
    with torch.no_grad():
        outputs = model(torch.zeros(1, 3, 128, 128))
    # the second lies between centres of anchors; the third is ignored
    truth = labels((30, 40, 70, 90, 1, 0), (5, 5, 7, 7, 2, 0), (64, 64, 120, 120, 0, 1))
    targets, owners = assign(outputs[..., 8:].sigmoid(), corners(outputs), centres(outputs), truth)
    chosen = targets[0].sum(dim=-1) > 0
    assert 1 < (targets[0, :, 1] > 0).sum() <= 10
    assert (targets[0, :, 2] > 0).sum() == 1
    assert (targets[0, :, 0] == 0).all()
    assert set(owners[0, chosen].tolist()) == {0, 1}
    inside = centres(outputs)[0, targets[0, :, 1] > 0]
    assert ((inside > torch.tensor([30, 40])) & (inside < torch.tensor([70, 90]))).all()


def test_no_objects_is_a_finite_loss() -> None:
    outputs = FcosSmall(3)(torch.randn(2, 3, 64, 64))
    loss = DetectionLoss()(outputs, labels().repeat(2, 1, 1))
    loss.backward()
    assert 0 <= loss.item() < 1


def test_generalized_iou() -> None:
    from torchvision.ops import generalized_box_iou

    corner, side = torch.rand(2, 50, 2) * 50, torch.rand(2, 50, 2) * 60 + 1
    first, second = torch.cat([corner, corner + side], dim=-1)
    torch.testing.assert_close(generalized_iou(first, second), generalized_box_iou(first, second).diagonal())


def test_a_detector_learns_where_two_squares_are() -> None:
    torch.manual_seed(0)
    model = FcosSmall(2, width=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    images = torch.zeros(2, 3, 64, 64)
    images[0, 0, 8:32, 16:40] = 2
    images[1, 1, 30:60, 20:50] = 2
    truth = torch.cat([labels((16, 8, 40, 32, 0, 0)), labels((20, 30, 50, 60, 1, 0))])
    for _ in range(40):
        loss = DetectionLoss()(model(images), truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        outputs = model.train()(images).numpy()
    for found, expected in zip(map(detect, outputs), truth[:, 0].numpy(), strict=True):
        assert found.scores[0] > 0.5
        assert found.classes[0] == expected[4]
        np.testing.assert_allclose(found.boxes[0], expected[:4], atol=4)


@pytest.mark.parametrize("architecture", ["fcos_small", "ssdlite320_mobilenet_v3_large"])
def test_the_onnx_file_answers_alike_at_any_batch_and_has_static_shapes(architecture: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ARCHITECTURES[architecture](3).eval()
    shapes = ShapeSpec(height=64, width=64)
    export_onnx(model, tmp_path / "model.onnx", shapes)
    check_against_torch(model, tmp_path / "model.onnx", shapes, random_images(shapes, 3))
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert not {node.op_type for node in graph.node} & {"Loop", "If", "NonZero", "NonMaxSuppression", "Range", "Where"}
    sizes = [axis.dim_param or axis.dim_value for axis in graph.output[0].type.tensor_type.shape.dim]
    assert sizes == ["batch", NUM_ANCHORS[architecture], 8 + 3]  # a server is configured with them
