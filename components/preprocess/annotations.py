"""The member that is packed beside an image: its label, by task, as the loader reads it."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from PIL import Image

from components.common.tasks import TaskName
from components.common.tasks.segmentation import VOID
from components.preprocess.decoding import Rejected, as_png, decode_mask
from components.preprocess.outlines import outline_of, paint
from components.preprocess.sources import Sample, Storage, Unreadable, read_sample

_LABEL_WIDTH = 6  # digits of a .cls member; DALI needs labels of one length to batch them
_TOLERANCE = 1.0  # px by which boxes may reach out of the image, as where pixels are counted from 1
_MIN_SIDE = 0.5  # px of a box
_MAX_OBJECTS = 10_000  # of an image: a batch is as large as its fullest image, in training as in memory
_MAX_REASON = 200
_Mask = tuple[np.ndarray, int, list[tuple[str, str, bool]]]  # [H, W] uint8, number of classes, and what is wrong
_NO_OBJECT = (0.0, 0.0, 0.0, 0.0, -1.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class PackedLabel:
    """The label of an image, and what of it could not be used."""

    data: bytes
    entry: dict[str, Any]  # of the listing: "label", of boxes "objects", of masks "shares"
    # names of annotations, what is wrong with them, and whether they are kept all the same
    refused: list[tuple[str, str, bool]] = field(default_factory=list)


def _pack_class(sample: Sample, size: tuple[int, int], packed: tuple[int, int], storage: Storage) -> PackedLabel:
    return PackedLabel(data=f"{sample.label:0{_LABEL_WIDTH}d}".encode(), entry={"label": sample.label})


def _pack_boxes(sample: Sample, size: tuple[int, int], packed: tuple[int, int], storage: Storage) -> PackedLabel:
    """Boxes as little-endian float32 [n, 6]: x1, y1, x2, y2 in pixels of the packed image, class, 1 if ignored.

    An image without objects has one row of class -1: no member of a tar is empty.

    Raises:
        Rejected: the annotations are of an image of another size.
    """
    found, rows, _ = _annotations(sample, size)
    sides = np.array([*size, *size], np.float64)
    boxes = rows[:, :4] * (sides if found["relative"] else 1)
    inside = np.clip(boxes, 0, sides)
    lengths, shown = boxes[:, 2:] - boxes[:, :2], inside[:, 2:] - inside[:, :2]  # [n, 2]
    is_kept: np.ndarray = (lengths.min(axis=1) > 0) & (shown.min(axis=1) >= _MIN_SIDE)
    is_cut = np.abs(boxes - inside).max(axis=1) > _TOLERANCE
    refused = [(name, reason, kept) for name, reason, kept in found["refused"]]
    for place in np.flatnonzero(~is_kept | is_cut).tolist():
        text = _text(boxes[place])
        if is_kept[place]:
            what = f"partly outside of the image, cut at its edge: {text}"
        elif (lengths[place] <= 0).any():
            what = f"of no size: {text}"
        else:
            what = "outside of the image" if (shown[place] <= 0).any() else "of less than half a pixel within it"
            what += f": {text} of {size[0]}x{size[1]}"
        refused.append((found["names"][place], f"a box {what}", bool(is_kept[place])))
    kept = np.column_stack([inside * np.tile(np.array(packed) / size, 2), rows[:, 4:]])[is_kept]
    array = (kept if len(kept) else np.array([_NO_OBJECT])).astype("<f4")
    areas = (array[:, 2] - array[:, 0]) * (array[:, 3] - array[:, 1])
    entry = {
        "label": max(0, int(array[areas.argmax(), 4])),
        "objects": array.astype(np.float64).round(2).tolist() if len(kept) else [],
    }
    return PackedLabel(data=array.tobytes(), entry=entry, refused=refused)


def _annotations(sample: Sample, size: tuple[int, int]) -> tuple[dict[str, Any], np.ndarray, list[bytes]]:
    """The source's annotations of an image, their boxes ([n, 6] float64) and the outlines of its objects.

    See Annotated.encoded.

    Raises:
        Rejected: it is of an image of another size, or has too many objects.
    """
    head, _, rest = (sample.annotation or b"").partition(b"\n")
    found: dict[str, Any] = json.loads(head)
    if (number := len(found["names"])) > _MAX_OBJECTS:
        raise Rejected(f"{number:,} objects, and an image may have {_MAX_OBJECTS:,}; cut it into tiles")
    named = found["size"]
    if named is not None and tuple(named) != size:
        raise Rejected(
            f"annotated at another size: objects in {named[0]}x{named[1]} pixels, an image of {size[0]}x{size[1]}"
        )
    rows = np.frombuffer(rest, "<f8", 6 * number).reshape(-1, 6)
    ends = accumulate(found["outlines"], initial=rows.nbytes)
    return found, rows, [rest[start:end] for start, end in pairwise(ends)]


def _text(box: np.ndarray) -> str:
    return "[" + ", ".join(f"{value:g}" for value in box.round(2)) + "]"


def _pack_mask(sample: Sample, size: tuple[int, int], packed: tuple[int, int], storage: Storage) -> PackedLabel:
    """The mask as gray PNG of the packed image's size: classes, and VOID where there is none.

    "shares" of the entry are [class, share of the pixels] of the classes that occur, the label is the largest.

    Raises:
        Rejected: it is no mask of the image.
        Unreadable, OSError: it can't be read.
    """
    is_drawn = sample.mask is None
    values, num_classes, refused = _drawn_mask(sample, size) if is_drawn else _read_mask(sample, size, storage)
    shares = np.bincount(values.ravel(), minlength=VOID + 1) / values.size
    gray = Image.fromarray(values)
    data = as_png(gray if packed == size else gray.resize(packed, Image.Resampling.NEAREST))
    entry = {
        "label": int(shares[:num_classes].argmax()),
        "shares": [[int(label), round(shares[label], 6)] for label in np.flatnonzero(shares[:num_classes])],
        "label_sha256": hashlib.sha256(data).hexdigest(),
    }
    return PackedLabel(data=data, entry=entry, refused=refused)


def _read_mask(sample: Sample, size: tuple[int, int], storage: Storage) -> _Mask:
    """Read the mask of a PNG file."""
    assert sample.mask is not None
    path, num_classes = sample.mask.path, int(sample.annotation or b"")
    try:
        mask = decode_mask(read_sample(storage, sample.mask), size)
    except (Rejected, Unreadable) as reason:
        raise type(reason)(f"its mask can't be used: {reason} ({path})") from None
    except OSError as error:
        raise OSError(error.errno, f"its mask {path}: {error.strerror or error}") from None
    values = np.array(mask)  # [H, W] uint8
    shares = np.bincount(values.ravel(), minlength=VOID + 1) / values.size
    unknown = [value for value in np.flatnonzero(shares).tolist() if num_classes <= value < VOID]
    if not unknown:
        return values, num_classes, []
    values[(values >= num_classes)] = VOID
    which = ", ".join(f"{value} ({100 * shares[value]:.2g} %)" for value in unknown)
    return values, num_classes, [(path, f"values that are no class, taken for void: {which} of the pixels", True)]


def _drawn_mask(sample: Sample, size: tuple[int, int]) -> _Mask:
    """Draw the mask of outlines."""
    found, rows, outlines = _annotations(sample, size)
    refused = [(name, reason, kept) for name, reason, kept in found["refused"]]
    mask = np.zeros(size[::-1], np.uint8)  # the class of what is no object
    for name, label, outline in zip(found["names"], rows[:, 4].astype(int).tolist(), outlines, strict=True):
        try:
            region, pixels = outline_of(outline, size)
        except (ValueError, TypeError, OverflowError) as error:
            refused.append((name, f"no outline: {str(error)[:_MAX_REASON]}", False))
            continue
        paint(mask[region], label, pixels)
        if not pixels.any():
            refused.append((name, "no pixel of the image is in it", False))
    return mask, VOID, refused


PACKERS: dict[TaskName, Callable[[Sample, tuple[int, int], tuple[int, int], Storage], PackedLabel]] = {
    "classification": _pack_class,
    "detection": _pack_boxes,
    "segmentation": _pack_mask,
}
"""By task: from a sample, the sides of its image (width, height; upright) and of the packed one, and where it lies to
its label."""
