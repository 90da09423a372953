"""Answers about each GPU of the table for a model: speed, numbers of GPUs, memory, energy, cost, and how to run it."""

import csv
import io
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import MANIFEST, BundleManifest, load
from components.common.runtimes.counting import count_model, count_onnx, training_memory
from components.common.runtimes.onnx_files import read_onnx
from components.common.tasks import TASKS, task_of
from enginery.advise.roofline import (
    MIG_PARTS,
    Coefficients,
    Device,
    SpeedPrediction,
    Work,
    devices,
    interval,
    load_coefficients,
    predict,
    predict_training,
    training_precision,
)
from enginery.formats import range_text

FITTED_ON = "H200"
PRICES = Path(__file__).with_name("prices.csv")
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_STREAMS = (1, 2, 4)
_ENOUGH = 0.97  # of the highest rate: smaller batches and fewer streams answer sooner
_FULL = 0.9  # of its speed, that a device is planned for: at all of it requests queue without end
_QUEUE = math.log(100) / 2  # see _answer_s
_SHARED = 0.5  # of a GPU: a load of at most that leaves room for others
_OTHER_GB = 1.0  # of CUDA's context, libraries and workspace; assumed
_MAX_PRICES_BYTES = 1 << 16
NUM_MOMENTS = {"sgd": 1, "adamw": 2, "lamb": 2}
"""Numbers that an optimizer keeps for each weight."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question that is asked of each GPU."""

    model: str
    """A network by name, an ONNX file, or a bundle."""
    image_size: int | None = None
    """Side in pixels; None takes that of the file, or 224."""
    num_classes: int = 0
    """Outputs of a network by name; 0 for as many as its task usually has."""
    p99_s: float = 0.007
    """Longest time of 99 % of the requests."""
    qps: float | None = None
    """Images per second to serve."""
    batch: int = 256
    """Images of a training step on each GPU."""
    optimizer: str = "sgd"
    """Optimizer of the training: a key of NUM_MOMENTS."""
    images: int | None = None
    """Images of an epoch."""
    epochs: int = 90
    deadline_s: float | None = None
    budget: float | None = None
    """Budget in the unit of `prices`: per hour for serving, of the whole training."""
    decode_rate: float | str = "none"
    """JPEG files per second that are decoded for each device; "gpu" for its own decoders, "none" for decoded images."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Per hour of one GPU."""


def read_prices(file: Path) -> dict[str, float]:
    """Prices per hour by GPU, of a CSV file with the columns device and usd_per_hour (of whatever unit).

    Raises:
        UserError: it can't be read, names an unknown GPU or one twice, or a price is no positive number.
    """
    prices: dict[str, float] = {}
    try:
        with file.open("rb") as opened:
            content = opened.read(_MAX_PRICES_BYTES + 1)
        if len(content) > _MAX_PRICES_BYTES:
            raise ValueError(f"it has more than {_MAX_PRICES_BYTES:,} bytes")
        for row in csv.DictReader(io.StringIO(content.decode("utf-8-sig"))):
            name, text = row.get("device") or "", row.get("usd_per_hour") or ""
            if name not in devices():
                raise ValueError(f"{name!r} is none of {', '.join(devices())}")
            if name in prices:
                raise ValueError(f"{name} is in it twice")
            with suppress(ValueError):
                prices[name] = float(text)
            if not 0 < prices.get(name, 0) < math.inf:
                raise ValueError(f"the price of {name}, {text!r}, is no positive number")
        if not prices:
            raise ValueError("no row")
    except (OSError, ValueError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"{file}: {reason}; write a line `device,usd_per_hour` and one such as `H100,2.5` per GPU"
        raise UserError(message, code="invalid-prices", setting="--prices") from None
    return prices


@dataclass(frozen=True, kw_only=True)
class ModelCounts:
    """The counts of the model."""

    work: Work
    architecture: str
    """"" for an ONNX file."""
    image_size: int
    """The longer side."""
    num_classes: int
    """0 for an ONNX file."""
    text: str
    """The answer in words, for people."""


def counted(question: Question) -> ModelCounts:
    """Count the model.

    Raises:
        UserError: it is no network, file or bundle, or can't be counted.
    """
    path = Path(question.model)
    if (path / MANIFEST).is_file() or path.suffix == ".onnx":
        for option, value in (("--image-size", question.image_size), ("--num-classes", question.num_classes)):
            if value:
                raise UserError(f"{path} says its own; leave out {option}", code="fixed-by-file", setting=option)
    if (path / MANIFEST).is_file():
        manifest = load(path, BundleManifest).manifest
        _refuse_text(question.model, manifest.architecture)
        height, width = manifest.image_shapes.height, manifest.image_shapes.width
        work = _work_of(path / manifest.models["fp32"])
        text = f"the bundle {path}, {manifest.architecture} at {height}x{width} px"
        size, num_classes = max(height, width), len(manifest.classes)
        return ModelCounts(
            work=work, architecture=manifest.architecture, image_size=size, num_classes=num_classes, text=text
        )
    if path.suffix == ".onnx":
        inputs = read_onnx(path).graph.input[:1]
        sides = [each.dim_value for graph_input in inputs for each in graph_input.type.tensor_type.shape.dim[2:]]
        work = _work_of(path)
        size = max(sides, default=0) or 224
        text = f"the file {path}" + (f" at {'x'.join(str(side or '?') for side in sides)} px" if sides else "")
        return ModelCounts(work=work, architecture="", image_size=size, num_classes=0, text=text)
    size = question.image_size or 224
    _refuse_text(question.model, question.model)
    try:
        work = Work(count_model(question.model, size, question.num_classes))
    except UserError as error:
        if not path.is_dir():
            raise
        raise UserError(
            f"{path} is a folder without {MANIFEST}, so no bundle, and {error}", code=error.code, setting="MODEL"
        ) from error
    num_classes = question.num_classes or TASKS[task_of(question.model)].usual_num_classes
    text = f"the network {question.model} at {size}x{size} px with {num_classes:,} classes"
    return ModelCounts(work=work, architecture=question.model, image_size=size, num_classes=num_classes, text=text)


def _work_of(file: Path) -> Work:
    work = Work(count_onnx(file))
    if not work.names:
        raise UserError(f"{file}: nothing that it computes on images of a fixed size was found", code="shapes-unknown")
    return work


def _refuse_text(model: str, architecture: str) -> None:
    if TASKS[task_of(architecture)].of_text:
        text = f"{model} takes text, and advise predicts networks of images, such as resnet50"
        raise UserError(text, code="other-task", setting="MODEL")


@dataclass(frozen=True, kw_only=True)
class _Engine:
    """An engine and what is expected of it on one device."""

    precision: str
    batch: int
    streams: int
    prediction: SpeedPrediction
    log_error: float
    """The logarithm is off by at most this in 90 % of cases."""

    @property
    def low(self) -> float:
        """Images per second at the slow end."""
        return interval(self.prediction.images_per_s, self.log_error)[0]

    def p99_s(self, qps: float | None, slowdown: float = 1.0) -> float:
        """Time in which 99 % of requests are answered, at a load or at nearly all that it can do.

        A request that just missed a batch waits for the next, then for its own; before it are images that came in
        numbers too large for one batch. Their number is a random walk whose tail is exponential (Kingman, 1962): for
        Poisson arrivals 1 % of the time there are at least log(100) / 2 * load / (1 - load).
        """
        speed = self.prediction.images_per_s / slowdown
        load = min(_FULL, qps / self.num_devices(qps)[1] / speed) if qps else _FULL
        return slowdown * self.prediction.batch_s + (self.batch + _QUEUE * load / (1 - load)) / speed

    def p99_ms_range(self, qps: float | None) -> list[float]:
        """Return p99 at the fast and the slow end of the range."""
        return [1e3 * self.p99_s(qps, math.exp(sign * self.log_error)) for sign in (-1, 1)]

    def num_devices(self, qps: float | None) -> list[int]:
        """Devices for a load at the fast and the slow end of the range."""
        low, high = interval(self.prediction.images_per_s, self.log_error)
        return [math.ceil((qps or 1) / _FULL / speed) for speed in (high, low)]


def serving(question: Question) -> list[dict[str, Any]]:
    """One row for each device: the fastest engine whose requests are answered in time, or the one that a load needs."""
    work = counted(question).work
    kinds, measures = load_coefficients()
    rows = []
    for device in devices().values():
        fitted = kinds[device.kind]
        others_log_error = measures["log_error_90"][f"other_{device.kind}"]
        log_error = measures["log_error_90"][device.kind] if device.device == FITTED_ON else others_log_error
        engines, problem = _engines(work, device, fitted, log_error, question)
        row: dict[str, Any] = {"gpu": device.device, "images_per_s_by_precision": {}}
        for precision in fitted:
            in_time, _ = _engines(work, device, {precision: fitted[precision]}, log_error, question)
            found = _fastest(in_time)
            row["images_per_s_by_precision"][precision] = found.prediction.images_per_s if found else None
        best = _for_load(engines, question.qps) if question.qps else _fastest(engines)
        asked, rate = question, _decode_rate(device, question)
        if best is not None and rate is not None and rate < best.low:  # the decoder leaves each device less to do
            load = question.qps / math.ceil(question.qps / _FULL / rate) if question.qps else _FULL * rate
            asked = replace(question, qps=load)
            in_time, _ = _engines(work, device, fitted, log_error, asked)
            engines = [each for each in in_time if each.low > rate] or [best]
            best = _for_load(engines, load)
        if best is None:
            rows.append(row | {"images_per_s": None, "limit": problem})
            continue
        prediction, power_w = best.prediction, device.power_w
        low, high = interval(prediction.images_per_s, best.log_error)
        row |= {"precision": best.precision, "batch": best.batch, "streams": best.streams}
        row |= {"images_per_s": prediction.images_per_s, "low": low, "high": high}
        row |= {"p99_ms": 1e3 * best.p99_s(asked.qps), "p99_ms_range": best.p99_ms_range(asked.qps)}
        row |= {"limit": prediction.limit, "busy_pct": 100 * prediction.busy_share}
        row |= {"memory_gb": _memory_gb(work, device, best.precision, best.batch, best.streams)}
        row |= _decoded(row, device, question)
        row["images_per_s_per_w"] = row["images_per_s"] / power_w
        if question.qps:
            row["num_gpus"] = [math.ceil(question.qps / _FULL / row[name]) for name in ("high", "low")]
            row["images_per_s_per_w"] = question.qps / row["num_gpus"][1] / power_w
        least = question.qps / row["num_gpus"][1] if question.qps else row["low"]
        row["kwh_per_million_at_most"] = power_w / least / 3.6
        if device.device in question.prices:
            price = question.prices[device.device]
            row["cost_per_hour"] = price * row["num_gpus"][1] if question.qps else price
            row["cost_per_million"] = row["cost_per_hour"] / (question.qps or row["images_per_s"]) / 3600 * 1e6
        share = asked.qps / max(each.low for each in engines) / _FULL if asked.qps else 1.0
        row["sharing"], row["why"] = _sharing(work, device, best, share, fitted, others_log_error, asked)
        rows.append(row)
    return _with_max_q(rows, "cost_per_hour", question)


def _memory_gb(work: Work, device: Device, precision: str, batch: int, streams: int) -> float:
    return work.memory_bytes(precision, batch, streams) / 1e9 + (_OTHER_GB if device.kind == "gpu" else 0.0)


def _engines(
    work: Work, device: Device, fitted: Mapping[str, Coefficients], log_error: float, question: Question
) -> tuple[list[_Engine], str]:
    """Engines that fit and answer in time at the slow end of their range, if there are none in the middle of it.

    Returns also what is in the way where there is none.
    """
    fit = [
        _Engine(
            precision=precision,
            batch=batch,
            streams=streams,
            prediction=predict(work, device, precision, batch, coefficients, streams),
            log_error=log_error,
        )
        for precision, coefficients in fitted.items()
        for streams in _STREAMS
        for batch in _BATCHES
        if _memory_gb(work, device, precision, batch, streams) <= device.memory_gb
    ]
    if not fit:
        least = min(_memory_gb(work, device, precision, 1, 1) for precision in fitted)
        return [], f"memory: one image takes {least:.1f} GB"
    surely = [each for each in fit if each.p99_ms_range(question.qps)[1] <= 1e3 * question.p99_s]
    in_time = surely or [each for each in fit if each.p99_s(question.qps) <= question.p99_s]
    soonest = min(fit, key=lambda each: each.p99_s(question.qps))
    low, high = soonest.p99_ms_range(question.qps)
    shortest, bounds = (range_text(each, ".3g") for each in ([1e3 * soonest.p99_s(question.qps)], [low, high]))
    return in_time, f"latency: {shortest} ms ({bounds}) at the soonest"


def _fastest(engines: list[_Engine]) -> _Engine | None:
    """The first, of fewest streams and images, that is as fast as any."""
    highest = max((each.prediction.images_per_s for each in engines), default=0.0)
    enough = [each for each in engines if each.prediction.images_per_s >= _ENOUGH * highest]
    return min(enough, key=lambda each: (each.streams, each.batch), default=None)


def _for_load(engines: list[_Engine], qps: float) -> _Engine | None:
    """The one that answers soonest of those that need the fewest devices."""
    return min(engines, key=lambda each: (each.num_devices(qps)[1], each.p99_s(qps)), default=None)


def _decode_rate(device: Device, question: Question) -> float | None:
    """JPEG files per second for each device; None where nothing is decoded or the rate is unknown."""
    if question.decode_rate == "gpu":
        return device.jpeg_per_s
    return None if isinstance(question.decode_rate, str) else question.decode_rate


def _decoded(row: Mapping[str, Any], device: Device, question: Question) -> dict[str, Any]:
    """The effect of decoding on a row's speed."""
    rate = _decode_rate(device, question)
    if rate is None:
        return {"decode_per_s": "unknown"} if question.decode_rate == "gpu" else {}
    speeds = {name: min(row[name], rate) for name in ("images_per_s", "low", "high")}
    return speeds | {"decode_per_s": rate} | ({"limit": "decoder"} if rate < row["images_per_s"] else {})


def _sharing(
    work: Work,
    device: Device,
    engine: _Engine,
    load: float,
    fitted: Mapping[str, Coefficients],
    log_error: float,
    question: Question,
) -> tuple[str, str]:
    """MIG, MPS or neither, and the reason.

    `load` is the share of what the device can do in time; `log_error` that of parts, none of which is in the fit.
    """
    if device.kind == "cpu":
        return "neither", "a CPU has none"
    if load > _SHARED:
        busy = f"it {100 * engine.prediction.busy_share:.0f} % busy"
        streams = "one stream keeps" if engine.streams == 1 else f"{engine.streams} streams of one process keep"
        share = f"{100 * load:.0f} % of it, which leaves little to others" if load < 1 else "all of it"
        return "neither", f"the load takes {share}" if question.qps else f"{streams} {busy}"
    for parts in MIG_PARTS if device.mig_instances else ():
        engines, _ = _engines(work, device.part(parts), fitted, log_error, question)
        best = _for_load(engines, question.qps or 1)
        if best is None or parts >= device.mig_instances or best.num_devices(question.qps) != [1, 1]:
            continue
        times = best.p99_ms_range(question.qps)
        if times[1] <= 1e3 * question.p99_s:
            text = f"a part of {parts} of {device.mig_instances:.0f} carries the load in {best.precision.upper()} and"
            return "MIG", f"{text} answers in {range_text(times, '.2g')} ms; others run apart on the rest"
    of_parts = "no smaller part of it carries the load in time, but " if device.mig_instances else ""
    share = f"the load takes {100 * load:.0f} % of it" if load >= 0.01 else "the load takes less than 1 % of it"
    return "MPS", f"{of_parts}{share}; processes of others can use the rest, not isolated"


def training(question: Question) -> list[dict[str, Any]]:
    """One row for each device: training on one, in 16 bits on GPUs, and how many meet the deadline.

    Raises:
        UserError: of an ONNX file no training is known.
    """
    model = counted(question)
    if not model.architecture:
        message = f"{question.model}: an ONNX file says nothing of its training; give the network's name"
        raise UserError(message, code="not-trainable", setting="MODEL")
    kinds, measures = load_coefficients()
    memories = {
        kind: training_memory(
            model.architecture,
            model.image_size,
            num_classes=model.num_classes,
            half=kind == "gpu",
            num_moments=NUM_MOMENTS[question.optimizer],
        )
        for kind in kinds
    }
    rows = []
    for device in devices().values():
        precision, memory = training_precision(device), memories[device.kind]
        largest = memory.largest_batch(int(1e9 * (device.memory_gb - _OTHER_GB)))
        batch = min(question.batch, largest)
        row: dict[str, Any] = {"gpu": device.device, "fits": largest >= question.batch, "largest_batch": largest}
        if not batch:
            needed = memory.needed_bytes(1) / 1e9 + _OTHER_GB
            rows.append(row | {"images_per_s": None, "limit": f"memory: one image takes {needed:.1f} GB"})
            continue
        factor, fitted = measures["training_bytes_factor"], kinds[device.kind][precision]
        prediction = predict_training(model.work, device, batch, memory.per_image_bytes, fitted, factor)
        # One network on one GPU says nothing about others: the wider interval everywhere.
        low, high = interval(prediction.images_per_s, measures["log_error_90"][f"other_{device.kind}"])
        row |= {"precision": precision, "batch": batch, "memory_gb": memory.needed_bytes(batch) / 1e9 + _OTHER_GB}
        row |= {"images_per_s": prediction.images_per_s, "low": low, "high": high, "limit": prediction.limit}
        row |= _decoded(row, device, question)
        row |= {"images_per_s_per_w": row["images_per_s"] / device.power_w}
        if batch < question.batch:
            row["limit"] = f"memory: {batch:,} of {question.batch:,} images fit"
        if question.images:
            row |= _of_a_training(row, device, question, measures["training_scaling"])
        rows.append(row)
    return _with_max_q(rows, "cost", question)


def _of_a_training(row: Mapping[str, Any], device: Device, question: Question, scaling: float) -> dict[str, Any]:
    """Hours, energy, number of devices and cost."""
    images = (question.images or 0) * question.epochs
    least, expected, most = (images / row[name] / 3600 for name in ("high", "images_per_s", "low"))
    result: dict[str, Any] = {"hours_on_one": expected, "hours_on_one_range": [least, most]}
    gpu_hours = [least, expected, most]
    if question.deadline_s:
        deadline_h = question.deadline_s / 3600
        gpu_hours = [hours if hours <= deadline_h else hours / scaling for hours in gpu_hours]  # several lose some
        result["num_gpus"] = [max(1, math.ceil(hours / deadline_h)) for hours in (gpu_hours[0], gpu_hours[2])]
    result["kwh_at_most"] = gpu_hours[2] * device.power_w / 1000
    if device.device in question.prices:
        costs = [hours * question.prices[device.device] for hours in gpu_hours]
        result |= {"cost": costs[1], "cost_range": costs[::2]}
    return result


def _is_late(row: Mapping[str, Any], question: Question) -> bool:
    """True if requests are not answered in time at the slow end of the range."""
    return bool(row.get("p99_ms_range", [0, 0])[1] > 1e3 * question.p99_s)


def _with_max_q(rows: list[dict[str, Any]], cost: str, question: Question) -> list[dict[str, Any]]:
    """Mark the GPU of most images per second and watt within the budget, of those in time at the slow end if any."""
    budget = question.budget
    within = [
        row
        for row in rows
        if row["images_per_s"] and (budget is None or (row.get(cost) is not None and row[cost] <= budget))
    ]
    surely = [row for row in within if not _is_late(row, question)]
    best = max(surely or within, key=lambda row: float(row["images_per_s_per_w"]), default=None)
    return [row | {"max_q": row is best} for row in rows]


def remarks(rows: list[dict[str, Any]], question: Question) -> list[str]:
    """Notes on questions that a table leaves open, in sentences."""
    best = next((row for row in rows if row["max_q"]), None)
    lines = []
    if best and "why" in best:
        lines.append(f"{best['gpu']}: {best['sharing'].replace('neither', 'neither MPS nor MIG')}, {best['why']}.")
    if best is None and any(row["images_per_s"] for row in rows):
        lines.append(f"No device keeps to a budget of {question.budget:g}; those without a price can't.")
    if any(row.get("decode_per_s") == "unknown" for row in rows):
        names = ", ".join(row["gpu"] for row in rows if row.get("decode_per_s") == "unknown")
        lines.append(f"How fast JPEG files are decoded is unknown of {names}: --decode-rate N gives what was measured.")
    if not question.qps and any(row["limit"].startswith("latency") for row in rows):
        lines.append(f"Latencies are at {100 * _FULL:.0f} % of the speed; less load, by --qps, is answered sooner.")
    late = [row["gpu"] for row in rows if _is_late(row, question)]
    if late:
        lines.append(f"Not in time at the slow end of the range: {', '.join(late)}.")
    return lines
