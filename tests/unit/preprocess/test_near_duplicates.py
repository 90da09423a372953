"""The same picture again: found whatever was done to it, out of the validation split, shown and listed."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps
from wds2idx import IndexCreator

from components.common.contracts.manifests import ALL_FILES, DatasetManifest, DatasetPartManifest, load
from components.common.data.image_files import encode_image, near_duplicates_of_training
from components.common.data.loader import Loader
from components.common.dataset.near_duplicates import find_near_pairs
from components.common.dataset.shards import THUMBNAIL_SIDE
from components.preprocess.decoding import gray_thumbnail
from enginery.datasets.textures import texture_image
from tests.conftest import preprocess, run_step
from tests.unit.positions import plain
from tests.unit.refusals import refuses

from .builders import listing, rejected
from .test_parts import join

NUM_IMAGES = 120


def texture(number: int) -> Image.Image:
    return texture_image(np.random.default_rng((11, number)), number % 20, 224)


def jpeg(image: Image.Image, quality: int = 90) -> bytes:
    return encode_image(image, "JPEG", quality=quality)


CHANGES: dict[str, Callable[[Image.Image], bytes]] = {
    "another size": lambda image: jpeg(image.resize((130, 130), Image.Resampling.BICUBIC)),
    "compression": lambda image: jpeg(image, 30),
    "cropped": lambda image: jpeg(image.crop((15, 4, 222, 212))),
    "mirrored": lambda image: jpeg(ImageOps.mirror(image)),
    "brightness": lambda image: jpeg(ImageEnhance.Brightness(image).enhance(0.7)),
    "all": lambda image: jpeg(
        ImageEnhance.Brightness(ImageOps.mirror(image.crop((6, 0, 224, 210)))).enhance(1.2).resize((150, 160)), 70
    ),
}


def pixels(file: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(file)) as image:
        thumbnail = gray_thumbnail(image.convert("RGB"))
    return np.frombuffer(thumbnail, np.uint8).reshape(THUMBNAIL_SIDE, THUMBNAIL_SIDE)


@pytest.fixture(scope="module")
def textures() -> list[Image.Image]:
    return [texture(number) for number in range(NUM_IMAGES)]


@pytest.mark.parametrize("name", CHANGES)
def test_the_same_picture_is_found_and_no_other(textures: list[Image.Image], name: str) -> None:
    changed = [pixels(CHANGES[name](image)) for image in textures[::4]]
    thumbnails = np.stack([pixels(jpeg(image)) for image in textures] + changed)
    in_val = np.arange(len(thumbnails)) >= NUM_IMAGES
    found = find_near_pairs(thumbnails, np.arange(len(thumbnails)), in_val, num_threads=2)
    wanted = {(4 * number, NUM_IMAGES + number) for number in range(len(changed))}
    pairs = set(zip(found.first.tolist(), found.second.tolist(), strict=True))
    assert pairs <= wanted
    assert len(pairs) >= (0.95 if name in ("another size", "compression", "mirrored") else 0.8) * len(wanted)
    assert found.is_mirrored.all() if name in ("mirrored", "all") else not found.is_mirrored.any()
    assert found.is_cropped.all() if name in ("cropped", "all") else not found.is_cropped.any()
    assert found.num_plain == 0


def test_pictures_of_another_part_or_of_nothing_are_no_duplicates(textures: list[Image.Image]) -> None:
    parts = [image.crop(box) for image in textures for box in ((0, 0, 160, 160), (64, 64, 224, 224))]
    flat = [Image.new("RGB", (64, 64), (level, level, level)) for level in (0, 128, 255) * 5]
    thumbnails = np.stack([pixels(jpeg(image)) for image in parts + flat])
    numbers = np.arange(len(thumbnails))
    found = find_near_pairs(thumbnails, numbers, numbers % 5 == 0, num_threads=2)
    assert (len(found.first), found.num_plain) == (0, len(flat))


def test_thousands_of_likes_cost_no_more_than_as_many_others(textures: list[Image.Image]) -> None:
    """A logo that is everywhere: each image has some partners, not all."""
    logo = pixels(jpeg(textures[0])).astype(np.int16)
    noise = np.random.default_rng(0).integers(-2, 3, (600, THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    logos = np.clip(logo + noise, 0, 255).astype(np.uint8)
    thumbnails = np.concatenate([logos, np.stack([pixels(jpeg(image)) for image in textures[1:]])])
    numbers = np.arange(len(thumbnails))
    found = find_near_pairs(thumbnails, numbers, numbers % 5 == 0, num_threads=2)
    assert np.unique([found.first, found.second]).tolist() == numbers[: len(logos)].tolist()
    assert len(found.first) < 4 * len(logos)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_few_images(textures: list[Image.Image], number: int) -> None:
    thumbnails = np.stack(
        [pixels(jpeg(textures[0])), pixels(CHANGES["mirrored"](textures[0])), pixels(jpeg(textures[1]))]
    )
    found = find_near_pairs(thumbnails[:number], np.arange(number), np.arange(number) > 0, num_threads=1)
    assert (found.first.tolist(), found.second.tolist()) == (([0], [1]) if number > 1 else ([], []))


@pytest.fixture(scope="module")
def planted(textures: list[Image.Image], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 training and 20 validation images of 4 classes; and 6 training images again, changed, in validation.

    Of "brightness" there are two equal files. A mirrored training image is in training, too.
    """
    root = tmp_path_factory.mktemp("planted")
    for number, image in enumerate(textures[:100]):
        folder = root / ("train" if number < 80 else "val") / f"class{number % 4}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(jpeg(image))
    for number, (name, change) in enumerate(CHANGES.items()):
        (root / "val" / f"class{number % 4}" / f"{name}.jpg").write_bytes(change(textures[number]))
    (root / "val" / "class0" / "again.jpg").write_bytes((root / "val" / "class0" / "brightness.jpg").read_bytes())
    (root / "train" / "class3" / "flipped.jpg").write_bytes(CHANGES["mirrored"](textures[7]))
    return root


LEFT_OUT = {
    "val/class0/again.jpg": "near-duplicate of a training image: train/class0/4.jpg (compression or brightness)",
    "val/class0/another size.jpg": "near-duplicate of a training image: train/class0/0.jpg (another size)",
    "val/class0/brightness.jpg": "near-duplicate of a training image: train/class0/4.jpg (compression or brightness)",
    "val/class1/all.jpg": "near-duplicate of a training image: train/class1/5.jpg (mirrored, cropped)",
    "val/class1/compression.jpg": "near-duplicate of a training image: train/class1/1.jpg (compression or brightness)",
    "val/class2/cropped.jpg": "near-duplicate of a training image: train/class2/2.jpg (cropped)",
    "val/class3/mirrored.jpg": "near-duplicate of a training image: train/class3/3.jpg (mirrored)",
}


def test_near_duplicates_leave_the_validation_split(
    planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = planted / "train" / "class0" / "damaged.jpg"
    damaged.write_bytes(b"no image")
    dataset = load(preprocess(planted, tmp_path / "out").path, DatasetManifest, verify=ALL_FILES)
    damaged.unlink()
    said = capsys.readouterr().err
    assert "preprocess: 1 file left out (" in said  # the near-duplicates have a line of their own
    assert "such as train/class0/damaged.jpg" in said
    manifest, val = dataset.manifest, dataset.manifest.splits["val"]
    files = rejected(dataset.path)
    assert files.pop("train/class0/damaged.jpg")
    assert files == LEFT_OUT
    near = manifest.near_duplicates
    assert (near.num_across, near.num_left_out, near.num_train, near.num_val) == (7, 7, 2, 0)
    assert (manifest.num_rejected, manifest.splits["train"].num_images, val.num_images) == (8, 81, 20)
    assert val.class_counts == (5, 5, 5, 5)
    entries = listing(dataset, "val")
    assert {entry["path"] for entry in entries} == {f"val/class{n % 4}/{n}.jpg" for n in range(80, 100)}
    # What is left is a shard as any other: its index is DALI's, and DALI reads it in the order of the listing.
    for shard in val.shards:
        with IndexCreator(str(dataset.file(shard)), str(tmp_path / "theirs.idx"), verbose=False) as index:
            index.create_index()
        assert dataset.file(shard).with_suffix(".idx").read_bytes() == (tmp_path / "theirs.idx").read_bytes()
    loader = Loader(dataset, "val", plain(224), batch_size=8, device_id=None, num_threads=1)
    assert [int(label) for batch in loader for label in batch.labels] == [entry["label"] for entry in entries]
    pairs = [json.loads(line) for line in dataset.file("near_duplicates.jsonl").read_text().splitlines()]
    across = [one["images"] for one in pairs if one["images"][1]["split"] == "val"]
    assert {second["path"] for _, second in across} == LEFT_OUT.keys() - {"val/class0/brightness.jpg"}
    page = dataset.file("data_card.html").read_text()
    assert page.count("<figure>") == len(pairs) == 7
    assert page.count("data:image/jpeg") >= 14
    assert "7 validation images are the same pictures as training images" in page


def test_near_duplicates_stay_where_that_is_wanted(planted: Path, tmp_path: Path) -> None:
    reported = preprocess(planted, tmp_path / "reported", near_duplicates="report")
    near = reported.manifest.near_duplicates
    assert (near.num_across, near.num_left_out, reported.manifest.num_rejected) == (7, 0, 0)
    entries = listing(reported, "val")
    found = {entries[position]["path"] for position in near_duplicates_of_training(reported.path)}
    assert found == LEFT_OUT.keys()
    kept = preprocess(planted, tmp_path / "kept", near_duplicates="keep")
    assert (kept.manifest.near_duplicates, kept.manifest.splits) == (None, reported.manifest.splits)
    assert not kept.file("near_duplicates.jsonl").exists()
    assert "were not looked for" in kept.file("data_card.html").read_text()


def test_parts_and_runs_that_resume_find_the_same(planted: Path, tmp_path: Path) -> None:
    small = {"shard_bytes": 1_000_000}
    whole = preprocess(planted, tmp_path / "whole", **small)
    parts = [tmp_path / name for name in ("1", "2")]
    for part in parts:
        run_step(planted, part, part=f"{part.name}/2", **small)
    assert join(parts, tmp_path / "joined").digest == whole.digest
    assert [load(part, DatasetPartManifest, verify=ALL_FILES).path for part in parts] == parts  # not written into
    kept = join(parts, tmp_path / "kept", near_duplicates="keep").manifest
    assert (kept.near_duplicates, kept.splits["val"].num_images) == (None, 27)
    # A run that stopped for an equal file, and then goes on in the same place.
    (planted / "val" / "class0" / "equal.jpg").write_bytes((planted / "train" / "class0" / "0.jpg").read_bytes())
    with refuses("leak", "preprocess.on_leak"):
        preprocess(planted, tmp_path / "leaking", **small)
    resumed = preprocess(planted, tmp_path / "leaking", on_leak="warn", **small)
    assert resumed.manifest.splits["val"].num_images == 21  # the equal file is what on_leak speaks of
    for part in ("1", "2"):
        run_step(planted, tmp_path / f"plain{part}", part=f"{part}/2", near_duplicates="keep", **small)
    with refuses("no-thumbnails", "merge.near_duplicates"):
        join([tmp_path / "plain1", tmp_path / "plain2"], tmp_path / "unknown", near_duplicates="drop")
    (planted / "val" / "class0" / "equal.jpg").unlink()


def test_a_validation_split_of_nothing_but_near_duplicates(textures: list[Image.Image], tmp_path: Path) -> None:
    for number, image in enumerate(textures[:8]):
        for split, file in (("train", jpeg(image)), ("val", CHANGES["mirrored"](image))):
            folder = tmp_path / "images" / split / f"class{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}.jpg").write_bytes(file)
    with refuses("no-usable-image", says="near-duplicates of training images"):
        preprocess(tmp_path / "images", tmp_path / "out")
    assert len(rejected(tmp_path / "out")) == 8
