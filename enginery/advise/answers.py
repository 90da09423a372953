"""What each GPU of the table would do with a model: speed, numbers of GPUs, memory, energy, cost, and how to run it."""

import csv
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import BundleManifest, load
from components.common.runtimes.counting import count_model, count_onnx, training_memory
from components.common.runtimes.onnx_files import read_onnx
from enginery.advise.roofline import (
    Device,
    Prediction,
    Work,
    devices,
    interval,
    load_coefficients,
    predict,
    predict_training,
)

FITTED_ON = "H200"
PRICES = Path(__file__).with_name("prices.csv")
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_STREAMS = (1, 2, 4)
_ENOUGH = 0.97  # of the highest rate: smaller batches and fewer streams answer sooner
_SHARED = 0.5  # of a GPU: a load of at most that leaves room for others
_MAX_PRICES_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of each GPU."""

    model: str
    """A network by name, an ONNX file, or a bundle."""
    image_size: int | None = None
    """Side in pixels; None takes that of the file, or 224."""
    p99_s: float = 0.007
    """Longest time of 99 % of the requests."""
    qps: float | None = None
    """Images per second to serve."""
    batch: int = 256
    """Images of a training step on each GPU."""
    images: int | None = None
    """Of an epoch."""
    epochs: int = 90
    deadline_s: float | None = None
    budget: float | None = None
    """In the unit of `prices`: per hour for serving, of the whole training."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Per hour of one GPU."""


def read_prices(file: Path) -> dict[str, float]:
    """Prices per hour by GPU, of a CSV file with the columns device and usd_per_hour (of whatever unit).

    Raises:
        UserError: it can't be read, names an unknown GPU, or a price is no positive number.
    """
    problem = ""
    prices: dict[str, float] = {}
    try:
        with file.open("rb") as opened:
            content = opened.read(_MAX_PRICES_BYTES + 1)
        if len(content) > _MAX_PRICES_BYTES:
            problem = f"it has more than {_MAX_PRICES_BYTES:,} bytes"
        for row in [] if problem else csv.DictReader(io.StringIO(content.decode())):
            name, price = row.get("device") or "", float(row.get("usd_per_hour") or "nan")
            if name not in devices():
                problem = f"{name!r} is none of {', '.join(devices())}"
            elif not 0 < price < math.inf:
                problem = f"the price of {name} is no positive number"
            prices[name] = price
    except (OSError, ValueError, csv.Error) as error:
        problem = str(error)
    if problem or not prices:
        raise UserError(
            f"{file}: {problem or 'no row'}; write a line `device,usd_per_hour` and one such as `H100,2.5` per GPU",
            code="invalid-prices",
            setting="--prices",
        )
    return prices


def counted(question: Question) -> tuple[Work, str, int]:
    """Return the model's work, its architecture ("" for an ONNX file), and the side of its images.

    Raises:
        UserError: it is no network, file or bundle, or can't be counted.
    """
    path = Path(question.model)
    if path.is_dir():
        manifest = load(path, BundleManifest).manifest
        size = manifest.image_shapes.height
        return Work(count_onnx(path / manifest.models["fp32"]), size), manifest.architecture, size
    if path.suffix == ".onnx":
        inputs = read_onnx(path).graph.input[:1]
        sides = [each.dim_value for graph_input in inputs for each in graph_input.type.tensor_type.shape.dim[2:]]
        size = question.image_size or max(sides, default=0) or 224
        return Work(count_onnx(path), size), "", size
    size = question.image_size or 224
    return Work(count_model(question.model, size), size), question.model, size


def serving(question: Question) -> list[dict[str, Any]]:
    """One row for each GPU: the fastest engine whose requests are answered in time.

    A request may come when a batch has just begun: it waits for a free stream, then for its own batch.
    """
    work, _, _ = counted(question)
    fitted, measures = load_coefficients()
    rows = []
    for device in devices().values():
        best: tuple[str, int, int, Prediction] | None = None
        rates = {}
        for precision, coefficients in fitted.items():
            found = _fastest(list(_in_time(work, device, precision, coefficients, question.p99_s)))
            rates[precision] = found[2].images_per_s if found else None
            if found and (best is None or found[2].images_per_s > best[3].images_per_s):
                best = (precision, *found)
        row: dict[str, Any] = {"gpu": device.device, "images_per_s_by_precision": rates}
        if best is None:
            rows.append(row | {"images_per_s": None, "limit": "latency: no batch is answered in time"})
            continue
        precision, batch, streams, prediction = best
        errors = measures["log_error_90" if device.device == FITTED_ON else "log_error_90_other_device"]
        low, high = interval(prediction.images_per_s, errors[precision])
        row |= {"precision": precision, "batch": batch, "streams": streams}
        row |= {"images_per_s": prediction.images_per_s, "low": low, "high": high}
        row |= {"p99_ms": 1e3 * _answer_s(prediction, batch), "limit": prediction.limit}
        row |= {"busy_pct": 100 * prediction.busy_share}
        row |= {"memory_gb": work.memory_bytes(precision, batch, streams) / 1e9}
        row |= {"images_per_s_per_w": prediction.images_per_s / device.power_w}
        if question.qps:
            row["num_gpus"] = [math.ceil(question.qps / high), math.ceil(question.qps / low)]
        if device.device in question.prices:
            price = question.prices[device.device]
            row["cost_per_million"] = price / prediction.images_per_s / 3600 * 1e6
            row["cost_per_hour"] = price * row["num_gpus"][1] if question.qps else price
        row["sharing"], row["why"] = _sharing(device, prediction, streams, low, question.qps)
        rows.append(row)
    return _with_max_q(rows, "cost_per_hour", question.budget)


def _in_time(
    work: Work, device: Device, precision: str, fitted: Any, p99_s: float
) -> Iterator[tuple[int, int, Prediction]]:
    for streams in _STREAMS:
        for batch in _BATCHES:
            prediction = predict(work, device, precision, batch, fitted, streams)
            fits = work.memory_bytes(precision, batch, streams) <= 1e9 * device.memory_gb
            if fits and _answer_s(prediction, batch) <= p99_s:
                yield batch, streams, prediction


def _fastest(found: list[tuple[int, int, Prediction]]) -> tuple[int, int, Prediction] | None:
    """The first, of fewest streams and images, that is as fast as any."""
    highest = max((prediction.images_per_s for _, _, prediction in found), default=0.0)
    return next((each for each in found if each[2].images_per_s >= _ENOUGH * highest), None)


def _answer_s(prediction: Prediction, batch: int) -> float:
    return prediction.batch_s + batch / prediction.images_per_s


def _sharing(device: Device, prediction: Prediction, streams: int, low: float, qps: float | None) -> tuple[str, str]:
    """MIG, MPS or neither, and the reason."""
    load = qps / low if qps else 1.0
    if load <= _SHARED and device.mig_instances:
        parts = math.ceil(load * device.mig_instances)
        return "MIG", f"{parts} of {device.mig_instances:.0f} parts carry the load; others run apart on the rest"
    if load <= _SHARED:
        return "MPS", f"the load takes {100 * load:.0f} % of it; processes of others can use the rest, not isolated"
    busy = 100 * prediction.busy_share
    return "neither", f"{streams} stream{'s' * (streams > 1)} of one process keep it {busy:.0f} % busy"


def training(question: Question) -> list[dict[str, Any]]:
    """One row for each GPU: training in 16 bits with SGD on one, and how many meet the deadline.

    Raises:
        UserError: of an ONNX file no training is known.
    """
    work, architecture, size = counted(question)
    if not architecture:
        raise UserError(
            f"{question.model}: an ONNX file says nothing of its training; give the network's name",
            code="not-trainable",
            setting="MODEL",
        )
    memory = training_memory(architecture, size, half=True)
    fitted, measures = load_coefficients()
    rows = []
    for device in devices().values():
        largest = memory.largest_batch(int(1e9 * device.memory_gb))
        batch = min(question.batch, largest)
        row: dict[str, Any] = {"gpu": device.device, "fits": largest >= question.batch, "largest_batch": largest}
        if not batch:
            rows.append(row | {"images_per_s": None, "limit": "memory: not one image fits"})
            continue
        factor = measures["training_bytes_factor"]
        prediction = predict_training(work, device, batch, memory.per_image_bytes, fitted["fp16"], factor)
        # One network on one GPU says nothing about others: the wider interval everywhere.
        low, high = interval(prediction.images_per_s, measures["log_error_90_other_device"]["fp16"])
        row |= {"precision": "fp16", "batch": batch, "memory_gb": memory.needed_bytes(batch) / 1e9}
        row |= {"images_per_s": prediction.images_per_s, "low": low, "high": high, "limit": prediction.limit}
        row |= {"images_per_s_per_w": prediction.images_per_s / device.power_w}
        if question.images:
            hours, most = (question.images * question.epochs / speed / 3600 for speed in (high, low))
            expected = question.images * question.epochs / prediction.images_per_s / 3600
            row |= {"hours_on_one": expected, "hours_on_one_range": [hours, most]}
            row |= {"kwh_at_most": expected * device.power_w / 1000}
            if question.deadline_s:
                deadline_h, scaling = question.deadline_s / 3600, measures["training_scaling"]
                row["num_gpus"] = [_num_gpus(hours, deadline_h, scaling), _num_gpus(most, deadline_h, scaling)]
            if device.device in question.prices:
                row["cost"] = expected * question.prices[device.device]
        rows.append(row)
    return _with_max_q(rows, "cost", question.budget)


def _num_gpus(hours: float, deadline_h: float, scaling: float) -> int:
    """Several reach `scaling` of their number's speed."""
    return 1 if hours <= deadline_h else math.ceil(hours / deadline_h / scaling)


def _with_max_q(rows: list[dict[str, Any]], cost: str, budget: float | None) -> list[dict[str, Any]]:
    """Mark the GPU of most images per second and watt among those within the budget."""
    within = [
        row
        for row in rows
        if row["images_per_s"] and (budget is None or (row.get(cost) is not None and row[cost] <= budget))
    ]
    best = max(within, key=lambda row: float(row["images_per_s_per_w"]), default=None)
    return [row | {"max_q": row is best} for row in rows]
