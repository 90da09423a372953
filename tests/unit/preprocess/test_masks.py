"""Images with PNG masks: what is packed, and what becomes of bad ones."""

import io
import json
import shutil
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from components.common.contracts.manifests import ALL_FILES, DatasetManifest, load
from components.common.data.image_files import encode_image
from enginery.datasets.shapes import CLASSES as SHAPES
from enginery.datasets.shapes import write_shapes
from tests.conftest import Dataset, preprocess, run_step
from tests.steps import step
from tests.unit.refusals import refuses

from .builders import archive, gradient, listing, rejected

WIDTH, HEIGHT = 64, 48
CLASSES = ("ground", "cat", "dog")


def mask_of(number: int) -> np.ndarray:
    """[HEIGHT, WIDTH] uint8: a part of class 1 or 2 and a border of void; image 0 is ground alone."""
    values = np.zeros((HEIGHT, WIDTH), np.uint8)
    if number:
        values[10 : 20 + number, 5:30] = 1 + number % 2
        values[0] = 255
    return values


def write_pair(folder: Path, number: int, split: str = "") -> None:
    """Image and mask of a number; folder/images[/split] and folder/masks[/split]."""
    for name in ("images", "masks"):
        (folder / name / split).mkdir(parents=True, exist_ok=True)
    gradient(HEIGHT, WIDTH, shift=number * 11).save(folder / "images" / split / f"{number}.jpg")
    Image.fromarray(mask_of(number)).save(folder / "masks" / split / f"{number}.png")


def write_masks(root: Path) -> Path:
    for number in range(4):
        write_pair(root / ("val" if number == 3 else "train"), number)
    (root / "classes.txt").write_text("\n".join(CLASSES), encoding="utf-8")
    return root


def packed(data: Path, output: Path, **settings: Any) -> Dataset:
    return preprocess(data, output, **{"task": "segmentation", "near_duplicates": "keep", **settings})


def masks(dataset: Dataset) -> dict[str, np.ndarray]:
    """Packed masks by the names of their images."""
    found = {}
    for split, info in dataset.manifest.splits.items():
        stems = {entry["key"]: Path(entry["path"]).stem for entry in listing(dataset, split)}
        for shard in info.shards:
            with tarfile.open(dataset.file(shard)) as tar:
                for member in tar:
                    key, _, kind = member.name.partition(".")
                    if kind == "mask":
                        image = Image.open(io.BytesIO(tar.extractfile(member).read()))
                        assert (image.format, image.mode) == ("PNG", "L")
                        found[stems[key]] = np.array(image)
    return found


def assert_masks(found: dict[str, np.ndarray]) -> None:
    """All four of `write_masks`."""
    assert found.keys() == {"0", "1", "2", "3"}
    for name, values in found.items():
        np.testing.assert_array_equal(values, mask_of(int(name)))


def test_masks_are_packed_exactly_and_classes_counted_by_image(tmp_path: Path) -> None:
    dataset = packed(write_masks(tmp_path / "data"), tmp_path / "x")
    manifest = dataset.manifest
    assert (manifest.task, manifest.classes, manifest.num_rejected) == ("segmentation", CLASSES, 0)
    assert manifest.splits["train"].class_counts == (3, 1, 1)
    assert manifest.splits["val"].class_counts == (1, 0, 1)
    assert_masks(masks(dataset))
    entry = next(entry for entry in listing(dataset, "train") if entry["path"].endswith("1.jpg"))
    part = 11 * 25 / (HEIGHT * WIDTH)
    assert entry["label"] == 0
    np.testing.assert_allclose(entry["shares"], [[0, 1 - part - 1 / HEIGHT], [2, part]], atol=1e-6)
    assert not (dataset.path / "rejected_annotations.jsonl").exists()
    assert "dog" in dataset.file("data_card.html").read_text(encoding="utf-8")


def test_splits_below_the_folders_none_and_an_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_pair(tmp_path / "below", 4, split="test")
    for number in range(4):
        write_pair(tmp_path / "below", number, split="val" if number == 3 else "train")
        write_pair(tmp_path / "free", number)
    gradient(HEIGHT, WIDTH).save(tmp_path / "below" / "5.png")
    for name, as_ in (("images/train/1.jpg", "o\u0308.jpg"), ("masks/train/1.png", "ö.png")):
        (tmp_path / "below" / name).rename((tmp_path / "below" / name).with_name(as_))
    names = tmp_path / "names.txt"
    names.write_text("a\nb\nc\n", encoding="utf-8")
    below = packed(tmp_path / "below", tmp_path / "x", class_names_file=str(names))
    found = masks(below)
    assert_masks({name if name.isdigit() else "1": mask for name, mask in found.items()})
    assert {split: info.num_images for split, info in below.manifest.splits.items()} == {"train": 3, "val": 1}
    assert "not used: 2, such as 5.png" in capsys.readouterr().err
    free = packed(tmp_path / "free", tmp_path / "y", class_names_file=str(names), val_fraction=0.5)
    assert_masks(masks(free))
    assert {split: info.num_images for split, info in free.manifest.splits.items()} == {"train": 2, "val": 2}
    for name in ("data.zip", "data.tar"):
        file = archive(tmp_path / name, write_masks(tmp_path / name.replace(".", "_")), "top/")
        assert_masks(masks(packed(file, tmp_path / f"of_{name}")))


def test_run_lengths_of_coco_are_the_masks(tmp_path: Path) -> None:
    write_shapes(tmp_path / "data", num_train=6, num_val=2, image_size=64)
    expected = packed(tmp_path / "data", tmp_path / "x")
    for split in ("train", "val"):
        shutil.rmtree(tmp_path / "data" / split / "masks")
    (tmp_path / "data" / "classes.txt").unlink()
    found = packed(tmp_path / "data", tmp_path / "y")
    assert found.manifest.classes == expected.manifest.classes == SHAPES
    own, of_files = masks(found), masks(expected)
    assert own.keys() == of_files.keys()
    assert all(np.array_equal(own[name], of_files[name]) for name in own)


def test_polygons_of_coco_and_what_is_wrong_with_them(tmp_path: Path) -> None:
    square = [[4, 6, 20, 6, 20, 30, 4, 30]]
    outlines: list[tuple[int, Any]] = [
        (7, square),
        (9, [[10, 0, 40, 0, 40, 10, 10, 10], [50, 40, 60, 40, 60, 48]]),  # in two parts, the first one over the square
        (9, {"size": [HEIGHT, WIDTH], "counts": [HEIGHT * 60, 5, HEIGHT * 4 - 5]}),
        (8, square),
        (9, []),
        (9, [[1, 2, 3, 4]]),
        (9, ["abcdef"]),
        (9, {"size": [HEIGHT, WIDTH], "counts": [5, 5]}),
        (9, {"size": [HEIGHT, WIDTH], "counts": "~~~~~~~~~~~~"}),
        (9, [[100, 100, 110, 100, 110, 120]]),
        (9, {"size": [WIDTH, HEIGHT], "counts": [5, WIDTH * HEIGHT - 5]}),
        (9, [[1e300, -1e300, 1e300, 1e300, -1e300, 1e300]]),
        (9, [[10**400, 1, 2, 3, 4, 5]]),
        (9, [[62, 20, 64, 20, 64, 22, 62, 22]]),
    ]
    content = {
        "images": [
            {"id": number, "file_name": f"{number}.png", "width": WIDTH, "height": HEIGHT + (number == 2)}
            for number in range(5)
        ],
        "categories": [{"id": 9, "name": "dog"}, {"id": 7, "name": "cat"}],
        "annotations": [
            {"id": number, "image_id": 1, "category_id": kind, "segmentation": outline}
            for number, (kind, outline) in enumerate(outlines)
        ],
    }
    again = {**content["annotations"][-1], "segmentation": [[62, 30, 64, 30, 64, 32, 62, 32]]}
    content["annotations"].append(again)  # the same id, another outline
    for number in range(4):
        (tmp_path / "data").mkdir(exist_ok=True)
        gradient(HEIGHT, WIDTH, shift=number * 11).save(tmp_path / "data" / f"{number}.png")
    (tmp_path / "data" / "annotations.json").write_text(json.dumps(content), encoding="utf-8")
    dataset = packed(tmp_path / "data", tmp_path / "x", max_bad_fraction=0.99, val_fraction=0.4)
    assert dataset.manifest.classes == ("background", "cat", "dog")
    expected = np.zeros((HEIGHT, WIDTH), np.uint8)
    expected[6:30, 4:20] = 1
    expected[:10, 10:40] = 2
    expected[6:10, 10:20] = 255
    expected[:5, 60] = expected[20:22, 62:64] = expected[30:32, 62:64] = 2
    found = masks(dataset)["1"]
    np.testing.assert_array_equal(found[:, :50], expected[:, :50])
    np.testing.assert_array_equal(found[:40], expected[:40])
    assert (found[40:, 50:60] == 2).sum() == pytest.approx(40, abs=5)  # a triangle
    assert not masks(dataset)["0"].any()
    lines = dataset.file("rejected_annotations.jsonl").read_text(encoding="utf-8").splitlines()
    reasons = {entry["annotation"]: entry["reason"] for entry in map(json.loads, lines)}
    assert reasons["annotation 7"] == f"no outline: run lengths of 10 pixels, an image of {WIDTH * HEIGHT:,}"
    sizes = f"[height, width] [{WIDTH}, {HEIGHT}], an image of [{HEIGHT}, {WIDTH}]"
    assert reasons["annotation 10"] == f"no outline: run lengths of {sizes}"
    assert {name: reason.partition(":")[0] for name, reason in reasons.items()} == {
        "annotation 3": "unknown class",
        "annotation 4": "no polygons or run lengths",
        **{f"annotation {number}": "no outline" for number in (5, 6, 7, 8, 10, 11, 12)},
        "annotation 9": "no pixel of the image is in it",
        "annotation 13": "its id is that of another annotation; both are kept",
    }
    refused = rejected(dataset.path)
    assert refused["2.png"].startswith("annotated at another size")
    assert refused["4.png"] == "annotations.json names it, and it is not there"
    assert "Something is wrong with 11 of 15 annotations" in dataset.file("data_card.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["background", "_background_", "Background"])
def test_a_background_among_the_categories_of_coco_is_the_background(name: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(2):
        gradient(HEIGHT, WIDTH, shift=number * 11).save(tmp_path / "data" / f"{number}.png")
    content = {
        "images": [{"id": number, "file_name": f"{number}.png"} for number in range(2)],
        "categories": [{"id": 3, "name": "cat"}, {"id": 5, "name": name}, {"id": 7, "name": "dog"}],
        "annotations": [
            {"id": kind, "image_id": 0, "category_id": kind, "segmentation": [[x, 0, x + 8, 0, x + 8, 8, x, 8]]}
            for x, kind in ((0, 3), (10, 5), (20, 7))
        ],
    }
    (tmp_path / "data" / "annotations.json").write_text(json.dumps(content), encoding="utf-8")
    dataset = packed(tmp_path / "data", tmp_path / "x")
    assert dataset.manifest.classes == (name.strip("_"), "cat", "dog")
    assert masks(dataset)["0"][0, :30].tolist() == [1] * 8 + [0] * 12 + [2] * 8 + [0] * 2


def test_palettes_are_their_numbers_and_orientation_and_size_follow_the_image(tmp_path: Path) -> None:
    data = write_masks(tmp_path / "data")
    indexed = Image.fromarray(mask_of(1)).convert("P")
    indexed.putdata(mask_of(1).ravel().tolist())
    indexed.putpalette([level for number in range(256) for level in ((number * 7) % 256, 255 - number, 3)])
    indexed.save(data / "train" / "masks" / "1.png")
    small = Image.fromarray((mask_of(2) == 1).astype(np.uint8) * 2).convert("P")
    small.save(data / "train" / "masks" / "2.png", bits=2)
    exif = Image.Exif()
    exif[274] = 6  # lies on its side in the file
    gradient(WIDTH, HEIGHT).save(data / "train" / "images" / "0.jpg", exif=exif)
    dataset = packed(data, tmp_path / "x")
    found = masks(dataset)
    np.testing.assert_array_equal(found["1"], mask_of(1))
    np.testing.assert_array_equal(found["2"], 2 * (mask_of(2) == 1))
    np.testing.assert_array_equal(found["0"], mask_of(0))
    half = masks(packed(data, tmp_path / "half", max_short_side=HEIGHT // 2))
    np.testing.assert_array_equal(half["3"], mask_of(3)[1::2, 1::2])
    assert set(np.unique(half["1"])) <= {0, 2, 255}


def test_bad_masks_are_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    data = write_masks(tmp_path / "data")
    train = data / "train"
    for number in range(10, 18):
        write_pair(train, number)
    odd = mask_of(10)
    odd[0, 8], odd.ravel()[9:-1], odd[-1, -1] = 254, 7, 1
    Image.fromarray(odd).save(train / "masks" / "10.png")
    Image.fromarray(mask_of(11).T).save(train / "masks" / "11.png")
    Image.fromarray(np.stack([mask_of(12)] * 3, axis=-1)).save(train / "masks" / "12.png")
    Image.fromarray(mask_of(13)).save(train / "masks" / "13.jpg")
    (train / "masks" / "13.png").unlink()
    whole = (train / "masks" / "14.png").read_bytes()
    (train / "masks" / "14.png").write_bytes(whole[: len(whole) // 2])
    (train / "masks" / "15.png").unlink()
    (train / "images" / "16.jpg").unlink()
    Image.fromarray(mask_of(17) > 0).save(train / "masks" / "17.png")
    gradient(shift=3).save(train / "images" / "2.png")  # beside 2.jpg
    write_pair(train, 18)
    (train / "masks" / "18.tif").write_bytes(b"?")
    write_pair(train, 19)
    (train / "masks" / "19.png").write_bytes(b"")
    for number, bits in ((20, 2), (21, 4)):
        write_pair(train, number)
        png = bytearray(encode_image(Image.fromarray(mask_of(1) % 2).convert("P"), "PNG", bits=bits))
        png[25] = 0  # gray: Pillow scales its values, and not the numbers of a palette
        png[29:33] = zlib.crc32(png[12:29]).to_bytes(4)
        (train / "masks" / f"{number}.png").write_bytes(png)
    write_pair(train, 22)
    (train / "masks" / "22.png").rename(tmp_path / "elsewhere.png")
    (train / "masks" / "22.png").symlink_to(tmp_path / "elsewhere.png")  # leads out of the folder

    dataset = packed(data, tmp_path / "x", max_bad_fraction=0.9, on_leak="warn")
    why = {Path(path).name: reason for path, reason in rejected(dataset.path).items()}
    assert "; it does not heed the EXIF orientation" in why["11.jpg"]
    assert {
        name: reason.partition(";")[0].split(": ")[:2] for name, reason in why.items() if "can't be used" in reason
    } == {
        "11.jpg": ["its mask can't be used", "mask of another size"],
        "12.jpg": ["its mask can't be used", "a PNG of RGB"],
        "13.jpg": ["its mask can't be used", "a JPEG of L"],
        "14.jpg": ["its mask can't be used", "damaged"],
        "17.jpg": ["its mask can't be used", "a PNG of 1"],
        "19.jpg": ["its mask can't be used", "empty file (train/masks/19.png)"],
        "20.jpg": ["its mask can't be used", "a PNG of L"],
        "21.jpg": ["its mask can't be used", "a PNG of L"],
    }
    assert {name: reason.partition(":")[0] for name, reason in why.items() if "can't be used" not in reason} == {
        "15.jpg": "it has no mask",
        "16.png": "a mask of an image that is not there",
        "2.jpg": "2 images of one name, and so of one mask",
        "2.png": "2 images of one name, and so of one mask",
        "18.jpg": "it has several masks",
        "22.jpg": "it has no mask",
        "22.png": "a link out of the data folder",
    }
    (line,) = dataset.file("rejected_annotations.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {
        "path": "train/images/10.jpg",
        "annotation": "train/masks/10.png",
        "reason": "values that are no class, taken for void: 7 (99.7 %), 254 (0.0326 %) of the pixels",
        "kept": True,
    }
    found = masks(dataset)
    assert found.keys() == {"0", "1", "3", "10"}
    np.testing.assert_array_equal(found["10"], np.where((odd == 7) | (odd == 254), 255, odd))
    card = dataset.file("data_card.html").read_text(encoding="utf-8")
    assert "Something is wrong with 1 of 4" in card
    with refuses("unusable-files", "preprocess.max_bad_fraction"):
        packed(data, tmp_path / "many", max_bad_fraction=0.3)


def test_masks_of_the_background_and_void_alone_are_none_to_train_on(tmp_path: Path) -> None:
    data = write_masks(tmp_path / "data")
    (data / "classes.txt").write_text("background\nobject\n", encoding="utf-8")
    for file in data.glob("*/masks/*.png"):
        values = np.array(Image.open(file))
        Image.fromarray(np.where(values > 0, 255, 0).astype(np.uint8)).save(file)  # as many tools write one class
    dataset = packed(data, tmp_path / "x")
    assert dataset.manifest.splits["train"].class_counts == (3, 0)
    with refuses("no-objects", says="255 is void"):
        step("train", tmp_path / "checkpoint", {"architecture": "segmentation/unet_small"}, dataset=dataset.path)


def test_joined_parts_are_the_whole(tmp_path: Path) -> None:
    for number in range(40):
        write_pair(tmp_path / "data", number)
    (tmp_path / "data" / "classes.txt").write_text("\n".join(CLASSES), encoding="utf-8")
    noise = np.random.default_rng(0)
    for number in range(40):  # large files make several shards
        pixels = noise.integers(0, 256, (HEIGHT * 5, WIDTH * 5, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "data" / "images" / f"{number}.jpg", quality=98)
        large = Image.fromarray(mask_of(number % 20)).resize((WIDTH * 5, HEIGHT * 5), Image.Resampling.NEAREST)
        large.save(tmp_path / "data" / "masks" / f"{number}.png")
    settings: dict[str, Any] = {"task": "segmentation", "near_duplicates": "keep", "shard_bytes": 1_000_000}
    whole = preprocess(tmp_path / "data", tmp_path / "whole", **settings)
    assert len(whole.manifest.splits["train"].shards) > 1
    for part in ("1", "2"):
        run_step(tmp_path / "data", tmp_path / part, part=f"{part}/2", **settings)
    step("merge", tmp_path / "joined", {"parts": [str(tmp_path / "1"), str(tmp_path / "2")]})
    joined = load(tmp_path / "joined", DatasetManifest, verify=ALL_FILES)
    assert joined.digest == whole.digest


def test_without_masks_or_names_and_with_too_few_or_many_classes(tmp_path: Path) -> None:
    data = write_masks(tmp_path / "data")
    (data / "classes.txt").unlink()
    with refuses("no-class-names", "preprocess.class_names_file"):
        packed(data, tmp_path / "x")
    (data / "classes.txt").write_text("one\n", encoding="utf-8")
    with refuses("too-few-classes"):
        packed(data, tmp_path / "x")
    (data / "classes.txt").write_text("\n".join(map(str, range(256))), encoding="utf-8")
    with refuses("too-many-classes"):
        packed(data, tmp_path / "x")
    (data / "classes.txt").unlink()
    for split in ("train", "val"):
        (data / split / "classes.txt").write_text(f"ground\ncat\n{split}\n", encoding="utf-8")
    with refuses("other-classes"):
        packed(data, tmp_path / "x")
    with refuses("no-masks", "data"):
        packed(data / "train" / "images", tmp_path / "x")
    (data / "classes.txt").write_text("\n".join(CLASSES), encoding="utf-8")
    for mask in data.glob("*/masks/*.png"):
        mask.rename(mask.with_stem(f"{mask.stem}_mask"))
    with refuses("too-few-images", says="such as train/images/0.jpg: it has no mask: none in masks/ is called 0.png"):
        packed(data, tmp_path / "x")
    table = tmp_path / "table.csv"
    table.write_text("path,label\na.jpg,b\n", encoding="utf-8")
    with refuses("no-annotations", "data"):
        packed(table, tmp_path / "x")
