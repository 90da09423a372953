"""Measure networks on this machine: TensorRT where a GPU and TensorRT are, OpenVINO elsewhere."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from components.common.errors import EngineryError, UserError
from components.common.models import build_model, check_image_size
from components.common.records import PRECISIONS, BenchmarkRow, Precision
from components.common.runners import Runner
from components.common.runners.openvino import OpenVINORunner
from components.common.runners.tensorrt import TensorRTRunner
from components.common.runners.tensorrt_library import why_no_tensorrt
from components.common.shapes import ShapeSpec
from components.export.engines import build_engine, onnx_file_for
from components.validate.config import ValidateConfig
from components.validate.speed import measure_speed
from pipelines.benchmarking.networks import NUM_CLASSES, write_network
from pipelines.benchmarking.table import Row, cost_of_a_million, network_name

_log = logging.getLogger(__name__)

Say = Callable[[str], None]  # told what happens now

GPU_BATCHES, CPU_BATCHES = (1, 2, 4, 8, 64, 128), (1, 2, 4, 8)
_WORKSPACE_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is measured, and how."""

    batches: tuple[int, ...]
    precisions: tuple[Precision, ...]
    image_size: int
    """Side of the images, in pixels."""
    seconds: float
    """Time that each speed is measured for, all repeats together."""
    optimization_level: int
    """Of TensorRT."""
    timing_caches: Path | None
    """Folder where TensorRT's timing caches are kept; None for nowhere."""
    price_per_hour: float | None
    price_per_kwh: float | None


def check_precisions(precisions: Sequence[str]) -> None:
    """Look whether this machine runs any of them.

    Raises:
        UserError: it does not.
    """
    if set(precisions) == {"fp16"} and (missing := why_no_tensorrt()):
        raise UserError(f"FP16 is measured with TensorRT, and {missing}")


def default_batches() -> tuple[int, ...]:
    """The whitepaper's batch sizes on a GPU with TensorRT, the small ones of them elsewhere."""
    return CPU_BATCHES if why_no_tensorrt() else GPU_BATCHES


def check_networks(architectures: Sequence[str], image_size: int) -> None:
    """Look whether all networks exist and take images of this size, before the first one is measured.

    Raises:
        UserError: one does not.
    """
    import torch

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
    return [_row(network_name(architecture), device, row, settings) for row in _in_order(measured)]


@contextmanager
def _runners(settings: Settings, shapes: ShapeSpec, folder: Path, say: Say) -> Iterator[list[tuple[Precision, Runner]]]:
    runners: list[tuple[Precision, Runner]] = []
    try:
        for precision in settings.precisions:
            if why_no_tensorrt() is None:
                say(f"building the {precision} engine")
                try:
                    runners.append((precision, _engine(precision, settings, shapes, folder)))
                except EngineryError as error:  # the other precisions are still worth their rows
                    _log.warning("no %s rows: %s", precision.upper(), error)
            elif precision != "fp16":  # a CPU has no FP16 arithmetic
                runners.append((precision, OpenVINORunner(folder / f"{precision}.onnx", shapes)))
        if not runners:
            raise EngineryError("none of its engines could be built; what TensorRT said stands above")
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
        workspace_bytes=_WORKSPACE_BYTES,
    )
    return TensorRTRunner(plan, shapes, entry)


def _in_order(rows: Sequence[BenchmarkRow]) -> list[BenchmarkRow]:
    return sorted(rows, key=lambda row: (PRECISIONS.index(row.precision), row.batch_size))


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
