"""Seconds that the evaluation of a bundle on a validation split takes, on one GPU and on all.

python -m benchmarks.evaluation --bundle DIR --dataset DIR --machine h200
"""

import statistics
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.results import Results, result_options
from components.common.contracts.environment import keep_streams_apart
from components.common.contracts.manifests import Artifact, BundleManifest, DatasetManifest, load
from components.common.process.steplog import StepLog
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
    (one,) = open_devices(config, models, num_images, max_gpus=1)
    _evaluate(config, [one], models, data, log)  # the first one opens files and warms the GPU up
    turns = [_evaluate(config, [one], models, data, log) for _ in range(_TURNS)]
    measures = {"evaluation_seconds": statistics.median(turns), "num_images": float(num_images)}
    runs: list[Any] = [{"evaluation": turns}]
    if len(gpus_alike()) > 1:
        one.close()
        devices = open_devices(config, models, num_images)
        several = [_evaluate(config, devices, models, data, log) for _ in range(_TURNS)]
        measures["num_gpus"] = float(len(devices))
        measures["evaluation_seconds_all_gpus"] = statistics.median(several)
        measures["one_gpu_over_all_gpus"] = measures["evaluation_seconds"] / measures["evaluation_seconds_all_gpus"]
        runs.append({"evaluation on all GPUs": several})
    precisions = ", ".join(selection.precision for selection in one.selections if selection.runner is not None)
    notes = (
        f"{models.manifest.architecture} at {models.manifest.shapes.height} px, {precisions}, from shards to "
        f"predictions. Medians of {_TURNS} turns; engines are open before."
    )
    results.write(
        f"evaluation_{models.manifest.architecture}",
        measures=measures,
        runs=runs,
        notes=notes,
    )


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
