# mypy: disable-error-code="call-overload, misc"
# DALI's stubs describe its operators outside a pipeline definition, where they return other things.
"""Masks in DALI pipelines, which go the way that their image goes."""

from typing import Any

from nvidia.dali import fn, types

from components.common.data.dali_pipelines import Way


def moved(label: Any, way: Way) -> Any:
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
