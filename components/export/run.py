"""export: Checkpoint or own model -> Bundle."""

import json
from collections.abc import Callable
from pathlib import Path

import onnx
import torch

from components.common.contracts.manifests import (
    ALL_FILES,
    Artifact,
    BundleManifest,
    DatasetManifest,
    load,
    prepare_directory,
    seal,
    write_atomically,
)
from components.common.contracts.records import CALIBRATION_METHODS
from components.common.process.steplog import StepLog
from components.common.runtimes.onnx_files import read_onnx
from components.common.runtimes.runner import to_numpy
from components.common.runtimes.selection import fit_model
from components.common.tasks import load_task
from components.export.backends import Int8Plans
from components.export.calibration import Samples, split_samples
from components.export.config import ONNX_FILES, ExportConfig
from components.export.engines import build_plans, cache_folder, check_tensorrt, describe_plans
from components.export.model_check import check_apart
from components.export.onnx_export import check_against_torch
from components.export.placement import quantizable_layers, with_names
from components.export.precision import raise_opset, to_fp16
from components.export.qdq import Arithmetic, insert_qdq
from components.export.quantization import Quantization, quantize
from components.export.rebuild import is_bundle, rebuild
from components.export.selection import Budget
from components.export.sources import SourceModel, write_fp32_onnx


def run(config: ExportConfig, log: StepLog, *, model: Path, dataset: Path, output: Path) -> str:
    """Export, calibrate, quantize and compile. See the package's docstring."""
    data = load(dataset, DatasetManifest, verify=ALL_FILES if config.verify else ())
    if is_bundle(model):
        return rebuild(config, log, bundle=load(model, BundleManifest, verify=ALL_FILES), data=data, output=output)
    if data.manifest.text is not None:
        from components.export import translation

        return translation.run(config, log, model=model, data=data, output=output)
    check_tensorrt(config)
    prepare_directory(output)
    fp32_file = output / ONNX_FILES["fp32"]
    if model.is_file():
        check_apart(model, config.architecture, data.manifest.classes, config.image_size)
    source = write_fp32_onnx(model, data, config, fp32_file)
    if source.note:
        log.note(source.note)
    cache = cache_folder(config)
    calibration, selection = split_samples(config, data, source.transform, 0 if torch.cuda.is_available() else None)
    if calibration.num_images < len(source.classes):
        log.warning(
            f"{calibration.num_images} calibration images for {len(source.classes)} classes: some classes are not seen"
        )
    _check_numerics(source, calibration, fp32_file, log)
    quantized = quantize(config, source, fp32_file, calibration, selection, cache, log)
    entry = quantized.calibration.selection
    graphs = _write_precisions(fp32_file, quantized, load_task(data.manifest.task).exported, output, log)
    write_atomically(output / "scales.json", json.dumps(quantized.scales, indent=1, sort_keys=True).encode())
    int8 = Int8Plans(
        config=config,
        shapes=source.shapes,
        graphs=graphs,
        scales=quantized.scales,
        excluded=quantized.excluded,
        samples=selection,
        num_images=entry.num_images if entry is not None else 0,
        budget=Budget.of(config, data),
        output=output,
        cache=cache,
        log=log,
    )
    engines, missing = build_plans(config, source.shapes, output, cache, log, int8.build)
    layers, placement = quantizable_layers(graphs["int8"]), int8.record or quantized.placement
    in_float = placement.chosen.excluded if placement is not None else int8.excluded
    bundle = seal(
        output,
        BundleManifest,
        task=data.manifest.task,
        inputs={"model": source.input_digest, "dataset": data.digest},
        config=config,
        architecture=source.architecture,
        classes=source.classes,
        transform=source.transform,
        shapes=source.shapes,
        models=ONNX_FILES,
        cpu_models=quantized.cpu_models,
        engines=engines,
        engines_missing=missing,
        calibration=quantized.calibration,
        placement=placement,
        num_quantized_layers=len(set(layers) - set(in_float)),
        num_quantizable_layers=len(layers),
        training=source.training,
    )
    _track(bundle, data, log)
    return _outcome(bundle)


def _check_numerics(source: SourceModel, samples: Samples, fp32_file: Path, log: StepLog) -> None:
    if source.module is None:
        return  # the model came as ONNX: there is nothing to compare with
    images = to_numpy(next(iter(samples)).images)[:4]
    log.metrics({"onnx_relative_error": check_against_torch(source.module, fp32_file, source.shapes, images)})


def _write_precisions(
    fp32_file: Path,
    quantized: Quantization,
    exported: Callable[[onnx.ModelProto], onnx.ModelProto],
    output: Path,
    log: StepLog,
) -> dict[str, onnx.ModelProto]:
    """The ONNX files: one graph, one set of scales, the same layers in INT8.

    Of the file that is fit for the CPU here more may be in float, for speed. Those of INT8 are made of a network that
    computes what FP32 does, perhaps smoothed. All become what is `exported` only now: until here outputs were compared
    number by number.

    Returns:
        The graphs that INT8 is written into, by name of the file.
    """
    scales, excluded = quantized.scales, quantized.excluded
    fp32 = with_names(read_onnx(fp32_file))
    is_smoothed = CALIBRATION_METHODS[quantized.calibration.method].is_smoothing
    whole = with_names(quantized.network) if is_smoothed else fp32
    network = exported(whole)
    if network is not whole:
        onnx.save(exported(fp32), fp32_file)
    log.progress("writing ONNX", 0, 3, "int8.onnx", unit="precisions")
    onnx.save(insert_qdq(network, scales, exclude=excluded), output / ONNX_FILES["int8"])
    for model in quantized.cpu_models:
        arithmetic, left_out = Arithmetic.of(model), excluded
        if quantized.placement is not None and model == fit_model(quantized.cpu_models):
            left_out = quantized.placement.chosen.excluded
        onnx.save(insert_qdq(network, scales, exclude=left_out, arithmetic=arithmetic), output / model.file)
    log.progress("writing ONNX", 1, 3, "fp16.onnx", unit="precisions")
    fp16 = exported(to_fp16(fp32))
    onnx.save(fp16, output / ONNX_FILES["fp16"])
    log.progress("writing ONNX", 2, 3, "int8_fp16.onnx", unit="precisions")
    typed = raise_opset(exported(to_fp16(whole)) if is_smoothed else fp16)
    onnx.save(insert_qdq(typed, scales, exclude=excluded), output / ONNX_FILES["int8_fp16"])
    log.progress("writing ONNX", 3, 3, unit="precisions")
    return {"int8": network, "int8_fp16": typed}


def _track(bundle: Artifact[BundleManifest], data: Artifact[DatasetManifest], log: StepLog) -> None:
    record = bundle.manifest
    calibration, placement = record.calibration, record.placement
    train = data.manifest.splits["train"]
    log.dataset("train", train.digest, train.num_images, "training")
    values = {
        "calibration_seconds": calibration.seconds,
        "num_calibration_images": float(calibration.num_images),
        "num_excluded_layers": float(len(calibration.excluded)),
        "int8_layers_pct": 100 * record.num_quantized_layers / max(1, record.num_quantizable_layers),
    }
    if placement is not None:
        values["placement_seconds"] = placement.seconds
        if placement.int8_time_pct is not None:
            values["int8_time_pct"] = placement.int8_time_pct
    if calibration.selection is not None:
        for trial in calibration.selection.trials:
            if not trial.excluded:
                values[f"selection_delta_points_{trial.method}"] = trial.delta_points
        values["selection_seconds"] = calibration.selection.seconds
    log.metrics(values)
    log.artifact(bundle.file("scales.json"))


def _outcome(bundle: Artifact[BundleManifest]) -> str:
    record = bundle.manifest
    return (
        f"ONNX in FP32, FP16 and INT8 ({record.num_quantized_layers} of {record.num_quantizable_layers} layers "
        f"quantized, {record.calibration.method} over {record.calibration.num_images} images), "
        f"{describe_plans(record.engines)}"
    )
