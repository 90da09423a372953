"""Seconds of training until validation reaches a top-1, for several recipes and seeds.

    python -m benchmarks.time_to_quality --dataset DIR --target 80 --machine h200 \
        --recipe fixed=pipelines/configs/textures.yaml \
        --recipe progressive=pipelines/configs/textures.yaml,image_sizes=[128,160,192,224],epochs=14

Recipes take turns, seed by seed, each training a process of its own. Before, each trains an epoch on images of each of
its sizes, which fills torch.compile's cache: compiling is not to decide short trainings. To find recipes many are
trained --at-once, spread over the GPUs: with more than one on a GPU their accuracy counts, and their seconds do not.
Without --target the first recipe's trainings come first, to their end; the target is a point below the worst of them.
`fused_norm=false` in a recipe leaves out kernels of our own.
"""

import itertools
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import yaml

from benchmarks.results import Results, result_options
from components.common.contracts.environment import gpus
from components.common.contracts.manifests import CheckpointManifest, DatasetManifest, load, write_atomically
from components.common.contracts.settings import resolve
from components.train.config import TrainConfig

_WITHOUT_FUSED_NORM = (
    "from components.train import fused_norm; fused_norm.IS_ON = False; "
    "from components.train.__main__ import STEP; STEP.command()()"
)


def settings_of(recipe: str) -> dict[str, Any]:
    """Settings of train from FILE[,KEY=VALUE...], the file being one of pipelines/configs, and fused_norm."""
    path, *changes = _split(recipe)
    given = yaml.safe_load(Path(path).read_text())
    own = {key: value for key, value in given.items() if key in TrainConfig.model_fields and key != "train"}
    own |= given.get("train", {})
    own |= {key: yaml.safe_load(value) for key, _, value in (change.partition("=") for change in changes)}
    # An error now, not after the first recipe's hour.
    resolve(TrainConfig, "train", {key: value for key, value in own.items() if key != "fused_norm"})
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


def trained(
    settings: dict[str, Any], dataset: Path, output: Path, *, gpu: str | None, cores: set[int], limit_s: float
) -> dict[str, Any]:
    """Train in a process of its own. Returns top-1 and seconds by epoch."""
    config = output.with_suffix(".yaml")
    given = {key: value for key, value in settings.items() if key != "fused_norm"}
    write_atomically(config, yaml.safe_dump(given).encode())
    program = ["-m", "components.train"] if settings.get("fused_norm", True) else ["-c", _WITHOUT_FUSED_NORM]
    command = [sys.executable, *program, "--dataset", str(dataset), "--output", str(output), "--config", str(config)]
    environment = os.environ if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    began = time.monotonic()
    with output.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        os.sched_setaffinity(process.pid, cores)  # before it counts them
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done within {limit_s:.0f} s"}
        finally:
            process.kill()
            process.wait()
    if code:
        return {"failed": (output.with_suffix(".log").read_text(errors="replace").strip().splitlines() or [""])[-1]}
    manifest = load(output, CheckpointManifest).manifest
    top1 = [epoch.val_score_pct or 0.0 for epoch in manifest.history]
    rates = [epoch.train_images_per_s for epoch in manifest.history]
    elapsed = [epoch.elapsed_s for epoch in manifest.history]
    found = {"best_top1_pct": max(top1), "last_top1_pct": top1[-1], "num_epochs": len(top1), "gpu": gpu}
    found |= {"images_per_s": rates, "top1_pct": top1, "elapsed_s": elapsed}
    found["compile_seconds"] = compile_seconds(settings, dataset, rates)
    return found | {"wall_s": round(time.monotonic() - began, 1)}


def to_target(run: dict[str, Any], target: float) -> dict[str, float]:
    """Seconds and epochs to the target, with those of compiling; nothing where it was missed."""
    epochs = next((number for number, top1 in enumerate(run["top1_pct"], 1) if target and top1 >= target), None)
    if epochs is None:
        return {}
    seconds, compiling = run["elapsed_s"][epochs - 1], sum(run["compile_seconds"][:epochs])
    return {"seconds_to_target": seconds, "epochs_to_target": epochs, "seconds_to_target_compiled": seconds - compiling}


def compile_seconds(settings: dict[str, Any], dataset: Path, rates: list[float]) -> list[float]:
    """Seconds that the first epoch of each image size took longer than the fastest with that size; 0 for others."""
    num_images = load(dataset, DatasetManifest).manifest.splits["train"].num_images
    sizes = settings.get("image_sizes") or [settings["image_size"]]
    sizes = [sizes[min(epoch, len(sizes) - 1)] for epoch in range(len(rates))]
    best = {size: max(rate for own, rate in zip(sizes, rates, strict=True) if own == size) for size in sizes}
    return [
        0.0 if size in sizes[:epoch] else num_images / rate - num_images / best[size]
        for epoch, (size, rate) in enumerate(zip(sizes, rates, strict=True))
    ]


@click.command()
@click.option("--dataset", required=True, type=click.Path(exists=True, path_type=Path), help="What preprocess wrote.")
@click.option("--target", type=float, help="Top-1 on validation images, in per cent; 0 for none.")
@click.option(
    "--recipe", "recipes", required=True, multiple=True, help="NAME=FILE[,KEY=VALUE...]; first, the baseline."
)
@click.option("--seeds", default="0,1,2", show_default=True)
@click.option("--at-once", default=1, show_default=True, help="Trainings at a time, spread over the GPUs.")
@click.option("--warm/--no-warm", default=True, help="Fill torch.compile's cache first.")
@click.option("--minutes", default=600.0, help="Limit of all: what is under way then is ended.")
@click.option("--name", default="time_to_quality", show_default=True, help="Of the result.")
@click.option("--work", default=Path("/tmp/enginery-quality"), type=click.Path(path_type=Path), help="For checkpoints.")
@result_options
def main(
    dataset: Path,
    target: float | None,
    recipes: tuple[str, ...],
    seeds: str,
    at_once: int,
    warm: bool,
    minutes: float,
    name: str,
    work: Path,
    results: Results,
) -> None:
    settings = {name: settings_of(recipe) for name, _, recipe in (text.partition("=") for text in recipes)}
    work.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * minutes
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(number) for number in range(len(gpus())))
    places = visible.split(",") if gpus() else [None]
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // len(places)
    free: queue.Queue[tuple[str | None, set[int]]] = queue.Queue()
    for slot in range(at_once):
        number = slot % len(places)
        free.put((places[number], set(cores[number * share : (number + 1) * share])))
    runs: list[dict[str, Any]] = []
    writing = threading.Lock()

    def train(given: dict[str, Any], output: str) -> dict[str, Any]:
        gpu, own_cores = free.get()
        try:
            left = ends - time.monotonic()
            if left <= 0:
                return {"failed": "no time left"}
            return trained(given, dataset, work / output, gpu=gpu, cores=own_cores, limit_s=left)
        finally:
            free.put((gpu, own_cores))

    def measure(seed: int, recipe: str) -> None:
        given = {**settings[recipe], "seed": seed, "target_score_pct": target or 0, "validation_epochs": 1}
        run = {"recipe": recipe, "seed": seed, **train(given, f"{recipe}-{seed}")}
        with writing:
            runs.append(run)
            print(run, flush=True)
            write(name, target or 0, recipes, list(settings), seeds, at_once / len(places), warm, runs, results)

    with ThreadPoolExecutor(at_once) as pool:
        if warm:
            epochs = []
            for own in settings.values():
                sizes = sorted(set(own.get("image_sizes", [])))
                epochs.append({**own, "image_sizes": sizes, "epochs": max(1, len(sizes))})
            list(pool.map(train, epochs, [f"{recipe}-warm" for recipe in settings]))
        each = list(itertools.product(map(int, seeds.split(",")), settings))
        if target is None:
            baseline = next(iter(settings))
            list(pool.map(measure, *zip(*(pair for pair in each if pair[1] == baseline), strict=True)))
            ended = [run["best_top1_pct"] for run in runs if "failed" not in run]
            if not ended:
                raise SystemExit("no training of the first recipe ended, so there is no target")
            target = min(ended) - 1
            write(name, target, recipes, list(settings), seeds, at_once / len(places), warm, runs, results)
            each = [pair for pair in each if pair[1] != baseline]
        list(pool.map(measure, *zip(*each, strict=True)))


def write(
    name: str,
    target: float,
    recipes: tuple[str, ...],
    names: list[str],
    seeds: str,
    per_gpu: float,
    warm: bool,
    runs: list[dict[str, Any]],
    results: Results,
) -> None:
    """Write what is known so far."""
    measures: dict[str, float] = {"target_top1_pct": target} if target else {}
    for recipe in names:
        own = [run for run in runs if run["recipe"] == recipe and "failed" not in run]
        for key in ("best_top1_pct", "last_top1_pct"):
            if own:
                measures[f"{key}_{recipe}"] = statistics.median(run[key] for run in own)
        reached = [found for run in own if (found := to_target(run, target))]
        if target:
            measures[f"reached_{recipe}"] = len(reached)
        if reached and len(reached) == len(own):
            for key in reached[0]:
                measures[f"{key}_{recipe}"] = statistics.median(found[key] for found in reached)
    baseline, *others = names
    cache = "from a filled cache" if warm else "included"
    for recipe, kind in itertools.product(others, ("", "_compiled")):
        pair = [measures.get(f"seconds_to_target{kind}_{one}") for one in (baseline, recipe)]
        if pair[0] and pair[1]:
            measures[f"{recipe}_over_{baseline}{kind}"] = pair[0] / pair[1]
            if len(others) == 1 and not kind:
                measures["time_to_quality_speedup"] = pair[0] / pair[1]
    notes = (
        f"Medians over the trainings of seeds {seeds} that ended; reached_NAME counts those that reached the target. "
        f"Seconds are those of training and validation since the training began, compiling {cache}; those that are "
        "called compiled are without what the first epoch of each size took longer than the fastest one. A_over_B: "
        f"how many times faster A is there. Recipes: {'; '.join(recipes)}."
    )
    if per_gpu > 1:
        notes += f" {per_gpu:g} trainings at a time on a GPU: seconds and rates are no measurements of speed."
    results.write(name, measures=measures, runs=runs, notes=notes)


if __name__ == "__main__":
    main()
