"""Tasks' ways to find labels beside the images, and to pack them: a module each, called as the task."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from components.common.data.read_alike import Rejected
from components.common.tasks import TaskName

if TYPE_CHECKING:
    from components.preprocess.sources.folders import Tree
    from components.preprocess.sources.samples import Options, Sample, Source, Storage


_MAX_OBJECTS = 10_000  # of an image: a batch is as large as its fullest image, in training as in memory


@dataclass(frozen=True, kw_only=True)
class PackedLabel:
    """The label of an image, and what of it could not be used."""

    data: bytes
    entry: dict[str, Any]  # of the listing: "label", of boxes "objects", of masks "shares"
    # names of annotations, what is wrong with them, and whether they are kept all the same
    refused: list[tuple[str, str, bool]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Labels:
    """A task's module."""

    wanted: str
    """The arrangement of images and labels, for messages."""
    example: str
    """The command of `enginery data` that writes such data."""
    list_samples: "Callable[[Tree, Storage, Options], Source]"
    """Lists the samples of a tree of files."""
    pack: "Callable[[Sample, tuple[int, int], tuple[int, int], Storage], PackedLabel]"
    """Takes a sample, the sides of its image (width, height; upright) and of the packed one, and where it lies, to the
    member that is packed beside the image, as the loader reads it."""


def labels_of(task: TaskName) -> Labels:
    """A task's labels; not of text."""
    found: Labels = import_module(f"components.preprocess.tasks.{task}").LABELS
    return found


def annotations_of(sample: "Sample", size: tuple[int, int]) -> tuple[dict[str, Any], np.ndarray, list[bytes]]:
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
        swapped = "; they are swapped, or do not heed its EXIF orientation" if (named[1], named[0]) == size else ""
        raise Rejected(
            f"annotated at another size: objects in {named[0]}x{named[1]} pixels, an image of {size[0]}x{size[1]}"
            f"{swapped}"
        )
    rows = np.frombuffer(rest, "<f8", 6 * number).reshape(-1, 6)
    ends = accumulate(found["outlines"], initial=rows.nbytes)
    return found, rows, [rest[start:end] for start, end in pairwise(ends)]
