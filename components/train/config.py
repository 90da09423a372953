"""Settings of train."""

from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from components.common.contracts.settings import StepConfig
from components.common.contracts.transforms import Augmentation, Interpolation

# These don't change what is learnt: a run resumes where it stopped when these differ, and starts again when others do.
NON_FINGERPRINTED_SETTINGS = (
    "pretrained_sha256",
    "num_processes",
    "max_restarts",
    "collective_timeout_s",
    "read_timeout_s",
    "keep_last",
    "validation_epochs",
    "checkpoint_epochs",
    "checkpoint_minutes",
    "publish",
    "profile_steps",
    "verify",
)


class TrainConfig(StepConfig):
    """The recipe, and how it is carried out."""

    architecture: str = Field(
        "resnet50",
        description="Model by name: torchvision's, or \"timm/\" and timm's. Of other tasks TASK/NAME, and on a "
        "backbone of timm TASK/NAME/timm/NAME.",
    )
    image_size: int = Field(224, ge=32, le=1024, description="Side of the square that the model sees, in pixels.")
    image_sizes: tuple[Annotated[int, Field(ge=16, le=1024)], ...] = Field(
        (),
        description="Side of training images in pixels, epoch by epoch, the last one for all that follow; empty for "
        "always image_size. Validation and the model in use see image_size.",
        examples=["128", "160", "192"],
    )
    resize_ratio: float = Field(
        256 / 224, ge=1, le=2, description="Shorter side before the central crop of evaluation, over image_size."
    )
    interpolation: Interpolation = Field("bilinear", description="Resampling filter of every resize.")
    normalization: Literal["auto", "imagenet", "dataset"] = Field(
        "auto",
        description="Mean and std that inputs are normalized with: ImageNet's, the training split's, or (auto) those "
        "of the Checkpoint or published weights in pretrained, ImageNet's for others.",
    )
    pretrained: str = Field(
        "",
        description="Weights to begin with: a file (.safetensors, .pt, .pth) or its URI, a Checkpoint directory of "
        'this architecture, "default" or the name of published ones, which are downloaded; empty for fresh ones. '
        "A head for another number of classes is left out.",
    )
    pretrained_sha256: str = Field(
        "",
        pattern="^([0-9a-f]{8,64})?$",
        description="SHA-256 that the file of the weights must have, or its first 8 digits or more; empty for any. "
        "Published weights are checked against what is published of theirs, too.",
    )
    freeze_backbone: bool = Field(
        False, description="Train the last layer alone: all others keep their weights and BatchNorm statistics."
    )
    epochs: int = Field(90, ge=1, description="Passes over the training split.")
    target_score_pct: float = Field(
        0,
        ge=0,
        le=100,
        description="Score on validation images (top-1, mIoU, mAP) in per cent that ends the training once an epoch "
        "reaches it; 0 for none. The learning rate falls as for all epochs.",
    )
    global_batch_size: int = Field(256, ge=2, description="Images per optimizer step, over all processes.")
    per_gpu_batch_size: int = Field(
        0,
        ge=0,
        description="Images per process and forward pass; 0 for global_batch_size over the number of processes. With "
        "fewer, gradients are accumulated until global_batch_size is reached.",
    )
    optimizer: Literal["sgd", "adamw", "lamb"] = Field(
        "sgd", description="sgd with momentum; adamw; lamb (large batches, by timm)."
    )
    learning_rate: float = Field(
        0.2, gt=0, description="Peak learning rate per 256 images of global_batch_size (linear scaling)."
    )
    schedule: Literal["cosine", "linear"] = Field(
        "cosine", description="How the learning rate falls from its peak to 0: half a cosine, or a straight line."
    )
    warmup_fraction: float = Field(
        0.06, ge=0, lt=1, description="Share of the steps in which the learning rate rises linearly to its peak."
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum of SGD; the first beta of AdamW and LAMB.")
    nesterov: bool = Field(True, description="Nesterov's form of SGD's momentum.")
    weight_decay: float = Field(
        5e-5, ge=0, description="L2 penalty of sgd, decay of adamw and lamb; not applied to biases and BatchNorm."
    )
    label_smoothing: float = Field(
        0.1, ge=0, lt=1, description="Share of the target spread over all classes; detection has none."
    )
    ema_decay: float = Field(
        0,
        ge=0,
        lt=1,
        description="Weight of the past in a moving average of the weights, per optimizer step, such as 0.9999; the "
        "average is then what is validated and published. 0 for none.",
    )
    augmentation: Augmentation = Field(
        Augmentation(),
        description="Random crop and flip: min_area, max_aspect_ratio, flip_probability. Colours: brightness, "
        "contrast, saturation, hue. Mixing of images: mixup_alpha, cutmix_alpha. The last six are 0 for none.",
    )
    publish: Literal["last", "best"] = Field(
        "last",
        description="Which epoch's weights are the result: the last's, or those with the highest score on validation "
        "images, which flatters that number.",
    )
    precision: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description="Arithmetic of forward and backward: auto is bf16 or fp16 on GPUs, fp32 on CPUs."
    )
    tf32: bool = Field(True, description="On GPUs, let FP32 products and convolutions round their inputs to TF32.")
    compile: Literal[
        "auto", "off", "default", "tuned", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"
    ] = Field(
        "auto",
        description="Mode of torch.compile, or off. tuned tries block sizes of its kernels one after the other, which "
        "takes minutes once. reduce-overhead and max-autotune use CUDA graphs. auto is off on CPUs and for sentences, "
        "else default.",
    )
    deterministic: bool = Field(
        False, description="The same bits from the same seed on the same machine; slower on GPUs."
    )
    num_processes: int = Field(
        0,
        ge=0,
        description="Training processes on this machine; 0 for one per GPU, one on a CPU. Not read where torchrun or "
        "a TrainJob has started the processes.",
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="Times that the training processes of this machine start again after one of them was killed; they "
        "resume from the newest checkpoint. Where torchrun has started them, its --max-restarts counts.",
    )
    static_graph: bool = Field(
        False,
        description="Tell DistributedDataParallel that every step uses the same parameters in the same order; not with "
        "accumulated batches.",
    )
    split_graph: bool = Field(
        False,
        description="With torch.compile on several GPUs, compile a graph per bucket of gradients, so that all-reduces "
        "begin during the backward pass. Over NVLink one graph is faster; try it over slow links.",
    )
    bucket_mb: float = Field(
        25,
        ge=1,
        le=1e6,
        description="Gradients per all-reduce of DistributedDataParallel, in MB; smaller ones start earlier.",
    )
    collective_timeout_s: float = Field(
        600, gt=0, description="Seconds that a process waits for the others before the run is given up."
    )
    read_timeout_s: float = Field(
        300,
        gt=0,
        validation_alias=AliasChoices("read_timeout_s", "stuck_after_s"),
        description="Seconds without a batch after which reading the dataset counts as stuck. Up to version 0.1 its "
        "name was stuck_after_s, which is still read.",
    )
    decode_on: Literal["gpu", "cpu"] = Field(
        "gpu",
        description="What decodes training images where a GPU trains. CPU cores leave it to the training, and must "
        "keep up: see the share of waiting, and preprocess.max_short_side.",
    )
    validation_epochs: int = Field(
        1, ge=1, description="Epochs between two validations; the last epoch is always validated."
    )
    checkpoint_epochs: int = Field(
        1,
        ge=1,
        description="Epochs between two checkpoints that a stopped run resumes from. An epoch that is the best so far "
        "has one, too.",
    )
    checkpoint_minutes: float = Field(
        0, ge=0, description="Minutes between two checkpoints inside an epoch; 0 for none but at SIGTERM."
    )
    keep_last: int = Field(
        2, ge=1, description="Checkpoints kept while the run is unfinished, beside that of the best epoch."
    )
    profile_steps: int = Field(
        0,
        ge=0,
        le=100,
        description="Steps that torch.profiler records early in the training, into trace.json.gz of the Checkpoint; 0 "
        "for none.",
    )
    seed: int = Field(0, ge=0, le=2**53, description="Seed of weights, shuffling and augmentation.")
    verify: bool = Field(
        False, description="Check every shard's digest before reading it; takes one pass over the dataset's files."
    )
