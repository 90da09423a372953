"""A batch that a GPU's memory does hold, found by trying smaller ones where it does not hold the first."""

import gc
import time

import torch
from torch.nn.utils import convert_conv2d_weight_memory_format

from components.common.data.loader import NO_MEMORY
from components.common.runtimes.architectures import build_model
from components.common.tasks import load_task, task_of
from components.train.arithmetic import pick_precision
from components.train.batches import BatchPlan
from components.train.config import TrainConfig
from components.train.distributed import World
from components.train.fine_tuning import freeze_backbone, keep_frozen_statistics
from components.train.trainer import build_ema, build_optimizer

_NUM_STEPS = 2  # the optimizer's own tensors come with the first
# Of the search: a GPU is paid for meanwhile, and other processes wait no longer than train.collective_timeout_s.
_LIMIT_S = 60.0


def is_out_of_memory(error: BaseException) -> bool:
    """True if a GPU's memory ran out, whoever asked for it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, (RuntimeError, MemoryError)) and any(sign in str(error) for sign in NO_MEMORY)


def explain_out_of_memory(config: TrainConfig, plan: BatchPlan, world: World, num_classes: int) -> str:
    """Return what the user should read: the setting, and the largest batch that was seen to fit.

    Nothing else may use memory meanwhile.

    Tries forward, backward and optimizer step on batches that divide a process's share of global_batch_size. After a
    minute the largest one so far is taken.
    """
    gc.collect()
    torch.cuda.empty_cache()
    failed = plan.per_gpu_batch_size
    own = failed * plan.num_accumulated
    # Halve the list, which is in order: what fits leaves room for all that are smaller
    sizes = [size for size in range(1, failed) if own % size == 0]
    # Each trial would measure the algorithms of every convolution again, and speed is not what is asked for.
    torch.backends.cudnn.benchmark = False
    fits, low, high = None, 0, len(sizes) - 1
    ends = time.monotonic() + _LIMIT_S
    while low <= high and (fits is None or time.monotonic() < ends):
        middle = (low + high) // 2
        if _fits(sizes[middle], config, world, num_classes):
            fits, low = sizes[middle], middle + 1
        else:
            high = middle - 1
    side = max((config.image_size, *config.image_sizes))
    start = f"{_memory_of(world)} does not hold a batch of {failed} images of {side} px (train.per_gpu_batch_size)"
    if fits is None:
        return (
            f"{start}, and {'not one image either' if failed > 1 else 'that is a single one'}. Set a smaller "
            "train.image_size or another train.architecture, or end what else uses the memory"
        )
    text = f"{start}. {fits} were tried here and fit: {_accumulating(plan, fits)}"
    if config.compile in ("reduce-overhead", "max-autotune"):
        text += f". That needs train.compile default or tuned: {config.compile} can't accumulate"
    if config.static_graph and world.world_size > 1:
        text += ". That needs train.static_graph false"
    return text


def describe_sentences_too_many(plan: BatchPlan, world: World) -> str:
    """Return the same for a batch of sentences: nothing is tried, since memory depends on their lengths."""
    failed = plan.per_gpu_batch_size
    start = f"{_memory_of(world)} does not hold a batch of {failed} sentences (train.per_gpu_batch_size)"
    shorter = "leave out long sentences with a smaller preprocess.max_tokens, or take a smaller train.architecture"
    if failed == 1:
        return f"{start}: {shorter}"
    own = failed * plan.num_accumulated
    less = max(size for size in range(1, failed // 2 + 1) if own % size == 0)
    return f"{start}: {_accumulating(plan, less)}. Or {shorter}"


def _accumulating(plan: BatchPlan, size: int) -> str:
    """The advice to take batches of `size`."""
    num_batches = plan.per_gpu_batch_size * plan.num_accumulated // size
    return (
        f"set train.per_gpu_batch_size to {size}. Gradients are then accumulated over {num_batches} batches, and "
        f"global_batch_size stays {plan.global_batch_size}"
    )


def _memory_of(world: World) -> str:
    if world.device.type != "cuda":
        return "the memory"
    total = torch.cuda.get_device_properties(world.device).total_memory
    return f"the memory of {torch.cuda.get_device_name(world.device)}, {total / 1e9:.0f} GB,"


def _fits(batch_size: int, config: TrainConfig, world: World, num_classes: int) -> bool:
    fits = True
    try:
        _train_a_little(batch_size, config, world, num_classes)
    except (ValueError, RuntimeError, MemoryError) as error:
        # ValueError: BatchNorm refuses a single value per channel.
        if not isinstance(error, ValueError) and not is_out_of_memory(error):
            raise
        fits = False
    # Here the error is gone, and with it the frames that held tensors.
    gc.collect()
    torch.cuda.empty_cache()
    return fits


def _train_a_little(batch_size: int, config: TrainConfig, world: World, num_classes: int) -> None:
    """Steps as training makes them, but for torch.compile, with which they take less memory."""
    device, side = world.device, max((config.image_size, *config.image_sizes))
    model = build_model(config.architecture, num_classes).to(device).train()
    convert_conv2d_weight_memory_format(model, torch.channels_last)
    if config.freeze_backbone:  # frozen layers keep no activations for the backward pass
        freeze_backbone(model, config.architecture)
        keep_frozen_statistics(model)
    averages = build_ema(model, config)
    optimizer = build_optimizer(model, config, device)
    dtype = pick_precision(config, device)
    loaded = torch.float32 if dtype == torch.float32 else torch.float16
    images = torch.zeros(batch_size, side, side, 3, dtype=loaded, device=device).permute(0, 3, 1, 2)
    task = load_task(task_of(config.architecture))
    loss_of = task.loss(config.label_smoothing)
    # DistributedDataParallel's buckets, as large as the gradients.
    buckets = [torch.empty_like(one) for one in model.parameters() if one.requires_grad] if world.world_size > 1 else []
    for _ in range(_NUM_STEPS):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            outputs = model(images)
            loss = loss_of(outputs, task.blank_labels(outputs))
        loss.backward()
        optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    del averages, buckets
