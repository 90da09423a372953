"""train: Dataset -> Checkpoint."""

import os
from pathlib import Path
from typing import Any

import torch

from components.common.contracts.environment import torchrun_rank
from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import ALL_FILES, Artifact, DatasetManifest, load
from components.common.contracts.transforms import TransformSpec, transform_for
from components.common.data.loader import Loader
from components.common.process.partial_output import open_unfinished
from components.common.process.steplog import StepLog
from components.train.arithmetic import pick_precision, set_arithmetic, threads_per_process
from components.train.batches import BatchPlan, check_sizes, plan_batches
from components.train.checkpointing import WEIGHTS, CheckpointFolder, Saved, choose_folder, loader_state, parse, restore
from components.train.config import TrainConfig
from components.train.distributed import StopRequest, World, describe_links, find_world, from_main, joined
from components.train.fine_tuning import starting_model
from components.train.launching import check_alone, launch, num_processes
from components.train.memory import explain_out_of_memory, is_out_of_memory
from components.train.mllog import NAME as MLLOG
from components.train.nodes import stop_when_silent
from components.train.publishing import publish, published_before
from components.train.speed import NUM_SKIPPED, TRACE
from components.train.train_job import JOB_VARIABLE, TrainJobRequest
from components.train.trainer import Trainer


def run(config: TrainConfig, log: StepLog, *, dataset: Path, output: Path) -> str:
    """Train on all GPUs of this machine, or as one process of a torchrun's. See the package's docstring."""
    if torchrun_rank() is not None:
        return train(config, log, dataset=dataset, output=output)
    check_alone()
    if config.verify:
        load(dataset, DatasetManifest, verify=ALL_FILES)
    if request := os.environ.get(JOB_VARIABLE):
        from components.train.nodes import train_on_nodes  # brings Kubernetes' client, which nothing else needs

        return train_on_nodes(TrainJobRequest.model_validate_json(request), config, log, dataset, output)
    number = num_processes(config)
    if number > 1:
        return launch(config, log, number, dataset=dataset, output=output)
    return train(config, log, dataset=dataset, output=output)


def train(config: TrainConfig, log: StepLog, *, dataset: Path, output: Path) -> str:
    """Train in this process, alone or with others; rank 0 writes. Returns the outcome."""
    with StopRequest() as stop:
        world = find_world()
        if world.is_main:
            stop_when_silent(log)
        set_arithmetic(config, world.device, world.local_world_size)
        data = load(dataset, DatasetManifest)
        with joined(world, config.collective_timeout_s):
            if outcome := from_main(published_before(config, data, output) if world.is_main else "", world):
                return outcome
            if not world.is_main:
                return _train(config, log, data, world, stop)
            with open_unfinished(output, known=(WEIGHTS, MLLOG, TRACE)) as folder:
                return _train(config, log, data, world, stop, output=output, folder=folder)


def _train(
    config: TrainConfig,
    log: StepLog,
    data: Artifact[DatasetManifest],
    world: World,
    stop: StopRequest,
    *,
    output: Path | None = None,
    folder: Path | None = None,
) -> str:
    """Build everything, go on from a checkpoint if there is one, train and publish. Folders are of rank 0 alone."""
    checkpoints = None if folder is None else choose_folder(config, data, world, folder, log)
    saved = _saved(checkpoints, world, log)
    torch.manual_seed(config.seed)  # the same weights in all processes
    num_classes = len(data.manifest.classes)
    model = starting_model(config, num_classes, log, goes_on=saved is not None)
    torch.manual_seed(config.seed + 1000003 * world.rank)  # and of its own each what a layer drops
    splits = data.manifest.splits
    num_val_images = splits["val"].num_images
    plan = plan_batches(
        config, world.world_size, num_train_images=splits["train"].num_images, num_val_images=num_val_images
    )
    check_sizes(model, config, plan)
    spec = _transform(config, data)
    try:
        loaders = _loaders(config, data, spec, plan, world, saved)
        trainer = Trainer(model, config, plan, *loaders, world=world, log=log, checkpoints=checkpoints, stop=stop)
        if saved is not None:
            restore(trainer, saved)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        trainer = loaders = None  # type: ignore[assignment]
    if trainer is None:  # behind the except, because the error keeps the frames that hold tensors
        del model
        raise _out_of_memory(config, plan, world, num_classes, log)
    _warn_of_unseen_sizes(log, config)
    _tell(log, data, trainer)
    if saved is not None:
        log.note(f"going on after step {saved.num_steps} of {trainer.num_steps}, where an earlier run stopped")
    del model, saved  # both would stay in memory
    trainer.mllog.begin(_mlperf_facts(trainer, data))
    _fit(trainer, num_classes)
    trainer.mllog.end("run_stop", status="success")
    if world.is_main and config.profile_steps and trainer.profiler.record is None:
        log.warning(
            f"train.profile_steps: no step was recorded: the first {NUM_SKIPPED} of a process are not, and this "
            "one had no more"
        )
    return "" if output is None else publish(trainer, data, spec, output)


def _saved(checkpoints: CheckpointFolder | None, world: World, log: StepLog) -> Saved | None:
    """What an earlier run left. Rank 0 reads it for all, so that no other machine needs the output directory."""
    content = from_main(None if checkpoints is None else checkpoints.newest(log), world)
    return None if content is None else parse(content)


def _fit(trainer: Trainer, num_classes: int) -> None:
    config = trainer.config
    try:
        trainer.fit()
        return
    except (RuntimeError, MemoryError) as error:
        if "does not have a deterministic implementation" in str(error):
            raise UserError(
                f"train.deterministic can't be had with {config.architecture} on this device: "
                f"{str(error).split('. ')[0]}. Set deterministic to false, or take another architecture"
            ) from None
        if not is_out_of_memory(error):
            if isinstance(error, torch._dynamo.exc.TorchDynamoException):
                raise EngineryError(
                    f"torch.compile failed on {config.architecture} (train.compile {config.compile}): "
                    f"{' '.join(str(error).split())[:300]}. Set train.compile to off, which trains more slowly, or to "
                    "another mode"
                ) from error
            raise
    # Behind the except, because the error keeps the frames that hold tensors.
    trainer.release()
    raise _out_of_memory(config, trainer.plan, trainer.world, num_classes, trainer.log)


def _out_of_memory(config: TrainConfig, plan: BatchPlan, world: World, num_classes: int, log: StepLog) -> UserError:
    log.note(f"memory ran out with batches of {plan.per_gpu_batch_size} images; trying smaller ones, to name one")
    return UserError(explain_out_of_memory(config, plan, world, num_classes))


def _transform(config: TrainConfig, data: Artifact[DatasetManifest]) -> TransformSpec:
    spec = transform_for(config.image_size, resize_ratio=config.resize_ratio, interpolation=config.interpolation)
    if config.normalization == "imagenet":
        return spec
    statistics = data.manifest.statistics
    # A channel without any contrast would divide by zero.
    std = tuple(max(value, 1 / 255) for value in statistics.std)
    return spec.model_copy(update={"mean": statistics.mean, "std": std})


def _loaders(
    config: TrainConfig,
    data: Artifact[DatasetManifest],
    spec: TransformSpec,
    plan: BatchPlan,
    world: World,
    saved: Saved | None,
) -> tuple[Loader, Loader]:
    """Of training, where `saved` left it, and of validation: this process's part of both splits."""
    own: dict[str, Any] = {
        "batch_size": plan.per_gpu_batch_size,
        "shard_id": world.rank,
        "num_shards": world.world_size,
        "device_id": world.device_id,
        "num_threads": threads_per_process(world.local_world_size),
        "stuck_after_s": config.stuck_after_s,
    }
    train = Loader(
        data,
        "train",
        spec,
        batches_per_step=plan.num_accumulated,
        augmentation=config.augmentation,
        image_sizes=config.image_sizes,
        half=pick_precision(config, world.device) != torch.float32,
        seed=config.seed,
        state=None if saved is None else loader_state(saved, world.rank),
        **own,
    )
    val = Loader(data, "val", spec, **own)
    return train, val


def _mlperf_facts(trainer: Trainer, data: Artifact[DatasetManifest]) -> dict[str, Any]:
    """What MLPerf's log says of a training, by its keys."""
    config, splits = trainer.config, data.manifest.splits
    return {
        "submission_benchmark": config.architecture,
        "global_batch_size": config.global_batch_size,
        "gradient_accumulation_steps": trainer.plan.num_accumulated,
        "train_samples": splits["train"].num_images,
        "eval_samples": splits["val"].num_images,
        "opt_name": config.optimizer,
        "opt_base_learning_rate": config.learning_rate * config.global_batch_size / 256,
        "opt_learning_rate_warmup_epochs": config.warmup_fraction * config.epochs,
        "opt_weight_decay": config.weight_decay,
        "seed": config.seed,
    }


def _tell(log: StepLog, data: Artifact[DatasetManifest], trainer: Trainer) -> None:
    """What is trained on what, for MLflow, and how several GPUs are connected."""
    world, plan, splits = trainer.world, trainer.plan, data.manifest.splits
    log.params(
        {
            "device": str(world.device),
            "dtype": str(trainer.dtype),
            "num_train_images": splits["train"].num_images,
            "world_size": world.world_size,
            "per_process_batch_size": plan.per_gpu_batch_size,
            "num_accumulated": plan.num_accumulated,
        }
    )
    log.dataset("train", splits["train"].digest, splits["train"].num_images, "training")
    log.dataset("val", splits["val"].digest, splits["val"].num_images, "validation")
    if world.is_main and world.world_size > 1:
        machines = world.world_size // world.local_world_size
        where = f" on {machines} machines" if machines > 1 else ""
        spread = f"{plan.per_gpu_batch_size} images each, {plan.num_accumulated} times a step"
        log.note(f"{world.world_size} processes{where}, {spread}{_links(world)}")


def _warn_of_unseen_sizes(log: StepLog, config: TrainConfig) -> None:
    """Of a recipe with fewer epochs than it was made for, say."""
    sizes, epochs = config.image_sizes, config.epochs
    if len(sizes) > epochs:
        log.warning(
            f"train.image_sizes lists {len(sizes)} epochs' sizes, and train.epochs is {epochs}: training ends with "
            f"images of {sizes[epochs - 1]} px and never sees {', '.join(f'{side} px' for side in sizes[epochs:])}. "
            f"List {epochs} sizes or fewer"
        )


def _links(world: World) -> str:
    if world.device.type != "cuda" or world.local_world_size == 1:
        return ""
    properties = [torch.cuda.get_device_properties(index) for index in range(world.local_world_size)]
    links = describe_links([f"GPU-{one.uuid}" for one in properties])
    return f"; {properties[0].name}, connected by {links}" if links else f"; {properties[0].name}"
