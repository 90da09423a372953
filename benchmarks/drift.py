"""False alarms on validation's own images, and the requests after which a change of the images alarms, by a server.

    enginery data textures textures --num-classes 8 --num-train 8000 --num-val 6000 --image-size 64
    python -m components.preprocess --data textures --output dataset
    python -m benchmarks.drift --dataset dataset --machine cpu-2core

A small network learns the training split and is exported and validated by the steps. The baseline is that of one half
of the validation split; draws of 1,000 images without replacement come from the other.
"""

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter
from torch import nn
from tritonclient import grpc

from benchmarks.results import Results, result_options
from benchmarks.serving_parity import ask
from benchmarks.shards import validation_images
from components.common.contracts.manifests import (
    MANIFEST,
    Artifact,
    BundleManifest,
    DatasetManifest,
    ReportManifest,
    load,
    seal,
)
from components.common.contracts.settings import resolve
from components.common.contracts.transforms import Augmentation, ShapeSpec, TransformSpec, transform_for
from components.common.data.baseline import WINDOW, Baseline, baseline_file, make_baseline
from components.common.data.image_files import encode_image, rgb
from components.common.data.loader import Loader
from components.common.process.steplog import StepLog
from components.export.config import ExportConfig
from components.export.onnx_export import export_onnx
from components.export.run import run as export
from components.validate.config import ValidateConfig
from components.validate.run import image_sizes, observed_values, open_devices, predict_validation
from components.validate.run import run as validate
from enginery.serving.drift import read_metrics
from enginery.serving.installation import install_triton
from enginery.serving.repository import RepositoryConfig, write_repository
from enginery.serving.server import Ports, Server
from enginery.serving.sources import ModelSource

NAME = "textures"
PORTS = Ports(http=18300, grpc=18301, metrics=18302)
NUM_DRAWS = 100
NUM_REPEATS = 10
BATCH = 100
MOST_REQUESTS = 2000  # after a change
NO_ALARM = 1_000_000  # in place of a number
NUM_EPOCHS = 30


CHANGES: Mapping[str, Callable[[Image.Image], Image.Image]] = {
    "darker": lambda image: ImageEnhance.Brightness(image).enhance(0.8),
    "blur": lambda image: image.filter(ImageFilter.GaussianBlur(1.0)),  # pixels
}


class Live:
    """A server and the images that it is sent."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client = grpc.InferenceServerClient(f"127.0.0.1:{PORTS.grpc}")

    def send(self, images: Sequence[bytes]) -> None:
        """Send them, and wait until they are counted."""
        wanted = self._num_counted() + len(images)
        for start in range(0, len(images), BATCH):
            ask(self._client, NAME, list(images[start : start + BATCH]))
        while self._num_counted() < wanted:
            time.sleep(0.05)

    def alarms(self) -> list[str]:
        """Statistics of which a distance is above its threshold, as the sample alert has it."""
        found = self._metrics()
        above = [series for series in found if found[series] > found.get(series.replace("{", "_threshold{"), math.inf)]
        return sorted({series.split('statistic="')[1].split('"')[0] for series in above})

    def _num_counted(self) -> float:
        found = self._metrics()
        return sum(found[series] for series in found if "_images_total{" in series and 'statistic="class"' in series)

    def _metrics(self) -> dict[str, float]:
        lines = read_metrics(PORTS.own_metrics, timeout_s=60).splitlines()
        parts = (line.rpartition(" ") for line in lines if line.startswith("enginery_drift_"))
        return {series: float(value) for series, _, value in parts}


@contextmanager
def serving(source: ModelSource, folder: Path) -> Iterator[Live]:
    """A real Triton on this machine."""
    repository = write_repository(source, folder / "models", RepositoryConfig())
    server = Server.start(install_triton(print), repository.path, PORTS)
    try:
        server.wait_until_ready()
        yield Live(server)
    finally:
        server.stop()


def with_baseline(report: Artifact[ReportManifest], baseline: Baseline, folder: Path) -> Artifact[ReportManifest]:
    """The report with another baseline."""
    shutil.copytree(report.path, folder, ignore=shutil.ignore_patterns(MANIFEST))
    (folder / baseline_file(baseline.precision)).write_text(baseline.model_dump_json())
    found = report.manifest
    parts: dict[str, Any] = {"accuracy": found.accuracy, "benchmark": found.benchmark}
    return seal(folder, ReportManifest, inputs=found.inputs, config=ValidateConfig(), **parts)


def requests_until_alarm(live: Live, usual: Sequence[bytes], other: Sequence[bytes]) -> tuple[int, list[str]]:
    """Images after the change until the server alarms, and what does; NO_ALARM for none in 2,000."""
    live.send(usual)
    for start, end in ((0, WINDOW // 2), (WINDOW // 2, 3 * WINDOW // 2)):  # to the end of a window
        live.send(other[start:end])
        if found := live.alarms():
            return end, found
    live.send(other[3 * WINDOW // 2 :])
    live.send(usual)  # to the end of the window
    return NO_ALARM, []


def small_network(dataset: Artifact[DatasetManifest], transform: TransformSpec) -> nn.Module:
    """Four convolutions that have learned the training split, in evaluation mode."""
    torch.manual_seed(0)
    widths = (3, 32, 64, 128, 256)
    stages = [
        layer
        for inputs, outputs in pairwise(widths)
        for layer in (nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
    ]
    head = nn.Linear(widths[-1], len(dataset.manifest.classes))
    net = nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
    loader = Loader(dataset, "train", transform, batch_size=64, augmentation=Augmentation(min_area=0.5))
    optimizer = torch.optim.AdamW(net.parameters(), 0.003)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.003, total_steps=NUM_EPOCHS * len(loader))
    for epoch in range(NUM_EPOCHS):
        for batch in loader:
            loss = nn.functional.cross_entropy(net(batch.images), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1} of {NUM_EPOCHS}: loss {loss.item():.3f}", flush=True)
    return net.eval()


def proved_model(dataset: Artifact[DatasetManifest], folder: Path) -> tuple[Path, Path]:
    """Folders of its bundle and of the report on it, in a folder that may have them already."""
    if (folder / "report" / MANIFEST).is_file():
        return folder / "bundle", folder / "report"
    folder.mkdir(parents=True, exist_ok=True)
    side = dataset.manifest.statistics.median_side
    transform = transform_for(side, resize_ratio=1.0)
    export_onnx(small_network(dataset, transform), folder / "small.onnx", ShapeSpec(height=side, width=side))
    settings = {"tensorrt": "off", "resize_ratio": 1.0, "num_ranking_images": 0, "mixed_engines": 0}
    places = {"model": folder / "small.onnx", "dataset": dataset.path, "output": folder / "bundle"}
    export(resolve(ExportConfig, "export", settings), StepLog("export"), **places)
    quick = resolve(ValidateConfig, "validate", {"benchmark_seconds": 0.2})
    places = {"bundle": folder / "bundle", "dataset": dataset.path, "output": folder / "report"}
    print(validate(quick, StepLog("validate"), **places), flush=True)
    return folder / "bundle", folder / "report"


@click.command()
@click.option("--dataset", "folder", required=True, type=click.Path(exists=True, path_type=Path), help="Of preprocess.")
@click.option("--model", default="model", type=click.Path(path_type=Path), help="Folder for the network; reused.")
@result_options
def main(folder: Path, model: Path, results: Results) -> None:
    """Measure and write drift.json."""
    data = load(folder, DatasetManifest)
    with tempfile.TemporaryDirectory() as temporary:
        bundle, report = (
            load(path, kind)
            for path, kind in zip(proved_model(data, model), (BundleManifest, ReportManifest), strict=True)
        )
        config = ValidateConfig()
        own = predict_validation(config, open_devices(config, bundle, data), bundle, data, StepLog("validate"))["int8"]
        values = observed_values(own, image_sizes(data))
        random = np.random.default_rng(0)
        first, other = np.array_split(random.permutation(own.num_images), 2)
        baseline = make_baseline("int8", {name: each[first] for name, each in values.items()})
        source = ModelSource(
            name=NAME,
            version="",
            precision="int8",
            bundle=bundle,
            report=with_baseline(report, baseline, Path(temporary) / "half"),
            digests={"bundle": bundle.digest},
        )
        images = np.array(list(validation_images(data)), dtype=object)
        with serving(source, Path(temporary)) as live:
            draws = []
            for _ in range(NUM_DRAWS):
                live.send(images[random.choice(other, WINDOW, replace=False)].tolist())
                draws.append(live.alarms())
            print(f"the server alarmed in {sum(map(bool, draws))} of {NUM_DRAWS} draws: {draws}", flush=True)
            changes = {name: live_changes(live, images, own.labels, other, name, random) for name in (*CHANGES, "mix")}
    measures = {
        "num_validation_images": own.num_images,
        "top1_pct": own.score_pct,
        "alarms_in_100_draws": sum(map(bool, draws)),
        **{f"requests_until_alarm_{name}": max(each["requests"] for each in found) for name, found in changes.items()},
    }
    results.write(
        "drift",
        measures=measures,
        runs=[{"alarms_by_draw": draws}, changes],
        notes=f"Four convolutions at {bundle.manifest.shapes.height} px in INT8 behind Triton; the baseline is of "
        f"{baseline.num_images} images. Changes begin in the middle of a window of {WINDOW} images, {NUM_REPEATS} "
        "times each; requests_until_alarm is the most images that were needed: darker (0.8 times), blur (Gaussian, 1 "
        "px), mix (half of the classes three times as frequent as the others). An alarm is what the sample rule asks, "
        "without its waiting.",
    )


def live_changes(
    live: Live, images: np.ndarray, labels: np.ndarray, other: np.ndarray, name: str, random: np.random.Generator
) -> list[dict[str, Any]]:
    """Requests until an alarm, several times."""
    weights = np.where(labels[other] < labels.max() / 2, 3.0, 1.0) if name == "mix" else np.ones(len(other))
    found = []
    for _ in range(NUM_REPEATS):
        usual = images[random.choice(other, WINDOW // 2, replace=False)].tolist()
        chosen = images[random.choice(other, MOST_REQUESTS, p=weights / weights.sum())].tolist()
        if name in CHANGES:
            chosen = [encode_image(CHANGES[name](rgb(image)), "PNG") for image in chosen]  # without losses
        requests, why = requests_until_alarm(live, usual, chosen)
        found.append({"requests": requests, "statistics": why})
        print(f"{name}: {found[-1]}", flush=True)
    return found


if __name__ == "__main__":
    main()
