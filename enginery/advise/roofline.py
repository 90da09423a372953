"""Images per second from a network's count and a device's data sheet: a roofline for each kernel.

A kernel's arithmetic and its bytes each take a share of the data sheet's peak (Williams et al., "Roofline", 2009), and
the longer of both counts; beside that it waits for its launch and for one tile of outputs on one multiprocessor, which
take the same at any batch. Shares, times and tiles are fitted on measurements (benchmarks/advise.py). Copies of images
overlap with it.
"""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import exp, inf
from pathlib import Path
from typing import Any

import numpy as np

from components.common.runtimes.counting import Count, Layer

COEFFICIENTS = Path(__file__).with_name("coefficients.json")
_DEVICES = Path(__file__).with_name("devices.csv")
_VALUE_BYTES = {"fp32": 4, "fp16": 2, "int8": 1}
_INPUT_VALUE_BYTES = 4  # engines take FP32
# Kernels of GPUs compute whole tiles of channels, and add whole tiles of products: in FP32, and on Tensor Cores.
_FP32_TILE = (32, 8)
_TILE = (64, 64)
_WINOGRAD_GAIN = 2.25  # of 3x3 convolutions in tiles of 2x2 outputs, which FP32 engines of GPUs use
_WINOGRAD_REUSE = (7.0, 9.5)  # how often a convolution reads an input value, if 3x3 of stride 1
_LONGEST_SUM = 4608  # products of one output that one multiprocessor adds alone: longer sums are split
_WIDE = 36  # products of one output of a depthwise convolution, from which on kernels are not made for it
# What an engine computes inside of the convolution before, and what is no work there.
_SMOOTH = ("silu", "sigmoid", "hardswish")  # but not between two INT8 convolutions
_POINTWISE = (
    *("batch_norm", "batchnormalization", "relu", "hardtanh", "clip", "clamp", "add", "mul", "div", "gelu", "erf"),
    *_SMOOTH,
)
_FREE = (
    *("dropout", "slice", "fill", "full", "ones", "zeros", "arange", "empty", "as_strided", "gather", "split"),
    "transpose",
)
_FEW_VALUES = 8  # of what an exported file computes about shapes
_CONV, _GROUPED, _MATMUL, _DEPTHWISE, _WIDE_DEPTHWISE, _OTHER = range(6)
# Of eight: what MIG's parts of 1, 2, 3, 4 and 7 get of multiprocessors, and of memory and its bandwidth.
MIG_PARTS = {1: (1, 1), 2: (2, 2), 3: (3, 4), 4: (4, 4), 7: (8, 8)}


@dataclass(frozen=True, kw_only=True)
class Device:
    """A row of devices.csv: figures of a data sheet, dense arithmetic."""

    device: str
    kind: str
    """gpu, or cpu: one socket."""
    memory_gb: float
    bandwidth_gb_per_s: float
    fp32_tflops: float
    fp16_tflops: float
    int8_tops: float
    num_sms: float
    """Multiprocessors, or cores."""
    power_w: float
    host_gb_per_s: float
    """Rate of the link over which images come, in one direction: that of its PCIe generation at 16 lanes."""
    mig_instances: float
    """Most parts that it can be split into; 0 if that was not found or does not exist."""
    jpeg_per_s: float | None
    """JPEG files of 500x375 px that its decoders and kernels read; None if unknown."""
    source: str

    def peak(self, precision: str) -> float:
        """Operations per second."""
        rates = {"fp32": self.fp32_tflops, "int8": self.int8_tops}
        return 1e12 * rates.get(precision, self.fp16_tflops)

    def part(self, parts: int) -> "Device":
        """One of MIG's parts: of the size of 1, 2, 3, 4 or 7."""
        multiprocessors, memory = MIG_PARTS[parts]
        shares = dict.fromkeys(("fp32_tflops", "fp16_tflops", "int8_tops", "num_sms"), multiprocessors / 8)
        shares |= dict.fromkeys(("memory_gb", "bandwidth_gb_per_s"), memory / 8)
        return replace(self, **{name: getattr(self, name) * share for name, share in shares.items()})


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """Measured efficiency of one precision: shares of a data sheet's figures, and seconds."""

    conv_share: float
    grouped_share: float
    matmul_share: float
    depthwise_share: float
    """Share of FP32 arithmetic in any precision: depthwise convolutions use no Tensor Cores."""
    wide_depthwise_share: float
    """Likewise, of 7x7 and the like."""
    bandwidth_share: float
    depthwise_bandwidth_share: float
    other_bandwidth_share: float
    """Share for kernels that multiply nothing: norms, pooling, concatenation."""
    kernel_s: float
    """Seconds to launch a kernel that multiplies."""
    other_kernel_s: float
    group_s: float
    """Seconds of each further group of a grouped convolution, which runs one after the other."""
    tile_outputs: float
    """Outputs that one multiprocessor computes at once: at small batches a kernel takes as long as one such tile."""
    start_s: float
    """Seconds to start a batch."""


@dataclass(frozen=True, kw_only=True)
class SpeedPrediction:
    """The predicted speed of batches of one size on some streams."""

    images_per_s: float
    batch_s: float
    """Seconds from the copy of a batch to its result, while the other streams run, too."""
    busy_share: float
    """Share of the time in which arithmetic or memory work; the rest are launches and waiting."""
    limit: str
    """The cause of most of the time: arithmetic, bandwidth, launches, or the link to the host."""


class Work:
    """A count as arrays over the kernels of an engine."""

    def __init__(self, count: Count) -> None:
        kernels = _kernels(count)
        layers = [kernel.layer for kernel in kernels]
        self.names = [layer.name for layer in layers]
        self.flops = np.array([2.0 * layer.macs for layer in layers])
        self.values = np.array([kernel.values for kernel in kernels])
        self.only_int8 = np.array([kernel.only_int8 for kernel in kernels])
        self.parameters = np.array([float(layer.num_parameters) for layer in layers])
        self.groups = np.array([layer.groups for layer in layers])
        self.sums = np.array([layer.macs / max(layer.output_values, 1) for layer in layers])
        channels = np.array([_channels(layer) for layer in layers])
        self.kind = np.array([_kind(layer, number) for layer, number in zip(layers, channels, strict=True)])
        inputs = np.array([float(max(layer.input_values, 1)) for layer in layers])
        outputs = np.array([float(layer.output_values) for layer in layers])
        reuse = self.sums * outputs / channels * self.groups / inputs
        low, high = _WINOGRAD_REUSE
        self.winograd = (self.kind == _CONV) & (reuse > low) & (reuse < high)
        sums = np.maximum(self.sums, 1)
        padded = [_rounded_up(channels, width) * _rounded_up(sums, depth) for width, depth in (_TILE, _FP32_TILE)]
        self.padding, self.fp32_padding = (np.where(self.kind == _CONV, each, 1.0) for each in padded)
        self.image_bytes = float(_INPUT_VALUE_BYTES * count.image_values)
        self.num_parameters = count.num_parameters
        self.live_values = count.live_values

    def memory_bytes(self, precision: str, batch: int, streams: int = 1) -> float:
        """Memory of the weights, and of the tensors that live at once on each stream, images among them."""
        images = batch * streams * self.image_bytes
        return _VALUE_BYTES[precision] * (self.num_parameters + batch * streams * self.live_values) + images


@dataclass(frozen=True)
class _Kernel:
    layer: Layer
    values: float
    """Numbers that it reads and writes for one image."""
    only_int8: bool = False


def _kernels(count: Count) -> list[_Kernel]:
    """Layers that are kernels of an engine."""
    kernels: list[_Kernel] = []
    largest = 0  # values of a tensor that the kernel before can compute on inside
    for layer in count.layers:
        operator, values = layer.operator.lower(), float(layer.input_values + layer.output_values)
        if layer.macs:
            largest = layer.output_values if layer.operator == "Conv" else 0
        elif layer.output_values <= _FEW_VALUES or any(word in operator for word in _FREE):
            continue
        elif operator == "add" and layer.num_parameters and kernels and kernels[-1].layer.operator == "MatMul":
            continue  # the bias, which PyTorch counts with the product
        else:
            pointwise = "layer_norm" not in operator and any(word in operator for word in _POINTWISE)
            if pointwise and layer.output_values <= largest:
                before = kernels[-1]
                if "add" in operator and layer.input_values > layer.output_values:  # the other branch is read
                    kernels[-1] = replace(before, values=before.values + layer.input_values - layer.output_values)
                if before.layer.macs and any(word in operator for word in _SMOOTH):
                    kernels.append(_Kernel(layer, values, only_int8=True))
                continue
            largest = layer.output_values if pointwise else 0
        kernels.append(_Kernel(layer, values))
    return kernels


def _channels(layer: Layer) -> int:
    """Outputs of one product or position."""
    if not layer.macs:
        return 1
    if not layer.num_parameters:
        return _TILE[0]  # of activations by activations
    sums = layer.macs / layer.output_values
    with_bias = layer.num_parameters / (sums + 1)
    plain = round(layer.num_parameters / sums)
    number = round(with_bias)
    fits = number and number == with_bias and not layer.output_values % number and not number % layer.groups
    return number if fits else max(1, plain)


def _rounded_up(numbers: np.ndarray, tile: int) -> np.ndarray:
    """Whole tiles over the numbers that they hold."""
    return np.asarray(np.ceil(numbers / tile) * tile / numbers)


def _kind(layer: Layer, channels: int) -> int:
    if not layer.macs:
        return _OTHER
    if layer.operator != "Conv":
        return _MATMUL
    if layer.groups in (1, channels):
        wide = layer.macs >= _WIDE * layer.output_values
        return _CONV if layer.groups == 1 else _WIDE_DEPTHWISE if wide else _DEPTHWISE
    return _GROUPED


def devices() -> dict[str, Device]:
    """All rows of devices.csv by name."""
    with _DEVICES.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    texts = ("device", "kind", "source")
    numbers = [field.name for field in fields(Device) if field.name not in texts]
    values: list[dict[str, Any]] = [
        {name: row[name] for name in texts} | {name: float(row[name]) if row[name] else None for name in numbers}
        for row in rows
    ]
    return {each["device"]: Device(**each) for each in values}


def load_coefficients() -> tuple[dict[str, dict[str, Coefficients]], Mapping[str, Any]]:
    """Coefficients by kind of device and precision, and the rest of the fit; benchmarks/advise.py writes both."""
    content = json.loads(COEFFICIENTS.read_text())
    kinds = {
        kind: {name: Coefficients(**values) for name, values in precisions.items()}
        for kind, precisions in content["kinds"].items()
    }
    return kinds, content["measures"]


HOST_SHARE = 0.874  # of the link's figure: what AlexNet reaches on the H200, whose engines wait for nothing else


def predict(
    work: Work, device: Device, precision: str, batch: int, fitted: Coefficients, streams: int = 1
) -> SpeedPrediction:
    """Serving by one engine: `streams` batches at once, whose launches and waiting overlap.

    Args:
        work: of the network.
        device: one GPU.
        precision: fp32, fp16 or int8.
        batch: images of one batch.
        fitted: of this precision.
        streams: batches that run at the same time.
    """
    arithmetic, memory, waiting = kernel_seconds(work, device, precision, batch, fitted)
    busy_s, waiting_s = float(np.maximum(arithmetic, memory).sum()), float(waiting.sum()) + fitted.start_s
    copy_s = batch * work.image_bytes / (1e9 * device.host_gb_per_s * HOST_SHARE)
    step_s = max(busy_s + waiting_s / streams, copy_s)
    parts = {
        "arithmetic": float(arithmetic[arithmetic >= memory].sum()),
        "bandwidth": float(memory[memory > arithmetic].sum()),
        "launches": waiting_s / streams,
        "link to the host": copy_s if copy_s >= step_s else 0.0,
    }
    limit = max(parts, key=lambda name: parts[name])
    batch_s = streams * step_s + copy_s
    return SpeedPrediction(
        images_per_s=batch / step_s, batch_s=batch_s, busy_share=min(1.0, busy_s / step_s), limit=limit
    )


def predict_training(
    work: Work, device: Device, batch: int, per_image_bytes: int, fitted: Coefficients, bytes_factor: float
) -> SpeedPrediction:
    """Training steps, in 16 bits on a GPU and in FP32 on a CPU: backward is twice the arithmetic of forward.

    Args:
        work: of the network.
        device: one GPU.
        batch: images of the step on it.
        per_image_bytes: what backward needs of forward (`TrainingMemory`).
        fitted: of that precision.
        bytes_factor: how often these bytes pass the memory.
    """
    arithmetic, _, waiting = kernel_seconds(work, device, training_precision(device), batch, fitted)
    memory_s = bytes_factor * per_image_bytes * batch / (1e9 * device.bandwidth_gb_per_s * fitted.bandwidth_share)
    parts = {
        "arithmetic": 3 * float(arithmetic.sum()),
        "bandwidth": memory_s,
        "launches": 3 * (float(waiting.sum()) + fitted.start_s),
    }
    step_s = sum(parts.values())
    limit = max(parts, key=lambda name: parts[name])
    busy_share = (parts["arithmetic"] + parts["bandwidth"]) / step_s
    return SpeedPrediction(images_per_s=batch / step_s, batch_s=step_s, busy_share=busy_share, limit=limit)


def training_precision(device: Device) -> str:
    """Precision of the arithmetic of training."""
    return "fp16" if device.kind == "gpu" else "fp32"


def kernel_seconds(
    work: Work, device: Device, precision: str, batch: Any, fitted: Coefficients
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of each kernel for a batch: of its arithmetic, of its bytes, and of its launch and a tile.

    Figures of the device and the batch may be arrays over the kernels.
    """
    runs = ~work.only_int8 | (precision == "int8")
    shares = np.array([fitted.conv_share, fitted.grouped_share, fitted.matmul_share, fitted.depthwise_share])
    shares = np.array([*shares, fitted.wide_depthwise_share, inf])[work.kind]
    peak = np.where(work.kind >= _DEPTHWISE, device.peak("fp32"), device.peak(precision))
    gpu = device.kind == "gpu"
    gain = np.where(work.winograd, _WINOGRAD_GAIN if gpu and precision == "fp32" else 1.0, 1.0)
    padding = (work.fp32_padding if precision == "fp32" else work.padding) if gpu else 1.0
    arithmetic = batch * work.flops * padding / gain / (peak * shares)
    depthwise, other = fitted.depthwise_bandwidth_share, fitted.other_bandwidth_share
    bandwidth = np.array([*[fitted.bandwidth_share] * 3, depthwise, depthwise, other])[work.kind]
    memory = runs * kernel_bytes(work, precision, batch) / (1e9 * device.bandwidth_gb_per_s * bandwidth)
    tile_flops = 2 * fitted.tile_outputs * np.minimum(work.sums, _LONGEST_SUM)
    waiting = fitted.kernel_s + tile_flops * device.num_sms / device.peak(precision)
    waiting += np.where(work.kind == _GROUPED, fitted.group_s * (work.groups - 1), 0.0)
    return arithmetic, memory, runs * np.where(work.kind == _OTHER, fitted.other_kernel_s, waiting)


def kernel_bytes(work: Work, precision: str, batch: Any) -> np.ndarray:
    """Bytes that each kernel reads and writes for a batch, weights included."""
    return np.asarray(_VALUE_BYTES[precision] * (batch * work.values + work.parameters))


def interval(value: float, log_error: float) -> tuple[float, float]:
    """Range of a prediction whose logarithm is off by at most `log_error` in 90 % of cases."""
    return value / exp(log_error), value * exp(log_error)
