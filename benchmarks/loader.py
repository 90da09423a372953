"""The loader over torchvision's DataLoader, on the same JPEG files of 500x375 pixels, with the same augmentation.

    python -m benchmarks.loader --machine cpu-2core
    python -m benchmarks.loader --machine h200 --device gpu --num-images 20000

Makes the images first, in --work; an earlier run's are used again. Both deliver what training takes: normalized
float32 batches, on the GPU where there is one. torchvision runs with the number of workers that suits it best.
"""

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from benchmarks.results import Results, result_options
from components.common.contracts.environment import num_cores
from components.common.contracts.manifests import DatasetManifest, load
from components.common.contracts.settings import resolve
from components.common.contracts.transforms import Augmentation, TransformSpec, transform_for
from components.common.data.loader import HW_DECODER_LOAD, Loader
from components.common.process.steplog import StepLog
from components.preprocess.config import PreprocessConfig
from components.preprocess.run import run as preprocess
from enginery.datasets.textures import texture_image

_WIDTH, _HEIGHT, _QUALITY = 500, 375, 90
_NUM_CLASSES = 10
_SPEC = transform_for(224, resize_ratio=256 / 224)


@click.command()
@click.option("--device", type=click.Choice(["cpu", "gpu"]), default="cpu", help="Where batches are wanted.")
@click.option("--work", default=Path("/tmp/enginery-loader"), type=click.Path(path_type=Path), help="For images.")
@click.option("--num-images", default=4000, type=click.IntRange(min=500), help="Training images.")
@click.option("--batch-size", default=0, help="0: 64 on a CPU, 256 on a GPU.")
@click.option("--turns", default=5, help="Epochs of each, one after the other.")
@click.option("--hw-decoder-load", default=HW_DECODER_LOAD, help="Share of the GPU's hardware JPEG decoder.")
@click.option("--num-pipelines", default=0, help="DALI pipelines that take turns; 0: as the Loader chooses.")
@result_options
def main(
    device: str,
    work: Path,
    num_images: int,
    batch_size: int,
    turns: int,
    hw_decoder_load: float,
    num_pipelines: int,
    results: Results,
) -> None:
    batch_size = batch_size or (64 if device == "cpu" else 256)
    device_id = None if device == "cpu" else 0
    folder = work / str(num_images)
    make_data(folder, num_images)
    data = load(folder / "dataset", DatasetManifest)
    ours = Loader(
        data,
        "train",
        _SPEC,
        batch_size=batch_size,
        augmentation=Augmentation(),
        device_id=device_id,
        hw_decoder_load=hw_decoder_load,
        num_pipelines=num_pipelines,
    )
    make = partial(torchvision_loader, folder / "images/train", batch_size, pin=device_id is not None)
    trials = try_workers(make, device_id)
    print(f"torchvision by number of workers: {trials}", flush=True)
    num_workers = max(trials, key=lambda number: trials[number])
    theirs = make(num_workers)
    sources: dict[str, Callable[[], Iterable[Any]]] = {
        "loader": lambda: ((batch.images, batch.labels) for batch in ours),
        "torchvision": lambda: theirs,
    }
    runs: list[dict[str, float]] = []
    for turn in range(turns + 1):
        rates = {f"{name}_images_per_s": images_per_s(source(), device_id) for name, source in sources.items()}
        print({name: round(rate) for name, rate in rates.items()}, flush=True)
        if turn > 0:  # the first one warms up
            runs.append(rates)
    measures = {name: statistics.median(rates[name] for rates in runs) for name in runs[0]}
    measures["loader_over_torchvision"] = measures["loader_images_per_s"] / measures["torchvision_images_per_s"]
    measures |= {f"torchvision_images_per_s_workers{number}": rate for number, rate in trials.items()}
    measures["num_images"] = float(num_images)
    sizes = [file.stat().st_size for file in (folder / "images/train").rglob("*.jpg")]
    notes = (
        f"{num_images} procedural JPEG images of {_WIDTH}x{_HEIGHT} px, {statistics.mean(sizes) / 1e3:.0f} kB on "
        f"average, in the page cache. Random resized crop to 224 px, mirror, normalization to float32, batches of "
        f"{batch_size} delivered on the {device.upper()} and thrown away. Medians of {turns} epochs of each in turn, "
        f"after one that warmed up. torchvision: ImageFolder and {num_workers} DataLoader workers, the best of "
        f"{', '.join(map(str, trials))}."
    )
    if device_id is not None:
        notes += f" Hardware decoder's share: {hw_decoder_load:g}."
    name = "loader" if device == "cpu" else "loader_gpu"
    results.write(name, measures=measures, runs=runs, notes=notes)


def make_data(folder: Path, num_images: int, max_short_side: int = 0) -> None:
    """Write folder/images/{train,val}/<class>/ and pack them into folder/dataset, unless that is done."""
    if (folder / "dataset" / "manifest.json").exists():
        return
    files = [(folder / "images/train", index) for index in range(num_images)]
    files += [(folder / "images/val", num_images + index) for index in range(2 * _NUM_CLASSES)]
    with multiprocessing.get_context("spawn").Pool(num_cores()) as pool:
        for done, _ in enumerate(pool.imap_unordered(_write_image, files, chunksize=32), start=1):
            if done % 1000 == 0:
                print(f"{done}/{len(files)} images written", flush=True)
    settings = {"data": str(folder / "images"), "max_short_side": max_short_side}
    config = resolve(PreprocessConfig, "preprocess", settings)
    preprocess(config, StepLog("preprocess"), output=folder / "dataset")


def _write_image(task: tuple[Path, int]) -> None:
    folder, index = task
    label = index % _NUM_CLASSES
    image = texture_image(np.random.default_rng(index), label, _WIDTH).crop((0, 0, _WIDTH, _HEIGHT))
    path = folder / str(label) / f"{index:06d}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, quality=_QUALITY)


def torchvision_loader(
    folder: Path, batch_size: int, num_workers: int, *, pin: bool, spec: TransformSpec = _SPEC
) -> DataLoader[Any]:
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(spec.crop_size, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(spec.mean, spec.std),
        ]
    )
    return DataLoader(
        ImageFolder(str(folder), transform),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=num_workers,
        persistent_workers=True,
        pin_memory=pin,
    )


def try_workers(make: Callable[[int], DataLoader[Any]], device_id: int | None) -> dict[int, float]:
    """Rates by the number of workers: all cores, or more, because they also wait."""
    trials = {}
    for num_workers in sorted({num_cores(), num_cores() * 3 // 2, num_cores() * 2}):
        loader = make(num_workers)
        images_per_s(loader, device_id)  # starts the workers, and reads the files for the first time
        trials[num_workers] = round(images_per_s(loader, device_id), 1)
        del loader  # ends them
    return trials


def images_per_s(batches: Iterable[Any], device_id: int | None) -> float:
    """Rate of one epoch behind its second batch, each image delivered on the device."""
    num_images = 0
    iterator = iter(batches)
    for images, labels in itertools.islice(iterator, 2):  # what was prepared ahead costs nothing
        _deliver(images, labels, device_id)
    started = time.perf_counter()
    for images, labels in iterator:
        num_images += len(_deliver(images, labels, device_id))
    if device_id is not None:
        torch.cuda.synchronize(device_id)
    return num_images / (time.perf_counter() - started)


def _deliver(images: torch.Tensor, labels: torch.Tensor, device_id: int | None) -> torch.Tensor:
    if device_id is None:
        return images
    labels.to(device_id, non_blocking=True)
    return images.to(device_id, non_blocking=True)


if __name__ == "__main__":
    main()
