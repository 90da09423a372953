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
        rows = _windows(input.shape[2], kernel_h, stride_h, pad_h)
        columns = _windows(input.shape[3], kernel_w, stride_w, pad_w)
        images = nn.functional.pad(input.permute(0, 2, 3, 1), (0, 0, pad_w, pad_w, pad_h, pad_h))
        # [B, OH, OW, KH * KW * C], as the weights lie in memory: [O, KH, KW, C]
        seen = [images[:, row, column] for row in rows.values() for column in columns.values()]
        windows = torch.cat(seen, dim=3) if len(seen) > 1 else seen[0]
        if len(rows) < kernel_h or len(columns) < kernel_w:
            weight = weight[:, :, min(rows) : max(rows) + 1, min(columns) : max(columns) + 1]
        result = nn.functional.linear(windows, weight.permute(0, 2, 3, 1).flatten(1), bias)
        return result.permute(0, 3, 1, 2)


def _windows(size: int, kernel: int, stride: int, padding: int) -> dict[int, slice]:
    """What each place of the kernel sees of a padded side; without the outer places that see padding alone."""
    length = (size + 2 * padding - kernel) // stride * stride + 1
    windows = {place: slice(place, place + length, stride) for place in range(kernel)}
    pixels = range(padding, padding + size)
    used = [place for place in windows if any(seen in pixels for seen in range(place, place + length, stride))]
    return {place: windows[place] for place in range(used[0], used[-1] + 1)} if used else windows


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
