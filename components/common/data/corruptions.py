# mypy: disable-error-code="call-overload, misc"
# DALI's stubs describe its operators outside a pipeline definition, where they return other things.
"""Degraded images as DALI operators, at a model's input size: what a bad camera, light or network does to them.

Source of kinds and strengths: Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions
and Perturbations" (2019), severities 1, 3 and 5 of ImageNet-C. Qualities of JPEG are our own; theirs are 25 to 7.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from nvidia.dali import Pipeline, fn, types
from nvidia.dali import math as math_ops

_SOURCE_SIDE = 224  # pixels of the images that the blur's widths are meant for
_BLACK = 1e-6  # of a level: even black has a hue's factor


@dataclass(frozen=True, kw_only=True)
class Corruption:
    """One way to degrade an image, and how much: the unit of `strength` is the kind's."""

    kind: str
    strength: float


def corrupted(images: Any, corruptions: Sequence[Corruption], *, side: int, seed: int, places: range) -> list[Any]:
    """Each image in every way.

    Args:
        images: [side, side, 3] uint8, RGB, in a pipeline definition.
        corruptions: ways to degrade them.
        side: of the images, in pixels.
        seed: of the noise. With an image's place it decides the noise: not the size of batches, threads or devices.
        places: of the pipeline's images in the split.

    Returns:
        A node for each way, [side, side, 3] uint8.
    """
    noise = _noise(side, seed, places) if any(one.kind == "noise" for one in corruptions) else None
    if noise is not None and images.device == "gpu":
        noise = noise.gpu()
    versions = (_KINDS[one.kind][0](images, one.strength, side, noise) for one in corruptions)
    return [fn.cast(version, dtype=types.UINT8) for version in versions]  # rounds and clips


def _noise(side: int, seed: int, places: range) -> Any:
    """[side, side, 3] float32 for each image of a batch, standard normal: DALI's own depends on the batch size."""
    pipe = Pipeline.current()
    batch_size, pool = pipe.max_batch_size, ThreadPoolExecutor(pipe.num_threads)
    num_padded = -(-len(places) // batch_size) * batch_size  # DALI fills the last batch of a pass

    def of_image(place: int) -> np.ndarray:
        return np.random.default_rng((seed, place)).standard_normal((side, side, 3), np.float32)

    def source(info: types.BatchInfo) -> list[np.ndarray]:
        start = info.iteration * batch_size % num_padded
        return list(pool.map(of_image, range(places.start + start, places.start + start + batch_size)))

    return fn.external_source(
        source=source, batch=True, batch_info=True, dtype=types.FLOAT, ndim=3, layout="HWC", name="noise"
    )


def _add_noise(images: Any, std: float, _: int, noise: Any) -> Any:
    """Gaussian, of this standard deviation in units of 0..1."""
    return images + 255 * std * noise


def _blur(images: Any, sigma: float, side: int, _: Any) -> Any:
    """Gaussian, of this width in pixels of an image of 224."""
    return fn.gaussian_blur(images, sigma=sigma * side / _SOURCE_SIDE)


def _jpeg(images: Any, quality: float, *_: Any) -> Any:
    """Encode and decode, by libjpeg also where images are on a GPU: DALI's operator there does neither."""
    decoded = fn.jpeg_compression_distortion(images.cpu(), quality=int(quality))
    return decoded.gpu() if images.device == "gpu" else decoded


def _brighten(images: Any, shift: float, *_: Any) -> Any:
    """Raise HSV's value by this, in units of 0..1: hue and saturation stay, so levels keep their ratios."""
    levels = math_ops.max(images, _BLACK)
    value = fn.reductions.max(levels, axes=[2], keep_dims=True)  # [H, W, 1]
    return levels * (math_ops.min(value + 255 * shift, 255.0) / value)


def _flatten_contrast(images: Any, factor: float, *_: Any) -> Any:
    """Multiply each channel's distance from its mean over the image."""
    mean = fn.reductions.mean(images, axes=[0, 1], keep_dims=True)  # [1, 1, 3]
    return (images - mean) * factor + mean


_KINDS: dict[str, tuple[Callable[[Any, float, int, Any], Any], tuple[float, ...]]] = {
    "noise": (_add_noise, (0.08, 0.18, 0.38)),
    "blur": (_blur, (1, 3, 6)),
    "jpeg": (_jpeg, (40, 20, 10)),
    "brightness": (_brighten, (0.1, 0.3, 0.5)),
    "contrast": (_flatten_contrast, (0.4, 0.2, 0.05)),
}
CORRUPTIONS = tuple(
    Corruption(kind=kind, strength=strength) for kind, (_, strengths) in _KINDS.items() for strength in strengths
)
