# mypy: disable-error-code="call-overload, misc"
# DALI's stubs describe its operators outside a pipeline definition, where they return other things.
"""DALI pipelines: what happens to an encoded image, on the CPU or a GPU. Without torch, which servers lack.

Evaluation does what TransformSpec says and nothing else; training augments. Images from memory go through the very
operators of evaluation: what a validated model is served with.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from nvidia.dali import Pipeline, fn, pipeline_def, types
from nvidia.dali import math as math_ops

from components.common.contracts.environment import num_cores
from components.common.contracts.errors import UserError
from components.common.contracts.records import DatasetStatistics
from components.common.contracts.transforms import Augmentation, TransformSpec
from components.common.data.image_files import undecodable
from components.common.data.read_alike import check_encoded

_INTERPOLATION = {"bilinear": types.DALIInterpType.INTERP_LINEAR, "bicubic": types.DALIInterpType.INTERP_CUBIC}
_MAX_PREALLOCATION_BYTES = 4 << 30
_ONE_BATCH = {"prefetch_queue_depth": 1, "exec_async": False, "exec_pipelined": False}  # at a time, as it is fed
_MOST_PIXELS = 1 << 27  # decoded at once, of 3 bytes each
_LEAST_SHARE = 0.25  # of a box that a random crop leaves: of less the object is not to be seen


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
    # Older datasets don't say more than the longest shorter side.
    width, height = (side or statistics.max_side for side in (statistics.max_width, statistics.max_height))
    scale = min(1.0, math.sqrt(_MAX_PREALLOCATION_BYTES / (3 * num_pipelines * batch_size * width * height)))
    return {
        "device": "mixed",
        "hw_decoder_load": hw_decoder_load,
        "preallocate_width_hint": int(scale * width),
        "preallocate_height_hint": int(scale * height),
    }


def _normalize(
    images: Any,
    spec: TransformSpec,
    *,
    flip: Any,
    crop: int | None,
    fp16: bool = False,
    layout: str = "HWC",
    **position: Any,
) -> Any:
    std = [255.0 * value for value in spec.std]
    mean = [255.0 * value for value in spec.mean]
    crops = {"crop": (crop, crop)} if crop else {}
    # HWC: permuted to NCHW on arrival, this is torch's channels_last without a copy.
    dtype = types.FLOAT16 if fp16 else types.FLOAT
    return fn.crop_mirror_normalize(
        images, dtype=dtype, output_layout=layout, mean=mean, std=std, mirror=flip, **crops, **position
    )


@dataclass(frozen=True, kw_only=True)
class Way:
    """The way of an image, in a pipeline definition and on the host: cut, resize, cut, flip."""

    region: tuple[Any, Any] | None
    """Start and shape of what is cut of the packed image, [2] int64 each: y, x; None for all of it."""
    shape: Any
    """[2 or more] int64: height and width of that, in pixels of the packed image."""
    size: Any
    """[2] float32: height and width that it is resized to."""
    start: tuple[Any, Any] | None
    """y, x where the model's square begins in that; None where it is that."""
    side: int | None
    """Side of the square in pixels; None where it is `size`."""
    flip: Any
    """1 where the square is flipped then, else 0."""
    least_share: float
    """Least share of a box's area that must be left of it."""
    on_gpu: bool
    """Masks are delivered where images are."""


@pipeline_def(enable_conditionals=False)
def evaluation_pipeline(
    reader: dict[str, Any],
    spec: TransformSpec,
    decoder: dict[str, Any],
    corrupt: Callable[[Any], Sequence[Any]] | None = None,
    move_label: Callable[[Any, Way], Any] | None = None,
) -> tuple[Any, Any]:
    """Images [H, W, 3] float32 and their labels as `reader` (arguments of DALI's) finds them, such as uint8 digits.

    With `corrupt`, which makes several versions of an image of uint8 levels, these: [versions, H, W, 3]. `move_label`
    is for labels that lie on the image.
    """
    raw, label = fn.readers.webdataset(**reader)
    images = _evaluated(raw, spec, decoder, corrupt)
    if move_label is not None:
        shape = fn.peek_image_shape(raw)
        size, margins = _resized(shape, spec)
        way = Way(
            region=None,
            shape=shape,
            size=size,
            start=tuple(map(_central_start, margins)),
            side=spec.crop_size,
            flip=0,
            least_share=0.0,
            on_gpu=decoder["device"] == "mixed",
        )
        label = move_label(label, way)
    return images, label


@pipeline_def(enable_conditionals=False)
def _memory_pipeline(spec: TransformSpec) -> Any:
    """Images [crop_size, crop_size, 3] float32 of what is fed to the input "encoded", as evaluation delivers them."""
    raw = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
    return _evaluated(raw, spec, {"device": "cpu"})


@pipeline_def(enable_conditionals=False)
def _frame_pipeline(spec: TransformSpec, on_gpu: bool) -> Any:
    """The same of decoded images, [F, H, W, 3] uint8 RGB of one size each, that are fed to the input "frames"."""
    # On a CPU all is done once the pipeline has run, so that the frames need not be copied.
    how: dict[str, Any] = {"device": "gpu"} if on_gpu else {"device": "cpu", "no_copy": True}
    frames = fn.external_source(name="frames", dtype=types.UINT8, ndim=4, layout="FHWC", **how)
    return _transformed(frames, fn.external_source(name="shapes", dtype=types.INT64, ndim=1), spec, layout="FHWC")


def _evaluated(
    raw: Any, spec: TransformSpec, decoder: dict[str, Any], corrupt: Callable[[Any], Sequence[Any]] | None = None
) -> Any:
    """Decode and transform images as TransformSpec says, and no more. Returns HWC float32."""
    # Without fancy upsampling a GPU decodes the colours of most JPEG files otherwise than CPUs and torchvision do.
    images = fn.decoders.image(raw, output_type=types.RGB, jpeg_fancy_upsampling=True, **decoder)
    # [H, W, C] int64 on the host, EXIF orientation applied
    return _transformed(images, fn.peek_image_shape(raw), spec, corrupt)


def _transformed(
    images: Any,
    shape: Any,
    spec: TransformSpec,
    corrupt: Callable[[Any], Sequence[Any]] | None = None,
    layout: str = "HWC",
) -> Any:
    """Resize, crop and normalize decoded images, of `shape` [H, W, C] on the host. Returns `layout` float32."""
    size, margins = _resized(shape, spec)
    images = fn.resize(images, size=size, interp_type=_INTERPOLATION[spec.interpolation], antialias=True)
    # As DALI wants them: a share of the margin.
    y, x = (fn.cast(_central_start(margin), dtype=types.FLOAT) / math_ops.max(margin, 1) for margin in margins)
    if corrupt is None:
        return _normalize(images, spec, flip=0, crop=spec.crop_size, layout=layout, crop_pos_y=y, crop_pos_x=x)
    images = fn.crop(images, crop=[spec.crop_size] * 2, crop_pos_y=y, crop_pos_x=x)
    return fn.stack(*(_normalize(version, spec, flip=0, crop=None) for version in corrupt(images)))


def _resized(shape: Any, spec: TransformSpec) -> tuple[Any, tuple[Any, Any]]:
    """Height and width after resizing, [2] float32, and what is left of both beside the central square, int64."""
    # Sizes and positions are computed here because DALI rounds both in its own way: one pixel off the transforms
    # that published models were trained with (torchvision's Resize and CenterCrop) on most aspect ratios.
    height, width = shape[0], shape[1]
    shorter = math_ops.min(height, width)
    height, width = (side * spec.resize_size // shorter for side in (height, width))
    return fn.cast(fn.stack(height, width), dtype=types.FLOAT), (height - spec.crop_size, width - spec.crop_size)


def _central_start(margin: Any) -> Any:
    """Return the start of the central window in pixels. Halves go to the even pixel."""
    odd = margin % 2
    return odd * (2 * ((margin + 1) // 4)) + (1 - odd) * (margin // 2)


@pipeline_def(enable_conditionals=False)
def training_pipeline(
    reader: dict[str, Any],
    spec: TransformSpec,
    augmentation: Augmentation,
    decoder: dict[str, Any],
    size_of_batch: Callable[[int], int] | None,
    fp16: bool,
    on_gpu: bool,
    move_label: Callable[[Any, Way], Any] | None = None,
) -> tuple[Any, Any]:
    """Images [size, size, 3] float32, augmented, and their labels as `reader` finds them, such as uint8 digits.

    `size_of_batch` gives the size from the number of the batch since training began; None for always crop_size. With
    `fp16` images are float16. With `on_gpu` they are resized there and delivered, whatever decodes them. `move_label`
    is for labels that lie on the image.
    """
    raw, label = fn.readers.webdataset(**reader)
    ratio = augmentation.max_aspect_ratio
    crop = {"random_area": [augmentation.min_area, 1.0], "random_aspect_ratio": [1 / ratio, ratio]}
    region: Any = None
    if move_label is None:
        images = fn.decoders.image_random_crop(raw, output_type=types.RGB, **crop, **decoder)
    else:
        region = fn.random_crop_generator(fn.peek_image_shape(raw), **crop)
        pixels = {"axes": [0, 1], "normalized_anchor": False, "normalized_shape": False}
        images = fn.decoders.image_slice(raw, *region, output_type=types.RGB, **pixels, **decoder)
    if on_gpu and decoder["device"] == "cpu":
        images = images.gpu()
    size: Any = [spec.crop_size] * 2 if size_of_batch is None else _sizes(size_of_batch)
    images = fn.resize(images, size=size, interp_type=_INTERPOLATION[spec.interpolation], antialias=True)
    if jitter := _colour_jitter(augmentation):
        images = fn.color_twist(images, **jitter)
    flip = fn.random.coin_flip(probability=augmentation.flip_probability)
    images = _normalize(images, spec, flip=flip, crop=None, fp16=fp16)
    if move_label is not None:
        way = Way(
            region=region,
            shape=region[1],
            size=types.Constant(np.array(size, np.float32)) if size_of_batch is None else size,
            start=None,
            side=None,
            flip=flip,
            least_share=_LEAST_SHARE,
            on_gpu=on_gpu,
        )
        label = move_label(label, way)
    return images, label


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


def load_image(encoded: bytes, spec: TransformSpec) -> np.ndarray:
    """One image file as evaluation delivers it: by the same operators, decoded on the CPU.

    Args:
        encoded: the file's content, in a format of IMAGE_EXTENSIONS.
        spec: resize, crop and normalization.

    Returns:
        [1, 3, crop_size, crop_size] float32, normalized, C-contiguous.

    Raises:
        RuntimeError: DALI can't decode it.
    """
    return ImageBatches(spec, 1).decode([encoded])


@dataclass(frozen=True, kw_only=True)
class LoadedImage:
    """An image as a model gets it."""

    pixels: np.ndarray  # [3, crop_size, crop_size] float32, normalized
    num_sent: int  # pixels of the encoded image


class ImageBatches:
    """Decodes on the CPU. Not for several threads at once."""

    def __init__(self, spec: TransformSpec, batch_size: int) -> None:
        """`batch_size` is the most images that one call takes."""
        self._spec = spec
        self._batch_size = batch_size
        self._pipe: Any = None

    def load(self, encoded: Sequence[bytes], names: Sequence[str]) -> np.ndarray:
        """Images as a model gets them.

        Args:
            encoded: contents of image files, 1 to `batch_size` of them.
            names: what to call each in an error.

        Returns:
            [B, 3, crop_size, crop_size] float32, normalized, C-contiguous.

        Raises:
            UserError: one is not an image that preprocess takes; the message names it.
        """
        images = []
        for image in self.load_each(encoded, names):
            if isinstance(image, UserError):
                raise image
            images.append(image.pixels)
        return np.stack(images)

    def load_each(
        self, encoded: Sequence[bytes], names: Sequence[str], *, max_bytes: int | None = None
    ) -> list["LoadedImage | UserError"]:
        """The same for images of several callers: for each one what was loaded, or what is wrong.

        Takes any number of them, and decodes no more at once than take some hundred megabytes.

        Args:
            encoded: contents of image files.
            names: what to call each in an error.
            max_bytes: longest content; None for any.
        """
        found: dict[int, LoadedImage | UserError] = {}
        chunk: dict[int, tuple[bytes, int]] = {}  # images that are decoded together, and how many pixels each has

        def decode() -> None:
            images = self._load_chunk([data for data, _ in chunk.values()], [names[index] for index in chunk])
            for (index, (_, size)), image in zip(chunk.items(), images, strict=True):
                found[index] = image if isinstance(image, UserError) else LoadedImage(pixels=image, num_sent=size)
            chunk.clear()

        for index, (data, name) in enumerate(zip(encoded, names, strict=True)):
            try:
                if max_bytes is not None and len(data) > max_bytes:
                    raise UserError(
                        f"{name} has {len(data):,} bytes, and {max_bytes:,} are taken at most; make it smaller",
                        code="image-too-large",
                    )
                alike, size = check_encoded(data, name)
            except UserError as error:
                found[index] = error
                continue
            if chunk and (
                len(chunk) == self._batch_size or sum(each for _, each in chunk.values()) + size > _MOST_PIXELS
            ):
                decode()
            chunk[index] = alike, size
        if chunk:
            decode()
        return [found[index] for index in range(len(encoded))]

    def _load_chunk(self, encoded: Sequence[bytes], names: Sequence[str]) -> list[np.ndarray | UserError]:
        """Images that were checked. Where DALI refuses one all the same, each is decoded on its own."""
        try:
            return list(self.decode(encoded))
        except RuntimeError as error:
            self._pipe = None  # DALI's pipeline is of no use after an error
            if len(encoded) == 1:
                return [undecodable(error, names[0])]
        return [self._load_chunk([data], [name])[0] for data, name in zip(encoded, names, strict=True)]

    def decode(self, encoded: Sequence[bytes]) -> np.ndarray:
        """As load, of images that were checked.

        Raises:
            RuntimeError: DALI can't decode one.
        """
        if self._pipe is None:
            self._pipe = _memory_pipeline(
                self._spec,
                batch_size=self._batch_size,
                num_threads=num_cores(),
                device_id=None,
                **_ONE_BATCH,
            )
            self._pipe.build()
        self._pipe.feed_input("encoded", [np.frombuffer(data, np.uint8) for data in encoded])
        (images,) = self._pipe.run()
        return np.ascontiguousarray(images.as_array().transpose(0, 3, 1, 2))


class FrameBatches:
    """Transforms decoded images, such as frames of videos, by the operators of evaluation. Not for several threads."""

    def __init__(self, spec: TransformSpec, batch_size: int, device_id: int | None = None) -> None:
        """`batch_size` is the most images that one call takes; `device_id` is a GPU, or None for the CPU."""
        self._on_gpu = device_id is not None
        self._pipe = _frame_pipeline(
            spec,
            self._on_gpu,
            batch_size=batch_size,
            num_threads=1 if self._on_gpu else num_cores(),
            device_id=device_id,
            **_ONE_BATCH,
        )
        self._pipe.build()

    def transform(self, frames: Sequence[Any]) -> Any:
        """[B, 3, crop_size, crop_size] float32, normalized: an array, on a GPU a tensor there.

        Args:
            frames: [H, W, 3] uint8 RGB each, of any sizes; arrays, on a GPU tensors there.
        """
        if not self._on_gpu:
            (images,) = self._run([frame[None] for frame in frames])
            return np.ascontiguousarray(images.as_array()[:, 0].transpose(0, 3, 1, 2))
        import torch
        from torch.utils.dlpack import from_dlpack

        alike: dict[Any, list[int]] = {}  # what is of one size goes together: DALI takes its time for each that is fed
        for index, frame in enumerate(frames):
            alike.setdefault(frame.shape, []).append(index)
        (images,) = self._run([torch.stack([frames[index] for index in some]) for some in alike.values()])
        found: list[Any] = [None] * len(frames)
        for number, some in enumerate(alike.values()):
            for index, image in zip(some, from_dlpack(images[number]), strict=True):
                found[index] = image
        # Copies: the pipeline's own memory is written again by the next batch.
        return torch.stack(found).permute(0, 3, 1, 2).contiguous()

    def _run(self, frames: Sequence[Any]) -> Any:
        self._pipe.feed_input("frames", list(frames))
        self._pipe.feed_input("shapes", [np.array(each.shape[1:], np.int64) for each in frames])
        return self._pipe.run()
