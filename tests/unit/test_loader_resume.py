"""The training loader goes on in the middle of an epoch, follows a size per epoch, and mixes: all repeatably."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import Artifact, CheckpointManifest, DatasetManifest, load
from components.common.contracts.transforms import Augmentation, transform_for
from components.common.data.loader import Batch, Loader
from components.common.process.steplog import StepLog
from components.train.config import TrainConfig
from components.train.run import run

SPEC = transform_for(32, resize_ratio=1.0)
EVERYTHING = Augmentation(brightness=0.3, contrast=0.3, saturation=0.3, hue=0.1, mixup_alpha=0.4, cutmix_alpha=1.0)
# 480 images, 2 ranks, 6 batches of 37: a seventh of DALI's is dropped in each epoch.
BATCH_SIZE, NUM_BATCHES = 37, 6
SIZES = (24, 40, 32)


def build(dataset: Artifact[DatasetManifest], **options: Any) -> Loader:
    given = {"batch_size": BATCH_SIZE, "augmentation": EVERYTHING, "image_sizes": SIZES, "seed": 3, "num_shards": 2}
    return Loader(dataset, "train", SPEC, **{**given, **options})


def take(loader: Loader, num_epochs: int) -> list[Batch]:
    return [batch for _ in range(num_epochs) for batch in loader]


def same(first: Batch, second: Batch) -> bool:
    return torch.equal(first.images, second.images) and torch.equal(first.labels, second.labels)


@pytest.mark.parametrize(("rank", "num_pipelines"), [(0, 1), (1, 1), (1, 2), (0, 3)])
def test_a_resumed_loader_delivers_what_the_first_one_would_have(
    digits_dataset: Artifact[DatasetManifest], rank: int, num_pipelines: int
) -> None:
    options = {"shard_id": rank, "num_pipelines": num_pipelines}
    whole = build(digits_dataset, **options)
    assert len(whole) == NUM_BATCHES
    states, batches = [whole.state()], []
    for _ in range(4):
        for batch in whole:
            batches.append(batch)
            states.append(whole.state())
    assert len(batches) == 4 * NUM_BATCHES
    for done in (0, 1, 5, 6, 7, 11, 12, 17):  # first and last batch of an epoch, both sides of a boundary
        stored = json.loads(json.dumps(states[done]))
        resumed = build(digits_dataset, **options, state=stored)
        assert resumed.num_delivered == done
        assert resumed.state() == states[done]
        rest = list(resumed)
        assert len(rest) == NUM_BATCHES - done % NUM_BATCHES
        rest += resumed
        assert all(map(same, batches[done:], rest)), done
        assert resumed.state() == states[done + len(rest)]


def test_other_draws_make_other_batches(digits_dataset: Artifact[DatasetManifest]) -> None:
    """Or the test above would pass on a loader that repeats one batch."""
    batches = take(build(digits_dataset, image_sizes=()), 2) + take(
        build(digits_dataset, image_sizes=(), shard_id=1), 1
    )
    for index, batch in enumerate(batches):
        assert not any(same(batch, other) for other in batches[index + 1 :])


def test_an_epoch_left_in_the_middle_is_continued(digits_dataset: Artifact[DatasetManifest]) -> None:
    expected = take(build(digits_dataset), 1)
    loader = build(digits_dataset)
    for batch, first in zip(loader, expected[:2], strict=False):
        assert same(batch, first)
        if loader.num_delivered == 2:
            break
    assert all(map(same, expected[2:], list(loader)))
    assert loader.num_delivered == NUM_BATCHES


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"seed": 4}, "seed 3 instead of 4"),
        ({"num_shards": 3}, "num_shards 2 instead of 3"),
        ({"batch_size": 8}, "batch_size 37 instead of 8"),
        ({"augmentation": Augmentation()}, "'brightness': 0.3"),
        ({"num_pipelines": 2}, "num_pipelines 1 instead of 2"),
        ({"image_sizes": (24, 40)}, "image_sizes [24, 40, 32] instead of [24, 40]"),
    ],
)
def test_the_state_of_another_loader_is_refused(
    digits_dataset: Artifact[DatasetManifest], other: dict[str, Any], told: str
) -> None:
    state = build(digits_dataset).state()
    with pytest.raises(EngineryError, match="can't go on in the middle of the train split") as caught:
        build(digits_dataset, state=state, **other)
    assert told in str(caught.value)


def test_the_state_of_a_loader_with_another_transform_is_refused(digits_dataset: Artifact[DatasetManifest]) -> None:
    state = build(digits_dataset).state()
    other = transform_for(32, resize_ratio=1.0, interpolation="bicubic")
    with pytest.raises(EngineryError, match=r"'interpolation': 'bilinear'.* instead of .*'interpolation': 'bicubic'"):
        Loader(
            digits_dataset,
            "train",
            other,
            batch_size=BATCH_SIZE,
            augmentation=EVERYTHING,
            image_sizes=SIZES,
            seed=3,
            num_shards=2,
            state=state,
        )


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda state: state.pop("checkpoints"), "checkpoints: Field required"),
        (lambda state: state.pop("identity"), "identity: Field required"),
        (lambda state: state.update(num_delivered=-1), "num_delivered: Input should be greater than or equal to 0"),
        (lambda state: state.update(num_delivered=2), "its content does not fit its digest"),
        (lambda state: state["checkpoints"].append("QQ=="), "its content does not fit its digest"),
        (lambda state: state.update(checkpoints=None), "checkpoints: Input should be a valid list"),
        (lambda state: state.clear(), "Field required"),
    ],
)
def test_a_damaged_state_is_refused(
    digits_dataset: Artifact[DatasetManifest], damage: Callable[[dict[str, Any]], Any], told: str
) -> None:
    state = build(digits_dataset).state()
    damage(state)
    with pytest.raises(EngineryError, match="the saved state is damaged, or no loader's") as caught:
        build(digits_dataset, state=state)
    assert told in str(caught.value)
    assert "Take an earlier checkpoint, or start anew" in str(caught.value)


def test_evaluation_has_no_state(digits_dataset: Artifact[DatasetManifest]) -> None:
    with pytest.raises(ValueError, match="evaluation loader has no state"):
        Loader(digits_dataset, "val", SPEC, batch_size=8).state()


def test_too_few_images_for_a_batch_on_every_rank(digits_dataset: Artifact[DatasetManifest]) -> None:
    with pytest.raises(UserError, match=r"480 training images .* 200 on each of 3 .*global_batch_size to 480 or less"):
        build(digits_dataset, batch_size=200, num_shards=3)


@pytest.mark.parametrize("num_pipelines", [1, 2])
def test_images_follow_a_size_per_epoch(digits_dataset: Artifact[DatasetManifest], num_pipelines: int) -> None:
    loader = build(digits_dataset, num_pipelines=num_pipelines)
    for size in (*SIZES, SIZES[-1]):
        assert {tuple(batch.images.shape) for batch in loader} == {(BATCH_SIZE, 3, size, size)}


@pytest.mark.parametrize("kind", ["mixup_alpha", "cutmix_alpha"])
def test_mixing_is_of_images_and_labels_alike(digits_dataset: Artifact[DatasetManifest], kind: str) -> None:
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


def test_mixing_leaves_the_callers_random_numbers_alone(digits_dataset: Artifact[DatasetManifest]) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    take(build(digits_dataset), 1)
    assert torch.equal(torch.rand(3), expected)


def test_the_train_step_learns_from_mixed_batches(digits_dataset: Artifact[DatasetManifest], tmp_path: Path) -> None:
    augmentation = {"min_area": 0.8, "flip_probability": 0, "mixup_alpha": 0.2, "cutmix_alpha": 0.5, "brightness": 0.2}
    settings = {
        "architecture": "timm/resnet10t",
        "image_size": 32,
        "resize_ratio": 1,
        "epochs": 2,
        "learning_rate": 0.4,
    }
    config = TrainConfig(**settings, global_batch_size=16, warmup_fraction=0.3, augmentation=augmentation)
    run(config, StepLog("train"), dataset=digits_dataset.path, output=tmp_path / "checkpoint")
    history = load(tmp_path / "checkpoint", CheckpointManifest).manifest.history
    assert history[-1].val_top1_pct > 40  # chance is 10
    assert history[-1].train_loss < history[0].train_loss
