"""Near-duplicates in preprocess: recall and precision on changed textures, and the cost.

python -m benchmarks.near_duplicates --machine cpu-2core
"""

import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from benchmarks.packing import _preprocess
from benchmarks.results import Results, result_options
from components.common.contracts.environment import num_cores
from components.common.data.image_files import encode_image
from components.common.dataset.near_duplicates import find_near_pairs
from components.common.dataset.shards import THUMBNAIL_SIDE
from components.preprocess.decoding import gray_thumbnail
from enginery.datasets.textures import texture_jpeg, write_textures
from tests.fuzz.running import peak_bytes

_SIZE = 224  # px
_LARGE = 433  # px: as many pixels as 500x375, ImageNet's mean
_NUM_CLASSES = 50
_IMAGENET = 1_300_000
Random = np.random.Generator


def _jpeg(image: Image.Image, quality: int) -> bytes:
    return encode_image(image, "JPEG", quality=quality)


def _resized(image: Image.Image, random: Random) -> Image.Image:
    side = round(image.width * 2 ** random.uniform(-1, 1))
    return image.resize((side, side), Image.Resampling(int(random.choice([1, 2, 3]))))


def _cropped(image: Image.Image, random: Random) -> Image.Image:
    """Up to 10 % of the width and of the height go, in all, on any side."""
    width, height = (round(side * random.uniform(0.9, 1)) for side in image.size)
    x, y = (int(random.integers(0, whole - side + 1)) for whole, side in zip(image.size, (width, height), strict=True))
    return image.crop((x, y, x + width, y + height))


def _brightness(image: Image.Image, random: Random) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(random.uniform(0.6, 1.4))


def _all(image: Image.Image, random: Random) -> Image.Image:
    return _resized(_brightness(ImageOps.mirror(_cropped(image, random)), random), random)


_KINDS: dict[str, Callable[[Image.Image, Random], bytes]] = {
    "resize": lambda image, random: _jpeg(_resized(image, random), 90),
    "recompression": lambda image, random: _jpeg(image, int(random.integers(20, 80))),
    "crop": lambda image, random: _jpeg(_cropped(image, random), 90),
    "mirror": lambda image, random: _jpeg(ImageOps.mirror(image), 90),
    "brightness": lambda image, random: _jpeg(_brightness(image, random), 90),
    "all_at_once": lambda image, random: _jpeg(_all(image, random), int(random.integers(50, 90))),
}


@click.command()
@click.option("--num-images", default=100_000, show_default=True, help="Different textures of 224 px.")
@click.option("--num-changed", default=1000, show_default=True, help="Of them, that come again changed, for each kind.")
@click.option("--seed", default=2, show_default=True, help="Of the textures; the limits were chosen on 1 and 2.")
@click.option("--packed", default=10_000, show_default=True, help="Images of either size that packing is timed on.")
@click.option("--turns", default=3, show_default=True, help="Of packing with and without.")
@click.option("--thumbnails", type=click.Path(path_type=Path), help="File to keep the textures' thumbnails in.")
@click.option("--beside", default="", help="What else ran on the machine.")
@result_options
def main(
    num_images: int,
    num_changed: int,
    seed: int,
    packed: int,
    turns: int,
    thumbnails: Path | None,
    beside: str,
    results: Results,
) -> None:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the processes below, as in preprocess
    with tempfile.TemporaryDirectory(prefix="enginery-near-") as scratch:
        originals, changed = _textures(thumbnails or Path(scratch, "thumbnails.npz"), num_images, num_changed, seed)
        found = _found(originals, changed)
        packing = {}
        for size in (_SIZE, _LARGE):
            data = Path(scratch, f"textures_{size}")
            write_textures(
                data,
                num_classes=_NUM_CLASSES,
                num_train=packed * 4 // 5,
                num_val=packed // 5,
                seed=seed,
                image_size=size,
            )
            packing[data.name] = _packing(data, Path(scratch, "work"), turns)
    whole, quarter, recall = found["whole"], found["quarter"], found["recall"]
    over = {
        f"{name}_{unit}_with_over_without": statistics.median(run[f"drop_{unit}"] / run[f"keep_{unit}"] for run in runs)
        for name, runs in packing.items()
        for unit in ("cpu_seconds", "seconds")
    }
    without, with_ = (
        statistics.median(run[f"{setting}_cpu_seconds"] for run in packing[f"textures_{_LARGE}"])
        for setting in ("keep", "drop")
    )
    imagenet_s = {
        "packing": _IMAGENET / packed * without,
        "near_duplicates": _IMAGENET / packed * (with_ - without),
        "search": _IMAGENET / whole["num_images"] * whole["cpu_seconds"],
    }
    growth = (whole["peak_mib"] - quarter["peak_mib"]) * 2**20 / (whole["num_images"] - quarter["num_images"])
    results.write(
        "near_duplicates",
        measures={
            "near_duplicate_recall": min(recall["resize"], recall["recompression"]),
            "near_duplicate_precision": found["precision_resize_recompression"],
            "precision_all_kinds": found["precision"],
            **{f"recall_{kind}": value for kind, value in recall.items()},
            "num_images": whole["num_images"],
            "num_aligned": whole["num_aligned"],
            "search_seconds": whole["seconds"],
            "search_cpu_seconds": whole["cpu_seconds"],
            "search_seconds_over_a_quarter": whole["seconds"] / quarter["seconds"],
            "memory_bytes_per_image": growth,
            "disk_bytes_per_image": THUMBNAIL_SIDE**2,
            **over,
            **{f"imagenet_{name}_cpu_seconds": seconds for name, seconds in imagenet_s.items()},
        },
        runs=[found, *({"data": name, **run} for name, runs in packing.items() for run in runs)],
        notes=(
            f"{num_images:,} textures of seed {seed} and {_SIZE} px in {_NUM_CLASSES} classes are the training split; "
            f"{num_changed:,} others of them for each kind, changed, are the validation split. Resize: by 0.5 to 2, "
            "three filters. Recompression: JPEG quality 20 to 80. Crop: 0 to 10 % of width and of height. Brightness: "
            "times 0.6 to 1.4. All at once: crop, mirror, brightness, resize, quality 50 to 90. Recall: found pairs of "
            "a texture and its change. Precision: found pairs of the same texture. The limits were chosen on textures "
            f"of seeds 1 and 2 and on the digits. Packing: {packed:,} textures of {_SIZE} px and of {_LARGE} px, "
            f"medians of {turns} turns; CPU seconds are those of all processes. ImageNet: {_IMAGENET:,} times the CPU "
            f"seconds of an image: in packing at {_LARGE} px, in what near-duplicates add to it there, and in the "
            f"search among {whole['num_images']:,}. Memory: growth of the process from a quarter of the images to all, "
            "with the pages of the file of thumbnails." + (f" Beside it ran: {beside}." if beside else "")
        ),
    )


def _textures(file: Path, num_images: int, num_changed: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Thumbnails of the textures, [N, 48, 48], and of some of them again, by kind: [kinds, changed, 48, 48]."""
    if not file.exists():
        every = range(num_images)
        with ProcessPoolExecutor(num_cores(), mp_context=get_context("spawn")) as pool:
            files = pool.map(_texture, [(seed, number, num_changed) for number in every], chunksize=100)
            parts = [
                np.frombuffer(b"".join(own), np.uint8).reshape(-1, THUMBNAIL_SIDE, THUMBNAIL_SIDE) for own in files
            ]
        originals = np.stack([part[0] for part in parts])
        changed = np.stack([part[1] for part in parts if len(part) > 1]).reshape(
            len(_KINDS), num_changed, *originals.shape[1:]
        )
        np.savez(file, originals=originals, changed=changed)
    kept = np.load(file)
    return kept["originals"], kept["changed"]


def _texture(what: tuple[int, int, int]) -> list[bytes]:
    """The thumbnail of a texture; and of its change, where it is among the first: each kind takes its own."""
    seed, number, num_changed = what
    data = texture_jpeg(seed, 0, number % _NUM_CLASSES, number // _NUM_CLASSES, _SIZE)
    files = [data]
    if number < num_changed * len(_KINDS):
        with Image.open(io.BytesIO(data)) as image:
            change = list(_KINDS.values())[number // num_changed]
            files.append(change(image.convert("RGB"), np.random.default_rng((seed, number))))
    thumbnails = []
    for file in files:
        with Image.open(io.BytesIO(file)) as image:
            thumbnails.append(gray_thumbnail(image.convert("RGB")))
    return thumbnails


def _found(originals: np.ndarray, changed: np.ndarray) -> dict[str, Any]:
    """Search all at once, in a process of its own, and a quarter of the originals before, to see what grows."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(np.concatenate([originals, *changed]).tobytes())
        file.flush()
        runs = []
        for number in (len(originals) // 4, len(originals)):
            numbers = np.r_[:number, len(originals) : len(originals) + changed.shape[0] * changed.shape[1]]
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                runs.append(pool.submit(_search, file.name, numbers, len(originals)).result())
            print({name: value for name, value in runs[-1].items() if name != "pairs"}, flush=True)
    quarter, whole = runs
    pairs = whole.pop("pairs")
    quarter.pop("pairs")
    num_changed = changed.shape[1]
    origin = np.r_[: len(originals), : changed.shape[0] * num_changed]  # kind by kind, each its own textures
    is_true = origin[pairs[0]] == origin[pairs[1]]
    kind = np.maximum(pairs[1] - len(originals), -1) // num_changed  # of the second; -1 of two originals
    names = list(_KINDS)
    hits = {name: int((is_true & (kind == number)).sum()) for number, name in enumerate(names)}
    false = {name: int((~is_true & (kind == number)).sum()) for number, name in enumerate(names)}
    own = np.isin(kind, [names.index(name) for name in ("resize", "recompression")])
    return {
        "recall": {name: number / num_changed for name, number in hits.items()},
        "precision": float(is_true.mean()),
        "precision_resize_recompression": float(is_true[own].mean()),
        "false": {**false, "among_originals": int((~is_true & (kind < 0)).sum())},
        "whole": whole,
        "quarter": quarter,
    }


def _search(file: str, numbers: np.ndarray, num_train: int) -> dict[str, Any]:
    size = Path(file).stat().st_size // THUMBNAIL_SIDE**2
    thumbnails = np.memmap(file, np.uint8, "r", shape=(size, THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    before_bytes = peak_bytes()
    wall, cpu = time.perf_counter(), time.process_time()
    found = find_near_pairs(thumbnails, numbers, numbers >= num_train, num_threads=num_cores())
    return {
        "num_images": len(numbers),
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "peak_mib": (peak_bytes() - before_bytes) / 2**20,
        "num_aligned": found.num_aligned,
        "num_plain": found.num_plain,
        "pairs": np.stack([found.first, found.second]),
    }


def _packing(data: Path, work: Path, turns: int) -> list[dict[str, float]]:
    """preprocess with and without near-duplicates, in turns."""
    runs = []
    for _ in range(turns):
        used = {setting: _preprocess(data, work, "--near-duplicates", setting) for setting in ("keep", "drop")}
        runs.append(
            {f"{setting}_{name}": own[name] for setting, own in used.items() for name in ("seconds", "cpu_seconds")}
        )
        print(runs[-1], flush=True)
    return runs


if __name__ == "__main__":
    main()
