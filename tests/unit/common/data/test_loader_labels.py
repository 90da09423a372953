"""Masks and boxes from the loader lie where their image's pixels lie, however it is resized, cropped and flipped."""

import hashlib
import json
import shutil
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from components.common.contracts.manifests import DatasetManifest, load
from components.common.contracts.transforms import Augmentation
from components.common.data.loader import Loader
from enginery.datasets.shapes import write_shapes
from tests.conftest import Dataset, Shared, preprocess
from tests.unit.positions import NUM_VAL, check_boxes, check_mask, plain, seen, write_positions
from tests.unit.refusals import refuses

SPECS = [(32, 32), (40, 32), (60, 60), (110, 96)]


TASKS = ("segmentation", "detection")


def packed(shared: Shared, name: str, write: Callable[[Path], object]) -> tuple[Path, dict[str, Dataset]]:
    """Data that `write` makes, and a dataset of it for each of TASKS."""

    def build(folder: Path) -> None:
        write(folder / "data")
        for task in TASKS:
            preprocess(folder / "data", folder / task, task=task, near_duplicates="keep", on_leak="warn")

    folder = shared(name, build)
    return folder / "data", {task: load(folder / task, DatasetManifest) for task in TASKS}


@pytest.fixture(scope="module")
def positions(shared: Shared) -> dict[str, Dataset]:
    return packed(shared, "positions", write_positions)[1]


@pytest.fixture(scope="module")
def shapes(shared: Shared) -> tuple[Path, dict[str, Dataset]]:
    return packed(shared, "shapes", partial(write_shapes, num_train=24, num_val=8, image_size=96, num_workers=1))


@pytest.mark.parametrize(("resize_size", "crop_size"), SPECS)
def test_evaluation_moves_labels_as_images(positions: dict[str, Dataset], resize_size: int, crop_size: int) -> None:
    spec = plain(resize_size, crop_size)
    for batch in (batches := list(Loader(positions["segmentation"], "val", spec, batch_size=6))):
        assert batch.labels.shape == (len(batch.images), crop_size, crop_size)
        assert batch.labels.dtype == torch.int64
        for one in seen(batch):
            check_mask(one)
    assert sum(len(batch.labels) for batch in batches) == NUM_VAL
    num_boxes = 0
    for batch in Loader(positions["detection"], "val", spec, batch_size=6):
        assert batch.labels.dtype == torch.float32
        num_boxes += sum(check_boxes(one, 0.0) for one in seen(batch))
    assert num_boxes > 10


@pytest.mark.parametrize("options", [{}, {"fp16": True}, {"image_sizes": (32, 64)}, {"num_pipelines": 2}])
def test_training_moves_labels_as_images(positions: dict[str, Dataset], options: dict[str, Any]) -> None:
    augmentation = Augmentation(min_area=0.2, max_aspect_ratio=2.0)
    num_boxes, flipped, sides = 0, set(), set()
    for task in TASKS:
        loader = Loader(positions[task], "train", plain(80, 80), batch_size=5, augmentation=augmentation, **options)
        for batch in (batch for _ in range(3) for batch in loader):
            sides.add(batch.images.shape[-1])
            for one in seen(batch):
                flipped.add(one.x[0] < 0)
                if task == "segmentation":
                    check_mask(one)
                else:
                    num_boxes += check_boxes(one, 0.25)
    assert flipped == {True, False}
    assert num_boxes > 30
    assert sides == set(options.get("image_sizes", (80,)))


def test_an_interrupted_epoch_resumes_with_its_labels(positions: dict[str, Dataset]) -> None:
    for dataset in positions.values():
        options: dict[str, Any] = {"batch_size": 2, "augmentation": Augmentation(), "seed": 3}
        whole = Loader(dataset, "train", plain(40, 32), **options)
        batches = [batch for _ in range(2) for batch in whole]
        first = Loader(dataset, "train", plain(40, 32), **options)
        iterator = iter(first)
        for _ in range(3):
            next(iterator)
        later = Loader(dataset, "train", plain(40, 32), state=first.state(), **options)
        rest = [batch for _ in range(2) for batch in later]
        assert len(rest) == len(batches) - 3
        for one, other in zip(batches[3:], rest, strict=True):
            torch.testing.assert_close(one.images, other.images, rtol=0, atol=0)
            torch.testing.assert_close(one.labels, other.labels, rtol=0, atol=0)


def test_shapes_are_delivered_as_they_were_written(shapes: tuple[Path, dict[str, Dataset]]) -> None:
    folder, datasets = shapes
    loader = Loader(datasets["segmentation"], "val", plain(96, 96), batch_size=8)
    (batch,) = loader
    names = [Path(json.loads(line)["path"]).stem for line in datasets["segmentation"].file("val.jsonl").open()]
    for name, label in zip(names, batch.labels.numpy(), strict=True):
        np.testing.assert_array_equal(label, np.array(Image.open(folder / "val" / "masks" / f"{name}.png")))
    annotations = json.loads((folder / "val" / "annotations.json").read_text(encoding="utf-8"))
    (batch,) = Loader(datasets["detection"], "val", plain(96, 96), batch_size=8)
    for name, label in zip(names, batch.labels.numpy(), strict=True):
        own = [each for each in annotations["annotations"] if each["image_id"] == int(name)]
        wanted = [(x, y, x + w, y + h, each["category_id"] - 1, 0) for each in own for x, y, w, h in [each["bbox"]]]
        np.testing.assert_allclose(label[label[:, 4] >= 0], np.reshape(wanted, (-1, 6)), atol=1e-3)


def test_boxes_of_shapes_fit_their_masks_after_augmentation(shapes: tuple[Path, dict[str, Dataset]]) -> None:
    """The same seed draws the same crops for both tasks: in each box the mask has its class up to all four edges."""
    _, datasets = shapes
    options: dict[str, Any] = {"batch_size": 8, "augmentation": Augmentation(min_area=0.3), "seed": 1}
    both = (Loader(datasets[task], "train", plain(96, 96), **options) for task in TASKS)
    num_boxes = 0
    for masks, boxes in zip(*both, strict=True):
        torch.testing.assert_close(masks.images, boxes.images, rtol=0, atol=0)
        for mask, rows in zip(masks.labels.numpy(), boxes.labels.numpy(), strict=True):
            whole = (rows[:, :4] > 0).all(axis=1) & (rows[:, :4] < 96).all(axis=1)  # what is cut may reach its box not
            for x1, y1, x2, y2, kind, _ in rows[whole]:
                top, left = int(np.floor(y1)), int(np.floor(x1))
                part = mask[top : int(np.ceil(y2)), left : int(np.ceil(x2))] == kind + 1
                down, across = np.flatnonzero(part.any(axis=1)), np.flatnonzero(part.any(axis=0))
                found = [left + across[0], top + down[0], left + across[-1] + 1, top + down[-1] + 1]
                assert np.abs(np.array(found) - (x1, y1, x2, y2)).max() <= 2  # an edge pixel, of pixels enlarged to 1.8
                num_boxes += 1
    assert num_boxes > 15


@pytest.mark.parametrize("name", ["mixup_alpha", "cutmix_alpha"])
def test_images_with_masks_or_boxes_are_not_mixed(positions: dict[str, Dataset], name: str) -> None:
    for dataset in positions.values():
        with refuses("unmixable-labels", f"train.augmentation.{name}"):
            Loader(dataset, "train", plain(32, 32), batch_size=2, augmentation=Augmentation(**{name: 0.2}))


def test_a_damaged_mask_is_named(positions: dict[str, Dataset], tmp_path: Path) -> None:
    dataset = positions["segmentation"]
    copy = Path(shutil.copytree(dataset.path, tmp_path / "dataset"))
    shard = copy / dataset.manifest.splits["val"].shards[0]
    with tarfile.open(shard) as archive:
        member = [member for member in archive if member.name.endswith(".mask")][2]
    data = bytearray(shard.read_bytes())
    data[member.offset_data : member.offset_data + member.size] = bytes(member.size)
    shard.write_bytes(data)
    with refuses("damaged-dataset", says=member.name):
        list(Loader(load(copy, DatasetManifest), "val", plain(32, 32), batch_size=4))
    entry = json.loads(dataset.file("val.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert len(entry["label_sha256"]) == hashlib.sha256().digest_size * 2
