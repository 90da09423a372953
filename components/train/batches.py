"""Split the images of an optimizer step over processes and time, and check sizes that a model can't take."""

import copy
from dataclasses import dataclass

import torch
from torch import nn

from components.common.contracts.errors import UserError, shortened
from components.common.runtimes.architectures import call_on_meta, check_pooling
from components.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """global_batch_size = world_size * per_gpu_batch_size * num_accumulated."""

    global_batch_size: int
    per_gpu_batch_size: int
    num_accumulated: int  # batches of a process per optimizer step
    num_val_images: int  # over all processes


def plan_batches(config: TrainConfig, world_size: int, *, num_train_images: int, num_val_images: int) -> BatchPlan:
    """Return the plan for this many processes.

    Raises:
        UserError: the sizes don't divide each other, or a step takes more images than there are.
    """
    wanted, per_gpu = config.global_batch_size, config.per_gpu_batch_size
    if num_train_images < wanted:
        raise UserError(
            f"train.global_batch_size is {wanted}, more than the {num_train_images} training images; "
            f"set global_batch_size to {num_train_images} or less",
            code="batch-too-large",
            setting="train.global_batch_size",
        )
    together = world_size * (per_gpu or 1)
    if wanted % together:
        below, above = wanted // together * together, (wanted // together + 1) * together
        processes = "one process" if world_size == 1 else f"{world_size} processes"
        each = f" with train.per_gpu_batch_size {per_gpu}" if per_gpu else ""
        fewer = ", or num_processes to one of its divisors" if world_size > 1 else ""
        if per_gpu and not wanted % world_size:
            own = wanted // world_size
            fits = max(size for size in range(1, min(per_gpu, own) + 1) if not own % size)
            fewer = f", or per_gpu_batch_size to {fits}" if fits > 1 else ""
        raise UserError(
            f"train.global_batch_size is {wanted}, which {processes}{each} can't share evenly; "
            f"set global_batch_size to {f'{below} or ' if below else ''}{above}{fewer}",
            code="batch-not-divisible",
            setting="train.global_batch_size",
        )
    per_gpu = per_gpu or wanted // world_size
    num_accumulated = wanted // world_size // per_gpu
    if num_accumulated > 1:
        fix = f"per_gpu_batch_size to {per_gpu * num_accumulated}"
        accumulated = f"{num_accumulated} batches of {per_gpu} are to be accumulated"
        if config.compile in ("reduce-overhead", "max-autotune"):
            raise UserError(
                f"train.compile {config.compile} uses CUDA graphs, which overwrite the gradients of the batch before, "
                f"and {accumulated}; set compile to default, or {fix}",
                code="no-accumulation",
                setting="train.compile",
            )
        if world_size > 1 and config.static_graph:
            raise UserError(
                "train.static_graph can't be had with accumulated gradients, in torch's DistributedDataParallel, and "
                f"{accumulated}; set static_graph to false, or {fix}",
                code="no-accumulation",
                setting="train.static_graph",
            )
    return BatchPlan(
        global_batch_size=wanted,
        per_gpu_batch_size=per_gpu,
        num_accumulated=num_accumulated,
        num_val_images=num_val_images,
    )


_REFUSALS = (RuntimeError, ValueError, AssertionError)  # of layers that are given what they can't take


def check_sizes(model: nn.Module, config: TrainConfig, plan: BatchPlan) -> None:
    """Check that each size that training and validation will meet goes through the model, and the model into ONNX.

    Raises:
        UserError: one does not.
    """
    batch_size = min(2, plan.per_gpu_batch_size)
    in_training = "image_sizes" if config.image_sizes else "image_size"
    refused = {}
    for side in sorted({*config.image_sizes} or {config.image_size}):
        if reason := _refusal(model, batch_size, side, training=True):
            if batch_size == 1 and not _refusal(model, 2, side, training=True):
                raise UserError(
                    f"{config.architecture} can't be trained with one image of {side} px at a time, because of its "
                    f"BatchNorm: {reason}. Set train.per_gpu_batch_size, or global_batch_size, such that a process has "
                    "two or more",
                    code="batch-too-small",
                    setting="train.per_gpu_batch_size",
                )
            refused[in_training, side] = reason
    if reason := _refusal(model, 1, config.image_size, training=False):
        refused["image_size", config.image_size] = reason
    for (name, side), reason in refused.items():
        raise UserError(
            f"{config.architecture} can't take images of {side} px (train.{name}): {reason}. Set sizes that it takes, "
            "or another train.architecture",
            code="image-size-refused",
            setting=f"train.{name}",
        )
    check_pooling(model, config.architecture, config.image_size)


def _refusal(model: nn.Module, batch_size: int, side: int, *, training: bool) -> str:
    """Return the model's error for a batch of zeros, in one line; empty if it takes it."""
    was_training = model.training
    model.train(training)
    try:
        with torch.no_grad():
            call_on_meta(model, torch.empty(batch_size, 3, side, side, device="meta"))
    except (*_REFUSALS, NotImplementedError, TypeError):
        # Without data some models can't run at all, so a copy has the last word.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                copy.deepcopy(model).cpu()(torch.zeros(batch_size, 3, side, side))
            except _REFUSALS as error:
                return shortened(error).rstrip(".")
    finally:
        model.train(was_training)
    return ""
