"""export of a translator: encoder and step as ONNX, INT8 chosen by BLEU on sentences of the training split."""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import torch
from safetensors.torch import load_file
from torch import nn

from components.common.contracts.digests import digest_json
from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import (
    Artifact,
    BundleManifest,
    CheckpointManifest,
    DatasetManifest,
    check_task,
    load,
    prepare_directory,
    seal,
    write_atomically,
)
from components.common.contracts.records import (
    CALIBRATION_METHODS,
    PRECISIONS,
    CalibrationEntry,
    CpuModel,
    EngineEntry,
    LayerCost,
    Precision,
    SelectionEntry,
    TrainingRecord,
    Trial,
)
from components.common.process.steplog import StepLog
from components.common.runtimes import tensorrt
from components.common.runtimes.architectures import build_model, load_weights
from components.common.runtimes.onnx_files import read_onnx
from components.common.runtimes.onnxruntime import new_session
from components.common.tasks.translation.evaluation import Pairs, read_pairs
from components.common.tasks.translation.gpu import room
from components.common.tasks.translation.predictions import TextPredictions
from components.common.tasks.translation.runners import (
    ENCODER,
    OpenVinoNetwork,
    Translator,
    advanced,
    batches_by_length,
    with_room,
)
from components.common.tasks.translation.search import (
    ENCODER_INPUTS,
    ENCODER_OUTPUTS,
    STEP_INPUTS,
    STEP_OUTPUTS,
    Network,
    padded,
)
from components.common.tasks.translation.vocabulary import BOS, EOS, PAD, Vocabulary
from components.export.calibration import Histogram, add_outputs, compute_scale
from components.export.config import TIMING_CACHES, ExportConfig
from components.export.engines import (
    Sizes,
    Tensors,
    build_engine,
    cache_folder,
    check_options,
    check_tensorrt,
    describe_plans,
    is_strongly_typed,
    onnx_file_for,
)
from components.export.onnx_export import MAX_RELATIVE_ERROR, traced
from components.export.placement import activation_tensors, has_unsigned_activations, quantizable_layers, with_names
from components.export.precision import raise_opset, to_fp16
from components.export.qdq import Arithmetic, WeightStorage, insert_qdq
from components.export.selection import NUM_SELECTION_IMAGES, Budget

_METHODS = tuple(name for name, method in CALIBRATION_METHODS.items() if not method.is_smoothing)
_NUM_CHECKED = 8  # sentences on which ONNX Runtime and torch are compared
_MAX_TRIALS = 4  # with layers in float, which leave half of the cost each time
_FP16 = ("memory", "state", "next_state")  # float16 in plans but those in FP32: a GPU reads all of them in each step
_SEED = 0  # of the choice of sentences
Graphs = tuple[onnx.ModelProto, onnx.ModelProto]  # of encoder and step
_Profile = Mapping[str, tuple[int, int, int]]  # sizes of each axis that changes: smallest, tuned for, largest


def run(config: ExportConfig, log: StepLog, *, model: Path, data: Artifact[DatasetManifest], output: Path) -> str:
    """Export, calibrate and quantize. See the package's docstring."""
    if config.calibration_method not in ("auto", *_METHODS):
        raise UserError(
            f"export.calibration_method {config.calibration_method} is about networks of images; take auto or one of "
            f"{', '.join(_METHODS)}",
            code="other-task",
            setting="export.calibration_method",
        )
    checkpoint = load(model, CheckpointManifest, verify=(".safetensors",))
    record, text = checkpoint.manifest, data.manifest.text_spec
    check_task(f"the checkpoint {model}", record.task, data.manifest.task, "name one of the dataset's task")
    if record.files[text.vocabulary].digest != data.manifest.files[text.vocabulary].digest:
        raise EngineryError(
            f"the checkpoint {model} was trained with another vocabulary than the dataset {data.path} has; name the "
            "dataset that it was trained on",
            code="other-vocabulary",
        )
    check_tensorrt(config)
    prepare_directory(output)
    write_atomically(output / text.vocabulary, data.file(text.vocabulary).read_bytes())
    vocabulary = Vocabulary.read(output / text.vocabulary)
    network = build_model(record.architecture, text.num_tokens)
    load_weights(network, load_file(checkpoint.file("weights.safetensors")), str(model))
    log.progress("writing ONNX", 0, 2, "FP32", unit="precisions")
    fp32 = _graphs(network)
    calibration, selection, ids = _split(config, data, log)
    log.metrics({"onnx_relative_error": _check_against_torch(network, fp32, vocabulary, calibration[:_NUM_CHECKED])})
    plans = _PlanBuilder.of(config, log, network, text.max_tokens, _tokens(vocabulary, calibration)[0])
    search = _Search(
        config=config,
        log=log,
        fp32=fp32,
        vocabulary=vocabulary,
        translator=partial(Translator, vocabulary=vocabulary, text=text, files=()),
        language=text.target_language,
        budget=Budget.of(config, data),
        plan_weights=_weight_storage() if plans is not None else None,
    )
    entry, int8 = search.run(calibration, selection, ids)
    files = {"fp32": fp32, "int8": int8}
    if plans is not None:
        files["fp16"] = _in_fp16(fp32)
        if is_strongly_typed():  # there precisions are those of the file
            files["int8_fp16"] = search.typed_int8(entry)
    models: dict[str, str] = {}
    for precision, graphs in files.items():
        models |= {name: file.name for name, file in _saved(graphs, precision, output).items()}
    engines, missing = plans.build_all(output) if plans else ((), _why_no_plans(config))
    layers = [layer for graph in fp32 for layer in quantizable_layers(graph)]
    bundle = seal(
        output,
        BundleManifest,
        inputs={"model": checkpoint.digest, "dataset": data.digest},
        config=config,
        task=record.task,
        text=text,
        architecture=record.architecture,
        classes=(),
        models=models,
        cpu_models=(CpuModel(file=models["int8"], **asdict(search.arithmetic), saturates_on=()),),
        engines=engines,
        engines_missing=missing,
        calibration=entry,
        num_quantized_layers=len(layers) - len(entry.excluded),
        num_quantizable_layers=len(layers),
        training=TrainingRecord.model_validate(record, from_attributes=True),
    )
    train = data.manifest.splits["train"]
    log.dataset("train", train.digest, train.num_images, "training")
    log.metrics(
        {
            "calibration_seconds": entry.seconds,
            "num_calibration_images": float(entry.num_images),
            "num_excluded_layers": float(len(entry.excluded)),
            "int8_layers_pct": 100 * bundle.manifest.num_quantized_layers / max(1, len(layers)),
        }
    )
    return (
        f"ONNX of encoder and step in FP32 and INT8 ({bundle.manifest.num_quantized_layers} of {len(layers)} layers "
        f"quantized, {entry.method} over {entry.num_images} sentences), {describe_plans(engines)}"
    )


def _why_no_plans(config: ExportConfig) -> str:
    return "export.tensorrt is off" if config.tensorrt == "off" else str(tensorrt.why_unavailable())


def _saved(graphs: Graphs, precision: str, folder: Path) -> dict[str, Path]:
    """Files of encoder and step by their names in a bundle."""
    files = {name: folder / f"{name}.onnx" for name in (ENCODER.format(precision), precision)}
    for graph, file in zip(graphs, files.values(), strict=True):
        onnx.save(graph, file)
    return files


def _weight_storage() -> WeightStorage:
    """TensorRT 8.6 refuses constants of type int8 in attention."""
    return "dq" if is_strongly_typed() else "qdq"


def _in_fp16(graphs: Graphs) -> Graphs:
    encoder, step = (raise_opset(to_fp16(graph, _FP16)) for graph in graphs)
    return encoder, step


def _split(config: ExportConfig, data: Artifact[DatasetManifest], log: StepLog) -> tuple[Pairs, Pairs, Sequence[str]]:
    """Sentences to calibrate with, and others to choose by, from all of training; places of the former there."""
    pairs = read_pairs(data, "train")
    num_calibration = min(config.num_calibration_images, max(1, len(pairs) // 2))
    if "num_selection_images" in config.model_fields_set and config.num_selection_images > NUM_SELECTION_IMAGES:
        log.note(f"export.num_selection_images counts as {NUM_SELECTION_IMAGES:,}, the most of sentences")
    num_chosen = min(num_calibration + min(config.num_selection_images, NUM_SELECTION_IMAGES), len(pairs))
    places = random.Random(_SEED).sample(range(len(pairs)), num_chosen)  # a corpus lies file by file, often sorted
    chosen = [pairs[place] for place in places]
    return chosen[:num_calibration], chosen[num_calibration:], [f"{place}" for place in places[:num_calibration]]


class _Encoder(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, source: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.network.encode(source)  # type: ignore[operator]


class _Step(_Encoder):
    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.network.step(*inputs)  # type: ignore[operator]


def _examples(network: nn.Module, batch: int, length: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Inputs and outputs of encoder and step by name, each of other sizes: of the first's axes, those are dynamic."""
    source = torch.full((batch, length), EOS + 2)
    with torch.no_grad():
        encoded = network.encode(source)  # type: ignore[operator]
        state = network.empty_state(encoded[0], length + 1)  # type: ignore[operator]
        inputs = (torch.full((batch,), BOS), torch.zeros(1, dtype=torch.int64), *encoded, state)
        found = network.step(*inputs)  # type: ignore[operator]
    first = {"source": source, **dict(zip(ENCODER_OUTPUTS, encoded, strict=True))}
    return first, {**first, **dict(zip((*STEP_INPUTS, *STEP_OUTPUTS), (*inputs, *found), strict=True))}


def _axes(network: nn.Module) -> dict[str, list[str | int]]:
    """Shapes of the inputs of encoder and step by name, with "batch", "source" and "target" for axes that change."""
    (_, small), (_, large) = _examples(network, 2, 5), _examples(network, 3, 7)
    names = {(2, 3): "batch", (5, 7): "source", (6, 8): "target"}  # a state's tokens are one more in the examples
    return {
        name: [names.get(pair, pair[0]) for pair in zip(value.shape, large[name].shape, strict=True)]
        for name, value in small.items()
    }


def _graphs(network: nn.Module) -> Graphs:
    """Encoder and step in FP32; batch, length of the source and room for the translation are dynamic."""
    network.eval()
    (small, step), (_, large) = _examples(network, 2, 5), _examples(network, 3, 7)
    axes = {}
    for name, value in step.items():
        sizes = enumerate(zip(value.shape, large[name].shape, strict=True))
        axes[name] = {axis: f"{name}_{axis}" for axis, (one, other) in sizes if one != other}
    graphs = []
    for module, values, inputs, outputs in (
        (_Encoder(network), small, ENCODER_INPUTS, ENCODER_OUTPUTS),
        (_Step(network), step, STEP_INPUTS, STEP_OUTPUTS),
    ):
        own = {name: axes[name] for name in (*inputs, *outputs)}
        graph = traced(module, {name: values[name] for name in inputs}, outputs, own, f"{type(network).__name__}")
        graphs.append(with_names(graph))
    return graphs[0], graphs[1]


@dataclass(kw_only=True)
class _PlanBuilder:
    """Builds plans of encoder and step, for sentences one by one and for batches of fixed sizes where these build.

    TensorRT 8.6 captures no graph where a profile takes batches of several sizes; but of some fixed sizes it finds no
    INT8 kernels.
    """

    config: ExportConfig
    log: StepLog
    shapes: Mapping[str, Sequence[str | int]]  # of each tensor; an axis that changes by its name
    forms: Sequence[Sequence[_Profile]]  # that are tried, until one builds

    @classmethod
    def of(
        cls, config: ExportConfig, log: StepLog, network: nn.Module, max_tokens: int, sentences: Sequence[list[int]]
    ) -> "_PlanBuilder | None":
        """None where no plans are wanted, or can't be built here. Kernels are tuned for the median of `sentences`."""
        if config.tensorrt == "off" or tensorrt.why_unavailable():
            return None
        check_options(config.engine_options)
        usual = int(np.median([len(tokens) for tokens in sentences]))
        rooms = (1, room(usual, max_tokens), room(max_tokens, max_tokens))
        lengths = {"source": (1, usual, max_tokens), "target": rooms}
        opt, most = min(config.opt_batch, config.max_batch), config.max_batch
        fixed = [(batch, batch, batch) for batch in dict.fromkeys((most, opt, 1))]  # those that fail sooner first
        forms = [fixed, [(2, max(2, opt), most), (1, 1, 1)]] if most > 1 else [fixed]
        profiles = [[{"batch": batch, **lengths} for batch in form] for form in forms]
        return cls(config=config, log=log, shapes=_axes(network), forms=profiles)

    def build(
        self, graphs: Sequence[onnx.ModelProto], files: Sequence[Path], precision: Precision
    ) -> list[EngineEntry]:
        """Plans beside the ONNX files of encoder and step, the step's first.

        Raises:
            EngineryError: one can't be built.
        """
        cache, entries = cache_folder(self.config), []
        for graph, file, name in reversed(list(zip(graphs, files, (ENCODER, "{}"), strict=True))):
            weights, failed = _weight_storage() if precision == "int8" else "dq", list[str]()
            for form in self.forms:
                try:
                    entry = build_engine(
                        file,
                        file.with_suffix(".plan").with_stem(name.format(precision)),
                        precision=precision,
                        shapes=self._tensors(graph, form),
                        timing_cache_path=cache / TIMING_CACHES if cache else None,
                        optimization_level=self.config.optimization_level,
                        workspace_bytes=self.config.workspace_bytes,
                        options=self.config.engine_options,
                    )
                except EngineryError as error:
                    if error.code != "build-failed" or form is self.forms[-1]:
                        raise
                    failed.append(f"batches of fixed sizes: {error}".replace(str(file), file.name))
                    self.log.warning(f"{file.name} can't be built for batches of fixed sizes, trying others: {error}")
                else:
                    failed += entry.failed_forms
                    entries.append(entry.model_copy(update={"weights": weights, "failed_forms": tuple(failed)}))
                    break
        return entries

    def build_all(self, output: Path) -> tuple[tuple[EngineEntry, ...], str]:
        """The plans of all precisions beside their ONNX files, and why some are missing.

        Raises:
            EngineryError: one can't be built, and `export.tensorrt` is "on".
        """
        entries: list[EngineEntry] = []
        for number, precision in enumerate(PRECISIONS):
            stem = onnx_file_for(precision).removesuffix(".onnx")
            files = [output / f"{name.format(stem)}.onnx" for name in (ENCODER, "{}")]
            try:
                with self.log.heartbeat("building engines", number, len(PRECISIONS), precision):
                    entries += self.build([read_onnx(file) for file in files], files, precision)
            except EngineryError as error:
                if self.config.tensorrt == "on":
                    raise
                self.log.warning(f"no {precision} engines: {error}")
                for plan in output.glob("*.plan"):
                    if plan.name not in {entry.file for entry in entries}:
                        plan.unlink()
                return tuple(entries), str(error)
        self.log.progress("building engines", len(PRECISIONS), len(PRECISIONS))
        return tuple(entries), ""

    def _tensors(self, graph: onnx.ModelProto, form: Sequence[_Profile]) -> Tensors:
        inputs = [value.name for value in graph.graph.input]
        profiles = [{name: self._limits(name, sizes) for name in inputs} for sizes in form]
        return Tensors(profiles, [value.name for value in graph.graph.output], _FP16)

    def _limits(self, name: str, sizes: _Profile) -> Sizes:
        low, usual, high = (
            tuple(sizes[axis][which] if isinstance(axis, str) else axis for axis in self.shapes[name])
            for which in range(3)
        )
        return low, usual, high


@dataclass
class OnnxNetwork:
    """Encoder and step in ONNX Runtime; counts what goes through tensors that are asked for."""

    runtime, device = "onnxruntime", "CPU"
    graphs: Graphs
    histograms: tuple[dict[str, Histogram], dict[str, Histogram]] = field(default_factory=lambda: ({}, {}))

    def __post_init__(self) -> None:
        self._sessions = []
        for graph, histograms in zip(self.graphs, self.histograms, strict=True):
            watched = deepcopy(graph)
            add_outputs(watched, histograms)
            self._sessions.append(new_session(watched.SerializeToString()))
        (state,) = (each.shape for each in self._sessions[1].get_inputs() if each.name == "state")
        self._state_sizes = [size if isinstance(size, int) else None for size in state]

    def encode(self, source: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See Network."""
        memory, mask = self._run(0, {"source": source}, ENCODER_OUTPUTS)
        return memory, mask, with_room(None, self._state_sizes, len(source), 0)

    def step(
        self, tokens: np.ndarray, position: int, memory: np.ndarray, mask: np.ndarray, state: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See Network."""
        state = with_room(state, self._state_sizes, len(tokens), position)
        values = (tokens, np.array([position]), memory, mask, state)
        logits, found = self._run(1, dict(zip(STEP_INPUTS, values, strict=True)), STEP_OUTPUTS)
        return logits, advanced(state, found, position)

    def _run(self, which: int, inputs: Mapping[str, np.ndarray], outputs: Sequence[str]) -> list[np.ndarray]:
        session, histograms = self._sessions[which], self.histograms[which]
        taken = {value.name: inputs[value.name] for value in session.get_inputs()}  # a network may not need all
        watched = [name for name in histograms if name not in inputs]
        found = session.run([*outputs, *watched], taken)
        for name, values in {**inputs, **dict(zip(watched, found[len(outputs) :], strict=True))}.items():
            if name in histograms:
                histograms[name].add(values)
        return found[: len(outputs)]


def teacher_forced(
    network: Network, sources: Sequence[list[int]], targets: Sequence[list[int]]
) -> Iterator[np.ndarray]:
    """Logits [b, V] of each step over sentences whose targets are known, b of those that have so many tokens."""
    for places in batches_by_length(targets, 32):
        memory, mask, state = network.encode(padded([sources[place] for place in places]))
        wanted = [targets[place] for place in places]  # the longest first
        for position in range(len(wanted[0])):
            left = sum(len(target) > position for target in wanted)
            tokens = np.array([([BOS, *target])[position] for target in wanted[:left]])
            logits, state = network.step(tokens, position, memory[:, :left], mask[:left], state[:, :left])
            yield logits


def _tokens(vocabulary: Vocabulary, pairs: Pairs) -> tuple[list[list[int]], list[list[int]]]:
    return vocabulary.encode([pair[0] for pair in pairs]), vocabulary.encode([pair[1] for pair in pairs])


def _check_against_torch(network: nn.Module, graphs: Graphs, vocabulary: Vocabulary, pairs: Pairs) -> float:
    """The largest difference of the files' logits from torch's over some sentences, relative to the largest logit.

    Raises:
        EngineryError: it is too large.
    """
    sources, targets = _tokens(vocabulary, pairs)
    length = max(map(len, sources + targets))
    both = np.full((len(pairs), 2, length), PAD)
    for row, source, target in zip(both, sources, targets, strict=True):
        row[0, : len(source)], row[1, : len(target)] = source, [BOS, *target[:-1]]
    with torch.no_grad():
        expected = network.eval()(torch.from_numpy(both)).numpy()
    order = next(batches_by_length(targets, len(targets)))
    worst = max(
        np.abs(logits - expected[order[: len(logits)], position]).max()
        for position, logits in enumerate(teacher_forced(OnnxNetwork(graphs), sources, targets))
    )
    error = float(worst / np.abs(expected).max())
    if not error <= MAX_RELATIVE_ERROR:
        raise EngineryError(
            f"export check: logits of the ONNX files differ from torch by {error:.2e} of the largest logit, allowed "
            f"{MAX_RELATIVE_ERROR:.0e}",
            code="export-differs",
        )
    return error


@dataclass(kw_only=True)
class _Search:
    """INT8 by measurement: how ranges follow from histograms, then which layers stay in float."""

    config: ExportConfig
    log: StepLog
    fp32: Graphs
    vocabulary: Vocabulary
    translator: partial[Translator]
    language: str
    budget: Budget
    plan_weights: WeightStorage | None = None  # None: no plans, OpenVINO serves
    scales: Mapping[str, float] = field(default_factory=dict)  # that were chosen, by tensor

    @property
    def arithmetic(self) -> Arithmetic:
        """Arithmetic of seven bits, so that sums saturate on no CPU; TensorRT takes signed activations alone."""
        unsigned = self.plan_weights is None and any(map(has_unsigned_activations, self.fp32))
        return Arithmetic(weight_bits=7, activations="unsigned" if unsigned else "signed")

    def run(self, calibration: Pairs, selection: Pairs, ids: Sequence[str]) -> tuple[CalibrationEntry, Graphs]:
        """The record, and encoder and step in INT8."""
        began, sources = time.perf_counter(), _tokens(self.vocabulary, calibration)
        histograms = self._histograms(*sources)
        seconds = time.perf_counter() - began
        methods = _METHODS if self.config.calibration_method == "auto" else (self.config.calibration_method,)
        scales = {
            method: {
                name: compute_scale(histogram, method, self.config.calibration_percentile)
                for own in histograms
                for name, histogram in own.items()
            }
            for method in methods
        }
        digest = digest_json([list(pair) for pair in calibration])
        entry = CalibrationEntry(
            method=methods[0],
            num_images=len(calibration),
            split="train",
            seconds=seconds,
            images_digest=digest,
            ids=tuple(ids),
        )
        self.scales = scales[methods[0]]
        if not selection:
            return entry, self._int8(self.scales, ())
        began = time.perf_counter()
        fp32 = self._predictions(self.fp32, selection)
        trials: list[Trial] = []
        for method in methods:
            trials.append(self._trial(method, scales[method], (), fp32, selection))
            if trials[-1].score_pct >= fp32.score_pct:  # INT8 can't be expected to do better
                break
        best = max(trials, key=lambda trial: (trial.score_pct, trial.chrf_pct))
        ranking: list[LayerCost] = []
        if self.config.fallback and self.config.num_ranking_images and not best.within_budget:
            ranking = self._ranking(scales[best.method], calibration[: self.config.num_ranking_images])
            share = self.budget.max_drop_points / max(-best.delta_points, 1e-9)
            for excluded in dict.fromkeys(_costliest(ranking, min(share, 0.5))):
                trials.append(self._trial(best.method, scales[best.method], excluded, fp32, selection))
                if trials[-1].within_budget:
                    break
            best = max(trials, key=lambda trial: (trial.within_budget, trial.score_pct, trial.chrf_pct))
        chosen = SelectionEntry(
            runtime="openvino" if self.plan_weights is None else "onnxruntime",
            num_images=len(selection),
            fp32_score_pct=fp32.score_pct,
            max_drop_points=self.config.gate.max_drop_points,
            min_relative_score_pct=self.config.gate.min_relative_score_pct,
            trials=tuple(trials),
            ranking=tuple(ranking),
            num_ranking_images=min(len(calibration), self.config.num_ranking_images) if ranking else 0,
            out_of_time=False,
            seconds=time.perf_counter() - began,
        )
        entry = entry.model_copy(update={"method": best.method, "excluded": best.excluded, "selection": chosen})
        self.scales = scales[best.method]
        return entry, self._int8(self.scales, best.excluded)

    def typed_int8(self, entry: CalibrationEntry) -> Graphs:
        """INT8 where a layer is, FP16 elsewhere: for networks whose file says the precisions."""
        return self._int8(self.scales, entry.excluded, _in_fp16(self.fp32))

    def _histograms(self, sources: list[list[int]], targets: list[list[int]]) -> tuple[dict[str, Histogram], ...]:
        encoder, step = ({name: Histogram(name) for name in activation_tensors(graph)} for graph in self.fp32)
        network, done = OnnxNetwork(self.fp32, (encoder, step)), 0
        total = sum(len(targets[places[0]]) for places in batches_by_length(targets, 32))
        for done, _ in enumerate(teacher_forced(network, sources, targets), 1):
            self.log.progress("calibrating", done, total, unit="steps")
        return encoder, step

    def _int8(self, scales: Mapping[str, float], excluded: Sequence[str], graphs: Graphs | None = None) -> Graphs:
        encoder, step = (self._one_int8(graph, scales, excluded) for graph in graphs or self.fp32)
        return encoder, step

    def _one_int8(
        self, graph: onnx.ModelProto, scales: Mapping[str, float], excluded: Sequence[str]
    ) -> onnx.ModelProto:
        layers = quantizable_layers(graph)
        own = set(excluded).intersection(layers)
        if len(own) == len(layers):
            return graph
        weights = self.plan_weights or "dq"
        return insert_qdq(graph, scales, exclude=own, arithmetic=self.arithmetic, weights=weights)

    def _predictions(self, graphs: Graphs, pairs: Pairs) -> TextPredictions:
        translator = self.translator(network=self._opened(graphs))
        found = translator.translate([pair[0] for pair in pairs])
        return TextPredictions.of_texts(found, [pair[1] for pair in pairs], self.language)

    def _trial(
        self,
        method: str,
        scales: Mapping[str, float],
        excluded: tuple[str, ...],
        fp32: TextPredictions,
        selection: Pairs,
    ) -> Trial:
        self.log.progress("choosing INT8", 0, 1, f"{method}, {len(excluded)} layers in float")
        own = self._predictions(self._int8(scales, excluded), selection)
        known = {"method": method, "excluded": excluded, **own.measures(), **asdict(self.arithmetic)}
        return self.budget.trial(fp32, own, **known)

    def _ranking(self, scales: Mapping[str, float], pairs: Pairs) -> list[LayerCost]:
        """Layers, the costliest first: by the divergence of the next tokens where one alone is in INT8."""
        sources, targets = _tokens(self.vocabulary, pairs)
        layers = [quantizable_layers(graph) for graph in self.fp32]
        operators = {node.name: node.op_type for graph in self.fp32 for node in graph.graph.node}
        every = [name for own in layers for name in own]

        def logits(graphs: Graphs) -> np.ndarray:
            return np.concatenate(list(teacher_forced(self._opened(graphs), sources, targets)))

        reference = torch.from_numpy(logits(self.fp32)).log_softmax(1)
        costs = []
        for number, name in enumerate(every):
            self.log.progress("ranking layers", number, len(every), unit="layers")
            own = torch.from_numpy(logits(self._int8(scales, [other for other in every if other != name])))
            divergence = nn.functional.kl_div(own.log_softmax(1), reference, reduction="batchmean", log_target=True)
            costs.append(LayerCost(name=name, operator=operators[name], cost_nats=max(0.0, divergence.item())))
        return sorted(costs, key=lambda cost: -cost.cost_nats)

    def _opened(self, graphs: Graphs) -> Network:
        """Open graphs with OpenVINO, which serves them; those of plans, slow to build, as the file says."""
        if self.plan_weights is not None:
            return OnnxNetwork(graphs)
        with TemporaryDirectory() as folder:
            return OpenVinoNetwork(*_saved(graphs, "int8", Path(folder)).values())


def _costliest(ranking: Sequence[LayerCost], share: float) -> Iterator[tuple[str, ...]]:
    """Layers to keep in float, the costliest first: all others cost `share` of the whole at most, then half of it."""
    costs = np.array([cost.cost_nats for cost in ranking])
    left = 1 - costs.cumsum() / max(costs.sum(), 1e-9)
    for number in range(_MAX_TRIALS):
        yield tuple(cost.name for cost in ranking[: int((left > share / 2**number).sum()) + 1])
