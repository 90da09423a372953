"""`enginery data`: write one of the built-in datasets into a directory."""

import errno
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from components.common.contracts.errors import EngineryError, UserError
from enginery.cli.options import PATH
from enginery.datasets import DatasetSummary
from enginery.formats import new_console

DIRECTORY = click.argument("directory", type=PATH)
_SEED = click.option("--seed", default=0, show_default=True, help="Another seed: other images of the same classes.")
_NUM_WORKERS = click.option("--num-workers", default=0, show_default=True, help="Processes; 0 = one per usable core.")


@click.group()
def data() -> None:
    """Write a built-in dataset."""


@data.command()
@DIRECTORY
def digits(directory: Path) -> None:
    """1,797 real handwritten digits, 10 classes.

    Gray, 32x32 px, a second to write: enough to try the whole chain on a CPU in minutes. Written as
    DIRECTORY/<class>/<index>.jpg, in one tree: `enginery run` splits it.
    """
    from enginery.datasets.digits import write_digits

    with _translate_errors(directory):
        _report(write_digits(directory), "resnet50 --config digits")


@data.command()
@DIRECTORY
@click.option("--num-classes", default=50, show_default=True, help="Classes; more are harder to tell apart.")
@click.option("--num-train", default=40000, show_default=True, help="Training images, all classes together.")
@click.option("--num-val", default=10000, show_default=True, help="Validation images, all classes together.")
@_SEED
@click.option("--image-size", default=224, show_default=True, help="Width and height of an image, px.")
@_NUM_WORKERS
def textures(directory: Path, **options: int) -> None:
    """Procedural textures, as many as you like.

    A benchmark that a ResNet-50 does not learn to perfection. Written as DIRECTORY/train/<class>/<index>.jpg and
    DIRECTORY/val/<class>/<index>.jpg. The defaults take about 6 ms per image and core, and 1.1 GB. The same
    arguments give the same files for any number of workers. A killed run continues where it stopped when the same
    command is given again.
    """
    from enginery.datasets.textures import write_textures

    _write_images(write_textures, directory, "resnet50 --config textures", options, 598)


@data.command()
@DIRECTORY
@click.option("--num-train", default=2000, show_default=True, help="Training images.")
@click.option("--num-val", default=1000, show_default=True, help="Validation images.")
@_SEED
@click.option("--image-size", default=128, show_default=True, help="Width and height of an image, px.")
@_NUM_WORKERS
def shapes(directory: Path, **options: int) -> None:
    """Circles, squares, triangles, stars and rings, with exact boxes and masks.

    Written below DIRECTORY/train and DIRECTORY/val: images/<index>.jpg; masks/<index>.png, whose pixels are numbers of
    lines of DIRECTORY/classes.txt, from 0; annotations.json, COCO's objects with boxes and masks. The same arguments
    give the same files for any number of workers. A killed run continues where it stopped when the same command is
    given again.
    """
    from enginery.datasets.shapes import write_shapes

    _write_images(write_shapes, directory, "detection --config shapes", options, 300)


@data.command()
@DIRECTORY
@click.option("--num-pairs", default=80000, show_default=True, help="Pairs of sentences.")
@click.option("--seed", default=0, show_default=True, help="Another seed: other pairs of the same kinds.")
def phrases(directory: Path, num_pairs: int, seed: int) -> None:
    """English numbers, dates, amounts and clock times with their German translations.

    From digits to words and from words to digits, so that a small translation model learns them on a CPU. Written as
    DIRECTORY/pairs.tsv: English, a tab and German a line, none twice; `enginery run` splits it.
    """
    from enginery.datasets.phrases import write_phrases

    with _translate_errors(directory):
        summary = write_phrases(directory, num_pairs=num_pairs, seed=seed)
    _report(summary, "translation --config phrases", content=f"{num_pairs:,} pairs of sentences")


def _write_images(
    write: Callable[..., DatasetSummary], directory: Path, pipeline: str, options: Mapping[str, int], num_proving: int
) -> None:
    """Write images of training and validation behind a progress bar.

    The gate's limits are proved by `num_proving` validation images; of fewer it judges the measured drop alone.
    """
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    progress = Progress(TextColumn("writing images"), *columns, console=new_console(stderr=True), transient=True)
    with _translate_errors(directory), progress:
        bar = progress.add_task("images", total=options["num_train"] + options["num_val"])
        summary = write(directory, **options, on_progress=lambda num_images: progress.advance(bar, num_images))
    if options["num_val"] < num_proving:
        pipeline += " --set gate.confident=false --set gate.min_validation_images=0"
    _report(summary, pipeline)


@contextmanager
def _translate_errors(directory: Path) -> Iterator[None]:
    """Translate the errors of writing a dataset.

    Raises:
        UserError: this user can't write there.
        EngineryError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise EngineryError(
                f"no space left to write the dataset to {directory}. Free some on that disk and give the same command "
                "again, which continues; or name a directory on another disk",
                code="disk-full",
            ) from error
        raise UserError(
            f"can't write the dataset to {directory}: {error.strerror or error}. Name a directory that you may write",
            code="unwritable-directory",
        ) from error


def _report(summary: DatasetSummary, pipeline: str, content: str = "") -> None:
    """The closing line: what is there now, and the next command, with the pipeline and its config."""
    content = content or f"{summary.num_images:,} images in {summary.num_classes} classes"
    if summary.already_complete:
        done = f"{summary.directory} already holds these {content}; nothing was written."
    else:
        done = f"{content} are in {summary.directory} ({summary.seconds:.1f} s)."
    click.echo(f"{done} Next: enginery run {pipeline} --data {shlex.quote(str(summary.directory))}")
