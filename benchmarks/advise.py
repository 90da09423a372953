"""Rows that `enginery advise` is fitted on and judged by: measured here, published, and held out of the fit."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS
from components.common.contracts.records import PRECISIONS
from enginery.benchmark.table import published_rows

_HELD_OUT = Path(__file__).with_name("advise_heldout.json")
_PUBLISHED = Path(__file__).with_name("advise_published.csv")
_GPUS = {"NVIDIA H200": "H200", "NVIDIA H100 80GB HBM3": "H100", "Tesla V100": "V100", "Tesla P4": "P4"}
# The whitepaper's networks, by the names of torchvision.
_NETWORKS = {"AlexNet": "alexnet", "GoogLeNet": "googlenet", "ResNet-50": "resnet50", "VGG-19": "vgg19"}
_ENGINE_BATCHES = (1, 8, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Images per second of one network on one device; `published` if others measured it."""

    device: str
    workload: str
    """train or serve."""
    precision: str
    network: str
    image_size: int
    """Side, in pixels."""
    batch: int
    images_per_s: float
    memory_gb: float | None = None
    """Peak of a training on one GPU, in 10^9 bytes; None where it was not measured."""
    source: str
    published: bool = False


def measured_rows(results: Path = RESULTS) -> list[Row]:
    """Rows of benchmarks/results: engines of one model, the table of trained networks, training on one GPU."""
    rows: list[Row] = []
    for path in sorted(results.glob("h[12]00/*.json")):
        result = json.loads(path.read_text())
        device = _GPUS[result["machine"]["gpu"]] if result["machine"]["gpu"] else ""
        for kind, read in (("engines_", _engine_rows), ("networks", _network_rows), ("train_", _training_rows)):
            if path.name.startswith(kind) and not path.name.startswith("engines_command"):
                rows.extend(read(result, device, f"{path.parent.name}/{path.name}"))
    return rows


def _engine_rows(result: dict[str, Any], device: str, source: str) -> Iterator[Row]:
    """Of benchmarks/engines.py, whose networks take 224 px; copies to and from the GPU count."""
    for precision in PRECISIONS:
        for batch in _ENGINE_BATCHES:
            speed = result["measures"].get(f"engine_images_per_s_{precision}_b{batch}")
            if speed:
                yield Row(
                    device=device,
                    workload="serve",
                    precision=precision,
                    network=result["name"].removeprefix("engines_"),
                    image_size=224,
                    batch=batch,
                    images_per_s=speed,
                    source=source,
                )


def _network_rows(result: dict[str, Any], device: str, source: str) -> Iterator[Row]:
    for run in result["runs"]:
        for precision in PRECISIONS:
            for batch in (1, 128):
                yield Row(
                    device=device,
                    workload="serve",
                    precision=precision,
                    network=run["network"],
                    image_size=run["image_size"],
                    batch=batch,
                    images_per_s=run[f"images_per_s_{precision}_b{batch}"],
                    source=source,
                )


def _training_rows(result: dict[str, Any], device: str, source: str) -> Iterator[Row]:
    for run in result["runs"]:
        if "synthetic" not in run or run["cell"]["num_processes"] != 1:
            continue
        yield Row(
            device=device,
            workload="train",
            precision=run["cell"]["precision"],
            network=run["cell"]["architecture"],
            image_size=run["cell"]["image_size"],
            batch=run["cell"]["batch_size"],
            images_per_s=run["synthetic"]["images_per_s"],
            memory_gb=run["memory_gb"],
            source=source,
        )


def published() -> list[Row]:
    """The whitepaper's rows of V100 and P4, and those of advise_published.csv."""
    rows = [
        Row(
            device=_GPUS[row.device],
            workload="serve",
            precision="int8" if row.precision == "INT8" else "fp16",
            network=_NETWORKS[row.network],
            image_size=224,
            batch=row.batch,
            images_per_s=row.images_per_s,
            source='whitepaper "NVIDIA deep learning platform", 2018',
            published=True,
        )
        for row in published_rows(tuple(_NETWORKS), (1, 2, 4, 8, 64, 128))
        if row.device in _GPUS
    ]
    with _PUBLISHED.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            texts = {name: line[name] for name in ("device", "workload", "precision", "network", "source")}
            numbers: dict[str, Any] = {name: int(line[name]) for name in ("image_size", "batch")}
            rows.append(Row(**numbers | texts, images_per_s=float(line["images_per_s"]), published=True))
    return rows


def why_held_out(row: Row) -> str:
    """Return what holds a row out of the fit: "device", "network" or "batch"; empty if the fit may see it."""
    held_out = json.loads(_HELD_OUT.read_text())
    if row.published or row.device in held_out["devices"]:
        return "device"
    if row.network in held_out["networks"]:
        return "network"
    return "batch" if row.batch in held_out["batch_sizes"] else ""


def fit_rows() -> list[Row]:
    """All rows that a fit may see."""
    return [row for row in measured_rows() if not why_held_out(row)]


def held_out_rows() -> list[Row]:
    """All rows that judge a fit."""
    return [row for row in (*measured_rows(), *published()) if why_held_out(row)]
