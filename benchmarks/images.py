"""Measure the images that containers/smoke builds: sizes above their bases, and times to build them.

eval "$(containers/stand-in/build)"; export PYTORCH SLIM TRITON
python -m benchmarks.images --machine cpu-2core --cold
"""

import os
import subprocess
import time
from pathlib import Path

import click

from benchmarks.results import Results, result_options
from tests.containers.conftest import IMAGES, base_of

_BUILD = Path(__file__).resolve().parents[1] / "containers/build"


def size_mb(reference: str) -> float:
    """Uncompressed size, in MB of 10^6 bytes."""
    command = ["docker", "image", "inspect", "--format", "{{.Size}}", reference]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) / 1e6


def build_seconds(image: str, *options: str) -> float:
    """Wall time of one build."""
    started = time.perf_counter()
    arguments = [image, "--build-arg", f"BASE_IMAGE={base_of(image)}"]
    command = [_BUILD, *arguments, *options, "-t", f"enginery-measured/{image}:0", "."]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=_BUILD.parents[1])
    return time.perf_counter() - started


@click.command()
@click.option("--cold", is_flag=True, help="Without the cache of layers, too; pip keeps what it has downloaded.")
@click.option("--built", nargs=2, metavar="REGISTRY TAG", help="Only the sizes of images that are there already.")
@click.option("--image", "images", multiple=True, type=click.Choice(IMAGES), help="Only this one; may be repeated.")
@click.option("--notes", default="", help="What a reader must know of the run.")
@result_options
def main(cold: bool, built: tuple[str, str] | None, images: tuple[str, ...], notes: str, results: Results) -> None:
    """Build each image, and write images.json."""
    measures: dict[str, float] = {}
    registry, tag = built or ("enginery-measured", "0")
    for image in images or IMAGES:
        if cold:
            measures[f"build_seconds_cold_{image}"] = build_seconds(image, "--no-cache")
        if not built:
            build_seconds(image)
            measures[f"build_seconds_warm_{image}"] = build_seconds(image)
        measures[f"added_mb_{image}"] = size_mb(f"{registry}/{image}:{tag}") - size_mb(base_of(image))
        seconds = "".join(
            f", {way} {measures[key]:.0f} s"
            for way in ("cold", "warm")
            if (key := f"build_seconds_{way}_{image}") in measures
        )
        click.echo(f"{image}: {measures[f'added_mb_{image}']:.0f} MB{seconds}")
    measures["base_mb_pytorch"], measures["base_mb_slim"] = size_mb(os.environ["PYTORCH"]), size_mb(os.environ["SLIM"])
    text = "Stand-in bases, not NGC's. MB of 10^6 bytes, uncompressed."
    text += "" if built else " Warm: nothing changed. Cold: no layer cached; pip's downloads were."
    results.write("images", measures=measures, runs=[], notes=f"{text} {notes}".strip())


if __name__ == "__main__":
    main()
