"""The result of training: weights and what is said of them, as a Checkpoint."""

import math
import shutil
from pathlib import Path

import torch

from components.common.contracts.environment import num_cores
from components.common.contracts.manifests import (
    MANIFEST,
    UNFINISHED,
    Artifact,
    CheckpointManifest,
    DatasetManifest,
    load,
    seal,
    write_atomically,
)
from components.common.contracts.records import EpochRecord, Split
from components.common.contracts.transforms import TransformSpec
from components.common.process.steplog import StepLog
from components.train.checkpointing import WEIGHTS, write_safetensors
from components.train.config import TrainConfig
from components.train.mllog import NAME as MLLOG
from components.train.speed import TRACE
from components.train.trainer import EpochResult, Trainer


def publish(trainer: Trainer, data: Artifact[DatasetManifest], spec: TransformSpec, output: Path) -> str:
    """Write and seal the Checkpoint, then remove what was kept to go on from. Returns one line on it."""
    config = trainer.config
    number = trainer.published_epoch
    write_safetensors(output / WEIGHTS, _weights(trainer, number))
    for name in (MLLOG, TRACE):
        _keep(trainer, name, output)
    metrics = trainer.history[number].metrics()
    warn_of_a_guess(trainer.log, config, data.manifest.splits["val"], metrics["val_top1_pct"])
    sealed = seal(
        output,
        CheckpointManifest,
        inputs={"dataset": data.digest},
        config=config,
        architecture=config.architecture,
        classes=data.manifest.classes,
        transform=spec,
        metrics=metrics,
        history=tuple(_record(epoch) for epoch in trainer.history),
        profile=trainer.profiler.record,
    )
    shutil.rmtree(output / UNFINISHED)
    return _outcome(sealed, trainer.world.world_size)


def warn_of_a_guess(log: StepLog, config: TrainConfig, split: Split, top1_pct: float) -> None:
    """Say so where the model is no better than one that always names the most frequent class of a split."""
    share = max(split.class_counts) / split.num_images
    deviation = math.sqrt(share * (1 - share) / split.num_images)
    if share < 1 and top1_pct / 100 <= share + 2 * deviation:
        rate = config.learning_rate
        log.warning(
            f"the model learned nothing that shows: {top1_pct:.2f} % top-1, and naming the most frequent class each "
            f"time has {100 * share:.2f} %. Lower train.learning_rate, which is {rate:g}, to {rate / 4:g}, raise "
            f"train.epochs, which is {config.epochs}, or see in the data card whether the labels are sound"
        )


def _keep(trainer: Trainer, name: str, output: Path) -> None:
    """Make a file of the unfinished training part of the Checkpoint, if there is one."""
    assert trainer.checkpoints is not None
    source, target = trainer.checkpoints.folder / name, output / name
    if source.exists():
        write_atomically(target, source.read_bytes())
    else:
        target.unlink(missing_ok=True)  # of a run that was killed while it published


def published_before(config: TrainConfig, data: Artifact[DatasetManifest], output: Path) -> str:
    """Finish what a run left that was killed after it had sealed this very Checkpoint: one line on it, or empty."""
    if not ((output / MANIFEST).exists() and (output / UNFINISHED).is_dir()):
        return ""
    sealed = load(output, CheckpointManifest)
    manifest = sealed.manifest
    if manifest.inputs != {"dataset": data.digest} or manifest.config != config.model_dump(mode="json"):
        return ""
    shutil.rmtree(output / UNFINISHED)
    return _outcome(sealed, 1)


def _weights(trainer: Trainer, number: int) -> dict[str, torch.Tensor]:
    """Of an epoch: the last one's are in memory, the best one's in its checkpoint."""
    if number == len(trainer.history) - 1:
        return trainer.published().state_dict()
    assert trainer.checkpoints is not None and trainer.best_num_steps is not None  # noqa: PT018
    return trainer.checkpoints.at(trainer.best_num_steps).group("model" if trainer.ema is None else "ema")


def _record(epoch: EpochResult) -> EpochRecord:
    # An early epoch may overflow on validation images and the next ones recover; JSON has no infinities.
    val_loss = epoch.val_loss if epoch.val_loss is not None and math.isfinite(epoch.val_loss) else None
    return EpochRecord.model_validate({**epoch.metrics(), "val_loss": val_loss})


def _outcome(checkpoint: Artifact[CheckpointManifest], world_size: int) -> str:
    manifest = checkpoint.manifest
    top1_pct, last = manifest.metrics["val_top1_pct"], manifest.history[-1]
    return (
        f"{manifest.architecture} at {top1_pct:.2f} % top-1 after {len(manifest.history)} epochs, "
        f"{last.train_images_per_s:,.0f} images/s on {_machine(world_size)}"
    )


def _machine(world_size: int) -> str:
    if not torch.cuda.is_available():
        return f"{num_cores()} CPU cores"
    name = torch.cuda.get_device_name()
    return f"{world_size} x {name}" if world_size > 1 else name
