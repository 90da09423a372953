"""INT8 where it is faster: engines and CPUs' files with some blocks in float, by measurement.

The profiles of two of them, all float and all INT8, tell what each block takes. From these the blocks in INT8 follow
(`blocks.fastest`); such a candidate is built, profiled again, and measured in turns with the others.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from components.common.contracts.errors import EngineryError
from components.common.contracts.records import BlockRecord, EngineEntry, PlacementEntry, PlacementTrial, Precision
from components.common.contracts.transforms import ShapeSpec
from components.common.process.steplog import StepLog
from components.common.runtimes.runner import Runner
from components.export.blocks import (
    BlockTime,
    Plan,
    attribute_times,
    fastest,
    find_blocks,
    plan_of,
    without_losing_runs,
)
from components.export.placement import quantizable_layers

if TYPE_CHECKING:
    from components.export.backends import OpenVINOBackend, TensorRTBackend

_TURNS, _TURN_S, _MIN_ITERATIONS = 5, 0.3, 3
_LAUNCH_MS = 0.003  # of one more kernel
_PROMISE = 0.98  # of the time of INT8 everywhere: what the blocks' times must promise for an engine to be built
_GAIN = 1.01  # a mixture has to be faster than INT8 everywhere by more than turns scatter, and in each of them

Profile = list[tuple[str, tuple[str, ...], float]]
"""Name, nodes and milliseconds of each layer of a compiled model, in the order in which they run."""
Accuracy = Callable[[Sequence["Compiled"], Mapping[str, Runner]], dict[str, dict[str, Any]]]
"""Returns what is known of candidates' accuracy, as fields of PlacementTrial, by name; the runners are theirs."""


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A candidate: a graph that was compiled."""

    name: str  # such as "mixed 1"
    precision: Precision
    excluded: tuple[str, ...]  # nodes of the FP32 graph that are in float
    graph: onnx.ModelProto
    file: Path
    entry: EngineEntry | None = None  # of a plan
    build_seconds: float = 0.0


@dataclass(kw_only=True)
class MixedSearch:
    """Finds the fastest candidate with INT8 in it."""

    fp32: onnx.ModelProto
    excluded: tuple[str, ...]  # nodes that stay in float for the accuracy
    shapes: ShapeSpec
    backend: "TensorRTBackend | OpenVINOBackend"
    max_engines: int  # with some blocks in float
    log: StepLog
    deadline: float = math.inf  # on the clock of time.monotonic(): then no more is built, and no turn begun but one
    compiled: list[Compiled] = field(default_factory=list)  # the first is INT8 everywhere
    _plans: list[Plan] = field(default_factory=list)
    _times: list[list[BlockTime]] = field(default_factory=list)  # of each of `compiled`
    _float_times: list[BlockTime] = field(default_factory=list)
    _spans: set[tuple[int, int]] = field(default_factory=set)

    def run(self, accuracy: Accuracy | None) -> tuple[Compiled, PlacementEntry | None]:
        """Build, measure and choose: of what holds the budget the fastest. No record where nothing was to choose.

        Args:
            accuracy: of the candidates; None measures none, and the fastest is taken.
        """
        started = time.monotonic()
        self._blocks = find_blocks(self.fp32)
        self._build("INT8", Plan(int8=(True,) * len(self._blocks), excluded=()))
        if not self.max_engines:
            return self.compiled[0], None
        self._float_times = self._profiled(self.backend.reference)
        plans = self._first_plans()
        while plans and len(self.compiled) <= self.max_engines and time.monotonic() < self.deadline:
            plan = plans.pop(0)
            if not any(plan.int8) or plan in self._plans:
                continue
            try:
                self._build(f"mixed {len(self.compiled)}", plan)
            except EngineryError as error:  # INT8 everywhere is there
                self.log.warning(f"no mixed engine: {error}")
                break
            plans.insert(0, without_losing_runs(self._blocks, plan, self._float_times, self._times[-1]))
        self.log.progress("building INT8 engines", len(self.compiled), len(self.compiled))
        rows = self._measure(accuracy)
        candidates = [row for row in rows if row.precision == "int8" and row.within_budget is not False]
        best = max(candidates or rows[1:], key=lambda row: row.images_per_s)
        everywhere = rows[1]
        if everywhere in candidates and not _is_faster(best, everywhere):
            best = everywhere
        number = rows.index(best) - 1
        build_seconds = sum(entry.build_seconds for entry in self.compiled)
        record = PlacementEntry(
            runtime=self.backend.runtime,
            device=self.backend.device,
            batch_size=self.backend.batch_size,
            blocks=self._block_records(number),
            trials=tuple(row.model_copy(update={"chosen": row is best}) for row in rows),
            seconds=time.monotonic() - started - build_seconds,
        )
        return self.compiled[number], record

    def _build(self, name: str, plan: Plan) -> None:
        """Compile and profile a plan."""
        left_out = {*self.excluded, *plan.excluded}
        order = [node for block in self._blocks for node in block.layers]
        with self.log.heartbeat("building INT8 engines", len(self.compiled), 1 + self.max_engines, name):
            compiled = self.backend.compile(name, tuple(node for node in order if node in left_out))
        self.compiled.append(compiled)
        self._plans.append(plan)
        self._times.append(self._profiled(compiled) if self.max_engines else [])

    def _profiled(self, compiled: Compiled) -> list[BlockTime]:
        times, spans = attribute_times(self._blocks, compiled.graph, self.backend.profile(compiled))
        self._spans |= spans
        return times

    def _first_plans(self) -> list[Plan]:
        """The plan that the blocks' times lead to.

        Where a layer spans several blocks, as TensorRT's fused transformers do, nothing tells these apart: they are in
        INT8 together if they are faster so. If not, each kind of them follows as a plan of its own.
        """
        float_times, int8_times = self._float_times, self._times[0]
        in_float = set(self.excluded)
        fixed = {number: False for number, block in enumerate(self._blocks) if not set(block.ungated_layers) - in_float}
        by_kind = []
        for first, last in self._spans:
            rows = range(first, last + 1)
            pays = sum(int8_times[row].total for row in rows) < sum(float_times[row].total for row in rows)
            fixed |= {row: pays and fixed.get(row, True) for row in rows}
            kinds = {block.kind for block in self._blocks[first : last + 1]}
            if not pays and len(kinds) > 1:
                by_kind += [(rows, kind) for kind in sorted(kinds)]
        elements = _elements(self.fp32, self.shapes, self.backend.batch_size)
        rate = self.backend.bytes_per_ms()

        def conversion_ms(tensor: str, to_int8: bool) -> float:
            # To INT8 a kernel reads two bytes and writes one; from it a kernel that runs anyway writes one byte more.
            moved = elements.get(tensor, 0) * (3 if to_int8 else 1) / rate
            return moved + (_LAUNCH_MS if to_int8 else 0.0)

        plan, milliseconds = fastest(self._blocks, float_times, int8_times, conversion_ms, fixed)
        promises = milliseconds < _PROMISE * sum(entry.total for entry in int8_times)
        plans = [plan] if promises else []
        for rows, kind in by_kind:
            more = [number in rows and block.kind == kind for number, block in enumerate(self._blocks)]
            either = [one or other for one, other in zip(plan.int8, more, strict=True)]
            plans.append(plan_of(self._blocks, either))
        return plans

    def _measure(self, accuracy: Accuracy | None) -> list[PlacementTrial]:
        """All candidates behind the reference: speed in turns, then what they predict."""
        every = [self.backend.reference, *self.compiled]
        with ExitStack() as stack:
            runners: dict[str, Runner] = {
                compiled.name: stack.enter_context(closing(self.backend.open(compiled))) for compiled in every
            }
            speeds: dict[str, list[float]] = {name: [] for name in runners}
            for turn in range(_TURNS):
                if turn and time.monotonic() >= self.deadline:
                    break
                self.log.progress("measuring engines", turn, _TURNS, unit="turns")
                for name in list(runners)[:: -1 if turn % 2 else 1]:
                    timing = runners[name].measure(
                        self.backend.batch_size,
                        warmup_s=_TURN_S / 3,
                        duration_s=_TURN_S,
                        min_iterations=_MIN_ITERATIONS,
                        with_transfers=False,  # copies, where they take longer, would make all look alike
                    )
                    speeds[name].append(timing.images_per_s)
            self.log.progress("measuring engines", _TURNS, _TURNS, unit="turns")
            known = accuracy(every, runners) if accuracy is not None else {}
        rows = []
        for compiled in every:
            rate = statistics.median(speeds[compiled.name])
            rows.append(
                PlacementTrial(
                    name=compiled.name,
                    precision=compiled.precision,
                    excluded=compiled.excluded,
                    images_per_s=rate,
                    latency_ms=1e3 * self.backend.batch_size / rate,
                    turns_images_per_s=tuple(speeds[compiled.name]),
                    build_seconds=compiled.build_seconds,
                    **known.get(compiled.name, {}),
                )
            )
        return rows

    def _block_records(self, chosen: int) -> tuple[BlockRecord, ...]:
        if not self._float_times:
            return ()
        weighted = set(quantizable_layers(self.fp32))
        left_out = set(self.compiled[chosen].excluded)
        return tuple(
            BlockRecord(
                name=block.name,
                kind=block.kind,
                num_layers=len(weighted & set(block.nodes)),
                num_int8_layers=len(weighted & set(block.nodes) - left_out),
                float_ms=self._float_times[number].total,
                int8_ms=self._times[0][number].total,
                chosen_ms=self._times[chosen][number].total,
            )
            for number, block in enumerate(self._blocks)
        )


def _is_faster(own: PlacementTrial, other: PlacementTrial) -> bool:
    """True if that is more than chance: of five turns of equals, one is faster in all only once in 32 cases."""
    ratios = [a / b for a, b in zip(own.turns_images_per_s, other.turns_images_per_s, strict=True)]
    return statistics.median(ratios) > _GAIN and min(ratios) > 1


def _elements(model: onnx.ModelProto, shapes: ShapeSpec, batch_size: int) -> dict[str, int]:
    """Numbers in each tensor of a batch, as far as they can be inferred."""
    found = {shapes.input_name: batch_size * math.prod(shapes.input_shape(1)[1:])}
    for value in onnx.shape_inference.infer_shapes(model).graph.value_info:
        sizes = [entry.dim_value for entry in value.type.tensor_type.shape.dim]
        if sizes and all(sizes[1:]):
            found[value.name] = batch_size * math.prod(sizes[1:])
    return found
