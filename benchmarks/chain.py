"""The chain on one dataset, each step started as its container would start it: accuracy and speed per precision.

python -m benchmarks.chain --data DIR --config pipelines/configs/textures.yaml --machine h200 --name chain_textures
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import yaml

from benchmarks.results import RESULTS, write_result
from components.common.runtimes import runs_plans

_STEP_OF_INPUT = {
    "image_size": "train",
    "epochs": "train",
    "global_batch_size": "train",
    "learning_rate": "train",
    "num_calibration_images": "export",
    "calibration_method": "export",
    "max_top1_drop_points": "gate",
    "latency_budget": "validate",
}


@click.command()
@click.option("--data", required=True, type=click.Path(exists=True, path_type=Path), help="Labelled images.")
@click.option(
    "--config", required=True, type=click.Path(exists=True, path_type=Path), help="A file of pipelines/configs."
)
@click.option("--work", required=True, type=click.Path(path_type=Path), help="Empty directory for the artifacts.")
@click.option("--machine", required=True, help="Plain name of the machine.")
@click.option("--name", required=True, help="Name of the result.")
@click.option("--results", default=RESULTS, type=click.Path(path_type=Path), help="Where results go.")
@click.option("--set", "assignments", multiple=True, help="STEP.KEY=VALUE")
def main(
    data: Path, config: Path, work: Path, machine: str, name: str, results: Path, assignments: tuple[str, ...]
) -> None:
    settings = _settings(config, data, assignments)
    artifacts = {step: work / step for step in ("preprocess", "train", "export", "validate", "gate")}
    inputs = {
        "preprocess": {},
        "train": {"dataset": artifacts["preprocess"]},
        "export": {"model": artifacts["train"], "dataset": artifacts["preprocess"]},
        "validate": {"bundle": artifacts["export"], "dataset": artifacts["preprocess"]},
        "gate": {"report": artifacts["validate"]},
    }
    seconds = {}
    for step, paths in inputs.items():
        seconds[step] = _run(step, paths, artifacts[step], settings.get(step, {}), work)
        print(f"{step}: {seconds[step]:.1f} s", flush=True)
    manifests = {step: json.loads((path / "manifest.json").read_text()) for step, path in artifacts.items()}
    write_result(
        machine,
        name,
        measures=_measures(manifests, seconds),
        runs=[
            {
                "settings": settings,
                "accuracy": manifests["validate"]["accuracy"]["rows"],
                "benchmark": manifests["validate"]["benchmark"]["rows"],
                "engines": manifests["export"]["engines"],
                "engines_missing": manifests["export"]["engines_missing"],
                "checks": manifests["gate"]["checks"],
            }
        ],
        versions=dict([("tensorrt", engine["tensorrt_version"]) for engine in manifests["export"]["engines"]][:1]),
        notes="One run. Seconds are wall time of each step's process, imports included.",
        directory=results,
    )


def _settings(config: Path, data: Path, assignments: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    settings: dict[str, dict[str, Any]] = {"preprocess": {"data": str(data)}}
    for key, value in yaml.safe_load(config.read_text()).items():
        if isinstance(value, dict):
            settings.setdefault(key, {}).update(value)
        elif key in _STEP_OF_INPUT:
            settings.setdefault(_STEP_OF_INPUT[key], {})[key] = value
    for text in assignments:
        key, _, value = text.partition("=")
        step, _, field = key.partition(".")
        settings.setdefault(step, {})[field] = yaml.safe_load(value)
    return settings


def _run(step: str, inputs: dict[str, Path], output: Path, settings: dict[str, Any], work: Path) -> float:
    work.mkdir(parents=True, exist_ok=True)
    file = work / f"{step}.yaml"
    file.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", f"components.{step}", "--output", str(output), "--config", str(file)]
    for name, path in inputs.items():
        command += [f"--{name}", str(path)]
    started = time.perf_counter()
    result = subprocess.run(command, check=False)
    if result.returncode not in (0, 3):  # 3: the gate said no, which is a result
        sys.exit(result.returncode)
    return time.perf_counter() - started


def _measures(manifests: dict[str, Any], seconds: dict[str, float]) -> dict[str, float]:
    measures = {f"{step}_seconds": value for step, value in seconds.items()}
    metrics = manifests["train"]["metrics"]
    measures["train_jpeg_images_per_s"] = metrics["train_images_per_s"]
    measures["train_top1_pct"] = metrics["val_top1_pct"]
    measures["calibration_seconds"] = manifests["export"]["calibration"]["seconds"]
    for engine in manifests["export"]["engines"]:
        measures[f"engine_build_seconds_cold_{engine['precision']}"] = engine["build_seconds"]
    for row in manifests["validate"]["accuracy"]["rows"]:
        if row["top1_pct"] is not None:
            measures[f"top1_pct_{row['precision']}"] = row["top1_pct"]
            if row["precision"] != "fp32":
                measures[f"{row['precision']}_delta_points"] = row["delta_top1_points"]
    for row in manifests["validate"]["benchmark"]["rows"]:
        key = f"{row['precision']}_b{row['batch_size']}"
        prefix = "engine_" if runs_plans(row["runtime"]) else f"{row['runtime']}_"
        if row["num_streams"] > 1:
            key += f"_streams{row['num_streams']}"
        elif not row["with_transfers"]:
            prefix += "compute_"  # as benchmarks/engines.py calls it
        measures[f"{prefix}images_per_s_{key}"] = row["images_per_s"]
        measures[f"{prefix}p50_ms_{key}"] = row["p50_ms"]
        measures[f"{prefix}p99_ms_{key}"] = row["p99_ms"]
        if row["images_per_s_per_w"] is not None:
            measures[f"{prefix}images_per_s_per_w_{key}"] = row["images_per_s_per_w"]
    measures["gate_passed"] = float(manifests["gate"]["passed"])
    return measures


if __name__ == "__main__":
    main()
