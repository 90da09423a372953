"""Predictions of a bundle's models on the validation split, by every GPU that runs them."""

from collections.abc import Mapping, Sequence

import torch

from components.common.contracts.environment import num_cores
from components.common.contracts.manifests import Artifact, BundleManifest, DatasetManifest
from components.common.data.evaluation import Predictions, predict_in_parts
from components.common.data.loader import Loader
from components.common.process.steplog import StepLog
from components.common.runtimes import Runner
from components.common.runtimes.selection import Serving, serving_runners
from components.validate.config import ValidateConfig

_CPU_BATCH_SIZE = 32


def predict_validation(
    config: ValidateConfig,
    servings: Sequence[Serving],
    bundle: Artifact[BundleManifest],
    data: Artifact[DatasetManifest],
    log: StepLog,
    *,
    max_gpus: int = 0,
) -> dict[str, Predictions]:
    """Predictions by precision, on every image of the split in the order of its listing.

    Engines run on all GPUs like the first one that CUDA_VISIBLE_DEVICES leaves, each with a part of the split and a
    loader of its own. Other runtimes run here once.

    Args:
        config: what to measure with.
        servings: what runs each precision on the first GPU, or on the CPU.
        bundle: the models.
        data: the images.
        log: told how far it is.
        max_gpus: use no more than these; 0 for all.
    """
    split, shapes = data.manifest.splits["val"], bundle.manifest.shapes
    on_gpu = config.loader == "auto" and torch.cuda.is_available()
    batch_size = min(config.batch_size or (shapes.max_batch if on_gpu else _CPU_BATCH_SIZE), shapes.max_batch)
    runners = _runners(servings)
    alike = gpus_alike() if on_gpu and all(runner.runtime == "tensorrt" for runner in runners.values()) else (0,)
    gpus = alike[: max(1, split.num_images // batch_size)][: max_gpus or None]
    every = [runners]
    for gpu in gpus[1:]:
        log.progress("loading models", gpu, len(gpus))
        with torch.cuda.device(gpu):
            every.append(_runners(serving_runners(bundle, config.runtime)))
    if len(gpus) > 1:
        log.note(f"accuracy is measured on {len(gpus)} GPUs")
    loaders = [
        Loader(
            data,
            "val",
            bundle.manifest.transform,
            batch_size=batch_size,
            shard_id=index,
            num_shards=len(gpus),
            device_id=gpu if on_gpu else None,
            num_threads=max(1, num_cores() // len(gpus)),
        )
        for index, gpu in enumerate(gpus)
    ]
    predictions = predict_in_parts(
        list(zip(every, loaders, strict=True)),
        split.num_images,
        lambda done, total: log.progress("measuring accuracy", done, total, unit="images"),
    )
    for others in every[1:]:
        for runner in others.values():
            runner.close()
    return predictions


def gpus_alike() -> tuple[int, ...]:
    """CUDA's indices of the GPUs that run the first one's engines: same name, same compute capability."""
    kinds = [
        (torch.cuda.get_device_name(gpu), torch.cuda.get_device_capability(gpu))
        for gpu in range(torch.cuda.device_count())
    ]
    return tuple(gpu for gpu, kind in enumerate(kinds) if kind == kinds[0])


def _runners(servings: Sequence[Serving]) -> Mapping[str, Runner]:
    return {serving.precision: serving.runner for serving in servings if serving.runner is not None}
