"""From the FP32 model to INT8 scales and the layers that use them: calibrate, compare, rank, leave out."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import onnx
import torch

from components.common.digests import digest_file, digest_json
from components.common.errors import EngineryError
from components.common.records import CalibrationEntry, SelectionEntry
from components.common.runners import to_numpy
from components.common.runners.torch import TorchGraph
from components.common.steplog import StepLog
from components.export.cache import Histograms, cached_histograms
from components.export.calibration import NUM_BINS, CalibrationMethod, compute_scale
from components.export.candidates import Candidates
from components.export.collection import collect_with_onnxruntime, collect_with_torch
from components.export.config import ExportConfig
from components.export.placement import activation_tensors
from components.export.precision import FP16_MAX
from components.export.qdq import scales_below_fp16
from components.export.samples import MIN_SELECTION_IMAGES, Samples
from components.export.selection import Budget, Selection
from components.export.sensitivity import BATCH_SIZE, Ranking, rank_layers
from components.export.sources import SourceModel


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What `placement` and `qdq` need, and how it came about."""

    scales: dict[str, float]  # by tensor
    excluded: tuple[str, ...]  # node ids
    calibration: CalibrationEntry


@dataclass(frozen=True, kw_only=True)
class _Calibrated:
    """What the model's activations were on the calibration set, whatever method makes scales of it."""

    histograms: Histograms
    address: Mapping[str, Any]  # what the histograms depend on
    cached: bool
    seconds: float


def quantize(
    config: ExportConfig,
    source: SourceModel,
    fp32_file: Path,
    calibration: Samples,
    selection: Samples | None,
    cache: Path | None,
    log: StepLog,
) -> Quantization:
    """Choose the INT8 scales and the layers that stay in float.

    Args:
        config: settings of export.
        source: the model.
        fp32_file: its FP32 graph.
        calibration: images whose activations give the scales.
        selection: other images to measure candidates on; None leaves everything in INT8 with the configured method,
            `max` for "auto".
        cache: folder of calibration results; None for none.
        log: told about progress and what was found.
    """
    fp32 = onnx.load(fp32_file)
    device = _device(fp32, calibration, log)
    calibrated = _calibrate(fp32, fp32_file, calibration, device, cache, log)
    _warn_about_ranges(calibrated.histograms, log)
    automatic = config.calibration_method == "auto"
    methods = list(CalibrationMethod) if automatic else [CalibrationMethod(config.calibration_method)]
    scales = {method: _scales(calibrated.histograms, method, config) for method in methods}
    method, entry = methods[0], None
    excluded: tuple[str, ...] = ()
    if selection is not None and (automatic or config.fallback):
        candidates = Candidates(
            samples=selection, shapes=source.shapes, device=device, directory=fp32_file.parent, log=log
        )
        method, excluded, entry = _select(config, fp32, scales, candidates, calibration, log)
    elif config.num_selection_images and (automatic or config.fallback):
        log.note(
            f"fewer than {MIN_SELECTION_IMAGES} training images are left to measure INT8 on: {method.value} is taken "
            "as it is"
        )
    if tiny := scales_below_fp16(scales[method]):
        log.warning(f"{len(tiny)} INT8 scales are too small for FP16, such as that of {tiny[0]}: int8_fp16.onnx loses")
    parameters = {"percentile": config.calibration_percentile} if method == CalibrationMethod.PERCENTILE else {}
    return Quantization(
        scales=scales[method],
        excluded=excluded,
        calibration=CalibrationEntry(
            method=method.value,
            num_images=calibration.num_images,
            split="train",
            seconds=calibrated.seconds,
            ids=calibration.ids(),
            images_digest=str(calibrated.address["images"]),
            digest=digest_json({**calibrated.address, "method": method.value, "parameters": parameters}),
            cached=calibrated.cached,
            excluded=excluded,
            selection=entry,
        ),
    )


def _device(fp32: onnx.ModelProto, calibration: Samples, log: StepLog) -> torch.device:
    """Where the model runs while INT8 is chosen: the GPU that decodes, if PyTorch can run the graph there."""
    if calibration.device_id is None:
        return torch.device("cpu")
    device = torch.device("cuda", calibration.device_id)
    size = calibration.transform.crop_size
    try:
        TorchGraph(fp32, device).run(torch.zeros(1, 3, size, size, device=device))
    except EngineryError as error:
        log.warning(f"calibrating on the CPU: {error}")
        return torch.device("cpu")
    return device


def _calibrate(
    fp32: onnx.ModelProto,
    fp32_file: Path,
    calibration: Samples,
    device: torch.device,
    cache: Path | None,
    log: StepLog,
) -> _Calibrated:
    """Histograms of the activations, from the cache or collected now."""
    started = time.monotonic()
    address = {
        "model": digest_file(fp32_file),
        "images": calibration.digest(),
        "tensors": activation_tensors(fp32),
        "histograms": {"bins": NUM_BINS, "version": 1, "device": device.type},
    }
    histograms, cached = cached_histograms(
        cache / "calibration" if cache else None,
        address,
        lambda: _collect(fp32, fp32_file, calibration, device, log),
        log.warning,
    )
    return _Calibrated(histograms=histograms, address=address, cached=cached, seconds=time.monotonic() - started)


def _collect(
    fp32: onnx.ModelProto, fp32_file: Path, calibration: Samples, device: torch.device, log: StepLog
) -> Histograms:
    def progress(done: int) -> None:
        log.progress("calibrating", done, calibration.num_images, "images")

    tensors = activation_tensors(fp32)
    if device.type == "cuda":
        return collect_with_torch(fp32, tensors, (batch.images for batch in calibration), device, progress)
    return collect_with_onnxruntime(fp32_file, tensors, (to_numpy(batch.images) for batch in calibration), progress)


def _warn_about_ranges(histograms: Histograms, log: StepLog) -> None:
    if overflowing := [name for name, histogram in histograms.items() if histogram.max_abs > FP16_MAX]:
        log.warning(f"{len(overflowing)} activations exceed FP16's range, such as {overflowing[0]}: FP16 will be wrong")


def _scales(histograms: Histograms, method: CalibrationMethod, config: ExportConfig) -> dict[str, float]:
    return {
        name: compute_scale(histogram, method, config.calibration_percentile) for name, histogram in histograms.items()
    }


def _select(
    config: ExportConfig,
    fp32: onnx.ModelProto,
    scales: dict[CalibrationMethod, dict[str, float]],
    candidates: Candidates,
    calibration: Samples,
    log: StepLog,
) -> tuple[CalibrationMethod, tuple[str, ...], SelectionEntry]:
    """The method, the layers that stay in float, and the record of all that was tried."""
    started = time.monotonic()
    budget = Budget(
        max_top1_drop_points=config.gate.max_top1_drop_points, min_relative_top1_pct=config.gate.min_relative_top1_pct
    )
    search = Selection(
        model=fp32,
        scales=scales,
        measure=candidates.measure,
        budget=budget,
        deadline=started + config.search_seconds,
    )
    method = search.choose_method()
    ranking = _rank(config, fp32, scales[method], calibration, candidates.device, search.deadline, log)
    excluded: tuple[str, ...] = ()
    if config.fallback and ranking.layers:
        excluded = search.exclude_layers(method, ranking)
    chosen = search.trial(method, excluded)
    if chosen is None or not chosen.within_budget:
        log.warning(
            "INT8 is not within the budget on training images"
            + (f" after {config.search_seconds:g} s (export.search_seconds)" if search.out_of_time else "")
        )
    entry = SelectionEntry(
        runtime=candidates.runtime,
        num_images=candidates.samples.num_images,
        fp32_top1_pct=search.fp32_top1_pct,
        max_top1_drop_points=budget.max_top1_drop_points,
        min_relative_top1_pct=budget.min_relative_top1_pct,
        trials=tuple(search.trials),
        ranking=ranking.layers,
        num_ranking_images=ranking.num_images,
        out_of_time=search.out_of_time,
        seconds=time.monotonic() - started,
    )
    return method, excluded, entry


def _rank(
    config: ExportConfig,
    fp32: onnx.ModelProto,
    scales: dict[str, float],
    calibration: Samples,
    device: torch.device,
    deadline: float,
    log: StepLog,
) -> Ranking:
    total = min(config.num_ranking_images, calibration.num_images)
    try:
        if total == 0:
            return Ranking(layers=(), num_images=0)
        return rank_layers(
            fp32,
            scales,
            _small_batches(calibration, total),
            device=device,
            deadline=deadline,
            progress=lambda done: log.progress("ranking layers", done, total, "images"),
        )
    except EngineryError as error:
        log.warning(f"layers are not ranked, and none is left out of INT8: {error}")
        return Ranking(layers=(), num_images=0)


def _small_batches(calibration: Samples, num_images: int) -> Iterator[torch.Tensor]:
    images = (part for batch in calibration for part in torch.split(batch.images, BATCH_SIZE))
    left = num_images
    for part in islice(images, -(-num_images // BATCH_SIZE)):
        yield part[:left]
        left -= len(part)
