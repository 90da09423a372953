"""Accuracy of each calibration, and of auto with fallback, on a held-out split.

    python -m benchmarks.int8_selection --checkpoint DIR --dataset DIR --work DIR --machine h200 --name NAME

Every variant is what the export step writes with these settings. All of them see the same decoded images.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.results import Results, result_options
from components.common.contracts.manifests import Artifact, BundleManifest, DatasetManifest, load
from components.common.contracts.records import CALIBRATION_METHODS
from components.common.contracts.statistics import difference_interval, paired_counts
from components.common.data.evaluation import ClassPredictions, predict
from components.common.data.loader import Loader
from components.common.runtimes.openvino import OpenVINORunner
from components.common.runtimes.runner import Runner
from components.common.runtimes.torch import TorchRunner


@click.command()
@click.option("--checkpoint", required=True, type=click.Path(exists=True, path_type=Path), help="From train.")
@click.option("--dataset", required=True, type=click.Path(exists=True, path_type=Path), help="From preprocess.")
@click.option("--work", required=True, type=click.Path(path_type=Path), help="Empty directory for the bundles.")
@click.option("--name", required=True, help="Name of the result.")
@result_options
@click.option("--runtime", default="openvino", type=click.Choice(["openvino", "torch"]), help="What runs the models.")
@click.option("--set", "assignments", multiple=True, help="KEY=VALUE of export, for every variant.")
def main(
    checkpoint: Path, dataset: Path, work: Path, name: str, results: Results, runtime: str, assignments: tuple[str, ...]
) -> None:
    variants: dict[str, list[str]] = {
        method: ["--calibration-method", method, "--fallback", "false"] for method in CALIBRATION_METHODS
    }
    variants["auto"] = ["--calibration-method", "auto"]
    own = [f"--{key.replace('_', '-')}={value}" for key, value in (text.split("=", 1) for text in assignments)]
    bundles, seconds = {}, {}
    for variant, options in variants.items():
        started = time.perf_counter()
        _export(checkpoint, dataset, work / variant, [*options, *own, "--cache", str(work / "cache")])
        seconds[variant] = time.perf_counter() - started
        bundles[variant] = load(work / variant, BundleManifest)
    predictions = _predict(bundles, load(dataset, DatasetManifest), runtime)
    fp32 = predictions["fp32"]
    measures = {"top1_pct_fp32": fp32.score_pct, "num_images": float(fp32.num_images)}
    runs: list[dict[str, Any]] = []
    for variant, bundle in bundles.items():
        counts = paired_counts(fp32.right, predictions[variant].right)
        low, high = difference_interval(*counts)
        layers = _convolutions(bundle)
        measures[f"top1_pct_int8_{variant}"] = predictions[variant].score_pct
        measures[f"int8_delta_points_{variant}"] = predictions[variant].score_pct - fp32.score_pct
        runs.append(
            {
                "variant": variant,
                "export_seconds": seconds[variant],
                "top1_pct": predictions[variant].score_pct,
                "low_points": low,
                "high_points": high,
                "num_lost": counts[1],
                "num_gained": counts[2],
                "agreement_pct": predictions[variant].agreement_pct(fp32),
                "int8_convolution_share": layers,
                "calibration": bundle.manifest.calibration.model_dump(mode="json"),
            }
        )
    chosen = bundles["auto"].manifest
    measures["int8_layer_share_auto"] = _convolutions(bundles["auto"])
    measures["calibration_seconds"] = bundles["max"].manifest.calibration.seconds
    if chosen.calibration.selection is not None:
        measures["selection_seconds"] = chosen.calibration.selection.seconds
    training = chosen.training.config if chosen.training else {}
    notes = (
        f"{chosen.architecture}, {training.get('epochs')} epochs, validation split of {dataset.name}, INT8 by "
        f"{runtime}. Intervals are paired, 95 % on each side (Tango, 1998). One run."
    )
    results.write(name, measures=measures, runs=runs, notes=notes)


def _export(checkpoint: Path, dataset: Path, output: Path, options: list[str]) -> None:
    command = [sys.executable, "-m", "components.export", "--model", str(checkpoint), "--dataset", str(dataset)]
    output.parent.mkdir(parents=True, exist_ok=True)
    result = subprocess.run([*command, "--output", str(output), "--tensorrt", "off", *options], check=False)
    if result.returncode != 0:
        sys.exit(result.returncode)


def _predict(
    bundles: dict[str, Artifact[BundleManifest]], dataset: Artifact[DatasetManifest], runtime: str
) -> dict[str, ClassPredictions]:
    first = next(iter(bundles.values()))
    files = {"fp32": first.file("fp32.onnx")} | {name: bundle.file("int8.onnx") for name, bundle in bundles.items()}
    shapes = first.manifest.shapes
    runners: dict[str, Runner] = {
        name: TorchRunner(file, shapes, "cuda") if runtime == "torch" else OpenVINORunner(file, shapes)
        for name, file in files.items()
    }
    loader = Loader(
        dataset, "val", first.manifest.transform, batch_size=64, device_id=0 if torch.cuda.is_available() else None
    )
    return predict(runners, loader, loader.num_images, _show)


def _show(done: int, total: int) -> None:
    if done == total or done % 2048 == 0:
        print(f"{done}/{total} images", flush=True)


def _convolutions(bundle: Artifact[BundleManifest]) -> float:
    """Share of the convolutions that run in INT8."""
    import onnx

    names = [node.name for node in onnx.load(bundle.file("fp32.onnx")).graph.node if node.op_type == "Conv"]
    excluded = set(bundle.manifest.calibration.excluded)
    return sum(name not in excluded for name in names) / len(names)


if __name__ == "__main__":
    main()
