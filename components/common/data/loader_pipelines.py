# mypy: disable-error-code="call-overload, misc"
# DALI's stubs describe its operators outside a pipeline definition, where they return other things.
"""DALI pipelines: what happens to an encoded image, on the CPU or a GPU.

Evaluation does what TransformSpec says and nothing else; training augments.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from nvidia.dali import Pipeline, fn, pipeline_def, types
from nvidia.dali import math as math_ops

from components.common.contracts.records import DatasetStatistics
from components.common.contracts.transforms import Augmentation, TransformSpec

_INTERPOLATION = {"bilinear": types.DALIInterpType.INTERP_LINEAR, "bicubic": types.DALIInterpType.INTERP_CUBIC}
_MAX_PREALLOCATION_BYTES = 4 << 30


def decoder_options(
    statistics: DatasetStatistics,
    batch_size: int,
    num_pipelines: int = 1,
    *,
    device_id: int | None,
    hw_decoder_load: float,
) -> dict[str, Any]:
    """Arguments of DALI's decoder on this device; those of the hardware JPEG decoder only on a GPU.

    Memory is reserved for a batch of the widest and highest images, up to 4 GiB by all pipelines of a process
    together, so that none is allocated while training runs. Larger images still decode, and cost an allocation each
    time one is larger than all before.
    """
    if device_id is None:
        return {"device": "cpu"}
    # Older data sets don't say more than the longest shorter side.
    width, height = (side or statistics.max_side for side in (statistics.max_width, statistics.max_height))
    scale = min(1.0, math.sqrt(_MAX_PREALLOCATION_BYTES / (3 * num_pipelines * batch_size * width * height)))
    return {
        "device": "mixed",
        "hw_decoder_load": hw_decoder_load,
        "preallocate_width_hint": int(scale * width),
        "preallocate_height_hint": int(scale * height),
    }


def _normalize(
    images: Any, spec: TransformSpec, *, mirror: Any, crop: int | None, half: bool = False, **position: Any
) -> Any:
    scale = [255.0 * value for value in spec.std]
    mean = [255.0 * value for value in spec.mean]
    crops = {"crop": (crop, crop)} if crop else {}
    # HWC: permuted to NCHW on arrival, this is torch's channels_last without a copy.
    dtype = types.FLOAT16 if half else types.FLOAT
    return fn.crop_mirror_normalize(
        images, dtype=dtype, output_layout="HWC", mean=mean, std=scale, mirror=mirror, **crops, **position
    )


@pipeline_def(enable_conditionals=False)
def evaluation_pipeline(reader: dict[str, Any], spec: TransformSpec, decoder: dict[str, Any]) -> tuple[Any, Any]:
    """Images [H, W, 3] float32 and their labels as `reader` (arguments of DALI's) finds them: uint8 digits."""
    raw, label = fn.readers.webdataset(**reader)
    return _evaluated(raw, spec, decoder), label


@pipeline_def(enable_conditionals=False)
def file_pipeline(encoded: bytes, spec: TransformSpec) -> Any:
    """One image [crop_size, crop_size, 3] float32 from a file's content, as evaluation delivers it."""
    raw = fn.external_source(source=[np.frombuffer(encoded, np.uint8)], batch=False, cycle=True, dtype=types.UINT8)
    return _evaluated(raw, spec, {"device": "cpu"})


@pipeline_def(enable_conditionals=False)
def memory_pipeline(spec: TransformSpec) -> Any:
    """Images [crop_size, crop_size, 3] float32 of what is fed to the input "encoded", as evaluation delivers them."""
    raw = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
    return _evaluated(raw, spec, {"device": "cpu"})


def _evaluated(raw: Any, spec: TransformSpec, decoder: dict[str, Any]) -> Any:
    """What TransformSpec says of encoded images, and nothing else. Returns HWC float32."""
    # Without fancy upsampling a GPU decodes the colours of most JPEG files otherwise than CPUs and torchvision do.
    images = fn.decoders.image(raw, output_type=types.RGB, jpeg_fancy_upsampling=True, **decoder)
    # Sizes and positions are computed here because DALI rounds both in its own way: one pixel off the transforms
    # that published models were trained with (torchvision's Resize and CenterCrop) on most aspect ratios.
    shape = fn.peek_image_shape(raw)  # [H, W, C] int64 on the host, EXIF orientation applied
    height, width = shape[0], shape[1]
    shorter = math_ops.min(height, width)
    height, width = (side * spec.resize_size // shorter for side in (height, width))
    size = fn.cast(fn.stack(height, width), dtype=types.FLOAT)
    images = fn.resize(images, size=size, interp_type=_INTERPOLATION[spec.interpolation], antialias=True)
    y, x = (_center(side - spec.crop_size) for side in (height, width))
    return _normalize(images, spec, mirror=0, crop=spec.crop_size, crop_pos_y=y, crop_pos_x=x)


def _center(margin: Any) -> Any:
    """Where the central window starts, as DALI wants it: a share of the margin. Halves go to the even pixel."""
    odd = margin % 2
    start = odd * (2 * ((margin + 1) // 4)) + (1 - odd) * (margin // 2)
    return fn.cast(start, dtype=types.FLOAT) / math_ops.max(margin, 1)


@pipeline_def(enable_conditionals=False)
def training_pipeline(
    reader: dict[str, Any],
    spec: TransformSpec,
    augmentation: Augmentation,
    decoder: dict[str, Any],
    size_of_batch: Callable[[int], int] | None,
    half: bool,
) -> tuple[Any, Any]:
    """Images [size, size, 3] float32, augmented, and their labels as `reader` finds them: uint8 digits.

    `size_of_batch` gives the size from the number of the batch since training began; None for always crop_size. With
    `half` images are float16.
    """
    raw, label = fn.readers.webdataset(**reader)
    ratio = augmentation.max_aspect_ratio
    images = fn.decoders.image_random_crop(
        raw,
        output_type=types.RGB,
        random_area=[augmentation.min_area, 1.0],
        random_aspect_ratio=[1 / ratio, ratio],
        **decoder,
    )
    size: Any = [spec.crop_size] * 2 if size_of_batch is None else _sizes(size_of_batch)
    images = fn.resize(images, size=size, interp_type=_INTERPOLATION[spec.interpolation], antialias=True)
    if jitter := _colour_jitter(augmentation):
        images = fn.color_twist(images, **jitter)
    mirror = fn.random.coin_flip(probability=augmentation.flip_probability)
    return _normalize(images, spec, mirror=mirror, crop=None, half=half), label


def _sizes(size_of_batch: Callable[[int], int]) -> Any:
    """[2] float32 for each image of a batch: height and width."""
    batch_size = Pipeline.current().max_batch_size

    def source(info: types.BatchInfo) -> np.ndarray:
        return np.full((batch_size, 2), size_of_batch(info.iteration), np.float32)

    return fn.external_source(source=source, batch=True, batch_info=True, dtype=types.FLOAT, ndim=1)


def _colour_jitter(augmentation: Augmentation) -> dict[str, Any]:
    """Arguments of color_twist: a random draw per image for each kind that is on."""
    jitter = {}
    for kind in ("brightness", "contrast", "saturation"):
        if amount := getattr(augmentation, kind):
            jitter[kind] = fn.random.uniform(range=[1 - amount, 1 + amount])
    if augmentation.hue:
        jitter["hue"] = fn.random.uniform(range=[-360 * augmentation.hue, 360 * augmentation.hue])  # degrees
    return jitter
