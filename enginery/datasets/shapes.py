"""Shapes: a dataset of any size of coloured shapes on textured ground, with exact boxes and masks."""

import json
import math
from collections.abc import Callable, Iterable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from components.common.contracts.manifests import write_atomically
from components.common.data.image_files import encode_image
from enginery.datasets import (
    MAX_IMAGE_SIZE,
    SPLITS,
    DatasetSummary,
    ImageTask,
    check_range,
    is_written,
    run_tasks,
    write_dataset,
    write_whole,
)
from enginery.datasets.textures import value_noise

SYNTHESIS_VERSION = 1
"""Raise it when a change alters the images of a given seed: it guards resumed directories."""

CLASSES = ("background", "circle", "square", "triangle", "star", "ring")
"""Names by the value of their pixels in a mask; the background is no class of boxes."""

MIN_IMAGE_SIZE = 32  # px
MAX_SHAPES = 6
MAX_HIDDEN = 0.5  # share of a shape that those above it may cover
MIN_CONTRAST = 40.0  # levels of 255 between a shape and the mean of what it covers, in one channel at least
RADII = (0.04, 0.28)  # of the image's side
JPEG_QUALITY = 92
_OVERSAMPLING = 4  # shapes are drawn so many times as large: an edge is exact to a quarter of a pixel
_MIN_PIXELS = 12
_IMAGES_PER_TASK = 32

Mask = npt.NDArray[np.bool_]


def shape_image(
    rng: np.random.Generator, size: int
) -> tuple[Image.Image, npt.NDArray[np.uint8], list[tuple[int, Mask]]]:
    """One RGB image of size x size px. Everything random is drawn from `rng`, in a fixed order.

    Returns:
        The image; its mask, [size, size], by CLASSES; of each object its class and [size, size] what is visible of it.
        One image in seven holds no object.
    """
    pixels = _ground(rng, size)  # [size, size, 3] float32, 0..255
    owners = np.zeros((size, size), np.uint8)  # number of the shape on top, from 1
    classes: list[int] = []
    areas: list[int] = []  # pixels of each shape, hidden ones included
    for _ in range(rng.integers(0, MAX_SHAPES + 1)):
        class_index = int(rng.integers(1, len(CLASSES)))
        rows, columns, cover = _shape(rng, CLASSES[class_index], size)  # cover: share of each pixel, 0..1
        mask = cover >= 0.5
        under = owners[rows, columns]
        visible = np.bincount(owners.ravel(), minlength=len(classes) + 1)
        visible -= np.bincount(under[mask], minlength=len(classes) + 1)
        if mask.sum() < _MIN_PIXELS or (visible[1:] < (1 - MAX_HIDDEN) * np.array(areas)).any():
            continue
        classes.append(class_index)
        areas.append(int(mask.sum()))
        under[mask] = len(classes)
        part = pixels[rows, columns]
        colour = _colour(rng, part[mask].mean(axis=0))
        grain = 1 + rng.uniform(0, 0.2) * value_noise(rng, size, size / rng.uniform(6, 30))[rows, columns]
        part += cover[..., None] * (colour * grain[..., None] - part)
    pixels += np.float32(rng.uniform(1, 10)) * rng.standard_normal(pixels.shape, dtype=np.float32)
    labels = np.array([0, *classes], np.uint8)[owners]
    objects = [(class_index, owners == number) for number, class_index in enumerate(classes, 1)]
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)), labels, objects


def _ground(rng: np.random.Generator, size: int) -> npt.NDArray[np.float32]:
    """[size, size, 3] two colours, mixed by noise of two sizes."""
    first, second = rng.uniform(30, 225, (2, 3)).astype(np.float32)
    coarse = value_noise(rng, size, size / rng.uniform(2, 8))
    fine = value_noise(rng, size, size / rng.uniform(10, 40))
    mix = np.clip(0.5 + 0.3 * coarse + rng.uniform(0, 0.2) * fine, 0, 1).astype(np.float32)[..., None]
    return first * mix + second * (1 - mix)


def _colour(rng: np.random.Generator, ground: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """[3] a colour that stands out against [3] the mean colour under a shape."""
    while True:
        colour = rng.uniform(0, 255, 3).astype(np.float32)
        if np.abs(colour - ground).max() >= MIN_CONTRAST:
            return colour


def _shape(rng: np.random.Generator, name: str, size: int) -> tuple[slice, slice, npt.NDArray[np.float32]]:
    """A shape at a random place: the rows and columns of the image about it, and the share that it covers of each."""
    radius = size * math.exp(rng.uniform(math.log(RADII[0]), math.log(RADII[1])))
    x, y = rng.uniform(0.5 * radius, size - 0.5 * radius, 2)  # px; a part may lie outside of the image
    turn = rng.uniform(0, 2 * math.pi)
    left, top = math.floor(x - radius), math.floor(y - radius)
    side = math.ceil(2 * radius) + 2
    canvas = Image.new("L", (side * _OVERSAMPLING, side * _OVERSAMPLING))
    draw = ImageDraw.Draw(canvas)
    centre = ((x - left) * _OVERSAMPLING, (y - top) * _OVERSAMPLING)
    outer = radius * _OVERSAMPLING

    def circle(own: float, fill: int) -> None:
        draw.ellipse((centre[0] - own, centre[1] - own, centre[0] + own, centre[1] + own), fill=fill)

    def polygon(*radii: float) -> None:
        angles = [turn + 2 * math.pi * place / len(radii) for place in range(len(radii))]
        corners = [
            (centre[0] + own * math.cos(angle), centre[1] + own * math.sin(angle))
            for own, angle in zip(radii, angles, strict=True)
        ]
        draw.polygon(corners, fill=255)

    if name in ("circle", "ring"):
        circle(outer, 255)
        if name == "ring":
            circle(0.55 * outer, 0)
    elif name == "star":
        polygon(*(outer, 0.42 * outer) * 5)
    else:
        polygon(*(outer,) * {"triangle": 3, "square": 4}[name])
    cover = np.asarray(canvas.reduce(_OVERSAMPLING), np.float32) / np.float32(255)  # [side, side]
    rows, columns = (slice(max(start, 0), min(start + side, size)) for start in (top, left))
    return rows, columns, cover[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]


def rle(mask: Mask) -> dict[str, Any]:
    """COCO's run lengths of a mask, in the text form that its tools write.

    Source: maskApi.c of the COCO API: runs by columns, beginning with zeros; from the third on the difference to the
    one before the last; 5 bits a character, the sixth for "more follows", from character 48 on.
    """
    flat = mask.ravel(order="F")
    ends = np.flatnonzero(np.diff(flat)) + 1
    edges = [0, *([0] if flat[0] else []), *ends.tolist(), len(flat)]
    counts = [end - start for start, end in pairwise(edges)]
    text = bytearray()
    for place, count in enumerate(counts):
        rest = count - counts[place - 2] if place > 2 else count
        while True:
            bits, rest = rest & 31, rest >> 5
            more = rest != (-1 if bits & 16 else 0)
            text.append(48 + bits + (32 if more else 0))
            if not more:
                break
    return {"size": list(mask.shape), "counts": text.decode()}


def write_shapes(
    directory: Path,
    *,
    num_train: int = 2000,
    num_val: int = 1000,
    seed: int = 0,
    image_size: int = 128,
    num_workers: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> DatasetSummary:
    """Write DIRECTORY/classes.txt, and below DIRECTORY/{train,val} images/, masks/ and annotations.json; see docs.

    An unfinished run of the same arguments is continued, a finished one left alone.

    Args:
        directory: New, empty, or of an earlier run with the same arguments.
        num_train: Images of the training split, 1 or more.
        num_val: The same for the validation split.
        seed: 0 or more. Another seed gives other images.
        image_size: Width and height, px.
        num_workers: Processes; 0 = one per core that this process may use.
        on_progress: Called with the number of images that have just become ready.

    Raises:
        UserError: an argument is out of range, or the directory holds something else.
    """
    check_range(num_train=(num_train, 1), num_val=(num_val, 1), image_size=(image_size, MIN_IMAGE_SIZE, MAX_IMAGE_SIZE))
    check_range(seed=(seed, 0), num_workers=(num_workers, 0))
    arguments: dict[str, str | int] = {
        "dataset": "shapes",
        "num_train": num_train,
        "num_val": num_val,
        "seed": seed,
        "image_size": image_size,
        "jpeg_quality": JPEG_QUALITY,
        "synthesis_version": SYNTHESIS_VERSION,
    }

    def write() -> None:
        for split, num_images in enumerate((num_train, num_val)):
            folder = directory / SPLITS[split]
            for name in ("images", "masks"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            every = ImageTask(folder=folder, seed=seed, split=split, indices=range(num_images), image_size=image_size)
            parts = run_tasks(_write_task, every.parts(_IMAGES_PER_TASK), num_workers, on_progress)
            _write_annotations(folder / "annotations.json", chain.from_iterable(parts))
        write_atomically(directory / "classes.txt", "".join(f"{name}\n" for name in CLASSES).encode())

    return write_dataset(directory, arguments, write, num_images=num_train + num_val, num_classes=len(CLASSES) - 1)


Entry = tuple[dict[str, Any], list[dict[str, Any]]]
"""An image and its objects as COCO lists them, but for the objects' numbers."""


def _write_task(task: ImageTask) -> list[Entry]:
    """Write the images and masks that an earlier run has not, and return the entries of all."""
    entries: list[Entry] = []
    for index in task.indices:
        rng = np.random.default_rng((task.seed, task.split, index))
        image, labels, objects = shape_image(rng, task.image_size)
        for path, picture, options in (
            (task.folder / "images" / f"{index:06d}.jpg", image, {"kind": "JPEG", "quality": JPEG_QUALITY}),
            (task.folder / "masks" / f"{index:06d}.png", Image.fromarray(labels), {"kind": "PNG"}),
        ):
            if not is_written(path):
                write_whole(path, encode_image(picture, **options))
        entry = {"id": index, "file_name": f"{index:06d}.jpg", "width": task.image_size, "height": task.image_size}
        entries.append((entry, [{"image_id": index, **_annotation(*each)} for each in objects]))
    return entries


def _annotation(class_index: int, mask: Mask) -> dict[str, Any]:
    rows, columns = (np.flatnonzero(mask.any(axis=axis)) for axis in (1, 0))
    x, y = int(columns[0]), int(rows[0])
    return {
        "category_id": class_index,
        "bbox": [x, y, int(columns[-1]) + 1 - x, int(rows[-1]) + 1 - y],
        "area": int(mask.sum()),
        "iscrowd": 0,
        "segmentation": rle(mask),
    }


def _write_annotations(path: Path, entries: Iterable[Entry]) -> None:
    """Write the images and objects of a split as COCO JSON."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for image, objects in entries:
        images.append(image)
        annotations += [{"id": len(annotations) + number, **each} for number, each in enumerate(objects, 1)]
    categories = [{"id": number, "name": name} for number, name in enumerate(CLASSES) if number]
    content = {"images": images, "annotations": annotations, "categories": categories}
    write_atomically(path, json.dumps(content, separators=(",", ":")).encode())
