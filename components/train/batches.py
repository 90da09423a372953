"""How the images of an optimizer step are spread over processes and over time."""

from dataclasses import dataclass

from components.common.errors import UserError
from components.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """global_batch_size = world_size * per_gpu_batch_size * num_accumulated."""

    global_batch_size: int
    per_gpu_batch_size: int
    num_accumulated: int  # batches of a process per optimizer step
    num_val_images: int  # over all processes


def plan_batches(config: TrainConfig, world_size: int, *, num_train_images: int, num_val_images: int) -> BatchPlan:
    """The plan for this many processes.

    Raises:
        UserError: the sizes don't divide each other, or a step takes more images than there are.
    """
    wanted, per_gpu = config.global_batch_size, config.per_gpu_batch_size
    if num_train_images < wanted:
        raise UserError(
            f"train.global_batch_size is {wanted}, more than the {num_train_images} training images; "
            f"set global_batch_size to {num_train_images} or less"
        )
    together = world_size * (per_gpu or 1)
    if wanted % together:
        below, above = wanted // together * together, (wanted // together + 1) * together
        each = f" with train.per_gpu_batch_size {per_gpu}" if per_gpu else ""
        fewer = ", or num_processes to one of its divisors" if world_size > 1 else ""
        if per_gpu and not wanted % world_size:
            own = wanted // world_size
            fits = max(size for size in range(1, min(per_gpu, own) + 1) if not own % size)
            fewer = f", or per_gpu_batch_size to {fits}" if fits > 1 else ""
        raise UserError(
            f"train.global_batch_size is {wanted}, which {_processes(world_size)}{each} can't share evenly; "
            f"set global_batch_size to {f'{below} or ' if below else ''}{above}{fewer}"
        )
    per_gpu = per_gpu or wanted // world_size
    num_accumulated = wanted // world_size // per_gpu
    if num_accumulated > 1 and config.compile in ("reduce-overhead", "max-autotune"):
        raise UserError(
            f"train.compile {config.compile} uses CUDA graphs, which overwrite the gradients of the batch before, and "
            f"{num_accumulated} batches of {per_gpu} are to be accumulated; set compile to default, or "
            f"per_gpu_batch_size to {per_gpu * num_accumulated}"
        )
    if num_accumulated > 1 and world_size > 1 and config.static_graph:
        raise UserError(
            f"train.static_graph can't be had with accumulated gradients, in torch's DistributedDataParallel, and "
            f"{num_accumulated} batches of {per_gpu} are to be accumulated; set static_graph to false, or "
            f"per_gpu_batch_size to {per_gpu * num_accumulated}"
        )
    return BatchPlan(
        global_batch_size=wanted,
        per_gpu_batch_size=per_gpu,
        num_accumulated=num_accumulated,
        num_val_images=num_val_images,
    )


def _processes(world_size: int) -> str:
    return "one process" if world_size == 1 else f"{world_size} processes"
