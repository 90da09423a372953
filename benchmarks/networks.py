"""INT8 on many networks, on one GPU: trained on textures, exported, validated, and measured again in turns.

    enginery data textures DIR --num-train 40000 --num-val 10000 --num-classes 20 --image-size 144
    python -m components.preprocess --data DIR --output DATASET
    python -m benchmarks.networks --dataset DATASET --work DIR --machine h200 resnet50 mobilenet_v3_large

Every step is the command that users run. "INT8 everywhere" is the plan that export builds first of those with INT8,
which is kept here; "chosen" is what the gate recommends of FP16 and INT8. A row that the result has already is
replaced, the others stay. Nothing else may use the GPU: TensorRT times kernels while it builds.
"""

import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click

from benchmarks.results import Results, current_commit, result_options
from components.common.contracts.manifests import MANIFEST, Artifact, BundleManifest, ReportManifest, load
from components.common.contracts.verdict import Thresholds, judge
from components.common.runtimes.runner import Runner
from components.common.runtimes.tensorrt import TensorRTRunner
from components.export.__main__ import STEP as EXPORT
from components.export.backends import TensorRTBackend
from components.export.mixed import Compiled

_EVERYWHERE = "everywhere.plan"
_EXPORT = "from benchmarks.networks import export; export()"
_TURNS = 9
_TIMES: dict[str, Any] = {"warmup_s": 0.2, "duration_s": 0.3, "min_iterations": 10}


@dataclass(frozen=True, kw_only=True)
class Network:
    """The training of a network until its top-1 means something."""

    epochs: int = 8
    image_size: int = 128
    options: tuple[str, ...] = ("--learning-rate", "0.3")


_ADAMW = ("--optimizer", "adamw", "--learning-rate", "0.0005")
# As many images in four times as many steps, for those that learn slowly; the peak rate per step is that of _ADAMW.
_SMALL_BATCHES = ("--optimizer", "adamw", "--learning-rate", "0.002", "--global-batch-size", "64")
# Without BatchNorm deep networks learn nothing at a higher rate.
_WITHOUT_BATCH_NORM = ("--optimizer", "adamw", "--learning-rate", "0.0002", "--warmup-fraction", "0.2")
NETWORKS = {
    "resnet50": Network(),
    "resnext50_32x4d": Network(),
    "densenet121": Network(),
    "mobilenet_v2": Network(epochs=12),
    "mobilenet_v3_large": Network(epochs=12),
    "efficientnet_b0": Network(epochs=12, options=_SMALL_BATCHES),
    "efficientnet_v2_s": Network(epochs=10, image_size=224, options=_SMALL_BATCHES),
    "regnet_y_1_6gf": Network(),
    "convnext_tiny": Network(epochs=16, options=_ADAMW),
    "shufflenet_v2_x1_0": Network(epochs=12),
    "inception_v3": Network(image_size=224, options=_SMALL_BATCHES),  # its last maps are 2 x 2 at 128 px
    "googlenet": Network(),
    "alexnet": Network(epochs=16, image_size=224, options=_ADAMW),
    "vgg16_bn": Network(image_size=224, options=_ADAMW),  # pools to 7 x 7
    "vgg19": Network(epochs=12, image_size=224, options=_WITHOUT_BATCH_NORM),  # pools to 7 x 7
    "vit_b_16": Network(epochs=6, image_size=224, options=_ADAMW),
    "swin_t": Network(epochs=12, options=_ADAMW),
    "timm/vit_small_patch16_224": Network(epochs=12, image_size=224, options=_ADAMW),
}


@click.command()
@click.argument("networks", nargs=-1, type=click.Choice(list(NETWORKS)), required=True)
@click.option("--dataset", required=True, type=click.Path(exists=True, path_type=Path), help="From preprocess.")
@click.option("--work", required=True, type=click.Path(path_type=Path), help="Directory of what is made.")
@click.option("--optimization-level", default=1, show_default=True, help="0 builds fastest, 5 runs fastest.")
@click.option("--cache", type=click.Path(path_type=Path), help="Of calibrations and timings.  [default: in --work]")
@click.option("--only-train", is_flag=True, help="Leave the checkpoints for a later run, which takes them.")
@result_options
def main(
    networks: tuple[str, ...],
    dataset: Path,
    work: Path,
    optimization_level: int,
    cache: Path | None,
    only_train: bool,
    results: Results,
) -> None:
    rows = {row["network"]: row for row in results.earlier("networks")["runs"]}
    for name in networks:
        try:
            folder = work / name.replace("/", "_")
            row = _row(name, dataset, folder, optimization_level, cache or work / "cache", only_train)
        except subprocess.CalledProcessError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        if row is None:
            continue
        rows[name] = row
        print(json.dumps(rows[name]), flush=True)
        results.write(
            "networks",
            measures=_measures(list(rows.values())),
            runs=[rows[name] for name in NETWORKS if name in rows],
            notes=f"TensorRT at optimization level 1 unless a row says otherwise, kernels tuned for batch 128. Speeds "
            f"are medians of {_TURNS} turns after the choice, all engines of a network in each turn, copies "
            "included but where a name ends in no_copies. Each row names its commit.",
        )


def _row(name: str, dataset: Path, work: Path, level: int, cache: Path, only_train: bool) -> dict[str, Any] | None:
    network, seconds = NETWORKS[name], {}
    for label in ("bundle", "report"):
        shutil.rmtree(work / label, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    size = ("--image-size", str(network.image_size), "--resize-ratio", "1.125")
    epochs = ("--epochs", str(network.epochs), "--validation-epochs", str(network.epochs))  # validated once, at its end
    training = ("--architecture", name, *epochs, "--compile", "off", *size, *network.options)
    if not (work / "checkpoint" / MANIFEST).exists():
        seconds["train"] = run_step("train", dataset, work / "checkpoint", *training)
    if only_train:
        return None
    plans = ("--tensorrt", "on", "--optimization-level", str(level), "--opt-batch", "128", "--cache", str(cache))
    seconds["export"] = run_step("export", dataset, work / "bundle", "--model", str(work / "checkpoint"), *plans)
    options = ("--bundle", str(work / "bundle"), "--benchmark-batch-sizes", "[1, 128]", "--benchmark-streams", "[1]")
    seconds["validate"] = run_step("validate", dataset, work / "report", *options)
    return {
        "network": name,
        "commit": current_commit(),
        "optimization_level": level,
        "image_size": network.image_size,
        "epochs": network.epochs,
        **engines_of(work / "bundle", work / "report", batch_size=128, turns=_TURNS, score="top1_pct"),
        "seconds": {key: round(value, 1) for key, value in seconds.items()},
    }


def engines_of(bundle_folder: Path, report_folder: Path, *, batch_size: int, turns: int, score: str) -> dict[str, Any]:
    """The choice of export for a network, its scores, and the speeds of its engines, measured again in turns.

    Args:
        bundle_folder: from `export`, beside it the plan of INT8 everywhere.
        report_folder: of the bundle.
        batch_size: measured beside 1, in images.
        turns: of the measurement.
        score: begin of the scores' keys.
    """
    report = load(report_folder, ReportManifest).manifest
    verdict = judge(Thresholds(), report.accuracy, report.benchmark)
    chosen = verdict.recommendation.precision if verdict.recommendation is not None else "fp16"
    bundle = load(bundle_folder, BundleManifest)
    record, placement = bundle.manifest, bundle.manifest.placement
    int8 = next(plan for plan in record.engines if plan.precision == "int8")
    assert placement is not None  # with plans there was a search
    selection = record.calibration.selection
    return {
        "tensorrt": int8.tensorrt_version,
        "chosen": chosen,
        "chosen_candidate": placement.chosen.name,
        "calibration": record.calibration.method,
        "excluded_for_accuracy": len(record.calibration.excluded),
        "form": int8.weights,
        "failed_forms": list(int8.failed_forms),
        "int8_layers": record.num_quantized_layers,
        "layers": record.num_quantizable_layers,
        "int8_time_pct": placement.int8_time_pct,
        **_accuracy(report, score, "fp32", "fp16", "int8"),
        "within_budget": verdict.passed,
        **_speeds(bundle, chosen, batch_size, turns),
        "build_seconds": sum(plan.build_seconds for plan in record.engines),
        "search_seconds": (selection.seconds if selection else 0.0) + placement.seconds,
        "trials": [trial.model_dump(mode="json", exclude={"excluded"}) for trial in placement.trials],
    }


def run_step(step: str, dataset: Path | None, output: Path, *options: str) -> float:
    """Run a step, with its output kept beside what it writes. Returns its seconds."""
    started = time.monotonic()
    what = ("-c", _EXPORT) if step == "export" else ("-m", f"components.{step}")
    inputs = () if dataset is None else ("--dataset", str(dataset))
    command = [sys.executable, *what, *inputs, "--output", str(output), *options]
    with output.with_name(f"{step}_{output.name}.log").open("w") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=True)
    return time.monotonic() - started


def _accuracy(report: ReportManifest, score: str, *precisions: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for precision in precisions:
        row = report.accuracy.row(precision)
        found[f"{score}_{precision}"] = row.score_pct
        if row.comparison is not None:
            found[f"delta_points_{precision}"] = row.comparison.delta_points
            found[f"drop_upper_points_{precision}"] = row.comparison.drop_upper_points
        found["num_images"] = row.num_images
    return found


def export() -> None:
    """`python -m components.export`, which also leaves the plan of INT8 everywhere, beside its output."""
    compile_candidate = TensorRTBackend.compile

    def keep_first(backend: TensorRTBackend, name: str, excluded: tuple[str, ...]) -> Compiled:
        compiled = compile_candidate(backend, name, excluded)
        if name == "INT8":
            shutil.copyfile(compiled.file, backend.folder.parents[1] / _EVERYWHERE)
        return compiled

    with patch.object(TensorRTBackend, "compile", keep_first):
        EXPORT.command()()


def _speeds(bundle: Artifact[BundleManifest], chosen: str, batch_size: int, turns: int) -> dict[str, Any]:
    """Images per second of every engine, in turns, also without copies: the images lie on the GPU, as behind DALI."""
    shapes = bundle.manifest.shapes
    runners: dict[str, Runner] = {
        plan.precision: TensorRTRunner(bundle.file(plan.file), shapes, plan) for plan in bundle.manifest.engines
    }
    runners["int8_everywhere"] = TensorRTRunner(bundle.path.with_name(_EVERYWHERE), shapes)
    found: dict[str, Any] = {}
    ratios = {}
    for batch, suffix, with_transfers in ((1, "", True), (batch_size, "", True), (batch_size, "_no_copies", False)):
        measured = [
            {
                name: runner.measure(batch, **_TIMES, with_transfers=with_transfers).images_per_s
                for name, runner in runners.items()
            }
            for _ in range(turns)
        ]
        end = f"b{batch}{suffix}"
        for name in runners:
            found[f"images_per_s_{name}_{end}"] = statistics.median(turn[name] for turn in measured)
        for other in ("fp16", "int8_everywhere"):
            ratios[f"chosen_over_{other}_{end}"] = statistics.median(turn[chosen] / turn[other] for turn in measured)
    for runner in runners.values():
        runner.close()
    return found | ratios


def _measures(rows: list[dict[str, Any]]) -> dict[str, float]:
    over_best = [row["chosen_over_fp16_b128"] for row in rows]
    # INT8 everywhere that is known to lose more than the budget is no aim
    aims = [row for row in rows if row["within_budget"] or row["int8_layers"] < row["layers"]]
    over_best += [row["chosen_over_int8_everywhere_b128"] for row in aims]
    return {
        "num_networks": len(rows),
        "chosen_over_best_b128_min": min(over_best),
        "chosen_over_fp16_b128_geomean": math.exp(
            statistics.fmean(math.log(row["chosen_over_fp16_b128"]) for row in rows)
        ),
        "search_seconds_max": max(row["search_seconds"] for row in rows),
    }


if __name__ == "__main__":
    main()
