"""Colours of what decoders leave as brightness and differences of colour, with torch."""

import warnings
from collections.abc import Sequence
from functools import cache

import torch

_PIXELS_AT_ONCE = 1 << 25  # some 60 bytes of memory each
# By FFmpeg's number of the colour space (BT.709, BT.601, BT.2020) the weights of red and blue in the luma.
_LUMA_WEIGHTS = {1: (0.2126, 0.0722), 5: (0.299, 0.114), 9: (0.2627, 0.0593)}


def rgb_of_planes(
    luma: Sequence[torch.Tensor], chroma: Sequence[torch.Tensor], space: int, is_full: bool
) -> torch.Tensor:
    """Colours of frames of one size, as FFmpeg converts yuv420p: each difference stands for its four pixels.

    Args:
        luma: [H, W] uint8 of each frame.
        chroma: [H / 2, W / 2, 2] uint8 of each frame.
        space: FFmpeg's number of the colour space.
        is_full: whether all 256 levels are used.

    Returns:
        [B, H, W, 3] uint8 RGB.
    """
    least, most = (0.0, 255.0) if is_full else (16.0, 235.0)
    step = max(1, _PIXELS_AT_ONCE // luma[0].numel())
    weights = _weights(space, is_full, luma[0].device)
    parts = [
        _convert(list(luma[start : start + step]), list(chroma[start : start + step]), weights, least, most)
        for start in range(0, len(luma), step)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _convert(
    luma: list[torch.Tensor], chroma: list[torch.Tensor], weights: torch.Tensor, least: float, most: float
) -> torch.Tensor:
    added = (torch.stack(chroma).float() - 128) @ weights  # [B, H / 2, W / 2, 3]
    grey = (torch.stack(luma).float() - least) * (255 / (most - least))
    num_frames, height, width = grey.shape
    pixels = grey.view(num_frames, height // 2, 2, width // 2, 2, 1) + added[:, :, None, :, None]
    # FFmpeg rounds down, too.
    return pixels.clamp_(0, 255).to(torch.uint8).view(num_frames, height, width, 3)


# One call, which lets other threads run, instead of a dozen that each wait for them.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # torch.compile needs a compiler, which no image of a server has
    _convert = torch.jit.script(_convert)


@cache
def _weights(space: int, is_full: bool, device: torch.device) -> torch.Tensor:
    """[2, 3]: what the blue and the red difference add to red, green and blue."""
    red, blue = _LUMA_WEIGHTS.get(space, _LUMA_WEIGHTS[5])
    green = 1 - red - blue
    of_blue = [0, -2 * blue * (1 - blue) / green, 2 * (1 - blue)]
    of_red = [2 * (1 - red), -2 * red * (1 - red) / green, 0]
    return torch.tensor([of_blue, of_red], device=device) * (1 if is_full else 255 / 224)
