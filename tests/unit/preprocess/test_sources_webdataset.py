"""WebDataset tars as a source."""

import io
import os
import pickle
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import Artifact, DatasetManifest
from components.preprocess.sources import Source, Unreadable, find_samples

Preprocess = Callable[..., Artifact[DatasetManifest]]


def find(data: Path, **options: Any) -> Source:
    settings: dict[str, Any] = {"val_fraction": 0.25, "seed": 0, "class_names_file": "", **options}
    return find_samples(str(data), scratch=data / "none", **settings)


def contents(source: Source, split: str) -> dict[str, tuple[str, bytes]]:
    """Class and bytes of each path, as another process reads them; of refused ones the reason."""
    storage = pickle.loads(pickle.dumps(source.storage))
    found = {}
    for sample in source.splits[split]:
        try:
            found[sample.path] = (source.classes[sample.label], storage.read(sample))
        except Unreadable as error:
            found[sample.path] = ("refused", error.reason.encode())
    return found


def write_tar(file: Path, members: Mapping[str, bytes | str]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w") as packed:
        for name, data in members.items():
            raw = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            packed.addfile(info, io.BytesIO(raw))
    return file


def shard(first: int, labels: list[str], suffix: str = "jpg") -> dict[str, bytes | str]:
    members: dict[str, bytes | str] = {}
    for number, label in enumerate(labels, first):
        members |= {f"{number:03d}.{suffix}": f"image {number}", f"{number:03d}.cls": label}
    return members


@pytest.mark.parametrize(
    "names",
    [
        ("train-000.tar", "train-001.tar", "val-000.tar"),
        ("train/0.tar", "train/1.tar", "validation/0.tar"),
        ("pets-train-0.tar", "pets-train-1.tar", "pets-validation-0.tar"),
        ("pets_0.tar", "pets_1.tar", "pets_val_0.tar"),
    ],
)
def test_tars_with_splits(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name, labels, first in zip(names, (["0", "2"], ["1", "0\n"], ["2"]), (0, 2, 4), strict=True):
        write_tar(tmp_path / "shards" / name, shard(first, labels))
    source = find(tmp_path / "shards")
    assert source.classes == ("0", "1", "2")
    assert contents(source, "train") == {
        f"{names[0]}/000.jpg": ("0", b"image 0"),
        f"{names[0]}/001.jpg": ("2", b"image 1"),
        f"{names[1]}/002.jpg": ("1", b"image 2"),
        f"{names[1]}/003.jpg": ("0", b"image 3"),
    }
    assert contents(source, "val") == {f"{names[2]}/004.jpg": ("2", b"image 4")}


def test_tars_without_splits_are_split_by_class(tmp_path: Path) -> None:
    write_tar(tmp_path / "shards" / "a.tar", shard(0, ["cat"] * 8 + ["dog"] * 2))
    write_tar(tmp_path / "shards" / "b.tar", shard(10, ["dog"] * 6, "png"))
    source = find(tmp_path / "shards")
    assert source.classes == ("cat", "dog")
    for split, counts in (("train", [6, 6]), ("val", [2, 2])):
        assert [sum(sample.label == label for sample in source.splits[split]) for label in (0, 1)] == counts
    assert find(tmp_path / "shards") == source


def test_one_tar_and_folders_within_it(tmp_path: Path) -> None:
    members: dict[str, bytes | str] = {}
    for folder in ("x", "y"):
        for number in range(4):
            members |= {f"{folder}/{number}.jpg": f"{folder}{number}", f"{folder}/{number}.cls": str(number % 2)}
    members |= {"x/0.seg.png": "mask", "x/0.json": "{}"}
    source = find(write_tar(tmp_path / "images.tar", members))
    assert source.classes == ("0", "1")
    found = contents(source, "train") | contents(source, "val")
    assert found == {f"{f}/{n}.jpg": (str(n % 2), f"{f}{n}".encode()) for f in "xy" for n in range(4)}


@pytest.mark.parametrize("where", ["class_names_file", "classes.txt"])
@pytest.mark.parametrize("one", [True, False])
def test_names_of_integer_labels(tmp_path: Path, where: str, one: bool) -> None:
    folder = tmp_path / "shards"
    tar = write_tar(folder / "0.tar", shard(0, ["0", "0", "1", "1", "3"]))
    names = (tmp_path if where == "class_names_file" else folder) / "classes.txt"
    names.write_text("tench\nbird\nshark\n")
    options = {"class_names_file": str(names)} if where == "class_names_file" else {}
    source = find(tar if one else folder, **options)
    assert source.classes == ("tench", "bird", "shark")
    found = {path.rpartition("/")[2]: entry for path, entry in contents(source, "train").items()}
    assert found["004.jpg"] == ("refused", b"its label 3 is not below 3")
    assert sorted(name for name, _ in contents(source, "val").values()) == ["bird", "tench"]


def test_images_without_a_usable_label_are_refused_and_nothing_else(tmp_path: Path) -> None:
    members = shard(0, ["0", "0", "1", "1", "dog", "-1", "", "99999999999999999999", "1" * 2000, "1000000"])
    members |= {"alone.jpg": "image", "b.cls": "1", "b.gif": "no kind that is read"}
    source = find(write_tar(tmp_path / "images.tar", members))
    assert source.classes == ("0", "1")
    refused = {p: text.decode() for p, (name, text) in contents(source, "train").items() if name == "refused"}
    assert refused == {
        "004.jpg": "its label 'dog' is no integer from 0",
        "005.jpg": "its label '-1' is no integer from 0",
        "006.jpg": "its .cls file is empty or too long",
        "007.jpg": "its label 99999999999999999999 is not below 2",
        "008.jpg": "its .cls file is empty or too long",
        "009.jpg": "its label 1000000 is not below 2",
        "alone.jpg": "no .cls file with its label",
    }
    assert len(source.splits["train"]) + len(source.splits["val"]) == 11


def test_a_name_that_class_names_file_lacks(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("dog\ncat\n")
    tar = write_tar(tmp_path / "x.tar", shard(0, ["cat", "cat", "dog", "dog", "eel", "7"]))
    source = find(tar, class_names_file=str(tmp_path / "names.txt"))
    assert source.classes == ("dog", "cat")
    found = contents(source, "train")
    assert found["004.jpg"] == ("refused", b"its label 'eel' is no class name")
    assert found["005.jpg"] == ("refused", b"its label '7' is no class name")


def test_links_and_hidden_members(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    members = shard(0, ["0", "0", "1", "1"]) | {"._000.jpg": "junk", "__MACOSX/000.jpg": "junk"}
    tar = write_tar(folder / "0.tar", members)
    with tarfile.open(tar, "a") as packed:
        info = tarfile.TarInfo("link.jpg")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        packed.addfile(info)
    (folder / ".1.tar").write_bytes(b"hidden")
    source = find(folder)
    found = contents(source, "train") | contents(source, "val")
    assert set(found) == {"0.tar/000.jpg", "0.tar/001.jpg", "0.tar/002.jpg", "0.tar/003.jpg", "0.tar/link.jpg"}
    assert found["0.tar/link.jpg"] == ("refused", b"no regular file of the archive")


def test_folders_of_tars_that_cannot_be_used(tmp_path: Path) -> None:
    good = shard(0, ["0", "0", "1", "1"])
    write_tar(tmp_path / "a" / "val-0.tar", good)
    write_tar(tmp_path / "b" / "n01440764.tar", {"n01440764_1.JPEG": "image"})
    write_tar(tmp_path / "c" / "0.tar", shard(0, ["0", "0"]))
    write_tar(tmp_path / "d" / "0.tar", shard(0, ["0", "0", "1"]))
    write_tar(tmp_path / "e" / "0.tar", good)
    (tmp_path / "e" / "1.tar").write_bytes(b"broken")
    outside = write_tar(tmp_path / "outside.tar", good)
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "0.tar").symlink_to(outside)
    write_tar(tmp_path / "g" / "pets-train-0.tar", good)
    write_tar(tmp_path / "g" / "pets-test-0.tar", good)
    for name, message in (
        ("a", "a has validation tars but no images for training; add tars whose names begin with train"),
        ("b", r"b/n01440764\.tar has no labels \(KEY\.cls beside KEY\.jpg\), so it is no WebDataset tar"),
        ("c", "c has only the class '0'; a classifier needs at least two"),
        ("d", r"class '1' has 1 file; at least 2 are needed"),
        ("e", r"e/1\.tar is no tar that can be read"),
        ("f", r"can't read .*f/0\.tar: a link out of the data folder"),
        ("g", r"g has tars for testing beside others, such as pets-test-0\.tar; take them away"),
    ):
        with pytest.raises(UserError, match=message):
            find(tmp_path / name)


def test_class_folders_beside_a_stray_tar_are_class_folders(tmp_path: Path, write_tree: Callable[..., Path]) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    write_tar(root / "stray.tar", shard(0, ["0", "0", "1", "1"]))
    assert find(root).classes == ("a", "b")


def test_a_data_set_of_preprocess_is_a_source_again(
    tmp_path: Path, run_preprocess: Preprocess, write_tree: Callable[..., Path]
) -> None:
    root = write_tree(tmp_path / "images", {"cat": 4, "dog": 6})
    first = run_preprocess(root, tmp_path / "first")
    source = find(first.path)
    assert source.classes == find(first.file("train-000000.tar")).classes == ("cat", "dog")
    for split in ("train", "val"):
        images = {data for _, data in contents(source, split).values()}
        assert len(images) == first.manifest.splits[split].num_images
        assert images <= {path.read_bytes() for path in root.rglob("*.png")}
    again = run_preprocess(first.path, tmp_path / "again")
    assert again.manifest.classes == first.manifest.classes
    assert again.manifest.splits["train"].class_counts == first.manifest.splits["train"].class_counts
    assert os.listdir(first.path)
    (first.path / "manifest.json").write_text('{"kind": "of another program", "classes": 2}')
    assert find(first.path).classes == ("0", "1")
