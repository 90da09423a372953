"""export: Checkpoint or own model -> Bundle."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

from components.common.artifacts import (
    ALL_FILES,
    PRECISIONS,
    Artifact,
    BundleManifest,
    CalibrationEntry,
    DatasetManifest,
    EngineEntry,
    load,
    prepare_directory,
    seal,
    write_atomically,
)
from components.common.errors import EngineryError, RuntimeUnavailable
from components.common.loader import Loader, to_numpy
from components.common.runners.tensorrt import why_no_tensorrt
from components.common.steplog import StepLog
from components.export.calibration import CalibrationMethod, collect_with_onnxruntime, compute_scale
from components.export.config import ExportConfig
from components.export.engines import build_engine, onnx_file_for
from components.export.onnx_export import check_against_torch
from components.export.placement import activation_tensors, insert_qdq, quantizable_layers, scales_below_fp16
from components.export.precision import FP16_MAX, raise_opset, to_fp16
from components.export.sources import SourceModel, write_fp32_onnx

_CALIBRATION_BATCH = 32
_MODELS = {"fp32": "fp32.onnx", "fp16": "fp16.onnx", "int8": "int8.onnx", "int8_fp16": "int8_fp16.onnx"}


def run(config: ExportConfig, log: StepLog, *, model: Path, dataset: Path, output: Path) -> str:
    """Export, calibrate, quantize and compile. See the package's docstring."""
    data = load(dataset, DatasetManifest, verify=ALL_FILES if config.verify else ())
    prepare_directory(output)
    fp32_file = output / _MODELS["fp32"]
    source = write_fp32_onnx(model, data, config, fp32_file)
    _check_numerics(source, data, fp32_file, log)
    scales, calibration = _calibrate(config, source, data, fp32_file, log)
    fp32 = onnx.load(fp32_file)
    layers = quantizable_layers(fp32)
    _write_precisions(fp32, scales, output, log)
    write_atomically(output / "scales.json", json.dumps(scales, indent=1, sort_keys=True).encode())
    engines, missing = _build_engines(config, source, output, log)
    bundle = seal(
        output,
        BundleManifest,
        inputs={"model": source.input_digest, "dataset": data.digest},
        config=config,
        architecture=source.architecture,
        classes=source.classes,
        transform=source.transform,
        shapes=source.shapes,
        models=_MODELS,
        engines=engines,
        engines_missing=missing,
        calibration=calibration,
        num_quantized_layers=len(layers),
        num_quantizable_layers=len(layers),
        training=source.training,
    )
    log.metrics({"calibration_seconds": calibration.seconds, "num_calibration_images": float(calibration.num_images)})
    log.artifact(output / "scales.json")
    return _outcome(bundle)


def _check_numerics(source: SourceModel, data: Artifact[DatasetManifest], fp32_file: Path, log: StepLog) -> None:
    if source.module is None:
        return  # the model came as ONNX: there is nothing to compare with
    images = next(_calibration_batches(source, data, num_images=4, seed=0))
    log.metrics({"onnx_relative_error": check_against_torch(source.module, fp32_file, source.shapes, images)})


def _calibration_batches(
    source: SourceModel, data: Artifact[DatasetManifest], *, num_images: int, seed: int
) -> Iterator[np.ndarray]:
    """Batches of training images, [B, 3, H, W] float32, by the evaluation transform.

    The training shards are shuffled when they are written, so any run of them is a random sample.
    """
    batch_size = min(_CALIBRATION_BATCH, num_images)
    left = num_images
    for batch in Loader(data, "train", source.transform, batch_size=batch_size, seed=seed):
        yield to_numpy(batch.images)[:left]
        left -= len(batch.images)
        if left <= 0:
            return


def _calibrate(
    config: ExportConfig, source: SourceModel, data: Artifact[DatasetManifest], fp32_file: Path, log: StepLog
) -> tuple[dict[str, float], CalibrationEntry]:
    available = data.manifest.splits["train"].num_images
    num_images = min(config.num_calibration_images, available)
    if num_images < len(source.classes):
        log.warning(f"{num_images} calibration images for {len(source.classes)} classes: some classes are not seen")
    started = time.perf_counter()
    batches = _calibration_batches(source, data, num_images=num_images, seed=config.seed)
    histograms = collect_with_onnxruntime(
        fp32_file,
        activation_tensors(onnx.load(fp32_file)),
        batches,
        lambda done: log.progress("calibrating", done, num_images, config.calibration_method),
    )
    if overflowing := [name for name, histogram in histograms.items() if histogram.max_abs > FP16_MAX]:
        log.warning(f"{len(overflowing)} activations exceed FP16's range, such as {overflowing[0]}: FP16 will be wrong")
    method = CalibrationMethod(config.calibration_method)
    scales = {
        name: compute_scale(histogram, method, config.calibration_percentile) for name, histogram in histograms.items()
    }
    if tiny := scales_below_fp16(scales):
        log.warning(f"{len(tiny)} INT8 scales are too small for FP16, such as that of {tiny[0]}: int8_fp16.onnx loses")
    entry = CalibrationEntry(
        method=config.calibration_method, num_images=num_images, split="train", seconds=time.perf_counter() - started
    )
    return scales, entry


def _write_precisions(fp32: onnx.ModelProto, scales: dict[str, float], output: Path, log: StepLog) -> None:
    """The four files: one graph, one set of scales."""
    log.progress("writing ONNX", 0, 3, "int8.onnx")
    onnx.save(insert_qdq(fp32, scales), output / _MODELS["int8"])
    log.progress("writing ONNX", 1, 3, "fp16.onnx")
    fp16 = to_fp16(fp32)
    onnx.save(fp16, output / _MODELS["fp16"])
    log.progress("writing ONNX", 2, 3, "int8_fp16.onnx")
    onnx.save(insert_qdq(raise_opset(fp16), scales), output / _MODELS["int8_fp16"])


def _build_engines(
    config: ExportConfig, source: SourceModel, output: Path, log: StepLog
) -> tuple[tuple[EngineEntry, ...], str]:
    """Plans for the GPU here. Returns them, and why there are none."""
    if config.tensorrt == "off":
        return (), "export.tensorrt is off"
    if missing := why_no_tensorrt():
        if config.tensorrt == "on":
            raise RuntimeUnavailable(f"export.tensorrt is on, but {missing}")
        log.note(f"no TensorRT engines: {missing}")
        return (), missing
    cache = Path(config.timing_cache).expanduser() if config.timing_cache else None
    entries: list[EngineEntry] = []
    for number, precision in enumerate(PRECISIONS):
        log.progress("building engines", number, len(PRECISIONS), precision)
        try:
            info = build_engine(
                output / onnx_file_for(precision),
                output / f"{precision}.plan",
                precision=precision,
                shapes=source.shapes,
                timing_cache_path=cache,
                optimization_level=config.optimization_level,
                workspace_bytes=config.workspace_bytes,
            )
        except EngineryError as error:
            if config.tensorrt == "on":
                raise
            log.warning(f"no {precision} engine: {error}")
            return tuple(entries), str(error)
        log.metrics({f"engine_build_seconds_{precision}": info.build_seconds})
        entries.append(
            EngineEntry(
                file=f"{precision}.plan",
                precision=precision,
                source_onnx=info.source_onnx,
                tensorrt_version=info.tensorrt_version,
                gpu_name=info.gpu_name,
                compute_capability=info.compute_capability,
                driver_version=info.driver_version,
                build_seconds=info.build_seconds,
            )
        )
    return tuple(entries), ""


def _outcome(bundle: Artifact[BundleManifest]) -> str:
    record = bundle.manifest
    engines = f"{len(record.engines)} TensorRT engines" if record.engines else "no TensorRT engines here"
    return (
        f"ONNX in FP32, FP16 and INT8 ({record.num_quantized_layers} layers quantized, "
        f"{record.calibration.method} over {record.calibration.num_images} images), {engines}"
    )
