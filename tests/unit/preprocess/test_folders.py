"""Folders as a source: names, links, splits, ImageNet's layouts, the order of listings, and what is not seen."""

import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from components.common.data.loader import Loader
from components.preprocess.sources import Sample, check_data_folder, local_path, read_sample
from tests.conftest import preprocess
from tests.unit.positions import plain
from tests.unit.refusals import refuses

from .builders import contents, every_path, find, gradient, paths, reasons, rejected, write_tree

ODD_NAMES = ("with space", 'quote\'s "double"', "ünïcödé 数字", "-dash", "a;b$(c)&", "comma,semi", "percent%20")


def test_odd_names_of_folders_and_files(tmp_path: Path) -> None:
    root = tmp_path / "images"
    for index, folder in enumerate(ODD_NAMES):
        (root / folder).mkdir(parents=True)
        for number in range(3):
            gradient(shift=3 * index + number).save(root / folder / f"{number} {folder}.x.png")
    latin = os.fsdecode(b"caf\xe9.png")  # as old archives have them
    shutil.copy(root / "-dash" / "0 -dash.x.png", root / "-dash" / latin)
    (root / "-dash" / f"bad {latin}").write_bytes(b"")
    dataset = preprocess(root, tmp_path / "out dir'ü", on_leak="warn", max_bad_fraction=0.5, near_duplicates="keep")
    assert dataset.manifest.classes == tuple(sorted(ODD_NAMES))
    named = {f"{folder}/{number} {folder}.x.png" for folder in ODD_NAMES for number in range(3)}
    assert every_path(dataset) == {*named, f"-dash/{latin}"}
    assert rejected(dataset.path) == {f"-dash/bad {latin}": "empty file"}
    loader = Loader(dataset, "val", plain(32), batch_size=4)
    assert sum(len(batch.labels) for batch in loader) == loader.num_images
    os.rename(root / "with space", root / os.fsdecode(b"caf\xe9"))
    with refuses("not-utf8"):  # a class name
        find(root)


def test_linked_images_and_folders_are_followed(tmp_path: Path) -> None:
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
    source = find(root)
    for sample in source.splits["train"] + source.splits["val"]:  # shards are planned by the sizes of the images
        broken = sample.path == "a/broken.png"
        assert sample.size_bytes == (0 if broken else (root / sample.path).stat().st_size)
    assert len(paths(source)) == 4 + 5 + 1
    assert source.num_refused == 1
    dataset = preprocess(root, tmp_path / "out", max_bad_fraction=0.2)
    assert rejected(dataset.path) == {"a/broken.png": "unreadable: No such file or directory"}


def test_what_links_lead_out_to_and_what_is_no_regular_file_is_not_read(tmp_path: Path, monkeypatch) -> None:
    outside = write_tree(tmp_path / "outside", {"x": 4})
    root = write_tree(tmp_path / "images", {"a": 6, "b": 6})
    beside = write_tree(tmp_path / "images-beside", {"x": 1})  # its name begins as the data folder's
    (root / "a" / "file.png").symlink_to(outside / "x" / "000.png")
    (root / "a" / "relative.png").symlink_to("../../outside/x/000.png")
    (root / "a" / "beside.png").symlink_to(beside / "x" / "000.png")
    (root / "b" / "folder").symlink_to(outside / "x")
    (root / "b" / "absent.png").symlink_to(outside / "absent.png")
    os.mkfifo(root / "a" / "pipe.png")  # reading it would wait for a writer
    (root / "a" / "linked.png").symlink_to(root / "a" / "pipe.png")
    monkeypatch.chdir(root / "b")  # a socket's path is short
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket.png")
        found = reasons(source := find(root))
    out = ("a/file.png", "a/relative.png", "a/beside.png", "b/folder", "b/absent.png")
    assert found == {
        **dict.fromkeys(out, "a link out of the data folder"),
        **dict.fromkeys(("a/pipe.png", "a/linked.png", "b/socket.png"), "not a regular file"),
    }
    assert len(paths(source)) == 12 + len(found)
    links = {*out, "a/linked.png"}
    assert source.num_refused == len(links)
    assert links.isdisjoint(sample.path for sample in source.splits["val"])


@pytest.mark.parametrize("linked", ["c", "train", "train/c"])
def test_a_class_or_split_that_is_a_link_out_of_the_tree(tmp_path: Path, linked: str) -> None:
    outside = write_tree(tmp_path / "outside", {"c": 2, "d": 2})
    trees = {"c": {"a": 2, "b": 2}, "train": {"val/c": 2}, "train/c": {"val/c": 2, "train/a": 2}}
    root = write_tree(tmp_path / "images", trees[linked])
    (root / linked).symlink_to(outside if linked == "train" else outside / "c")
    with refuses("link-out", says=f"images/{linked} is a link out of the data folder, to {outside}"):
        find(root)


def test_loops_of_links_end(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2, "b/deep": 1})
    (root / "a" / "up").symlink_to("..")
    (root / "a" / "self").symlink_to("self")
    (root / "b" / "here").symlink_to(".")
    (root / "b" / "deep" / "above").symlink_to(root / "b")
    source = find(root)
    assert paths(source) == ["a/000.png", "a/001.png", "a/self", "b/000.png", "b/001.png", "b/deep/000.png"]
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        source.storage.read(Sample(path="a/self", label=0, size_bytes=0))
    for target in (".", "../images"):
        (root / "latest").symlink_to(target)
        with refuses("link-loop"):
            find(root)
        (root / "latest").unlink()


def test_a_file_larger_than_an_image_is_not_read(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    (root / "a" / "large.png").touch()
    os.truncate(root / "a" / "large.png", 1 << 40)  # a hole, which takes a block of the disk
    source = find(root)
    large = next(sample for samples in source.splits.values() for sample in samples if "large" in sample.path)
    with pytest.raises(Exception, match="has 1,099,511,627,776 bytes, more than an image may have"):
        read_sample(source.storage, large)


def test_listings_are_in_one_order_and_hidden_things_are_left_out(tmp_path: Path, monkeypatch) -> None:
    hidden = {"b/__MACOSX": 1, "a/.x": 1, "__MACOSX/a": 1, ".cache": 3}
    root = write_tree(tmp_path / "images", {"b": 2, "a": 3, "a/0/deep": 1, **hidden})
    (root / "a" / ".DS_Store").write_bytes(b"junk")
    (root / "readme.txt").write_text("beside the classes")
    first = find(root)
    assert first.classes == ("a", "b")
    in_order = ["a/000.png", "a/001.png", "a/002.png", "a/0/deep/000.png", "b/000.png", "b/001.png"]  # own files first
    assert paths(first) == sorted(in_order)
    held_out = {sample.path for sample in first.splits["val"]}
    assert [sample.path for sample in first.splits["train"]] == [path for path in in_order if path not in held_out]
    scandir = os.scandir

    class Backwards:
        def __init__(self, path: str) -> None:
            self._entries = sorted(scandir(path), key=lambda entry: entry.name, reverse=True)

        def __enter__(self) -> Any:
            return iter(self._entries)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(os, "scandir", Backwards)
    assert find(root) == first


def test_the_data_is_checked_before_anything_runs(tmp_path: Path) -> None:
    for name in ("a.tar", "b.TAR.GZ", "c.tgz", "d.zip", "e.csv", "f.parquet", "g.tar.zst"):
        (tmp_path / name).write_bytes(b"")
        check_data_folder(str(tmp_path / name))
    (tmp_path / "h.rar").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.tar")
    for name, code in (("absent", "no-data"), ("h.rar", "unknown-data-kind"), ("pipe.tar", "unknown-data-kind")):
        with refuses(code, "data"):
            check_data_folder(str(tmp_path / name))


SPLITS_AS_CLASSES = [
    ["train", "test"],  # of images that a table labels
    ["seg_train/a", "seg_train/b", "seg_test/a", "seg_pred"],
    ["cars_train", "cars_test"],
    ["test/a", "valid/a"],
    ["a", "b", "Test"],
    ["a/train", "a/test", "b/train", "b/test"],
    ["train/a/train", "train/a/holdout", "train/b", "val/a"],
]


@pytest.mark.parametrize(
    ("folders", "expected", "says"),
    [
        (["valid/deep", "invalid"], ("invalid", "valid"), ""),
        (["car", "train"], ("car", "train"), ""),
        (["car", "train", "train/steam"], "missing-split", ""),
        (["train/a", "train/test", "val/a", "val/test"], ("a", "test"), ""),
        (["control", "test"], "splits-as-classes", "list them in preprocess.class_names_file"),
        *((folders, "splits-as-classes", "") for folders in SPLITS_AS_CLASSES),
        (["data/a", "data/b"], "too-few-classes", "/data are the classes, name that one"),
        *((["a", "b", f"{name}/a", f"{name}/b"], "nested-classes", "") for name in ("images", "valid")),
        # A class may have one name of another within it.
        *((["a", "b", f"{name}/b"], tuple(sorted(["a", "b", name])), "") for name in ("images", "valid")),
    ],
)
def test_folders_that_are_classes_and_such_that_are_none(
    tmp_path: Path, folders: list[str], expected: str | tuple[str, ...], says: str
) -> None:
    root = write_tree(tmp_path / "images", dict.fromkeys(folders, 2))
    if isinstance(expected, str):
        with refuses(expected, "data" if expected in ("splits-as-classes", "nested-classes") else None, says=says):
            find(root)
    else:
        assert find(root).classes == expected


@pytest.mark.parametrize("classes", [("test", "control"), ("Cardigan", "cardigan")])
def test_a_given_list_of_classes_may_name_a_test_split_and_such_as_differ_in_case_alone(
    tmp_path: Path, classes: tuple[str, str]
) -> None:
    root = write_tree(tmp_path / "images", dict.fromkeys(classes, 2))
    (tmp_path / "names.txt").write_text("\n".join(classes))
    assert find(root, class_names_file=str(tmp_path / "names.txt")).classes == classes


@pytest.mark.parametrize("val", ["val", "validation", "valid"])
def test_how_the_validation_folder_may_be_called(tmp_path: Path, val: str) -> None:
    root = write_tree(tmp_path / "images", {"train/a": 2, "train/b": 2, f"{val}/a": 1, f"{val}/b": 1})
    source = find(root)
    assert source.classes == ("a", "b")
    assert [sample.path for sample in source.splits["val"]] == [f"{val}/a/000.png", f"{val}/b/000.png"]
    write_tree(root, {f"{'valid' if val == 'val' else 'val'}/a": 1})
    with refuses("two-validation-folders"):
        find(root)


@pytest.mark.parametrize("names", ["Train Val", "training validation", "TRAIN valid", "Training Validation Testing"])
def test_splits_in_any_case(tmp_path: Path, names: str) -> None:
    root = write_tree(tmp_path / "images", {f"{split}/{name}": 2 for split in names.split() for name in "ab"})
    source = find(root)
    assert source.classes == ("a", "b")
    train, val = names.split()[:2]
    assert paths(source) == sorted(f"{split}/{name}/00{n}.png" for split in (train, val) for name in "ab" for n in "01")
    assert {sample.path.partition("/")[0] for sample in source.splits["val"]} == {val}
    write_tree(root, {"train" if train != "train" else "Train": 1})
    with refuses("two-training-folders"):
        find(root)


@pytest.mark.parametrize("twins", [("Cat", "cat"), ("cat", "cat "), ("\u00c4pfel", "A\u0308pfel")])
def test_names_of_classes_that_people_read_as_one(tmp_path: Path, twins: tuple[str, str]) -> None:
    root = write_tree(tmp_path / "images", dict.fromkeys([*twins, "A", "a"], 2))
    table = tmp_path / "images" / "t.csv"
    table.write_text("path,label\n" + "".join(f"{name}/00{n}.png,{name}\n" for name in twins for n in (0, 1)))
    for data in (root, table) if " " not in twins[1] else (root,):  # cells of tables are stripped
        with refuses("similar-class-names", "preprocess.class_names_file"):
            find(data)
    shutil.rmtree(root / twins[1])
    assert find(root).classes == tuple(sorted([twins[0], "A", "a"]))  # letters are written by people


def test_a_folder_of_other_files_is_no_class(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "images", {"images/pie": 4, "images/cake": 4, "meta": 0})
    for name in ("train.txt", "test.txt"):
        (root / "meta" / name).write_text("pie/000\n")
    with refuses("too-few-images", says="meta holds no file that is named as an image"):
        find(root)


def test_images_of_a_class_may_have_names_that_promise_none(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "images", {"cat": 2, "dog": 3})
    for file, suffix in zip(sorted((root / "dog").iterdir()), (".jfif", "", ".db"), strict=True):
        file.rename(file.with_suffix(suffix))
    (root / "dog" / "000.db").write_bytes(b"thumbnails")
    assert find(root).classes == ("cat", "dog")


def test_a_class_of_links_out_of_the_tree_alone(tmp_path: Path) -> None:
    outside = write_tree(tmp_path / "outside", {"c": 2})
    root = write_tree(tmp_path / "images", {"a": 2, "c": 0})
    for file in (outside / "c").iterdir():
        (root / "c" / file.name).symlink_to(file)
    with refuses("link-out", says="such as c/000.png"):
        find(root)


def test_file_uris_name_what_path_as_uri_writes(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "a b%20#ü?", {"a": 2, "b": 2})
    uri = root.as_uri()
    assert "%20" in uri
    table = "".join(f"{path.as_uri()},{path.parent.name}\n" for path in root.rglob("*.png"))
    (root / "t.csv").write_text(f"path,label\n{table}")
    for form in (uri, uri.replace("///", "/"), uri.replace("///", "//localhost/"), f"{uri}/t.csv"):
        check_data_folder(form)
        assert find(form) == find(root)
    assert local_path(str(root)) == local_path(uri) == root
    assert local_path("file:notes") == Path.cwd() / "file:notes"


WNIDS = ("n02012849", "n01440764", "n03126707")
SYNSETS = "n01440764 tench, Tinca tinca\nn02012849 crane\nn03126707 crane\n"
NAMES = {"n01440764": "tench", "n02012849": "crane (n02012849)", "n03126707": "crane (n03126707)"}


def imagenet(root: Path, base: str, *, flat: bool) -> Path:
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
def test_imagenet(tmp_path: Path, base: str, flat: bool) -> None:
    root = imagenet(tmp_path / "imagenet", base, flat=flat)
    source = find(root)
    assert source.classes == tuple(NAMES.values())
    train, val = ({path: name for path, (name, _) in found.items()} for found in contents(source).values())
    assert len(train) == (6 if flat else 9)
    assert all(NAMES[path.split("/")[-2]] == name for path, name in train.items())
    if flat:
        folder = f"{base}/val" if base else "val"
        assert val == {f"{folder}/ILSVRC2012_val_{n:08d}.JPEG": NAMES[wnid] for n, wnid in enumerate(WNIDS)}
    else:
        assert {path.split("/")[-2]: name for path, name in val.items()} == NAMES


def test_a_flat_val_needs_its_labels(tmp_path: Path) -> None:
    root = imagenet(tmp_path / "imagenet", "", flat=True)
    (root / "val" / "extra.JPEG").write_bytes(b"?")
    assert reasons(find(root)) == {"val/extra.JPEG": "LOC_val_solution.csv does not name it"}
    solution = root / "LOC_val_solution.csv"
    table = solution.read_text()
    for text, code in (
        (table.replace(",n01440764", ",n99999999"), "unknown-classes"),
        (table.replace("ImageId", "Id"), "invalid-solution-table"),
        ("ImageId,PredictionString\nx,\n", "invalid-solution-table"),
    ):
        solution.write_text(text)
        with refuses(code):
            find(root)
    solution.unlink()
    with refuses("no-validation-labels"):
        find(root)


def test_a_synset_map_gives_names_and_order_of_the_classes(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "images", {"n03126707": 4, "n01440764": 4})
    (root / "synset_words.txt").write_text(SYNSETS)
    assert find(root).classes == ("tench", "crane (n03126707)")  # in the root: of the folders that are there
    (root / "dog").mkdir()
    with refuses("unknown-classes"):
        find(root)
    root = write_tree(tmp_path / "other", {"n03126707": 4, "tench": 4})
    (tmp_path / "map.txt").write_text(SYNSETS)
    source = find(root, class_names_file=str(tmp_path / "map.txt"))  # as class_names_file: all
    assert source.classes == tuple(NAMES.values())
    names = {path.split("/")[0]: name for path, (name, _) in contents(source)["train"].items()}
    assert names == {"n03126707": NAMES["n03126707"], "tench": "tench"}
