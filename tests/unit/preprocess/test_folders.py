"""Which folders preprocess takes, and what it says of the others."""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.common.artifacts import Artifact, DatasetManifest
from components.common.errors import UserError
from components.common.loader import Loader
from components.preprocess.sources import find_samples

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
    for folder in ODD_NAMES:
        (root / folder).mkdir(parents=True)
        for number in range(3):
            gradient().save(root / folder / f"{number} {folder}.x.png")
    dataset = run_preprocess(root, tmp_path / "out dir'ü")
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
    dataset = run_preprocess(root, tmp_path / "out", max_bad_fraction=0.5)
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
    store = write_tree(tmp_path / "store", {"a": 4, "b": 4})
    root = tmp_path / "images"
    (root / "a").mkdir(parents=True)
    for path in (store / "a").iterdir():
        (root / "a" / path.name).symlink_to(path)
    (root / "b").symlink_to(store / "b")
    (root / "a" / "broken.png").symlink_to(store / "absent.png")
    source = find_samples(root, val_fraction=0.2, seed=0, class_names_file="")
    for sample in source.splits["train"] + source.splits["val"]:  # shards are planned by the sizes of the images
        broken = sample.path == "a/broken.png"
        assert sample.size_bytes == (0 if broken else (root / sample.path).stat().st_size)
    dataset = run_preprocess(root, tmp_path / "out", max_bad_fraction=0.2)
    assert sum(sum(split.class_counts) for split in dataset.manifest.splits.values()) == 8
    assert rejected(dataset.path) == {"a/broken.png": "unreadable: No such file or directory"}


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
    (root / "b" / "device.png").symlink_to("/dev/zero")
    monkeypatch.chdir(root / "b")  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.png")
        dataset = run_preprocess(root, tmp_path / "out", max_bad_fraction=0.5)
    names = ("a/pipe.png", "a/linked.png", "b/device.png", "b/socket.png")
    assert rejected(dataset.path) == dict.fromkeys(names, "not a regular file")
