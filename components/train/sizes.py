"""Batches and image sizes that a model can't take, found before anything is trained."""

import copy

import torch
from torch import nn

from components.common.errors import UserError
from components.train.batches import BatchPlan
from components.train.config import TrainConfig

_REFUSALS = (RuntimeError, ValueError, AssertionError)  # of layers that are given what they can't take


def check_sizes(model: nn.Module, config: TrainConfig, plan: BatchPlan) -> None:
    """See that each size that training and validation will meet goes through the model.

    Raises:
        UserError: one does not.
    """
    batch_size = min(2, plan.per_gpu_batch_size)
    name = "image_sizes" if config.image_sizes else "image_size"
    for side in sorted({*config.image_sizes} or {config.image_size}):
        if reason := _refusal(model, batch_size, side, training=True):
            if batch_size == 1 and not _refusal(model, 2, side, training=True):
                raise UserError(
                    f"{config.architecture} can't be trained with one image of {side} px at a time, because of its "
                    f"BatchNorm: {reason}. Set train.per_gpu_batch_size, or global_batch_size, such that a process has "
                    "two or more"
                )
            raise UserError(_told(config, name, side, reason))
    if reason := _refusal(model, 1, config.image_size, training=False):
        raise UserError(_told(config, "image_size", config.image_size, reason))


def _told(config: TrainConfig, name: str, side: int, reason: str) -> str:
    return (
        f"{config.architecture} can't take images of {side} px (train.{name}): {reason}. Set sizes that it takes, or "
        "another train.architecture"
    )


def _refusal(model: nn.Module, batch_size: int, side: int, *, training: bool) -> str:
    """What the model says against a batch of zeros, in one line; empty if it takes it."""
    weights = {
        name: torch.empty_like(tensor, device="meta")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    was_training = model.training
    model.train(training)
    try:
        with torch.no_grad():
            torch.func.functional_call(model, weights, (torch.empty(batch_size, 3, side, side, device="meta"),))
            return ""
    except (*_REFUSALS, NotImplementedError, TypeError):
        # Without data some models can't run at all, so a copy has the last word.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return _refusal_of_copy(copy.deepcopy(model).cpu(), batch_size, side)
    finally:
        model.train(was_training)


def _refusal_of_copy(model: nn.Module, batch_size: int, side: int) -> str:
    try:
        model(torch.zeros(batch_size, 3, side, side))
    except _REFUSALS as error:
        return " ".join(str(error).split())[:200].rstrip(".")
    return ""
