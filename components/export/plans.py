"""The TensorRT plans of a bundle, for the GPU here."""

import os
from collections.abc import Sequence
from pathlib import Path

from components.common.contracts.errors import EngineryError, RuntimeUnavailable
from components.common.contracts.records import PRECISIONS, EngineEntry, EngineLayers, Precision
from components.common.contracts.transforms import ShapeSpec
from components.common.process.steplog import StepLog
from components.common.runtimes import tensorrt
from components.common.runtimes.onnx_files import read_onnx
from components.export.config import CACHE_VARIABLE, TIMING_CACHES, ExportConfig
from components.export.engines import build_engine, check_options, onnx_file_for
from components.export.inspection import UnreadableLayers, inspect_engine
from components.export.placement import node_id


def cache_folder(config: ExportConfig) -> Path | None:
    """Where calibration results and timing caches are kept; None for nowhere."""
    folder = config.cache or os.environ.get(CACHE_VARIABLE)
    return Path(folder).expanduser() if folder else None


def build_plans(
    config: ExportConfig, shapes: ShapeSpec, output: Path, cache: Path | None, log: StepLog
) -> tuple[tuple[EngineEntry, ...], str]:
    """Build the plans of all precisions beside the ONNX files in `output`. Returns them, and why there are none.

    Raises:
        RuntimeUnavailable: TensorRT can't be used here, and `config.tensorrt` is "on".
        EngineryError: a plan can't be built, and `config.tensorrt` is "on".
        UserError: the TensorRT here lacks one of `config.engine_options`.
    """
    if config.tensorrt == "off":
        return (), "export.tensorrt is off"
    if missing := tensorrt.why_unavailable():
        if config.tensorrt == "on":
            raise RuntimeUnavailable(f"export.tensorrt is on, but {missing}")
        log.note(f"no TensorRT engines: {missing}")
        return (), missing
    check_options(config.engine_options)  # asked for by name: with auto, too, it is no reason to go on without
    graph = read_onnx(output / "fp32.onnx").graph
    convolutions = [node_id(node) for node in graph.node if node.op_type == "Conv"]
    entries: list[EngineEntry] = []
    for number, precision in enumerate(PRECISIONS):
        log.progress("building engines", number, len(PRECISIONS), precision)
        try:
            entry = _build_plan(config, precision, shapes, output, cache)
            layers = _layers(output / entry.file, entry, shapes, convolutions, log)
        except EngineryError as error:
            # A plan that no entry tells of would be shipped, and nobody would measure it.
            (output / f"{precision}.plan").unlink(missing_ok=True)
            if config.tensorrt == "on":
                raise
            log.warning(f"no {precision} engine: {error}")
            return tuple(entries), str(error)
        log.metrics({f"engine_build_seconds_{precision}": entry.build_seconds})
        entries.append(entry.model_copy(update={"layers": layers}))
    log.progress("building engines", len(PRECISIONS), len(PRECISIONS))
    return tuple(entries), ""


def _build_plan(
    config: ExportConfig, precision: Precision, shapes: ShapeSpec, output: Path, cache: Path | None
) -> EngineEntry:
    return build_engine(
        output / onnx_file_for(precision),
        output / f"{precision}.plan",
        precision=precision,
        shapes=shapes,
        timing_cache_path=cache / TIMING_CACHES if cache else None,
        optimization_level=config.optimization_level,
        workspace_bytes=config.workspace_bytes,
        options=config.engine_options,
        mantissa_bits=config.fp16_mantissa_bits,
    )


def _layers(
    plan: Path, entry: EngineEntry, shapes: ShapeSpec, convolutions: Sequence[str], log: StepLog
) -> EngineLayers | None:
    try:
        return inspect_engine(plan, entry, shapes, convolutions)
    except UnreadableLayers as error:
        log.warning(f"the report says nothing of the layers of {plan.name}: {error}")
        return None


def describe_plans(entries: Sequence[EngineEntry]) -> str:
    """In a few words, what was built, and how much of the INT8 engine is INT8."""
    if not entries:
        return "no TensorRT engines here"
    text = f"{len(entries)} TensorRT engines"
    for entry in entries:
        if entry.precision == "int8" and entry.layers is not None:
            total = sum(entry.layers.convolutions.values())
            text += f", {entry.layers.convolutions.get('INT8', 0)} of {total} convolutions in INT8"
    return text
