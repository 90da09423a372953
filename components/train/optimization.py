"""Optimizer and learning-rate schedule."""

import math

import torch
from torch import nn

from components.train.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum; weight decay on matrices and filters only (Goyal et al., 2017; He et al., 2019)."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    plain = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    learning_rate = config.learning_rate * config.global_batch_size / 256
    return torch.optim.SGD(
        groups, lr=learning_rate, momentum=config.momentum, nesterov=config.momentum > 0, fused=device.type == "cuda"
    )


def build_schedule(
    optimizer: torch.optim.Optimizer, config: TrainConfig, num_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up to the peak, then half a cosine to zero. `num_steps` is the whole training."""
    num_warmup_steps = round(num_steps * config.warmup_fraction)

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return (step + 1) / num_warmup_steps
        return 0.5 * (1 + math.cos(math.pi * (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
