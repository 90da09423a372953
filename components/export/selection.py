"""INT8 chosen by measurement: which calibration, and which layers stay in float to keep the accuracy."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import onnx
import torch

from components.common.contracts.manifests import Artifact, DatasetManifest
from components.common.contracts.records import LayerCost, Trial
from components.common.contracts.statistics import drop_upper, paired_difference
from components.common.contracts.transforms import ShapeSpec
from components.common.data.evaluation import Predictions, predict
from components.common.process.steplog import StepLog
from components.common.runtimes.runner import Runner
from components.common.runtimes.torch import TorchRunner
from components.export.calibration import Samples
from components.export.config import ExportConfig
from components.export.placement import Graph, float_graph, node_id, quantized_reads
from components.export.qdq import Arithmetic, insert_qdq


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Runs models with the runtime that would serve them.

    On a GPU PyTorch computes what the Q/DQ nodes say, in FP32. Engines would take minutes each to build, and differ
    from the simulation by rounding only; `validate` measures the engine of the candidate that is chosen.
    """

    shapes: ShapeSpec
    device: torch.device
    directory: Path  # for temporary files
    log: StepLog

    @property
    def runtime(self) -> str:
        """Name of the runtime that the candidates run on."""
        return "torch" if self.device.type == "cuda" else "openvino"

    def predictions(self, models: Mapping[str, onnx.ModelProto], samples: Samples, text: str) -> dict[str, Predictions]:
        """Predictions of each model, all on the same images; `text` is shown with the progress."""
        with self.runners(models) as runners:
            return predict(
                runners,
                samples,
                samples.num_images,
                lambda done, total: self.log.progress(text, done, total, unit="images"),
            )

    def logits(self, model: onnx.ModelProto, batches: list[torch.Tensor]) -> np.ndarray:
        """Logits of some images, [N, classes] float32. batches: [B, 3, H, W] float32 each, normalized."""
        with self.runners({"model": model}) as runners:
            return np.concatenate([runners["model"].infer(images) for images in batches])

    @contextmanager
    def runners(self, models: Mapping[str, onnx.ModelProto]) -> Iterator[dict[str, Runner]]:
        """The models, loaded, as long as the context lasts."""
        loaded: dict[str, Runner] = {}
        with tempfile.TemporaryDirectory(dir=self.directory) as folder:
            try:
                for name, model in models.items():
                    file = Path(folder, f"{name}.onnx")
                    onnx.save(model, file)
                    loaded[name] = self._runner(file)
                yield loaded
            finally:
                for runner in loaded.values():
                    runner.close()

    def _runner(self, file: Path) -> Runner:
        if self.runtime == "torch":
            return TorchRunner(file, self.shapes, self.device)
        from components.common.runtimes.openvino import OpenVINORunner  # a GPU machine need not have it

        return OpenVINORunner(file, self.shapes)


Logits = Callable[[onnx.ModelProto], np.ndarray]
"""Logits of a model on the same few images, [N, classes] float32, by the runtime that serves."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Layers, the costliest first."""

    layers: tuple[LayerCost, ...]  # fewer than there are when time ran out
    num_images: int


def rank_layers(
    model: onnx.ModelProto,
    scales: Mapping[str, float],
    arithmetic: Arithmetic,
    logits: Logits,
    *,
    deadline: float,
    progress: Callable[[int, int], None],
) -> Ranking:
    """Rank every node that reads through Q/DQ: layers with weights, poolings and residual additions.

    A layer's cost is the Kullback-Leibler divergence between the classes that the float model predicts and those it
    predicts with this layer alone in INT8, in nats, averaged over the images. It needs no labels, and unlike top-1 it
    tells layers apart with few images. An Add runs inside a convolution, which is in INT8 with it.

    Args:
        model: FP32 graph, without Q/DQ.
        scales: of `placement.activation_tensors(model)`.
        arithmetic: of the file that serves.
        logits: runs a model.
        deadline: on the clock of time.monotonic(); no new layer is measured after it, but one always is.
        progress: called with the number of layers done, and of all.
    """
    layers = _layers(model)
    expected = _log_probabilities(logits(model))  # [N, classes], as below
    costs: dict[str, float] = {}
    for name, (_, together) in layers.items():
        if costs and time.monotonic() > deadline:
            break
        alone = insert_qdq(model, scales, exclude=layers.keys() - together, arithmetic=arithmetic)
        actual = _log_probabilities(logits(alone))
        divergence = (expected.exp() * (expected - actual)).sum(dim=1).mean()
        costs[name] = max(float(divergence), 0.0)
        progress(len(costs), len(layers))
    return Ranking(
        layers=tuple(
            LayerCost(name=name, operator=layers[name][0], cost_nats=costs[name])
            for name in sorted(costs, key=lambda name: -costs[name])  # stable: of equals, the earlier layer
        ),
        num_images=len(expected),
    )


def _log_probabilities(logits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(logits).double().log_softmax(dim=1)


def _layers(model: onnx.ModelProto) -> dict[str, tuple[str, frozenset[str]]]:
    """Operator of each node that reads through Q/DQ, and what is in INT8 with it, by the node's id, in graph order."""
    proto = float_graph(model).graph
    graph = Graph(proto)
    layers = {}
    for read in quantized_reads(proto, ()):
        mains = [graph.convolution_into(name) for name in read.node.input] if read.node.op_type == "Add" else []
        together = {node_id(read.node), *(node_id(node) for node in mains if node is not None)}
        layers[node_id(read.node)] = (str(read.node.op_type), frozenset(together))
    return layers


Scales = dict[str, float]
Measure = Callable[[Mapping[str, onnx.ModelProto], str], dict[str, Predictions]]
"""Predictions of each model, by name, on the selection images; the text says what is measured."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The most that INT8 may cost."""

    max_top1_drop_points: float
    min_relative_top1_pct: float
    num_validation_images: int = 0  # that the gate's proof will rest on; 0 where it judges the measured drop alone

    @classmethod
    def of(cls, config: ExportConfig, dataset: Artifact[DatasetManifest]) -> Self:
        """The gate's limits of top-1, and the images that it will judge by."""
        return cls(
            max_top1_drop_points=config.gate.max_top1_drop_points,
            min_relative_top1_pct=config.gate.min_relative_top1_pct,
            num_validation_images=dataset.manifest.splits["val"].num_images if config.gate.confident else 0,
        )

    def holds(self, fp32: Predictions, own: Predictions) -> bool:
        """True if the gate would pass it with as large a share of regressed and improved validation images as here."""
        found = paired_difference(fp32.right, own.right)
        drop = -found.delta_points
        allowed = min(self.max_top1_drop_points, (1 - self.min_relative_top1_pct / 100) * fp32.top1_pct)
        count, times = self.num_validation_images, self.num_validation_images / found.num_images
        if count and drop_upper(count, 0, 0) <= allowed:  # with fewer images no layer in float makes a proof
            drop = max(drop, drop_upper(count, round(times * found.num_lost), round(times * found.num_gained)))
        return round(drop - allowed, 9) <= 0  # percentages carry rounding noise; a value of exactly the limit holds


@dataclass(kw_only=True)
class Selection:
    """Measures candidates against FP32 on the same images and remembers all of them."""

    model: onnx.ModelProto  # FP32
    scales: dict[str, Scales]
    smoothed: Mapping[str, onnx.ModelProto] = field(default_factory=dict)  # by method, where it is another network
    measure: Measure
    budget: Budget
    deadline: float  # on the clock of time.monotonic(): nothing new is tried after it
    arithmetic: Arithmetic  # of the candidates; those measured in another one don't count
    trials: list[Trial] = field(default_factory=list)
    out_of_time: bool = False
    _fp32: Predictions | None = None

    def choose_method(self) -> str:
        """Measure every method with all layers in INT8, and take the one that predicts FP32's class most often.

        Those within the budget come first. Top-1 itself tells too little: of the images whose class changes, about as
        many improve as regress, so that most differences are noise. Of equals `max` is taken, which clips nothing
        that it has seen.
        """
        models = {method: self._quantized(method, ()) for method in self.scales}
        predictions = self.measure({"fp32": self.model, **models}, "comparing calibrations")
        self._fp32 = fp32 = predictions["fp32"]
        for method in self.scales:
            self._remember(method, (), predictions[method])
        inside = [method for method in self.scales if self._held(method, ())]
        candidates = sorted(inside or self.scales, key=lambda method: method != "max")
        return max(candidates, key=lambda method: predictions[method].agreement_pct(fp32))  # of equals the first

    def exclude_layers(self, method: str, rank: Callable[[], Ranking]) -> tuple[str, ...]:
        """The fewest layers that must stay out of INT8 for the budget to hold, in the order of what they cost.

        Layers are ranked only if the budget does not hold with all of them in INT8. First the shortest beginning of
        the ranking that brings the model within budget, by doubling and bisection; then each layer of it, the cheapest
        first, goes back into INT8 if the budget holds without it. When time runs out, the search stops where it is:
        with the shortest list seen to hold, or the next longer beginning.
        """
        if self._holds(method, ()):
            return ()
        names = [layer.name for layer in rank().layers]
        self._late()  # which may have ended the ranking
        if not names:
            return ()
        low, high = 0, 1  # `low` layers are too few
        while high < len(names) and not self._holds(method, tuple(names[:high])):
            low, high = high, min(2 * high, len(names))
            if self._late():
                break
        while high - low > 1 and not self._late():
            middle = (low + high) // 2
            low, high = (low, middle) if self._holds(method, tuple(names[:middle])) else (middle, high)
        excluded = names[:high]
        for name in reversed(names[:high]):
            if len(excluded) == 1 or self._late():
                break
            fewer = [other for other in excluded if other != name]
            if self._holds(method, tuple(fewer)):
                excluded = fewer
        self._holds(method, tuple(excluded))  # out of time, it may not have been measured yet
        return tuple(excluded)

    @property
    def fp32_top1_pct(self) -> float:
        """top-1 of FP32 on the selection images."""
        assert self._fp32 is not None  # choose_method comes first
        return self._fp32.top1_pct

    def trial(self, method: str, excluded: tuple[str, ...]) -> Trial | None:
        """The measurement of a candidate; None if there is none."""
        wanted = method, excluded, self.arithmetic
        found = (t for t in self.trials if (t.method, t.excluded, Arithmetic.of(t)) == wanted)
        return next(found, None)

    def _held(self, method: str, excluded: tuple[str, ...]) -> bool:
        trial = self.trial(method, excluded)
        return trial is not None and trial.within_budget

    def _holds(self, method: str, excluded: tuple[str, ...]) -> bool:
        if self.trial(method, excluded) is None:
            text = f"{len(excluded)} layer{'' if len(excluded) == 1 else 's'} out of INT8"
            self._remember(method, excluded, self.measure({"int8": self._quantized(method, excluded)}, text)["int8"])
        return self._held(method, excluded)

    def _quantized(self, method: str, excluded: tuple[str, ...]) -> onnx.ModelProto:
        model = self.smoothed.get(method, self.model)
        return insert_qdq(model, self.scales[method], exclude=excluded, arithmetic=self.arithmetic)

    def _remember(self, method: str, excluded: tuple[str, ...], own: Predictions) -> None:
        assert self._fp32 is not None  # choose_method comes first
        difference = paired_difference(self._fp32.right, own.right)
        self.trials.append(
            Trial(
                method=method,
                excluded=excluded,
                top1_pct=own.top1_pct,
                delta_top1_points=difference.delta_points,
                low_points=difference.low_points,
                high_points=difference.high_points,
                agreement_pct=own.agreement_pct(self._fp32),
                within_budget=self.budget.holds(self._fp32, own),
                **asdict(self.arithmetic),
            )
        )

    def _late(self) -> bool:
        self.out_of_time = self.out_of_time or time.monotonic() > self.deadline
        return self.out_of_time
