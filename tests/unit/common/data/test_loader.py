"""The DALI loader: which images come when, that they are what torchvision makes of the same file, and its errors."""

import colorsys
import hashlib
import math
import multiprocessing
import os
import shutil
import tarfile
import time
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from components.common.contracts.manifests import ALL_FILES, DatasetManifest, load
from components.common.contracts.records import DatasetStatistics
from components.common.contracts.transforms import Augmentation, Interpolation, TransformSpec, transform_for
from components.common.data.dali_pipelines import decoder_options, evaluation_pipeline, training_pipeline
from components.common.data.loader import Batch, EpochPlan, Loader, OwnedOutputs, Watchdog, plan_training
from components.common.runtimes.runner import to_numpy
from components.common.tasks import TaskName, load_task
from tests.conftest import Dataset, preprocess
from tests.unit.positions import picture, plain
from tests.unit.preprocess.builders import listing
from tests.unit.refusals import refuses
from tests.unit.registered import replace_file, reseal

NUM_TRAIN, NUM_VAL = 53, 37
PLAIN = plain(32)  # so that colours can be read back
DIGITS = transform_for(32, resize_ratio=1.0)
# Height and width of the pictures of the parity test: wider and higher, exact and fractional, smaller than 256.
SIZES = [(300, 400), (375, 500), (500, 333), (256, 256), (640, 427), (257, 700), (200, 180), (1024, 768), (240, 300)]
LIMIT_S = 1.0


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Images of one colour each: the red says which image, the green which split, the blue which class."""
    root = tmp_path_factory.mktemp("colours")
    for split, number in (("train", NUM_TRAIN), ("val", NUM_VAL)):
        for index in range(number):
            folder = root / "images" / split / f"class{index % 3}"
            folder.mkdir(parents=True, exist_ok=True)
            colour = (index * 4, 100 if split == "train" else 200, index % 3 * 50)
            Image.new("RGB", (40 + index % 5, 40), colour).save(folder / f"{index:03d}.png")
    return preprocess(root / "images", root / "dataset")


def contents(batch: Batch) -> list[int]:
    """The numbers of these images. Checks that split and class agree with the labels on the way."""
    images = to_numpy(batch.images)
    assert images.shape[1:] == (3, 32, 32)
    assert np.ptp(images, axis=(2, 3)).max() == 0  # one colour all over, whatever was cropped and flipped
    colour = images[:, :, 0, 0]  # [B, 3]
    assert (colour[:, 2] / 50).round().astype(int).tolist() == batch.labels.tolist()
    return (colour[:, 0] / 4).round().astype(int).tolist()


@pytest.mark.parametrize(
    ("num_shards", "batch_size"),
    [(1, 1), (1, 8), (1, 36), (1, 37), (1, 64), (2, 8), (3, 5), (7, 1), (NUM_VAL, 4), (NUM_VAL + 3, 2)],
)
def test_ranks_evaluate_each_image_once_in_order(colours: Dataset, num_shards: int, batch_size: int) -> None:
    entries = listing(colours, "val")
    expected = [(int(Path(entry["path"]).stem), entry["label"]) for entry in entries]
    assert sorted(index for index, _ in expected) == list(range(NUM_VAL))
    seen: list[tuple[int, int]] = []
    for rank in range(num_shards):
        loader = Loader(colours, "val", PLAIN, batch_size=batch_size, shard_id=rank, num_shards=num_shards)
        full, rest = divmod(loader.num_images, batch_size)
        for _ in range(2):
            batches = [list(zip(contents(batch), batch.labels.tolist(), strict=True)) for batch in loader]
            assert [*map(len, batches)] == [batch_size] * full + [rest] * (rest > 0)
            assert len(batches) == len(loader)
            assert bool(batches) == (rank < NUM_VAL)  # those beyond have nothing to do, as often as they are asked
        seen += [image for batch in batches for image in batch]
    assert seen == expected


def test_layout_and_types_of_batches(colours: Dataset) -> None:
    batch = next(iter(Loader(colours, "val", PLAIN, batch_size=8)))
    assert (batch.images.shape, batch.images.dtype, batch.labels.dtype) == ((8, 3, 32, 32), torch.float32, torch.int64)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert to_numpy(batch.images).flags.c_contiguous
    options = {"batch_size": 4, "augmentation": Augmentation(flip_probability=0.5, mixup_alpha=0.4)}
    fp32, fp16 = (next(iter(Loader(colours, "train", DIGITS, fp16=fp16, **options))) for fp16 in (False, True))
    assert fp16.images.dtype == torch.float16
    assert fp16.images.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(fp16.images.float(), fp32.images, rtol=2**-10, atol=2e-3)  # mixing rounds once more
    torch.testing.assert_close(fp16.labels, fp32.labels)


def epochs_of(dataset: Dataset, number: int, **options: int) -> list[list[list[int]]]:
    """The images that each batch of each epoch holds."""
    loader = Loader(dataset, "train", PLAIN, augmentation=Augmentation(min_area=0.3), **options)
    return [[contents(batch) for batch in loader] for _ in range(number)]


@pytest.mark.parametrize(
    ("num_shards", "num_pipelines", "batch_size"),
    [
        *[(1, 1, 8), (1, 1, NUM_TRAIN), (2, 1, 8), (2, 1, 26), (3, 1, 4), (3, 1, 17), (4, 1, 13), (5, 1, 1)],
        *[(1, 2, 8), (1, 3, 5), (2, 2, 5), (2, 3, 2)],
    ],
)
def test_ranks_get_full_batches_and_no_image_twice(
    colours: Dataset, num_shards: int, num_pipelines: int, batch_size: int
) -> None:
    options = {"batch_size": batch_size, "num_shards": num_shards, "num_pipelines": num_pipelines}
    ranks = [epochs_of(colours, 8, shard_id=rank, **options) for rank in range(num_shards)]
    num_batches = NUM_TRAIN // (num_shards * num_pipelines) // batch_size * num_pipelines
    seen: set[int] = set()
    for epoch in range(8):
        for rank in ranks:
            assert [len(batch) for batch in rank[epoch]] == [batch_size] * num_batches
        images = [index for rank in ranks for batch in rank[epoch] for index in batch]
        assert len(set(images)) == len(images) == num_shards * num_batches * batch_size
        seen.update(images)
    assert seen == set(range(NUM_TRAIN))  # what one epoch leaves out, another has
    parts = {frozenset(index for batch in epoch for index in batch) for epoch in ranks[0]}
    assert len(parts) > 1 or batch_size == NUM_TRAIN  # the parts go round the ranks


def test_accumulated_steps_are_whole_with_several_pipelines(colours: Dataset) -> None:
    for epoch in epochs_of(colours, 4, batch_size=4, num_pipelines=2, batches_per_step=5):
        images = [index for batch in epoch for index in batch]
        assert len(set(images)) == len(images) == 4 * (NUM_TRAIN // 4 // 5 * 5)


def test_epochs_differ_and_the_seed_decides(colours: Dataset, digits_dataset: Dataset) -> None:
    first, second = epochs_of(colours, 2, batch_size=8, seed=1)
    assert first != second
    assert epochs_of(colours, 2, batch_size=8, seed=1) == [first, second]
    assert epochs_of(colours, 1, batch_size=8, seed=2) != [first]
    (later,) = epochs_of(colours, 1, batch_size=8, seed=1, first_epoch=1)  # after epochs of other processes
    assert later not in (first, second)

    def first_batch(seed: int) -> np.ndarray:  # crops and flips, too
        loader = Loader(digits_dataset, "train", PLAIN, batch_size=16, augmentation=Augmentation(), seed=seed)
        return to_numpy(next(iter(loader)).images)

    np.testing.assert_array_equal(first_batch(5), first_batch(5))
    assert np.abs(first_batch(5) - first_batch(6)).mean() > 1


@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("split", ["train", "val"])
def test_an_image_that_is_damaged_or_that_dali_refuses(colours: Dataset, tmp_path, split: str, is_listed: bool) -> None:
    copy = Path(shutil.copytree(colours.path, tmp_path / "dataset"))
    shard = copy / colours.manifest.splits[split].shards[0]
    with tarfile.open(shard) as archive:
        member = [member for member in archive if member.name.endswith(".png")][3]
    data = bytearray(shard.read_bytes())
    data[member.offset_data : member.offset_data + member.size] = bytes(member.size)  # the size stays: load passes
    shard.write_bytes(data)
    entry = listing(colours, split)[3]
    if is_listed:  # as if it was packed so
        text = (copy / f"{split}.jsonl").read_text()
        changed = text.replace(entry["sha256"], hashlib.sha256(bytes(member.size)).hexdigest())
        (copy / f"{split}.jsonl").write_text(changed)
    options: dict[str, Any] = {"augmentation": Augmentation()} if split == "train" else {}
    with refuses("undecodable-dataset" if is_listed else "damaged-dataset") as caught:
        list(Loader(load(copy, DatasetManifest), split, PLAIN, batch_size=8, **options))
    if not is_listed:
        for text in (str(shard), member.name, entry["path"], "python -m components.preprocess"):
            assert text in str(caught.value)
    with refuses("damaged-artifact"):
        load(copy, DatasetManifest, verify=ALL_FILES)  # what --verify does, before anything is decoded


def test_a_block_of_zeros_over_samples(colours: Dataset, tmp_path: Path) -> None:
    """A disk's typical damage."""
    copy = Path(shutil.copytree(colours.path, tmp_path / "dataset"))
    shard = copy / colours.manifest.splits["val"].shards[0]
    with tarfile.open(shard) as archive:
        third = archive.getmembers()[4]
    data = bytearray(shard.read_bytes())
    data[third.offset : third.offset + 4096] = bytes(4096)
    shard.write_bytes(data)
    with refuses("damaged-dataset", says=listing(colours, "val")[2]["path"]):
        list(Loader(load(copy, DatasetManifest), "val", PLAIN, batch_size=8))


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        (12, 2, b"1000000"),  # behind the shard's end, where DALI ended with the process
        (37, 2, b"9223372036854775807"),  # the end has no int64
        (3, 2, b"-5"),
        (3, 1, b"512"),  # a member twice
        (3, 1, b"1e3"),
        (3, 0, b"cls"),
        (3, 3, b"name\njpg"),  # a member more
        (3, 3, b"\xff"),  # which DALI's message would not be text with
        (0, 1, b"36"),
        (0, 1, b"99999999999"),
        (37, 3, b" " * 100_000),  # more text than such a shard's index has
    ],
)
def test_an_index_that_its_author_sealed(colours: Dataset, tmp_path: Path, line: int, field: int, value: bytes) -> None:
    copy = Path(shutil.copytree(colours.path, tmp_path / "dataset"))
    index = colours.manifest.splits["val"].shards[0].replace(".tar", ".idx")
    lines = [text.split(b" ") for text in (copy / index).read_bytes().splitlines()]
    lines[line][field] = value
    replace_file(copy, index, b"".join(b" ".join(fields) + b"\n" for fields in lines))
    with refuses("damaged-dataset", says=index):
        Loader(load(copy, DatasetManifest, verify=ALL_FILES), "val", PLAIN, batch_size=8)


@pytest.mark.parametrize("label", ["3", "-1", "x", "\xff"])
def test_a_label_that_is_no_class_of_the_dataset(colours: Dataset, tmp_path: Path, label: str) -> None:
    copy = Path(shutil.copytree(colours.path, tmp_path / "dataset"))
    shard = copy / colours.manifest.splits["val"].shards[0]
    with tarfile.open(shard) as archive:
        member = [member for member in archive if member.name.endswith(".cls")][3]
    data = bytearray(shard.read_bytes())
    data[member.offset_data : member.offset_data + member.size] = label.zfill(member.size).encode("latin-1")
    shard.write_bytes(data)
    with refuses("damaged-dataset", says="none of its 3 classes"):
        list(Loader(load(copy, DatasetManifest), "val", PLAIN, batch_size=8))


@pytest.mark.parametrize(
    ("task", "known", "unknown"),
    [("detection", [-1, 0, 2], [3, -2, math.nan]), ("segmentation", [255, 0, 2], [3, 254])],
)
def test_classes_of_boxes_and_masks(colours: Dataset, task: TaskName, known: list[float], unknown: list[float]) -> None:
    loader = Loader(colours, "val", PLAIN, batch_size=8)
    loader._task = load_task(task)
    loader._dataset = SimpleNamespace(manifest=SimpleNamespace(task=task), path="dataset")  # type: ignore[assignment]

    def check(number: float) -> None:
        boxes = torch.zeros(2, 4, 6)
        boxes[1, 3, 4] = number
        loader._check_classes(boxes[..., 4].to(torch.uint8), boxes)

    for number in known:
        check(number)
    for number in unknown:
        with refuses("damaged-dataset"):
            check(number)


def test_labels_of_two_sizes(colours: Dataset, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(colours.path, tmp_path / "dataset"))
    index = colours.manifest.splits["val"].shards[0].replace(".tar", ".idx")
    replace_file(copy, index, (copy / index).read_bytes().replace(b" 000000003.cls", b"0 000000003.cls"))
    with refuses("undecodable-dataset"):
        list(Loader(load(copy, DatasetManifest), "val", PLAIN, batch_size=8))


def test_indexes_list_all_images_of_the_manifest(colours: Dataset, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(colours.path, tmp_path / "dataset"))
    reseal(copy, lambda record: record["splits"]["val"].update(num_images=NUM_VAL + 1))
    with refuses("damaged-dataset", says=str(NUM_VAL + 1)):
        Loader(load(copy, DatasetManifest), "val", PLAIN, batch_size=8)
    reseal(copy, lambda record: record["splits"]["val"].update(num_images=0))  # so that none was read, in silence
    with refuses("invalid-manifest", says="num_images"):
        load(copy, DatasetManifest)
    reseal(copy, lambda record: record["splits"].pop("val"))
    with refuses("invalid-manifest", says="splits"):
        load(copy, DatasetManifest)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset]:
    """JPEG pictures of SIZES as val split, and the folder they are in."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for index, size in enumerate(SIZES):
        for split in ("train", "val"):
            folder = root / "images" / split / f"class{index % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            picture(*size, rng).save(folder / f"{index}.jpg", quality=92)
    return root / "images", preprocess(root / "images", root / "dataset")


def torchvisions(spec: TransformSpec, files: list[Path]) -> torch.Tensor:
    transform = v2.Compose(
        [
            v2.Resize(spec.resize_size, interpolation=v2.InterpolationMode(spec.interpolation), antialias=True),
            v2.CenterCrop(spec.crop_size),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(spec.mean, spec.std),
        ]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.stack([transform(Image.open(file).convert("RGB")) for file in files])


@pytest.mark.parametrize(
    ("interpolation", "image_size", "ratio"),
    [
        *[("bilinear", 224, 256 / 224), ("bicubic", 160, 1.0)],
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("bicubic", 224, 256 / 224), ("bilinear", 160, 1.0))),
    ],
)
def test_evaluation_is_torchvisions(
    pictures: tuple[Path, Dataset], interpolation: Interpolation, image_size: int, ratio: float
) -> None:
    """Resize, central crop and normalization, to within rounding of 8-bit levels.

    Seen: mean difference 0.11 to 0.22 levels, 99 % within 1 level, the largest 7; one pixel of shift gives a mean of 8.
    """
    folder, dataset = pictures
    spec = transform_for(image_size, resize_ratio=ratio, interpolation=interpolation)
    delivered = torch.cat([batch.images for batch in Loader(dataset, "val", spec, batch_size=4)])  # [N, 3, crop, crop]
    files = [folder / entry["path"] for entry in listing(dataset, "val")]
    differences = (delivered - torchvisions(spec, files)).abs() * (255 * torch.tensor(spec.std)[:, None, None])
    assert len(differences) == len(SIZES)
    for file, difference in zip(files, differences, strict=True):
        assert difference.mean() < 0.3, file
        assert difference.flatten().quantile(0.99) < 1.5, file
        assert difference.max() < 10, file


COLOUR = np.array([180.0, 90.0, 60.0])


@pytest.fixture(scope="module")
def orange(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root = tmp_path_factory.mktemp("orange")
    for index in range(64):
        folder = root / "images" / ("train" if index < 48 else "val") / f"class{index % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.full((32, 32 + index % 7, 3), COLOUR, np.uint8)
        pixels[0, 0] = index  # no two files alike; the crop below never shows it
        Image.fromarray(pixels).save(folder / f"{index}.png")
    return preprocess(root / "images", root / "dataset")


def test_colour_jitter(orange: Dataset) -> None:
    def jittered(**jitter: float) -> np.ndarray:
        """Colour in the middle of each image: [48, 3], levels."""
        augmentation = Augmentation(min_area=0.5, **jitter)
        (batch,) = Loader(orange, "train", PLAIN, batch_size=48, augmentation=augmentation)
        return to_numpy(batch.images)[:, :, 20, 16]

    np.testing.assert_allclose(jittered(), np.tile(COLOUR, (48, 1)), atol=0.01)
    saturated = jittered(saturation=0.4)
    luma = saturated @ np.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(luma, luma.mean(), atol=1.5)
    for factors in (
        jittered(brightness=0.4) / COLOUR,  # scales levels
        (jittered(contrast=0.4) - 128) / (COLOUR - 128),  # the distance from gray
        (saturated[:, :1] - saturated[:, 2:]) / (COLOUR[0] - COLOUR[2]),  # the distance of channels
    ):
        assert np.ptp(factors, axis=1).max() < 0.05  # of all channels alike
        assert 0.57 < factors.min() < 0.75
        assert 1.25 < factors.max() < 1.43
    hues = np.array([colorsys.rgb_to_hsv(*(colour / 255))[0] for colour in jittered(hue=0.1)])
    turned = (hues - colorsys.rgb_to_hsv(*(COLOUR / 255))[0] + 0.5) % 1 - 0.5
    assert -0.16 < turned.min() < -0.05  # DALI turns in YIQ, which is not quite HSV
    assert 0.05 < turned.max() < 0.16


HW_ARGUMENTS = ("hw_decoder_load: 0.800000", "preallocate_width_hint: 500", "preallocate_height_hint: 375")
# As datasets had them whose manifests say no more.
OLD_STATISTICS = {"mean": (0, 0, 0), "std": (1, 1, 1), "min_side": 10, "median_side": 100, "max_side": 375}


def statistics(width: int, height: int) -> DatasetStatistics:
    return DatasetStatistics.model_validate({**OLD_STATISTICS, "max_width": width, "max_height": height})


@pytest.mark.parametrize(
    ("training", "device_id", "decoding_id"),
    [(True, None, None), (True, 0, 0), (True, 0, None), (False, None, None), (False, 0, 0)],
)
def test_hardware_decoder_settings_reach_the_operator_on_gpus_only(
    training: bool, device_id: int | None, decoding_id: int | None
) -> None:
    decoder = decoder_options(statistics(500, 375), 64, device_id=decoding_id, hw_decoder_load=0.8)
    reader = {"paths": ["x.tar"], "ext": ["jpg", "cls"]}
    options = {"batch_size": 64, "num_threads": 1, "device_id": device_id}
    if training:
        pipe = training_pipeline(reader, DIGITS, Augmentation(), decoder, None, False, device_id is not None, **options)
    else:
        pipe = evaluation_pipeline(reader, DIGITS, decoder, **options)
    pipe._build_graph()
    (text,) = (str(op._spec) for op in pipe._ops if "decoders__Image" in str(op._spec))
    (resize,) = (str(op._spec) for op in pipe._ops if "Resize" in str(op._spec).partition("\n")[0])
    assert f"device: {'cpu' if device_id is None else 'gpu'}" in resize
    on_gpu = decoding_id is not None
    assert ("device: mixed" if on_gpu else "device: cpu") in text
    assert [argument in text for argument in HW_ARGUMENTS] == [on_gpu] * 3
    assert ("hw_decoder_load" in text) == on_gpu


@pytest.mark.parametrize(
    ("batch_size", "num_pipelines", "size", "expected"),
    [
        (256, 1, (500, 375), (500, 375)),
        (256, 2, (500, 375), (500, 375)),
        (256, 1, (9000, 9000), (2364, 2364)),
        (256, 2, (9000, 9000), (1672, 1672)),
        (256, 1, (18000, 4500), (4729, 1182)),
        (1, 1, (9000, 6000), (9000, 6000)),
        (256, 1, (0, 0), (375, 375)),
    ],
)
def test_memory_for_the_largest_image(
    batch_size: int, num_pipelines: int, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    options = decoder_options(statistics(*size), batch_size, num_pipelines, device_id=0, hw_decoder_load=0.9)
    width, height = options["preallocate_width_hint"], options["preallocate_height_hint"]
    assert (width, height) == expected
    assert num_pipelines * batch_size * 3 * width * height <= 4 << 30
    assert DatasetStatistics.model_validate(OLD_STATISTICS).max_width == 0


def plan(num_images: int, batch_size: int = 10, num_shards: int = 1, **options: int | bool) -> EpochPlan:
    options = {"batches_per_step": 1, "num_pipelines": 0, "on_gpu": True, **options}
    return plan_training(num_images, batch_size, 0, num_shards, **options)


@pytest.mark.parametrize(
    ("options", "num_pipelines"),
    [
        ({"num_images": 320}, 2),
        ({"num_images": 319}, 1),
        ({"num_images": 100_000, "on_gpu": False}, 1),
        ({"num_images": 319, "num_pipelines": 3}, 3),
        ({"num_images": 639, "num_shards": 2}, 1),
        ({"num_images": 640, "num_shards": 2}, 2),
        # What a second pipeline leaves out would be a step of few.
        ({"num_images": 330, "batches_per_step": 33}, 1),
        ({"num_images": 990, "batches_per_step": 33}, 1),
        ({"num_images": 31 * 330 + 329, "batches_per_step": 33}, 1),
        ({"num_images": 32 * 330, "batches_per_step": 33}, 2),
    ],
)
def test_two_pipelines_where_an_epoch_has_many_steps(options: dict[str, int], num_pipelines: int) -> None:
    assert plan(**options).num_pipelines == num_pipelines


@pytest.mark.parametrize("num_images", [320, 329, 330, 333, 350, 1281])
@pytest.mark.parametrize("batches_per_step", [1, 3, 4])
def test_a_second_pipeline_costs_a_step_at_most(num_images: int, batches_per_step: int) -> None:
    options = {"batch_size": 2, "batches_per_step": batches_per_step}
    one, two = (plan(num_images, **options, num_pipelines=number) for number in (1, 2))
    assert one.num_batches % batches_per_step == two.num_batches % batches_per_step == 0
    assert 0 <= one.num_batches - two.num_batches <= batches_per_step
    assert two.num_batches // 2 <= num_images // 2 // 2
    assert two.num_dropped >= 0


@pytest.mark.parametrize("num_images", [8191, 8192, 8703, 1281167])
def test_another_number_of_processes_makes_as_many_steps(num_images: int) -> None:
    """Or a training could not resume with it."""
    steps = {
        plan(num_images, 256 // num_shards // accumulated, num_shards, batches_per_step=accumulated).num_batches
        // accumulated
        for num_shards in (1, 2, 4)
        for accumulated in (1, 2, 4)
    }
    assert len(steps) == 1


@pytest.mark.parametrize(
    ("options", "setting", "message"),
    [
        ({"num_images": 9}, "train.global_batch_size", "to 9 or less"),
        ({"num_images": 59, "num_shards": 3, "batches_per_step": 2}, "train.global_batch_size", "to 57 or less"),
        ({"num_images": 35, "num_pipelines": 4}, "", "leave num_pipelines at 0"),
        ({"num_images": 3, "num_shards": 4}, "", "train with 3 or fewer"),
    ],
)
def test_too_few_images_for_a_step_everywhere(options: dict[str, int], setting: str, message: str) -> None:
    with refuses("too-few-images", setting, says=message):
        plan(**options)


class Event:
    """CUDA's, that is over when the test says so, or somebody waits for it."""

    every: list["Event"]

    def __init__(self) -> None:
        self.over, self.waited = False, False
        Event.every.append(self)

    def record(self, stream: Any) -> None:
        assert stream == "current"

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.over, self.waited = True, not self.over


def test_an_output_of_a_gpu_lives_until_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.every = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    owned, alive = OwnedOutputs(), []
    for number in range(4):
        output = torch.full((2, 4, 4, 3), float(number)).permute(0, 3, 1, 2)
        alive.append(weakref.ref(output))
        copy = owned.copied(output)
        assert torch.equal(copy, output)
        assert copy.data_ptr() != output.data_ptr()
        assert copy.is_contiguous(memory_format=torch.channels_last)
        del output
        if number == 1:
            Event.every[0].over = True
            assert alive[0]() is not None
    # The first was over by itself. Two more may be under way: for the next one somebody had to wait.
    assert [event.waited for event in Event.every] == [False, True, False, False]
    assert [reference() is None for reference in alive] == [True, True, False, False]


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_shard_that_does_not_answer(digits_dataset: Dataset, tmp_path: Path, split: str) -> None:
    copy = Path(shutil.copytree(digits_dataset.path, tmp_path / "dataset"))
    dataset = load(copy, DatasetManifest)
    shard = copy / dataset.manifest.splits[split].shards[-1]
    shard.unlink()
    os.mkfifo(shard)  # who opens it waits for a writer, for ever
    augmentation = Augmentation() if split == "train" else None
    started = time.monotonic()
    with refuses("read-timeout", says=f"cat {copy}/{split}-*.tar"):
        Loader(dataset, split, DIGITS, batch_size=8, augmentation=augmentation, read_timeout_s=LIMIT_S)
    assert time.monotonic() - started >= LIMIT_S
    with shard.open("wb"):  # lets go of the thread
        pass


class Stuck:
    """In place of DALI's iterator: gives one batch of it, and then waits for content that never comes."""

    def __init__(self, iterator: object, pipe: int) -> None:
        self.iterator, self.pipe, self.calls = iterator, pipe, 0

    def __next__(self) -> object:
        self.calls += 1
        if self.calls > 1:
            os.read(self.pipe, 1)
        return next(self.iterator)


def test_storage_that_stops_answering_in_the_middle_and_a_slow_consumer(digits_dataset: Dataset) -> None:
    reading, writing = os.pipe()
    loader = Loader(digits_dataset, "val", DIGITS, batch_size=60, read_timeout_s=LIMIT_S)
    for batch in loader:
        assert len(batch.images) == 60
        time.sleep(1.2 * LIMIT_S)  # who trains may be slow
    stuck = Stuck(loader._iterators[0], reading)
    loader._iterators = [stuck]
    batches = iter(loader)
    assert len(next(batches).images) == 60
    for again in (batches, iter(loader)):  # the second time at once, and without another call into DALI
        with refuses("read-timeout"):
            next(again)
    assert stuck.calls == 2
    os.close(writing)


def test_a_watchdog_passes_results_and_errors_on_and_lets_its_process_end() -> None:
    watchdog = Watchdog("test", 60)
    assert watchdog.call(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        watchdog.call(lambda: 1 // 0)

    def slow() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        watchdog.call(slow)
    assert watchdog.call(lambda: 4) == 4

    def stuck() -> None:
        reading, _ = os.pipe()
        with pytest.raises(TimeoutError):
            Watchdog("test", 0.2).call(lambda: os.read(reading, 1))

    process = multiprocessing.get_context("fork").Process(target=stuck)  # its end waits for threads, as any process's
    process.start()
    process.join(60)
    assert process.exitcode == 0
