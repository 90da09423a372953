"""Networks for segmentation: fpn_small, and four of torchvision. Each returns [B, classes, H, W] logits."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from components.common.tasks.layers import ConvBlock, Pyramid


class FpnSmall(nn.Module):
    """A small network for images of some 100 px: a feature pyramid at strides 4 to 32, summed at the finest.

    After the semantic branch of Kirillov et al., "Panoptic Feature Pyramid Networks", 2019; 0.5 million weights.
    """

    def __init__(self, num_classes: int, width: int = 48) -> None:
        super().__init__()
        self.pyramid = Pyramid(width, 4)
        self.smooth = ConvBlock(width, width)
        self.logits = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] -> [B, classes, H, W]; H and W are multiples of 32."""
        logits = self.logits(self.smooth(self.pyramid(images)[0]))
        return nn.functional.interpolate(logits, scale_factor=4.0, mode="bilinear")


class _TorchvisionSegmenter(nn.Module):
    """The backbone and the classifier of a network of torchvision, under its names, for its weights."""

    def __init__(self, name: str, num_classes: int) -> None:
        super().__init__()
        from torchvision.models import segmentation

        options = {"aux_loss": False} if name != "lraspp_mobilenet_v3_large" else {}
        network = getattr(segmentation, name)(weights=None, weights_backbone=None, num_classes=num_classes, **options)
        self.backbone, self.classifier = network.backbone, network.classifier

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] -> [B, classes, H, W]."""
        features = self.backbone(images)
        logits = self.classifier(features.get("out", features))
        size = [int(side) for side in images.shape[-2:]]  # int: the exporter's tracer makes them tensors otherwise
        return nn.functional.interpolate(logits, size=size, mode="bilinear", align_corners=False)


ARCHITECTURES: dict[str, Callable[[int], nn.Module]] = {
    "fpn_small": FpnSmall,
    **{
        name: partial(_TorchvisionSegmenter, name)
        for name in ("lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large", "deeplabv3_resnet50", "fcn_resnet50")
    },
}
"""Builders by name, which take the number of classes."""
