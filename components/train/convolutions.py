"""Convolutions over few pixels as matrix products, which train about twice as fast on CPUs.

oneDNN has no gradient kernels for them: a 3x3 convolution over 2x2 pixels falls back to one small product per image,
and a ResNet-50 that sees 32 px is mostly made of such layers.
"""

import torch
from torch import nn

_MAX_ROWS = 144  # input pixels times kernel size: up to 12x12 pixels for 1x1 and 4x4 for 3x3; above, oneDNN is as fast


class SmallConv2d(nn.Conv2d):
    """A Conv2d, same weights and result, that is one matrix product per batch where the input has few pixels."""

    def _conv_forward(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # input: [B, C, H, W] float32, channels_last
        (kernel_h, kernel_w), (stride_h, stride_w), padding = self.kernel_size, self.stride, self.padding
        if isinstance(padding, str) or input.shape[2] * input.shape[3] * kernel_h * kernel_w > _MAX_ROWS:
            return super()._conv_forward(input, weight, bias)
        pad_h, pad_w = padding
        images = nn.functional.pad(input.permute(0, 2, 3, 1), (0, 0, pad_w, pad_w, pad_h, pad_h))
        windows = images.unfold(1, kernel_h, stride_h).unfold(2, kernel_w, stride_w)  # [B, OH, OW, C, KH, KW]
        batch_size, height, width = windows.shape[:3]
        columns = windows.permute(0, 1, 2, 4, 5, 3).reshape(batch_size * height * width, -1)
        # The weights lie as [O, KH, KW, C] in memory, so neither they nor the result are copied.
        result = nn.functional.linear(columns, weight.permute(0, 2, 3, 1).flatten(1), bias)
        return result.view(batch_size, height, width, -1).permute(0, 3, 1, 2)


def speed_up_small_convolutions(model: nn.Module) -> None:
    """Make the plain convolutions of a model SmallConv2d; names, weights and results stay the same."""
    for module in model.modules():
        if (
            type(module) is nn.Conv2d
            and module.groups == 1
            and module.dilation == (1, 1)
            and module.padding_mode == "zeros"
        ):
            module.__class__ = SmallConv2d
