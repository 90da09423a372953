"""Settings of export."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from components.common.contracts.records import CALIBRATION_METHODS, FP16_MANTISSA_BITS
from components.common.contracts.settings import StepConfig
from components.common.contracts.transforms import IMAGENET_MEAN, IMAGENET_STD, Interpolation
from components.common.contracts.verdict import Thresholds

WEIGHT_SUFFIXES = (".safetensors", ".pt", ".pth")
CACHE_VARIABLE = "ENGINERY_CACHE"  # what a local run sets to a folder of its state directory
TIMING_CACHES = "tensorrt"  # folder in it
# Of a bundle, by precision; int8_fp16 has the scales of int8 and is FP16 elsewhere.
ONNX_FILES = {"fp32": "fp32.onnx", "fp16": "fp16.onnx", "int8": "int8.onnx", "int8_fp16": "int8_fp16.onnx"}

if TYPE_CHECKING:
    CalibrationOption = str
else:
    CalibrationOption = Literal["auto", *CALIBRATION_METHODS]

_Mean = Annotated[float, Field(ge=0, le=1)]
_Std = Annotated[float, Field(gt=0, le=1)]
EngineOption = Literal["tf32", "version_compatible", "hardware_compatible", "refittable", "stripped"]


class ExportConfig(StepConfig):
    """Settings of the export, the calibration and the compilation."""

    calibration_method: CalibrationOption = Field(
        "auto",
        description="How a tensor's INT8 range follows from its histogram: "
        + ", ".join(f"{name} {method.text}" for name, method in CALIBRATION_METHODS.items())
        + "; auto measures all and takes the one that agrees most with FP32, of those within the gate's score limits "
        "where there are any.",
    )
    num_calibration_images: int = Field(
        512, ge=1, description="Training images to calibrate with, or all where there are fewer."
    )
    calibration_percentile: float = Field(
        99.99, gt=50, le=100, description="Share of values inside the range, for calibration_method percentile, in %."
    )
    num_selection_images: int = Field(
        10_000,
        ge=0,
        description="Other training images, on which calibrations and fallbacks are measured; 0 measures nothing. Of "
        "sentences 2,000 at most.",
    )
    fallback: bool = Field(
        True, description="Keep the fewest layers out of INT8 that bring the model within the gate's score limits."
    )
    num_ranking_images: int = Field(
        64, ge=0, description="Calibration images on which each layer's cost in INT8 is measured; 0 for no ranking."
    )
    search_seconds: float = Field(
        170.0,
        ge=0,
        description="Time in which candidates are measured, in seconds; the search ends where it is. Calibrations are "
        "always compared: on more than 2,000 images where FP32 takes less than a fiftieth of the time, on fewer where "
        "it takes more than a third.",
    )
    mixed_engines: int = Field(
        2,
        ge=0,
        description="INT8 engines, on CPUs files, with blocks in float that are built and measured beside the one with "
        "all in INT8, where the times of the blocks promise more speed; 0 for none.",
    )
    gate: Thresholds = Field(
        Thresholds(),
        description="The gate's thresholds; the score limits are the budget of INT8. In a pipeline they are those of "
        "gate.",
    )
    opt_batch: int = Field(
        32, ge=1, description="Batch that TensorRT tunes its kernels for, in images; by default no more than max_batch."
    )
    max_batch: int = Field(128, ge=1, description="Largest batch that an engine accepts, in images.")
    tensorrt: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Build engines: where a GPU and TensorRT are (auto), or fail without them (on), or never (off).",
    )
    engine_options: tuple[EngineOption, ...] = Field(
        (),
        description="What plans shall be besides: tf32 (FP32 layers may round to TF32), version_compatible (runs on "
        "later TensorRT of the same major version), hardware_compatible (runs on all GPUs from Ampere on), refittable "
        "(its weights can be replaced), stripped (has no weights: loading takes them from the ONNX file).",
    )
    fp16_mantissa_bits: int = Field(
        FP16_MANTISSA_BITS,
        ge=2,
        le=FP16_MANTISSA_BITS,
        description="Mantissa bits that the weights of the FP16 engine keep, of 10. With fewer, a GPU whose board is "
        "at its power limit can run faster; the score may change, which is measured.",
    )
    optimization_level: int = Field(3, ge=0, le=5, description="TensorRT's effort: 0 builds fastest, 5 runs fastest.")
    workspace_bytes: int = Field(4 << 30, ge=1 << 20, description="Scratch memory a TensorRT layer may use, in bytes.")
    cache: str = Field(
        "",
        description="Folder that keeps calibration results and TensorRT timing caches, which make later runs fast; "
        "empty for $ENGINERY_CACHE, or none.",
    )
    # A model of the user's own brings no TransformSpec; with a Checkpoint these five are not used.
    architecture: str = Field("", description="Own weights: the model's name in torchvision, or timm/NAME.")
    image_size: int = Field(224, ge=1, description="Own weights: side of the square that the model sees, in pixels.")
    resize_ratio: float = Field(
        256 / 224, ge=1, le=2, description="Own model: shorter side before the central crop, over the image size."
    )
    interpolation: Interpolation = Field("bilinear", description="Own model: resampling filter of the resize.")
    mean: tuple[_Mean, _Mean, _Mean] = Field(
        IMAGENET_MEAN, description="Own model: mean per RGB channel, 0..1 (of 0..255: / 255)."
    )
    std: tuple[_Std, _Std, _Std] = Field(
        IMAGENET_STD, description="Own model: std per RGB channel, 0..1 (of 0..255: / 255)."
    )
    verify: bool = Field(
        False, description="Check every shard's digest before reading it; takes one pass over the dataset's files."
    )

    @field_validator("max_batch")
    @classmethod
    def _kernels_are_tuned_for_a_batch_that_is_taken(cls, value: int, info: ValidationInfo) -> int:
        opt_batch = info.data.get("opt_batch", value)
        if opt_batch > value and opt_batch != cls.model_fields["opt_batch"].default:
            raise ValueError(
                f"got {value}, but kernels are to be tuned for batches of {opt_batch}: raise this, or set "
                f"export.opt_batch to {value} or less"
            )
        return value

    @field_validator("fp16_mantissa_bits")
    @classmethod
    def _weights_are_in_the_plan(cls, value: int, info: ValidationInfo) -> int:
        if value < FP16_MANTISSA_BITS and "stripped" in info.data.get("engine_options", ()):
            raise ValueError(
                f"got {value}, but export.engine_options has stripped, and such a plan takes its weights from the ONNX "
                f"file, which keeps all bits: take stripped out, or set this to {FP16_MANTISSA_BITS}"
            )
        return value
