"""train: Dataset -> Checkpoint."""

import math
from pathlib import Path

import torch
from safetensors.torch import save_file

from components.common.artifacts import (
    ALL_FILES,
    Artifact,
    CheckpointManifest,
    DatasetManifest,
    load,
    prepare_directory,
    seal,
)
from components.common.environment import num_cores
from components.common.errors import UserError
from components.common.loader import Loader
from components.common.models import build_model
from components.common.records import EpochRecord
from components.common.steplog import StepLog
from components.common.transforms import TransformSpec, transform_for
from components.train.config import TrainConfig
from components.train.trainer import EpochResult, Trainer


def run(config: TrainConfig, log: StepLog, *, dataset: Path, output: Path) -> str:
    """Train and save the weights of the last epoch. See the package's docstring."""
    data = load(dataset, DatasetManifest, verify=ALL_FILES if config.verify else ())
    prepare_directory(output)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(config.seed)
    torch.set_num_threads(num_cores())
    torch.backends.cudnn.benchmark = True  # shapes never change
    model = build_model(config.architecture, len(data.manifest.classes))
    spec = _transform(config, data)
    train, val = _loaders(config, data, spec, device)
    trainer = Trainer(model, config, train, val, device, log)
    log.params({"device": str(device), "dtype": str(trainer.dtype), "num_train_images": train.num_images})
    splits = data.manifest.splits
    log.dataset("train", splits["train"].digest, splits["train"].num_images, "training")
    log.dataset("val", splits["val"].digest, splits["val"].num_images, "validation")
    result = trainer.fit()
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, output / "weights.safetensors")
    seal(
        output,
        CheckpointManifest,
        inputs={"dataset": data.digest},
        config=config,
        architecture=config.architecture,
        classes=data.manifest.classes,
        transform=spec,
        metrics=result.metrics(),
        history=tuple(_record(epoch) for epoch in trainer.history),
    )
    return (
        f"{config.architecture} at {result.val_top1_pct:.2f} % top-1 after {config.epochs} epochs, "
        f"{result.train_images_per_s:,.0f} images/s on {_device_name(device)}"
    )


def _record(epoch: EpochResult) -> EpochRecord:
    # An early epoch may overflow on validation images and the next ones recover; JSON has no infinities.
    val_loss = epoch.val_loss if math.isfinite(epoch.val_loss) else None
    return EpochRecord.model_validate({**epoch.metrics(), "val_loss": val_loss})


def _transform(config: TrainConfig, data: Artifact[DatasetManifest]) -> TransformSpec:
    spec = transform_for(config.image_size, resize_ratio=config.resize_ratio, interpolation=config.interpolation)
    if config.normalization == "imagenet":
        return spec
    statistics = data.manifest.statistics
    # A channel without any contrast would divide by zero.
    std = tuple(max(value, 1 / 255) for value in statistics.std)
    return spec.model_copy(update={"mean": statistics.mean, "std": std})


def _loaders(
    config: TrainConfig, data: Artifact[DatasetManifest], spec: TransformSpec, device: torch.device
) -> tuple[Loader, Loader]:
    num_train = data.manifest.splits["train"].num_images
    if num_train < config.global_batch_size:
        raise UserError(
            f"train.global_batch_size is {config.global_batch_size}, more than the {num_train} training images; "
            f"set global_batch_size to {num_train} or less"
        )
    device_id = device.index if device.type == "cuda" else None
    train = Loader(
        data,
        "train",
        spec,
        batch_size=config.global_batch_size,
        augmentation=config.augmentation,
        seed=config.seed,
        device_id=device_id,
    )
    val = Loader(data, "val", spec, batch_size=config.global_batch_size, device_id=device_id)
    return train, val


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{num_cores()} CPU cores"
