# mypy: disable-error-code="call-overload, misc"
# DALI's stubs describe its operators outside a pipeline definition, where they return other things.
"""Boxes in DALI pipelines, which go the way that their image goes."""

from typing import Any

from nvidia.dali import fn, types

from components.common.data.dali_pipelines import Way

_VALUES_PER_BOX = 6
_PADDING = -1.0  # also the class of rows that are no box


def moved(label: Any, way: Way) -> Any:
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
