"""export of a translator: encoder and step as ONNX, INT8 chosen by BLEU on sentences of the training split."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnxruntime as ort
import torch
from safetensors.torch import load_file
from torch import nn

from components.common.contracts.digests import digest_json
from components.common.contracts.errors import EngineryError
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
    CalibrationEntry,
    CpuModel,
    LayerCost,
    SelectionEntry,
    TrainingRecord,
    Trial,
)
from components.common.process.steplog import StepLog
from components.common.runtimes.architectures import build_model, load_weights
from components.common.tasks.translation.evaluation import Pairs, read_pairs
from components.common.tasks.translation.predictions import TextPredictions
from components.common.tasks.translation.runners import (
    ENCODER,
    ENCODER_INPUTS,
    ENCODER_OUTPUTS,
    STEP_INPUTS,
    STEP_OUTPUTS,
    OpenVinoNetwork,
    Translator,
    batches_by_length,
)
from components.common.tasks.translation.search import Network, padded
from components.common.tasks.translation.vocabulary import BOS, EOS, PAD, Vocabulary
from components.export.calibration import RANGES, Histogram, compute_scale
from components.export.config import ExportConfig
from components.export.onnx_export import MAX_RELATIVE_ERROR, traced
from components.export.placement import activation_tensors, has_unsigned_activations, quantizable_layers, with_names
from components.export.qdq import Arithmetic, insert_qdq

_METHODS = tuple(name for name in RANGES if name != "smoothquant")
_NUM_CHECKED = 8  # sentences on which ONNX Runtime and torch are compared
_MAX_TRIALS = 6  # with layers in float, twice as many each time
Graphs = tuple[onnx.ModelProto, onnx.ModelProto]  # of encoder and step


def run(config: ExportConfig, log: StepLog, *, model: Path, data: Artifact[DatasetManifest], output: Path) -> str:
    """Export, calibrate and quantize. See the package's docstring."""
    checkpoint = load(model, CheckpointManifest, verify=(".safetensors",))
    record, text = checkpoint.manifest, data.manifest.text_spec
    check_task(f"the checkpoint {model}", record.task, data.manifest.task, "name one of the dataset's task")
    if record.files[text.vocabulary].digest != data.manifest.files[text.vocabulary].digest:
        raise EngineryError(
            f"the checkpoint {model} was trained with another vocabulary than the dataset {data.path} has; name the "
            "dataset that it was trained on",
            code="other-vocabulary",
        )
    prepare_directory(output)
    write_atomically(output / text.vocabulary, data.file(text.vocabulary).read_bytes())
    vocabulary = Vocabulary.read(output / text.vocabulary)
    network = build_model(record.architecture, text.num_tokens)
    load_weights(network, load_file(checkpoint.file("weights.safetensors")), str(model))
    log.progress("writing ONNX", 0, 2, "FP32", unit="precisions")
    fp32 = _graphs(network)
    calibration, selection = _split(config, data)
    log.metrics({"onnx_relative_error": _check_against_torch(network, fp32, vocabulary, calibration[:_NUM_CHECKED])})
    search = _Search(
        config=config,
        log=log,
        fp32=fp32,
        vocabulary=vocabulary,
        translator=partial(Translator, vocabulary=vocabulary, text=text, file=output),
        language=text.target_language,
    )
    entry, int8 = search.run(calibration, selection, [f"{number}" for number in range(len(calibration))])
    files = {"fp32": fp32, "int8": int8}
    models = {}
    for precision, graphs in files.items():
        for name, graph in zip((ENCODER.format(precision), precision), graphs, strict=True):
            models[name] = f"{name}.onnx"
            onnx.save(graph, output / models[name])
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
        engines=(),
        engines_missing="translators are not compiled by TensorRT yet",
        calibration=entry,
        num_quantized_layers=len(layers) - len(entry.excluded),
        num_quantizable_layers=len(layers),
        training=TrainingRecord.model_validate({name: getattr(record, name) for name in TrainingRecord.model_fields}),
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
        f"quantized, {entry.method} over {entry.num_images} sentences)"
    )


def _split(config: ExportConfig, data: Artifact[DatasetManifest]) -> tuple[Pairs, Pairs]:
    """Sentences to calibrate with, and others to choose by; both of training."""
    available = data.manifest.splits["train"].num_images
    num_calibration = min(config.num_calibration_images, max(1, available // 2))
    num_selection = min(config.num_selection_images, available - num_calibration)
    pairs = read_pairs(data, "train", 0, num_calibration + num_selection)
    return pairs[:num_calibration], pairs[num_calibration:]


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
    position = torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        encoded = network.encode(source)  # type: ignore[operator]
        tokens = torch.full((batch,), BOS)
        for _ in range(length):
            logits, state = network.step(tokens, position, *encoded)  # type: ignore[operator]
            encoded = (*encoded[:2], state)
    first = {"source": source, **dict(zip(ENCODER_OUTPUTS, encoded, strict=True))}
    return first, {"tokens": tokens, "position": position, **first, "logits": logits, "next_state": state}


def _graphs(network: nn.Module) -> Graphs:
    """Encoder and step in FP32; batch, length of the source and tokens so far are dynamic."""
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


@dataclass
class OnnxNetwork:
    """Encoder and step in ONNX Runtime; counts what goes through tensors that are asked for."""

    graphs: Graphs
    histograms: tuple[dict[str, Histogram], dict[str, Histogram]] = field(default_factory=lambda: ({}, {}))

    def __post_init__(self) -> None:
        self._sessions = []
        for graph, histograms in zip(self.graphs, self.histograms, strict=True):
            watched = onnx.ModelProto()
            watched.CopyFrom(graph)
            known = {value.name for value in (*graph.graph.output, *graph.graph.input)}
            watched.graph.output.extend(
                onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
                for name in histograms
                if name not in known
            )
            self._sessions.append(ort.InferenceSession(watched.SerializeToString(), providers=["CPUExecutionProvider"]))

    def encode(self, source: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See Network."""
        memory, mask, state = self._run(0, {"source": source}, ENCODER_OUTPUTS)
        return memory, mask, state

    def step(
        self, tokens: np.ndarray, position: int, memory: np.ndarray, mask: np.ndarray, state: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See Network."""
        values = (tokens, np.array([position]), memory, mask, state)
        logits, state = self._run(1, dict(zip(STEP_INPUTS, values, strict=True)), STEP_OUTPUTS)
        return logits, state

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

    @property
    def arithmetic(self) -> Arithmetic:
        """Arithmetic of seven bits, so that sums saturate on no CPU."""
        unsigned = any(map(has_unsigned_activations, self.fp32))
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
        if not selection:
            return entry, self._int8(scales[methods[0]], ())
        began = time.perf_counter()
        fp32 = self._predictions(self.fp32, selection)
        trials = [self._trial(method, scales[method], (), fp32, selection) for method in methods]
        best = max(trials, key=lambda trial: trial.score_pct)
        ranking: list[LayerCost] = []
        if self.config.fallback and not best.within_budget:
            ranking = self._ranking(scales[best.method], calibration[: self.config.num_ranking_images])
            for number in range(_MAX_TRIALS):
                excluded = tuple(cost.name for cost in ranking[: 1 << number])
                trials.append(self._trial(best.method, scales[best.method], excluded, fp32, selection))
                if trials[-1].within_budget or 1 << number >= len(ranking):
                    break
            best = max(trials, key=lambda trial: (trial.within_budget, trial.score_pct))
        chosen = SelectionEntry(
            runtime="openvino",
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
        return entry, self._int8(scales[best.method], best.excluded)

    def _histograms(self, sources: list[list[int]], targets: list[list[int]]) -> tuple[dict[str, Histogram], ...]:
        encoder, step = ({name: Histogram(name) for name in activation_tensors(graph)} for graph in self.fp32)
        network, done = OnnxNetwork(self.fp32, (encoder, step)), 0
        total = sum(len(targets[places[0]]) for places in batches_by_length(targets, 32))
        for done, _ in enumerate(teacher_forced(network, sources, targets), 1):
            self.log.progress("calibrating", done, total, unit="steps")
        return encoder, step

    def _int8(self, scales: Mapping[str, float], excluded: Sequence[str]) -> Graphs:
        encoder, step = (self._one_int8(graph, scales, excluded) for graph in self.fp32)
        return encoder, step

    def _one_int8(
        self, graph: onnx.ModelProto, scales: Mapping[str, float], excluded: Sequence[str]
    ) -> onnx.ModelProto:
        layers = quantizable_layers(graph)
        own = set(excluded).intersection(layers)
        if len(own) == len(layers):
            return graph
        return insert_qdq(graph, scales, exclude=own, arithmetic=self.arithmetic)

    def _predictions(self, graphs: Graphs, pairs: Pairs) -> TextPredictions:
        with TemporaryDirectory() as folder:
            translator = self.translator(network=_compiled(graphs, Path(folder)))
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
        found, budget = own.comparison(fp32), self.config.gate
        share_pct = 100 * own.score_pct / fp32.score_pct if fp32.score_pct else 100.0
        return Trial(
            method=method,
            excluded=excluded,
            score_pct=own.score_pct,
            delta_points=found.delta_points,
            low_points=-found.drop_upper_points,
            high_points=-found.drop_lower_points,
            agreement_pct=own.agreement_pct(fp32),
            within_budget=found.drop_upper_points <= budget.max_drop_points
            and share_pct >= budget.min_relative_score_pct,
            **asdict(self.arithmetic),
        )

    def _ranking(self, scales: Mapping[str, float], pairs: Pairs) -> list[LayerCost]:
        """Layers, the costliest first: by the divergence of the next tokens where one alone is in INT8."""
        sources, targets = _tokens(self.vocabulary, pairs)
        layers = [quantizable_layers(graph) for graph in self.fp32]
        operators = {node.name: node.op_type for graph in self.fp32 for node in graph.graph.node}
        every = [name for own in layers for name in own]

        def logits(graphs: Graphs) -> np.ndarray:
            with TemporaryDirectory() as folder:
                network = _compiled(graphs, Path(folder))
            return np.concatenate(list(teacher_forced(network, sources, targets)))

        reference = torch.from_numpy(logits(self.fp32)).log_softmax(1)
        costs = []
        for number, name in enumerate(every):
            self.log.progress("ranking layers", number, len(every), unit="layers")
            own = torch.from_numpy(logits(self._int8(scales, [other for other in every if other != name])))
            divergence = nn.functional.kl_div(own.log_softmax(1), reference, reduction="batchmean", log_target=True)
            costs.append(LayerCost(name=name, operator=operators[name], cost_nats=max(0.0, divergence.item())))
        return sorted(costs, key=lambda cost: -cost.cost_nats)


def _compiled(graphs: Graphs, folder: Path) -> OpenVinoNetwork:
    files = [folder / "encoder.onnx", folder / "step.onnx"]
    for graph, file in zip(graphs, files, strict=True):
        onnx.save(graph, file)
    return OpenVinoNetwork(*files)
