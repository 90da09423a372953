"""Settings of train."""

from typing import Literal

from pydantic import Field

from components.common.settings import StepConfig
from components.common.transforms import Augmentation, Interpolation


class TrainConfig(StepConfig):
    """The recipe."""

    architecture: str = Field("resnet50", description="Model by name: torchvision's, or \"timm/\" and timm's.")
    image_size: int = Field(224, ge=32, le=1024, description="Side of the square that the model sees, in pixels.")
    resize_ratio: float = Field(
        256 / 224, ge=1, le=2, description="Shorter side before the central crop of evaluation, over image_size."
    )
    interpolation: Interpolation = Field("bilinear", description="Resampling filter of every resize.")
    normalization: Literal["imagenet", "dataset"] = Field(
        "imagenet",
        description="Mean and deviation that inputs are normalized with: ImageNet's, or the training split's.",
    )
    epochs: int = Field(90, ge=1, description="Passes over the training split.")
    global_batch_size: int = Field(256, ge=2, description="Images per optimizer step, over all processes.")
    learning_rate: float = Field(
        0.2, gt=0, description="Peak learning rate per 256 images of global_batch_size (linear scaling)."
    )
    warmup_fraction: float = Field(
        0.06, ge=0, lt=1, description="Share of the steps in which the learning rate rises linearly; a cosine follows."
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of SGD (Nesterov).")
    weight_decay: float = Field(5e-5, ge=0, description="L2 penalty; not applied to biases and BatchNorm.")
    label_smoothing: float = Field(0.1, ge=0, lt=1, description="Share of the target spread over all classes.")
    augmentation: Augmentation = Field(
        Augmentation(),
        description="Random crop and mirror: min_area, max_aspect_ratio, flip_probability. Colours: brightness, "
        "contrast, saturation, hue. Mixing of images: mixup_alpha, cutmix_alpha. The last six are 0 for none.",
    )
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="Arithmetic of forward and backward: auto is bf16 or fp16 on GPUs, fp32 on CPUs."
    )
    seed: int = Field(0, ge=0, description="Seed of weights, shuffling and augmentation.")
    verify: bool = Field(
        False, description="Check every shard's digest before reading it; takes one pass over the data set's files."
    )
