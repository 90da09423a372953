"""`enginery data shapes`: boxes and masks are those of the images, and the same for any number of workers."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from pycocotools.coco import COCO

from enginery.datasets.shapes import CLASSES, shape_image, write_shapes
from tests.unit.registered import files

SMALL: dict[str, Any] = {"num_train": 40, "num_val": 10, "image_size": 64, "num_workers": 1}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("shapes") / "small"
    write_shapes(directory, **SMALL)
    return directory


def test_the_same_for_any_number_of_workers_and_others_for_another_seed(small: Path, tmp_path: Path) -> None:
    ours = files(small)
    assert len({digest for name, digest in ours.items() if name.endswith(".jpg")}) == 50  # none is in both splits
    write_shapes(tmp_path / "two", **{**SMALL, "num_workers": 2})
    assert files(tmp_path / "two") == ours
    assert write_shapes(tmp_path / "two", **SMALL).already_complete
    write_shapes(tmp_path / "other", **SMALL, seed=1)
    assert not set(files(tmp_path / "other").values()) & {d for name, d in ours.items() if name.endswith(".jpg")}


def test_a_partial_run_is_continued(small: Path, tmp_path: Path) -> None:
    directory = tmp_path / "partial"
    write_shapes(directory, **SMALL)
    (directory / "dataset.json").rename(directory / "dataset.partial.json")
    (directory / "train/images/000003.jpg").unlink()
    (directory / "val/masks/000001.png").write_bytes(b"")
    (directory / "val/annotations.json").unlink()
    assert not write_shapes(directory, **SMALL).already_complete
    assert files(directory) == files(small)


@pytest.mark.parametrize("split", ["train", "val"])
def test_boxes_and_masks_as_the_tools_of_coco_read_them(small: Path, split: str) -> None:
    coco = COCO(small / split / "annotations.json")
    assert [coco.cats[number]["name"] for number in sorted(coco.cats)] == list(CLASSES[1:])
    assert (small / "classes.txt").read_text().split() == list(CLASSES)
    assert len(coco.imgs) == SMALL[f"num_{split}"]
    for index, image in coco.imgs.items():
        with Image.open(small / split / "images" / image["file_name"]) as picture:
            assert (picture.format, picture.mode, picture.size) == ("JPEG", "RGB", (64, 64))
        mask = np.asarray(Image.open(small / split / "masks" / image["file_name"].replace("jpg", "png")))
        rebuilt = np.zeros_like(mask)
        for entry in coco.loadAnns(coco.getAnnIds(index)):
            own = coco.annToMask(entry).astype(bool)
            assert not rebuilt[own].any()  # a pixel is of one object
            rebuilt[own] = entry["category_id"]
            x, y, width, height = entry["bbox"]
            assert own.sum() == own[y : y + height, x : x + width].sum() == entry["area"] > 0
            edges = (own[y], own[y + height - 1], own[:, x], own[:, x + width - 1])
            assert all(edge.any() for edge in edges)  # the box is tight
        assert (rebuilt == mask).all()


def test_all_classes_many_sizes_and_images_without_objects() -> None:
    sides: list[float] = []
    classes: Counter[int] = Counter()
    empty = 0
    for index in range(300):
        _, _, objects = shape_image(np.random.default_rng(index), 96)
        empty += not objects
        for class_index, mask in objects:
            classes[class_index] += 1
            sides.append(mask.sum() ** 0.5 / 96)
    assert set(classes) == set(range(1, len(CLASSES)))
    assert max(classes.values()) < 1.5 * min(classes.values())
    assert 20 < empty < 90
    assert np.quantile(sides, 0.05) < 0.1 < 0.25 < np.quantile(sides, 0.95)


def test_colours_change_at_the_edges_of_the_mask() -> None:
    at_edges, elsewhere = [], []
    for index in range(40):
        image, labels, _ = shape_image(np.random.default_rng(index), 128)
        # [127, 128] steps from row to row; an edge may lie between two pixels, or within one
        steps = np.abs(np.diff(np.asarray(image, np.float32), axis=0)).max(axis=2)
        edges = np.diff(labels.astype(int), axis=0) != 0
        at_edges.append(steps[edges])
        elsewhere.append(steps[~edges])
    assert np.concatenate(at_edges).mean() > 3 * np.concatenate(elsewhere).mean()
