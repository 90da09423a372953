"""Measure networks with random weights on this machine, by TensorRT or OpenVINO."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.records import PRECISIONS, BenchmarkRow, Precision
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes import tensorrt
from components.common.runtimes.architectures import build_model, check_image_size
from components.common.runtimes.onnx_files import read_onnx
from components.common.runtimes.openvino import OpenVINORunner
from components.common.runtimes.runner import Runner
from components.common.runtimes.tensorrt import TensorRTRunner
from components.export.calibration import Histogram, collect_with_onnxruntime, collect_with_torch, compute_scale
from components.export.engines import build_engine, onnx_file_for
from components.export.onnx_export import export_onnx
from components.export.placement import activation_tensors, with_names
from components.export.precision import raise_opset, to_fp16
from components.export.qdq import insert_qdq
from components.validate.config import ValidateConfig
from components.validate.speed import measure_speed
from enginery.benchmark.table import Row, cost_of_a_million, network_name

_log = logging.getLogger(__name__)

Say = Callable[[str], None]  # called with what happens now

GPU_BATCHES, CPU_BATCHES = (1, 2, 4, 8, 64, 128), (1, 2, 4, 8)
NUM_CLASSES = 1000
_NUM_CALIBRATION_IMAGES = 8


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The choice of what is measured, and how."""

    batches: tuple[int, ...]
    precisions: tuple[Precision, ...]
    image_size: int
    """Side of the images, in pixels."""
    seconds: float
    """Time that each speed is measured for, all repeats together."""
    optimization_level: int
    """Level of TensorRT's builder, 0 to 5."""
    timing_caches: Path | None
    """Folder where TensorRT's timing caches are kept; None for nowhere."""
    price_per_hour: float | None
    price_per_kwh: float | None


def check_precisions(precisions: Sequence[str]) -> None:
    """Check that this machine runs any of them.

    Raises:
        UserError: it does not.
    """
    if set(precisions) == {"fp16"} and (missing := tensorrt.why_unavailable()):
        raise UserError(
            f"FP16 is measured with TensorRT, and {missing}", code="tensorrt-unavailable", setting="precisions"
        )


def default_batches() -> tuple[int, ...]:
    """The whitepaper's batch sizes on a GPU with TensorRT, the small ones of them elsewhere."""
    return CPU_BATCHES if tensorrt.why_unavailable() else GPU_BATCHES


def check_networks(architectures: Sequence[str], image_size: int) -> None:
    """Check that all networks exist and take images of this size, before the first one is measured.

    Raises:
        UserError: one does not.
    """
    for architecture in architectures:
        try:
            with torch.device("meta"):  # no memory, no work
                network = build_model(architecture, NUM_CLASSES)
        except NotImplementedError:  # RegNets compute their widths with tensors
            network = build_model(architecture, NUM_CLASSES)
        check_image_size(network, architecture, image_size)


def measure_network(architecture: str, settings: Settings, folder: Path, say: Say) -> list[Row]:
    """The rows of one network.

    Args:
        architecture: A torchvision classifier, or timm/NAME.
        settings: What is measured.
        folder: For ONNX files and plans.
        say: Told what happens now.

    Raises:
        UserError: there is no such network.
        EngineryError: TensorRT can't build any of its engines; of one that it can't build it is only said.
    """
    size, largest = settings.image_size, max(settings.batches)
    shapes = ShapeSpec(height=size, width=size, opt_batch=largest, max_batch=largest)
    say(f"{architecture}: writing ONNX files")
    write_network(architecture, shapes, folder)
    config = ValidateConfig(
        benchmark_batch_sizes=settings.batches,
        benchmark_streams=(1,),
        benchmark_no_transfer_batch_sizes=(),
        benchmark_seconds=settings.seconds,
    )
    with _runners(settings, shapes, folder, lambda text: say(f"{architecture}: {text}")) as runners:
        device = runners[0][1].device
        measured = measure_speed(config, runners, largest, lambda done, total, what: say(f"{architecture}: {what}"))
    rows = sorted(measured, key=lambda row: (PRECISIONS.index(row.precision), row.batch_size))
    return [_row(network_name(architecture), device, row, settings) for row in rows]


@contextmanager
def _runners(settings: Settings, shapes: ShapeSpec, folder: Path, say: Say) -> Iterator[list[tuple[Precision, Runner]]]:
    runners: list[tuple[Precision, Runner]] = []
    try:
        for precision in settings.precisions:
            if tensorrt.why_unavailable() is None:
                say(f"building the {precision} engine")
                try:
                    runners.append((precision, _engine(precision, settings, shapes, folder)))
                except EngineryError as error:  # the other precisions are still worth their rows
                    _log.warning("no %s rows: %s", precision.upper(), error)
            elif precision != "fp16":  # a CPU has no FP16 arithmetic
                runners.append((precision, OpenVINORunner(folder / f"{precision}.onnx", shapes)))
        if not runners:
            raise EngineryError(
                "none of its engines could be built; what TensorRT said stands above", code="build-failed"
            )
        yield runners
    finally:
        for _, runner in runners:
            runner.close()


def _engine(precision: Precision, settings: Settings, shapes: ShapeSpec, folder: Path) -> Runner:
    plan = folder / f"{precision}.plan"
    entry = build_engine(
        folder / onnx_file_for(precision),
        plan,
        precision=precision,
        shapes=shapes,
        timing_cache_path=settings.timing_caches,
        optimization_level=settings.optimization_level,
    )
    return TensorRTRunner(plan, shapes, entry)


def _row(network: str, device: str, row: BenchmarkRow, settings: Settings) -> Row:
    cost, priced_energy = None, settings.price_per_kwh is not None and row.power_w is not None
    if settings.price_per_hour is not None or priced_energy:  # energy that nothing measures has no price: not 0
        prices = {"price_per_hour": settings.price_per_hour or 0.0, "price_per_kwh": settings.price_per_kwh or 0.0}
        cost = cost_of_a_million(row.images_per_s, row.power_w, **prices)
    return Row(
        device=device,
        precision=row.precision.upper(),
        network=network,
        batch=row.batch_size,
        images_per_s=row.images_per_s,
        power_w=row.power_w,
        latency_ms=row.p50_ms,
        cost=cost,
    )


def write_network(architecture: str, shapes: ShapeSpec, folder: Path) -> list[str]:
    """Write fp32.onnx, fp16.onnx, int8.onnx and int8_fp16.onnx of a network with 1,000 classes.

    Args:
        architecture: A torchvision classifier, or timm/NAME.
        shapes: Image size and batches.
        folder: Where the files go; made if it is not there.

    Returns:
        Names of the graph's convolutions.

    Raises:
        UserError: there is no such network.
    """
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    model = build_model(architecture, NUM_CLASSES).eval()
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            # A fresh residual block ends in a factor of zero, and a convolution of zeros is nothing to measure.
            torch.nn.init.uniform_(layer.weight, 0.5, 1.5)
    export_onnx(model, folder / "fp32.onnx", shapes)
    fp32 = with_names(read_onnx(folder / "fp32.onnx"))
    histograms = _histograms(fp32, folder / "fp32.onnx", shapes)
    scales = {tensor: compute_scale(values, "max") for tensor, values in histograms.items()}
    fp16 = to_fp16(fp32)
    onnx.save(fp16, folder / "fp16.onnx")
    onnx.save(insert_qdq(fp32, scales), folder / "int8.onnx")
    onnx.save(insert_qdq(raise_opset(fp16), scales), folder / "int8_fp16.onnx")
    return [node.name for node in fp32.graph.node if node.op_type == "Conv"]


def _histograms(fp32: onnx.ModelProto, file: Path, shapes: ShapeSpec) -> dict[str, Histogram]:
    tensors = activation_tensors(fp32)
    if torch.cuda.is_available():
        batches = (torch.from_numpy(batch).cuda() for batch in _batches(shapes))
        return collect_with_torch(fp32, tensors, batches, torch.device("cuda"))
    return collect_with_onnxruntime(file, tensors, _batches(shapes))


def _batches(shapes: ShapeSpec) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(0)
    for _ in range(_NUM_CALIBRATION_IMAGES):
        yield rng.standard_normal(shapes.input_shape(1), dtype=np.float32)
