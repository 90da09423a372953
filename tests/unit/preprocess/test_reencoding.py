"""Large images are written anew, small ones are packed as they are; the training split is stratified."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from components.common.contracts.manifests import Artifact, DatasetManifest
from components.preprocess.decoding import shrink
from components.preprocess.packing import stratified
from components.preprocess.sources import Sample

Preprocess = Callable[..., Artifact[DatasetManifest]]


def smooth(height: int, width: int) -> np.ndarray:
    """[H, W, 3] uint8: what JPEG and scaling change little."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    return np.stack([255 * x, 255 * y, 255 * (x + y) / 2], axis=2).astype(np.uint8)


def test_only_images_over_the_limit_are_written_anew(
    tmp_path: Path, run_preprocess: Preprocess, listing: Callable[..., Any]
) -> None:
    sizes = {"large": (300, 200), "wide": (100, 400), "limit": (64, 90), "small": (40, 30)}
    for label in ("a", "b"):
        for name, size in sizes.items():
            (tmp_path / "data" / label).mkdir(parents=True, exist_ok=True)
            Image.fromarray(smooth(*size)).save(tmp_path / "data" / label / f"{name}.png")
    dataset = run_preprocess(tmp_path / "data", tmp_path / "out", max_short_side=64, jpeg_quality=95, on_leak="warn")
    entries = {entry["path"]: entry for split in ("train", "val") for entry in listing(dataset, split)}
    found = {path.split("/")[1]: (entry["height"], entry["width"]) for path, entry in entries.items()}
    assert found == {"large.png": (96, 64), "wide.png": (64, 256), "limit.png": (64, 90), "small.png": (40, 30)}
    packed: dict[str, bytes] = {}
    for shard in [*dataset.manifest.splits["train"].shards, *dataset.manifest.splits["val"].shards]:
        with tarfile.open(dataset.file(shard)) as archive:
            split = shard.split("-")[0]
            packed |= {f"{split}/{member.name}": archive.extractfile(member).read() for member in archive}
    for split in ("train", "val"):
        for entry in listing(dataset, split):
            original = (tmp_path / "data" / entry["path"]).read_bytes()
            if min(sizes[Path(entry["path"]).stem]) <= 64:
                assert packed[f"{split}/{entry['key']}.png"] == original
            else:
                image = Image.open(io.BytesIO(packed[f"{split}/{entry['key']}.jpg"]))
                assert (image.format, image.height, image.width) == ("JPEG", entry["height"], entry["width"])
                expected = smooth(entry["height"], entry["width"]).astype(int)
                assert np.abs(np.asarray(image).astype(int) - expected).mean() < 3


@pytest.mark.parametrize("size", [(500, 375), (375, 500), (65, 4000), (64 * 3, 64 * 3)])
def test_the_shorter_side_is_exactly_the_limit(size: tuple[int, int]) -> None:
    data, image = shrink(Image.fromarray(smooth(*size)), 64, 90)
    assert min(image.size) == 64
    assert max(image.size) == pytest.approx(max(size) * 64 / min(size), abs=0.51)
    assert (image.width > image.height) == (size[1] > size[0])
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), np.asarray(image))


def test_every_stretch_of_the_training_split_holds_the_classes_in_proportion() -> None:
    shares = {0: 600, 1: 300, 2: 90, 3: 10}
    samples = [
        Sample(path=f"{label}/{number}", label=label, size_bytes=1)
        for label, count in shares.items()
        for number in range(count)
    ]
    order = stratified(samples, seed=0)
    assert sorted(sample.path for sample in order) == sorted(sample.path for sample in samples)
    for start in range(0, 900, 37):
        for length in (100, 50):
            window = order[start : start + length]
            for label, count in shares.items():
                assert abs(sum(sample.label == label for sample in window) - count * length / 1000) <= 1
    assert [sample.path for sample in order] == [sample.path for sample in stratified(samples[::-1][::-1], seed=0)]
    assert [sample.path for sample in order] != [sample.path for sample in stratified(samples, seed=1)]
    same_class = [int(sample.path.split("/")[1]) for sample in order if sample.label == 0]
    assert same_class != sorted(same_class)
