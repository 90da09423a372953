"""Compiles, runs and profiles the candidates of `mixed`, and makes a bundle's INT8 plan of the best on a GPU."""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import onnx
import torch

from components.common.contracts.environment import cpu_name, num_cores
from components.common.contracts.errors import EngineryError
from components.common.contracts.records import EngineEntry, PlacementEntry
from components.common.contracts.transforms import ShapeSpec
from components.common.data.evaluation import predict
from components.common.process.steplog import StepLog
from components.common.runtimes.runner import Runner
from components.export.blocks import find_blocks
from components.export.calibration import Samples
from components.export.config import ONNX_FILES, ExportConfig
from components.export.engines import compile_plan, onnx_file_for
from components.export.mixed import Compiled, MixedSearch, Profile
from components.export.placement import quantizable_layers
from components.export.qdq import Arithmetic, WeightStorage, insert_qdq
from components.export.selection import Budget, first_batches

if TYPE_CHECKING:
    from components.common.runtimes.openvino import OpenVINORunner
    from components.common.runtimes.tensorrt import TensorRTRunner

_COPIED_BYTES, _COPIES = 1 << 26, 20
_CPU_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Form:
    """A way to write and build the same INT8 graph."""

    weights: WeightStorage
    level: int
    kept_apart: str = ""  # kind of blocks that stay in float

    def __str__(self) -> str:
        """Return text such as "weights in INT8, level 3"."""
        weights = "weights in INT8" if self.weights == "dq" else "weights in float behind QuantizeLinear"
        apart = f", {self.kept_apart} blocks in float" if self.kept_apart else ""
        return f"{weights}, level {self.level}{apart}"


@dataclass(kw_only=True)
class TensorRTBackend:
    """Plans for the GPU here."""

    config: ExportConfig
    shapes: ShapeSpec
    fp32: onnx.ModelProto
    graph: onnx.ModelProto  # that INT8 is written into: FP32, or typed FP16 where TensorRT is strongly typed
    scales: Mapping[str, float]
    reference: Compiled  # the FP16 plan
    folder: Path  # for candidates
    cache: Path | None
    log: StepLog
    runtime: str = "tensorrt"
    _form: Form | None = None  # that was built last
    _failed: list[str] = field(default_factory=list)

    @property
    def device(self) -> str:
        """The GPU's name."""
        return torch.cuda.get_device_name()

    @property
    def batch_size(self) -> int:
        """The batch that kernels are tuned for."""
        return self.shapes.opt_batch

    def compile(self, name: str, excluded: tuple[str, ...]) -> Compiled:
        """Compile the graph in INT8 but for some nodes. What can't be built in one form is tried in the next.

        Raises:
            EngineryError: none of them can be built.
        """
        folder = self.folder / name.replace(" ", "_")
        folder.mkdir()
        started = time.monotonic()
        for form in [self._form] if self._form is not None else self._forms():
            assert form is not None
            apart = (name for block in find_blocks(self.fp32) if block.kind == form.kept_apart for name in block.layers)
            left_out = tuple(dict.fromkeys((*excluded, *apart)))
            graph = insert_qdq(self.graph, self.scales, exclude=left_out, weights=form.weights)
            file = folder / onnx_file_for("int8")
            onnx.save(graph, file)
            try:
                entry = compile_plan(
                    self.config.model_copy(update={"optimization_level": form.level}),
                    self.shapes,
                    file,
                    self.fp32.graph,
                    precision="int8",
                    cache=self.cache,
                    log=self.log,
                )
            except EngineryError as error:
                if error.code != "build-failed" or self._form is not None:
                    raise
                self._failed.append(f"{form}: {error}".replace(str(file), file.name))
                self.log.warning(f"INT8 with {form} can't be built, trying another form: {error}")
                continue
            self._form = form
            entry = entry.model_copy(
                update={"weights": form.weights, "failed_forms": (*self._failed, *entry.failed_forms)}
            )
            return Compiled(
                name=name,
                precision="int8",
                excluded=left_out,
                graph=graph,
                file=folder / entry.file,
                entry=entry,
                build_seconds=time.monotonic() - started,
            )
        raise EngineryError(
            f"TensorRT builds INT8 of this network in no form. Tried: {'; '.join(self._failed)}", code="build-failed"
        )

    def _forms(self) -> Iterator[Form]:
        level = self.config.optimization_level
        yield Form(weights="dq", level=level)
        yield Form(weights="qdq", level=level)
        yield Form(weights="qdq", level=level - 1 if level else 1)
        kinds = {block.kind for block in find_blocks(self.fp32) if block.layers}
        for kind in sorted(kinds) if len(kinds) > 1 else ():
            yield Form(weights="qdq", level=level, kept_apart=kind)

    def open(self, compiled: Compiled) -> "TensorRTRunner":
        """Load a candidate."""
        from components.common.runtimes.tensorrt import TensorRTRunner

        return TensorRTRunner(compiled.file, self.shapes, compiled.entry)

    def profile(self, compiled: Compiled) -> Profile:
        """Measure a candidate's layers."""
        from components.common.runtimes.tensorrt import profile_layers

        assert compiled.entry is not None
        nodes = {}
        if compiled.entry.layers is not None:
            rows = json.loads(compiled.file.with_name(compiled.entry.layers.file).read_bytes())
            nodes = {row["name"]: tuple(row["nodes"]) for row in rows}
        measured = profile_layers(compiled.file, compiled.entry, self.shapes, self.batch_size)
        return [(name, nodes.get(name, ()), milliseconds) for name, milliseconds in measured]

    def bytes_per_ms(self) -> float:
        """Measure the rate at which the device copies memory."""
        return _bytes_per_ms("cuda")


@dataclass(kw_only=True)
class OpenVINOBackend:
    """ONNX files for the CPU here."""

    shapes: ShapeSpec
    fp32: onnx.ModelProto  # that INT8 is written into
    scales: Mapping[str, float]
    arithmetic: Arithmetic
    reference: Compiled  # the FP32 file
    folder: Path  # for candidates
    runtime: str = "openvino"

    @property
    def device(self) -> str:
        """The CPU's name, and how many cores are used."""
        return f"{cpu_name()}, {num_cores()} cores"

    @property
    def batch_size(self) -> int:
        """As much as a small CPU runs in a moment."""
        return min(_CPU_BATCH, self.shapes.max_batch)

    def compile(self, name: str, excluded: tuple[str, ...]) -> Compiled:
        """See TensorRTBackend. OpenVINO compiles a file when it is opened, in a moment."""
        graph = insert_qdq(self.fp32, self.scales, exclude=excluded, arithmetic=self.arithmetic)
        file = self.folder / f"{name.replace(' ', '_')}.onnx"
        onnx.save(graph, file)
        return Compiled(name=name, precision="int8", excluded=excluded, graph=graph, file=file)

    def open(self, compiled: Compiled) -> "OpenVINORunner":
        """See TensorRTBackend."""
        from components.common.runtimes.openvino import OpenVINORunner

        return OpenVINORunner(compiled.file, self.shapes)

    def profile(self, compiled: Compiled) -> Profile:
        """See TensorRTBackend."""
        from components.common.runtimes.openvino import profile_layers

        return profile_layers(compiled.file, self.shapes, self.batch_size)

    def bytes_per_ms(self) -> float:
        """See TensorRTBackend."""
        return _bytes_per_ms("cpu")


def _bytes_per_ms(device: Literal["cuda", "cpu"]) -> float:
    """Rate at which a device reads and writes memory."""
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    milliseconds = []
    for number in range(1 + _COPIES):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        if number:
            milliseconds.append(1e3 * (time.perf_counter() - started))
    return 2 * _COPIED_BYTES / statistics.median(milliseconds)


def reference_plan(entry: EngineEntry, folder: Path) -> Compiled:
    """The FP16 plan of a bundle as what INT8 is compared with."""
    graph = onnx.load(folder / entry.source_onnx, load_external_data=False)
    return Compiled(
        name=entry.precision.upper(),
        precision=entry.precision,
        excluded=tuple(quantizable_layers(graph)),
        graph=graph,
        file=folder / entry.file,
        entry=entry,
        build_seconds=entry.build_seconds,
    )


@dataclass(kw_only=True)
class Int8Plans:
    """Makes the INT8 plan of a bundle: the fastest that holds the budget, with the ONNX files that belong to it."""

    config: ExportConfig
    shapes: ShapeSpec
    graphs: Mapping[str, onnx.ModelProto]  # that INT8 is written into, FP32 and typed FP16, by name of the file
    scales: Mapping[str, float]
    excluded: tuple[str, ...]  # nodes in float: at first for the accuracy, in the end those of the plan
    samples: Samples | None  # images to compare the plans' classes on; None compares none
    num_images: int  # of them, the first
    budget: Budget
    output: Path  # the bundle's folder
    cache: Path | None
    log: StepLog
    record: PlacementEntry | None = None

    def build(self, fp16: EngineEntry) -> EngineEntry:
        """Search, and put the plan beside the others; both INT8 files are written with the same nodes in float.

        Args:
            fp16: the FP16 plan, which lies in the bundle's folder with the FP32 plan.

        Raises:
            EngineryError: TensorRT builds INT8 in no form.
        """
        fp32 = self.graphs["int8"]
        compiled, other = sorted(self.graphs, key=lambda name: ONNX_FILES[name] != onnx_file_for("int8"))
        with tempfile.TemporaryDirectory(dir=self.output, prefix=".int8-") as folder:
            backend = TensorRTBackend(
                config=self.config,
                shapes=self.shapes,
                fp32=fp32,
                graph=self.graphs[compiled],
                scales=self.scales,
                reference=reference_plan(fp16, self.output),
                folder=Path(folder),
                cache=self.cache,
                log=self.log,
            )
            search = MixedSearch(
                fp32=fp32,
                excluded=self.excluded,
                shapes=self.shapes,
                backend=backend,
                max_engines=self.config.mixed_engines,
                log=self.log,
            )
            chosen, self.record = search.run(self._accuracy if self.samples is not None else None)
            for file in chosen.file.parent.iterdir():
                file.replace(self.output / file.name)
        assert chosen.entry is not None
        self.excluded = chosen.excluded
        graph = insert_qdq(self.graphs[other], self.scales, exclude=chosen.excluded, weights=chosen.entry.weights)
        onnx.save(graph, self.output / ONNX_FILES[other])
        return chosen.entry

    def _accuracy(self, _: Sequence[Compiled], runners: Mapping[str, Runner]) -> dict[str, dict[str, Any]]:
        from components.common.runtimes.tensorrt import TensorRTRunner

        assert self.samples is not None
        progress = partial(self.log.progress, "comparing engines", unit="images")
        with closing(TensorRTRunner(self.output / "fp32.plan", self.shapes)) as runner:
            images = first_batches(iter(self.samples), self.num_images)
            found = predict({"fp32": runner, **runners}, images, self.num_images, progress)
        fp32 = found.pop("fp32")
        return {
            name: {
                "delta_points": own.comparison(fp32).delta_points,
                "agreement_pct": own.agreement_pct(fp32),
                "within_budget": self.budget.holds(fp32, own),
            }
            for name, own in found.items()
        }
