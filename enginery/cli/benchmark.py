"""`enginery benchmark`: the classic table of networks and batch sizes, for this machine."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from components.common.contracts.environment import environment
from components.common.contracts.manifests import prepare_directory, write_atomically
from components.common.contracts.records import PRECISIONS
from components.export.config import CACHE_VARIABLE, TIMING_CACHES
from enginery.cli.options import PATH, comma_list, finite

if TYPE_CHECKING:
    from enginery.benchmark.measuring import Settings
    from enginery.benchmark.table import Row


_names = comma_list(str, bool, "names with commas between, such as resnet50,vgg19", code="nothing-named")
_precisions = comma_list(str, PRECISIONS.__contains__, f"some of {','.join(PRECISIONS)}", code="unknown-precision")
_sizes = comma_list(
    int,
    range(1, 4097).__contains__,
    "whole numbers of 1 to 4096 with commas between, such as 1,8,128",
    code="wrong-batch-sizes",
)


@click.command()
@click.option(
    "--models",
    default="alexnet,googlenet,resnet50,vgg19",
    callback=_names,
    show_default=True,
    help="Classifiers of torchvision, or of timm as timm/NAME.",
)
@click.option(
    "--batch-sizes", "batches", callback=_sizes, help="Images per batch.  [default: 1,2,4,8,64,128; on a CPU 1,2,4,8]"
)
@click.option("--precisions", default="fp32,fp16,int8", callback=_precisions, show_default=True)
@click.option("--image-size", default=224, type=click.IntRange(32, 2048), show_default=True, help="Side, in pixels.")
@click.option(
    "--seconds", default=2.0, type=click.FloatRange(0.05), callback=finite, show_default=True, help="For each speed."
)
@click.option("--optimization-level", default=3, type=click.IntRange(0, 5), show_default=True, help="Of TensorRT.")
@click.option(
    "--cache",
    envvar=CACHE_VARIABLE,
    show_envvar=True,
    type=PATH,
    help="Folder where TensorRT's timing caches are kept: a second build takes seconds.",
)
@click.option(
    "--price-per-hour",
    type=click.FloatRange(0),
    callback=finite,
    help="Of this machine: adds the cost of a million images.",
)
@click.option(
    "--price-per-kwh", type=click.FloatRange(0), callback=finite, help="Of electricity, for what the GPU draws."
)
@click.option("--output", default="benchmark", type=PATH, show_default=True, help="New folder.")
def benchmark(
    models: tuple[str, ...], batches: tuple[int, ...] | None, cache: Path | None, output: Path, **options: Any
) -> None:
    """Measure networks by batch size: images/s, W, images/s/W and ms, beside published rows.

    Weights are random: kernels take as long with any. Writes table.md, table.csv and throughput.png.
    """
    from enginery.benchmark import measuring
    from enginery.benchmark.table import Row, as_csv, markdown, network_name, published_rows, write_picture
    from enginery.formats import new_console

    caches = cache / TIMING_CACHES if cache else None
    settings = measuring.Settings(batches=batches or measuring.default_batches(), timing_caches=caches, **options)
    measuring.check_networks(models, settings.image_size)
    measuring.check_precisions(settings.precisions)
    prepare_directory(output)
    published = published_rows([network_name(model) for model in models], settings.batches)
    measured: list[Row] = []
    with new_console().status("measuring") as status, TemporaryDirectory(prefix="enginery-benchmark-") as folder:
        for model in models:
            files = Path(folder) / model.replace("/", "_")
            measured += measuring.measure_network(model, settings, files, status.update)
            # After each, so that what was measured is kept where a later one fails.
            write_atomically(output / "table.csv", as_csv([*measured, *published]).encode())
            notes = " ".join([_notes(settings), *_cost_notes(settings, measured)])
            text = markdown(measured, published, notes)
            write_atomically(output / "table.md", text.encode())
    write_picture(measured, published, output / "throughput.png")
    click.echo(text)
    click.echo(f"{output}/table.md, table.csv and throughput.png written")


def _cost_notes(settings: "Settings", measured: Sequence["Row"]) -> list[str]:
    """The prices behind the costs, which say nothing without them, and what the costs leave out."""
    prices = {"per hour": settings.price_per_hour, "per kWh": settings.price_per_kwh}
    given = [f"{price:g} {unit}" for unit, price in prices.items() if price is not None]
    unknown = settings.price_per_kwh is not None and any(row.power_w is None for row in measured)
    if any(row.cost is not None for row in measured):
        missing = ", without electricity where power is not known" if unknown else ""
        return [f"Cost per million images at {' and '.join(given)}{missing}."]
    return ["No cost per million images: nothing here measures power."] if unknown else []


def _notes(settings: "Settings") -> str:
    from components.common.runtimes import tensorrt

    here = environment()
    gpu = here.gpus[0] if here.gpus else None
    machine = f"{gpu.name}, driver {gpu.driver}" if gpu else f"{here.cpu}, {here.num_cores} cores"
    side, seconds = settings.image_size, settings.seconds
    size = f"Images of {side} x {side} pixels and random weights. Throughput and median latency of a batch"
    if tensorrt.why_unavailable():
        version, how = f"openvino {here.versions['openvino']}", "Nothing tells the power, and FP16 needs TensorRT."
        over = f"over {seconds:g} s, latency as the time of the call."
    else:
        version = f"tensorrt {tensorrt.load_tensorrt().__version__}"
        how = "Power of the board by NVML's energy counter."
        over = f"over {seconds:g} s, copies included, as trtexec defines them."
    return f"{datetime.now(UTC).date().isoformat()}, {machine}, {version}. {size} {over} {how}"
