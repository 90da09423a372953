"""Layouts of folders: ImageNet's, synset maps, the order of listings, and what is not seen."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.errors import UserError
from components.preprocess.sources import Source, Unreadable, check_data_folder, find_samples, local_path

WriteTree = Callable[..., Path]
WNIDS = ("n02012849", "n01440764", "n03126707")
SYNSETS = "n01440764 tench, Tinca tinca\nn02012849 crane\nn03126707 crane\n"
NAMES = ("tench", "crane (n02012849)", "crane (n03126707)")


def find(data: Path | str, scratch: Path, **options: Any) -> Source:
    settings: dict[str, Any] = {"val_fraction": 0.25, "seed": 0, "class_names_file": "", **options}
    return find_samples(str(data), scratch=scratch, **settings)


def labelled(source: Source, split: str) -> dict[str, str]:
    return {sample.path: source.classes[sample.label] for sample in source.splits[split]}


def imagenet(root: Path, write_tree: WriteTree, base: str, *, flat: bool) -> Path:
    trees = {f"train/{wnid}": 3 for wnid in WNIDS} | {f"val/{wnid}": 1 for wnid in WNIDS if not flat}
    write_tree(root / base, trees)
    (root / "LOC_synset_mapping.txt").write_text(SYNSETS)
    if flat:
        (root / base / "val").mkdir()
        rows = ["ImageId,PredictionString"]
        for number, wnid in enumerate(WNIDS):
            name = f"ILSVRC2012_val_{number:08d}"
            os.rename(root / base / "train" / wnid / "002.png", root / base / "val" / f"{name}.JPEG")
            rows.append(f"{name},{wnid} 1 2 3 4 {wnid} 5 6 7 8 ")
        (root / "LOC_val_solution.csv").write_text("\n".join(rows) + "\n")
    return root


@pytest.mark.parametrize("base", ["", "ILSVRC/Data/CLS-LOC"])
@pytest.mark.parametrize("flat", [False, True])
def test_imagenet(tmp_path: Path, write_tree: WriteTree, base: str, flat: bool) -> None:
    root = imagenet(tmp_path / "imagenet", write_tree, base, flat=flat)
    source = find(root, tmp_path)
    assert source.classes == NAMES
    named = dict(zip(("n01440764", "n02012849", "n03126707"), NAMES, strict=True))
    of_train = labelled(source, "train")
    assert len(of_train) == (6 if flat else 9)
    assert all(named[path.split("/")[-2]] == name for path, name in of_train.items())
    of_val = labelled(source, "val")
    if flat:
        folder = f"{base}/val" if base else "val"
        paths = [f"{folder}/ILSVRC2012_val_{number:08d}.JPEG" for number in range(3)]
        assert of_val == {path: named[wnid] for path, wnid in zip(paths, WNIDS, strict=True)}
    else:
        assert {path.split("/")[-2]: name for path, name in of_val.items()} == named
    for sample in source.splits["val"]:
        assert source.storage.read(sample).startswith(b"\x89PNG")


def test_a_flat_val_needs_its_labels(tmp_path: Path, write_tree: WriteTree) -> None:
    root = imagenet(tmp_path / "imagenet", write_tree, "", flat=True)
    (root / "val" / "extra.JPEG").write_bytes(b"?")
    source = find(root, tmp_path)
    refused = [sample for sample in source.splits["train"] if sample.path == "val/extra.JPEG"]
    with pytest.raises(Unreadable, match=r"LOC_val_solution\.csv does not name it"):
        pickle.loads(pickle.dumps(source.storage)).read(refused[0])
    solution = root / "LOC_val_solution.csv"
    table = solution.read_text()
    for text, message in (
        (table.replace(",n01440764", ",n99999999"), "the class n99999999, which train/ has not"),
        (table.replace("ImageId", "Id"), "needs the columns ImageId,PredictionString"),
        ("ImageId,PredictionString\nx,\n", "row 2: PredictionString is empty"),
    ):
        solution.write_text(text)
        with pytest.raises(UserError, match=message):
            find(root, tmp_path)
    solution.unlink()
    with pytest.raises(UserError, match=r"val holds files but no folder per class.*LOC_val_solution.csv into"):
        find(root, tmp_path)


def test_a_synset_map_in_the_root_gives_names_and_order_of_the_classes_there(
    tmp_path: Path, write_tree: WriteTree
) -> None:
    root = write_tree(tmp_path / "images", {"n03126707": 4, "n01440764": 4})
    (root / "synset_words.txt").write_text(SYNSETS)
    assert find(root, tmp_path).classes == ("tench", "crane (n03126707)")
    (root / "dog").mkdir()
    with pytest.raises(UserError, match="folders that the synset map does not name: dog"):
        find(root, tmp_path)


def test_a_synset_map_as_class_names_file_gives_all_its_classes(tmp_path: Path, write_tree: WriteTree) -> None:
    root = write_tree(tmp_path / "images", {"n03126707": 4, "tench": 4})
    (tmp_path / "map.txt").write_text(SYNSETS)
    source = find(root, tmp_path, class_names_file=str(tmp_path / "map.txt"))
    assert source.classes == NAMES
    assert {path.split("/")[0]: name for path, name in labelled(source, "train").items()} == {
        "n03126707": NAMES[2],
        "tench": NAMES[0],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [("\n \n", "names no class; write one"), ("a\nb\na\n", "twice: a"), (SYNSETS + SYNSETS, "twice: n01440764")],
)
def test_class_names_files_that_cannot_be_used(tmp_path: Path, write_tree: WriteTree, text: str, message: str) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    (tmp_path / "names.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        find(root, tmp_path, class_names_file=str(tmp_path / "names.txt"))


def test_listings_are_in_one_order_and_hidden_things_are_left_out(
    tmp_path: Path, write_tree: WriteTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_tree(tmp_path / "images", {"b": 2, "b/__MACOSX": 1, "a": 3, "a/0": 1, "a/.x": 1, "__MACOSX/a": 1})
    (root / "a" / ".hidden.png").write_bytes(b"")
    first = find(root, tmp_path)
    in_order = ["a/000.png", "a/001.png", "a/002.png", "a/0/000.png", "b/000.png", "b/001.png"]  # own files first
    assert sorted(labelled(first, "train") | labelled(first, "val")) == sorted(in_order)
    held_out = labelled(first, "val")
    assert list(labelled(first, "train")) == [path for path in in_order if path not in held_out]
    scandir = os.scandir

    class Backwards:
        def __init__(self, path: str) -> None:
            self._entries = sorted(scandir(path), key=lambda entry: entry.name, reverse=True)

        def __enter__(self) -> Any:
            return iter(self._entries)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", Backwards)
    assert find(root, tmp_path) == first


def test_the_data_is_checked_before_anything_runs(tmp_path: Path) -> None:
    for name in ("a.tar", "b.TAR.GZ", "c.tgz", "d.zip", "e.csv", "f.parquet", "g.tar.zst"):
        (tmp_path / name).write_bytes(b"")
        check_data_folder(str(tmp_path / name))
    check_data_folder(str(tmp_path))
    check_data_folder(f"file://{tmp_path}")
    (tmp_path / "h.rar").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.tar")
    for name, message in (
        ("absent", "the data folder .*absent does not exist; name a folder with one sub-folder of images per class"),
        ("h.rar", r"h.rar is a file, not a folder, and of no kind that is read; name .*\.tar\.gz.*\.csv"),
        ("pipe.tar", "of no kind that is read"),
    ):
        with pytest.raises(UserError, match=message):
            check_data_folder(str(tmp_path / name))


def test_a_class_may_be_called_train(tmp_path: Path, write_tree: WriteTree) -> None:
    root = write_tree(tmp_path / "vehicles", {"car": 2, "train": 2})
    assert find(root, tmp_path).classes == ("car", "train")
    (root / "train" / "steam").mkdir()
    with pytest.raises(UserError, match="vehicles has car/, train/ but no val/; it needs both"):
        find(root, tmp_path)


@pytest.mark.parametrize("val", ["val", "validation", "valid"])
def test_how_the_validation_folder_may_be_called(tmp_path: Path, write_tree: WriteTree, val: str) -> None:
    root = write_tree(tmp_path / "images", {"train/a": 2, "train/b": 2, f"{val}/a": 1, f"{val}/b": 1})
    source = find(root, tmp_path)
    assert source.classes == ("a", "b")
    assert [sample.path for sample in source.splits["val"]] == [f"{val}/a/000.png", f"{val}/b/000.png"]
    write_tree(root, {f"{'valid' if val == 'val' else 'val'}/a": 1})
    with pytest.raises(UserError, match=r"images has val/ and valid\w*/, which are called the same split; keep one"):
        find(root, tmp_path)


def test_a_class_may_be_called_valid(tmp_path: Path, write_tree: WriteTree) -> None:
    assert find(write_tree(tmp_path / "mail", {"valid/deep": 2, "invalid": 2}), tmp_path).classes == (
        "invalid",
        "valid",
    )


def test_file_uris_name_what_path_as_uri_writes(tmp_path: Path, write_tree: WriteTree) -> None:
    root = write_tree(tmp_path / "a b%20#ü?", {"a": 2, "b": 2})
    uri = root.as_uri()
    assert "%20" in uri
    table = "".join(f"{path.as_uri()},{path.parent.name}\n" for path in root.rglob("*.png"))
    (root / "t.csv").write_text(f"path,label\n{table}")
    for form in (uri, uri.replace("///", "/"), uri.replace("///", "//localhost/"), f"{uri}/t.csv"):
        check_data_folder(form)
        assert find(form, tmp_path) == find(root, tmp_path)
    assert local_path(str(root)) == local_path(uri) == root
    assert local_path("file:notes") == Path.cwd() / "file:notes"
