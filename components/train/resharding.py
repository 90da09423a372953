"""The rest of an epoch that another number of processes began, shared by those that there are now."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from components.common.data.loader import Batch, Loader
from components.train.batches import BatchPlan

_OF_PART = ("batch_size", "batches_per_step", "shard_id", "num_shards", "num_pipelines")


class ReshardedLoader:
    """The rest of an epoch from the parts it was begun in, then epochs of a loader of this process's own.

    DALI's reader shuffles a part on the way, so each part is read on as it was begun, and a step has the images that it
    would have had: a process reads all parts that its share of them lies in. Where there are twice as many processes,
    two decode the same images until the epoch ends.

    Args:
        states: of the loaders of all parts, in their order.
        plan: of these processes.
        rank: of this process.
        num_batches: of an epoch of this process's own loader.
        part: makes the loader of a part, given how many this process reads, and its own options.
        own: makes this process's own loader, of the next epoch.
    """

    def __init__(
        self,
        states: Sequence[dict[str, Any]],
        plan: BatchPlan,
        rank: int,
        *,
        num_batches: int,
        part: Callable[..., Loader],
        own: Callable[[], Loader],
    ) -> None:
        size, size_of_part = plan.per_gpu_batch_size * plan.num_accumulated, plan.global_batch_size // len(states)
        first = rank * size // size_of_part
        last = ((rank + 1) * size - 1) // size_of_part
        start = rank * size - first * size_of_part
        self._share = slice(start, start + size)  # of the images of a step in the parts that are read here
        self._batch_size, self._num_batches, self._make_own = plan.per_gpu_batch_size, num_batches, own
        self._per_step = states[0]["identity"]["batches_per_step"]
        self._own: Loader | None = None
        self._parts = [
            part(1 + last - first, state=state, **{name: state["identity"][name] for name in _OF_PART})
            for state in states[first : last + 1]
        ]
        self.num_classes = self._parts[0].num_classes

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:
        if self._own is None and self._has_ended():
            self._parts.clear()  # they hold memory
            self._own = self._make_own()
        if self._own is not None:
            yield from self._own
            return
        iterators = [iter(part) for part in self._parts]
        while not self._has_ended():
            batches = [next(iterator) for iterator in iterators for _ in range(self._per_step)]
            images = torch.cat([batch.images for batch in batches])[self._share]
            labels = torch.cat([batch.labels for batch in batches])[self._share]
            for own in zip(torch.split(images, self._batch_size), torch.split(labels, self._batch_size), strict=True):
                yield Batch(images=own[0], labels=own[1])

    def _has_ended(self) -> bool:
        return all(part.num_delivered % len(part) == 0 for part in self._parts)

    def state(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the state of the loader that delivered last: of each part while they are read."""
        return [part.state() for part in self._parts] if self._own is None else self._own.state()
