"""Rows that `enginery advise` is fitted on and judged by: measured here, published, and held out of the fit."""

import csv
import functools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from scipy.optimize import least_squares

from benchmarks.results import RESULTS, Results, result_options
from components.common.contracts.manifests import write_atomically
from components.common.contracts.records import PRECISIONS
from components.common.runtimes.counting import count_model, training_memory
from enginery.advise.roofline import (
    COEFFICIENTS,
    HOST_SHARE,
    Coefficients,
    Device,
    Work,
    devices,
    kernel_seconds,
    predict,
    predict_training,
    training_precision,
)
from enginery.benchmark.table import published_rows

_HELD_OUT = Path(__file__).with_name("advise_heldout.json")
_PUBLISHED = Path(__file__).with_name("advise_published.csv")
_GPUS = {"NVIDIA H200": "H200", "NVIDIA H100 80GB HBM3": "H100", "Tesla V100": "V100", "Tesla P4": "P4"}
# The whitepaper's networks, by the names of torchvision.
_NETWORKS = {"AlexNet": "alexnet", "GoogLeNet": "googlenet", "ResNet-50": "resnet50", "VGG-19": "vgg19"}
_ENGINE_BATCHES = (1, 8, 64, 128)
_TASK_BATCHES = (1, 32)
_NUM_SHAPES = 5  # classes of the images of benchmarks/tasks_gpu.py
_FIT_DEVICES = {"gpu": ("H200",), "cpu": ("2-cores-AVX2", "2-cores-VNNI")}
# Machines of benchmarks/results without a GPU: their clock is that of no data sheet, 3.7 GHz is assumed, and the
# bandwidth of one socket for 32 cores or more.
_TWO_CORES = replace(
    devices()["EPYC-7763"],
    device="2-cores-AVX2",
    num_sms=2.0,
    fp32_tflops=0.237,
    fp16_tflops=0.237,
    int8_tops=0.474,
    bandwidth_gb_per_s=40.0,
)
_SHEETS = devices() | {
    "2-cores-AVX2": _TWO_CORES,
    "2-cores-VNNI": replace(_TWO_CORES, device="2-cores-VNNI", int8_tops=0.947),
    "A100": devices()["A100-40"],
}
# Sides of the images of int8_peers.json, in pixels.
_PEERS_SIZES = {"resnet18": 224, "timm/vit_tiny_patch16_224": 224, "digits": 32}


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
    num_classes: int = 0
    """Of the last layer; 0 for as many as the task usually has."""
    pixel_bytes: float = 12
    """That are copied to the device for a pixel of serving."""
    mig_parts: int | None = None
    """Size of the part of the GPU; None for all of it."""
    source: str
    published: bool = False

    @property
    def sourced(self) -> bool:
        """True but for published figures whose page was not found: they judge apart."""
        return not self.source.startswith("no source")


def measured_rows() -> list[Row]:
    """Rows of benchmarks/results: engines of one model, tables of trained networks, training on one GPU."""
    rows: list[Row] = []
    for path in sorted(RESULTS.glob("h[12]00/*.json")):
        result = json.loads(path.read_text())
        device = _GPUS[result["machine"]["gpu"]] if result["machine"]["gpu"] else ""
        for kind, read in _READERS:
            if path.name.startswith(kind) and not path.name.startswith("engines_command"):
                rows.extend(read(result, device, f"{path.parent.name}/{path.name}"))
    return rows + list(_cpu_rows(json.loads((RESULTS / "cpu-2core/int8_peers.json").read_text())))


def _cpu_rows(result: dict[str, Any]) -> Iterator[Row]:
    """Measurements of benchmarks/int8_cpu.py: batches of 16 by OpenVINO under two instruction sets."""
    for run in result["runs"]:
        for precision in ("fp32", "int8"):
            yield Row(
                device="2-cores-AVX2" if run["instruction_set"] == "AVX2" else "2-cores-VNNI",
                workload="serve",
                precision=precision,
                network=run["architecture"],
                image_size=_PEERS_SIZES.get(run["model"], _PEERS_SIZES.get(run["architecture"], 64)),
                batch=16,
                images_per_s=run[f"images_per_s_{precision}"],
                source="cpu-2core/int8_peers.json",
            )


def _engine_rows(result: dict[str, Any], device: str, source: str) -> Iterator[Row]:
    """Measurements of benchmarks/engines.py, whose networks take 224 px; copies to and from the GPU count."""
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
    """Measurements of benchmarks/networks.py and benchmarks/tasks_gpu.py."""
    for run in result["runs"]:
        task = run.get("task")
        for precision in PRECISIONS:
            for batch in _TASK_BATCHES if task else (1, 128):
                yield Row(
                    device=device,
                    workload="serve",
                    precision=precision,
                    network=f"{task}/{run['network']}" if task else run["network"],
                    num_classes=_NUM_SHAPES if task else 0,
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
            source=source,
        )


_READERS = (
    ("engines_", _engine_rows),
    ("networks", _network_rows),
    ("tasks_", _network_rows),
    ("train_", _training_rows),
)


def measured_memory() -> list[tuple[str, int, str, int, float]]:
    """Network, side of its images, precision, batch on each GPU and peak of the memory in 10^9 bytes of trainings."""
    runs = [run for path in sorted(RESULTS.glob("*/train_*.json")) for run in json.loads(path.read_text())["runs"]]
    names = ("architecture", "image_size", "precision", "batch_size")
    return [(*(run["cell"][name] for name in names), run["memory_gb"]) for run in runs if "memory_gb" in run]


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
            names = ("image_size", "batch", "pixel_bytes", "mig_parts")
            numbers: dict[str, Any] = {name: int(line[name]) for name in names if line[name]}
            rows.append(Row(**numbers | texts, images_per_s=float(line["images_per_s"]), published=True))
    return rows


def why_held_out(row: Row) -> str:
    """Return what holds a row out of the fit: "device", "network" or "batch"; empty if the fit may see it."""
    held_out = json.loads(_HELD_OUT.read_text())
    if row.published or row.device in held_out["devices"]:
        return "device"
    if row.network in held_out["networks" if row.device in _FIT_DEVICES["gpu"] else "cpu_networks"]:
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
    "wide_depthwise_share": (0.004, 0.015, 0.03),
    "bandwidth_share": (0.6, 0.6, 0.5),
    "depthwise_bandwidth_share": (0.4, 0.35, 0.3),
    "other_bandwidth_share": (0.5, 0.5, 0.4),
    "kernel_s": (4e-6, 4e-6, 4e-6),
    "other_kernel_s": (5e-6, 5e-6, 5e-6),
    "group_s": (4e-6, 4e-6, 4e-6),
    "tile_outputs": (4096, 8192, 12288),
    "start_s": (2e-5, 2e-5, 2e-5),
}
# A core has no Tensor Cores to keep busy, and nothing is launched.
_CPU_START = _START | {
    "conv_share": (0.8, 0.8, 0.7),
    "grouped_share": (0.3, 0.3, 0.2),
    "matmul_share": (0.6, 0.6, 0.4),
    "wide_depthwise_share": (0.1, 0.1, 0.1),
    "tile_outputs": (64, 64, 64),
}
_STARTS = {"gpu": _START, "cpu": _CPU_START}
_PRECISIONS = {"gpu": PRECISIONS, "cpu": ("fp32", "int8")}
# Standard deviations of logarithms, assumed: of a row's error, of a coefficient from its start, and of a precision's
# coefficient from that of all precisions.
_ROW, _COMMON, _OWN = 0.12, 0.25, 0.15
_HELD = 0.9  # share of the rows of a new network that a range is to hold


@functools.cache
def _work(network: str, image_size: int, num_classes: int = 0) -> Work:
    return Work(count_model(network, image_size, num_classes))


def _sheet(row: Row) -> Device:
    sheet = _SHEETS[row.device]
    return sheet.part(row.mig_parts) if row.mig_parts else sheet


class _Stack:
    """Rows of one precision as one long list of kernels, so that a fit takes seconds."""

    def __init__(self, rows: list[Row], precision: str) -> None:
        self.rows, self.precision = [row for row in rows if row.precision == precision], precision
        works = [_work(row.network, row.image_size, row.num_classes) for row in self.rows]
        sheets = [_sheet(row) for row in self.rows]
        lengths = [len(work.flops) for work in works]
        self.starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(int)
        self.work: Any = object.__new__(Work)
        for name, value in vars(works[0]).items():
            if isinstance(value, np.ndarray):
                setattr(self.work, name, np.concatenate([getattr(work, name) for work in works]))
        names = [field.name for field in fields(Device) if isinstance(getattr(sheets[0], field.name), float)]
        figures: dict[str, Any] = {
            name: np.repeat([getattr(sheet, name) for sheet in sheets], lengths) for name in names
        }
        self.sheet = replace(sheets[0], **figures)
        self.batch = np.repeat([row.batch for row in self.rows], lengths)
        copied = [row.batch * row.image_size**2 * row.pixel_bytes for row in self.rows]
        link = np.array([1e9 * sheet.host_gb_per_s * HOST_SHARE for sheet in sheets])
        self.copy_s, self.measured_s = copied / link, np.array([row.batch / row.images_per_s for row in self.rows])

    def log_errors(self, fitted: Coefficients) -> np.ndarray:
        """Errors of predicted over measured images/s."""
        arithmetic, memory, waiting = kernel_seconds(self.work, self.sheet, self.precision, self.batch, fitted)
        seconds = np.add.reduceat(np.maximum(arithmetic, memory) + waiting, self.starts) + fitted.start_s
        return np.asarray(np.log(self.measured_s / np.maximum(seconds, self.copy_s)))


def _fit(rows: list[Row], kind: str) -> dict[str, Coefficients]:
    """Most probable coefficients of serving rows, with few far-off rows, near their starts and near each other."""
    precisions, start = _PRECISIONS[kind], _STARTS[kind]
    columns = [PRECISIONS.index(each) for each in precisions]
    starts, size = np.log(np.array(list(start.values()))).T[columns], len(start)
    stacks = [_Stack(rows, precision) for precision in precisions]

    def coefficients(values: np.ndarray) -> list[Coefficients]:
        own = starts + values[:size] + values[size:].reshape(len(precisions), size)
        return [Coefficients(**dict(zip(start, np.exp(each).tolist(), strict=True))) for each in own]

    def residuals(values: np.ndarray) -> np.ndarray:
        fitted = coefficients(values)
        errors = [stack.log_errors(each) / _ROW for stack, each in zip(stacks, fitted, strict=True)]
        return np.concatenate([*errors, values[:size] / _COMMON, values[size:] / _OWN])

    num_values = size * (1 + len(precisions))
    found = coefficients(least_squares(residuals, np.zeros(num_values), loss="soft_l1", max_nfev=60).x)
    return dict(zip(precisions, found, strict=True))


def _log_error(row: Row, fitted: Coefficients) -> float:
    return float(_Stack([row], row.precision).log_errors(fitted)[0])


@functools.cache
def _per_image_bytes(network: str, image_size: int) -> int:
    return training_memory(network, image_size, half=True).per_image_bytes


def _training_error(row: Row, fitted: dict[str, Coefficients], factor: float) -> float:
    work, per_image_bytes = _work(row.network, row.image_size), _per_image_bytes(row.network, row.image_size)
    precision = training_precision(_sheet(row))
    speed = predict_training(work, _sheet(row), row.batch, per_image_bytes, fitted[precision], factor).images_per_s
    return math.log(speed / row.images_per_s)


@dataclass(frozen=True)
class _LeftOut:
    """A row of a network that the fit had not seen."""

    network: str
    log_error: float
    changes: list[float]
    """Of the prediction's logarithm, if the shares and times of another precision are taken: another device's."""


def _left_out(rows: list[Row], kind: str) -> list[_LeftOut]:
    """Each network left out of the fit once."""
    found: list[_LeftOut] = []
    for network in sorted({row.network for row in rows}):
        fitted = _fit([row for row in rows if row.network != network], kind)
        for row in rows:
            if row.network == network:
                errors = {precision: _log_error(row, each) for precision, each in fitted.items()}
                own = errors.pop(row.precision)
                found.append(_LeftOut(network, own, [error - own for error in errors.values()]))
        print(f"{kind} without {network}", flush=True)
    return found


def _widths(left_out: list[_LeftOut]) -> tuple[float, float]:
    """Widths of ranges, as logarithms: on devices of the fit and on others.

    A new network is one more of those left out, which count the same each, and it may be the worst of them: so are
    quantiles of grouped rows corrected for a finite sample (Lee, Barber and Willett, "Distribution-free inference with
    hierarchical data", 2023). Of too few networks it is the largest error. A new device adds what another precision
    changes, as if its kernels differed as much.
    """
    networks = [each.network for each in left_out]
    weights = np.array([1 / networks.count(each) for each in networks])
    num_networks = len(set(networks))

    def quantile(numbers: list[float], weights: np.ndarray, level: float) -> float:
        return float(np.quantile(np.abs(numbers), level, weights=weights, method="inverted_cdf"))

    width = quantile(
        [each.log_error for each in left_out], weights, min(1.0, _HELD * (num_networks + 1) / num_networks)
    )
    num_changes = len(left_out[0].changes)
    changes = [change for each in left_out for change in each.changes]
    return width, math.hypot(width, quantile(changes, np.repeat(weights, num_changes), _HELD))


@click.command()
@result_options
def main(results: Results) -> None:
    """Fit, write enginery/advise/coefficients.json, and judge it on what was held out."""
    kinds: dict[str, dict[str, Coefficients]] = {}
    log_errors: dict[str, float] = {}
    measures: dict[str, float] = {}
    for kind, names in _FIT_DEVICES.items():
        rows = [row for row in fit_rows() if row.workload == "serve" and row.device in names]
        kinds[kind], left_out = _fit(rows, kind), _left_out(rows, kind)
        log_errors[kind], log_errors[f"other_{kind}"] = _widths(left_out)
        errors = 100 * np.abs(np.expm1([each.log_error for each in left_out]))
        measures[f"advise_left_out_error_median_pct_{kind}"] = float(np.median(errors))
        measures[f"advise_left_out_error_p90_pct_{kind}"] = float(np.quantile(errors, 0.9))
        for name in (kind, f"other_{kind}"):
            measures[f"advise_interval_factor_{name}"] = math.exp(log_errors[name])
    training = [row for row in fit_rows() if row.workload == "train" and row.precision == "fp16"]
    factors = np.geomspace(0.2, 30, 100)
    medians = [np.median([_training_error(row, kinds["gpu"], factor) for row in training]) for factor in factors]
    fit: dict[str, Any] = {
        "training_bytes_factor": float(factors[int(np.argmin(np.abs(medians)))]),
        "training_scaling": json.loads((RESULTS / "h200-x4/train_resnet50.json").read_text())["measures"][
            "train_scaling"
        ],
        "log_error_90": log_errors,
    }
    content = {
        "kinds": {
            kind: {name: asdict(value) for name, value in precisions.items()} for kind, precisions in kinds.items()
        },
        "measures": fit,
    }
    write_atomically(COEFFICIENTS, (json.dumps(content, indent=1) + "\n").encode())
    _judge(results, kinds, fit, measures)


def _judge(
    results: Results, kinds: dict[str, dict[str, Coefficients]], fit: dict[str, Any], measures: dict[str, float]
) -> None:
    runs: list[dict[str, Any]] = []
    errors: dict[str, list[tuple[float, bool]]] = {}
    for row in held_out_rows():
        kind, unseen = _sheet(row).kind, why_held_out(row) == "device"
        train = row.workload == "train"
        error = (
            _training_error(row, kinds[kind], fit["training_bytes_factor"])
            if train
            else _log_error(row, kinds[kind][row.precision])
        )
        covered = abs(error) <= fit["log_error_90"][f"other_{kind}" if train or unseen else kind]
        group = f"{'other' if unseen else 'same'}_{kind}"
        keys = [group, f"{group}_{row.precision}", f"{group}_{row.workload}"]
        keys += [f"{row.device.lower()}_part" if row.mig_parts else row.device.lower()] if unseen else []
        for key in keys if row.sourced else ["unsourced"]:
            errors.setdefault(key, []).append((100 * abs(math.expm1(error)), covered))
        runs.append({**asdict(row), "held_out": group, "predicted_over_measured": round(math.exp(error), 4)})
    for key, values in sorted(errors.items()):
        numbers = [error for error, _ in values]
        measures[f"advise_error_median_pct_{key}"] = float(np.median(numbers))
        measures[f"advise_error_p90_pct_{key}"] = float(np.quantile(numbers, 0.9))
        measures[f"advise_interval_coverage_pct_{key}"] = 100 * float(np.mean([inside for _, inside in values]))
        measures[f"num_rows_{key}"] = len(values)
    gains = [100 * abs(math.expm1(error)) for error in _stream_errors(kinds["gpu"])]
    measures["advise_streams_gain_error_median_pct"] = float(np.median(gains))
    measures["advise_streams_gain_error_p90_pct"] = float(np.quantile(gains, 0.9))
    results.write(
        "advise",
        measures=measures,
        runs=runs,
        notes="Errors of predicted images/s over measured ones on rows that the fit did not see (advise_heldout.json): "
        "same_ are unseen networks and batches on the devices of the fit (an H200; two cores), other_ are devices left "
        "out whole, published rows among them; unsourced are published rows whose page was not found, which count "
        "nowhere else. left_out are rows of the fit, with their network left out. interval_factor: ranges go from a "
        "prediction over it to a prediction times it; from left_out, corrected for the number of networks, and on "
        "other devices (other_) and for training widened by what the coefficients of another precision change. "
        "streams_gain: images/s of 4 streams over 1 at batches 8 and 128, predicted over measured, on the H200; "
        "streams were not fitted.",
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
