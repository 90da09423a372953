"""`enginery inspect`: what a model's precisions make of an image, and where they look."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import BundleManifest, load, write_atomically
from components.common.process.disk import out_of_space
from enginery.formats import new_console, number
from enginery.local.runs import bundle_of_run, latest_bundle
from enginery.local.state import StateDirectory

if TYPE_CHECKING:
    from components.validate.inspect import Look

_MAX_IMAGES = 32  # of one picture
_NUM_TOP = 3


@click.command()
@click.argument("images", nargs=-1, type=click.Path(path_type=Path), metavar="IMAGE [IMAGE ...]")
@click.option("--bundle", type=click.Path(path_type=Path), metavar="DIR", help="What export wrote.")
@click.option("--run", "run_name", metavar="RUN", help="Its bundle; as in `enginery compare`.  [default: the last]")
@click.option("--layers", metavar="A,B", default="", help="Layers, as the report names them.  [default: the last maps]")
@click.option("--maps", type=click.Choice(["gradcam", "activation"]), default="gradcam", show_default=True)
@click.option(
    "--output", type=click.Path(path_type=Path), metavar="FILE.png", default=Path("inspect.png"), show_default=True
)
def inspect(
    images: tuple[Path, ...], bundle: Path | None, run_name: str | None, layers: str, maps: str, output: Path
) -> None:
    """Show what each precision predicts for an image, and maps of where FP32 and INT8 look.

    Grad-CAM marks what speaks for the class that FP32 predicts; activation is the mean magnitude of a layer's channels.
    """
    _check_arguments(images, bundle, run_name, output)
    if bundle is None:
        runs = StateDirectory.current().runs
        bundle = latest_bundle(runs) if run_name is None else bundle_of_run(run_name, runs)
    opened = load(bundle, BundleManifest, verify=(".onnx", ".plan"))
    # PyTorch, DALI and Matplotlib take seconds to import: mistakes are said before.
    from components.validate.inspect import look, picture

    asked = [name.strip() for name in layers.split(",") if name.strip()]
    result = look(opened, images, layers=asked, kind=maps)  # type: ignore[arg-type]  # click knows the two
    classes = opened.manifest.classes
    console = new_console()
    console.print(f"{escape(opened.manifest.architecture)}, bundle {escape(_relative(bundle))}", soft_wrap=True)
    for entry in result.looks:
        _print_look(console, entry, classes)
    for note in _notes(result.looks):
        console.print(escape(note), style="dim", highlight=False)
    if result.maps_missing:
        console.print(f"[yellow]no maps:[/] {escape(result.maps_missing)}", highlight=False)
    _write(output, picture(result.looks, classes, maps, opened.manifest.architecture))  # type: ignore[arg-type]
    console.print(f"picture: {escape(str(output))}", soft_wrap=True, highlight=False)


def _check_arguments(images: tuple[Path, ...], bundle: Path | None, run_name: str | None, output: Path) -> None:
    """What can be said before anything is loaded."""
    if not images:
        raise UserError("inspect takes one or more images: enginery inspect IMAGE [IMAGE ...]")
    if len(images) > _MAX_IMAGES:
        raise UserError(f"inspect takes up to {_MAX_IMAGES} images, got {len(images)}; name fewer")
    for image in images:
        if not image.exists():
            raise UserError(f"there is no file {image}; name an image")
    if bundle is not None and run_name is not None:
        raise UserError("--bundle and --run both say which model; name one of them")
    if output.suffix.lower() != ".png":
        raise UserError(f"the picture is a PNG, and --output is {output}; name a file that ends in .png")
    if output.resolve() in {image.resolve() for image in images}:
        raise UserError(f"the picture would replace the image {output}; name another file with --output")
    folder = output.absolute().parent
    if output.is_dir():
        raise UserError(f"--output {output} is a folder; name a file in it, such as {output / 'inspect.png'}")
    if not folder.is_dir():
        raise UserError(f"can't write {output}: there is no folder {folder}; make it, or name another with --output")
    if not os.access(folder, os.W_OK):
        raise UserError(f"can't write {output}: {folder} is not writable; name another place with --output")


def _write(output: Path, data: bytes) -> None:
    try:
        write_atomically(output, data)
    except OSError as error:
        refused = UserError(f"can't write {output}: {error.strerror}; name another with --output")
        raise out_of_space(error, output.absolute().parent) or refused from None


def _print_look(console: Console, look: "Look", classes: tuple[str, ...]) -> None:
    console.print(f"\n[bold]{escape(str(look.file))}[/]", highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("precision", no_wrap=True)
    table.add_column("runtime", no_wrap=True)
    num_top = min(_NUM_TOP, len(classes))
    for rank in range(1, num_top + 1):
        table.add_column(f"top {rank}", overflow="fold")
    table.add_column("largest delta", justify="right", no_wrap=True)
    for prediction in look.predictions:
        cells = ["n/a"] * num_top
        if prediction.probabilities is not None:
            best = (-prediction.probabilities).argsort(kind="stable")[:num_top]
            cells = [f"{escape(classes[index])} {100 * prediction.probabilities[index]:.2f} %" for index in best]
        delta = look.largest_difference(prediction.precision)
        points = "" if prediction.precision == "fp32" else number(None if delta is None else 100 * delta, ".2f")
        table.add_row(prediction.precision.upper(), prediction.runtime, *cells, points)
    console.print(table)
    for entry in look.layers:
        alike = entry.similarity
        value = "one of the maps is empty" if alike is None else f"cosine of FP32's and INT8's map {alike:.3f}"
        console.print(f"{escape(entry.layer.name)}: {value}", highlight=False)


def _notes(looks: Sequence["Look"]) -> list[str]:
    notes = ["largest delta: of a class's probability to that of FP32, in percentage points"]
    notes += [f"{entry.precision.upper()}: {entry.note}" for look in looks for entry in look.predictions if entry.note]
    return list(dict.fromkeys(notes))


def _relative(path: Path) -> str:
    """As short as can be, seen from here."""
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else short
