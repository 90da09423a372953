"""The loader on a GPU: the CPU's images, the same batches after an interruption, and errors instead of waiting."""

import functools
import gc
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import Artifact, DatasetManifest, load
from components.common.contracts.transforms import Augmentation, transform_for
from components.common.data.corruptions import CORRUPTIONS
from components.common.data.loader import Batch, Loader
from tests.unit import positions
from tests.unit.positions import check_boxes, check_mask, plain, seen, write_positions

SIZES = [(300, 400), (375, 500), (500, 333), (256, 256), (640, 427), (257, 700), (200, 180), (1024, 768), (241, 301)]
NUM_TRAIN = 96
SPEC = transform_for(160, resize_ratio=1.14)
EVERYTHING = Augmentation(brightness=0.3, contrast=0.3, saturation=0.3, hue=0.1, mixup_alpha=0.4, cutmix_alpha=1.0)


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    assert torch.cuda.is_available(), "these tests need a GPU"


picture = functools.partial(positions.picture, wave=20, noise=8, edge=0)


@pytest.fixture(scope="module")
def pictures(
    tmp_path_factory: pytest.TempPathFactory, run_preprocess: Callable[..., Artifact[DatasetManifest]]
) -> Artifact[DatasetManifest]:
    """JPEG files of odd sizes, with colours at half and at full resolution, and two that no GPU decodes."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for split, number in (("train", NUM_TRAIN), ("val", 2 * len(SIZES))):
        for index in range(number):
            folder = root / "images" / split / f"class{index % 4}"
            folder.mkdir(parents=True, exist_ok=True)
            image = picture(*SIZES[index % len(SIZES)], rng)
            subsampling = "4:2:0" if index < len(SIZES) else "4:4:4"
            image.save(folder / f"{index}.jpg", quality=92, subsampling=subsampling, progressive=index % 5 == 4)
    picture(300, 400, rng).save(root / "images/val/class0/other.png")
    picture(300, 400, rng).convert("L").save(root / "images/val/class1/gray.jpg", quality=92)
    return run_preprocess(root / "images", root / "dataset")


def test_degraded_images_are_those_of_the_cpu(pictures: Artifact[DatasetManifest]) -> None:
    """The noise, too, in batches of any size; JPEG and contrast carry on what the decoders differ in.

    In batches of another size the hardware decoder takes other files.
    """
    cpu, gpu, larger = (
        torch.cat([batch.images.cpu() for batch in Loader(pictures, "val", SPEC, corruptions=CORRUPTIONS, **options)])
        for options in ({"batch_size": 30}, {"batch_size": 30, "device_id": 0}, {"batch_size": 128, "device_id": 0})
    )
    levels = 255 * torch.tensor(SPEC.std)[:, None, None]
    for other in (cpu, larger):
        differences = (gpu - other).abs() * levels
        for place, corruption in enumerate(CORRUPTIONS):
            assert differences[place :: len(CORRUPTIONS)].mean() < 1.0, corruption


@pytest.mark.parametrize("hw_decoder_load", [0.0, 0.9])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_evaluation_gives_the_images_of_the_cpu(
    pictures: Artifact[DatasetManifest], interpolation: Any, hw_decoder_load: float
) -> None:
    """The CPU's are torchvision's (tests/unit/common/data/test_loader.py), to the same tolerance."""
    spec = transform_for(160, resize_ratio=1.14, interpolation=interpolation)
    expected = Loader(pictures, "val", spec, batch_size=8)
    actual = Loader(pictures, "val", spec, batch_size=8, device_id=0, hw_decoder_load=hw_decoder_load)
    level = 255 * torch.tensor(spec.std)[:, None, None]
    num_images = 0
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.images.device == ours.labels.device == torch.device("cuda", 0)
        assert ours.images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(ours.labels.cpu(), theirs.labels)
        for image, reference in zip(ours.images.cpu(), theirs.images, strict=True):
            difference = (image - reference).abs() * level
            print(f"image {num_images}: mean {difference.mean():.3f}, largest {difference.max():.1f} levels")
            assert difference.mean() < 0.5, num_images
            assert difference.flatten().quantile(0.99) < 3, num_images
            num_images += 1
    assert num_images == pictures.manifest.splits["val"].num_images


def build(dataset: Artifact[DatasetManifest], **options: Any) -> Loader:
    given: dict[str, Any] = {"batch_size": 11, "augmentation": EVERYTHING, "image_sizes": (96, 128), "num_shards": 2}
    return Loader(dataset, "train", SPEC, **{**given, "seed": 5, "device_id": 0, **options})


def alike(first: Batch, second: Batch) -> bool:
    """The same images with the same augmentation. The hardware decoder takes other files in another run: rounding."""
    near = float((first.images - second.images).abs().mean()) < 0.02
    return near and torch.equal(first.labels, second.labels)


@pytest.mark.parametrize("decoder", [{"hw_decoder_load": 0.0}, {"hw_decoder_load": 0.9}, {"decode_on": "cpu"}])
@pytest.mark.parametrize(("rank", "num_pipelines"), [(0, 1), (1, 1), (1, 2)])
def test_resumed_loaders_deliver_the_rest(
    pictures: Artifact[DatasetManifest], rank: int, num_pipelines: int, decoder: dict[str, Any]
) -> None:
    options = {"shard_id": rank, "num_pipelines": num_pipelines, **decoder}
    whole = build(pictures, **options)
    num_batches = len(whole)
    assert num_batches == NUM_TRAIN // 2 // 11
    states, batches = [whole.state()], []
    for _ in range(3):
        for batch in whole:
            batches.append(Batch(images=batch.images.clone(), labels=batch.labels.clone()))
            states.append(whole.state())
    assert not any(alike(batches[0], other) for other in batches[1:num_batches])
    for done in (0, 1, num_batches - 1, num_batches, num_batches + 1):
        resumed = build(pictures, **options, state=states[done])
        rest = [*resumed, *resumed]
        assert len(rest) == 2 * num_batches - done % num_batches
        assert all(map(alike, batches[done:], rest)), done


def test_two_pipelines_take_turns_where_an_epoch_has_batches_enough(pictures: Artifact[DatasetManifest]) -> None:
    few, many = (build(pictures, batch_size=size, num_shards=1) for size in (4, 3))
    assert [loader.state()["identity"]["num_pipelines"] for loader in (few, many)] == [1, 2]
    assert sum(len(batch.labels) for batch in many) == NUM_TRAIN


def test_batches_are_whole_on_a_stream_of_the_callers(pictures: Artifact[DatasetManifest]) -> None:
    expected = [batch.images.cpu() for batch in Loader(pictures, "val", SPEC, batch_size=8, device_id=0)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        loader = Loader(pictures, "val", SPEC, batch_size=8, device_id=0)
        sums = [batch.images.double().sum() for batch in loader]
    stream.synchronize()
    for actual, images in zip(sums, expected, strict=True):
        # Atomic sums differ in the last digits; a batch that is not there yet in the first.
        assert float(actual) == pytest.approx(float(images.double().sum()), rel=1e-3, abs=50)


def test_decoders_stay_loaded_when_a_loader_goes(pictures: Artifact[DatasetManifest]) -> None:
    next(iter(Loader(pictures, "val", SPEC, batch_size=8, device_id=0)))
    gc.collect()
    assert "libnvjpeg_ext" in Path("/proc/self/maps").read_text()


def test_batches_stay_whole_when_the_gpu_is_behind(pictures: Artifact[DatasetManifest]) -> None:
    """DALI must not write into a batch that is gone on the host and not yet read by the GPU."""

    def sums(sleep_cycles: int) -> list[torch.Tensor]:
        loader, found = build(pictures, augmentation=Augmentation(), hw_decoder_load=0.0), []
        for _ in range(5):
            for batch in loader:
                torch.cuda._sleep(sleep_cycles)
                found.append(batch.images.abs().sum(dim=(1, 2, 3)))
                if not sleep_cycles:
                    torch.cuda.synchronize()
        return found

    torch.testing.assert_close(sums(50_000_000), sums(0), rtol=1e-3, atol=1)


def test_images_follow_a_size_per_epoch(pictures: Artifact[DatasetManifest]) -> None:
    loader = build(pictures)
    for size in (96, 128, 128):
        assert {tuple(batch.images.shape) for batch in loader} == {(11, 3, size, size)}


def test_the_process_is_told_of_a_reader_that_is_stuck(pictures: Artifact[DatasetManifest], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(pictures.path, tmp_path / "dataset"))
    dataset = load(copy, DatasetManifest)
    shard = copy / dataset.manifest.splits["val"].shards[0]
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(EngineryError, match=r"reading the val split of .* is stuck"):
        Loader(dataset, "val", SPEC, batch_size=8, device_id=0, read_timeout_s=1.0)
    with shard.open("wb"):  # lets go of the thread
        pass


@pytest.mark.parametrize("task", ["segmentation", "detection"])
def test_labels_lie_where_their_pixels_do(
    task: str, tmp_path: Path, run_preprocess: Callable[..., Artifact[DatasetManifest]]
) -> None:
    write_positions(tmp_path / "data")
    dataset = run_preprocess(tmp_path / "data", tmp_path / "dataset", task=task, near_duplicates="keep", on_leak="warn")
    augmentation = Augmentation(min_area=0.2, max_aspect_ratio=2.0)
    train = Loader(dataset, "train", plain(80, 80), batch_size=5, augmentation=augmentation, device_id=0)
    val = Loader(dataset, "val", plain(60, 48), batch_size=4, device_id=0)
    for batches, least_share in ((val, 0.0), *[(train, 0.25)] * 4):
        for batch in list(batches):  # all of an epoch are held before the first is looked at: none is overwritten
            assert batch.labels.device == batch.images.device
            for one in seen(batch):
                if task == "segmentation":
                    check_mask(one)
                else:
                    check_boxes(one, least_share)
