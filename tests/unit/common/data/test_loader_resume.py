"""The training loader resumes in the middle of an epoch, follows a size per epoch, and mixes: all repeatably."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from components.common.contracts.transforms import Augmentation, transform_for
from components.common.data.loader import Batch, Loader
from tests.conftest import Dataset
from tests.unit.refusals import refuses

SPEC = transform_for(32, resize_ratio=1.0)
EVERYTHING = Augmentation(brightness=0.3, contrast=0.3, saturation=0.3, hue=0.1, mixup_alpha=0.4, cutmix_alpha=1.0)
# 480 images, 2 ranks, 6 batches of 37: a seventh of DALI's is dropped in each epoch.
BATCH_SIZE, NUM_BATCHES = 37, 6
SIZES = (24, 40, 32)


def build(dataset: Dataset, **options: Any) -> Loader:
    given = {"batch_size": BATCH_SIZE, "augmentation": EVERYTHING, "image_sizes": SIZES, "seed": 3, "num_shards": 2}
    return Loader(dataset, "train", **{"spec": SPEC, **given, **options})


def take(loader: Loader, num_epochs: int) -> list[Batch]:
    return [batch for _ in range(num_epochs) for batch in loader]


def same(first: Batch, second: Batch) -> bool:
    return torch.equal(first.images, second.images) and torch.equal(first.labels, second.labels)


@pytest.mark.parametrize(
    ("rank", "num_pipelines", "first_epoch"),
    [pytest.param(0, 1, 0, marks=pytest.mark.slow), (1, 1, 0), (1, 2, 0), (0, 3, 0), (1, 1, 1)],
)
def test_resumed_loaders_deliver_the_rest(
    digits_dataset: Dataset, rank: int, num_pipelines: int, first_epoch: int
) -> None:
    options = {"shard_id": rank, "num_pipelines": num_pipelines, "first_epoch": first_epoch}
    whole = build(digits_dataset, **options)
    assert len(whole) == NUM_BATCHES
    states, batches = [whole.state()], []
    for _ in range(4):
        for batch in whole:
            batches.append(batch)
            states.append(whole.state())
    assert len(batches) == 4 * NUM_BATCHES
    sizes = [*SIZES, *[SIZES[-1]] * 2][first_epoch : first_epoch + 4]
    assert [batch.images.shape[-1] for batch in batches[::NUM_BATCHES]] == sizes
    del options["first_epoch"]  # the state has it
    for done in (0, 1, 5, 6, 7, 11, 12, 17):  # first and last batch of an epoch, both sides of a boundary
        resumed = build(digits_dataset, **options, state=json.loads(json.dumps(states[done])))
        assert resumed.num_delivered == first_epoch * NUM_BATCHES + done
        assert resumed.state() == states[done]
        rest = list(resumed)
        assert len(rest) == NUM_BATCHES - done % NUM_BATCHES
        rest += resumed
        assert all(map(same, batches[done:], rest)), done
        assert resumed.state() == states[done + len(rest)]


def test_draws_differ_and_leave_the_callers_random_numbers_alone(digits_dataset: Dataset) -> None:
    """Or the test above would pass on a loader that repeats one batch."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    batches = take(build(digits_dataset, image_sizes=()), 2)
    assert torch.equal(torch.rand(3), expected)
    batches += take(build(digits_dataset, image_sizes=(), shard_id=1), 1)
    for index, batch in enumerate(batches):
        assert not any(same(batch, other) for other in batches[index + 1 :])


def test_an_epoch_left_in_the_middle_is_continued(digits_dataset: Dataset) -> None:
    expected = take(build(digits_dataset), 1)
    loader = build(digits_dataset)
    for batch, first in zip(loader, expected[:2], strict=False):
        assert same(batch, first)
        if loader.num_delivered == 2:
            break
    assert all(map(same, expected[2:], list(loader)))
    assert loader.num_delivered == NUM_BATCHES


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 4}, "seed 3 instead of 4"),
        ({"num_shards": 3}, "num_shards 2 instead of 3"),
        ({"batch_size": 8}, "batch_size 37 instead of 8"),
        ({"augmentation": Augmentation()}, "'brightness': 0.3"),
        ({"num_pipelines": 2}, "num_pipelines 1 instead of 2"),
        ({"image_sizes": (24, 40)}, "image_sizes [24, 40, 32] instead of [24, 40]"),
        ({"spec": transform_for(32, resize_ratio=1.0, interpolation="bicubic")}, "'interpolation': 'bicubic'"),
    ],
)
def test_the_state_of_another_loader_is_refused(digits_dataset: Dataset, other: dict[str, Any], message: str) -> None:
    state = build(digits_dataset).state()
    with refuses("other-loader-state", says=message):
        build(digits_dataset, state=state, **other)


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("checkpoints"),
        lambda state: state.pop("identity"),
        lambda state: state.update(num_delivered=-1),
        lambda state: state.update(num_delivered=2),
        lambda state: state["checkpoints"].append("QQ=="),
        lambda state: state.update(checkpoints=None),
        lambda state: state.clear(),
    ],
)
def test_a_damaged_state_is_refused(digits_dataset: Dataset, damage: Callable[[dict[str, Any]], Any]) -> None:
    state = build(digits_dataset).state()
    damage(state)
    with refuses("damaged-loader-state"):
        build(digits_dataset, state=state)
    with pytest.raises(ValueError, match="evaluation"):
        Loader(digits_dataset, "val", SPEC, batch_size=8).state()


@pytest.mark.parametrize("kind", ["mixup_alpha", "cutmix_alpha"])
def test_mixing_is_of_images_and_labels_alike(digits_dataset: Dataset, kind: str) -> None:
    still = {"flip_probability": 0.5, "min_area": 0.3}
    plain = take(build(digits_dataset, augmentation=Augmentation(**still), image_sizes=()), 1)
    mixed = take(build(digits_dataset, augmentation=Augmentation(**still, **{kind: 1.0}), image_sizes=()), 1)
    shares = []
    for before, after in zip(plain, mixed, strict=True):
        assert after.images.is_contiguous(memory_format=torch.channels_last)
        other_images, one_hot = before.images.roll(1, 0), torch.nn.functional.one_hot(before.labels, 10).float()
        pair = next(i for i in range(BATCH_SIZE) if before.labels[i] != before.labels[i - 1])
        share = float(after.labels[pair, before.labels[pair]])
        torch.testing.assert_close(after.labels, share * one_hot + (1 - share) * one_hot.roll(1, 0))
        if kind == "mixup_alpha":
            torch.testing.assert_close(after.images, share * before.images + (1 - share) * other_images)
        else:
            from_other = (after.images != before.images).any(dim=1).any(dim=0)  # [H, W]: the box
            assert torch.equal(after.images[..., from_other], other_images[..., from_other])
            assert 1 - float(from_other.float().mean()) == pytest.approx(share, abs=1e-6)
        shares.append(share)
    assert len(set(shares)) == NUM_BATCHES
    assert all(0 <= share <= 1 for share in shares)
