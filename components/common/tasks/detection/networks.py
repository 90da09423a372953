"""Detectors: fcos_small, and three of torchvision, of which two take backbones of timm.

Each returns what `boxes` describes: [B, A, 8 + classes].

Every class has a sigmoid of its own, and there is no background class, no centerness and nothing after the heads:
non-maximum suppression is outside, so that shapes are static.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from components.common.contracts.errors import UserError
from components.common.tasks.layers import ConvBlock, Pyramid

_PRIOR = 0.01  # of a class at an anchor before training (Lin et al., "Focal Loss", 2017)
_MAX_EXPONENT = 4.0  # of distances and sides, in units of the anchor


class Anchors(nn.Module):
    """Anchors about the cells of feature maps."""

    shapes: torch.Tensor

    def __init__(
        self, shapes: torch.Tensor, *, offset: float, relative: bool = False, whole_strides: bool = False
    ) -> None:
        """Keep the shapes.

        Args:
            shapes: [levels, K, 2], width and height of the K anchors of a cell, in pixels.
            offset: of an anchor's centre in its cell, in cells: 0.5 for the middle.
            relative: the shapes are shares of the image instead.
            whole_strides: pixels of a cell are rounded down where the image has no whole number of them.
        """
        super().__init__()
        self.register_buffer("shapes", shapes.float(), persistent=False)
        self.offset, self.relative, self.whole_strides = offset, relative, whole_strides

    def forward(self, images: torch.Tensor, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """Lay out anchors; only sizes of the arguments count.

        Args:
            images: [B, 3, H, W].
            features: [B, C, rows, columns] each.

        Returns:
            [A, 4] x1, y1, x2, y2 in pixels, float32: by level, row, column, and K.
        """
        levels = []
        size = [int(side) for side in images.shape[-2:]]  # int: the exporter's tracer makes them tensors otherwise
        for feature, shapes in zip(features, self.shapes.unbind(), strict=True):
            ticks = []
            for side, cells in zip(size, feature.shape[-2:], strict=True):
                stride = side // int(cells) if self.whole_strides else side / int(cells)
                ticks.append((torch.arange(int(cells), device=images.device) + self.offset) * stride)
            y, x = torch.meshgrid(*ticks, indexing="ij")
            centres = torch.stack([x, y], dim=-1).reshape(-1, 1, 2)  # [rows * columns, 1, 2]
            # Half sides are whole numbers, so that FP16 holds the corners exactly.
            halves = (shapes * (images.new_tensor(size[::-1]).float() if self.relative else 1) / 2).round()
            levels.append(torch.cat([centres - halves, centres + halves], dim=-1).reshape(-1, 4))
        return torch.cat(levels)


def _assembled(anchors: torch.Tensor, distances: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """[A, 4], [B, A, 4], [B, A, classes] -> [B, A, 8 + classes]."""
    # Added to zeros and not expanded: in ONNX the shape of an expansion depends on that of the batch.
    return torch.cat([anchors.to(logits.dtype) + 0 * distances, distances, logits], dim=-1)


def _cells(feature: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] -> [B, H * W, C]."""
    channels, rows, columns = (int(side) for side in feature.shape[1:])
    return feature.permute(0, 2, 3, 1).reshape(-1, rows * columns, channels)


class _Head(nn.Module):
    """Distances and classes of the cells of one feature map."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.box_branch, self.class_branch = ConvBlock(width, width), ConvBlock(width, width)
        self.distances = nn.Conv2d(width, 4, 3, padding=1)
        self.logits = nn.Conv2d(width, num_classes, 3, padding=1)
        nn.init.normal_(self.distances.weight, std=0.01)
        nn.init.zeros_(self.distances.bias)  # type: ignore[arg-type]
        nn.init.normal_(self.logits.weight, std=0.01)
        nn.init.constant_(self.logits.bias, -math.log((1 - _PRIOR) / _PRIOR))  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, width, H, W] -> [B, H * W, 4] logarithms of distances over half an anchor, [B, H * W, classes]."""
        return _cells(self.distances(self.box_branch(x))), _cells(self.logits(self.class_branch(x)))


class FcosSmall(nn.Module):
    """A small detector without shapes of anchors to choose (after FCOS, Tian et al., 2019), for images of some 100 px.

    A feature pyramid at strides 8, 16 and 32, and heads of two convolutions: 0.6 million weights.
    """

    STRIDES = (8, 16, 32)

    def __init__(self, num_classes: int, width: int = 48) -> None:
        super().__init__()
        self.pyramid = Pyramid(width, len(self.STRIDES))
        self.smooth = nn.ModuleList(ConvBlock(width, width) for _ in self.STRIDES)
        self.heads = nn.ModuleList(_Head(width, num_classes) for _ in self.STRIDES)
        self.anchors = Anchors(_squares(self.STRIDES) * 4, offset=0.5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] -> [B, A, 8 + classes]; H and W are multiples of 32."""
        features = [layer(each) for layer, each in zip(self.smooth, self.pyramid(images), strict=True)]
        found = [head(each) for head, each in zip(self.heads, features, strict=True)]
        distances, logits = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        anchors = self.anchors(images, features)
        return _assembled(anchors, distances.clamp(max=_MAX_EXPONENT).exp() / 2, logits)


class _TorchvisionDetector(nn.Module):
    """The backbone and heads of a detector of torchvision, under its names, for its weights."""

    def __init__(self, network: Any, anchors: Anchors) -> None:
        super().__init__()
        self.backbone, self.head, self.anchors = network.backbone, network.head, anchors


class _AnchorBased(_TorchvisionDetector):
    """RetinaNet and SSDlite: offsets of the centre, and logarithms of the sides, over those of an anchor."""

    def __init__(self, network: Any, anchors: Anchors) -> None:
        super().__init__(network, anchors)
        self.weights = tuple(float(each) for each in network.box_coder.weights)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] -> [B, A, 8 + classes]."""
        features = list(self.backbone(images).values())
        offsets, logits = self.head.regression_head(features), self.head.classification_head(features)
        x, y, width, height = self.weights
        centres = offsets[..., :2] / offsets.new_tensor([x, y])
        halves = (offsets[..., 2:] / offsets.new_tensor([width, height])).clamp(max=_MAX_EXPONENT).exp() / 2
        distances = torch.cat([halves - centres, halves + centres], dim=-1)
        return _assembled(self.anchors(images, features), distances, logits)


class _AnchorFree(_TorchvisionDetector):
    """FCOS: distances to the edges, in strides."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] -> [B, A, 8 + classes]."""
        features = list(self.backbone(images).values())
        distances, _ = self.head.regression_head(features)
        return _assembled(self.anchors(images, features), distances, self.head.classification_head(features))


class _BoxHead(nn.Module):
    """Distances of FCOS without its centerness, which a score that knows the overlap has no use for."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.conv, self.bbox_reg = head.conv, head.bbox_reg
        # A box of 8 strides: at 0, torchvision's choice, no anchor would overlap any object before training.
        nn.init.constant_(self.bbox_reg.bias, 4.0)

    def forward(self, features: Sequence[torch.Tensor]) -> tuple[torch.Tensor, None]:
        """[B, C, H, W] each -> [B, A, 4]."""
        found = [_cells(nn.functional.relu(self.bbox_reg(self.conv(each)))) for each in features]
        return torch.cat(found, dim=1), None


_PYRAMID = (8, 16, 32, 64, 128)  # strides of torchvision's


def _squares(sides: Sequence[float]) -> torch.Tensor:
    """[levels, 1, 2]."""
    return torch.tensor(sides).float().reshape(-1, 1, 1).repeat(1, 1, 2)


class _Backbone(nn.Module):
    """The maps of a network of timm at strides 8, 16 and 32, and torchvision's pyramid over them."""

    def __init__(self, name: str) -> None:
        """Raises UserError: the network has no such maps."""
        from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelP6P7

        super().__init__()
        with torch.device("meta"):
            maps = _timm(name).feature_info.info
        places = {entry["reduction"]: place for place, entry in enumerate(maps)}  # the last one of a stride
        if missing := [stride for stride in _PYRAMID[:3] if stride not in places]:
            raise UserError(
                f"timm's {name} has maps at strides {', '.join(map(str, places))}, and none at {missing[0]}: a pyramid "
                f"takes {', '.join(map(str, _PYRAMID[:3]))}. Take a backbone with stages, such as resnet50, "
                "convnext_tiny, mobilenetv3_large_100 or swin_tiny_patch4_window7_224",
                code="backbone-without-strides",
                setting="architecture",
            )
        chosen = [places[stride] for stride in _PYRAMID[:3]]
        self.body = _timm(name, out_indices=chosen)
        self.out_channels = 256  # as torchvision's
        channels = [maps[place]["num_chs"] for place in chosen]
        blocks = LastLevelP6P7(self.out_channels, self.out_channels)
        self.fpn = FeaturePyramidNetwork(channels, self.out_channels, extra_blocks=blocks)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """[B, 3, H, W] -> [B, 256, H / stride, W / stride] for each stride of the pyramid."""
        maps = self.body(images)
        if str(getattr(self.body, "output_fmt", "")).endswith("NHWC"):
            maps = [each.permute(0, 3, 1, 2) for each in maps]
        found: dict[str, torch.Tensor] = self.fpn({str(place): each for place, each in enumerate(maps)})
        return found


def _timm(name: str, **options: Any) -> Any:
    import timm

    if "swin" in name:  # else it takes images of its published size alone
        options["strict_img_size"] = False
    return timm.create_model(name, features_only=True, **options)


def _torchvision(name: str, num_classes: int, backbone: str = "") -> Any:
    """A detector of torchvision, on its own backbone or one of timm."""
    from torchvision.models import detection

    if backbone:
        return getattr(detection, name)(_Backbone(backbone), num_classes)
    return getattr(detection, name)(weights=None, weights_backbone=None, num_classes=num_classes)


def _retinanet(num_classes: int, backbone: str = "") -> nn.Module:
    name = "RetinaNet" if backbone else "retinanet_resnet50_fpn"
    network = _torchvision(name, num_classes, backbone)
    corners = torch.stack(network.anchor_generator.cell_anchors)  # [levels, 9, 4]
    return _AnchorBased(network, Anchors(corners[..., 2:] - corners[..., :2], offset=0, whole_strides=True))


def _fcos(num_classes: int, backbone: str = "") -> nn.Module:
    name = "FCOS" if backbone else "fcos_resnet50_fpn"
    network = _torchvision(name, num_classes, backbone)
    network.head.regression_head = _BoxHead(network.head.regression_head)
    return _AnchorFree(network, Anchors(_squares(_PYRAMID), offset=0, whole_strides=True))


def _ssdlite(num_classes: int) -> nn.Module:
    network = _torchvision("ssdlite320_mobilenet_v3_large", num_classes)
    for block in network.head.classification_head.module_list:
        nn.init.constant_(block[-1].bias, -math.log((1 - _PRIOR) / _PRIOR))
    shapes = torch.stack(network.anchor_generator._wh_pairs).clamp(max=1)
    return _AnchorBased(network, Anchors(shapes, offset=0.5, relative=True))


ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    "fcos_small": FcosSmall,
    "fcos_resnet50_fpn": _fcos,
    "fcos_fpn/timm/NAME": _fcos,
    "retinanet_resnet50_fpn": _retinanet,
    "retinanet_fpn/timm/NAME": _retinanet,
    "ssdlite320_mobilenet_v3_large": _ssdlite,
}
"""Builders by name: they take the number of classes, and the name of a backbone where the network has one."""
