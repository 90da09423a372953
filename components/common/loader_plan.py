"""How many images and batches an epoch of a loader has: on every rank the same in training."""

import math
from dataclasses import dataclass

from components.common.errors import UserError

# On a GPU two pipelines decode by turns: while one waits for the slowest image of its batch, the other goes on. The
# second one leaves out up to a batch more, so up to a step: only where an epoch has many.
_NUM_PIPELINES = 2
_MIN_STEPS = 32


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """What one process reads of a split and delivers, epoch by epoch."""

    num_shards: int
    """Processes that have a part of the split; in evaluation no more than there are images."""
    num_pipelines: int
    """Of DALI's in each process, each with its share of the process's part."""
    num_images: int
    """Of this process's part."""
    num_batches: int
    """That are delivered."""
    num_read: int
    """Batches that each pipeline makes."""

    @property
    def num_dropped(self) -> int:
        """Batches that are read at an epoch's end and not delivered."""
        return self.num_read * self.num_pipelines - self.num_batches


def plan_evaluation(num_images: int, batch_size: int, shard_id: int, num_shards: int) -> EpochPlan:
    """Each image exactly once. Arguments as of Loader; `num_images` is the whole split's."""
    num_shards = min(num_shards, num_images)
    own = _part(num_images, shard_id, num_shards) if shard_id < num_shards else 0
    num_batches = math.ceil(own / batch_size)
    return EpochPlan(
        num_shards=num_shards, num_pipelines=1, num_images=own, num_batches=num_batches, num_read=num_batches
    )


def plan_training(
    num_images: int,
    batch_size: int,
    shard_id: int,
    num_shards: int,
    *,
    batches_per_step: int,
    num_pipelines: int,
    on_gpu: bool,
) -> EpochPlan:
    """Whole steps of full batches. Arguments as of Loader; `num_images` is the whole split's.

    Raises:
        UserError: there are too few images for one step on every process.
    """
    step_size = batch_size * batches_per_step
    if not num_pipelines:
        many = num_images // num_shards // step_size >= _MIN_STEPS
        num_pipelines = _NUM_PIPELINES if on_gpu and many else 1
    num_shares = num_shards * num_pipelines
    # The smallest share decides for all, so that no rank waits for a batch that never comes.
    num_batches = num_images // num_shares // batch_size * num_pipelines // batches_per_step * batches_per_step
    if not num_batches:
        raise UserError(_too_few(num_images, step_size, num_shards, num_pipelines))
    return EpochPlan(
        num_shards=num_shards,
        num_pipelines=num_pipelines,
        num_images=_part(num_images, shard_id, num_shards),
        num_batches=num_batches,
        # DALI fills up the last batch of the largest share and gives as many of them to all, so that its epochs end
        # together everywhere, with a batch. The one in which images are repeated is dropped, and what fills no step.
        num_read=math.ceil(math.ceil(num_images / num_shares) / batch_size),
    )


def _part(num_images: int, shard_id: int, num_shards: int) -> int:
    """Images of a process's part, as DALI cuts it."""
    first, last = (num_images * shard // num_shards for shard in (shard_id, shard_id + 1))
    return last - first


def _too_few(num_images: int, step_size: int, num_shards: int, num_pipelines: int) -> str:
    largest = num_images // num_shards * num_shards
    few = f"{num_images} training images are too few for one batch of {step_size} on each of {num_shards} processes"
    if not largest:
        return f"{few}; train with {num_images} or fewer, or add images"
    if step_size * num_shards <= largest:
        return f"{few}, each with {num_pipelines} pipelines; leave num_pipelines at 0, or take fewer"
    return f"{few}; set train.global_batch_size to {largest} or less"
