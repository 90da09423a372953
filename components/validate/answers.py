"""Images through a bundle whose answers are no classes: what each precision says, and a picture of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from components.common.contracts.manifests import Artifact, BundleManifest
from components.common.contracts.records import Precision
from components.common.data.image_files import encode_image, rgb, upright_size
from components.common.runtimes.selection import select_runtimes
from components.common.tasks.answers import Answer, View, answers_of
from components.validate.inspect import load_input

_TILE_SIDE, _GAP, _TEXT_HEIGHT = 320, 8, 16  # px


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The answer of one precision to an image."""

    file: Path
    precision: Precision
    runtime: str  # "n/a" where nothing here runs it
    note: str  # why there is no answer, or what to know about it
    answer: Answer | None


def answer_images(bundle: Artifact[BundleManifest], files: Sequence[Path]) -> list[Answered]:
    """Every image by every precision, image by image.

    Raises:
        UserError: a file is no image that preprocess takes.
        EngineryError: the models can't be run.
    """
    record, task = bundle.manifest, answers_of(bundle.manifest.task)
    inputs = [load_input(file, record.image_transform) for file in files]
    selections = select_runtimes(bundle, "auto")
    found = []
    try:
        for file, image in zip(files, inputs, strict=True):
            view = View.of(upright_size(file.read_bytes()), record.image_transform)
            for selection in selections:
                answer, note = None, selection.note
                if selection.runner is not None:
                    output = selection.runner.infer(image)[0]
                    if np.isfinite(output).all():
                        answer = task.answer(output, record.classes, view)
                    else:
                        note = "; ".join(filter(None, (note, "its output holds NaN or infinity")))
                name = selection.runner.runtime if selection.runner is not None else "n/a"
                found.append(Answered(file=file, precision=selection.precision, runtime=name, note=note, answer=answer))
    finally:
        for selection in selections:
            if selection.runner is not None:
                selection.runner.close()
    return found


def picture(bundle: BundleManifest, found: Sequence[Answered]) -> bytes:
    """A PNG: a row for each image, with the image and the answer of each precision that ran."""
    task = answers_of(bundle.task)
    rows: dict[Path, list[tuple[str, Image.Image]]] = {}
    for each in found:
        image = rgb(each.file.read_bytes())
        tiles = rows.setdefault(each.file, [(each.file.name, image)])
        if each.answer is not None:
            tiles.append((each.precision.upper(), task.drawn(image, each.answer)))
    step = _TILE_SIDE + _GAP
    width, height = step * max(map(len, rows.values())) + _GAP, (step + _TEXT_HEIGHT) * len(rows) + _GAP
    whole = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(whole)
    for row, tiles in enumerate(rows.values()):
        for column, (title, tile) in enumerate(tiles):
            x, y = _GAP + column * step, _GAP + row * (step + _TEXT_HEIGHT)
            draw.text((x, y), title, fill="black")
            scale = _TILE_SIDE / max(tile.size)
            whole.paste(tile.resize([max(1, round(side * scale)) for side in tile.size]), (x, y + _TEXT_HEIGHT))
    return encode_image(whole, "PNG")
