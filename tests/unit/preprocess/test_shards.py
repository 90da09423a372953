"""Shards: the same bytes for any number of workers, files unchanged, statistics."""

import hashlib
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from wds2idx import IndexCreator

from components.common.contracts.manifests import Artifact, DatasetManifest
from components.preprocess.decoding import PixelSums
from components.preprocess.shards import TarWriter, plan_shards
from components.preprocess.sources import Sample

Preprocess = Callable[..., Artifact[DatasetManifest]]


def digests(directory: Path) -> dict[str, str]:
    """Digest of every file but the manifest, which names the configuration."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.iterdir())
        if path.name != "manifest.json"
    }


def test_the_same_bytes_for_any_number_of_workers(all_digits: Path, tmp_path: Path, run_preprocess: Preprocess) -> None:
    options = {"shard_bytes": 1_000_000}
    one = run_preprocess(all_digits, tmp_path / "one", num_workers=1, **options)
    two = run_preprocess(all_digits, tmp_path / "two", num_workers=2, **options)
    assert len(one.manifest.splits["train"].shards) > 1
    assert digests(one.path) == digests(two.path)
    assert one.digest == two.digest
    assert one.manifest.splits == two.manifest.splits
    assert one.manifest.statistics == two.manifest.statistics
    other = run_preprocess(all_digits, tmp_path / "other", seed=1, **options)
    assert other.manifest.splits["val"].digest != one.manifest.splits["val"].digest


def test_shards_hold_the_files_unchanged_in_the_order_of_the_listing(
    few_digits: Path, digits_dataset: Artifact[DatasetManifest], listing: Callable[..., Any]
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


def test_images_of_unknown_size_count_as_usual_ones_and_those_that_are_scaled_down_as_what_they_become() -> None:
    unknown = [Sample(path=str(index), label=0, size_bytes=0) for index in range(6000)]
    assert 1000 < len(plan_shards(unknown, 128_000_000)[0]) < 1300
    large = [Sample(path=str(index), label=0, size_bytes=3_000_000) for index in range(10_000)]
    assert 4000 < len(plan_shards(large, 128_000_000, max_short_side=256)[0]) < 6000
    small = [Sample(path=str(index), label=0, size_bytes=5000) for index in range(1000)]
    assert plan_shards(small, 10**6, max_short_side=256) == plan_shards(small, 10**6)


def test_statistics_are_numpys(tmp_path: Path, run_preprocess: Preprocess) -> None:
    rng = np.random.default_rng(0)
    root = tmp_path / "images"
    pixels, sides, heights, widths = [], [], [], []
    for split in ("train", "val"):
        for index in range(8):
            folder = root / split / f"c{index % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            height, width = rng.integers(20, 90, 2).tolist()
            image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8) // np.array([1, 2, 4], np.uint8)
            Image.fromarray(image).save(folder / f"{index}.png")
            sides.append(min(height, width))
            heights.append(height)
            widths.append(width)
            if split == "train":
                pixels.append(image.reshape(-1, 3) / 255)
    statistics = run_preprocess(root, tmp_path / "out").manifest.statistics
    every = np.concatenate(pixels)
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
        image = (
            np.linspace(0, 250, width)[None, :, None] * np.array([1, 0.5, 0.2]) + rng.normal(0, 9, (height, width, 3))
        ).clip(0, 255)
        sums.add(Image.fromarray(image.astype(np.uint8)))
        pixels.append(image.astype(np.uint8).reshape(-1, 3) / 255)
    every = np.concatenate(pixels)
    assert sums.num_pixels == pytest.approx(len(every), rel=0.01)
    mean = np.array(sums.values()) / sums.num_pixels
    np.testing.assert_allclose(mean, every.mean(axis=0), atol=0.003)
    deviation = np.sqrt(np.array(sums.squares()) / sums.num_pixels - mean**2)
    np.testing.assert_allclose(deviation, every.std(axis=0), atol=0.003)


@pytest.mark.parametrize("num_samples", [1, 7, 40])
def test_a_tar_is_that_of_tarfile_and_its_index_that_of_dali(tmp_path: Path, num_samples: int) -> None:
    rng = np.random.default_rng(num_samples)
    samples = {
        f"{number:09d}": {"jpg": rng.bytes(int(rng.choice([0, 1, 511, 512, 513, 9000]))), "cls": b"000003"}
        for number in range(num_samples)
    }
    with TarWriter(tmp_path / "ours.tar") as ours:
        for key, members in samples.items():
            ours.add(key, members)
    with tarfile.open(tmp_path / "theirs.tar", "w", format=tarfile.USTAR_FORMAT) as theirs:
        for key, members in samples.items():
            for extension, data in members.items():
                member = tarfile.TarInfo(f"{key}.{extension}")
                member.size = len(data)
                theirs.addfile(member, io.BytesIO(data))
    with IndexCreator(str(tmp_path / "theirs.tar"), str(tmp_path / "theirs.idx"), verbose=False) as index:
        index.create_index()
    written = (tmp_path / "ours.tar").read_bytes()
    assert written == (tmp_path / "theirs.tar").read_bytes()
    assert (ours.size_bytes, ours.digest()) == (len(written), f"sha256:{hashlib.sha256(written).hexdigest()}")
    assert ours.index() == (tmp_path / "theirs.idx").read_bytes()
