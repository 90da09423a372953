"""preprocess against `tar` and a full decode of every image on the same cores.

python -m benchmarks.packing --machine cpu-2core
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import click
import numpy as np
from PIL import Image

from benchmarks.results import Results, result_options
from components.common.contracts.environment import num_cores
from components.common.contracts.manifests import DatasetManifest, load

_CLASSES = 10
_SIZE = 500, 375  # px
_VARIANTS = 50  # different images, which are mixed


@click.command()
@click.option("--num-images", default=10000, show_default=True, help="Of 500x375 pixels.")
@click.option("--turns", default=3, show_default=True, help="Of both sides, one after the other.")
@result_options
def main(num_images: int, turns: int, results: Results) -> None:
    runs = []
    with tempfile.TemporaryDirectory(prefix="enginery-packing-") as scratch:
        data, work = Path(scratch, "data"), Path(scratch, "work")
        size_bytes = _write_images(data, num_images)
        for _ in range(turns):
            seconds = {"peer": _peer_s(data, work), "preprocess": _preprocess(data, work)["seconds"]}
            runs.append({name: round(value, 3) for name, value in seconds.items()})
            print(runs[-1], flush=True)
    peer, ours = (num_images / statistics.median(run[name] for run in runs) for name in ("peer", "preprocess"))
    results.write(
        "packing",
        measures={
            "preprocess_images_per_s": ours,
            "tar_and_decode_images_per_s": peer,
            "preprocess_over_tar_and_decode": ours / peer,
        },
        runs=runs,
        notes=(
            f"{num_images} JPEG files, 500x375 pixels, {size_bytes / num_images / 1e3:.0f} kB each. Peer: `tar` of the "
            "folder, then Pillow decodes every file in a process per core. Both sides read from the page cache and "
            "count the start of their processes. Medians of turns."
        ),
    )


def _write_images(folder: Path, num_images: int) -> int:
    """Write JPEG files of noise over waves, which compress like photographs. Returns their size in bytes."""
    random, total, (width, height) = np.random.default_rng(0), 0, _SIZE
    y, x = np.mgrid[0:height, 0:width]
    images = []
    for _ in range(_VARIANTS):
        waves = sum(
            np.sin(random.uniform(0, 0.1) * x + random.uniform(0, 0.1) * y + random.uniform(0, 6))[:, :, None]
            * random.uniform(10, 40, 3)
            for _ in range(4)
        )
        images.append((127 + waves + random.normal(0, 12, (height, width, 1))).clip(0, 255).astype(np.uint8))
    for number in range(num_images):
        # Two of them, one of them shifted: fewer near-duplicates, whose search takes longer, than few pictures give.
        shifted = np.roll(images[number // _VARIANTS % _VARIANTS], (7 * number % height, 11 * number % width), (0, 1))
        pixels = images[number % _VARIANTS] // 2 + shifted // 2
        file = folder / f"class{number % _CLASSES}" / f"{number:07d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file, quality=90, comment=str(number))
        total += file.stat().st_size
    return total


def _peer_s(data: Path, work: Path) -> float:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    started = time.perf_counter()
    subprocess.run(["tar", "-cf", str(work / "all.tar"), "-C", str(data), "."], check=True)
    files = sorted(data.glob("*/*.jpg"))
    with ProcessPoolExecutor(num_cores(), mp_context=get_context("spawn")) as pool:
        assert sum(pool.map(_decode, files, chunksize=64)) == len(files)
    return time.perf_counter() - started


def _decode(file: Path) -> bool:
    with Image.open(file) as image:
        image.load()
    return True


def _preprocess(data: Path, work: Path, *options: str) -> dict[str, float]:
    """Run the step. Returns its seconds and the CPU seconds of its processes."""
    shutil.rmtree(work, ignore_errors=True)
    command = [sys.executable, "-m", "components.preprocess", "--data", str(data), "--output", str(work), *options]
    code = (
        "import json, resource, subprocess, sys, time; started = time.perf_counter(); "
        "subprocess.run(sys.argv[1:], check=True, stderr=subprocess.DEVNULL); "
        "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(json.dumps({'seconds': time.perf_counter() - started, "
        "'cpu_seconds': used.ru_utime + used.ru_stime}))"
    )
    output = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True).stdout
    manifest = load(work, DatasetManifest).manifest
    near = manifest.near_duplicates
    assert manifest.num_rejected == (near.num_left_out if near is not None else 0)
    measured: dict[str, float] = json.loads(output)
    return measured


if __name__ == "__main__":
    main()
