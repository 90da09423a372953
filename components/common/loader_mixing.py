"""Mixup and cutmix: batches of mixed images with probabilities for labels, on the images' device."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from components.common.transforms import Augmentation


class Mixer:
    """Mixes every image of a batch with its neighbour, by torchvision's MixUp or CutMix, or either at random.

    Sources: Zhang et al., "mixup: Beyond Empirical Risk Minimization" (2018); Yun et al., "CutMix" (2019).
    """

    def __init__(self, augmentation: Augmentation, num_classes: int) -> None:
        """Without mixup_alpha and cutmix_alpha in `augmentation`, batches stay as they are."""
        self._ways: list[Callable[..., Any]] = []
        if not (augmentation.mixup_alpha or augmentation.cutmix_alpha):
            return
        from torchvision.transforms import v2  # takes seconds, and few recipes mix

        if augmentation.mixup_alpha:
            self._ways.append(v2.MixUp(alpha=augmentation.mixup_alpha, num_classes=num_classes))
        if augmentation.cutmix_alpha:
            self._ways.append(v2.CutMix(alpha=augmentation.cutmix_alpha, num_classes=num_classes))

    def __call__(
        self, images: torch.Tensor, labels: torch.Tensor, seed: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels after mixing, a function of these arguments alone.

        Args:
            images: [B, 3, H, W] float32 or float16, channels_last.
            labels: [B] int64.
            seed: of the way, the share and the place of the box.

        Returns:
            [B, 3, H, W] of the same dtype, channels_last; and [B, num_classes] float32, rows of sum 1.
        """
        if not self._ways:
            return images, labels
        rng = np.random.default_rng(seed)
        way = self._ways[rng.integers(len(self._ways))]
        # torchvision draws from torch's global generator of the CPU, which belongs to the caller.
        generator = torch.default_generator
        before = generator.get_state()
        try:
            generator.manual_seed(int(rng.integers(2**63)))
            images, labels = way(images, labels)
        finally:
            generator.set_state(before)
        return images.contiguous(memory_format=torch.channels_last), labels
