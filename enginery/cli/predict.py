"""`enginery predict`: what a model server says of images, or a translator here of sentences."""

import asyncio
import codecs
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.markup import escape

from components.common.contracts.errors import EngineryError, UserError, shown
from components.common.contracts.manifests import MANIFEST, check_task
from enginery.cli.options import PATH, finite, server_model, server_url, timeout, write_output
from enginery.formats import echo, new_console, new_table
from enginery.serving.client.client import find_images

if TYPE_CHECKING:
    from components.common.tasks.answers import Answers
    from enginery.serving.client.client import Answer

_STDIN = "-"
_TOP_K = 3


@click.command()
@click.argument("images", nargs=-1, metavar="IMAGE [IMAGE ...] | MODEL SENTENCE [SENTENCE ...]")
@server_url
@server_model
@click.option(
    "--top-k",
    type=click.IntRange(1),
    show_default="3",
    help="Of a classifier: classes for each image; a server names no more than it was exported for.",
)
@click.option("--json", "as_json", is_flag=True, help="Write JSON instead of a table.")
@click.option(
    "--picture", type=PATH, metavar="FILE.png|DIR", help="Of boxes and masks: also draw them; a folder for many images."
)
@click.option("--beam-size", default=1, type=click.IntRange(1, 32), help="Of sentences: beginnings that are kept.")
@timeout(10.0)
@click.option(
    "--retry",
    default=10.0,
    type=click.FloatRange(0),
    callback=finite,
    show_default=True,
    help="Seconds in which to try again where nothing answers or the server is full.",
)
@click.option("--concurrency", default=16, type=click.IntRange(1, 1024), show_default=True, help="Requests at a time.")
def predict(
    images: tuple[str, ...],
    url: str,
    model: str | None,
    top_k: int | None,
    as_json: bool,
    picture: Path | None,
    beam_size: int,
    timeout: float,
    retry: float,
    concurrency: int,
) -> None:
    """Ask a model server what it sees: files, folders of images, and - for one image on the standard input.

    Or translate sentences here, without a server: MODEL is a bundle, a release or NAME@alias, and - stands for the
    lines of the standard input. Each translation is a line.

    An image that can't be answered is said, and the others are answered; the exit code is then 2, or 1 if the server
    was at fault.
    """
    if images and _is_model(images[0]):
        if picture is not None or top_k is not None:
            setting = "--top-k" if picture is None else "--picture"
            message = f"translations have neither classes nor pictures; leave {setting} out"
            raise UserError(message, code="other-task", setting=setting)
        _translate(images[0], images[1:], beam_size, as_json)
        return
    from components.common.tasks.answers import answers_of
    from enginery.serving.client.client import AsyncClient
    from enginery.serving.client.transport import RetryPolicy

    named, num_classes = list(_named_images(images)), top_k or _TOP_K
    if picture is not None:
        _check_picture(picture, len(named))

    async def ask() -> "tuple[str, Answers | None, list[Answer | dict[str, Any] | EngineryError]]":
        async with AsyncClient(url, model=model, retry=RetryPolicy(timeout_s=timeout, retry_s=retry)) as client:
            served = await client.classifier()
            reads = [read for _, read in named]
            _check_options(picture, top_k, beam_size, is_classifier=not served.answer_output)
            if served.answer_output:
                task = answers_of((await client.parameters()).get("task", ""))
                found = client.each(reads, client.answer, concurrency=concurrency)
                return served.name, task, [answer async for answer in found]
            each = client.each(reads, partial(client.classify, top_k=num_classes), concurrency=concurrency)
            return served.name, None, [answer async for answer in each]

    name, task, answers = asyncio.run(ask())
    names = [image for image, _ in named]
    if picture is not None and task is not None:
        _draw(picture, named, answers, task)
    if as_json:
        results = [_as_json(image, answer) for image, answer in zip(names, answers, strict=True)]
        click.echo(json.dumps({"url": url, "model": name, "results": results}, indent=1))
    else:
        _print_table(names, answers, num_classes, task)
    _end(names, answers)


def _is_model(name: str) -> bool:
    """True for the folder of a bundle or a release, and for NAME@alias and NAME/3."""
    from enginery.registry.models import is_reference
    from enginery.release.verify import SUMS

    path = Path(name)
    if path.is_dir():
        return any((path / file).is_file() for file in (MANIFEST, SUMS))
    return not path.exists() and is_reference(name)


def _translate(model: str, texts: Sequence[str], beam_size: int, as_json: bool) -> None:
    from enginery.serving.sources import find_source

    if not texts:
        message = 'predict takes one or more sentences: enginery predict MODEL "SENTENCE"; - is the standard input'
        raise UserError(message, code="no-sentences")
    sentences: list[str | bytes] = []
    with find_source(model, None) as source:
        check_task(f"the model {model}", source.bundle.manifest.task, "translation", "ask a server of it about images")
        for text in texts:
            if Path(text).suffix and os.path.isfile(text):
                fix = "give its lines by the standard input: enginery predict MODEL - < FILE"
                raise UserError(f"{shown(text)} is a file; {fix}", code="file-not-sentence")
            sentences += _lines(sys.stdin.buffer.read()) if text == _STDIN else [text]
        from components.common.tasks.translation.runners import open_translator
        from components.common.tasks.translation.sentences import on_one_line, translate_each

        with closing(open_translator(source.bundle, source.precision)) as translator:
            answers = translate_each(translator, sentences, beam_size=beam_size)
    names = [f"sentence {number}" for number in range(1, len(answers) + 1)]
    if as_json:
        results = [
            {"error": str(answer)} if isinstance(answer, EngineryError) else {"translation": answer}
            for answer in answers
        ]
        click.echo(json.dumps({"model": model, "precision": source.precision, "results": results}, indent=1))
    else:
        for answer in answers:
            click.echo("" if isinstance(answer, EngineryError) else on_one_line(answer))
    _end(names, answers, "sentences")


def _lines(text: bytes) -> list[bytes]:
    return text.removeprefix(codecs.BOM_UTF8).removesuffix(b"\n").split(b"\n") if text else []


def _named_images(images: Sequence[str]) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Each image's name and the function that reads it."""
    if not images:
        message = "predict takes one or more images: enginery predict IMAGE [IMAGE ...]; - is the standard input"
        raise UserError(message, code="no-images")
    if images.count(_STDIN) > 1:
        raise UserError(
            f"{_STDIN} is the standard input, which holds one image; name it once", code="standard-input-twice"
        )
    for name in images:
        path = Path(name)
        if name == _STDIN:
            yield "standard input", cache(lambda: _not_empty(sys.stdin.buffer.read()))
        elif path.is_dir():
            yield from ((str(file), partial(_content, file)) for file in find_images(path))
        elif path.exists():
            yield name, partial(_content, path)
        else:
            message = f"there is no file or folder {path}; name an image, or a translator before sentences"
            raise UserError(message, code="no-images")


def _content(path: Path) -> bytes:
    try:
        return _not_empty(path.read_bytes())
    except OSError as error:
        raise UserError(f"can't read it: {error.strerror}", code="unreadable-image") from None


def _not_empty(content: bytes) -> bytes:
    if not content:
        raise UserError("it is empty; give the content of an image file", code="empty-image")
    return content


def _check_picture(picture: Path, num_images: int) -> None:
    """See that pictures can be written, before anything is asked."""
    is_file = num_images == 1 and picture.suffix.lower() == ".png"
    if picture.suffix and not is_file and not picture.is_dir():
        what = f"pictures of {num_images:,} images need a folder" if num_images > 1 else "pictures are PNG files"
        raise UserError(
            f"--picture {picture}: {what}; name FILE.png for one image, a folder without a dot in its name, or one "
            "that exists",
            code="no-output",
            setting="--picture",
        )
    if not is_file:
        try:
            picture.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            message = f"--picture {picture} can't be a folder: {error.strerror}; name another"
            raise UserError(message, code="no-output", setting="--picture") from None


def _check_options(picture: Path | None, top_k: int | None, beam_size: int, *, is_classifier: bool) -> None:
    """Refuse an option that the answers of the model's task have no use for."""
    if beam_size > 1:
        raise UserError("images have no beams; leave --beam-size out", code="other-task", setting="--beam-size")
    if is_classifier and picture is not None:
        message = "the model names classes, which no picture shows; leave --picture out"
        raise UserError(message, code="other-task", setting="--picture")
    if not is_classifier and top_k is not None:
        message = "the model answers with boxes or masks, all that it finds; leave --top-k out"
        raise UserError(message, code="other-task", setting="--top-k")


def _draw(
    picture: Path,
    named: Sequence[tuple[str, Callable[[], bytes]]],
    answers: "Sequence[Answer | dict[str, Any] | EngineryError]",
    task: "Answers",
) -> None:
    """Write images with their answers: into a folder by their numbers and names, or one into a file."""
    from components.common.data.image_files import rgb

    for number, ((name, read), answer) in enumerate(zip(named, answers, strict=True), 1):
        if not isinstance(answer, dict):
            continue
        file = picture / f"{number:04d}-{Path(name).stem}.png" if picture.is_dir() else picture
        encoded = io.BytesIO()
        try:
            task.drawn(rgb(read()), answer).save(encoded, "PNG")
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # whatever a server may send
            message = f"the server's answer to {name} can't be drawn ({shown(str(error))}): is it one of enginery's?"
            raise EngineryError(message, code="unknown-answer") from None
        write_output(file, encoded.getvalue(), "--picture")


def _as_json(name: str, answer: "Answer | dict[str, Any] | EngineryError") -> dict[str, Any]:
    if isinstance(answer, EngineryError):
        return {"image": name, "error": str(answer)}
    return {"image": name, **(answer if isinstance(answer, dict) else asdict(answer))}


def _print_table(
    names: Sequence[str],
    answers: "Sequence[Answer | dict[str, Any] | EngineryError]",
    top_k: int,
    task: "Answers | None",
) -> None:
    if task is not None:
        table = new_table("image", "answer")
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, dict):
                table.add_row(escape(name), escape(task.summary(answer)))
        new_console().print(table)
        return
    good = [answer for answer in answers if not isinstance(answer, EngineryError | dict)]
    if not good:
        return
    columns = min(top_k, max((len(answer.labels) for answer in good), default=1) or 1)
    table = new_table("image", *(f"top {rank + 1}" for rank in range(columns)))
    for name, answer in zip(names, answers, strict=True):
        if isinstance(answer, EngineryError | dict):
            continue
        cells = [
            f"{escape(label)} {100 * share:.2f} %"
            for label, share in zip(answer.labels, answer.probabilities, strict=True)
        ]
        table.add_row(escape(name), *(cells or ["no class"]))
    new_console().print(table)


def _end(names: Sequence[str], answers: Sequence[object], unit: str = "images") -> None:
    """One line for each image without an answer, and the exit code."""
    failed = [(name, answer) for name, answer in zip(names, answers, strict=True) if isinstance(answer, EngineryError)]
    for name, error in failed:
        click.secho(shown(f"{name}: "), fg="red", nl=False, err=True)
        echo(str(error), err=True)
    if failed:
        summary = f"{len(failed)} of {len(names)} {unit} have no answer"
        kind = UserError if all(isinstance(error, UserError) for _, error in failed) else EngineryError
        raise kind(summary, code=f"{unit}-without-answer")
