"""Optimizer, learning-rate schedule and the moving average of weights.

timm is imported where it is used: a machine that trains torchvision's models with SGD does not need it.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from components.train.config import TrainConfig

if TYPE_CHECKING:
    from timm.utils.model_ema import ModelEmaV3


def build_optimizer(model: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of the trainable parameters, at its peak learning rate.

    Weight decay is on matrices and filters only (Goyal et al., 2017; He et al., 2019).
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if parameter.ndim > 1]
    plain = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    learning_rate = config.learning_rate * config.global_batch_size / 256
    fused = device.type in ("cuda", "cpu")  # one pass over the weights
    betas = (config.momentum, 0.999)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused)
    if config.optimizer == "lamb":
        from timm.optim.lamb import Lamb

        return Lamb(groups, lr=learning_rate, betas=betas)  # no fused one without Apex; timm's runs in a few kernels
    nesterov = config.nesterov and config.momentum > 0
    return torch.optim.SGD(groups, lr=learning_rate, momentum=config.momentum, nesterov=nesterov, fused=fused)


def build_schedule(
    optimizer: torch.optim.Optimizer, config: TrainConfig, num_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up to the peak, then down to zero. `num_steps` is the whole training."""
    num_warmup_steps = round(num_steps * config.warmup_fraction)

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return (step + 1) / num_warmup_steps
        done = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)
        return 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def build_ema(model: nn.Module, config: TrainConfig) -> "ModelEmaV3 | None":
    """A moving average of weights and BatchNorm statistics; None where it is off.

    The decay grows from 0 to ema_decay, so that the average of a short run forgets its random start.
    """
    if not config.ema_decay:
        return None
    from timm.utils.model_ema import ModelEmaV3

    return ModelEmaV3(model, decay=config.ema_decay, use_warmup=True)
