"""Segmentation: a class per pixel, of PNG masks or drawn from COCO's outlines."""

import hashlib

import numpy as np
from PIL import Image

from components.common.data.read_alike import Rejected, as_png
from components.common.tasks.segmentation import VOID
from components.preprocess.decoding import decode_mask
from components.preprocess.outlines import outline_of, paint
from components.preprocess.sources import Sample, Storage, Unreadable, read_sample
from components.preprocess.sources.masks import WANTED, masks_source
from components.preprocess.tasks import Labels, PackedLabel, annotations_of

_MAX_REASON = 200
# [H, W] uint8, number of classes, of annotations in it, and what is wrong
_Mask = tuple[np.ndarray, int, int, list[tuple[str, str, bool]]]


def _pack(sample: Sample, size: tuple[int, int], packed: tuple[int, int], storage: Storage) -> PackedLabel:
    """The mask as gray PNG of the packed image's size: classes, and VOID where there is none.

    "shares" of the entry are [class, share of the pixels] of the classes that occur, the label is the largest, and
    "num_annotations" are the objects that are drawn, or the one file.

    Raises:
        Rejected: it is no mask of the image.
        Unreadable, OSError: it can't be read.
    """
    is_drawn = sample.mask is None
    values, num_classes, number, refused = _drawn_mask(sample, size) if is_drawn else _read_mask(sample, size, storage)
    shares = np.bincount(values.ravel(), minlength=VOID + 1) / values.size
    gray = Image.fromarray(values)
    data = as_png(gray if packed == size else gray.resize(packed, Image.Resampling.NEAREST))
    entry = {
        "label": int(shares[:num_classes].argmax()),
        "shares": [[int(label), round(shares[label], 6)] for label in np.flatnonzero(shares[:num_classes])],
        "num_annotations": number,
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
        return values, num_classes, 1, []
    values[(values >= num_classes)] = VOID
    which = ", ".join(f"{value} ({100 * shares[value]:.3g} %)" for value in unknown)
    return values, num_classes, 1, [(path, f"values that are no class, taken for void: {which} of the pixels", True)]


def _drawn_mask(sample: Sample, size: tuple[int, int]) -> _Mask:
    """Draw the mask of outlines."""
    found, rows, outlines = annotations_of(sample, size)
    refused = [(name, reason, kept) for name, reason, kept in found["refused"]]
    mask, number = np.zeros(size[::-1], np.uint8), 0  # the class of what is no object
    for name, label, outline in zip(found["names"], rows[:, 4].astype(int).tolist(), outlines, strict=True):
        try:
            region, pixels = outline_of(outline, size)
        except (ValueError, TypeError, OverflowError) as error:
            refused.append((name, f"no outline: {str(error)[:_MAX_REASON]}", False))
            continue
        paint(mask[region], label, pixels)
        if pixels.any():
            number += 1
        else:
            refused.append((name, "no pixel of the image is in it", False))
    return mask, VOID, number, refused


LABELS = Labels(wanted=WANTED, example="shapes", list_samples=masks_source, pack=_pack)
