"""Rows that `enginery advise` is fitted on and judged by: measured here, published, and held out of the fit."""

import csv
import functools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from scipy.optimize import least_squares

from benchmarks.results import RESULTS, write_result
from components.common.contracts.manifests import write_atomically
from components.common.contracts.records import PRECISIONS
from components.common.runtimes.counting import count_model, training_memory
from enginery.advise.roofline import COEFFICIENTS, Coefficients, Device, Work, devices, predict, predict_training
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

    @property
    def sourced(self) -> bool:
        """True but for published figures whose page was not found: they judge apart."""
        return not self.source.startswith("no source")


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


# Where the fit starts and what it is held to where rows say little: FP32, FP16, INT8.
_START = {
    "conv_share": (0.6, 0.65, 0.6),
    "grouped_share": (0.3, 0.1, 0.1),
    "matmul_share": (0.4, 0.25, 0.1),
    "depthwise_share": (0.1, 0.1, 0.1),
    "bandwidth_share": (0.6, 0.6, 0.5),
    "depthwise_bandwidth_share": (0.4, 0.35, 0.3),
    "other_bandwidth_share": (0.5, 0.5, 0.4),
    "kernel_s": (4e-6, 4e-6, 4e-6),
    "other_kernel_s": (5e-6, 5e-6, 5e-6),
    "group_s": (4e-6, 4e-6, 4e-6),
    "sum_s": (3e-6, 2e-6, 1.5e-6),
    "start_s": (2e-5, 2e-5, 2e-5),
}
# Standard deviations of logarithms, assumed: of a row's error, of a coefficient from its start, and of a precision's
# coefficient from that of all precisions; how much worse an unseen device is.
_ROW, _COMMON, _OWN, _DEVICE = 0.12, 0.25, 0.15, 0.5


@functools.cache
def _work(network: str, image_size: int) -> Work:
    return Work(count_model(network, image_size), image_size)


def _sheet(row: Row) -> Device:
    return devices()["A100-40" if row.device == "A100" else row.device]


def _fit(rows: list[Row]) -> dict[str, Coefficients]:
    """Most probable coefficients of serving rows, with few far-off rows, near their starts and near each other."""
    starts, size = np.log(np.array(list(_START.values()))).T, len(_START)

    def coefficients(values: np.ndarray) -> dict[str, Coefficients]:
        own = starts + values[:size] + values[size:].reshape(len(PRECISIONS), size)
        return {
            name: Coefficients(**dict(zip(_START, np.exp(each).tolist(), strict=True)))
            for name, each in zip(PRECISIONS, own, strict=True)
        }

    def residuals(values: np.ndarray) -> np.ndarray:
        fitted = coefficients(values)
        errors = [_log_error(row, fitted[row.precision]) / _ROW for row in rows]
        return np.concatenate([errors, values[:size] / _COMMON, values[size:] / _OWN])

    num_values = size * (1 + len(PRECISIONS))
    return coefficients(least_squares(residuals, np.zeros(num_values), loss="soft_l1", max_nfev=40).x)


def _log_error(row: Row, fitted: Coefficients) -> float:
    work = _work(row.network, row.image_size)
    return math.log(predict(work, _sheet(row), row.precision, row.batch, fitted).images_per_s / row.images_per_s)


@functools.cache
def _per_image_bytes(network: str, image_size: int) -> int:
    return training_memory(network, image_size, half=True).per_image_bytes


def _training_error(row: Row, fitted: Coefficients, factor: float) -> float:
    work, per_image_bytes = _work(row.network, row.image_size), _per_image_bytes(row.network, row.image_size)
    speed = predict_training(work, _sheet(row), row.batch, per_image_bytes, fitted, factor).images_per_s
    return math.log(speed / row.images_per_s)


@click.command()
@click.option("--machine", required=True, help="Plain name of this machine.")
def main(machine: str) -> None:
    """Fit, write enginery/advise/coefficients.json, and judge it on what was held out."""
    rows = fit_rows()
    serving = [row for row in rows if row.workload == "serve"]
    fitted = _fit(serving)
    left_out: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    for network in sorted({row.network for row in serving}):  # errors on networks not seen
        others = _fit([row for row in serving if row.network != network])
        for row in serving:
            if row.network == network:
                left_out[row.precision].append(_log_error(row, others[row.precision]))
        print(f"without {network}", flush=True)
    training = [row for row in rows if row.workload == "train" and row.precision == "fp16"]
    factors = np.geomspace(0.2, 30, 100)
    medians = [np.median([_training_error(row, fitted["fp16"], factor) for row in training]) for factor in factors]
    scaling = json.loads((RESULTS / "h200-x4/train_resnet50.json").read_text())["measures"]["train_scaling"]
    widths = {precision: float(np.quantile(np.abs(errors), 0.9)) for precision, errors in left_out.items()}
    measures: dict[str, Any] = {
        "training_bytes_factor": float(factors[int(np.argmin(np.abs(medians)))]),
        "training_scaling": scaling,
        "log_error_90": widths,
        "log_error_90_other_device": {name: math.hypot(width, _DEVICE) for name, width in widths.items()},
    }
    content = {"precisions": {name: asdict(value) for name, value in fitted.items()}, "measures": measures}
    write_atomically(COEFFICIENTS, (json.dumps(content, indent=1) + "\n").encode())
    errors = np.abs(np.expm1([error for each in left_out.values() for error in each]))
    _judge(
        machine,
        fitted,
        measures,
        {
            "advise_left_out_error_median_pct": 100 * float(np.median(errors)),
            "advise_left_out_error_p90_pct": 100 * float(np.quantile(errors, 0.9)),
        },
    )


def _judge(machine: str, fitted: dict[str, Coefficients], fit: dict[str, Any], measures: dict[str, float]) -> None:
    runs: list[dict[str, Any]] = []
    errors: dict[str, list[tuple[float, bool]]] = {}
    for row in held_out_rows():
        reason = "other_device" if why_held_out(row) == "device" else "same_device"
        train = row.workload == "train"
        error = (
            _training_error(row, fitted["fp16"], fit["training_bytes_factor"])
            if train
            else _log_error(row, fitted[row.precision])
        )
        width = fit["log_error_90_other_device" if train or reason == "other_device" else "log_error_90"]
        covered = abs(error) <= width[row.precision]
        keys = (reason, row.device if reason == "other_device" else row.precision, "all")
        for key in keys if row.sourced else ("unsourced",):
            errors.setdefault(key, []).append((100 * abs(math.expm1(error)), covered))
        runs.append({**asdict(row), "held_out": reason, "predicted_over_measured": round(math.exp(error), 4)})
    for key, values in sorted(errors.items()):
        suffix = "" if key == "all" else f"_{key.lower()}"
        numbers = [error for error, _ in values]
        measures[f"advise_error_median_pct{suffix}"] = float(np.median(numbers))
        measures[f"advise_error_p90_pct{suffix}"] = float(np.quantile(numbers, 0.9))
        measures[f"advise_interval_coverage_pct{suffix}"] = 100 * float(np.mean([inside for _, inside in values]))
        measures[f"num_rows{suffix}"] = len(values)
    gains = [100 * abs(math.expm1(error)) for error in _stream_errors(fitted)]
    measures["advise_streams_gain_error_median_pct"] = float(np.median(gains))
    measures["advise_streams_gain_error_p90_pct"] = float(np.quantile(gains, 0.9))
    write_result(
        machine,
        "advise",
        measures=measures,
        runs=runs,
        notes="Errors of predicted images/s over measured ones on rows that the fit did not see (advise_heldout.json): "
        "same_device are unseen networks and batches on the H200, other_device are GPUs left out whole, published rows "
        "among them; unsourced are published rows whose page was not found, which count nowhere else. left_out are "
        "rows of the fit, with their network left out. Intervals: 90 % of the absolute logarithmic errors of left_out "
        "by precision, widened by an assumed 0.5 on other devices and for training. streams_gain: images/s of 4 "
        "streams over 1 at batches 8 and 128, predicted over measured, on the H200; streams were not fitted.",
    )


def _stream_errors(fitted: dict[str, Coefficients]) -> Iterator[float]:
    """Logarithms of predicted over measured gains of four streams over one."""
    for path in sorted(RESULTS.glob("h200/engines_*.json")):
        result = json.loads(path.read_text())
        for precision in PRECISIONS:
            for batch in (8, 128):
                key = f"engine_images_per_s_{precision}_b{batch}_streams"
                if f"{key}4" in result["measures"]:
                    work = _work(result["name"].removeprefix("engines_"), 224)
                    args = (work, devices()["H200"], precision, batch, fitted[precision])
                    gain = predict(*args, streams=4).images_per_s / predict(*args).images_per_s
                    yield math.log(gain * result["measures"][f"{key}1"] / result["measures"][f"{key}4"])


if __name__ == "__main__":
    main()
