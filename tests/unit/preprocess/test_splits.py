"""preprocess decides what is held out: splits, class order, what stays when data grows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from components.common.contracts.manifests import Artifact, DatasetManifest
from components.preprocess.sources import find_samples

Preprocess = Callable[..., Artifact[DatasetManifest]]


def test_a_presplit_folder_is_kept_as_it_is(
    tmp_path: Path, run_preprocess: Preprocess, write_tree: Callable[..., Any], listing: Callable[..., Any]
) -> None:
    counts = {"train/b": 3, "train/a": 5, "train/c": 2, "val/a": 2, "val/b": 1}
    dataset = run_preprocess(write_tree(tmp_path / "images", counts), tmp_path / "out")
    manifest = dataset.manifest
    assert manifest.classes == ("a", "b", "c")
    assert manifest.splits["train"].class_counts == (5, 3, 2)
    assert manifest.splits["val"].class_counts == (2, 1, 0)
    for split in ("train", "val"):
        paths = {entry["path"] for entry in listing(dataset, split)}
        assert all(path.startswith(f"{split}/") for path in paths)
        assert len(paths) == manifest.splits[split].num_images
        for entry in listing(dataset, split):
            assert manifest.classes[entry["label"]] == entry["path"].split("/")[1]


def test_one_tree_is_split_by_class(
    tmp_path: Path, run_preprocess: Preprocess, write_tree: Callable[..., Any], listing: Callable[..., Any]
) -> None:
    root = write_tree(tmp_path / "images", {"cat": 20, "dog": 10, "eel": 2})
    dataset = run_preprocess(root, tmp_path / "out", val_fraction=0.2)
    assert dataset.manifest.splits["val"].class_counts == (4, 2, 1)  # at least one of each
    assert dataset.manifest.splits["train"].class_counts == (16, 8, 1)
    train, val = ({entry["path"] for entry in listing(dataset, split)} for split in ("train", "val"))
    assert train.isdisjoint(val)
    assert train | val == {path.relative_to(root).as_posix() for path in root.glob("*/*.png")}


def held_out(root: Path, seed: int = 0, val_fraction: float = 0.25) -> set[str]:
    source = find_samples(str(root), val_fraction=val_fraction, seed=seed, class_names_file="", scratch=root / "none")
    return {sample.path for sample in source.splits["val"]}


def test_the_split_follows_from_seed_and_names_alone(
    tmp_path: Path, gradient: Callable[..., Any], write_tree: Callable[..., Any]
) -> None:
    root = write_tree(tmp_path / "images", {"a": 40, "b": 40})
    first = held_out(root)
    assert len(first) == 20
    assert held_out(root) == first
    assert held_out(root, seed=1) != first
    # A class that comes, goes or grows changes nothing in another.
    write_tree(root, {"c": 7})
    of_a_and_b = {path for path in held_out(root) if path[0] in "ab"}
    assert of_a_and_b == first
    # With more images of the same class, those held out stay unless the new ones take their place.
    for index in range(40, 44):
        gradient().save(root / "a" / f"{index:03d}.png")
    grown = {path for path in held_out(root) if path[0] == "a"}
    old = {path for path in first if path[0] == "a"}
    assert len(grown) == 11
    assert len(old & grown) >= 11 - 4


def test_the_order_of_training_images_mixes_the_classes(
    tmp_path: Path, run_preprocess: Preprocess, write_tree: Callable[..., Any], listing: Callable[..., Any]
) -> None:
    root = write_tree(tmp_path / "images", {"a": 20, "b": 20})
    labels = [entry["label"] for entry in listing(run_preprocess(root, tmp_path / "out", on_leak="warn"), "train")]
    assert 0.2 < np.mean(labels[:16]) < 0.8


def test_class_names_file_gives_order_and_classes_without_images(
    tmp_path: Path, run_preprocess: Preprocess, write_tree: Callable[..., Any]
) -> None:
    root = write_tree(tmp_path / "images", {"cat": 4, "dog": 4})
    names = tmp_path / "names.txt"
    names.write_text("dog\n\nbird\n cat \n")
    dataset = run_preprocess(root, tmp_path / "out", class_names_file=str(names))
    assert dataset.manifest.classes == ("dog", "bird", "cat")
    assert dataset.manifest.splits["train"].class_counts == (3, 0, 3)
