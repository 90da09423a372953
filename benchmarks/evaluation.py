"""Evaluation of a bundle on a validation split over the larger of loader time and engine time.

    python -m benchmarks.evaluation --bundle DIR --dataset DIR --machine h200

Runs once per number of GPUs: one, two, four, as many as there are.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.results import Results, result_options
from components.common.contracts.environment import keep_streams_apart, num_cores
from components.common.contracts.manifests import Artifact, BundleManifest, DatasetManifest, load
from components.common.data.loader import Loader
from components.common.process.steplog import StepLog
from components.common.runtimes.selection import RuntimeSelection
from components.validate.config import ValidateConfig
from components.validate.run import OpenedDevice, gpus_alike, open_devices, predict_validation

_TURNS = 3


@click.command()
@click.option("--bundle", required=True, type=click.Path(exists=True, path_type=Path), help="From export.")
@click.option("--dataset", required=True, type=click.Path(exists=True, path_type=Path), help="From preprocess.")
@result_options
def main(bundle: Path, dataset: Path, results: Results) -> None:
    keep_streams_apart()
    models, data = load(bundle, BundleManifest), load(dataset, DatasetManifest)
    config, log = ValidateConfig(), StepLog("validate")
    num_images = data.manifest.splits["val"].num_images
    opened: dict[str, float] = {}
    (one,) = _open(opened, "opening_seconds", config, models, data, max_gpus=1)
    _evaluate(config, [one], models, data, log)  # the first one opens files and warms the GPU up
    turns: dict[str, list[float]] = {"loader": [], "engines": [], "evaluation": []}
    for _ in range(_TURNS):
        turns["loader"].append(_loader_s(models, data))
        turns["engines"].append(_engines_s(one.selections, models, num_images))
        turns["evaluation"].append(_evaluate(config, [one], models, data, log))
        print({name: round(values[-1], 2) for name, values in turns.items()}, flush=True)
    seconds = {name: statistics.median(values) for name, values in turns.items()}
    measures = {f"{name}_seconds": value for name, value in seconds.items()}
    measures["validate_over_limit"] = seconds["evaluation"] / max(seconds["loader"], seconds["engines"])
    measures |= {"num_images": float(num_images)} | opened
    runs: list[Any] = [turns]
    if len(gpus_alike()) > 1:
        one.close()
        devices = _open(measures, "opening_seconds_all_gpus", config, models, data)
        several = [_evaluate(config, devices, models, data, log) for _ in range(_TURNS)]
        measures["num_gpus"] = float(len(devices))
        measures["evaluation_seconds_all_gpus"] = statistics.median(several)
        measures["one_gpu_over_all_gpus"] = seconds["evaluation"] / measures["evaluation_seconds_all_gpus"]
        runs.append({"evaluation on all GPUs": several})
    precisions = ", ".join(selection.precision for selection in one.selections if selection.runner is not None)
    notes = (
        f"{models.manifest.architecture} at {models.manifest.shapes.height} px, {precisions}, from shards to "
        "predictions. Loader: the same batches, decoded and thrown away. Engines: all images at the throughput of the "
        f"largest batch, copies included, summed over the precisions. Medians of {_TURNS} turns, one after the other. "
        "Engines and loaders are open before, which takes opening_seconds, on one GPU in a fresh process."
    )
    results.write(f"evaluation_{models.manifest.architecture}", measures=measures, runs=runs, notes=notes)


def _open(
    seconds: dict[str, float],
    name: str,
    config: ValidateConfig,
    models: Artifact[BundleManifest],
    data: Artifact[DatasetManifest],
    max_gpus: int = 0,
) -> list[OpenedDevice]:
    started = time.perf_counter()
    devices = open_devices(config, models, data, max_gpus)
    seconds[name] = time.perf_counter() - started
    return devices


def _loader_s(models: Artifact[BundleManifest], data: Artifact[DatasetManifest]) -> float:
    started = time.perf_counter()
    for _ in Loader(
        data,
        "val",
        models.manifest.transform,
        batch_size=models.manifest.shapes.max_batch,
        device_id=0,
        num_threads=num_cores(),
    ):
        pass
    torch.cuda.synchronize(0)
    return time.perf_counter() - started


def _engines_s(selections: Sequence[RuntimeSelection], models: Artifact[BundleManifest], num_images: int) -> float:
    batch_size, seconds = models.manifest.shapes.max_batch, 0.0
    for selection in selections:
        if selection.runner is not None:
            timing = selection.runner.measure(batch_size, warmup_s=0.2, duration_s=1.0, min_iterations=20)
            seconds += num_images / timing.images_per_s
    return seconds


def _evaluate(
    config: ValidateConfig,
    devices: list[OpenedDevice],
    models: Artifact[BundleManifest],
    data: Artifact[DatasetManifest],
    log: StepLog,
) -> float:
    started = time.perf_counter()
    predict_validation(config, devices, models, data, log)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
