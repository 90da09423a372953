"""Seconds of training until validation reaches a top-1, for several recipes and seeds.

    python -m benchmarks.time_to_quality --dataset DIR --target 80 --machine h200 \
        --recipe fixed=pipelines/configs/textures.yaml \
        --recipe progressive=pipelines/configs/textures.yaml,image_sizes=[128,160,192,224],epochs=14

Recipes take turns, seed by seed, each training a process of its own. Before, each trains an epoch on images of each of
its sizes, which fills torch.compile's cache: compiling is not to decide short trainings.
"""

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import yaml

from benchmarks.results import RESULTS, write_result
from components.common.contracts.manifests import CheckpointManifest, load, write_atomically
from components.common.contracts.settings import resolve
from components.train.config import TrainConfig


def settings_of(recipe: str) -> dict[str, Any]:
    """Settings of train from FILE[,KEY=VALUE...], the file being one of pipelines/configs."""
    path, *changes = _split(recipe)
    given = yaml.safe_load(Path(path).read_text())
    own = {key: value for key, value in given.items() if key in TrainConfig.model_fields and key != "train"}
    own |= given.get("train", {})
    own |= {key: yaml.safe_load(value) for key, _, value in (change.partition("=") for change in changes)}
    resolve(TrainConfig, "train", own)  # an error now, not after the first recipe's hour
    return own


def _split(text: str) -> list[str]:
    """Split at commas that are not in brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def trained(settings: dict[str, Any], dataset: Path, output: Path) -> dict[str, Any]:
    """Train in a process of its own. Returns seconds and epochs to the target, None where it was missed."""
    config = output.with_suffix(".yaml")
    write_atomically(config, yaml.safe_dump(settings).encode())
    command = [sys.executable, "-m", "components.train", "--dataset", str(dataset), "--output", str(output)]
    subprocess.run([*command, "--config", str(config)], check=True)
    manifest = load(output, CheckpointManifest).manifest
    best = max(epoch.val_top1_pct or 0.0 for epoch in manifest.history)
    reached = {name: manifest.metrics.get(name) for name in ("seconds_to_target", "epochs_to_target")}
    rates = [epoch.train_images_per_s for epoch in manifest.history]
    return {**reached, "best_top1_pct": best, "num_epochs": len(rates), "images_per_s": rates}


@click.command()
@click.option("--machine", required=True, help="Plain name of the machine.")
@click.option("--dataset", required=True, type=click.Path(exists=True, path_type=Path), help="What preprocess wrote.")
@click.option("--target", required=True, type=float, help="Top-1 on validation images, in per cent.")
@click.option(
    "--recipe", "recipes", required=True, multiple=True, help="NAME=FILE[,KEY=VALUE...]; first, the baseline."
)
@click.option("--seeds", default="0,1,2", show_default=True)
@click.option("--work", default=Path("/tmp/enginery-quality"), type=click.Path(path_type=Path), help="For checkpoints.")
@click.option("--results", default=RESULTS, type=click.Path(path_type=Path), help="Where results go.")
def main(
    machine: str, dataset: Path, target: float, recipes: tuple[str, ...], seeds: str, work: Path, results: Path
) -> None:
    settings = {name: settings_of(recipe) for name, _, recipe in (text.partition("=") for text in recipes)}
    work.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    for name, own in settings.items():
        sizes = sorted(set(own.get("image_sizes", [])))
        trained({**own, "image_sizes": sizes, "epochs": max(1, len(sizes))}, dataset, work / f"{name}-warm")
    for seed in map(int, seeds.split(",")):
        for name, own in settings.items():
            given = {**own, "seed": seed, "target_top1_pct": target, "validation_epochs": 1}
            runs.append({"recipe": name, "seed": seed, **trained(given, dataset, work / f"{name}-{seed}")})
            print(runs[-1], flush=True)
    measures: dict[str, float] = {"target_top1_pct": target}
    for name in settings:
        own_runs = [run for run in runs if run["recipe"] == name]
        measures[f"best_top1_pct_{name}"] = statistics.median(run["best_top1_pct"] for run in own_runs)
        reached = [run for run in own_runs if run["seconds_to_target"] is not None]
        measures[f"reached_{name}"] = len(reached)
        if len(reached) == len(own_runs):
            for kind in ("seconds_to_target", "epochs_to_target"):
                measures[f"{kind}_{name}"] = statistics.median(run[kind] for run in reached)
    baseline, *others = settings
    for name in others:
        pair = [measures.get(f"seconds_to_target_{one}") for one in (baseline, name)]
        if pair[0] and pair[1]:
            measures[f"{name}_over_{baseline}"] = pair[0] / pair[1]
    notes = (
        f"Medians over seeds {seeds}, one training each; reached_NAME counts those that reached it. Seconds are "
        "those of training and validation since the training began, compiling from a filled cache. A_over_B: how many "
        f"times faster A is there. Recipes: {'; '.join(recipes)}."
    )
    write_result(machine, "time_to_quality", measures=measures, runs=runs, notes=notes, directory=results)


if __name__ == "__main__":
    main()
