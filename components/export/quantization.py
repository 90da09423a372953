"""From the FP32 model to INT8 scales and the layers that use them: calibrate, compare, rank, leave out."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch

from components.common.contracts.digests import digest_file, digest_json
from components.common.contracts.errors import EngineryError
from components.common.contracts.records import CalibrationEntry, CpuModel, CpuTrial, SelectionEntry
from components.common.process.steplog import StepLog
from components.common.runtimes.onnx_files import read_onnx
from components.common.runtimes.runner import to_numpy
from components.common.runtimes.torch import TorchGraph
from components.export.arithmetic import NUM_IMAGES, ArithmeticSearch, cpu_models, first_arithmetic
from components.export.calibration import (
    MIN_SELECTION_IMAGES,
    NUM_BINS,
    CalibrationMethod,
    Histograms,
    Samples,
    cached_histograms,
    collect_with_onnxruntime,
    collect_with_torch,
    compute_scale,
)
from components.export.config import ExportConfig
from components.export.placement import activation_tensors
from components.export.precision import FP16_MAX
from components.export.qdq import TENSORRT, Arithmetic, scales_below_fp16
from components.export.selection import Budget, Candidates, Ranking, Selection, rank_layers
from components.export.sources import SourceModel


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """What `placement` and `qdq` need, and how it came about."""

    scales: dict[str, float]  # by tensor
    excluded: tuple[str, ...]  # node ids
    cpu_models: tuple[CpuModel, ...]
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
    fp32 = read_onnx(fp32_file)
    device = _device(fp32, calibration, log)
    calibrated = _calibrate(fp32, fp32_file, calibration, device, cache, log)
    _warn_about_ranges(calibrated.histograms, log)
    automatic = config.calibration_method == "auto"
    methods = list(CalibrationMethod) if automatic else [CalibrationMethod(config.calibration_method)]
    scales = {method: _scales(calibrated.histograms, method, config) for method in methods}
    method, entry = methods[0], None
    excluded: tuple[str, ...] = ()
    candidates = Candidates(shapes=source.shapes, device=device, directory=fp32_file.parent, log=log)
    chooser = _Chooser(config, fp32, calibration, candidates)
    if selection is not None and (automatic or config.fallback):
        method, excluded, entry = _select(config, scales, selection, chooser)
    else:
        chooser.choose_arithmetic(scales[method])
    if selection is None and config.num_selection_images and (automatic or config.fallback):
        log.note(
            f"fewer than {MIN_SELECTION_IMAGES} training images are left to measure INT8 on: {method.value} is taken "
            "as it is"
        )
    if tiny := scales_below_fp16(scales[method]):
        log.warning(f"{len(tiny)} INT8 scales are too small for FP16, such as that of {tiny[0]}: int8_fp16.onnx loses")
    parameters = {"percentile": config.calibration_percentile} if method == CalibrationMethod.PERCENTILE else {}
    activations = chooser.arithmetic.activations if chooser.on_cpu else first_arithmetic(fp32).activations
    return Quantization(
        scales=scales[method],
        excluded=excluded,
        cpu_models=cpu_models(activations, chooser.arithmetic.weight_bits if chooser.on_cpu else None),
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
            cpu_trials=chooser.trials,
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
        log.progress("calibrating", done, calibration.num_images, unit="images")

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
    scales: dict[CalibrationMethod, dict[str, float]],
    samples: Samples,
    chooser: "_Chooser",
) -> tuple[CalibrationMethod, tuple[str, ...], SelectionEntry]:
    """The method, the layers that stay in float, and the record of all that was tried."""
    started = time.monotonic()
    budget = Budget(
        max_top1_drop_points=config.gate.max_top1_drop_points,
        min_relative_top1_pct=config.gate.min_relative_top1_pct,
        num_validation_images=samples.dataset.manifest.splits["val"].num_images if config.gate.confident else 0,
    )
    search = Selection(
        model=chooser.fp32,
        scales=scales,
        measure=lambda models, text: chooser.candidates.predictions(models, samples, text),
        budget=budget,
        deadline=started + config.search_seconds,
        arithmetic=chooser.arithmetic,
    )
    method = search.choose_method()
    search.arithmetic = chooser.choose_arithmetic(scales[method])
    ranking = Ranking(layers=(), num_images=0)
    excluded: tuple[str, ...] = ()
    if config.fallback:

        def rank() -> Ranking:
            nonlocal ranking
            ranking = chooser.rank(scales[method], search.deadline)
            return ranking

        excluded = search.exclude_layers(method, rank)
    chosen = search.trial(method, excluded)
    if chosen is None or not chosen.within_budget:
        chooser.log.warning(
            "INT8 is not within the budget on training images"
            + (f" after {config.search_seconds:g} s (export.search_seconds)" if search.out_of_time else "")
        )
    entry = SelectionEntry(
        runtime=chooser.candidates.runtime,
        num_images=samples.num_images,
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


class _Chooser:
    """What is measured on a few calibration images, without labels: how INT8 is written, and what layers cost."""

    def __init__(
        self, config: ExportConfig, fp32: onnx.ModelProto, calibration: Samples, candidates: Candidates
    ) -> None:
        self.config, self.fp32, self.calibration = config, fp32, calibration
        self.candidates, self.log = candidates, candidates.log
        self.on_cpu = candidates.runtime == "openvino"
        self.arithmetic = first_arithmetic(fp32) if self.on_cpu else TENSORRT
        self.trials: tuple[CpuTrial, ...] = ()

    def choose_arithmetic(self, scales: dict[str, float]) -> Arithmetic:
        """How a CPU's file is written; on a GPU nothing is chosen, and nobody measures it."""
        if self.on_cpu:
            self.log.progress("choosing how INT8 is written for CPUs", 0, 1)
            batches = self._images(NUM_IMAGES)
            search = ArithmeticSearch(fp32=self.fp32, scales=scales, batches=batches, candidates=self.candidates)
            self.arithmetic, self.trials = search.choose(), tuple(search.trials)
        return self.arithmetic

    def rank(self, scales: dict[str, float], deadline: float) -> Ranking:
        """What each layer costs in INT8; nothing where no images are given to it."""
        if self.config.num_ranking_images == 0:
            return Ranking(layers=(), num_images=0)
        batches = self._images(self.config.num_ranking_images)
        return rank_layers(
            self.fp32,
            scales,
            self.arithmetic,
            lambda model: self.candidates.logits(model, batches),
            deadline=deadline,
            progress=lambda done, total: self.log.progress("ranking layers", done, total, unit="layers"),
        )

    def _images(self, num_images: int) -> list[torch.Tensor]:
        """The first calibration images: [B, 3, H, W] float32 each, normalized."""
        batches, left = [], num_images
        for batch in self.calibration:
            batches.append(batch.images[:left])
            left -= len(batches[-1])
            if left <= 0:
                break
        return batches
