"""preprocess on small folders: splits, what is rejected, and that DALI decodes whatever is accepted."""

import hashlib
import io
import json
import os
import shutil
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from components.common.artifacts import Artifact, DatasetManifest
from components.common.errors import UserError
from components.common.loader import Loader, to_numpy
from components.common.transforms import TransformSpec
from components.preprocess.shards import plan_shards
from components.preprocess.sources import Sample, find_samples

Preprocess = Callable[..., Artifact[DatasetManifest]]


def gradient(height: int = 48, width: int = 64, shift: int = 0) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([x * 4 + shift, y * 5, (x + y) * 2], axis=-1).astype(np.uint8))


def write_tree(root: Path, counts: dict[str, int], **options: int) -> Path:
    """PNG images, as many as said, in folders of these names."""
    for number, (folder, count) in enumerate(counts.items()):
        (root / folder).mkdir(parents=True)
        for index in range(count):
            gradient(shift=number * 20 + index, **options).save(root / folder / f"{index:03d}.png")
    return root


def listing(dataset: Artifact[DatasetManifest], split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in dataset.file(f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def rejected(dataset: Path) -> dict[str, str]:
    """Reason by path."""
    lines = [json.loads(line) for line in (dataset / "rejected.jsonl").read_text(encoding="utf-8").splitlines()]
    return {entry["path"]: entry["reason"] for entry in lines}


def digests(directory: Path) -> dict[str, str]:
    """Digest of every file but the manifest, which names the configuration."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
        if path.name != "manifest.json"
    }


# Splits


def test_a_presplit_folder_is_kept_as_it_is(tmp_path: Path, run_preprocess: Preprocess) -> None:
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


def test_one_tree_is_split_by_class(tmp_path: Path, run_preprocess: Preprocess) -> None:
    root = write_tree(tmp_path / "images", {"cat": 20, "dog": 10, "eel": 2})
    dataset = run_preprocess(root, tmp_path / "out", val_fraction=0.2)
    assert dataset.manifest.splits["val"].class_counts == (4, 2, 1)  # at least one of each
    assert dataset.manifest.splits["train"].class_counts == (16, 8, 1)
    train, val = ({entry["path"] for entry in listing(dataset, split)} for split in ("train", "val"))
    assert train.isdisjoint(val)
    assert train | val == {path.relative_to(root).as_posix() for path in root.glob("*/*.png")}


def held_out(root: Path, seed: int = 0, val_fraction: float = 0.25) -> set[str]:
    source = find_samples(root, val_fraction=val_fraction, seed=seed, class_names_file="")
    return {sample.path for sample in source.splits["val"]}


def test_the_split_follows_from_seed_and_names_alone(tmp_path: Path) -> None:
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


def test_the_order_of_training_images_mixes_the_classes(tmp_path: Path, run_preprocess: Preprocess) -> None:
    root = write_tree(tmp_path / "images", {"a": 30, "b": 30})
    labels = [entry["label"] for entry in listing(run_preprocess(root, tmp_path / "out"), "train")]
    assert 0.2 < np.mean(labels[:24]) < 0.8


def test_class_names_file_gives_order_and_classes_without_images(tmp_path: Path, run_preprocess: Preprocess) -> None:
    root = write_tree(tmp_path / "images", {"cat": 4, "dog": 4})
    names = tmp_path / "names.txt"
    names.write_text("dog\n\nbird\n cat \n")
    dataset = run_preprocess(root, tmp_path / "out", class_names_file=str(names))
    assert dataset.manifest.classes == ("dog", "bird", "cat")
    assert dataset.manifest.splits["train"].class_counts == (3, 0, 3)


# What the folder may hold


ODD_NAMES = ("with space", 'quote\'s "double"', "ünïcödé 数字", "-dash", "a;b$(c)&", "comma,semi", "percent%20")


def test_odd_names_of_folders_and_files(tmp_path: Path, run_preprocess: Preprocess) -> None:
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


def test_a_name_that_is_no_unicode(tmp_path: Path, run_preprocess: Preprocess) -> None:
    root = write_tree(tmp_path / "images", {"a": 4, "b": 4})
    odd = bytes(root / "a") + b"/caf\xe9.png"  # Latin-1, as old archives have them
    shutil.copy(root / "a" / "000.png", odd)
    (root / "b" / os.fsdecode(b"bad\xe9.png")).write_bytes(b"")
    dataset = run_preprocess(root, tmp_path / "out", max_bad_fraction=0.5)
    paths = {entry["path"] for split in ("train", "val") for entry in listing(dataset, split)}
    assert len(paths) == 9
    assert os.fsdecode(b"a/caf\xe9.png") in paths
    assert set(rejected(dataset.path)) == {os.fsdecode(b"b/bad\xe9.png")}


def test_a_folder_name_that_is_no_unicode(tmp_path: Path, run_preprocess: Preprocess) -> None:
    root = write_tree(tmp_path / "images", {"a": 4, "b": 4})
    os.rename(root / "b", bytes(root) + b"/caf\xe9")
    with pytest.raises(UserError, match=r"has a folder whose name is not UTF-8: 'caf.*rename it"):
        run_preprocess(root, tmp_path / "out")


def test_hidden_files_are_not_seen_and_nested_folders_are(tmp_path: Path, run_preprocess: Preprocess) -> None:
    root = write_tree(tmp_path / "images", {"a": 4, "b": 4, "b/more/deep": 2, ".cache": 3})
    (root / "a" / ".DS_Store").write_bytes(b"junk")
    (root / "readme.txt").write_text("beside the classes")
    dataset = run_preprocess(root, tmp_path / "out")
    assert dataset.manifest.classes == ("a", "b")
    assert dataset.manifest.num_rejected == 0
    assert sum(split.class_counts[1] for split in dataset.manifest.splits.values()) == 6


def test_linked_images_and_folders_are_followed(tmp_path: Path, run_preprocess: Preprocess) -> None:
    store = write_tree(tmp_path / "store", {"a": 4, "b": 4})
    root = tmp_path / "images"
    (root / "a").mkdir(parents=True)
    for path in (store / "a").iterdir():
        (root / "a" / path.name).symlink_to(path)
    (root / "b").symlink_to(store / "b")
    dataset = run_preprocess(root, tmp_path / "out")
    assert [sum(split.class_counts) for split in dataset.manifest.splits.values()] == [6, 2]


# Bad files


@pytest.fixture(scope="module")
def with_bad_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_tree(tmp_path_factory.mktemp("bad") / "images", {"good": 12, "bad": 12})
    folder = root / "bad"
    (folder / "text.jpg").write_text("this is no image\n" * 20)
    (folder / "empty.jpg").write_bytes(b"")
    gradient().save(folder / "anim.gif")
    jpeg, png = io.BytesIO(), io.BytesIO()
    gradient(480, 640).save(jpeg, "JPEG")
    gradient().save(png, "PNG")
    (folder / "truncated.jpg").write_bytes(jpeg.getvalue()[: len(jpeg.getvalue()) // 2])
    # Pillow reads the next two without a word, DALI stops at them.
    (folder / "no_end.png").write_bytes(png.getvalue()[:-12])
    quantization = jpeg.getvalue().index(b"\xff\xdb", 30)
    (folder / "marker.jpg").write_bytes(jpeg.getvalue()[:quantization] + b"\x11" + jpeg.getvalue()[quantization + 1 :])
    gradient().convert("1").save(folder / "bits.tif")
    Image.fromarray(np.full((20, 20), 70000, np.int32)).save(folder / "wide.tif")
    Image.new("RGB", (3000, 2000)).save(folder / "huge.png")
    (folder / "pipe.txt").write_text("")
    return root


BAD = {
    "text.jpg": "not an image",
    "empty.jpg": "empty file",
    "anim.gif": "format GIF is not supported; convert it to JPEG or PNG",
    "truncated.jpg": "damaged: image file is truncated",
    "no_end.png": "damaged: the end of the PNG is missing",
    "marker.jpg": "damaged: no JPEG marker at byte",
    "bits.tif": "TIFF of mode 1 is not supported",
    "wide.tif": "TIFF of mode I is not supported",
    "huge.png": "3000x2000 has more than max_pixels = 1000000 pixels",
    "pipe.txt": "empty file",
}


def test_bad_files_are_left_out_and_listed_with_the_reason(
    with_bad_files: Path, tmp_path: Path, run_preprocess: Preprocess
) -> None:
    dataset = run_preprocess(with_bad_files, tmp_path / "out", max_bad_fraction=0.5, max_pixels=1_000_000)
    reasons = rejected(dataset.path)
    assert set(reasons) == {f"bad/{name}" for name in BAD}
    for name, reason in BAD.items():
        assert reasons[f"bad/{name}"].startswith(reason), name
    assert dataset.manifest.num_rejected == len(BAD)
    assert sum(split.num_images for split in dataset.manifest.splits.values()) == 24
    for split in ("train", "val"):  # DALI raises for the whole pipeline where one image does not decode
        loader = Loader(dataset, split, plain(32), batch_size=5)
        assert sum(len(batch.labels) for batch in loader) == dataset.manifest.splits[split].num_images


def test_on_bad_fail_stops_with_an_example(with_bad_files: Path, tmp_path: Path, run_preprocess: Preprocess) -> None:
    with pytest.raises(UserError, match=r"9 of 34 files are no usable image, such as bad/.*rejected\.jsonl") as caught:
        run_preprocess(with_bad_files, tmp_path / "out", on_bad="fail")
    assert set(rejected(tmp_path / "out")) == {f"bad/{name}" for name in BAD if name != "huge.png"}
    assert str(tmp_path / "out") in str(caught.value)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_too_many_bad_files_stop_too(with_bad_files: Path, tmp_path: Path, run_preprocess: Preprocess) -> None:
    with pytest.raises(UserError, match=r"9 of 34 files .* more than max_bad_fraction = 0\.1 allows"):
        run_preprocess(with_bad_files, tmp_path / "out")
    run_preprocess(with_bad_files, tmp_path / "at_the_border", max_bad_fraction=9 / 34)


def test_a_split_without_any_usable_image(tmp_path: Path, run_preprocess: Preprocess) -> None:
    root = write_tree(tmp_path / "images", {"train/a": 4, "train/b": 4})
    for name in ("a", "b"):
        (root / "val" / name).mkdir(parents=True)
        (root / "val" / name / "x.jpg").write_text("no image")
    with pytest.raises(UserError, match="no usable image is left in the val split"):
        run_preprocess(root, tmp_path / "out", max_bad_fraction=1)


# Good files: what is accepted must decode


def save_exif(image: Image.Image, orientation: int, path: Path) -> None:
    """Save with an EXIF orientation: 6 is a camera held upright, turned right to show."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    image.save(path, exif=exif, quality=95)


GOOD: dict[str, Callable[[Image.Image, Path], Any]] = {
    "rgb.jpg": lambda image, path: image.save(path, quality=95),
    "progressive.jpg": lambda image, path: image.save(path, progressive=True),
    "gray.jpg": lambda image, path: image.convert("L").save(path),
    "cmyk.jpg": lambda image, path: image.convert("CMYK").save(path, quality=95),
    "mpo.jpg": lambda image, path: image.save(path, format="MPO", save_all=True, append_images=[image]),
    "rgb.png": lambda image, path: image.save(path),
    "rgba.png": lambda image, path: image.convert("RGBA").save(path),
    "gray_alpha.png": lambda image, path: image.convert("LA").save(path),
    "palette.png": lambda image, path: image.convert("P").save(path),
    "bits.png": lambda image, path: image.convert("1").save(path),
    "gray16.png": lambda image, path: Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257).save(
        path
    ),
    "png_named.jpg": lambda image, path: image.save(path, format="PNG"),
    "lossy.webp": lambda image, path: image.save(path, quality=95),
    "lossless.webp": lambda image, path: image.convert("RGBA").save(path, lossless=True),
    "rgb.bmp": lambda image, path: image.save(path),
    "palette.bmp": lambda image, path: image.convert("P").save(path),
    "plain.tif": lambda image, path: image.save(path),
    "lzw.tif": lambda image, path: image.save(path, compression="tiff_lzw"),
    "jpeg.tiff": lambda image, path: image.save(path, compression="jpeg"),
    "gray16.tif": lambda image, path: Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257).save(
        path
    ),
    "trailing.jpg": lambda image, path: (image.save(path), path.open("ab").write(b"appended by some tool")),
    "UPPER.JPG": lambda image, path: image.save(path, format="JPEG"),
    "no_suffix": lambda image, path: image.save(path, format="JPEG"),
    "tiny.png": lambda image, path: image.crop((0, 0, 1, 1)).save(path),
    "thin.png": lambda image, path: image.crop((0, 0, 64, 1)).save(path),
    **{f"exif{number}.jpg": lambda image, path, n=number: save_exif(image, n, path) for number in range(1, 9)},
    "exif6.png": lambda image, path: save_exif(image, 6, path),
    "exif8.webp": lambda image, path: save_exif(image, 8, path),
}


def plain(size: int) -> TransformSpec:
    """Normalization that leaves pixel values in 0..255."""
    return TransformSpec(resize_size=size, crop_size=size, mean=(0, 0, 0), std=(1 / 255, 1 / 255, 1 / 255))


@pytest.fixture(scope="module")
def good(
    tmp_path_factory: pytest.TempPathFactory, run_preprocess: Preprocess
) -> tuple[Path, Artifact[DatasetManifest]]:
    """One image in every form that is accepted; the class tells the form."""
    root = tmp_path_factory.mktemp("good")
    for name, write in GOOD.items():
        for split in ("train", "val"):
            folder = root / "images" / split / name.replace(".", "_")
            folder.mkdir(parents=True)
            write(gradient(), folder / name)
    return root / "images", run_preprocess(root / "images", root / "dataset")


def test_every_form_is_accepted(good: tuple[Path, Artifact[DatasetManifest]]) -> None:
    folder, dataset = good
    assert rejected(dataset.path) == {}
    assert {Path(entry["path"]).name for entry in listing(dataset, "val")} == set(GOOD)
    for entry in listing(dataset, "val"):
        assert entry["sha256"] == hashlib.sha256((folder / entry["path"]).read_bytes()).hexdigest()


def test_the_loader_decodes_every_form_to_the_pixels_that_were_checked(
    good: tuple[Path, Artifact[DatasetManifest]],
) -> None:
    folder, dataset = good
    entries = listing(dataset, "val")
    loader = Loader(dataset, "val", plain(48), batch_size=7)
    batches = list(loader)
    images = np.concatenate([to_numpy(batch.images) for batch in batches])  # [N, 3, 48, 48]
    labels = [label for batch in batches for label in batch.labels.tolist()]
    assert labels == [entry["label"] for entry in entries]
    assert len(images) == len(GOOD)
    for image, entry in zip(images, entries, strict=True):
        with Image.open(folder / entry["path"]) as opened:
            expected = upright(opened)
        assert (entry["width"], entry["height"]) == expected.size, entry["path"]
        if min(expected.size) != 48:
            continue  # scaled up: nothing to compare pixel by pixel
        left, top = ((side - 48) // 2 for side in expected.size)
        pixels = np.asarray(expected.crop((left, top, left + 48, top + 48))).transpose(2, 0, 1).astype(float)
        assert np.abs(image - pixels).max() <= 1.5, entry["path"]


def upright(opened: Image.Image) -> Image.Image:
    from PIL import ImageOps

    turned = ImageOps.exif_transpose(opened)
    if turned.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(turned) >> 8).astype(np.uint8)).convert("RGB")
    return turned.convert("RGB")


def test_training_decodes_every_form_too(good: tuple[Path, Artifact[DatasetManifest]]) -> None:
    from components.common.transforms import Augmentation

    _, dataset = good
    loader = Loader(dataset, "train", plain(32), batch_size=len(GOOD), augmentation=Augmentation())
    (batch,) = list(loader)
    assert sorted(batch.labels.tolist()) == list(range(len(GOOD)))
    assert np.isfinite(to_numpy(batch.images)).all()


def test_a_damaged_exif_block_does_not_cost_the_image(tmp_path: Path, run_preprocess: Preprocess) -> None:
    root = write_tree(tmp_path / "images", {"a": 2, "b": 2})
    save_exif(gradient(), 6, root / "a" / "odd.jpg")
    data = bytearray((root / "a" / "odd.jpg").read_bytes())
    entry = data.index(b"Exif\0\0") + 6 + 8 + 2  # behind the TIFF header and the number of entries
    data[entry + 2 : entry + 8] = struct.pack(">HI", 12, 0x7FFFFFFF)  # no such many doubles are there
    (root / "a" / "odd.jpg").write_bytes(data)
    dataset = run_preprocess(root, tmp_path / "out")
    assert rejected(dataset.path) == {}


# Shards


def test_the_same_bytes_for_any_number_of_workers(all_digits: Path, tmp_path: Path, run_preprocess: Preprocess) -> None:
    options = {"shard_bytes": 1_000_000}
    one = run_preprocess(all_digits, tmp_path / "one", num_workers=1, **options)
    two = run_preprocess(all_digits, tmp_path / "two", num_workers=2, **options)
    assert len(one.manifest.splits["train"].shards) > 1
    assert digests(one.path) == digests(two.path)
    assert one.manifest.splits == two.manifest.splits
    assert one.manifest.statistics == two.manifest.statistics
    other = run_preprocess(all_digits, tmp_path / "other", seed=1, **options)
    assert other.manifest.splits["val"].digest != one.manifest.splits["val"].digest


def test_shards_hold_the_files_unchanged_in_the_order_of_the_listing(
    few_digits: Path, digits_dataset: Artifact[DatasetManifest]
) -> None:
    split = digits_dataset.manifest.splits["train"]
    entries = listing(digits_dataset, "train")
    assert (len(entries), split.num_images) == (480, 480)
    members = []
    for shard in split.shards:
        with tarfile.open(digits_dataset.file(shard)) as archive:
            members += [(member.name, archive.extractfile(member).read(), member.mtime) for member in archive]
    assert len(members) == 2 * 480
    for entry, image, label in zip(entries, members[::2], members[1::2], strict=True):
        assert image == (f"{entry['key']}.jpg", (few_digits / entry["path"]).read_bytes(), 0)
        assert label == (f"{entry['key']}.cls", f"{entry['label']:06d}".encode(), 0)


def test_plan_of_shards() -> None:
    samples = [Sample(path=str(index), label=0, size_bytes=1000 * (1 + index % 7)) for index in range(500)]
    for shard_bytes in (10_000, 300_000, 10**9):
        shards = plan_shards(samples, shard_bytes)
        assert [sample for shard in shards for sample in shard] == samples
        sizes = [sum(sample.size_bytes + 2048 for sample in shard) for shard in shards]
        assert max(sizes) - min(sizes) <= 2 * 9048
        assert max(sizes) < 1.5 * shard_bytes + 9048
    assert len(plan_shards(samples, 10**9)) == 1
    assert plan_shards([], 10) == []
    one_large = [Sample(path="a", label=0, size_bytes=10**9), Sample(path="b", label=0, size_bytes=10)]
    assert [sample for shard in plan_shards(one_large, 10**6) for sample in shard] == one_large


def test_statistics_are_numpys(tmp_path: Path, run_preprocess: Preprocess) -> None:
    rng = np.random.default_rng(0)
    root = tmp_path / "images"
    pixels, sides = [], []
    for split in ("train", "val"):
        for index in range(8):
            folder = root / split / f"c{index % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            height, width = rng.integers(20, 90, 2).tolist()
            image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8) // np.array([1, 2, 4], np.uint8)
            Image.fromarray(image).save(folder / f"{index}.png")
            sides.append(min(height, width))
            if split == "train":
                pixels.append(image.reshape(-1, 3) / 255)
    statistics = run_preprocess(root, tmp_path / "out").manifest.statistics
    every = np.concatenate(pixels)
    np.testing.assert_allclose(statistics.mean, every.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(statistics.std, every.std(axis=0), rtol=1e-9)
    assert (statistics.min_side, statistics.max_side) == (min(sides), max(sides))
    assert statistics.median_side == round(float(np.median(sides)))


# Folders that can't be used


def no_directory(root: Path) -> None:
    pass


def a_file(root: Path) -> None:
    root.write_text("")


def empty(root: Path) -> None:
    root.mkdir()


def images_without_class(root: Path) -> None:
    root.mkdir()
    gradient().save(root / "a.png")


def one_class(root: Path) -> None:
    write_tree(root, {"only": 4})


def one_image(root: Path) -> None:
    write_tree(root, {"many": 4, "single": 1})


def no_image(root: Path) -> None:
    write_tree(root, {"many": 4, "none": 0})


def no_val(root: Path) -> None:
    write_tree(root, {"train/a": 2, "train/b": 2})


def train_without_classes(root: Path) -> None:
    write_tree(root, {"train": 2, "val/a": 2})


def class_only_in_val(root: Path) -> None:
    write_tree(root, {"train/a": 2, "train/b": 2, "val/a": 2, "val/new": 2})


def val_without_files(root: Path) -> None:
    write_tree(root, {"train/a": 2, "train/b": 2, "val/a": 0})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (no_directory, "does not exist"),
        (a_file, "is not a folder; name a folder with one sub-folder of images per class"),
        (empty, "has no sub-folders; it needs one per class"),
        (images_without_class, "has no sub-folders; it needs one per class"),
        (one_class, "has only the class 'only'; a classifier needs at least two"),
        (one_image, r"class 'single' has 1 file\(s\); at least 2 are needed"),
        (no_image, r"class 'none' has 0 file\(s\); at least 2 are needed"),
        (no_val, "has train/ but no val/; it needs both"),
        (train_without_classes, "train has no sub-folders; it needs one per class"),
        (class_only_in_val, "val has classes that train/ has not: new"),
        (val_without_files, "val holds no files"),
    ],
)
def test_folders_that_cannot_be_used(
    tmp_path: Path, run_preprocess: Preprocess, make: Callable[[Path], None], message: str
) -> None:
    make(tmp_path / "images")
    with pytest.raises(UserError, match=message):
        run_preprocess(tmp_path / "images", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cat\n", "has folders that class_names_file does not name: dog"),
        ("cat\ndog\ncat\n", "names a class twice"),
        (None, "can't read class_names_file"),
    ],
)
def test_class_names_files_that_do_not_fit(
    tmp_path: Path, run_preprocess: Preprocess, text: str | None, message: str
) -> None:
    root = write_tree(tmp_path / "images", {"cat": 3, "dog": 3})
    if text is not None:
        (tmp_path / "names.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        run_preprocess(root, tmp_path / "out", class_names_file=str(tmp_path / "names.txt"))


def test_an_output_that_holds_something_is_left_alone(tmp_path: Path, run_preprocess: Preprocess) -> None:
    root = write_tree(tmp_path / "images", {"cat": 3, "dog": 3})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="is not empty"):
        run_preprocess(root, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
