"""Layers that small networks of several tasks are made of."""

from itertools import pairwise

import torch
from torch import nn

_STRIDE = 32  # of a pyramid's last level


class ConvBlock(nn.Sequential):
    """Convolution, BatchNorm, ReLU."""

    def __init__(self, num_in: int, num_out: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(num_in, num_out, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(inplace=True),
        )


class Residual(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = ConvBlock(width, width)
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, width, H, W] -> the same."""
        return nn.functional.relu(x + self.second(self.first(x)))


class Pyramid(nn.Module):
    """Strided convolutions, and a feature pyramid (Lin et al., 2017) over their last maps."""

    def __init__(self, width: int, num_levels: int) -> None:
        """`width` is that of every level; the last is at stride 32, each one before at half of the next one's."""
        super().__init__()
        widths = (width // 2, width * 3 // 4, width * 3 // 2, width * 3 // 2, width * 3 // 2)
        self.stem = ConvBlock(3, widths[0], stride=2)
        self.stages = nn.ModuleList(
            nn.Sequential(ConvBlock(before, after, stride=2), Residual(after)) for before, after in pairwise(widths)
        )
        self.laterals = nn.ModuleList(ConvBlock(each, width, kernel=1) for each in widths[-num_levels:])

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        """[B, 3, H, W] -> [B, width, H / stride, W / stride] each, the finest first.

        Raises:
            ValueError: H or W is no multiple of 32.
        """
        if any(int(side) % _STRIDE for side in images.shape[-2:]):  # int: the exporter's tracer has tensors
            raise ValueError(f"its sides must be multiples of {_STRIDE} px")
        x = self.stem(images)
        maps: list[torch.Tensor] = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        levels = [layer(each) for layer, each in zip(self.laterals, maps[-len(self.laterals) :], strict=True)]
        for level in range(len(levels) - 2, -1, -1):
            levels[level] = levels[level] + nn.functional.interpolate(levels[level + 1], scale_factor=2.0)
        return levels
