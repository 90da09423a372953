"""Boxes from COCO, Pascal VOC and YOLO: the same objects from each, and what becomes of bad input."""

import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from components.preprocess.sources import folders
from components.preprocess.sources.json_stream import json_arrays
from tests.conftest import Dataset, preprocess
from tests.steps import step
from tests.unit.refusals import refuses

from .builders import archive, every_path, find, gradient, listing, peak_below, rejected

WIDTH, HEIGHT = 64, 48
CLASSES = ("cat", "dog")
Box = tuple[float, float, float, float, int, int]
OBJECTS: dict[str, list[Box]] = {
    "a": [(4, 8, 20, 40, 0, 0), (30, 2, 60, 30, 1, 0)],
    "b": [],
    "c": [(0, 0, 64, 48, 1, 0)],
    "d": [(10, 10, 12, 14, 0, 0)],
}


def write_images(folder: Path, names: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        gradient(HEIGHT, WIDTH, shift=sum(name.encode()) % 97).save(folder / f"{name}.png")


def coco(names: Sequence[str]) -> dict[str, Any]:
    annotations = [
        {"image_id": names.index(name), "category_id": 10 + kind, "bbox": [x, y, x2 - x, y2 - y], "iscrowd": crowd}
        for name in names
        for x, y, x2, y2, kind, crowd in OBJECTS[name]
    ]
    return {
        "info": {"year": 2024, "nested": [1, {"a": []}]},
        "annotations": [{"id": number, **each} for number, each in enumerate(annotations)],
        "images": [
            {"id": number, "file_name": f"{name}.png", "width": WIDTH, "height": HEIGHT}
            for number, name in enumerate(names)
        ],
        "categories": [{"id": 11, "name": "dog"}, {"id": 10, "name": "cat"}],
    }


def write_coco(root: Path) -> None:
    for split, names in (("train", "abc"), ("val", "d")):
        write_images(root / split / "images", names)
        (root / split / "annotations.json").write_text(json.dumps(coco(names)), encoding="utf-8")


def write_coco_as_published(root: Path) -> None:
    (root / "annotations").mkdir(parents=True)
    for split, names in (("train2017", "abc"), ("val2017", "d")):
        write_images(root / split, names)
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(coco(names)), encoding="utf-8")
        captions = {"images": [], "annotations": [{"id": 1, "image_id": 0, "caption": "a cat"}]}
        (root / "annotations" / f"captions_{split}.json").write_text(json.dumps(captions), encoding="utf-8")


def write_voc(root: Path) -> None:
    write_images(root / "JPEGImages", "abcd")
    (root / "Annotations").mkdir()
    (root / "ImageSets" / "Main").mkdir(parents=True)
    for split, names in (("train", "abc"), ("val", "d")):
        (root / "ImageSets" / "Main" / f"{split}.txt").write_text("\n".join(names), encoding="utf-8")
    for name, boxes in OBJECTS.items():
        objects = "".join(
            f"<object><name>{CLASSES[kind]}</name><difficult>{ignored}</difficult><bndbox><xmin>{x1 + 1}</xmin>"
            f"<ymin>{y1 + 1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>"
            for x1, y1, x2, y2, kind, ignored in boxes
        )
        size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size>"
        text = f"<annotation><filename>{name}.png</filename>{size}{objects}</annotation>"
        (root / "Annotations" / f"{name}.xml").write_text(text, encoding="utf-8")


def write_yolo(root: Path) -> None:
    for split, names in (("train", "abc"), ("val", "d")):
        write_images(root / "images" / split, names)
        (root / "labels" / split).mkdir(parents=True)
        for name in names:
            lines = [
                f"{kind} {(x1 + x2) / 2 / WIDTH} {(y1 + y2) / 2 / HEIGHT} {(x2 - x1) / WIDTH} {(y2 - y1) / HEIGHT}"
                for x1, y1, x2, y2, kind, _ in OBJECTS[name]
            ]
            if lines:  # an image without objects may have no file
                (root / "labels" / split / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
    (root / "data.yaml").write_text("train: images/train\nnames: {0: cat, 1: dog}\n", encoding="utf-8")


def packed(data: Path, output: Path, **settings: Any) -> Dataset:
    return preprocess(data, output, **{"task": "detection", "near_duplicates": "keep", **settings})


def objects(dataset: Dataset) -> dict[str, list[list[float]]]:
    return {Path(one["path"]).stem: one["objects"] for split in ("train", "val") for one in listing(dataset, split)}


def problems(dataset: Dataset) -> list[tuple[str, str, bool]]:
    lines = dataset.file("rejected_annotations.jsonl").read_text(encoding="utf-8").splitlines()
    return [(Path(e["path"]).stem, e["reason"].partition(":")[0], e["kept"]) for e in map(json.loads, lines)]


@pytest.mark.parametrize("write", [write_coco, write_coco_as_published, write_voc, write_yolo])
def test_all_formats_hold_the_same_objects(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / "data")
    dataset = packed(tmp_path / "data", tmp_path / "x")
    manifest = dataset.manifest
    assert (manifest.task, manifest.classes, manifest.num_rejected) == ("detection", CLASSES, 0)
    assert manifest.splits["train"].class_counts == (1, 2)
    assert manifest.splits["val"].class_counts == (1, 0)
    found = objects(dataset)
    assert found.keys() == OBJECTS.keys()
    for name, boxes in OBJECTS.items():
        np.testing.assert_allclose(np.reshape(found[name], (-1, 6)), np.reshape(boxes, (-1, 6)), atol=0.01)
    assert not (dataset.path / "rejected_annotations.jsonl").exists()


@pytest.mark.parametrize("write", [write_coco, write_coco_as_published, write_voc, write_yolo])
def test_folders_of_boxes_are_no_classes(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / "data")
    with refuses("other-task", "data", says="enginery run detection"):
        preprocess(tmp_path / "data", tmp_path / "x")
    (tmp_path / "classes" / "labels").mkdir(parents=True)
    write_images(tmp_path / "classes" / "images", "abcd")
    write_images(tmp_path / "classes" / "labels", "efgh")  # a class of this name
    assert find(tmp_path / "classes").classes == ("images", "labels")


@pytest.mark.parametrize("name", ["data.zip", "data.tar.gz", "data.tar"])
def test_an_archive_holds_what_the_folder_does(name: str, tmp_path: Path) -> None:
    write_coco(tmp_path / "data")
    file = archive(tmp_path / name, tmp_path / "data", "top/")
    assert objects(packed(file, tmp_path / "x")) == objects(packed(tmp_path / "data", tmp_path / "y"))


def test_annotations_too_large_to_be_read_from_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_coco(tmp_path / "data")
    file = archive(tmp_path / "data.tar", tmp_path / "data", "top/")
    monkeypatch.setattr(folders, "MAX_FILE_BYTES", 100)
    with refuses("annotations-too-large", "data"):
        packed(file, tmp_path / "x")
    packed(tmp_path / "data", tmp_path / "y")


def test_labels_beside_the_image_are_float32_rows_and_scale_with_it(tmp_path: Path) -> None:
    import tarfile

    write_coco(tmp_path / "data")
    dataset = packed(tmp_path / "data", tmp_path / "x", max_short_side=24)
    with tarfile.open(dataset.file("val-000000.tar")) as archive:
        (member,) = [one for one in archive if one.name.endswith(".boxes")]
        row = np.frombuffer(archive.extractfile(member).read(), "<f4")
    np.testing.assert_allclose(row, [5, 5, 6, 7, 0, 0], atol=1e-6)
    rows = {}
    for shard in dataset.manifest.splits["train"].shards:
        with tarfile.open(dataset.file(shard)) as archive:
            for one in archive:
                if one.name.endswith(".boxes"):
                    rows[one.name] = np.frombuffer(archive.extractfile(one).read(), "<f4").reshape(-1, 6)
    assert sorted(len(each) for each in rows.values()) == [1, 1, 2]
    assert any((each[:, 4] == -1).all() for each in rows.values())  # the image without objects


def test_without_splits_images_are_held_out_and_another_order_of_classes_is_kept(tmp_path: Path) -> None:
    write_images(tmp_path / "data", "abcd")
    (tmp_path / "data" / "_annotations.coco.json").write_text(json.dumps(coco("abcd")), encoding="utf-8")
    names = tmp_path / "names.txt"
    names.write_text("dog\ncat\n", encoding="utf-8")
    dataset = packed(tmp_path / "data", tmp_path / "x", val_fraction=0.5, class_names_file=str(names))
    assert dataset.manifest.classes == ("dog", "cat")
    assert {split: info.num_images for split, info in dataset.manifest.splits.items()} == {"train": 2, "val": 2}
    assert [int(row[4]) for row in objects(dataset)["a"]] == [1, 0]
    (tmp_path / "data" / "_annotations.coco.json").write_text(json.dumps(coco("a")), encoding="utf-8")
    for name in "bcd":
        (tmp_path / "data" / f"{name}.png").unlink()
    with refuses("too-few-images") as caught:
        packed(tmp_path / "data", tmp_path / "y")
    assert "class" not in str(caught.value)


@pytest.mark.parametrize(
    ("images", "label"),
    [
        ("images", "labels/{}.txt=0 0.5 0.5 0.5 0.5"),
        (
            "JPEGImages",
            "Annotations/{}.xml=<annotation><object><name>cat</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax>"
            "<ymax>9</ymax></bndbox></object></annotation>",
        ),
    ],
)
def test_splits_are_folders_and_no_words_of_images_names(images: str, label: str, tmp_path: Path) -> None:
    names = {"test_a", "val-b", "train_c", "bus"}
    write_images(tmp_path / "data" / images, sorted(names))
    for name in names:
        path, _, text = label.format(name).partition("=")
        (tmp_path / "data" / path).parent.mkdir(exist_ok=True)
        (tmp_path / "data" / path).write_text(text, encoding="utf-8")
    dataset = packed(tmp_path / "data", tmp_path / "x", val_fraction=0.5)
    assert {name: len(boxes) for name, boxes in objects(dataset).items()} == dict.fromkeys(names, 1)
    assert dataset.manifest.splits["val"].num_images == 2


def test_images_that_are_not_found_are_told_apart(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_images(data / "one", "ab")
    write_images(data / "two", "b")
    gradient(HEIGHT, WIDTH).save(data / "one" / "c.gif")
    content = coco("abcd")
    content["images"][2]["file_name"] = "c.gif"
    (data / "annotations.json").write_text(json.dumps(content), encoding="utf-8")
    with refuses("too-few-images", says="1 image that can be used, and needs 2 ("):
        packed(data, tmp_path / "x")
    gradient(HEIGHT, WIDTH, shift=9).save(data / "d.png")
    reasons = rejected(packed(data, tmp_path / "y", max_bad_fraction=0.9).path)
    assert {name: reason.partition("it, and ")[2] for name, reason in reasons.items() if "/" not in name} == {
        "b.png": "several folders hold an image of this name; name its folder, too",
        "c.gif": "it is of a format that is not read; convert it to JPEG or PNG",
    }


def test_lists_of_each_of_several_folders_of_voc_and_as_editors_write_them(tmp_path: Path) -> None:
    for year, names in (("VOC2007", "abcd"), ("VOC2012", "aefd")):
        write_voc(root := tmp_path / "data" / year)
        for old, new in zip("abcd", names, strict=True):
            own = f"{year} {new}"  # with a space
            (root / "JPEGImages" / f"{old}.png").rename(root / "JPEGImages" / f"{own}.png")
            xml = root / "Annotations" / f"{old}.xml"
            text = xml.read_text(encoding="utf-8").replace(f"{old}.png", f"{own}.png")
            xml.with_name(f"{own}.xml").write_text(text, encoding="utf-8")
            xml.unlink()
        for split, part in (("train", names[:3]), ("val", names[3])):
            lines = "".join(f"{year} {name}  {sign}\r\n" for name, sign in zip(part, (1, -1, 0), strict=False))
            (root / "ImageSets" / "Main" / f"{split}.txt").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    with (tmp_path / "data" / "VOC2012" / "ImageSets" / "Main" / "val.txt").open("a", encoding="utf-8") as file:
        file.write("VOC2007 b\n")
    dataset = packed(tmp_path / "data", tmp_path / "x", max_bad_fraction=0.2, on_leak="warn")
    stems = {split: sorted(Path(entry["path"]).stem for entry in listing(dataset, split)) for split in ("train", "val")}
    train = ["VOC2007 a", "VOC2007 b", "VOC2007 c", "VOC2012 a", "VOC2012 e", "VOC2012 f"]
    assert stems == {"train": train, "val": ["VOC2007 d", "VOC2012 d"]}
    why = {"VOC2007 b": "VOC2012/ImageSets/Main/val.txt names it, and it has no XML file"}
    assert rejected(dataset.path) == why


@pytest.mark.parametrize(("stem", "line"), [("{}", "JPEGImages/{}.png\n"), ("{} 1", "{} 1\n")])
def test_lists_of_voc_may_name_files_and_a_number_of_a_name_is_no_flag(stem: str, line: str, tmp_path: Path) -> None:
    write_voc(root := tmp_path / "data")
    for old in "abcd":
        (root / "JPEGImages" / f"{old}.png").rename(root / "JPEGImages" / f"{stem.format(old)}.png")
        (root / "Annotations" / f"{old}.xml").rename(root / "Annotations" / f"{stem.format(old)}.xml")
    for split, part in (("train", "abc"), ("val", "d")):
        (root / "ImageSets" / "Main" / f"{split}.txt").write_text("".join(map(line.format, part)))
    dataset = packed(root, tmp_path / "x")
    assert [len(listing(dataset, split)) for split in ("train", "val")] == [3, 1]


def test_images_of_a_test_split_alone_are_none_to_train_on(tmp_path: Path) -> None:
    write_images(tmp_path / "data" / "test", "ab")
    (tmp_path / "data" / "test" / "annotations.json").write_text(json.dumps(coco("ab")), encoding="utf-8")
    with refuses("too-few-images", says="test/"):
        packed(tmp_path / "data", tmp_path / "x")


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_bad_annotations_of_coco_are_counted_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    write_coco(tmp_path / "data")
    content = coco("abc")
    bad: list[dict[str, Any]] = [
        {"id": 90, "image_id": 1, "category_id": 10, "bbox": [100, 100, 5, 5]},
        {"id": 91, "image_id": 1, "category_id": 10, "bbox": [5, 5, 0, 5]},
        {"id": 92, "image_id": 1, "category_id": 99, "bbox": [5, 5, 5, 5]},
        {"id": 93, "image_id": 1, "category_id": 10, "bbox": [5, 5, float("nan"), 5]},
        {"id": 94, "image_id": 1, "category_id": 10},
        *({"id": 100 + n, "image_id": 77 + n // 2, "category_id": 10, "bbox": [5, 5, 5, 5]} for n in (0, 2, 4, 5)),
        {"id": 96, "image_id": 1, "category_id": 10, "bbox": [60, 40, 20, 4]},
        {"id": 97, "image_id": 1, "category_id": 11, "bbox": [1, 1, 9, 9]},
        {"id": 97, "image_id": 1, "category_id": 11, "bbox": [1, 1, 9, 9]},
        {"id": 97, "image_id": 1, "category_id": 11, "bbox": [2, 2, 9, 9]},
        {"id": 97, "image_id": 1, "category_id": 11, "bbox": [2, 2, 9, 9]},
        {"id": 98, "image_id": 1, "category_id": 10, "bbox": [3, 3, 9, 9], "iscrowd": 1},
    ]
    content["annotations"] += [{"iscrowd": "0", **each} for each in bad]
    for number, name in ((50, "missing.png"), (51, "small.png"), (52, "one.png"), (52, "two.png")):
        content["images"].append({"id": number, "file_name": name, "width": WIDTH, "height": HEIGHT})
    folder = tmp_path / "data" / "train" / "images"
    gradient(WIDTH, HEIGHT).save(folder / "small.png")
    write_images(folder, ["one", "two", "unnamed"])
    (tmp_path / "data" / "train" / "annotations.json").write_text(json.dumps(content), encoding="utf-8")

    dataset = packed(tmp_path / "data", tmp_path / "x", max_bad_fraction=0.9, on_leak="warn")
    assert sorted(problems(dataset)) == sorted(
        [
            ("b", "a box outside of the image", False),
            ("b", "a box of no size", False),
            ("b", "unknown class", False),
            ("b", "no box of four numbers", False),
            ("b", "no box of four numbers", False),
            ("b", "a box partly outside of the image, cut at its edge", True),
            ("b", "listed twice", False),
            ("b", "listed twice", False),
            ("b", "its id is that of another annotation; both are kept", True),
        ]
    )
    assert dataset.manifest.num_rejected_annotations == 7
    assert objects(dataset)["b"] == [
        [60, 40, 64, 44, 0, 0],
        [1, 1, 10, 10, 1, 0],
        [2, 2, 11, 11, 1, 0],
        [3, 3, 12, 12, 0, 1],
    ]
    assert objects(dataset)["a"] == [list(box) for box in OBJECTS["a"]]
    reasons = {Path(path).name: reason for path, reason in rejected(dataset.path).items()}
    assert reasons["small.png"].endswith(f"{HEIGHT}x{WIDTH}; they are swapped, or do not heed its EXIF orientation")
    assert {name: reason.partition(":")[0] for name, reason in reasons.items()} == {
        "missing.png": "train/annotations.json names it, and it is not there",
        "small.png": "annotated at another size",
        "one.png": "its id is that of another image, too",
        "two.png": "its id is that of another image, too",
        "unnamed.png": "no annotation file names it",
        # the log cuts reasons at a colon
        "annotations.json: image 77": "4 annotations of 3 images that the file does not list",
    }
    card = dataset.file("data_card.html").read_text(encoding="utf-8")
    assert "Something is wrong with 9 of" in card
    for name in ("one", "two", "unnamed", "small"):
        (folder / f"{name}.png").unlink()
    content["images"] = content["images"][:3]
    content["annotations"] = [each for each in content["annotations"] if each["image_id"] < 77]
    (tmp_path / "data" / "train" / "annotations.json").write_text(json.dumps(content), encoding="utf-8")
    with refuses("unusable-annotations", "preprocess.max_bad_fraction"):
        packed(tmp_path / "data", tmp_path / "many", max_bad_fraction=0.3)
    with refuses("unusable-annotations", "preprocess.on_bad"):
        packed(tmp_path / "data", tmp_path / "strict", on_bad="fail", max_bad_fraction=0.9)


def test_bad_files_of_voc_and_lines_of_yolo_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_voc(voc := tmp_path / "voc")
    shutil.rmtree(voc / "ImageSets")
    write_images(voc / "JPEGImages", "efg")
    write_images(voc / "test", "e")
    (voc / "Annotations" / "g.xml").touch()
    (voc / "Annotations" / "h.xml").write_text('<annotation xmlns="x"/>', encoding="utf-8")
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaa">]><annotation><filename>a.png</filename></annotation>'
    (voc / "Annotations" / "a.xml").write_text(bomb, encoding="utf-8")
    (voc / "Annotations" / "e.xml").write_text("<annotation><filename>e.png</file", encoding="utf-8")
    (voc / "Annotations" / "ä.xml").write_text("<annotation>ä</annotation>", encoding="latin-1")
    (voc / "JPEGImages" / "c.png").unlink()
    text = (voc / "Annotations" / "d.xml").read_text(encoding="utf-8")
    twice = text[text.index("<object>") : text.index("</annotation>")] * 2
    (voc / "Annotations" / "d.xml").write_text(f"<annotation>{twice}</annotation>", encoding="utf-8")
    found = packed(voc, tmp_path / "x", max_bad_fraction=0.9)
    assert "not used: 1, such as test/e.png" in capsys.readouterr().err  # images of bad files are of no test split
    why = rejected(found.path)
    assert why.pop("Annotations/g.xml") == "no annotations of Pascal VOC: empty"
    assert "its uppermost element is '{x}annotation'" in why.pop("Annotations/h.xml")
    assert why.pop("Annotations/a.xml") == "no annotations of Pascal VOC: it declares entities: remove its DOCTYPE"
    assert why.pop("Annotations/ä.xml").startswith("no annotations of Pascal VOC: not UTF-8 at byte 12: save it")
    assert {path: reason.partition(":")[0] for path, reason in why.items()} == {
        "Annotations/e.xml": "no annotations of Pascal VOC",  # and e.png is not left out once more
        "JPEGImages/f.png": "no XML file names it",
        "c.png": "Annotations/c.xml names it, and it is not there",
    }
    assert objects(found) == {"b": [], "d": [list(box) for box in OBJECTS["d"]]}
    assert problems(found) == [("d", "listed twice", False)]

    write_yolo(tmp_path / "yolo")
    lines = "0 0.5 0.5 0.25 0.5\n7 0.5 0.5 0.1 0.1\n1 0.5 0.5\n1 nan 0.5 0.1 0.1\n1 0.25 0.25 0.75 0.25 0.75 0.75\n"
    lines += "1 32 24 16 10\n0 0.50 0.5 0.25 0.5\n"
    (tmp_path / "yolo" / "labels" / "train" / "b.txt").write_text(lines, encoding="utf-8")
    # in a folder of labels, in one without images, beside images
    gone = ("labels/train/gone.txt", "labels/valid/d.txt", "images/train/gone.txt")
    (tmp_path / "yolo" / "labels" / "train" / "a.txt").rename(tmp_path / "yolo" / "images" / "train" / "a.txt")
    (tmp_path / "yolo" / "labels" / "val").rename(tmp_path / "yolo" / "labels" / "valid")
    for name in (gone[0], gone[2]):
        (tmp_path / "yolo" / name).write_text("0 0.5 0.5 1 1\n", encoding="utf-8")
    found = packed(tmp_path / "yolo", tmp_path / "y", max_bad_fraction=0.9)
    assert objects(found)["b"] == [[24, 12, 40, 36, 0, 0], [16, 12, 48, 36, 1, 0]]
    assert [reason for _, reason, _ in problems(found)] == [
        "no class and box of five numbers",
        "no class and box of five numbers",
        "in pixels, and YOLO asks for shares of the image's sides",
        "listed twice",
        "unknown class",
    ]
    assert rejected(found.path) == dict.fromkeys(gone, "labels of an image that is not there")


def test_whole_numbers_that_a_table_wrote_as_floats_are_ids_and_sides(tmp_path: Path) -> None:
    write_coco(tmp_path / "data")
    integers = {"id", "image_id", "category_id", "width", "height"}

    def as_floats(entry: dict[str, Any]) -> dict[str, Any]:
        return {key: float(own) if key in integers else own for key, own in entry.items()}

    for split in ("train", "val"):
        file = tmp_path / "data" / split / "annotations.json"
        content = json.loads(file.read_text(), object_hook=as_floats)
        content["images"][0]["width"] += split == "train"
        file.write_text(json.dumps(content), encoding="utf-8")
    dataset = packed(tmp_path / "data", tmp_path / "x", max_bad_fraction=0.9)
    assert objects(dataset) == {name: [list(box) for box in boxes] for name, boxes in OBJECTS.items() if name != "a"}
    assert [reason.partition(":")[0] for reason in rejected(dataset.path).values()] == ["annotated at another size"]
    assert dataset.manifest.classes == CLASSES


def test_ids_of_any_kind_and_twice_in_several_images(tmp_path: Path) -> None:
    write_coco(tmp_path / "data")
    content = coco("abc")
    names = {0: "first", 1: 1 << 80, 2: -5}  # ids of images
    for each in content["images"]:
        each["id"] = names[each["id"]]
    content["annotations"] = [
        {"id": "x", "image_id": "first", "category_id": 10, "bbox": [1, 1, 5, 5]},
        {"id": "x", "image_id": -5, "category_id": 10, "bbox": [1, 1, 5, 5]},  # of another image
        {"id": 1 << 70, "image_id": 1 << 80, "category_id": 11, "bbox": [2, 2, 5, 5]},
        {"image_id": -5, "category_id": 11, "bbox": [3, 3, 5, 5]},
        {"image_id": -5, "category_id": 11, "bbox": [3, 3, 5, 5]},  # without ids none is known to be listed twice
        {"id": 4, "image_id": [1], "category_id": 11, "bbox": [3, 3, 5, 5]},
    ]
    (tmp_path / "data" / "train" / "annotations.json").write_text(json.dumps(content), encoding="utf-8")
    dataset = packed(tmp_path / "data", tmp_path / "x", max_bad_fraction=0.9)
    assert {name: [row[0] for row in rows] for name, rows in objects(dataset).items() if name != "d"} == {
        "a": [1],
        "b": [2],
        "c": [1, 3, 3],
    }
    assert problems(dataset) == [("c", "its id is that of another annotation; both are kept", True)]
    assert rejected(dataset.path) == {
        "train/annotations.json: image None": "1 annotation of 1 image that the file does not list"
    }


@pytest.mark.parametrize("name", ["aa.json", "zz.json"])
def test_images_that_share_an_id_in_one_file_are_not_lost_where_another_annotates_them(name: str, tmp_path) -> None:
    write_coco(tmp_path / "data")
    content = {**coco("abc"), "annotations": []}
    for entry in content["images"]:
        entry["id"] = 5
    (tmp_path / "data" / "train" / name).write_text(json.dumps(content), encoding="utf-8")
    (tmp_path / "data" / "train" / "log.json").write_text('{"step": 1}\n{"step": 2}\n', encoding="utf-8")
    dataset = packed(tmp_path / "data", tmp_path / "x", max_bad_fraction=0.9)
    assert {name: len(rows) for name, rows in objects(dataset).items()} == {"a": 2, "b": 0, "c": 1, "d": 1}
    assert rejected(dataset.path) == {
        f"train/{name}: {each}.png": f"its id is that of another image, too: 5 in train/{name}" for each in "abc"
    }
    assert dataset.manifest.num_rejected == 3


@pytest.mark.parametrize("format_name", ["coco", "voc"])
def test_an_image_that_is_missing_is_not_the_one_of_its_name_in_another_split(format_name: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    for split in ("train", "val"):
        if format_name == "voc":
            write_voc(data / split)
            shutil.rmtree(data / split / "ImageSets")
        else:
            write_images(data / split / "images", "abc")
            (data / split / "annotations.json").write_text(json.dumps(coco("abc")), encoding="utf-8")
    next((data / "train").rglob("c.png")).unlink()
    next((data / "val").rglob("b.png")).unlink()
    dataset = packed(data, tmp_path / "x", max_bad_fraction=0.9, on_leak="warn")
    assert {reason.partition("/")[0] for reason in rejected(dataset.path).values()} == {"train", "val"}
    for split in ("train", "val"):
        assert {entry["path"].partition("/")[0] for entry in listing(dataset, split)} == {split}
    assert objects(dataset)["c"]


def test_images_of_one_name_in_two_folders_keep_their_own_annotations(tmp_path: Path) -> None:
    content = coco("abc")
    for entry, name in zip(content["images"], ["1/x.png", "2/x.png", "2/y.png"], strict=True):
        entry["file_name"] = name
    for split in ("train", "val"):
        for number, names in ((1, "xy"), (2, "xy")):
            write_images(tmp_path / "data" / split / str(number), names)
        (tmp_path / "data" / split / "1" / "x.png").unlink()
        (tmp_path / "data" / split / "annotations.json").write_text(json.dumps(content), encoding="utf-8")
    dataset = packed(tmp_path / "data", tmp_path / "x", max_bad_fraction=0.9, on_leak="warn")
    assert len(objects(dataset)["y"]) == len(OBJECTS["c"])
    assert objects(dataset)["x"] == []  # as "b", and not those of the image that is missing
    reasons = rejected(dataset.path)
    assert reasons["1/x.png"] == "train/annotations.json names it, and it is not there"
    assert reasons["val/annotations.json: 1/x.png"] == "val/annotations.json names it, and it is not there"
    nested = tmp_path / "nested" / "u\u0308"
    write_images(nested / "images", "ad")
    write_images(nested / "images" / "deeper", "a")
    text = json.dumps(coco("abd")).replace('"b.png"', '"deeper/a.png"')
    (nested / "annotations.json").write_text(text, encoding="utf-8")
    assert packed(tmp_path / "nested", tmp_path / "y", on_leak="warn").manifest.num_rejected == 0
    for broken in ("\\ud800", "\\u0000"):
        (nested / "annotations.json").write_text(text.replace('"cat"', f'"{broken}"'), encoding="utf-8")
        with refuses("invalid-class-name"):
            packed(tmp_path / "nested", tmp_path / broken[1:])


@pytest.mark.parametrize("crowds", [False, True])
def test_a_split_without_any_box_or_of_crowds_alone_is_packed_and_named(crowds: bool, tmp_path: Path) -> None:
    write_coco(tmp_path / "data")
    content = coco("abc")
    content["annotations"] = [{**each, "iscrowd": 1} for each in content["annotations"] if crowds]
    (tmp_path / "data" / "train" / "annotations.json").write_text(json.dumps(content), encoding="utf-8")
    dataset = packed(tmp_path / "data", tmp_path / "x")
    assert dataset.manifest.splits["train"].class_counts == (0, 0)
    assert dataset.manifest.num_rejected == 0
    assert [[box[5] for box in objects(dataset)[name]] for name in "abc"] == ([[1, 1], [], [1]] if crowds else [[]] * 3)
    card = dataset.file("data_card.html").read_text(encoding="utf-8")
    assert "the training split has no object of 2 of 2 classes" in card.replace("The training", "the training")
    assert "training objects" in card
    assert "training images</span>" not in card
    with refuses("no-objects", says="Annotate some of its images, or set iscrowd"):
        step("train", tmp_path / "checkpoint", {"architecture": "detection/fcos_small"}, dataset=dataset.path)


def test_images_whose_masks_have_the_same_names_are_found(tmp_path: Path) -> None:
    write_coco(tmp_path / "data")
    for split in ("train", "val"):
        shutil.copytree(tmp_path / "data" / split / "images", tmp_path / "data" / split / "masks")
    assert {path.split("/")[1] for path in every_path(packed(tmp_path / "data", tmp_path / "x"))} == {"images"}


@pytest.mark.parametrize(
    "text",
    [
        '{"images": [{"id": 1, "file_name": "a.png"}',
        '{"images": [1], "annotations": []}',
        '{"images": [{"id": 1}], "annotations": []}',
        '{"images": ' + "[" * 100_000,
        '{"images": [{"id": 1, "file_name": "a.png"} {"id": 2}]}',
        '{"images": [], "annotations": [{"id": null, "image_id": 1}]}',
        '{"images" []}',
        '{"images": [{"id": 1, "file_name": "a.png"}], "annotations": [{"image_id": 1, "bbox": [1, 1, 5, 5]}]}',
        '{"images": [{"id": 1, "file_name": "a.png"}], "annotations": []} {"id": 2}',
        '{"images": [{"id": 1, "file_name": "a.png"}], "annotations": []}}',
        '{"images": [{"id": 1, "file_name": "a.png"}], "annotations": [], "categories": [{"id": 1}]}',
        "",
        " \n",
    ],
)
def test_json_that_is_none_or_not_as_coco_asks(text: str, tmp_path: Path) -> None:
    write_images(tmp_path / "data", "a")
    (tmp_path / "data" / "annotations.json").write_text(text, encoding="utf-8")
    with refuses("damaged-annotations"):
        packed(tmp_path / "data", tmp_path / "x")


def test_without_annotations_or_objects(tmp_path: Path) -> None:
    write_images(tmp_path / "data", "ab")
    cvat = '<annotations><image name="a.png"><box label="cat" xtl="1" ytl="1" xbr="9" ybr="9"/></image></annotations>'
    labelme = '{"imagePath": "a.png", "shapes": [{"label": "cat", "points": [[1, 1], [9, 9]]}]}'
    label_studio = '[{"data": {"image": "a.png"}, "annotations": [{"result": []}]}]'
    for name, text in (  # none of VOC, YOLO or COCO
        ("annotations.txt", cvat),
        ("annotations.xml", cvat),
        ("a.json", labelme),
        ("project.json", label_studio),
    ):
        (tmp_path / "data" / name).write_text(text, encoding="utf-8")
        with refuses("no-annotations", "data", says="export other formats as COCO JSON"):
            packed(tmp_path / "data", tmp_path / "x")
    content = {**coco("ab"), "annotations": [], "categories": []}
    (tmp_path / "data" / "annotations.json").write_text(json.dumps(content), encoding="utf-8")
    with refuses("no-objects"):
        packed(tmp_path / "data", tmp_path / "x")


def test_entries_given_twice_are_one_and_categories_that_objects_have_differ_in_id_and_name(tmp_path: Path) -> None:
    write_images(tmp_path / "data", "abcd")
    content = coco("abcd")
    content["images"].append(content["images"][0])
    content["categories"].append(content["categories"][0])
    content["categories"].insert(0, {"id": 0, "name": "dog", "supercategory": "none"})  # no object's, as Roboflow does
    file = tmp_path / "data" / "_annotations.coco.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    dataset = packed(tmp_path / "data", tmp_path / "x")
    assert dataset.manifest.classes == CLASSES
    assert objects(dataset) == {name: [list(box) for box in boxes] for name, boxes in OBJECTS.items()}
    assert not rejected(dataset.path)
    first, *others = content["annotations"]
    for code, changed in (
        ("other-classes", {"categories": [*content["categories"], {"id": 10, "name": "bird"}]}),
        ("duplicate-class-names", {"annotations": [{**first, "category_id": 0}, *others]}),
    ):
        file.write_text(json.dumps({**content, **changed}), encoding="utf-8")
        with refuses(code):
            packed(tmp_path / "data", tmp_path / code)


def test_without_objects_the_reason_that_files_were_refused_for_is_named(tmp_path: Path) -> None:
    write_voc(tmp_path / "voc")
    for file in (tmp_path / "voc" / "Annotations").iterdir():
        file.write_text('<!DOCTYPE x [<!ENTITY a "aaaa">]><annotation/>', encoding="utf-8")
    with refuses("no-objects", says="it declares entities"):
        packed(tmp_path / "voc", tmp_path / "x")


@pytest.mark.parametrize(("train", "val"), [("train", "val"), ("Training", "Validation"), ("", "val")])
@pytest.mark.parametrize("format_name", ["coco", "voc", "yolo"])
def test_the_folders_of_images_split_them_where_their_annotations_do_not(
    format_name: str, train: str, val: str, tmp_path: Path
) -> None:
    root = tmp_path / "data"
    {"coco": write_coco, "voc": write_voc, "yolo": write_yolo}[format_name](tmp_path / "made")
    images = {path.stem: path for path in (tmp_path / "made").rglob("*.png")}
    labels = {path.stem: path for path in (tmp_path / "made" / "labels").rglob("*.txt")}
    for name, path in images.items():
        folder = Path(val if name in "bd" else train)
        for kind, file in (("images", path), ("labels", labels.get(name))):
            if file is not None:
                (root / kind / folder).mkdir(parents=True, exist_ok=True)
                file.rename(root / kind / folder / file.name)
    if format_name == "coco":
        (root / "annotations.json").write_text(json.dumps(coco("abcd")), encoding="utf-8")
    elif format_name == "voc":
        (tmp_path / "made" / "Annotations").rename(root / "Annotations")
    else:
        (root / "data.yaml").write_text("names: [cat, dog]\n", encoding="utf-8")
    dataset = packed(root, tmp_path / "x")
    assert {Path(one["path"]).stem for one in listing(dataset, "val")} == {"b", "d"}
    assert objects(dataset).keys() == OBJECTS.keys()


def test_images_of_a_test_folder_are_none_of_a_file_that_names_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(tmp_path / "data" / "images" / "train", "ab")
    write_images(tmp_path / "data" / "images" / "testing", "cd")
    (tmp_path / "data" / "instances.json").write_text(json.dumps(coco("abcd")), encoding="utf-8")
    dataset = packed(tmp_path / "data", tmp_path / "x")
    assert objects(dataset).keys() == {"a", "b"}
    assert dataset.manifest.num_rejected == 0
    assert "not used: 2, such as images/testing/c.png" in capsys.readouterr().err


def test_images_of_a_split_without_annotations_are_named_and_masks_are_no_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_coco(tmp_path / "data")
    (tmp_path / "data" / "val" / "annotations.json").unlink()
    write_images(tmp_path / "data" / "train" / "masks", "abc")
    packed(tmp_path / "data", tmp_path / "x")
    assert "not used: 1, such as val/images/d.png" in capsys.readouterr().err


def test_images_that_only_the_file_of_a_test_split_names_are_not_refused(tmp_path: Path) -> None:
    write_images(tmp_path / "data" / "images", "abcd")
    (tmp_path / "data" / "annotations").mkdir()
    for split, names in (("train", "a"), ("val", "b"), ("test", "cd")):
        content = json.dumps(coco(names))
        (tmp_path / "data" / "annotations" / f"instances_{split}.json").write_text(content, encoding="utf-8")
    dataset = packed(tmp_path / "data", tmp_path / "x")
    assert objects(dataset).keys() == {"a", "b"}
    assert dataset.manifest.num_rejected == 0


@pytest.mark.parametrize(
    ("lists", "train", "val", "others"),
    [
        ({"Train": "abc", "Validation": "d"}, "abc", "d", ""),  # as CVAT calls them
        ({"train": "abc", "val": "d", "trainval": "abcd", "cat_val": "a"}, "abc", "d", ""),
        ({"trainval": "ab", "test": "cd"}, None, None, "cd"),
        ({"train": "ab", "val": "c", "test": "d"}, "ab", "c", "d"),
    ],
)
def test_lists_of_voc_by_any_of_their_names(
    lists: dict[str, str], train: str | None, val: str | None, others: str, tmp_path: Path
) -> None:
    write_voc(tmp_path / "data")
    folder = tmp_path / "data" / "ImageSets" / "Main"
    for file in folder.iterdir():
        file.unlink()
    for name, listed in lists.items():
        (folder / f"{name}.txt").write_text("\n".join(listed), encoding="utf-8")
    dataset = packed(tmp_path / "data", tmp_path / "x", max_bad_fraction=0.9)
    found = {split: {Path(one["path"]).stem for one in listing(dataset, split)} for split in ("train", "val")}
    assert train is None or found == {"train": set(train), "val": set(val or "")}
    assert set.union(*found.values()) == set("abcd") - set(others)


def test_lists_of_voc_tell_apart_images_of_one_name_in_two_folders(tmp_path: Path) -> None:
    root = tmp_path / "data"
    write_voc(root)
    for old, new in zip("abcd", ("one/a", "one/b", "two/a", "two/b"), strict=True):
        for kind, suffix in (("JPEGImages", "png"), ("Annotations", "xml")):
            (root / kind / new).parent.mkdir(exist_ok=True)
            (root / kind / f"{old}.{suffix}").rename(root / kind / f"{new}.{suffix}")
        file = root / "Annotations" / f"{new}.xml"
        file.write_text(file.read_text(encoding="utf-8").replace(f">{old}.png", f">{new}.png"), encoding="utf-8")
    (root / "ImageSets" / "Main" / "train.txt").write_text("one/b\ntwo/a\n", encoding="utf-8")
    (root / "ImageSets" / "Main" / "val.txt").write_text("one/a\nJPEGImages/two/b.png\ntwo/b\n", encoding="utf-8")
    dataset = packed(root, tmp_path / "x", max_bad_fraction=0.9)
    found = {split: {one["path"][11:-4] for one in listing(dataset, split)} for split in ("train", "val")}
    assert found == {"train": {"one/b", "two/a"}, "val": {"one/a", "two/b"}}


def test_xml_of_renamed_images_that_names_others_is_of_the_image_of_its_own_name(tmp_path: Path) -> None:
    write_voc(tmp_path / "data")
    for name, stale in zip("abcd", "bcda", strict=True):
        file = tmp_path / "data" / "Annotations" / f"{name}.xml"
        file.write_text(file.read_text(encoding="utf-8").replace(f">{name}.png", f">{stale}.png"), encoding="utf-8")
    dataset = packed(tmp_path / "data", tmp_path / "x")
    assert objects(dataset) == {name: [list(box) for box in boxes] for name, boxes in OBJECTS.items()}


def test_names_with_umlauts_of_macos_and_of_others_are_the_same(tmp_path: Path) -> None:
    write_images(tmp_path / "data", ["a\u0308", "b", "o\u0308", "d"])
    content = json.dumps(coco("abcd"), ensure_ascii=False).replace("a.png", "ä.png").replace("c.png", "ö.png")
    (tmp_path / "data" / "annotations.json").write_text(content, encoding="utf-8")
    assert packed(tmp_path / "data", tmp_path / "x").manifest.num_rejected == 0
    write_images(tmp_path / "yolo" / "images", ["a\u0308", "b", "c"])
    (tmp_path / "yolo" / "labels").mkdir()
    for name in ("ä.txt", "b.TXT", "c.txt"):
        (tmp_path / "yolo" / "labels" / name).write_text("0 0.5 0.5 1 1\n", encoding="utf-8")
    (tmp_path / "yolo" / "labels" / "c.TXT").touch()  # not what YOLO reads
    yolo = packed(tmp_path / "yolo", tmp_path / "y")
    assert all(map(len, objects(yolo).values()))
    assert yolo.manifest.num_rejected == 0


def test_categories_that_are_one_to_people_are_refused_unless_both_are_listed(tmp_path: Path) -> None:
    write_coco(tmp_path / "data")
    file = tmp_path / "data" / "val" / "annotations.json"
    file.write_text(file.read_text("utf-8").replace("10", "12").replace('cat"', 'Cat"'), encoding="utf-8")
    with refuses("similar-class-names", "preprocess.class_names_file"):
        packed(tmp_path / "data", tmp_path / "x")
    (tmp_path / "names.txt").write_text("cat\nCat\ndog\n", encoding="utf-8")
    packed(tmp_path / "data", tmp_path / "x", class_names_file=str(tmp_path / "names.txt"))


def test_a_category_of_all_others_is_no_class_and_one_of_itself_is(tmp_path: Path) -> None:
    content = coco("abcd")
    content["categories"] = [
        {"id": -1, "name": "_background_"},  # as labelme writes
        {"id": 0, "name": "animals-of-mine", "supercategory": "none"},
        {"id": 10, "name": "cat", "supercategory": "animals-of-mine"},
        {"id": 11, "name": "dog", "supercategory": "animals-of-mine"},
        {"id": 12, "name": "person", "supercategory": "person"},  # without an object, too
    ]
    write_images(tmp_path / "data", "abcd")
    (tmp_path / "data" / "_annotations.coco.json").write_text(json.dumps(content), encoding="utf-8")
    assert packed(tmp_path / "data", tmp_path / "x").manifest.classes == ("cat", "dog", "person")


@pytest.mark.parametrize(
    ("text", "every", "val"),
    [
        ("path: ../datasets/mine\ntrain: [images/one, images/two]\nval: images/three\n", "abcd", "d"),
        ("path: images\ntrain: [../one, two]\nval: three\n", "abcd", "d"),
        ("train: /x/images/one\nval: C:\\data\\images\\two\n", "abc", "bc"),
        ("train: lists/train.txt\nval: val.txt\n", "abcd", "bc"),
        ("train: images/one\nval: images/test\n", "ae", "e"),
        ("train: images\nval: images\n", "abcd", None),  # the same images: a share is held out
        ("train: ../one/images\nval: ../two/images\n", "abcd", None),  # which are not there
    ],
)
def test_splits_of_yolo_are_those_of_its_yaml_file(text: str, every: str, val: str | None, tmp_path: Path) -> None:
    root = tmp_path / "data"
    for folder, names in (("one", "a"), ("two", "bc"), ("three", "d"), ("test", "e")):
        write_images(root / "images" / folder, names)
        (root / "labels" / folder).mkdir(parents=True)
        for name in names:
            (root / "labels" / folder / f"{name}.txt").write_text("0 0.5 0.5 0.5 0.5\n", encoding="utf-8")
    (root / "lists").mkdir()
    (root / "lists" / "train.txt").write_text("./images/one/a.png\n/x/images/three/d.png\n", encoding="utf-8")
    (root / "val.txt").write_text("images/two/b.png\nimages/two/c.png\n", encoding="utf-8")
    (root / "mine.yaml").write_text(f"{text}names: [cat, dog]\n", encoding="utf-8")
    (root / "hyp.yaml").write_text("lr0: 0.01\n", encoding="utf-8")
    dataset = packed(root, tmp_path / "x", on_leak="warn")
    assert dataset.manifest.classes == CLASSES
    found = {split: {Path(one["path"]).stem for one in listing(dataset, split)} for split in ("train", "val")}
    assert val is None or found["val"] == set(val)
    assert set.union(*found.values()) == set(every)


OTHERS_YAML = {"coco.yaml": "names: [person, bicycle, car]\n", "a.yaml": "names: [dog, cat]\n"}
OWN_YAML = "train: images/train\nnames: {0: cat, 1: dog}\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"labels/classes.txt": "dog\nperson\n"}, CLASSES),  # LabelImg's own
        ({"labels/classes.txt": "dog\nperson\n", "classes.txt": "dog\ncat\n"}, "other-classes"),
        ({**OTHERS_YAML, "a.yaml": "names: 5\n"}, CLASSES),  # beside data.yaml they are not read
        ({**OTHERS_YAML, "data.yaml": None}, "other-classes"),
        ({**OTHERS_YAML, "data.yaml": None, "coco.yaml": f"names: [a, b]\n#{' ' * (1 << 19)}\n"}, ("dog", "cat")),
        *(
            ({"data.yaml": None, "mine.yaml": OWN_YAML, "hyp.yaml": f"value: {value}\n"}, CLASSES)
            for value in ("!!bool x", "!!timestamp x", "!!int ''", "1:" * 400 + "1.5")  # which break YAML's parser
        ),
        ({"data.yaml": "names: [no, 010]\n", "classes.txt": "no\n010\n"}, ("no", "010")),  # no text for YAML
        *(
            ({"data.yaml": f"names: {names}\n"}, "damaged-annotations")  # which do not number the classes
            for names in ("{0: cat, 7: dog}", "cat", "5", "{0: , 1: dog}")
        ),
    ],
)
def test_files_that_name_the_classes_of_yolo(
    files: dict[str, str | None], expected: str | tuple[str, ...], tmp_path: Path
) -> None:
    write_yolo(tmp_path / "data")
    for name, text in files.items():
        if text is None:
            (tmp_path / "data" / name).unlink()
        else:
            (tmp_path / "data" / name).write_text(text, encoding="utf-8")
    if isinstance(expected, str):
        with refuses(expected):
            packed(tmp_path / "data", tmp_path / "x")
    else:
        assert packed(tmp_path / "data", tmp_path / "x").manifest.classes == expected


def test_names_of_yolo_that_hold_one_another_many_times(tmp_path: Path) -> None:
    write_yolo(tmp_path / "data")
    lines = [f"a{depth + 1}: &a{depth + 1} [{', '.join([f'*a{depth}'] * 10)}]\n" for depth in range(7)]
    (tmp_path / "data" / "data.yaml").write_text(f"a0: &a0 [x]\n{''.join(lines)}names: *a7\n", encoding="utf-8")
    with peak_below(20_000_000), refuses("damaged-annotations"):
        find(tmp_path / "data", task="detection")


def test_paths_of_thousands_of_folders_take_little_memory(tmp_path: Path) -> None:
    write_yolo(tmp_path / "data")
    (tmp_path / "data" / "list.txt").write_text("a/" * 20_000, encoding="utf-8")
    text = f"train: list.txt\nval: {'a/' * 20_000}\nnames: [cat, dog]\n"
    (tmp_path / "data" / "data.yaml").write_text(text, encoding="utf-8")
    with peak_below(20_000_000):
        found = find(tmp_path / "data", task="detection")
    assert {split: len(samples) for split, samples in found.splits.items()} == {"train": 3, "val": 1}


@pytest.mark.parametrize("keypoints", ["0.9 0.9 0.1 0.9", "0.9 0.9 2 0.1 0.9 1"])
def test_boxes_of_poses_are_without_their_keypoints(keypoints: str, tmp_path: Path) -> None:
    write_yolo(tmp_path / "data")
    for file in (tmp_path / "data" / "labels").rglob("*.txt"):
        lines = [f"{line} {keypoints}\n" for line in file.read_text(encoding="utf-8").splitlines()]
        file.write_text("".join(lines), encoding="utf-8")
    with (tmp_path / "data" / "data.yaml").open("a", encoding="utf-8") as file:
        file.write(f"kpt_shape: [2, {len(keypoints.split()) // 2}]\n")
    found = objects(packed(tmp_path / "data", tmp_path / "x"))
    for name, boxes in OBJECTS.items():
        np.testing.assert_allclose(np.reshape(found[name], (-1, 6)), np.reshape(boxes, (-1, 6)), atol=0.01)


def test_loops_of_links_between_images_and_annotations_end(tmp_path: Path) -> None:
    write_coco(tmp_path / "data")
    (tmp_path / "data" / "again").symlink_to(".")
    (tmp_path / "data" / "train" / "images" / "up").symlink_to("../..")
    (tmp_path / "data" / "train" / "images" / "self.png").symlink_to("self.png")
    dataset = packed(tmp_path / "data", tmp_path / "x", max_bad_fraction=0.9)
    assert objects(dataset).keys() == OBJECTS.keys()
    assert rejected(dataset.path).keys() == {"train/images/self.png"}


def test_an_image_with_more_objects_than_a_batch_holds_is_named(tmp_path: Path) -> None:
    write_yolo(tmp_path / "data")
    lines = [f"0 0.5 0.5 0.25 {0.1 + place / 1e5:.5f}\n" for place in range(10_001)]
    (tmp_path / "data" / "labels" / "train" / "a.txt").write_text("".join(lines), encoding="utf-8")
    dataset = packed(tmp_path / "data", tmp_path / "x", max_bad_fraction=0.9)
    assert list(rejected(dataset.path).values()) == ["10,001 objects, and an image may have 10,000; cut it into tiles"]
    assert objects(dataset).keys() == {"b", "c", "d"}


@pytest.mark.parametrize(
    ("own", "most"),
    [({"name": "é"}, 100), ({"name": "}, {"}, 4001), ({"keypoints": [{"x": 1}, {"x": 2}, {"x": 3}]}, 4001)],
)
def test_a_file_is_read_piece_by_piece(own: dict[str, Any], most: int) -> None:
    """Of a file of gigabytes only a piece is in memory: the reader never asks for more than a few at once."""

    class Counted(io.BytesIO):
        largest = 0

        def read(self, size: int | None = -1, /) -> bytes:
            Counted.largest = max(Counted.largest, size)
            return super().read(size)

    entry = {"id": 123456, "segmentation": [[1.5] * 400], **own}
    text = '{"x": {"annotations": []}, "annotations": [' + ",\n".join([json.dumps(entry)] * 4000) + "]}"
    assert len(text) > 5 << 20
    found = list(json_arrays(Counted(text.encode()), "it", ["annotations"]))
    assert [entry for _, entries in found for entry in entries] == [entry] * 4000
    assert {name for name, _ in found} == {"annotations"}
    assert len(found) <= most
    assert Counted.largest <= 1 << 21
