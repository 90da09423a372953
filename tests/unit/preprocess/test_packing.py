"""Shards: the same bytes for any number of workers, files unchanged or scaled down, splits, order and statistics."""

import hashlib
import io
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from wds2idx import IndexCreator

from components.common.dataset.shards import TarWriter
from components.preprocess.decoding import PixelSums
from components.preprocess.packing import plan_shards, stratified
from components.preprocess.sources import Sample
from tests.conftest import Dataset, preprocess

from .builders import SHARD_BYTES, every_path, find, gradient, listing, member, paths, write_tar, write_tree


def samples(sizes: list[int]) -> list[Sample]:
    return [Sample(path=str(index), label=0, size_bytes=size) for index, size in enumerate(sizes)]


def packed(dataset: Dataset, split: str) -> list[tuple[str, bytes, float]]:
    """Name, content and time of each member of a split's shards."""
    members = []
    for shard in dataset.manifest.splits[split].shards:
        with tarfile.open(dataset.file(shard)) as archive:
            members += [(one.name, archive.extractfile(one).read(), one.mtime) for one in archive]
    return members


def test_the_same_bytes_for_any_number_of_workers(all_digits: Path, tmp_path: Path, whole) -> None:
    one, two = whole, preprocess(all_digits, tmp_path / "two", num_workers=2, shard_bytes=SHARD_BYTES)
    assert len(one.manifest.splits["train"].shards) > 2
    assert one.digest == two.digest
    assert one.manifest.files == two.manifest.files
    for name, entry in one.manifest.files.items():
        assert two.file(name).read_bytes() == one.file(name).read_bytes()
        assert entry.digest == f"sha256:{hashlib.sha256(one.file(name).read_bytes()).hexdigest()}"


def test_shards_hold_the_files_unchanged_in_the_order_of_the_listing(few_digits: Path, digits_dataset: Dataset) -> None:
    entries, members = listing(digits_dataset, "train"), packed(digits_dataset, "train")
    assert len(entries) == digits_dataset.manifest.splits["train"].num_images == 480
    for entry, image, label in zip(entries, members[::2], members[1::2], strict=True):
        assert image == (f"{entry['key']}.jpg", (few_digits / entry["path"]).read_bytes(), 0)
        assert label == (f"{entry['key']}.cls", f"{entry['label']:06d}".encode(), 0)


def test_only_images_over_the_limit_are_scaled_down(tmp_path: Path) -> None:
    sizes = {"large": (300, 200), "wide": (100, 400), "limit": (64, 90), "small": (40, 30)}
    for label in ("a", "b"):
        (tmp_path / "data" / label).mkdir(parents=True)
        for name, size in sizes.items():
            gradient(*size).save(tmp_path / "data" / label / f"{name}.png")
    dataset = preprocess(
        tmp_path / "data", tmp_path / "out", max_short_side=64, jpeg_quality=95, near_duplicates="keep", on_leak="warn"
    )
    found = {}
    for split in ("train", "val"):
        members = {name: data for name, data, _ in packed(dataset, split)}
        for entry in listing(dataset, split):
            name = Path(entry["path"]).stem
            found[name] = (entry["height"], entry["width"])
            if min(sizes[name]) <= 64:
                assert members[f"{entry['key']}.png"] == (tmp_path / "data" / entry["path"]).read_bytes()
            else:
                image = Image.open(io.BytesIO(members[f"{entry['key']}.jpg"]))
                assert (image.format, image.height, image.width) == ("JPEG", *found[name])
    assert found == {"large": (96, 64), "wide": (64, 256), "limit": (64, 90), "small": (40, 30)}


def test_plan_of_shards() -> None:
    many = samples([1000 * (1 + index % 7) for index in range(500)])
    for shard_bytes in (10_000, 300_000, 10**9):
        shards = plan_shards(many, shard_bytes)
        assert [sample for shard in shards for sample in shard] == many
        sizes = [sum(sample.size_bytes + 2048 for sample in shard) for shard in shards]
        assert max(sizes) - min(sizes) <= 2 * 9048
        assert max(sizes) < 1.5 * shard_bytes + 9048
    assert len(plan_shards(many, 10**9)) == 1
    assert plan_shards([], 10) == []
    one_large = samples([10**9, 10])
    assert [sample for shard in plan_shards(one_large, 10**6) for sample in shard] == one_large
    # Of unknown size, images count as usual ones; those that are scaled down as what they become.
    assert 1000 < len(plan_shards(samples([0] * 6000), 128_000_000)[0]) < 1300
    assert 4000 < len(plan_shards(samples([3_000_000] * 10_000), 128_000_000, max_short_side=256)[0]) < 6000
    small = samples([5000] * 1000)
    assert plan_shards(small, 10**6, max_short_side=256) == plan_shards(small, 10**6)


def test_statistics_are_numpys(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels, sizes = [], []
    for split in ("train", "val"):
        for index in range(8):
            folder = tmp_path / "images" / split / f"c{index % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            sizes.append(rng.integers(20, 90, 2).tolist())
            image = rng.integers(0, 256, (*sizes[-1], 3), dtype=np.uint8) // np.array([1, 2, 4], np.uint8)
            Image.fromarray(image).save(folder / f"{index}.png")
            if split == "train":
                pixels.append(image.reshape(-1, 3) / 255)
    statistics = preprocess(tmp_path / "images", tmp_path / "out").manifest.statistics
    every, (heights, widths), sides = np.concatenate(pixels), zip(*sizes, strict=True), [min(size) for size in sizes]
    np.testing.assert_allclose(statistics.mean, every.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(statistics.std, every.std(axis=0), rtol=1e-9)
    assert (statistics.min_side, statistics.max_side) == (min(sides), max(sides))
    assert (statistics.max_width, statistics.max_height) == (max(widths), max(heights))
    assert statistics.median_side == round(float(np.median(sides)))


def test_large_images_are_counted_on_a_grid_that_stands_for_all_of_them() -> None:
    """As near to numpy's sums as 10,000 pixels allow; a small image beside them weighs as many pixels as it has."""
    rng = np.random.default_rng(0)
    sums, pixels = PixelSums(), []
    for height, width in [(375, 500), (1000, 1500), (30, 40), (200, 200), (1, 90_000)]:
        levels = np.linspace(0, 250, width)[None, :, None] * np.array([1, 0.5, 0.2])
        image = (levels + rng.normal(0, 9, (height, width, 3))).clip(0, 255).astype(np.uint8)
        sums.add(Image.fromarray(image))
        pixels.append(image.reshape(-1, 3) / 255)
    every = np.concatenate(pixels)
    assert sums.num_pixels == pytest.approx(len(every), rel=0.01)
    mean = np.array(sums.values()) / sums.num_pixels
    np.testing.assert_allclose(mean, every.mean(axis=0), atol=0.003)
    std = np.sqrt(np.array(sums.squares()) / sums.num_pixels - mean**2)
    np.testing.assert_allclose(std, every.std(axis=0), atol=0.003)


@pytest.mark.parametrize("num_samples", [1, 7, 40])
def test_a_tar_is_that_of_tarfile_and_its_index_that_of_dali(tmp_path: Path, num_samples: int) -> None:
    rng = np.random.default_rng(num_samples)
    images = [rng.bytes(int(rng.choice([0, 1, 511, 512, 513, 9000]))) for _ in range(num_samples)]
    with TarWriter(tmp_path / "ours.tar") as ours:
        for number, data in enumerate(images):
            ours.add(f"{number:09d}", {"jpg": data, "cls": b"000003"})
    members = [
        one
        for number, data in enumerate(images)
        for one in (member(f"{number:09d}.jpg", data), member(f"{number:09d}.cls", b"000003"))
    ]
    theirs = write_tar(tmp_path / "theirs.tar", *members, form=tarfile.USTAR_FORMAT).read_bytes()
    with IndexCreator(str(tmp_path / "theirs.tar"), str(tmp_path / "theirs.idx"), verbose=False) as index:
        index.create_index()
    assert (tmp_path / "ours.tar").read_bytes() == theirs
    assert (ours.size_bytes, ours.digest()) == (len(theirs), f"sha256:{hashlib.sha256(theirs).hexdigest()}")
    assert ours.index() == (tmp_path / "theirs.idx").read_bytes()


def test_every_stretch_of_the_training_split_holds_the_classes_in_proportion() -> None:
    shares = {0: 600, 1: 300, 2: 90, 3: 10}
    given = [
        Sample(path=f"{label}/{number}", label=label, size_bytes=1)
        for label, count in shares.items()
        for number in range(count)
    ]
    order = stratified(given, seed=0)
    assert set(order) == set(given)
    assert len(order) == len(given)
    for start in range(0, 900, 37):
        for length in (100, 50):
            counts = Counter(sample.label for sample in order[start : start + length])
            assert all(abs(counts[label] - count * length / 1000) <= 1 for label, count in shares.items())
    assert order == stratified(given, seed=0) != stratified(given, seed=1)
    same_class = [sample for sample in order if sample.label == 0]
    assert same_class != [sample for sample in given if sample.label == 0]


def test_a_presplit_folder_is_kept_as_it_is(tmp_path: Path) -> None:
    counts = {"train/b": 3, "train/a": 5, "train/c": 2, "val/a": 2, "val/b": 1}
    dataset = preprocess(write_tree(tmp_path / "images", counts), tmp_path / "out")
    manifest = dataset.manifest
    assert manifest.classes == ("a", "b", "c")
    assert manifest.splits["train"].class_counts == (5, 3, 2)
    assert manifest.splits["val"].class_counts == (2, 1, 0)
    for split in ("train", "val"):
        entries = listing(dataset, split)
        assert len({entry["path"] for entry in entries}) == manifest.splits[split].num_images
        for entry in entries:
            assert entry["path"].split("/")[:2] == [split, manifest.classes[entry["label"]]]


def test_one_tree_is_split_by_class(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "images", {"cat": 20, "dog": 10, "eel": 2})
    names = tmp_path / "names.txt"
    names.write_text("dog\n\nbird\n cat \neel\n")
    dataset = preprocess(root, tmp_path / "out", val_fraction=0.2, class_names_file=str(names), near_duplicates="keep")
    assert dataset.manifest.classes == ("dog", "bird", "cat", "eel")
    assert dataset.manifest.splits["val"].class_counts == (2, 0, 4, 1)  # at least one of each
    assert dataset.manifest.splits["train"].class_counts == (8, 0, 16, 1)
    assert every_path(dataset) == {path.relative_to(root).as_posix() for path in root.glob("*/*.png")}


def test_the_split_follows_from_seed_and_names_alone(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "images", {"a": 40, "b": 40})

    def held_out(seed: int = 0) -> set[str]:
        return {sample.path for sample in find(root, seed=seed).splits["val"]}

    first = held_out()
    assert len(first) == 20
    assert held_out() == first != held_out(seed=1)
    write_tree(root, {"c": 7})  # a class that comes, goes or grows changes nothing in another
    assert {path for path in held_out() if path[0] in "ab"} == first
    # With more images of the same class, those held out stay unless the new ones take their place.
    for index in range(40, 44):
        gradient().save(root / "a" / f"{index:03d}.png")
    old, grown = ({path for path in found if path[0] == "a"} for found in (first, held_out()))
    assert len(grown) == 11
    assert len(old & grown) >= 11 - 4


def test_a_dataset_of_preprocess_is_a_source_again(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "images", {"cat": 4, "dog": 6})
    first = preprocess(root, tmp_path / "first", near_duplicates="keep")
    again = preprocess(first.path, tmp_path / "again", near_duplicates="keep")
    assert again.manifest.classes == ("cat", "dog") == find(first.file("train-000000.tar")).classes
    for split in ("train", "val"):
        assert again.manifest.splits[split].class_counts == first.manifest.splits[split].class_counts
        hashes = [{entry["sha256"] for entry in listing(dataset, split)} for dataset in (first, again)]
        assert hashes[0] == hashes[1]
    (first.path / "manifest.json").write_text('{"kind": "of another program", "classes": 2}')
    assert find(first.path).classes == ("0", "1")
    assert len(paths(find(first.path))) == 10
