"""Degraded validation images: seconds of measuring them, and what they cost each precision against FP32.

    python -m benchmarks.corruptions --bundle DIR --dataset DIR --machine h200

The first pass warms up; the measured ones run on one GPU, or on the CPU.
"""

import statistics
import time
from pathlib import Path

import click

from benchmarks.results import Results, result_options
from components.common.contracts.environment import keep_streams_apart
from components.common.contracts.manifests import BundleManifest, DatasetManifest, load
from components.common.data.corruptions import CORRUPTIONS
from components.common.process.steplog import StepLog
from components.validate.config import ValidateConfig
from components.validate.run import corrupted_rows, open_devices, predict_validation


@click.command()
@click.option("--bundle", required=True, type=click.Path(exists=True, path_type=Path), help="From export.")
@click.option("--dataset", required=True, type=click.Path(exists=True, path_type=Path), help="From preprocess.")
@click.option("--turns", default=3, show_default=True, help="Passes that are timed.")
@result_options
def main(bundle: Path, dataset: Path, turns: int, results: Results) -> None:
    keep_streams_apart()
    models, data = load(bundle, BundleManifest), load(dataset, DatasetManifest)
    config, log = ValidateConfig(corruptions=True), StepLog("validate")
    devices = open_devices(config, models, data, max_gpus=1)
    seconds = []
    for turn in range(turns + 1):
        started = time.perf_counter()
        found = predict_validation(config, devices, models, data, log, corruptions=CORRUPTIONS)
        if turn:
            seconds.append(time.perf_counter() - started)
            print(f"{seconds[-1]:.2f} s", flush=True)
    measures = {"corruptions_seconds": statistics.median(seconds), "num_corruptions": len(CORRUPTIONS)}
    measures["num_images"] = data.manifest.splits["val"].num_images
    rows = {precision: corrupted_rows(found, precision) for precision in found}
    for precision in rows:
        drops = [row.comparison for row in rows[precision] if row.comparison]
        if drops:
            measures[f"{precision}_corrupted_drop_points"] = -min(pair.delta_points for pair in drops)
            measures[f"{precision}_corrupted_drop_upper_points"] = max(pair.drop_upper_points for pair in drops)
    results.write(
        f"corruptions_{models.manifest.architecture.replace('/', '_')}",
        measures=measures,
        runs=[{"seconds": seconds}, {name: [row.model_dump() for row in each] for name, each in rows.items()}],
        notes=f"{models.manifest.architecture} at {models.manifest.shapes.height} px, {', '.join(rows)}: from shards "
        "to predictions of every image in every kind. The drop is the largest of all kinds.",
    )


if __name__ == "__main__":
    main()
