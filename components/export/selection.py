"""INT8 chosen by measurement: which calibration, and which layers stay in float to keep the accuracy."""

import heapq
import math
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
import torch

from components.common.contracts.manifests import Artifact, DatasetManifest
from components.common.contracts.records import MIN_SELECTION_IMAGES, LayerCost, Trial
from components.common.contracts.transforms import ShapeSpec
from components.common.data.evaluation import predict
from components.common.data.loader import Batch
from components.common.process.steplog import StepLog
from components.common.runtimes.runner import Runner
from components.common.runtimes.torch import TorchRunner
from components.common.tasks.predictions import Predictions, ScoreDrop, Top1Drop
from components.export.calibration import Samples
from components.export.config import ExportConfig
from components.export.placement import GraphIndex, float_graph, node_id, quantized_reads
from components.export.qdq import Arithmetic, insert_qdq

_MAX_STAGES = 4  # after which candidates are compared: an eighth of these images, a quarter, a half, all
NUM_SELECTION_IMAGES = 2000  # on twice as many, and so on, INT8 is measured only where FP32 is fast
_MAX_GROUPS, _MAX_ROUNDS = 8, 2  # of layers that go back into INT8

Advance = Callable[[Collection[str], int], dict[str, Predictions]]
"""Predictions of models, by name, on the next images: so many, filled up to whole batches, or all that are left."""


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

    @contextmanager
    def measure(
        self,
        models: Mapping[str, onnx.ModelProto],
        samples: Samples,
        num_images: int,
        text: str,
        detail: Callable[[], str],
    ) -> Iterator[Advance]:
        """A pass of models over the first images, as far as it is asked for; the progress shows text and detail."""
        batches, seen = iter(samples), 0

        def advance(names: Collection[str], more: int) -> dict[str, Predictions]:
            nonlocal seen
            found = predict(
                {name: runners[name] for name in names},
                first_batches(batches, more),
                more,
                lambda done, _: self.log.progress(
                    text, seen + done, num_images, detail() if seen + done < num_images else "", unit="images"
                ),
            )
            seen += next(iter(found.values())).num_images
            return found

        with self.runners(models) as runners:
            yield advance
        if 0 < seen < num_images:  # the candidates were given up
            self.log.progress(text, seen, seen, unit="images")

    def logits(self, model: onnx.ModelProto, batches: list[torch.Tensor]) -> np.ndarray:
        """Logits of some images, [N, classes] float32. batches: [B, 3, H, W] float32 each, normalized."""
        with self.runners({"model": model}) as runners:
            return np.concatenate([runners["model"].infer(images) for images in batches])

    @contextmanager
    def runners(self, models: Mapping[str, onnx.ModelProto]) -> Iterator[dict[str, Runner]]:
        """The models, loaded, as long as the context lasts."""
        loaded: dict[str, Runner] = {}
        with tempfile.TemporaryDirectory(dir=self.directory) as folder, ExitStack() as stack:
            for name, model in models.items():
                file = Path(folder, f"{name}.onnx")
                onnx.save(model, file)
                loaded[name] = stack.enter_context(closing(self._runner(file)))
            yield loaded

    def _runner(self, file: Path) -> Runner:
        if self.device.type == "cuda":
            return TorchRunner(file, self.shapes, self.device)
        from components.common.runtimes.openvino import OpenVINORunner  # a GPU machine need not have it

        return OpenVINORunner(file, self.shapes)


def first_batches(batches: Iterator[Batch], num_images: int) -> Iterator[Batch]:
    """The next batches, until they hold so many images."""
    while num_images > 0 and (batch := next(batches, None)) is not None:
        num_images -= len(batch.images)
        yield batch


Logits = Callable[[onnx.ModelProto], np.ndarray]
"""Logits of a model on the same few images, [N, classes] float32, by the runtime that serves."""


class Ranking:
    """Nodes that read through Q/DQ, the costliest first: layers with weights, poolings and residual additions.

    The cost of a node, or of a group of nodes, is the Kullback-Leibler divergence between the classes that the float
    model predicts and those it predicts with these nodes alone in INT8, in nats, averaged over the images. It needs no
    labels, and unlike top-1 it tells layers apart with few images. An Add runs inside a convolution, which is in INT8
    with it.

    Of groups of consecutive nodes the costliest is halved until it is a single node: the next in the order. So the
    costliest of n is found with about 2 log2(n) measurements, and only as many are made as the search needs.

    Attributes:
        operators: by node, in graph order.
        costs: of the groups that were measured, in nats.
        num_images: that they rest on; 0 as long as nothing was measured.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        scales: Mapping[str, float],
        arithmetic: Arithmetic,
        logits: Logits,
        *,
        divergence: Callable[[np.ndarray, np.ndarray], float],
        deadline: float,
        progress: Callable[[int, int], None],
    ) -> None:
        """Prepare; nothing is measured.

        Args:
            model: FP32 graph, without Q/DQ.
            scales: of `placement.activation_tensors(model)`.
            arithmetic: of the file that serves.
            logits: runs a model.
            divergence: of the logits of two models, in nats.
            deadline: of the search, on the clock of time.monotonic(); half of the time until then is for the ranking.
            progress: called with the number of measurements made, and the most that are made.
        """
        self._model, self._scales, self._arithmetic, self._logits = model, scales, arithmetic, logits
        self._divergence, self._deadline, self._progress = divergence, deadline, progress
        self._together = _layers(model, arithmetic)
        self.operators = {name: operator for name, (operator, _) in self._together.items()}
        self.costs: dict[tuple[str, ...], float] = {}
        self.num_images = 0

    def __iter__(self) -> Iterator[list[str]]:
        """Ids of the nodes, as many at a time as are known without another measurement.

        When half of the time is over, all others come at once: first those of the group with the highest cost per node.
        """
        now = time.monotonic()
        deadline = now + (self._deadline - now) / 2
        expected = self._logits(self._model)  # [N, classes]
        self.num_images = len(expected)
        groups: list[tuple[float, int, tuple[str, ...]]] = []  # a heap: minus the cost, place of the first node, nodes

        def halve(first: int, names: tuple[str, ...]) -> None:
            middle = len(names) // 2
            for start, half in ((first, names[:middle]), (first + middle, names[middle:])):
                if half:
                    self.costs[half] = self._cost(half, expected)
                    self._progress(len(self.costs), 2 * len(self.operators) - 2)
                    heapq.heappush(groups, (-self.costs[half], start, half))

        try:
            halve(0, tuple(self.operators))
            while groups and time.monotonic() <= deadline:
                known: list[str] = []
                while groups and len(groups[0][2]) == 1:
                    known += heapq.heappop(groups)[2]  # of equals the earlier one
                if known:
                    yield known
                if groups:
                    halve(*heapq.heappop(groups)[1:])
        finally:  # no more may be asked for
            self._progress(len(self.costs), len(self.costs))
        groups.sort(key=lambda group: (group[0] / len(group[2]), group[1]))
        yield [name for _, _, names in groups for name in names]

    @property
    def measured(self) -> tuple[LayerCost, ...]:
        """The nodes that were measured alone, the costliest first; of equals, the earlier one."""
        alone = {names[0]: cost for names, cost in self.costs.items() if len(names) == 1}
        return tuple(
            LayerCost(name=name, operator=operator, cost_nats=alone[name])
            for name, operator in sorted(self.operators.items(), key=lambda item: -alone.get(item[0], 0.0))
            if name in alone
        )

    def _cost(self, names: tuple[str, ...], expected: np.ndarray) -> float:
        in_int8 = frozenset[str]().union(*(self._together[name][1] for name in names))
        exclude = self._together.keys() - in_int8
        alone = insert_qdq(self._model, self._scales, exclude=exclude, arithmetic=self._arithmetic)
        return self._divergence(expected, self._logits(alone))


def _layers(model: onnx.ModelProto, arithmetic: Arithmetic) -> dict[str, tuple[str, frozenset[str]]]:
    """Operator of each node that reads through Q/DQ, and what is in INT8 with it, by the node's id, in graph order."""
    proto = float_graph(model).graph
    graph = GraphIndex(proto)
    layers = {}
    for read in quantized_reads(proto, (), scores=arithmetic.scores == "int8"):
        mains = [graph.convolution_into(name) for name in read.node.input] if read.node.op_type == "Add" else []
        together = {node_id(read.node), *(node_id(node) for node in mains if node is not None)}
        layers[node_id(read.node)] = (str(read.node.op_type), frozenset(together))
    return layers


Scales = dict[str, float]
Measure = Callable[[Mapping[str, onnx.ModelProto], str, Callable[[], str]], AbstractContextManager[Advance]]
"""A pass of models, by name, over the selection images; text, and detail as it changes, say what is measured."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The most that INT8 may cost."""

    max_drop_points: float
    min_relative_score_pct: float
    num_validation_images: int = 0  # that the gate's proof will rest on; 0 where it judges the measured drop alone

    @classmethod
    def of(cls, config: ExportConfig, dataset: Artifact[DatasetManifest]) -> Self:
        """The gate's limits of top-1, and the images that it will judge by."""
        return cls(
            max_drop_points=config.gate.max_drop_points,
            min_relative_score_pct=config.gate.min_relative_score_pct,
            num_validation_images=dataset.manifest.splits["val"].num_images if config.gate.confident else 0,
        )

    def trial(self, fp32: Any, own: Any, **known: Any) -> Trial:
        """The record of a candidate, of which more is `known`, by predictions of any task on the same images."""
        found = own.comparison(fp32)
        return Trial(
            score_pct=own.score_pct,
            delta_points=found.delta_points,
            low_points=-found.drop_upper_points,
            high_points=-found.drop_lower_points,
            agreement_pct=own.agreement_pct(fp32),
            within_budget=self.holds(fp32, own),
            **known,
        )

    def holds(self, fp32: Predictions, own: Predictions, num_images: int = 0) -> bool:
        """True if the gate would pass it with as large a share of regressed and improved validation images as here.

        Args:
            fp32: predictions of FP32.
            own: of the candidate, on the same images.
            num_images: where these are the first of more images, the number of all: then True unless it has become
                improbable that the budget holds on all.
        """
        return self.allows(own.drop(fp32, num_images), fp32.score_pct)

    def allows(self, drop: ScoreDrop | Top1Drop, fp32_pct: float) -> bool:
        """See `holds`; `fp32_pct` is FP32's score."""
        allowed = min(self.max_drop_points, (1 - self.min_relative_score_pct / 100) * fp32_pct)
        points = drop.points
        if self.num_validation_images:  # with fewer images no layer in float makes a proof
            points = max(points, drop.proved(self.num_validation_images, allowed))
        return round(points - allowed, 9) <= 0  # percentages carry rounding noise; a value of exactly the limit holds


@dataclass(kw_only=True)
class Selection:
    """Measures candidates against FP32 on the same images and remembers all of them."""

    model: onnx.ModelProto  # FP32
    scales: dict[str, Scales]
    smoothed: Mapping[str, onnx.ModelProto] = field(default_factory=dict)  # by method, where it is another network
    measure: Measure
    num_images: int  # to measure on; it shrinks where FP32 takes too long
    budget: Budget
    deadline: float  # on the clock of time.monotonic(): nothing is begun that would end after it
    arithmetic: Arithmetic  # of the candidates; those measured in another one don't count
    trials: list[Trial] = field(default_factory=list)
    out_of_time: bool = False
    pass_s: float = 0.0  # of a candidate over all images
    _fp32: Predictions | None = None
    _num_planned: int = 0  # candidates, at most

    def choose_method(self) -> str:
        """Measure every method with all layers in INT8, and take the one that predicts FP32's class most often.

        Those within the budget come first. Top-1 itself tells too little: of the images whose class changes, about as
        many improve as regress, so that most differences are noise. Of equals `max` is taken, which clips nothing
        that it has seen. Each time the last one drops out, down to two; if none can hold any more, all do.
        """
        self._measure_fp32()
        ordered: list[str] = []

        def keep(seen: Mapping[str, Predictions]) -> list[str]:
            nonlocal ordered
            ordered = sorted(seen, key=lambda method: self._preference(method, seen[method]))
            return ordered[: max(2, len(ordered) - 1)] if self._may_hold(seen[ordered[0]]) else []

        models = {method: self._quantized(method, ()) for method in self.scales}
        started = time.monotonic()
        found = self._predict(models, "comparing calibrations", self.time_left, keep)
        num_predicted = sum(own.num_images for own in found.values())
        self.pass_s = (time.monotonic() - started) * self.num_images / num_predicted
        for method in self.scales:
            self._remember(method, (), found[method])
        return ordered[0]

    def exclude_layers(self, method: str, ranking: Iterable[Sequence[str]], num_layers: int) -> tuple[str, ...]:
        """The fewest layers that must stay out of INT8 for the budget to hold, in the order of what they cost.

        First the shortest beginning of the ranking that brings the model within budget, by doubling and bisection;
        then groups of its layers, the cheapest first, go back into INT8 if the budget holds without them. When time
        runs out, the search stops where it is: with the shortest list seen to hold, or the next longer beginning.

        Args:
            method: of the calibration.
            ranking: layers, the costliest first, as many at a time as are known. No more are asked for than are
                needed: none if the budget holds with all in INT8.
            num_layers: of the ranking.
        """
        if self.holds(method, ()) or not num_layers:
            return ()
        self._num_planned = len(self.trials) + 2 * num_layers.bit_length() + _MAX_ROUNDS * _MAX_GROUPS
        num_failed, names = 0, list[str]()
        for names in _beginnings(ranking):
            if len(names) == num_layers or self._late(2) or self.holds(method, tuple(names)):
                break
            num_failed = len(names)
        high = len(names)
        while high - num_failed > 1 and not self._late():
            middle = (num_failed + high) // 2
            num_failed, high = (num_failed, middle) if self.holds(method, tuple(names[:middle])) else (middle, high)
        excluded = self._put_back(method, names[:high])
        self.holds(method, tuple(excluded))  # out of time, it may not have been measured yet
        return tuple(excluded)

    def _put_back(self, method: str, excluded: list[str]) -> list[str]:
        """Layers that must stay out of INT8, of those that suffice, which without the last one do not.

        Groups of them, the cheapest first, go back if the budget holds without them; if any did, smaller groups again.
        """
        for _ in range(_MAX_ROUNDS):
            before = excluded
            for group in _groups(before[:-1]):
                fewer = [name for name in excluded if name not in group]
                if not self._late() and self.holds(method, tuple(fewer)):
                    excluded = fewer
            if len(excluded) == len(before) or len(before) <= _MAX_GROUPS + 1:
                break
        return excluded

    def holds(self, method: str, excluded: tuple[str, ...]) -> bool:
        """True if the budget holds on all images. A candidate is measured once, and only as long as it may hold."""
        found = self.trial(method, excluded)
        if found is None:
            started = time.monotonic()
            own = self._predict(
                {"int8": self._quantized(method, excluded)},
                f"{len(excluded)} layer{'' if len(excluded) == 1 else 's'} out of INT8",
                lambda: (
                    f"candidate {(number := len(self.trials) + 1)} of at most {max(number, self._num_planned)}, "
                    f"{self.time_left()}"
                ),
                lambda seen: ["int8"] if self._may_hold(seen["int8"]) else [],
            )["int8"]
            if own.num_images == self.num_images:
                self.pass_s = max(self.pass_s, time.monotonic() - started)
            found = self._remember(method, excluded, own)
        return found.within_budget

    def trial(self, method: str, excluded: tuple[str, ...]) -> Trial | None:
        """The measurement of a candidate; None if there is none."""
        wanted = method, set(excluded), self.arithmetic
        found = (t for t in self.trials if (t.method, set(t.excluded), Arithmetic.of(t)) == wanted)
        return next(found, None)

    def time_left(self) -> str:
        """The time until the deadline, in words."""
        return f"at most {max(self.deadline - time.monotonic(), 0):.0f} s left"

    @property
    def fp32_score_pct(self) -> float:
        """top-1 of FP32 on the selection images."""
        return self._fp32_on(self.num_images).score_pct

    def _fp32_on(self, num_images: int) -> Predictions:
        """FP32's predictions of the first images."""
        assert self._fp32 is not None  # choose_method comes first
        return self._fp32.select(slice(num_images))

    def _measure_fp32(self) -> None:
        """Run FP32 on as many images as time allows: see `ExportConfig.search_seconds`."""
        started = time.monotonic()
        time_s = self.deadline - started

        def keep(seen: Mapping[str, Predictions]) -> list[str]:
            # Each stage takes as long as all before.
            share = 3 if seen["fp32"].num_images < NUM_SELECTION_IMAGES else 50
            return ["fp32"] if 2 * (time.monotonic() - started) < time_s / share else []

        self._fp32 = self._predict({"fp32": self.model}, "measuring FP32", self.time_left, keep)["fp32"]
        self.num_images = self._fp32.num_images

    def _predict(
        self,
        models: Mapping[str, onnx.ModelProto],
        text: str,
        detail: Callable[[], str],
        keep: Callable[[Mapping[str, Predictions]], Collection[str]],
    ) -> dict[str, Predictions]:
        """Predictions of models on the first images: 250, 500, and so on to `num_images`.

        Args:
            models: by name.
            text: see `Measure`.
            detail: see `Measure`.
            keep: takes the predictions of the models that are left, returns those that continue, the best first.
        """
        ends = [min(NUM_SELECTION_IMAGES, self.num_images)]
        while len(ends) < _MAX_STAGES and ends[0] // 2 >= MIN_SELECTION_IMAGES:
            ends.insert(0, ends[0] // 2)
        while ends[-1] < self.num_images:
            ends.append(min(2 * ends[-1], self.num_images))
        found: dict[str, Predictions] = {}
        left, done = list(models), 0
        with self.measure(models, text, detail) as advance:
            for end in ends:
                if end <= done:  # whole batches held more
                    continue
                for name, own in advance(left, end - done).items():
                    found[name] = type(own).join([found[name], own]) if done else own
                done = found[left[0]].num_images
                left = list(keep({name: found[name] for name in left}))
                if not left:
                    break
        return found

    def _may_hold(self, own: Predictions) -> bool:
        """True unless it has become improbable that the budget holds on all images."""
        return self.budget.holds(self._fp32_on(own.num_images), own, self.num_images)

    def _preference(self, method: str, own: Predictions) -> tuple[bool, float, bool]:
        """Sorts methods, the best first."""
        agreement_pct = own.agreement_pct(self._fp32_on(own.num_images))
        return not self._may_hold(own), -agreement_pct, method != next(iter(self.scales))

    def _quantized(self, method: str, excluded: tuple[str, ...]) -> onnx.ModelProto:
        model = self.smoothed.get(method, self.model)
        return insert_qdq(model, self.scales[method], exclude=excluded, arithmetic=self.arithmetic)

    def _remember(self, method: str, excluded: tuple[str, ...], own: Predictions) -> Trial:
        known = {"method": method, "excluded": excluded, "num_images": own.num_images, **asdict(self.arithmetic)}
        self.trials.append(self.budget.trial(self._fp32_on(own.num_images), own, **known))
        return self.trials[-1]

    def _late(self, num_passes: int = 1) -> bool:
        """True if time is too short for so many candidates that are measured on all images."""
        self.out_of_time = self.out_of_time or time.monotonic() + num_passes * self.pass_s > self.deadline
        return self.out_of_time


def _beginnings(ranking: Iterable[Sequence[str]]) -> Iterator[list[str]]:
    """The beginnings of a ranking that are tried: all that is known at a time, or twice as much as before."""
    names: list[str] = []
    size = 0
    for known in ranking:
        names += known
        while size < len(names):
            size = min(max(2 * size, 1), len(names))
            yield names[:size]


def _groups(layers: Sequence[str]) -> list[Sequence[str]]:
    """Layers in groups of equal size, at most `_MAX_GROUPS`, the last group first."""
    size = math.ceil(len(layers) / _MAX_GROUPS)
    return [layers[max(end - size, 0) : end] for end in range(len(layers), 0, -size or -1)]
