"""`enginery inspect`: what a model's precisions make of an image, and where they look, or of a sentence."""

import json
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.markup import escape

from components.common.contracts.errors import RuntimeUnavailable, UserError, shown
from components.common.contracts.manifests import Artifact, BundleManifest, check_task, load
from components.common.contracts.records import PRECISIONS
from components.common.tasks import TASKS
from enginery.cli.options import PATH, write_output
from enginery.formats import new_console, new_table, number
from enginery.local.runs import bundle_of_run, latest_bundle
from enginery.local.state import StateDirectory

if TYPE_CHECKING:
    from components.validate.inspect import Explanation

_MAX_IMAGES = 32  # of one picture
_NUM_TOP = 3


@click.command()
@click.argument("images", nargs=-1, type=PATH, metavar="IMAGE [IMAGE ...]")
@click.option("--sentence", "sentences", multiple=True, metavar="TEXT", help="Of a translator, in place of images.")
@click.option("--bundle", type=PATH, metavar="DIR", help="What export wrote.")
@click.option("--run", "run_name", metavar="RUN", help="Its bundle; as in `enginery compare`.  [default: the last]")
@click.option("--layers", metavar="A,B", default="", help="Layers, as the report names them.  [default: the last maps]")
@click.option("--maps", type=click.Choice(["gradcam", "activation"]), default="gradcam", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Of boxes, masks and sentences: write JSON.")
@click.option("--output", type=PATH, metavar="FILE.png", default=Path("inspect.png"), show_default=True)
def inspect(
    images: tuple[Path, ...],
    sentences: tuple[str, ...],
    bundle: Path | None,
    run_name: str | None,
    layers: str,
    maps: str,
    as_json: bool,
    output: Path,
) -> None:
    """Show what each precision predicts for an image, and maps of where FP32 and INT8 look.

    Grad-CAM marks what speaks for the class that FP32 predicts; activation is the mean magnitude of a layer's channels.
    A model that finds boxes or masks has none: the picture shows these. Of a translator, the translations are shown.
    """
    if problem := _problem(images, bundle, run_name, output, len(sentences)):
        code, setting, message = problem
        raise UserError(message, code=code, setting=setting)
    if bundle is None:
        runs = StateDirectory.current().runs
        bundle = latest_bundle(runs) if run_name is None else bundle_of_run(run_name, runs)
    opened = load(bundle, BundleManifest, verify=(".onnx", ".plan", ".model"))
    if sentences or opened.manifest.text is not None:
        _inspect_sentences(opened, sentences, as_json)
        return
    if not TASKS[opened.manifest.task].classifies:
        if layers:
            raise UserError(
                f"maps of layers are of classifiers, and {opened.manifest.architecture} is of {opened.manifest.task}; "
                "leave --layers out",
                code="other-task",
                setting="--layers",
            )
        _inspect_answers(opened, images, output, as_json)
        return
    # PyTorch, DALI and Matplotlib take seconds to import: mistakes are said before.
    from components.validate.inspect import inspect as run_inspection
    from components.validate.inspect import picture

    asked = [name.strip() for name in layers.split(",") if name.strip()]
    result = run_inspection(opened, images, layers=asked, kind=maps)  # type: ignore[arg-type]  # click knows the two
    classes = opened.manifest.classes
    console = new_console()
    console.print(f"{escape(opened.manifest.architecture)}, bundle {escape(_relative(bundle))}")
    for entry in result.explanations:
        _print_explanation(console, entry, classes)
    for note in _notes(result.explanations):
        console.print(escape(note), style="dim", soft_wrap=False)
    if result.maps_missing:
        console.print(f"[yellow]no maps:[/] {escape(result.maps_missing)}", soft_wrap=False)
    drawn = picture(result.explanations, classes, maps, opened.manifest.architecture)  # type: ignore[arg-type]
    write_output(output, drawn, "--output")
    console.print(f"picture: {escape(str(output))}")


def _inspect_answers(bundle: Artifact[BundleManifest], images: Sequence[Path], output: Path, as_json: bool) -> None:
    from components.common.tasks.answers import answers_of
    from components.validate.answers import answer_images, picture

    found, console = answer_images(bundle, images), new_console()
    write_output(output, picture(bundle.manifest, found), "--output")
    if as_json:
        results = [
            {"image": str(each.file), "precision": each.precision, "runtime": each.runtime, "note": each.note}
            | (each.answer or {})
            for each in found
        ]
        click.echo(json.dumps({"model": bundle.manifest.architecture, "results": results, "picture": str(output)}))
        return
    console.print(f"{escape(bundle.manifest.architecture)}, bundle {escape(_relative(bundle.path))}")
    table, say = new_table("image", "precision", "runtime", "answer"), answers_of(bundle.manifest.task).summary
    for each in found:
        said = say(each.answer) if each.answer is not None else "n/a"
        table.add_row(escape(each.file.name), each.precision.upper(), each.runtime, escape(said))
    console.print(table)
    for note in dict.fromkeys(f"{each.precision.upper()}: {each.note}" for each in found if each.note):
        console.print(escape(note), style="dim")
    console.print(f"picture: {escape(str(output))}")


def _inspect_sentences(bundle: Artifact[BundleManifest], sentences: Sequence[str], as_json: bool) -> None:
    fix = "give images to it" if sentences else 'give sentences to it: --sentence "TEXT"'
    check_task(f"the bundle {bundle.path}", bundle.manifest.task, "translation" if sentences else "classification", fix)
    from components.common.tasks.translation.runners import open_translator
    from components.common.tasks.translation.sentences import translate_each

    results = []
    for precision in (name for name in PRECISIONS if name in bundle.manifest.models):
        try:
            opened = open_translator(bundle, precision)
        except RuntimeUnavailable as error:  # such as FP16 on a CPU
            missing = {"precision": precision, "runtime": "n/a", "note": str(error)}
            results += [{"sentence": sentence, **missing} for sentence in sentences]
            continue
        with closing(opened) as translator:
            for sentence, answer in zip(sentences, translate_each(translator, sentences), strict=True):
                if isinstance(answer, UserError):
                    raise UserError(f"{sentence[:60]!r}: {answer}", code=answer.code, setting="--sentence")
                one = {"precision": precision, "runtime": translator.runtime, "translation": answer}
                results.append({"sentence": sentence, **one, "note": translator.note})
    results.sort(key=lambda one: sentences.index(one["sentence"]))
    if as_json:
        click.echo(json.dumps({"model": bundle.manifest.architecture, "results": results}))
        return
    columns = ("sentence", "precision", "runtime", "translation")
    console, table = new_console(), new_table(*columns)
    console.print(f"{escape(bundle.manifest.architecture)}, bundle {escape(_relative(bundle.path))}")
    for one in results:
        table.add_row(*(escape(shown(one.get(name, "n/a"))) for name in columns))
    console.print(table)
    for note in dict.fromkeys(f"{one['precision'].upper()}: {one['note']}" for one in results if one["note"]):
        console.print(escape(note), style="dim")


def _problem(
    images: tuple[Path, ...], bundle: Path | None, run_name: str | None, output: Path, num_sentences: int
) -> tuple[str, str, str] | None:
    """Code, option and message of what can be said before anything is loaded."""
    folder = output.absolute().parent
    if images and num_sentences:
        return "images-and-sentences", "--sentence", "inspect takes images or sentences, of one model; leave one out"
    if not images and not num_sentences:
        return "no-images", "", "inspect takes one or more images: enginery inspect IMAGE [IMAGE ...]"
    if len(images) > _MAX_IMAGES:
        return "too-many-images", "", f"inspect takes up to {_MAX_IMAGES} images, got {len(images)}; name fewer"
    for image in images:
        if not image.exists():
            return "no-file", "", f"there is no file {image}; name an image"
    if bundle is not None and run_name is not None:
        return "two-models", "--run", "--bundle and --run both say which model; name one of them"
    if num_sentences:  # of which no picture is made
        return None
    if output.suffix.lower() != ".png":
        message = f"the picture is a PNG, and --output is {output}; name a file that ends in .png"
    elif output.resolve() in {image.resolve() for image in images}:
        message = f"the picture would replace the image {output}; name another file with --output"
    elif output.is_dir():
        message = f"--output {output} is a folder; name a file in it, such as {output / 'inspect.png'}"
    elif not folder.is_dir():
        message = f"can't write {output}: there is no folder {folder}; make it, or name another with --output"
    elif not os.access(folder, os.W_OK):
        message = f"can't write {output}: {folder} is not writable; name another place with --output"
    else:
        return None
    return "no-output", "--output", message


def _print_explanation(console: Console, explanation: "Explanation", classes: tuple[str, ...]) -> None:
    console.print(f"\n[bold]{escape(str(explanation.file))}[/]")
    num_top = min(_NUM_TOP, len(classes))
    table = new_table("precision", "runtime", *(f"top {rank + 1}" for rank in range(num_top)), ">largest delta")
    for prediction in explanation.predictions:
        cells = ["n/a"] * num_top
        if prediction.probabilities is not None:
            best = (-prediction.probabilities).argsort(kind="stable")[:num_top]
            cells = [f"{escape(classes[index])} {100 * prediction.probabilities[index]:.2f} %" for index in best]
        delta = explanation.largest_difference(prediction.precision)
        points = "" if prediction.precision == "fp32" else number(None if delta is None else 100 * delta, ".2f")
        table.add_row(prediction.precision.upper(), prediction.runtime, *cells, points)
    console.print(table)
    for entry in explanation.layers:
        alike = entry.similarity
        value = "one of the maps is empty" if alike is None else f"cosine of FP32's and INT8's map {alike:.3f}"
        console.print(f"{escape(entry.layer.name)}: {value}")


def _notes(explanations: Sequence["Explanation"]) -> list[str]:
    notes = ["largest delta: of a class's probability to that of FP32, in percentage points"]
    notes += [
        f"{entry.precision.upper()}: {entry.note}" for each in explanations for entry in each.predictions if entry.note
    ]
    return list(dict.fromkeys(notes))


def _relative(path: Path) -> str:
    """The shortest way to write a path from here."""
    short = os.path.relpath(path)
    return str(path) if short.startswith("..") else short
