"""INT8 chosen by measurement: the calibration, the layers that stay in float, and how CPUs' files write it."""

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import torch

from components.common.contracts.digests import digest_file, digest_json
from components.common.contracts.errors import EngineryError
from components.common.contracts.instruction_sets import SATURATING, instruction_set
from components.common.contracts.records import (
    CALIBRATION_METHODS,
    MIN_SELECTION_IMAGES,
    CalibrationEntry,
    CpuModel,
    CpuTrial,
    PlacementEntry,
    SelectionEntry,
)
from components.common.process.steplog import StepLog
from components.common.runtimes.onnx_files import read_onnx
from components.common.runtimes.onnxruntime import new_session
from components.common.runtimes.runner import Runner, to_numpy
from components.common.runtimes.torch import TorchGraph
from components.common.tasks import load_task, predictions_of
from components.export.backends import OpenVINOBackend
from components.export.calibration import (
    NUM_BINS,
    Histograms,
    Samples,
    cached_histograms,
    collect_with_onnxruntime,
    collect_with_torch,
    compute_scale,
)
from components.export.config import ONNX_FILES, ExportConfig
from components.export.mixed import Compiled, MixedSearch
from components.export.placement import GraphIndex, activation_tensors, has_unsigned_activations, quantizable_layers
from components.export.precision import FP16_MAX
from components.export.qdq import TENSORRT, Arithmetic, insert_qdq, scales_below_fp16
from components.export.selection import NUM_SELECTION_IMAGES, Advance, Budget, Candidates, Ranking, Selection
from components.export.smoothing import ALPHA, channels, smooth, smoothed_scales
from components.export.sources import SourceModel

NUM_IMAGES = 64
# Rounding in another order moves the error of a whole network by some per cent: 0.2 % and 2 % on two networks. Sums
# that saturate make it twice as large and more.
_EXCESS = 1.25
_CLOSE = 1.25  # errors this near each other: the faster file is taken
_TURNS, _TURN_S, _BATCH = 3, 0.2, 16
_PLACEMENT_S = 15.0  # that the search for blocks takes on a small CPU
_CpuArithmetic = functools.partial(Arithmetic, runtime="openvino")


def first_arithmetic(fp32: onnx.ModelProto) -> Arithmetic:
    """The arithmetic that calibrations are compared in on this CPU: never saturating, unsigned where possible."""
    return _CpuArithmetic(
        weight_bits=7 if instruction_set() in SATURATING else 8,
        activations="unsigned" if has_unsigned_activations(fp32) else "signed",
    )


def cpu_models(activations: Literal["signed", "unsigned"], chosen: Arithmetic | None) -> tuple[CpuModel, ...]:
    """The files for CPUs: one with 8-bit weights, and one that is exact on every CPU.

    Args:
        activations: of both.
        chosen: by measurement on this CPU; None where nothing was measured on it.
    """
    here = instruction_set()
    unfit = tuple(name for name in SATURATING if chosen is None or name != here)
    unfit += (here,) if chosen is not None and chosen.weight_bits == 7 else ()
    eight, seven = _CpuArithmetic(activations=activations), _CpuArithmetic(weight_bits=7, activations=activations)
    if chosen is not None:
        eight, seven = (chosen, seven) if chosen.weight_bits == 8 else (eight, chosen)
    return (
        CpuModel(file="int8_cpu.onnx", **asdict(eight), saturates_on=unfit),
        CpuModel(file="int8_cpu_7bit.onnx", **asdict(seven), saturates_on=()),
    )


@dataclass(kw_only=True)
class ArithmeticSearch:
    """Writes one calibration in several ways and compares OpenVINO's logits with FP32's and with a simulation.

    A simulation in floating point can't saturate: where OpenVINO is further from FP32 than the simulation is, sums
    did. That needs no labels, and shows on few images.
    """

    fp32: onnx.ModelProto
    scales: Mapping[str, float]
    batches: list[torch.Tensor]  # [B, 3, H, W] float32 each, normalized; `NUM_IMAGES` in all
    candidates: Candidates
    trials: list[CpuTrial] = field(default_factory=list)

    def choose(self) -> Arithmetic:
        """The activations that are more accurate or faster, and the most accurate weights that don't saturate here.

        Attention scores are in INT8 where that is faster.
        """
        self._images = np.concatenate([to_numpy(images) for images in self.batches])
        self._expected = self.candidates.logits(self.fp32, self.batches)
        first = first_arithmetic(self.fp32)
        chosen = first
        if first.activations == "unsigned":
            chosen = self._better(first, _CpuArithmetic(weight_bits=first.weight_bits))
        chosen = self._with_weights(first, chosen)
        in_int8 = replace(chosen, scores="int8")
        if not GraphIndex(self.fp32.graph).score_products() or self._trial(in_int8).saturates:
            return chosen
        return self._better(chosen, in_int8)

    def _better(self, first: Arithmetic, second: Arithmetic) -> Arithmetic:
        """The more accurate way; of two that are about as accurate, the faster one."""
        own, other = self._trial(first), self._trial(second)
        if max(own.logits_error, other.logits_error) > _CLOSE * min(own.logits_error, other.logits_error):
            return first if own.logits_error < other.logits_error else second
        own, other = self._time(first, second)
        return first if (own.images_per_s or 0) >= (other.images_per_s or 0) else second

    def _with_weights(self, first: Arithmetic, chosen: Arithmetic) -> Arithmetic:
        eight, seven = (_CpuArithmetic(weight_bits=bits, activations=chosen.activations) for bits in (8, 7))
        eight_bits = self._trial(eight)
        if first.weight_bits == 8 and not eight_bits.saturates:
            return eight
        ways = [eight, seven]
        if chosen.activations == "unsigned":
            ways.append(replace(eight, signed_weight_bits=7))
        exact = [way for way in ways if not self._trial(way).saturates]
        return min(exact, key=lambda way: self._trial(way).logits_error, default=seven)

    def _trial(self, arithmetic: Arithmetic) -> CpuTrial:
        if known := [trial for trial in self.trials if Arithmetic.of(trial) == arithmetic]:
            return known[0]
        model = insert_qdq(self.fp32, self.scales, arithmetic=arithmetic)
        error = self._error(self.candidates.logits(model, self.batches))
        session = new_session(model.SerializeToString())
        shapes = self.candidates.shapes
        (simulated,) = session.run([shapes.output_name], {shapes.input_name: self._images})
        simulated_error = self._error(simulated)
        self.trials.append(
            CpuTrial(
                **asdict(arithmetic),
                instruction_set=instruction_set(),
                logits_error=error,
                simulated_error=simulated_error,
                saturates=error > _EXCESS * simulated_error,
            )
        )
        return self.trials[-1]

    def _error(self, logits: np.ndarray) -> float:
        """RMS of the difference to FP32, over the RMS of FP32. logits: [N, classes]."""
        return float(np.linalg.norm(logits - self._expected) / (np.linalg.norm(self._expected) or 1.0))

    def _time(self, *ways: Arithmetic) -> list[CpuTrial]:
        """The speed of each, measured by turns, added to what is known of it."""
        models = {way: insert_qdq(self.fp32, self.scales, arithmetic=way) for way in ways}
        names = {way: str(place) for place, way in enumerate(ways)}
        speeds: dict[Arithmetic, list[float]] = {way: [] for way in ways}
        with self.candidates.runners({names[way]: model for way, model in models.items()}) as runners:
            for _ in range(_TURNS):
                for way in ways:
                    timing = runners[names[way]].measure(
                        min(_BATCH, self.candidates.shapes.max_batch),
                        warmup_s=_TURN_S / 4,
                        duration_s=_TURN_S,
                        min_iterations=2,
                    )
                    speeds[way].append(timing.images_per_s)
        timed = []
        for index, trial in enumerate(self.trials):
            way = Arithmetic.of(trial)
            if way in speeds:
                self.trials[index] = trial.model_copy(update={"images_per_s": statistics.median(speeds[way])})
                timed.append(self.trials[index])
        return timed


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Scales and layers for `placement` and `qdq`, and the record of how they were chosen."""

    network: onnx.ModelProto  # FP32, of which the INT8 files are made: smoothed where that was chosen
    scales: dict[str, float]  # by tensor
    excluded: tuple[str, ...]  # node ids
    cpu_models: tuple[CpuModel, ...]
    placement: PlacementEntry | None  # of the file that is fit for the CPU here; None where no blocks were chosen
    calibration: CalibrationEntry


@dataclass(frozen=True, kw_only=True)
class _Calibrated:
    """The model's activations on the calibration set, from which every method reads its scales."""

    histograms: Histograms
    address: Mapping[str, Any]  # what the histograms depend on
    cached: bool
    seconds: float

    @property
    def channel_maxima(self) -> dict[str, np.ndarray]:
        """Largest magnitudes by channel of the tensors that can be smoothed, by name."""
        found = {name: histogram.channel_max for name, histogram in self.histograms.items()}
        return {name: maxima for name, maxima in found.items() if maxima is not None}


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
        log: gets progress and findings.
    """
    fp32 = read_onnx(fp32_file)
    device = _device(fp32, calibration, log)
    calibrated = _calibrate(fp32, fp32_file, calibration, device, cache, log)
    if overflowing := [name for name, histogram in calibrated.histograms.items() if histogram.max_abs > FP16_MAX]:
        log.warning(f"{len(overflowing)} activations exceed FP16's range, such as {overflowing[0]}: FP16 will be wrong")
    automatic = config.calibration_method == "auto"
    maxima = calibrated.channel_maxima
    applicable = [name for name, own in CALIBRATION_METHODS.items() if maxima or not own.is_smoothing]
    methods = applicable if automatic else [config.calibration_method]
    scales = {
        method: {
            name: compute_scale(histogram, method, config.calibration_percentile)
            for name, histogram in calibrated.histograms.items()
        }
        for method in methods
    }
    networks = {}
    for name in (name for name in methods if maxima and CALIBRATION_METHODS[name].is_smoothing):
        networks[name], balanced = smooth(fp32, maxima)
        scales[name] |= smoothed_scales(balanced)
    if not networks and CALIBRATION_METHODS[methods[0]].is_smoothing:
        log.note("there is nothing to smooth: no LayerNormalization is read by matrix products alone")
    method, entry, placement = methods[0], None, None
    excluded: tuple[str, ...] = ()
    candidates = Candidates(shapes=source.shapes, device=device, directory=fp32_file.parent, log=log)
    chooser = _Chooser(config, fp32, calibration, candidates)
    if selection is not None and (automatic or config.fallback):
        method, excluded, entry, placement = _select(config, scales, networks, selection, chooser)
    else:
        chooser.fp32 = networks.get(method, fp32)
        chooser.choose_arithmetic(scales[method])
    if selection is None and config.num_selection_images and (automatic or config.fallback):
        asked = config.num_selection_images
        few = f"export.num_selection_images is {asked}" if asked < MIN_SELECTION_IMAGES else "fewer are left"
        log.note(
            f"INT8 is measured on {MIN_SELECTION_IMAGES} training images or more, and {few}: {method} is taken as it is"
        )
    if tiny := scales_below_fp16(scales[method]):
        log.warning(f"{len(tiny)} INT8 scales are too small for FP16, such as that of {tiny[0]}: int8_fp16.onnx loses")
    chosen = CALIBRATION_METHODS[method]
    parameters = {"percentile": config.calibration_percentile} if chosen.has_percentile else {}
    parameters |= {"alpha": ALPHA} if chosen.is_smoothing else {}
    activations = chooser.arithmetic.activations if chooser.on_cpu else first_arithmetic(fp32).activations
    return Quantization(
        network=chooser.fp32,
        scales=scales[method],
        excluded=excluded,
        cpu_models=cpu_models(activations, chooser.arithmetic if chooser.on_cpu else None),
        placement=placement,
        calibration=CalibrationEntry(
            method=method,
            num_images=calibration.num_images,
            split="train",
            seconds=calibrated.seconds,
            ids=calibration.ids(),
            images_digest=str(calibrated.address["images"]),
            digest=digest_json({**calibrated.address, "method": method, "parameters": parameters}),
            cached=calibrated.cached,
            excluded=excluded,
            selection=entry,
            cpu_trials=chooser.trials,
        ),
    )


def _device(fp32: onnx.ModelProto, calibration: Samples, log: StepLog) -> torch.device:
    """Return where the model runs while INT8 is chosen: the GPU that decodes, if PyTorch can run the graph there."""
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
    fp32: onnx.ModelProto, fp32_file: Path, calibration: Samples, device: torch.device, cache: Path | None, log: StepLog
) -> _Calibrated:
    """Histograms of the activations, from the cache or collected now."""
    started, tensors = time.monotonic(), activation_tensors(fp32, scores=device.type == "cpu")
    address = {
        "model": digest_file(fp32_file),
        "images": calibration.digest(),
        "tensors": tensors,
        "channels": (by_channel := channels(fp32)),
        "histograms": {"bins": NUM_BINS, "version": 2, "device": device.type},
    }

    def collect() -> Histograms:
        if device.type == "cuda":
            images = (batch.images for batch in calibration)
            return collect_with_torch(fp32, tensors, images, device, progress, by_channel)
        arrays = (to_numpy(batch.images) for batch in calibration)
        return collect_with_onnxruntime(fp32_file, tensors, arrays, progress, by_channel)

    def progress(done: int) -> None:
        log.progress("calibrating", done, calibration.num_images, unit="images")

    folder = cache / "calibration" if cache else None
    histograms, cached = cached_histograms(folder, address, collect, log.warning)
    return _Calibrated(histograms=histograms, address=address, cached=cached, seconds=time.monotonic() - started)


def _select(
    config: ExportConfig,
    scales: dict[str, dict[str, float]],
    networks: dict[str, onnx.ModelProto],
    samples: Samples,
    chooser: "_Chooser",
) -> tuple[str, tuple[str, ...], SelectionEntry, PlacementEntry | None]:
    """The method, the layers that stay in float for the accuracy, and the records of what was tried, also for speed."""
    started = time.monotonic()
    budget, deadline = Budget.of(config, samples.dataset), started + config.search_seconds
    exported = load_task(samples.dataset.manifest.task).exported  # fewer outputs to copy and to look at

    def measure(
        models: Mapping[str, onnx.ModelProto], text: str, detail: Callable[[], str]
    ) -> AbstractContextManager[Advance]:
        written = {name: exported(model) for name, model in models.items()}
        return chooser.candidates.measure(written, samples, search.num_images, text, detail)

    search = Selection(
        model=chooser.fp32,
        scales=scales,
        smoothed=networks,
        measure=measure,
        num_images=samples.num_images,
        budget=budget,
        deadline=deadline,
        arithmetic=chooser.arithmetic,
    )
    method = search.choose_method()
    if chooses_blocks := chooser.on_cpu and config.mixed_engines > 0:  # in time that accuracy does not get
        needed_s = _PLACEMENT_S + config.mixed_engines * search.pass_s
        half_s = (deadline - time.monotonic()) / 2
        search.deadline -= min(2 * needed_s, half_s) if half_s >= needed_s else 0
    if search.num_images < min(samples.num_images, NUM_SELECTION_IMAGES):
        chooser.log.note(
            f"FP32 is slow here: INT8 is measured on {search.num_images:,} of {samples.num_images:,} images, to end in "
            f"{config.search_seconds:g} s (export.search_seconds)"
        )
    chooser.fp32 = networks.get(method, chooser.fp32)
    search.arithmetic = chooser.choose_arithmetic(scales[method])
    ranking = chooser.ranking(scales[method], search)
    num_layers = len(ranking.operators) if config.num_ranking_images else 0
    excluded = search.exclude_layers(method, ranking, num_layers) if config.fallback else ()
    if not search.holds(method, excluded):
        chooser.log.warning(
            "INT8 is not within the budget on training images"
            + (f" after {config.search_seconds:g} s (export.search_seconds)" if search.out_of_time else "")
        )
    entry = SelectionEntry(
        runtime=chooser.candidates.runtime,
        num_images=search.num_images,
        fp32_score_pct=search.fp32_score_pct,
        max_drop_points=budget.max_drop_points,
        min_relative_score_pct=budget.min_relative_score_pct,
        trials=tuple(search.trials),
        ranking=ranking.measured,
        num_ranking_images=ranking.num_images,
        out_of_time=search.out_of_time,
        seconds=time.monotonic() - started,
    )
    search.deadline = deadline
    placement = chooser.choose_blocks(search, method, excluded) if chooses_blocks else None
    return method, excluded, entry, placement


class _Chooser:
    """Choices by a few calibration images, without labels: how INT8 is written, and what layers cost."""

    def __init__(
        self, config: ExportConfig, fp32: onnx.ModelProto, calibration: Samples, candidates: Candidates
    ) -> None:
        self.config, self.fp32, self.calibration = config, fp32, calibration
        self.candidates, self.log = candidates, candidates.log
        self.on_cpu = candidates.device.type == "cpu"
        self.arithmetic = first_arithmetic(fp32) if self.on_cpu else TENSORRT
        self.trials: tuple[CpuTrial, ...] = ()

    def choose_arithmetic(self, scales: dict[str, float]) -> Arithmetic:
        """Choose how a CPU's file is written; on a GPU nothing is chosen, and nobody measures it."""
        if self.on_cpu:
            self.log.progress("choosing how INT8 is written for CPUs", 0, 1)
            batches = self._images(NUM_IMAGES)
            search = ArithmeticSearch(fp32=self.fp32, scales=scales, batches=batches, candidates=self.candidates)
            self.arithmetic, self.trials = search.choose(), tuple(search.trials)
        return self.arithmetic

    def choose_blocks(self, search: Selection, method: str, excluded: tuple[str, ...]) -> PlacementEntry | None:
        """Measure which blocks the CPU here runs faster in float; None where the time is over.

        Args:
            search: has measured INT8 of `method`, and measures the accuracy of mixtures.
            method: of the calibration.
            excluded: nodes that stay in float for the accuracy.
        """
        deadline = search.deadline - self.config.mixed_engines * search.pass_s
        if time.monotonic() + _PLACEMENT_S > deadline:
            self.log.note("no time is left to measure which blocks are faster in INT8 (export.search_seconds)")
            return None

        def accuracy(compiled: Sequence[Compiled], _: Mapping[str, Runner]) -> dict[str, dict[str, Any]]:
            known = {compiled[0].name: {"delta_points": 0.0, "agreement_pct": 100.0, "within_budget": True}}
            for entry in compiled[1:]:
                search.holds(method, entry.excluded)
                trial = search.trial(method, entry.excluded)
                fields = {"delta_points", "agreement_pct", "within_budget"}
                known[entry.name] = trial.model_dump(include=fields) if trial is not None else {}
            return known

        shapes, file = self.candidates.shapes, self.candidates.directory / ONNX_FILES["fp32"]
        graph = read_onnx(file)
        layers = tuple(quantizable_layers(graph))
        with tempfile.TemporaryDirectory(dir=self.candidates.directory) as folder:
            backend = OpenVINOBackend(
                shapes=shapes,
                fp32=self.fp32,
                scales=search.scales[method],
                arithmetic=self.arithmetic,
                reference=Compiled(name="FP32", precision="fp32", excluded=layers, graph=graph, file=file),
                folder=Path(folder),
            )
            blocks = MixedSearch(
                fp32=self.fp32,
                excluded=excluded,
                shapes=shapes,
                backend=backend,
                max_engines=self.config.mixed_engines,
                log=self.log,
                deadline=deadline,
            )
            return blocks.run(accuracy)[1]

    def ranking(self, scales: dict[str, float], search: Selection) -> Ranking:
        """The layers by their cost in INT8. Nothing is measured yet."""
        batches = functools.cache(lambda: self._images(self.config.num_ranking_images))
        return Ranking(
            self.fp32,
            scales,
            self.arithmetic,
            lambda model: self.candidates.logits(model, batches()),
            divergence=predictions_of(self.calibration.dataset.manifest.task).divergence,
            deadline=search.deadline,
            progress=lambda done, most: self.log.progress(
                "ranking layers", done, most, search.time_left(), unit="groups at most"
            ),
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
