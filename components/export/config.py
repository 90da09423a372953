"""Settings of export."""

from typing import Literal

from pydantic import Field

from components.common.settings import StepConfig
from components.common.transforms import IMAGENET_MEAN, IMAGENET_STD, Interpolation


class ExportConfig(StepConfig):
    """How the model is exported, calibrated and compiled."""

    calibration_method: Literal["max", "percentile", "entropy", "mse"] = Field(
        "max", description="How a tensor's INT8 range follows from its histogram."
    )
    num_calibration_images: int = Field(
        512, ge=1, description="Training images to calibrate with, or all where there are fewer."
    )
    calibration_percentile: float = Field(
        99.99, gt=50, le=100, description="Share of values inside the range, for calibration_method percentile, in %."
    )
    opt_batch: int = Field(32, ge=1, description="Batch that TensorRT tunes its kernels for, in images.")
    max_batch: int = Field(128, ge=1, description="Largest batch that an engine accepts, in images.")
    tensorrt: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Build engines: where a GPU and TensorRT are (auto), or fail without them (on), or never (off).",
    )
    optimization_level: int = Field(3, ge=0, le=5, description="TensorRT's effort: 0 builds fastest, 5 runs fastest.")
    workspace_bytes: int = Field(4 << 30, ge=1 << 20, description="Scratch memory a TensorRT layer may use, in bytes.")
    timing_cache: str = Field(
        "", description="Folder of TensorRT timing caches, which make later builds fast; empty for none."
    )
    seed: int = Field(0, ge=0, description="Seed of the choice of calibration images.")
    # A model of the user's own brings no TransformSpec; with a Checkpoint these five are not used.
    architecture: str = Field("", description="Own weights: the model's name in torchvision, or timm/NAME.")
    image_size: int = Field(224, ge=1, description="Own weights: side of the square that the model sees, in pixels.")
    resize_ratio: float = Field(
        256 / 224, ge=1, le=2, description="Own model: shorter side before the central crop, over the image size."
    )
    interpolation: Interpolation = Field("bilinear", description="Own model: resampling filter of the resize.")
    mean: tuple[float, float, float] = Field(IMAGENET_MEAN, description="Own model: mean per RGB channel, 0..1.")
    std: tuple[float, float, float] = Field(IMAGENET_STD, description="Own model: deviation per RGB channel, 0..1.")
    verify: bool = Field(
        False, description="Check every shard's digest before reading it; takes one pass over the data set's files."
    )
