"""Images whose colours say where each pixel lies, with masks and boxes, and checks that labels lie there, too."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from components.common.contracts.transforms import TransformSpec
from components.common.data.loader import Batch

NUM_CLASSES = 100
STEPS = 2.5  # levels from one column, or row, to the next
SIZES = [(60, 90), (90, 60), (75, 75), (97, 41), (64, 100)]  # height, width
NUM_TRAIN, NUM_VAL = 15, 20
JPEG: dict[str, Any] = {"quality": 100, "subsampling": 0}
TURNED = 274, 6  # EXIF: the file's top is the picture's right side


def picture(
    height: int, width: int, rng: np.random.Generator, *, wave: float = 30, noise: float = 12, edge: float = 80
) -> Image.Image:
    """Waves of at most `wave` levels, an edge and noise: detail at every scale."""
    y, x = np.mgrid[0:height, 0:width].astype(float)
    levels = np.full((height, width, 3), 128.0)
    for channel in range(3):
        for _ in range(12):
            frequency, phase = rng.uniform(-0.5, 0.5, 2), rng.uniform(0, 6)
            levels[:, :, channel] += rng.uniform(2, wave) * np.sin(frequency[0] * x + frequency[1] * y + phase)
    levels += rng.normal(0, noise, levels.shape)
    levels[height // 4 : height // 2, width // 3 : width // 2] += edge
    return Image.fromarray(levels.clip(0, 255).astype(np.uint8))


def plain(resize_size: int, crop_size: int = 0) -> TransformSpec:
    """Normalization that leaves levels in 0..255; all of the shorter side is shown where `crop_size` is 0."""
    crop_size = crop_size or resize_size
    return TransformSpec(resize_size=resize_size, crop_size=crop_size, mean=(0, 0, 0), std=(1 / 255, 1 / 255, 1 / 255))


def boxes_of(number: int) -> np.ndarray:
    """[n, 6] float64: x1, y1, x2, y2, class, ignored."""
    height, width = SIZES[number % len(SIZES)]
    rng = np.random.default_rng(number)
    rows = []
    for _ in range(number % 5):  # some have none
        x, y = rng.integers(0, width - 8), rng.integers(0, height - 8)
        right, bottom = rng.integers(x + 2, width + 1), rng.integers(y + 2, height + 1)
        rows.append((x, y, right, bottom, rng.integers(0, 3), rng.integers(0, 2)))
    return np.array(rows, np.float64).reshape(-1, 6)


def write_positions(root: Path) -> None:
    """Images whose red says the column, green the row and blue which image it is; a mask of columns or of rows."""
    (root / "classes.txt").parent.mkdir(parents=True, exist_ok=True)
    (root / "classes.txt").write_text("\n".join(map(str, range(NUM_CLASSES))), encoding="utf-8")
    for split, numbers in (("train", range(NUM_TRAIN)), ("val", range(NUM_VAL))):
        content: dict[str, Any] = {"images": [], "annotations": []}
        content["categories"] = [{"id": kind, "name": f"c{kind}"} for kind in range(3)]
        for folder in ("images", "masks"):
            (root / split / folder).mkdir(parents=True)
        for number in numbers:
            height, width = SIZES[number % len(SIZES)]
            y, x = np.mgrid[0:height, 0:width]
            pixels = np.stack([x * STEPS, y * STEPS, np.full_like(x, 10 * number + (split == "val"))], axis=-1)
            image, exif = Image.fromarray(pixels.round().astype(np.uint8)), Image.Exif()
            if number % 4 == 3:
                image, exif[TURNED[0]] = image.transpose(Image.Transpose.ROTATE_90), TURNED[1]
            name = f"{number:02d}.{'jpg' if number % 3 == 0 else 'png'}"
            image.save(root / split / "images" / name, exif=exif, **(JPEG if number % 3 == 0 else {}))
            mask = (y if number % 2 else x).astype(np.uint8)
            mask[:3] = 255
            Image.fromarray(mask).save(root / split / "masks" / f"{number:02d}.png")
            content["images"].append({"id": number, "file_name": name})
            for left, top, right, bottom, kind, crowd in boxes_of(number).tolist():
                box = {"bbox": [left, top, right - left, bottom - top], "category_id": int(kind), "iscrowd": int(crowd)}
                content["annotations"].append({"id": len(content["annotations"]), "image_id": number, **box})
        (root / split / "annotations.json").write_text(json.dumps(content), encoding="utf-8")


class Seen(NamedTuple):
    """An image of `write_positions` as the loader delivers it, and where in the packed image its pixels lie."""

    number: int
    columns: np.ndarray  # [H, W] float: the column that a pixel shows
    rows: np.ndarray
    x: tuple[float, float]  # scale and shift from packed to delivered pixels
    y: tuple[float, float]
    label: np.ndarray


def seen(batch: Batch) -> Iterator[Seen]:
    for image, label in zip(batch.images.float().cpu().numpy(), batch.labels.cpu().numpy(), strict=True):
        columns, rows = image[0] / STEPS, image[1] / STEPS
        ends = []
        for values in (columns.mean(axis=0), rows.mean(axis=1)):
            places = np.arange(len(values)) + 0.5
            slope, start = np.polyfit(places[3:-3], values[3:-3] + 0.5, 1)  # at the edge pixels are repeated
            ends.append((1 / slope, -start / slope))
        yield Seen(round(float(image[2].mean()) / 10), columns, rows, ends[0], ends[1], label)


def check_mask(one: Seen) -> None:
    """The value is the column, or row, of the nearest packed pixel; the first rows are void."""
    wanted, scale = (one.rows, one.y) if one.number % 2 else (one.columns, one.x)
    void = one.rows < 3
    sure = np.abs(one.rows - 2.5) > 1 + 1 / one.y[0]
    np.testing.assert_array_equal(one.label[sure] == 255, void[sure])
    shown = sure & (one.label != 255)
    difference = one.label[shown] - wanted[shown]
    assert np.abs(difference).max() <= 1 + max(0.5, 0.5 / abs(scale[0]))  # of levels of a JPEG, and of the mean
    # Halved exactly, the nearest pixel is one of two, and the image shows their mean.
    assert abs(difference.mean()) < (0.25 if abs(scale[0]) > 1 else 0.65)


def moved(number: int, one: Seen, side: int, least_share: float) -> tuple[np.ndarray, np.ndarray]:
    """Boxes as they have to be, from where the pixels are: [n, 6], and [n] the share of each that is left."""
    rows = boxes_of(number)
    first, second = (
        np.stack([rows[:, at] * one.x[0] + one.x[1], rows[:, at + 1] * one.y[0] + one.y[1]]) for at in (0, 2)
    )
    whole = np.concatenate([np.minimum(first, second), np.maximum(first, second)]).T
    inside = whole.clip(0, side)
    sides = (inside[:, 2:] - inside[:, :2]).clip(0)
    shares = sides.prod(axis=1) / (whole[:, 2:] - whole[:, :2]).prod(axis=1)
    kept = (shares > 0) & (shares >= least_share)
    return np.concatenate([inside, rows[:, 4:]], axis=1)[kept], shares


def check_boxes(one: Seen, least_share: float) -> int:
    side = one.columns.shape[0]
    wanted, shares = moved(one.number, one, side, least_share)
    found = one.label[one.label[:, 4] >= 0]
    assert (one.label[len(found) :] == [0, 0, 0, 0, -1, 0]).all()
    if ((shares > 0) & (np.abs(shares - least_share) < 0.02)).any():  # on the border: what pixels tell is not exact
        return 0
    np.testing.assert_array_equal(found[:, 4:], wanted[:, 4:])
    assert np.abs(found[:, :4] - wanted[:, :4]).max(initial=0) < 0.75
    return len(found)
