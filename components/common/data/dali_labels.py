# mypy: disable-error-code="call-overload, misc"
# DALI's stubs describe its operators outside a pipeline definition, where they return other things.
"""Labels in DALI pipelines that lie on the image, masks and boxes: they go the way that their image goes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nvidia.dali import fn, types

from components.common.tasks import TaskName

_VALUES_PER_BOX = 6
_PADDING = -1.0  # also the class of rows that are no box


@dataclass(frozen=True, kw_only=True)
class Way:
    """What becomes of an image, in a pipeline definition and on the host: cut, resize, cut, flip."""

    region: tuple[Any, Any] | None
    """Start and shape of what is cut of the packed image, [2] int64 each: y, x; None for all of it."""
    shape: Any
    """[2 or more] int64: height and width of that, in pixels of the packed image."""
    size: Any
    """[2] float32: height and width that it is resized to."""
    start: tuple[Any, Any] | None
    """y, x where the model's square begins in that; None where it is that."""
    side: int | None
    """Of the square in pixels; None where it is `size`."""
    flip: Any
    """1 where the square is flipped then, else 0."""
    least_share: float
    """Of a box's area that must be left of it."""
    on_gpu: bool
    """Masks are delivered where images are."""


def _moved_mask(label: Any, way: Way) -> Any:
    """[side, side, 1] uint8: each value is that of the nearest pixel."""
    mask = fn.decoders.image(label, output_type=types.GRAY)
    if way.region is not None:
        start, shape = way.region
        mask = fn.slice(mask, start=start, shape=shape, axes=[0, 1])
    mask = fn.resize(mask, size=way.size, interp_type=types.DALIInterpType.INTERP_NN)
    if way.start is not None:
        start = fn.cast(fn.stack(*way.start), dtype=types.INT32)
        mask = fn.slice(mask, start=start, shape=[way.side, way.side], axes=[0, 1])
    mask = fn.flip(mask, horizontal=way.flip)
    return mask.gpu() if way.on_gpu else mask


def _moved_boxes(label: Any, way: Way) -> Any:
    """[1 + n, 6] float32: how boxes move, then the boxes as they are packed, then padding of -1 up to the batch's most.

    The first row is scale and shift of x, the same of y, the side of the square, and the least share of a box's area
    that must be left: a point x of the packed image lies at scale * x + shift of the square.
    """
    height, width = (fn.cast(way.shape[axis], dtype=types.FLOAT) for axis in (0, 1))
    scale_y, scale_x = way.size[0] / height, way.size[1] / width
    shift_y, shift_x = 0 * scale_y, 0 * scale_x
    if way.region is not None:
        top, left = (fn.cast(way.region[0][axis], dtype=types.FLOAT) for axis in (0, 1))
        shift_y, shift_x = -top * scale_y, -left * scale_x
    if way.start is not None:
        shift_y, shift_x = shift_y - way.start[0], shift_x - way.start[1]
    side = way.size[0] if way.side is None else 0 * scale_x + float(way.side)
    sign = 1 - 2 * way.flip
    scale_x, shift_x = sign * scale_x, sign * shift_x + way.flip * side
    row = fn.stack(scale_x, shift_x, scale_y, shift_y, side, 0 * side + way.least_share)
    boxes = fn.reinterpret(label, dtype=types.FLOAT, shape=[-1, _VALUES_PER_BOX])
    return fn.pad(fn.cat(fn.expand_dims(row, axes=0), boxes, axis=0), fill_value=_PADDING)


MOVED: dict[TaskName, Callable[[Any, Way], Any]] = {"detection": _moved_boxes, "segmentation": _moved_mask}
"""By task whose labels lie on the image: from the packed label and the image's way to what Task.labels takes."""
