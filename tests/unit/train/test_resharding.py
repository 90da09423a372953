"""Processes of another number share what others left of an epoch: no image twice, none left out."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from components.common.contracts.transforms import Augmentation, transform_for
from components.common.data.loader import Batch, Loader
from components.train.batches import BatchPlan
from components.train.resharding import ReshardedLoader
from tests.conftest import Dataset

GLOBAL, NUM_STEPS = 24, 20  # 480 images
Rank = Loader | ReshardedLoader


def plan_of(world_size: int, per_gpu: int) -> BatchPlan:
    return BatchPlan(
        global_batch_size=GLOBAL,
        per_gpu_batch_size=per_gpu,
        num_accumulated=GLOBAL // world_size // per_gpu,
        num_val_images=0,
    )


@pytest.fixture
def make(digits_dataset: Dataset) -> Callable[..., Loader]:
    """Images are read as they are, so that each can be told from every other."""
    still = Augmentation(flip_probability=0.0, min_area=1.0, max_aspect_ratio=1.0)
    spec = transform_for(32, resize_ratio=1.0)
    return partial(Loader, digits_dataset, "train", spec, augmentation=still, seed=3)


def loaders(make: Callable[..., Loader], world_size: int, per_gpu: int, states: list[Any]) -> list[Rank]:
    """One for each process; without states at the beginning, else where these are."""
    plan = plan_of(world_size, per_gpu)
    found: list[Rank] = []
    for rank in range(world_size):
        place = {"batch_size": per_gpu, "shard_id": rank, "num_shards": world_size}
        own = partial(make, batches_per_step=plan.num_accumulated, **place)
        if not states:
            found.append(own())
            continue
        resharded = ReshardedLoader(
            json.loads(json.dumps(states)),
            plan,
            rank,
            num_batches=NUM_STEPS * plan.num_accumulated,
            part=lambda _, **options: make(**options),
            own=partial(own, first_epoch=1),
        )
        found.append(resharded)
    return found


def steps(ranks: list[Rank], num_accumulated: int) -> Iterator[list[Batch]]:
    """Batches of all processes, step by step, in one epoch."""
    iterators = [iter(rank) for rank in ranks]
    while batches := [batch for one in iterators for _ in range(num_accumulated) if (batch := next(one, None))]:
        yield batches


def names_of(batches: list[Batch]) -> list[int]:
    return [hash(image.numpy().tobytes()) for batch in batches for image in batch.images]


def parts(ranks: list[Rank]) -> list[dict[str, Any]]:
    found = {}
    for rank in ranks:
        state = rank.state()
        for one in state if isinstance(state, list) else [state]:
            found[one["identity"]["shard_id"]] = one
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize(
    ("before", "after"),
    [((1, 24), (2, 12)), ((2, 12), (1, 8)), ((2, 6), (3, 8)), ((3, 4), (2, 4)), ((2, 12), (4, 6))],
    ids=lambda value: f"{value[0]}x{value[1]}",
)
def test_the_steps_left_have_their_images(
    make: Callable[..., Loader], before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Also where the new ones stop within the epoch and resume, and in the epoch behind it each image comes once."""
    others = loaders(make, *before, [])
    seen, states = [], []
    for batches in steps(others, plan_of(*before).num_accumulated):
        seen.append(names_of(batches))
        states.append(parts(others))
    assert len(seen) == NUM_STEPS
    accumulated = plan_of(*after).num_accumulated
    ranks = loaders(make, *after, states[6])
    found = []
    for batches in steps(ranks, accumulated):
        assert {len(batch.labels) for batch in batches} == {after[1]}
        assert all(batch.images.is_contiguous(memory_format=torch.channels_last) for batch in batches)
        found.append(names_of(batches))
        if len(found) == 5:
            break
    ranks = loaders(make, *after, parts(ranks))
    found += [names_of(batches) for batches in steps(ranks, accumulated)]
    assert [sorted(names) for names in found] == [sorted(names) for names in seen[7:]]
    assert found[0] == seen[7]  # in the same order, so that a process's share is one piece of it
    behind = [name for batches in steps(ranks, accumulated) for name in names_of(batches)]
    assert len(behind) == NUM_STEPS * GLOBAL
    assert len(set(behind)) == len({name for names in seen for name in names})
    assert [state["num_delivered"] for state in parts(ranks)] == [2 * NUM_STEPS * accumulated] * after[0]
    assert len(ranks[0]) == NUM_STEPS * accumulated
