"""TransformSpec and ShapeSpec: the single source of resize, crop, mean, std and input shape for every step."""

from typing import Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from components.common.contracts.records import Record
from components.common.contracts.settings import refuse_bools


class ShapeSpec(Record):
    """Input and output names, image size and batch range of one exported classifier."""

    input_name: str = Field("images", description="Name of the ONNX input, [batch, channels, height, width] float32.")
    output_name: str = Field("logits", description="Name of the ONNX output, [batch, classes] float32.")
    channels: int = Field(3, ge=1, description="Colour channels of the input.")
    height: int = Field(ge=1, description="Input height in pixels.")
    width: int = Field(ge=1, description="Input width in pixels.")
    min_batch: int = Field(1, ge=1, description="Smallest batch an engine accepts, in images.")
    opt_batch: int = Field(32, ge=1, description="Batch that TensorRT tunes its kernels for, in images.")
    max_batch: int = Field(128, ge=1, description="Largest batch an engine accepts, in images.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.min_batch <= self.opt_batch <= self.max_batch:
            raise ValueError(
                f"batches must satisfy min_batch <= opt_batch <= max_batch, "
                f"got {self.min_batch}, {self.opt_batch}, {self.max_batch}"
            )
        return self

    def input_shape(self, batch: int) -> tuple[int, int, int, int]:
        """Shape of a batch of `batch` images, NCHW."""
        return (batch, self.channels, self.height, self.width)


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

Interpolation = Literal["bilinear", "bicubic"]


class TransformSpec(Record):
    """The way from an image file to a model's input.

    Decode to RGB with EXIF orientation applied, scale the shorter side to `resize_size` keeping the aspect ratio,
    cut the central square of `crop_size`, divide by 255, subtract `mean`, divide by `std`.
    """

    resize_size: int = Field(ge=1, description="Length of the shorter side after resizing, in pixels.")
    crop_size: int = Field(ge=1, description="Side of the central square that the model sees, in pixels.")
    interpolation: Interpolation = Field("bilinear", description="Resampling filter; antialiased when shrinking.")
    mean: tuple[float, float, float] = Field(IMAGENET_MEAN, description="Mean per RGB channel, in units of 0..1.")
    std: tuple[float, float, float] = Field(IMAGENET_STD, description="Standard deviation, in the same units.")

    @model_validator(mode="after")
    def _consistent(self) -> "TransformSpec":
        if self.crop_size > self.resize_size:
            raise ValueError(f"crop_size {self.crop_size} is larger than resize_size {self.resize_size}")
        if min(self.std) <= 0:
            raise ValueError(f"std must be positive, got {self.std}")
        return self


class Augmentation(Record):
    """Random changes to training images; evaluation has none."""

    model_config = ConfigDict(allow_inf_nan=False)
    _bools = field_validator("*", mode="before")(refuse_bools)

    min_area: float = Field(0.08, gt=0, le=1, description="Smallest share of the image that a random crop keeps.")
    max_aspect_ratio: float = Field(4 / 3, ge=1, description="Widest aspect ratio of a crop; the narrowest is 1/x.")
    flip_probability: float = Field(0.5, ge=0, le=1, description="Chance of a horizontal mirror image.")
    brightness: float = Field(0, ge=0, le=1, description="Levels times a factor between 1 - x and 1 + x; 0 is off.")
    contrast: float = Field(
        0, ge=0, le=1, description="Distance from middle gray times a factor between 1 - x and 1 + x; 0 is off."
    )
    saturation: float = Field(
        0, ge=0, le=1, description="Distance from gray times a factor between 1 - x and 1 + x; 0 is off."
    )
    hue: float = Field(0, ge=0, le=0.5, description="Hue turned by up to this share of the colour circle; 0 is off.")
    mixup_alpha: float = Field(
        0, ge=0, description="Images are blended in pairs, by a Beta(alpha, alpha) share; 0 is off. 0.2 is usual."
    )
    cutmix_alpha: float = Field(
        0,
        ge=0,
        description="A box of each image comes from another, its area a Beta(alpha, alpha) share; 0 is off. "
        "1 is usual. With mixup_alpha too, each batch gets one of both.",
    )


def transform_for(image_size: int, *, resize_ratio: float, interpolation: Interpolation = "bilinear") -> TransformSpec:
    """The usual evaluation transform for models trained at `image_size` pixels: resize to size * ratio, crop."""
    return TransformSpec(
        resize_size=max(image_size, round(image_size * resize_ratio)), crop_size=image_size, interpolation=interpolation
    )


class TextSpec(Record):
    """The way from sentences to tokens, the same from training to serving."""

    source_language: str = Field(pattern="^[A-Za-z0-9-]{1,35}$", description='BCP 47, such as "en".')
    target_language: str = Field(pattern="^[A-Za-z0-9-]{1,35}$")
    vocabulary: str = Field("vocabulary.model", description="The artifact's file of SentencePiece.")
    num_tokens: int = Field(ge=4, description="Size of the vocabulary, for both languages.")
    max_tokens: int = Field(ge=2, description="Longest sentence in tokens, with its end; longer ones are refused.")

    @property
    def languages(self) -> str:
        """Return text such as "en to de"."""
        return f"{self.source_language} to {self.target_language}"
