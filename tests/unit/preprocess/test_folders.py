"""Which folders preprocess takes, and what it says of the others."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import Artifact, DatasetManifest
from components.common.data.loader import Loader
from components.preprocess.sources import Sample, find_samples

Preprocess = Callable[..., Artifact[DatasetManifest]]


ODD_NAMES = ("with space", 'quote\'s "double"', "ünïcödé 数字", "-dash", "a;b$(c)&", "comma,semi", "percent%20")


def test_odd_names_of_folders_and_files(
    tmp_path: Path,
    run_preprocess: Preprocess,
    gradient: Callable[..., Any],
    listing: Callable[..., Any],
    plain: Callable[..., Any],
) -> None:
    root = tmp_path / "images"
    for index, folder in enumerate(ODD_NAMES):
        (root / folder).mkdir(parents=True)
        for number in range(3):
            gradient(shift=3 * index + number).save(root / folder / f"{number} {folder}.x.png")
    dataset = run_preprocess(root, tmp_path / "out dir'ü", on_leak="warn")
    assert dataset.manifest.classes == tuple(sorted(ODD_NAMES))
    paths = {entry["path"] for split in ("train", "val") for entry in listing(dataset, split)}
    assert paths == {f"{folder}/{number} {folder}.x.png" for folder in ODD_NAMES for number in range(3)}
    assert sum(len(batch.labels) for batch in Loader(dataset, "val", plain(32), batch_size=4)) == len(ODD_NAMES)


def test_a_name_that_is_no_unicode(
    tmp_path: Path,
    run_preprocess: Preprocess,
    write_tree: Callable[..., Any],
    listing: Callable[..., Any],
    rejected: Callable[..., Any],
) -> None:
    root = write_tree(tmp_path / "images", {"a": 4, "b": 4})
    odd = bytes(root / "a") + b"/caf\xe9.png"  # Latin-1, as old archives have them
    shutil.copy(root / "a" / "000.png", odd)
    (root / "b" / os.fsdecode(b"bad\xe9.png")).write_bytes(b"")
    dataset = run_preprocess(root, tmp_path / "out", max_bad_fraction=0.5, on_leak="warn")
    paths = {entry["path"] for split in ("train", "val") for entry in listing(dataset, split)}
    assert len(paths) == 9
    assert os.fsdecode(b"a/caf\xe9.png") in paths
    assert set(rejected(dataset.path)) == {os.fsdecode(b"b/bad\xe9.png")}


def test_a_folder_name_that_is_no_unicode(
    tmp_path: Path, run_preprocess: Preprocess, write_tree: Callable[..., Any]
) -> None:
    root = write_tree(tmp_path / "images", {"a": 4, "b": 4})
    os.rename(root / "b", bytes(root) + b"/caf\xe9")
    with pytest.raises(UserError, match=r"has a folder whose name is not UTF-8: 'caf.*rename it"):
        run_preprocess(root, tmp_path / "out")


def test_hidden_files_are_not_seen_and_nested_folders_are(
    tmp_path: Path, run_preprocess: Preprocess, write_tree: Callable[..., Any]
) -> None:
    root = write_tree(tmp_path / "images", {"a": 4, "b": 4, "b/more/deep": 2, ".cache": 3})
    (root / "a" / ".DS_Store").write_bytes(b"junk")
    (root / "readme.txt").write_text("beside the classes")
    dataset = run_preprocess(root, tmp_path / "out")
    assert dataset.manifest.classes == ("a", "b")
    assert dataset.manifest.num_rejected == 0
    assert sum(split.class_counts[1] for split in dataset.manifest.splits.values()) == 6


def test_linked_images_and_folders_are_followed(
    tmp_path: Path, run_preprocess: Preprocess, write_tree: Callable[..., Any], rejected: Callable[..., Any]
) -> None:
    store = write_tree(tmp_path / "real" / ".store", {"a": 4, "b": 4, "c": 1})
    real = store.parent
    (real / "a").mkdir()
    for path in (store / "a").iterdir():
        (real / "a" / path.name).symlink_to(path)
    (real / "b").symlink_to(store / "b")
    (store / "b" / "more").symlink_to(store / "c")
    (real / "a" / "broken.png").symlink_to(store / "absent.png")
    root = tmp_path / "images"
    root.symlink_to(real)  # the folder itself may be a link
    source = find_samples(str(root), val_fraction=0.2, seed=0, class_names_file="", scratch=tmp_path)
    for sample in source.splits["train"] + source.splits["val"]:  # shards are planned by the sizes of the images
        broken = sample.path == "a/broken.png"
        assert sample.size_bytes == (0 if broken else (root / sample.path).stat().st_size)
    dataset = run_preprocess(root, tmp_path / "out", max_bad_fraction=0.2)
    assert sum(sum(split.class_counts) for split in dataset.manifest.splits.values()) == 9
    assert rejected(dataset.path) == {"a/broken.png": "unreadable: No such file or directory"}


def test_links_out_of_the_tree_are_not_read(
    tmp_path: Path, run_preprocess: Preprocess, write_tree: Callable[..., Any], rejected: Callable[..., Any]
) -> None:
    outside = write_tree(tmp_path / "outside", {"x": 4})
    root = write_tree(tmp_path / "images", {"a": 6, "b": 6})
    beside = write_tree(tmp_path / "images-beside", {"x": 1})  # its name begins as the data folder's
    (root / "a" / "file.png").symlink_to(outside / "x" / "000.png")
    (root / "a" / "relative.png").symlink_to("../../outside/x/000.png")
    (root / "a" / "beside.png").symlink_to(beside / "x" / "000.png")
    (root / "b" / "folder").symlink_to(outside / "x")
    (root / "b" / "absent.png").symlink_to(outside / "absent.png")
    dataset = run_preprocess(root, tmp_path / "out", max_bad_fraction=0.5)
    names = ("a/file.png", "a/relative.png", "a/beside.png", "b/folder", "b/absent.png")
    assert rejected(dataset.path) == dict.fromkeys(names, "a link out of the data folder")
    assert sum(sum(split.class_counts) for split in dataset.manifest.splits.values()) == 12


@pytest.mark.parametrize("linked", ["c", "train", "train/c"])
def test_a_class_or_split_that_is_a_link_out_of_the_tree(
    tmp_path: Path, write_tree: Callable[..., Any], linked: str
) -> None:
    outside = write_tree(tmp_path / "outside", {"c": 2, "d": 2})
    trees = {"c": {"a": 2, "b": 2}, "train": {"val/c": 2}, "train/c": {"val/c": 2, "train/a": 2}}
    root = write_tree(tmp_path / "images", trees[linked])
    (root / linked).symlink_to(outside if linked == "train" else outside / "c")
    with pytest.raises(UserError, match=f"images/{linked} is a link out of the data folder, to .*outside.*cp -rL"):
        find_samples(str(root), val_fraction=0.2, seed=0, class_names_file="", scratch=tmp_path)


def test_loops_of_links_end(tmp_path: Path, write_tree: Callable[..., Any]) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2, "b/deep": 1})
    (root / "a" / "up").symlink_to("..")
    (root / "a" / "self").symlink_to("self")
    (root / "b" / "here").symlink_to(".")
    (root / "b" / "deep" / "above").symlink_to(root / "b")
    source = find_samples(str(root), val_fraction=0.2, seed=0, class_names_file="", scratch=tmp_path)
    paths = sorted(sample.path for samples in source.splits.values() for sample in samples)
    assert paths == ["a/000.png", "a/001.png", "a/self", "b/000.png", "b/001.png", "b/deep/000.png"]
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        source.storage.read(Sample(path="a/self", label=0, size_bytes=0))


@pytest.mark.parametrize("target", [".", "../images"])
def test_a_link_to_its_own_parent_is_named(tmp_path: Path, write_tree: Callable[..., Any], target: str) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    (root / "latest").symlink_to(target)
    with pytest.raises(UserError, match=f"images/latest is a link to {root}, in which it lies itself"):
        find_samples(str(root), val_fraction=0.2, seed=0, class_names_file="", scratch=tmp_path)


def test_only_regular_files_are_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_preprocess: Preprocess,
    write_tree: Callable[..., Any],
    rejected: Callable[..., Any],
) -> None:
    root = write_tree(tmp_path / "images", {"a": 4, "b": 4})
    os.mkfifo(root / "a" / "pipe.png")  # reading it would wait for a writer
    (root / "a" / "linked.png").symlink_to(root / "a" / "pipe.png")
    monkeypatch.chdir(root / "b")  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.png")
        dataset = run_preprocess(root, tmp_path / "out", max_bad_fraction=0.5)
    names = ("a/pipe.png", "a/linked.png", "b/socket.png")
    assert rejected(dataset.path) == dict.fromkeys(names, "not a regular file")
