"""One process of a training, from its Dataset to the Checkpoint that rank 0 writes."""

import math
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from components.common.contracts.environment import num_cores
from components.common.contracts.errors import EngineryError, UserError, shortened
from components.common.contracts.manifests import (
    MANIFEST,
    PARTIAL_OUTPUT,
    Artifact,
    CheckpointManifest,
    DatasetManifest,
    check_task,
    load,
    seal,
    write_atomically,
)
from components.common.contracts.records import EpochRecord, Split
from components.common.contracts.statistics import is_above_chance
from components.common.contracts.transforms import TransformSpec, transform_for
from components.common.data.loader import Loader, plan_training
from components.common.data.places import local_path
from components.common.process.partial_output import open_partial
from components.common.process.steplog import StepLog
from components.common.tasks import TASKS, load_task, task_of
from components.common.tasks.translation.batches import SentenceLoader
from components.common.tasks.translation.vocabulary import VOCABULARY
from components.train.arithmetic import pick_precision, set_arithmetic, threads_per_process
from components.train.batches import BatchPlan, check_sizes, plan_batches
from components.train.checkpointing import WEIGHTS, Saved, choose_folder, parse, write_safetensors
from components.train.config import TrainConfig
from components.train.distributed import StopRequest, World, broadcast, describe_links, find_world, process_group
from components.train.fine_tuning import pretrained_normalization, starting_model
from components.train.memory import describe_sentences_too_many, explain_out_of_memory, is_out_of_memory
from components.train.nodes import VARIABLE, abandoned, stop_when_silent
from components.train.resharding import ReshardedLoader
from components.train.speed import NUM_SKIPPED, TRACE
from components.train.trainer import MLLOG, Trainer

_MUCH_WAITING_PCT = 5.0  # of an epoch, for data


def train(config: TrainConfig, log: StepLog, *, dataset: Path, output: Path) -> str:
    """Train in this process, alone or with others; rank 0 writes. Returns the outcome."""
    with StopRequest(waits=VARIABLE in os.environ) as stop:
        world = find_world()
        if world.is_main:
            stop_when_silent(log)
        set_arithmetic(config, world.device, world.local_world_size)
        data = load(dataset, DatasetManifest)
        check_task(
            config.architecture, task_of(config.architecture), data.manifest.task, "name another train.architecture"
        )
        _check_objects(data)
        with process_group(world, config.collective_timeout_s):
            if outcome := broadcast(_done_before(config, data, output) if world.is_main else "", world):
                return outcome if world.is_main else ""
            if not world.is_main:
                _train(config, log, data, world, stop)
                return ""
            with open_partial(output, known=(WEIGHTS, MLLOG, TRACE, VOCABULARY)) as folder:
                trainer = _train(config, log, data, world, stop, folder)
                return _publish(trainer, data, output)


def _check_objects(data: Artifact[DatasetManifest]) -> None:
    of_masks = TASKS[data.manifest.task].label_member == "mask"
    for split, held in data.manifest.splits.items():
        shown = [name for name, count in zip(data.manifest.classes, held.class_counts, strict=False) if count]
        # of masks the background is a class, too; sentences have no classes
        if held.class_counts and len(shown) < (2 if of_masks else 1):
            effect = "there is nothing to learn" if split == "train" else "nothing tells what a model finds"
            what = f", and its masks show {shown[0]!r} alone" if shown else ""
            fix = (
                "give objects the values of their classes in the masks (255 is void)"
                if of_masks
                else "or set iscrowd or difficult of its objects to 0 (CVAT marks brush masks as crowds)"
            )
            raise UserError(
                f"no image of the {split} split of {data.path} has an object{what}: {effect}. Annotate some of its "
                f"images, {fix}, and run preprocess again",
                code="no-objects",
            )


def _train(
    config: TrainConfig,
    log: StepLog,
    data: Artifact[DatasetManifest],
    world: World,
    stop: StopRequest,
    partial_output: Path | None = None,
) -> Trainer:
    """Build everything, resume from a checkpoint if there is one, and train. The folder is of rank 0 alone."""
    checkpoints = None if partial_output is None else choose_folder(config, data, world, partial_output, log)
    # Rank 0 reads it for all, so that no other machine needs the output directory.
    content = broadcast(None if checkpoints is None else checkpoints.newest(log), world)
    saved = None if content is None else parse(content)
    torch.manual_seed(config.seed)  # the same weights in all processes
    splits, num_classes = data.manifest.splits, data.manifest.num_outputs
    # Of pretrained ones, those of rank 0: DistributedDataParallel hands them round.
    model = starting_model(config, num_classes, log, reads=saved is None and world.is_main)
    torch.manual_seed(config.seed + 1000003 * world.rank)  # and of its own each what a layer drops
    plan = plan_batches(
        config, world.world_size, num_train_images=splits["train"].num_images, num_val_images=splits["val"].num_images
    )
    if data.manifest.text is None:
        check_sizes(model, config, plan)
    try:
        loaders = _loaders(config, data, plan, world, saved)
        trainer = Trainer(
            model,
            config,
            plan,
            *loaders,
            world=world,
            log=log,
            task=load_task(data.manifest.task),
            unit=TASKS[data.manifest.task].unit,
            checkpoints=checkpoints,
            stop=stop,
        )
        if saved is not None:
            trainer.restore(saved)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        trainer = loaders = None  # type: ignore[assignment]
    if trainer is None:  # behind the except, because the error keeps the frames that hold tensors
        del model
        raise _out_of_memory(config, plan, world, num_classes, log)
    _log_start(trainer, data)
    if saved is None:
        _begin_mllog(trainer, data)
    else:
        now, before = world.world_size, len(saved.state["ranks"])
        others = f", with {now} process{'' if now == 1 else 'es'} instead of {before}" if now != before else ""
        log.note(f"resuming after step {saved.num_steps} of {trainer.num_steps}, where an earlier run stopped{others}")
    del model, saved, content  # they would stay in memory
    _fit(trainer, num_classes)
    if world.device.type == "cuda" and data.manifest.text is None:
        warn_of_waiting(log, config, trainer.history[-1].data_wait_pct or 0.0)
    score_name = TASKS[data.manifest.task].training_score or TASKS[data.manifest.task].score_name
    target, done = config.target_score_pct, trainer.epochs_to_target
    trainer.mllog.event("run_stop", status="aborted" if target and not done else "success")
    if done:
        seconds = trainer.history[done - 1].elapsed_s
        unit = TASKS[data.manifest.task].unit
        log.note(f"{target:g} % {score_name} on validation {unit} after epoch {done} and {seconds:,.1f} seconds")
    elif target:
        log.warning(
            f"validation never reached train.target_score_pct, which is {target:g}: the best of {config.epochs} epochs "
            f"has {trainer.history[trainer.best_epoch or 0].val_score_pct:.2f} %"
        )
    if world.is_main and config.profile_steps and trainer.profiler.record is None:
        log.warning(
            f"train.profile_steps: no step was recorded: the first {NUM_SKIPPED} of a process are not, and this "
            "one had no more"
        )
    return trainer


def _fit(trainer: Trainer, num_classes: int) -> None:
    config = trainer.config
    try:
        trainer.fit()
        return
    except (RuntimeError, MemoryError) as error:
        text = " ".join(str(error).split())
        if "does not have a deterministic implementation" in text:
            raise UserError(
                f"train.deterministic can't be had with {config.architecture} on this device: "
                f"{text.split('. ')[0]}. Set deterministic to false, or take another architecture",
                code="not-deterministic",
                setting="train.deterministic",
            ) from None
        if isinstance(error, torch._dynamo.exc.TorchDynamoException) and not is_out_of_memory(error):
            raise EngineryError(
                f"torch.compile failed on {config.architecture} (train.compile {config.compile}): {shortened(text)}. "
                "Set train.compile to off, which trains more slowly, or to another mode",
                code="compile-failed",
                setting="train.compile",
            ) from error
        if not is_out_of_memory(error):
            raise
    # Behind the except, because the error keeps the frames that hold tensors.
    trainer.release()
    raise _out_of_memory(config, trainer.plan, trainer.world, num_classes, trainer.log)


def _out_of_memory(config: TrainConfig, plan: BatchPlan, world: World, num_classes: int, log: StepLog) -> UserError:
    if TASKS[task_of(config.architecture)].of_text:
        text = describe_sentences_too_many(plan, world)
    else:
        log.note(f"memory ran out with batches of {plan.per_gpu_batch_size} images; trying smaller ones, to name one")
        text = explain_out_of_memory(config, plan, world, num_classes)
    return UserError(text, code="out-of-memory", setting="train.per_gpu_batch_size")


def _transform(config: TrainConfig, data: Artifact[DatasetManifest], saved: Saved | None) -> TransformSpec:
    if saved is not None:  # what the normalization is taken from may be gone by now
        return TransformSpec.model_validate(saved.loader_states()[0]["identity"]["spec"])
    spec = transform_for(config.image_size, resize_ratio=config.resize_ratio, interpolation=config.interpolation)
    if config.normalization == "imagenet":
        return spec
    if config.normalization == "auto":
        mean, std = pretrained_normalization(config)
    else:
        statistics = data.manifest.image_statistics
        # A channel without any contrast would divide by zero.
        mean, std = statistics.mean, tuple(max(value, 1 / 255) for value in statistics.std)
    return spec.model_copy(update={"mean": mean, "std": std})


def _loaders(
    config: TrainConfig, data: Artifact[DatasetManifest], plan: BatchPlan, world: World, saved: Saved | None
) -> tuple[Loader | ReshardedLoader | SentenceLoader, Loader | SentenceLoader]:
    """Return the loaders of training, where `saved` left it, and of validation: this process's part of both splits."""
    own: dict[str, Any] = {
        "batch_size": plan.per_gpu_batch_size,
        "shard_id": world.rank,
        "num_shards": world.world_size,
    }
    if data.manifest.text is not None:
        return _sentence_loaders(config, data, plan, {**own, "device_id": world.device_id}, saved)
    # Of rank 0, which alone needs the pretrained weights' files.
    spec = broadcast(_transform(config, data, saved) if world.is_main else None, world)
    assert spec is not None
    num_threads = threads_per_process(world.local_world_size)
    place: dict[str, Any] = {"device_id": world.device_id, "read_timeout_s": config.read_timeout_s}
    train = partial(
        Loader,
        data,
        "train",
        spec,
        augmentation=config.augmentation,
        image_sizes=config.image_sizes,
        fp16=pick_precision(config, world.device) != torch.float32,
        seed=config.seed,
        decode_on=config.decode_on,
        **place,
    )
    own_train = partial(train, batches_per_step=plan.num_accumulated, num_threads=num_threads, **own)
    val = Loader(data, "val", spec, num_threads=num_threads, **own, **place)
    states = [] if saved is None else saved.loader_states()
    if saved is None or len(states) == world.world_size:
        return own_train(state=states[world.rank] if states else None), val
    num_epochs = saved.state["num_epochs"]
    if num_epochs.is_integer():
        return own_train(first_epoch=int(num_epochs)), val
    epoch = plan_training(
        data.manifest.splits["train"].num_images,
        *own.values(),
        batches_per_step=plan.num_accumulated,
        num_pipelines=0,
        on_gpu=world.device_id is not None,
    )
    resharded = ReshardedLoader(
        states,
        plan,
        world.rank,
        num_batches=epoch.num_batches,
        part=lambda number_of_parts, **of_part: train(num_threads=max(1, num_threads // number_of_parts), **of_part),
        own=partial(own_train, first_epoch=int(num_epochs) + 1),
    )
    return resharded, val


def _sentence_loaders(
    config: TrainConfig, data: Artifact[DatasetManifest], plan: BatchPlan, own: dict[str, Any], saved: Saved | None
) -> tuple[SentenceLoader, SentenceLoader]:
    # Of any process: what a step holds does not depend on their number.
    state = None if saved is None else saved.state["ranks"][0]["loader"]
    training: dict[str, Any] = {"batches_per_step": plan.num_accumulated, "seed": config.seed, "state": state}
    train = SentenceLoader(data, "train", training=True, **own, **training)
    return train, SentenceLoader(data, "val", training=False, **own)


def _log_start(trainer: Trainer, data: Artifact[DatasetManifest]) -> None:
    """Log what is trained on what, for MLflow and MLPerf's tools, and what a person should know before."""
    config, world, plan, log, splits = trainer.config, trainer.world, trainer.plan, trainer.log, data.manifest.splits
    sizes, epochs = config.image_sizes, config.epochs
    if len(sizes) > epochs:  # of a recipe with fewer epochs than it was made for, say
        log.warning(
            f"train.image_sizes lists {len(sizes)} epochs' sizes, and train.epochs is {epochs}: training ends with "
            f"images of {sizes[epochs - 1]} px and never sees {', '.join(f'{side} px' for side in sizes[epochs:])}. "
            f"List {epochs} sizes or fewer"
        )
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
        log.note(f"{world.world_size} processes{where}, {spread}{describe_links(world)}")


def _begin_mllog(trainer: Trainer, data: Artifact[DatasetManifest]) -> None:
    """Write what MLPerf's log has before the first epoch, as a result of research in the open division."""
    config, plan, splits, log = trainer.config, trainer.plan, data.manifest.splits, trainer.mllog
    facts = {
        "submission_org": "none",
        "submission_platform": _machine(trainer.world.world_size),
        "submission_division": "open",
        "submission_status": "research",
        "submission_benchmark": "resnet" if config.architecture == "resnet50" else config.architecture,
        "cache_clear": False,
        "global_batch_size": config.global_batch_size,
        "gradient_accumulation_steps": plan.num_accumulated,
        "train_samples": splits["train"].num_images,
        "eval_samples": splits["val"].num_images,
        "opt_name": config.optimizer,
        "opt_base_learning_rate": config.learning_rate * config.global_batch_size / 256,
        "opt_learning_rate_warmup_epochs": config.warmup_fraction * config.epochs,
        "opt_weight_decay": config.weight_decay,
        "seed": config.seed,
    }
    log.cut(0)
    log.event("init_start", time_s=psutil.Process().create_time())
    for key, value in facts.items():
        log.event(key, value)
    log.event("init_stop")
    log.event("run_start")


def _publish(trainer: Trainer, data: Artifact[DatasetManifest], output: Path) -> str:
    """Write and seal the Checkpoint, then remove the partial output. Returns one line on it."""
    config, checkpoints, number = trainer.config, trainer.checkpoints, trainer.published_epoch
    assert checkpoints is not None
    if number == len(trainer.history) - 1:
        weights = trainer.published().state_dict()
    else:
        weights = checkpoints.at(trainer.num_steps_of(number)).group("model" if trainer.ema is None else "ema")
    write_safetensors(output / WEIGHTS, weights)
    if (text := data.manifest.text) is not None:
        write_atomically(output / text.vocabulary, data.file(text.vocabulary).read_bytes())
    for name in (MLLOG, TRACE):
        if (source := checkpoints.folder / name).exists():
            write_atomically(output / name, source.read_bytes())
        else:
            (output / name).unlink(missing_ok=True)  # of a run that was killed while it published
    metrics = trainer.metrics_of(number) | {"elapsed_s": trainer.metrics_of(-1)["elapsed_s"]}  # of the whole training
    warn_of_chance_level(trainer.log, config, data.manifest.splits["val"], metrics["val_score_pct"])
    sealed = seal(
        output,
        CheckpointManifest,
        inputs={"dataset": data.digest},
        config=config,
        task=data.manifest.task,
        architecture=config.architecture,
        classes=data.manifest.classes,
        transform=trainer.val.spec if isinstance(trainer.val, Loader) else None,
        text=data.manifest.text,
        metrics=metrics,
        history=tuple(map(_finite, trainer.history)),
        profile=trainer.profiler.record,
    )
    shutil.rmtree(output / PARTIAL_OUTPUT)
    return _outcome(sealed, trainer.world.world_size)


def warn_of_chance_level(log: StepLog, config: TrainConfig, split: Split, score_pct: float) -> None:
    """Warn where the model learned nothing by the rule of the gate, as far as its score alone tells."""
    if not split.class_counts:
        return
    task, rate = TASKS[task_of(config.architecture)], config.learning_rate
    guess_pct, also = 0.0, ""
    if task.classifies:
        guess_pct = 100 * max(split.class_counts) / split.num_images
        also = f", and naming the most frequent class each time has {guess_pct:.2f} %"
    low_pct = None if task.classifies else score_pct
    if guess_pct < 100 and not is_above_chance(score_pct, guess_pct, split.num_images, low_pct):
        log.warning(
            f"the model learned nothing that shows: {score_pct:.2f} % {task.score_name}{also}. Lower "
            f"train.learning_rate, which is {rate:g}, to {rate / 4:g}, raise train.epochs, which is {config.epochs}, "
            "or see in the data card whether the labels are sound"
        )


def warn_of_waiting(log: StepLog, config: TrainConfig, data_wait_pct: float) -> None:
    """Say what helps where the GPUs waited for images."""
    if data_wait_pct > _MUCH_WAITING_PCT:
        other = "cpu" if config.decode_on == "gpu" else "gpu"
        log.warning(
            f"the GPU waited for images in {data_wait_pct:.0f} % of the last epoch: scale them down once, with "
            f"preprocess.max_short_side, give the step more CPU cores, or try train.decode_on={other}"
        )


def _done_before(config: TrainConfig, data: Artifact[DatasetManifest], output: Path) -> str:
    """One line where nothing is left to do, or empty: nobody waits, or an earlier run has sealed this Checkpoint."""
    if reason := abandoned():
        return reason
    try:
        sealed = load(output, CheckpointManifest)
    except EngineryError:  # nothing, or what `open_partial` refuses
        return ""
    manifest = sealed.manifest
    if manifest.inputs != {"dataset": data.digest} or manifest.config != config.model_dump(mode="json"):
        return ""
    begun = local_path(config.pretrained)  # whose weights may be others since
    files = [file for file in (begun, begun / MANIFEST) if config.pretrained and file.exists()]
    if any(file.stat().st_mtime > (output / MANIFEST).stat().st_mtime for file in files):
        return ""
    shutil.rmtree(output / PARTIAL_OUTPUT, ignore_errors=True)
    return f"there already: {_outcome(sealed, 1)}"


def _finite(epoch: EpochRecord) -> EpochRecord:
    """Return the record without an infinite loss, which JSON has not: an early epoch may overflow."""
    is_finite = epoch.val_loss is not None and math.isfinite(epoch.val_loss)
    return epoch if is_finite else epoch.model_copy(update={"val_loss": None})


def _machine(world_size: int) -> str:
    if torch.cuda.is_available():
        return f"{world_size} x " * (world_size > 1) + torch.cuda.get_device_name()
    return f"{num_cores()} CPU cores"


def _outcome(checkpoint: Artifact[CheckpointManifest], world_size: int) -> str:
    manifest = checkpoint.manifest
    return (
        f"{manifest.architecture} at {manifest.metrics['val_score_pct']:.2f} % {manifest.score_name} after epoch "
        f"{manifest.published_epoch}, {manifest.history[-1].train_images_per_s:,.0f} "
        f"{TASKS[manifest.task].unit}/s on {_machine(world_size)}"
    )
