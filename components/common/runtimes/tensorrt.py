"""TensorRT 8.6, 10 and 11: why it can't be used here, its one logger, how a plan is loaded, and the runner of plans."""

import functools
import importlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Unpack

import numpy as np
import torch

from components.common.contracts.environment import gpus
from components.common.contracts.errors import EngineryError, RuntimeUnavailable, UserError
from components.common.contracts.manifests import Artifact, BundleManifest
from components.common.contracts.records import STRIPPED, VERSION_COMPATIBLE, EngineEntry, Precision
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.runner import BenchmarkOptions, Images, OpenModel, Timing

_log = logging.getLogger(__name__)

_WARMUP_BATCHES, _PROFILED_BATCHES = 5, 20  # of a profile
_INSTALL = "run `pip install 'enginery[tensorrt]'` (in a checkout: `make install-tensorrt`)"


def why_unavailable() -> str | None:
    """None when TensorRT imports and a CUDA GPU is usable; else one sentence that says what is missing and the fix."""
    if not torch.cuda.is_available():
        return (
            f"no CUDA GPU is usable here (torch {torch.__version__} finds none): TensorRT needs an NVIDIA GPU, its "
            "driver, and a CUDA_VISIBLE_DEVICES that does not hide it"
        )
    try:
        trt = importlib.import_module("tensorrt")
    except ModuleNotFoundError as error:
        if error.name == "tensorrt":
            return f"the Python package tensorrt is not installed: {_INSTALL}"
        return _without_libraries(error)
    except (ImportError, OSError, RuntimeError) as error:
        return _without_libraries(error)
    if not hasattr(trt, "Builder"):  # an empty folder called tensorrt imports as a namespace package
        return _without_libraries("the package has no Builder")
    return None


def _without_libraries(cause: Exception | str) -> str:
    return (
        f"the Python package tensorrt is installed but does not load ({cause}): the package is a stub that fetches "
        f"its libraries from NVIDIA's package index, so where that index is reachable {_INSTALL}, "
        "or use NVIDIA's container"
    )


def load_tensorrt() -> ModuleType:
    """The module `tensorrt`.

    Raises:
        RuntimeUnavailable: TensorRT can't be used here; the message is that of `why_unavailable`.
    """
    missing = why_unavailable()
    if missing is not None:
        raise RuntimeUnavailable(missing, code="tensorrt-unavailable")
    return importlib.import_module("tensorrt")


def driver_version() -> str:
    """Version of the NVIDIA driver; "unknown" where NVML is not reachable, as in some sandboxes."""
    found = gpus()
    return found[0].driver if found else "unknown"


def start(make: Callable[[], Any]) -> Any:
    """The Builder or Runtime that `make` makes.

    Raises:
        RuntimeUnavailable: TensorRT is there but does not start, as with too old a driver.
    """
    try:
        return make()
    except TypeError:  # what pybind11 raises when the library returns no object
        trt = load_tensorrt()
        raise RuntimeUnavailable(
            f"TensorRT {trt.__version__} can't start on {torch.cuda.get_device_name()}, driver {driver_version()}: "
            f"{tensorrt_logger().take_errors()}; a newer driver is the usual fix",
            code="tensorrt-does-not-start",
        ) from None


def plan_mismatches(entry: EngineEntry) -> list[str]:
    """The differences of this machine to the one that a plan was built on, a phrase each; empty where the plan fits.

    TensorRT itself says no more of a plan that does not fit than that it can't be read. Another driver is no mismatch:
    `load_engine` only tells of it.

    Raises:
        RuntimeUnavailable: TensorRT can't be used here.
    """
    trt = load_tensorrt()
    return entry.mismatches(trt.__version__, torch.cuda.get_device_name(), torch.cuda.get_device_capability())


def version_of_builder(trt: ModuleType, plan: bytes) -> str:
    """The version of TensorRT that built a plan, with its build, which the module of 8.6 leaves out and a plan has.

    Source: `printPlanVersion` of NVIDIA's trtexec: the tag "ftrt", format 0, and four numbers from byte 24 on.
    """
    full = ".".join(map(str, plan[24:28]))
    is_known = plan[:8] == b"ftrt\0\0\0\0" and full.startswith(f"{trt.__version__}.")
    return full if is_known else trt.__version__


def _other_driver(entry: EngineEntry) -> str:
    """The difference of the driver to the one that a plan was built with; empty where there is none, or unknown."""
    there, here = entry.driver_version, driver_version()
    return "" if there == here or "unknown" in (there, here) else f"driver {there} there, {here} here"


def load_engine(plan_path: Path, entry: EngineEntry | None) -> tuple[Any, Any]:
    """A plan's runtime, which must outlive its engine, and the engine.

    Args:
        plan_path: The plan; the ONNX file that it was built from lies beside it.
        entry: What the bundle's manifest says of it, which is checked first; None for a plan just built here.

    Raises:
        RuntimeUnavailable: TensorRT can't be used here.
        UserError: the plan was built for another GPU or TensorRT version; the message says what differs.
        EngineryError: a stripped plan can't take the weights of its ONNX file.
    """
    trt = load_tensorrt()
    flags = entry.flags if entry is not None else ()
    fix = "export again on this machine, or build plans for it with `enginery engines`"
    if entry is not None and (differences := plan_mismatches(entry)):
        raise UserError(
            f"the plan {plan_path} was built elsewhere ({'; '.join(differences)}): {fix}", code="plan-built-elsewhere"
        )
    other_driver = _other_driver(entry) if entry is not None else ""
    logger = tensorrt_logger()
    logger.take_errors()
    runtime = start(lambda: trt.Runtime(logger))
    if VERSION_COMPATIBLE in flags:
        runtime.engine_host_code_allowed = True  # such a plan carries TensorRT's lean runtime; its digest was checked
    engine = runtime.deserialize_cuda_engine(plan_path.read_bytes())
    if engine is None:
        raise UserError(
            f"TensorRT {trt.__version__} on {torch.cuda.get_device_name()} can't load the plan {plan_path}: "
            f"{logger.take_errors()}. A plan runs only on the TensorRT version and GPU model it was built with"
            f"{f' ({other_driver})' if other_driver else ''}: {fix}",
            code="plan-unreadable",
        )
    if other_driver:
        _log.warning("the plan %s, which runs here, was built with another driver (%s)", plan_path, other_driver)
    if entry is not None and STRIPPED in flags:
        _refit(trt, engine, plan_path.with_name(entry.source_onnx))
    return runtime, engine


def open_context(plan_path: Path, entry: EngineEntry | None) -> tuple[Any, Any, Any]:
    """As `load_engine`, and an execution context: runtime, engine, context; each needs the one before while it lives.

    Raises:
        EngineryError: TensorRT makes none, for lack of memory or because it built what it can't run.
    """
    runtime, engine = load_engine(plan_path, entry)
    context = engine.create_execution_context()
    if context is None:
        message = f"TensorRT makes no execution context of {plan_path}: {tensorrt_logger().take_errors()}"
        raise EngineryError(message, code="no-execution-context")
    return runtime, engine, context


def _refit(trt: ModuleType, engine: Any, onnx_path: Path) -> None:
    """Put the weights of an ONNX file into an engine that was built without them."""
    refitter = trt.Refitter(engine, tensorrt_logger())
    loaded = trt.OnnxParserRefitter(refitter, tensorrt_logger()).refit_from_file(str(onnx_path))
    if not (loaded and refitter.refit_cuda_engine()):
        reason = tensorrt_logger().take_errors()
        raise EngineryError(
            f"the stripped plan can't take its weights from {onnx_path}: {reason}; export again", code="refit-failed"
        )


def open_model(bundle: Artifact[BundleManifest], precision: Precision) -> OpenModel:
    """The plan of a precision, which the bundle has."""
    entry = next(plan for plan in bundle.manifest.engines if plan.precision == precision)
    notes = []
    if "TF32" in entry.flags:
        notes.append("TF32: inputs of convolutions and matrix products are rounded to 10 bits")
    if entry.mantissa_bits is not None:
        notes.append(f"weights are rounded to {entry.mantissa_bits} bits of mantissa")
    file = bundle.file(entry.file)
    return OpenModel(file=file, runner=TensorRTRunner(file, bundle.manifest.image_shapes, entry), notes=tuple(notes))


@functools.cache
def tensorrt_logger() -> Any:
    """The process's one TensorRT logger: it logs, and `take_errors()` returns the errors since it was last asked.

    One only, because TensorRT keeps the first logger it is given for as long as any builder or runtime lives.
    """
    trt = load_tensorrt()
    severities = trt.ILogger.Severity
    levels = {
        severities.INTERNAL_ERROR: logging.ERROR,
        severities.ERROR: logging.ERROR,
        severities.WARNING: logging.WARNING,
    }

    class CollectingLogger(trt.ILogger):  # type: ignore[misc, name-defined]  # tensorrt has no types
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            # TensorRT calls this from its own threads, too; appending to a list is atomic.
            level = levels.get(severity, logging.DEBUG)
            if level == logging.ERROR:
                self.errors.append(message)
            _log.log(level, "TensorRT: %s", message)

        def take_errors(self) -> str:
            taken, self.errors = self.errors, []
            return "; ".join(taken) or "TensorRT gave no reason"

    return CollectingLogger()


def profile_layers(plan_path: Path, entry: EngineEntry, shapes: ShapeSpec, batch_size: int) -> list[tuple[str, float]]:
    """Measure the layers of a plan, one after the other: name, as the engine inspector has it, and median milliseconds.

    Args:
        plan_path: The plan.
        entry: What is known of it.
        shapes: Names of the input and output.
        batch_size: Images of a batch, within the plan's profile.

    Raises:
        RuntimeUnavailable: TensorRT can't be used here.
        EngineryError: TensorRT fails to run the plan.
    """
    trt = load_tensorrt()

    class Profiler(trt.IProfiler):  # type: ignore[misc, name-defined]  # tensorrt has no types
        def __init__(self) -> None:
            trt.IProfiler.__init__(self)
            self.times: dict[str, list[float]] = {}

        def report_layer_time(self, layer_name: str, ms: float) -> None:
            self.times.setdefault(layer_name, []).append(ms)

    runtime, engine, context = open_context(plan_path, entry)
    names = (shapes.input_name, shapes.output_name)
    dtypes = [torch_dtype(trt, engine.get_tensor_dtype(name)) for name in names]
    images = torch.randn(shapes.input_shape(batch_size), device="cuda").to(dtypes[0])
    stream, profiler = _new_stream(images.device), Profiler()
    outputs = torch.empty(_output_shape(context, shapes, batch_size), dtype=dtypes[1], device="cuda")
    context.set_tensor_address(shapes.input_name, images.data_ptr())
    context.set_tensor_address(shapes.output_name, outputs.data_ptr())
    torch.cuda.synchronize()
    for number in range(_WARMUP_BATCHES + _PROFILED_BATCHES):
        if number == _WARMUP_BATCHES:  # the clocks are up by now
            context.profiler = profiler
        if not context.execute_async_v3(stream.cuda_stream):
            message = f"TensorRT failed to enqueue a batch of {batch_size}: {tensorrt_logger().take_errors()}"
            raise EngineryError(message, code="enqueue-failed")
        stream.synchronize()
    del context, engine, runtime  # in this order: each needs the next while it lives
    return [(name, float(np.median(times))) for name, times in profiler.times.items()]


class Contexts:
    """Execution contexts of an engine on the current CUDA device, which share the memory that runs need.

    Only one of them may be at work at a time.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        of_11 = not hasattr(engine, "device_memory_size")
        size = engine.device_memory_size_v2 if of_11 else engine.device_memory_size
        self._memory = torch.empty(max(1, size), dtype=torch.uint8, device="cuda")

    def new(self, profile: int = 0) -> Any:
        """Return another context, for the optimization profile of that number.

        Raises:
            EngineryError: TensorRT makes none.
        """
        engine = self._engine
        if hasattr(engine, "create_execution_context_without_device_memory"):
            context = engine.create_execution_context_without_device_memory()
        else:
            trt = load_tensorrt()
            context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            name = torch.cuda.get_device_name(self._memory.device)
            raise EngineryError(
                f"no execution context on {name}: {tensorrt_logger().take_errors()}", code="no-execution-context"
            )
        context.device_memory = self._memory.data_ptr()
        stream = torch.cuda.current_stream()
        context.set_optimization_profile_async(profile, stream.cuda_stream)
        stream.synchronize()
        return context


class TensorRTRunner:
    """An engine on the current CUDA device. Buffers for the largest batch are allocated once, not per call.

    A batch size that comes a second time is captured as a CUDA graph and replayed from then on. Not for several
    threads at once.
    """

    runtime = "tensorrt"

    def __init__(self, plan_path: Path, shapes: ShapeSpec, entry: EngineEntry | None = None) -> None:
        """Load a plan.

        Args:
            plan_path: The plan; the ONNX file that it was built from lies beside it.
            shapes: Names of the input and output, and the batches it has to take.
            entry: What the bundle's manifest says of the plan, which is checked first; None for a plan just built.

        Raises:
            RuntimeUnavailable: TensorRT can't be used here.
            UserError: the plan was built for another GPU or TensorRT version, or for smaller batches.
        """
        trt = load_tensorrt()
        self._shapes = shapes
        self._cuda = torch.device("cuda", torch.cuda.current_device())
        self.device = torch.cuda.get_device_name(self._cuda)
        self.memory_bytes = 0
        with self._counting_memory():
            self._runtime, self._engine = load_engine(plan_path, entry)
        _check_engine(self._engine, plan_path, shapes)
        names = (shapes.input_name, shapes.output_name)
        self._dtypes = [torch_dtype(trt, self._engine.get_tensor_dtype(name)) for name in names]
        self._streams: list[_InferenceStream] = []
        self._not_captured: set[int] = set()  # batches that made no CUDA graph: tried and reported once
        self._open_streams(1)

    def _open_streams(self, num_streams: int) -> None:
        with self._counting_memory():
            while len(self._streams) < num_streams:
                self._streams.append(
                    _InferenceStream(self._engine, self._cuda, self._shapes, self._dtypes, self._not_captured)
                )
            torch.cuda.synchronize(self._cuda)  # the buffers were zeroed on another stream than will use them

    @contextmanager
    def _counting_memory(self) -> Iterator[None]:
        """Add what is allocated meanwhile to `memory_bytes`: the GPU's used memory after it, minus that before.

        TensorRT tells no total. What another process allocates at the same moment counts too.
        """
        before = _used_bytes(self._cuda)
        yield
        self.memory_bytes += max(_used_bytes(self._cuda) - before, 0)

    def infer(self, images: Images) -> np.ndarray:
        """Outputs of a batch of any size; more than `max_batch` images are run in several batches.

        Args:
            images: [B, channels, height, width] float32, normalized; on the host or on the engine's GPU, in any
                memory format.

        Returns:
            [B, ...] float32, as the network returns them: [B, classes], [B, anchors, 8 + classes],
            [B, classes, height, width].
        """
        self._check_open()
        expected = self._shapes.input_shape(len(images))
        if images.shape != expected:
            message = f"the engine takes images of shape [batch, {expected[1:]}], got {images.shape}"
            raise UserError(message, code="wrong-image-shape")
        outputs = np.empty((len(images), *self._streams[0].output_shape[1:]), np.float32)
        if isinstance(images, np.ndarray):
            images = torch.from_numpy(np.require(images, np.float32, ["C", "W"]))
        with torch.cuda.device(self._cuda):
            for start in range(0, len(images), self._shapes.max_batch):
                chunk = images[start : start + self._shapes.max_batch]
                outputs[start : start + len(chunk)] = self._streams[0].infer(chunk)
        return outputs

    def capture_only(self, batch_size: int) -> None:
        """Capture the CUDA graph of a batch size now, and none later: other threads' work on the GPU would break it."""
        self._streams[0].prepare(max(batch_size, self._shapes.min_batch))
        self._streams[0].captures = False

    def _check_open(self) -> None:
        if self._engine is None:
            raise EngineryError("this TensorRT runner was closed; load the plan again", code="runner-closed")

    def measure(self, batch_size: int, **how: Unpack[BenchmarkOptions]) -> Timing:
        """Time random batches on trtexec's terms: one batch enqueued ahead, as CUDA graph where that can be captured.

        A latency is host-to-device copy + GPU computation + device-to-host copy of one batch, by CUDA events. The
        copies of one batch overlap the computation of another, as in trtexec.

        Args:
            batch_size: Images per batch, within the plan's profile.
            how: See `BenchmarkOptions`. Each stream has an execution context of its own (trtexec's --infStreams). To
                leave the copies out is the default of trtexec from TensorRT 11 on.
        """
        self._check_open()
        if not self._shapes.min_batch <= batch_size <= self._shapes.max_batch:
            raise UserError(
                f"the engine takes batches of {self._shapes.min_batch} to {self._shapes.max_batch}, got {batch_size}",
                code="wrong-batches",
            )
        if (num_streams := how.get("num_streams", 1)) < 1:
            raise UserError(f"num_streams must be 1 or more, got {num_streams}", code="wrong-streams")
        with torch.cuda.device(self._cuda):
            self._open_streams(num_streams)
            streams = self._streams[:num_streams]
            with self._counting_memory():
                for stream in streams:
                    stream.prepare(batch_size)
            return self._time_steadily(streams, batch_size, how)

    def _time_steadily(self, streams: "list[_InferenceStream]", batch: int, how: BenchmarkOptions) -> Timing:
        with_transfers, monitor = how.get("with_transfers", True), how.get("monitor")
        turns = itertools.cycle(streams)
        # The clock starts and stops just after a batch has ended with one more in flight on every stream, so it
        # counts exactly the batches that ended in between.
        for stream in streams:
            stream.start(batch, with_transfers)
        warm = time.perf_counter() + how["warmup_s"]
        next(turns).next_ms(batch, with_transfers)
        while time.perf_counter() < warm:
            next(turns).next_ms(batch, with_transfers)
        if monitor is not None:
            monitor.start()
            for _ in streams:  # while the monitor started, batches may have ended: put every stream to work again
                next(turns).next_ms(batch, with_transfers)
        latencies_ms: list[float] = []
        started = now = time.perf_counter()
        while now - started < how["duration_s"] or len(latencies_ms) < how["min_iterations"]:
            latencies_ms.append(next(turns).next_ms(batch, with_transfers))
            now = time.perf_counter()
        if monitor is not None:
            monitor.stop()
        torch.cuda.synchronize(self._cuda)
        return Timing(batch_size=batch, latencies_ms=np.asarray(latencies_ms), wall_s=now - started)

    def close(self) -> None:
        """Free the engine's memory."""
        torch.cuda.synchronize(self._cuda)
        self._streams.clear()
        self._engine = self._runtime = None  # in this order: each needs the next while it lives
        torch.cuda.empty_cache()  # of the contexts' memory: TensorRT, which may build next, takes none of torch's


class _InferenceStream:
    """An execution context, its streams, and two sets of buffers: one batch is computed while another is copied.

    All contexts share the plan's one profile: a flag says so to TensorRT 8.6 when it builds, 10 and 11 always can. Each
    CUDA graph has one of its own, since it may be replayed only so long as that stays as it was (TensorRT's developer
    guide on CUDA graphs).
    """

    def __init__(
        self, engine: Any, device: torch.device, shapes: ShapeSpec, dtypes: list[torch.dtype], not_captured: set[int]
    ) -> None:
        self._not_captured, self.captures = not_captured, True
        self._new_context = Contexts(engine).new
        self._context = self._new_context()
        self._captured: list[Any] = []  # contexts of graphs, which live as long
        self._device, self._shapes = device, shapes
        self._compute, self._upload, self._download = (_new_stream(device) for _ in range(3))
        self.output_shape = _output_shape(self._context, shapes, shapes.max_batch)
        image_shape = shapes.input_shape(shapes.max_batch)
        self._behind, self._ahead = (_BufferSet(device, image_shape, self.output_shape, dtypes) for _ in range(2))

    def infer(self, images: torch.Tensor) -> np.ndarray:
        """Outputs of a batch of at most `max_batch` images, which lie on the host or on this GPU."""
        # A batch under the profile's minimum is filled up with what the buffer holds: images don't affect each other.
        buffers, batch = self._behind, max(len(images), self._shapes.min_batch)
        if self.captures and buffers.last_batch == batch and batch not in buffers.graphs:
            buffers.graphs[batch] = self._capture(buffers, batch)
        buffers.last_batch = batch
        if images.is_cuda:
            self._compute.wait_stream(torch.cuda.current_stream(self._device))  # which may still be writing them
            source = images
        else:
            buffers.host_in[: len(images)].copy_(images)
            source = buffers.host_in[: len(images)]
        with torch.cuda.stream(self._compute):
            buffers.device_in[: len(images)].copy_(source, non_blocking=True)
            self._run(buffers, batch)
            buffers.host_out[:batch].copy_(buffers.device_out[:batch], non_blocking=True)
        self._compute.synchronize()
        return buffers.host_out[: len(images)].float().numpy()

    def _run(self, buffers: "_BufferSet", batch: int) -> None:
        """Put the computation of one batch, device buffer to device buffer, on the compute stream."""
        graph = buffers.graphs.get(batch)
        if graph is not None:
            graph.replay()
        else:
            self._enqueue(self._context, buffers, batch)

    def _enqueue(self, context: Any, buffers: "_BufferSet", batch: int) -> None:
        context.set_input_shape(self._shapes.input_name, self._shapes.input_shape(batch))
        context.set_tensor_address(self._shapes.input_name, buffers.device_in.data_ptr())
        context.set_tensor_address(self._shapes.output_name, buffers.device_out.data_ptr())
        if not context.execute_async_v3(self._compute.cuda_stream):
            message = f"TensorRT failed to enqueue a batch of {batch}: {tensorrt_logger().take_errors()}"
            raise EngineryError(message, code="enqueue-failed")

    def prepare(self, batch: int) -> None:
        """Fill both sets of buffers with random numbers (zeros save power and run faster) and capture their graphs."""
        for buffers in (self._behind, self._ahead):
            buffers.host_in[:batch].copy_(torch.randn(self._shapes.input_shape(batch)))
            with torch.cuda.stream(self._compute):
                buffers.device_in[:batch].copy_(buffers.host_in[:batch], non_blocking=True)
            self._compute.synchronize()
            buffers.last_batch = batch
            if batch not in buffers.graphs:
                buffers.graphs[batch] = self._capture(buffers, batch)

    def _capture(self, buffers: "_BufferSet", batch: int) -> torch.cuda.CUDAGraph | None:
        """A CUDA graph of one computation; None where this engine can't be captured (it is then enqueued each time)."""
        if batch in self._not_captured:
            return None
        graph = torch.cuda.CUDAGraph()
        try:
            context = self._new_context()
            self._captured.append(context)
            self._enqueue(context, buffers, batch)  # TensorRT wants one run at a new shape before it can be captured
            self._compute.synchronize()
            with torch.cuda.graph(graph, stream=self._compute, capture_error_mode="thread_local"):
                self._enqueue(context, buffers, batch)
            buffers.device_out.zero_()
            torch.cuda.synchronize(self._device)
            graph.replay()
            torch.cuda.synchronize(self._device)
        except (RuntimeError, EngineryError) as error:
            _log.warning("no CUDA graph of a batch of %d, its kernels are launched one by one: %s", batch, error)
            self._not_captured.add(batch)
            return None
        if not buffers.device_out[:batch].any():  # nothing was recorded: the work went to a stream of the engine's own
            _log.warning("the CUDA graph of a batch of %d is empty, its kernels are launched one by one", batch)
            self._not_captured.add(batch)
            return None
        return graph

    def start(self, batch: int, with_transfers: bool) -> None:
        """Enqueue the first of a row of batches."""
        self._submit(self._ahead, batch, with_transfers)

    def next_ms(self, batch: int, with_transfers: bool) -> float:
        """Enqueue one more batch and wait for the one before it. Returns that one's latency in milliseconds."""
        self._behind, self._ahead = self._ahead, self._behind
        self._submit(self._ahead, batch, with_transfers)
        return self._behind.wait_ms(with_transfers)

    def _submit(self, buffers: "_BufferSet", batch: int, with_transfers: bool) -> None:
        """Enqueue copy, computation and copy of one batch on their three streams. Returns at once."""
        if with_transfers:
            with torch.cuda.stream(self._upload):
                buffers.upload[0].record(self._upload)
                buffers.device_in[:batch].copy_(buffers.host_in[:batch], non_blocking=True)
                buffers.upload[1].record(self._upload)
            self._compute.wait_event(buffers.upload[1])
        with torch.cuda.stream(self._compute):
            buffers.compute[0].record(self._compute)
            self._run(buffers, batch)
            buffers.compute[1].record(self._compute)
        if with_transfers:
            self._download.wait_event(buffers.compute[1])
            with torch.cuda.stream(self._download):
                buffers.download[0].record(self._download)
                buffers.host_out[:batch].copy_(buffers.device_out[:batch], non_blocking=True)
                buffers.download[1].record(self._download)


class _BufferSet:
    """Buffers for one batch of the largest size, their CUDA graphs by batch size, and the events of a measurement."""

    def __init__(
        self, device: torch.device, image_shape: Sequence[int], output_shape: Sequence[int], dtypes: list[torch.dtype]
    ) -> None:
        # On the host pinned: else copies block.
        self.host_in = torch.zeros(image_shape, dtype=dtypes[0], pin_memory=True)
        self.host_out = torch.zeros(output_shape, dtype=dtypes[1], pin_memory=True)
        self.device_in = torch.zeros(image_shape, dtype=dtypes[0], device=device)
        self.device_out = torch.zeros(output_shape, dtype=dtypes[1], device=device)
        self.graphs: dict[int, torch.cuda.CUDAGraph | None] = {}  # None: can't be captured
        self.last_batch = 0
        self.upload, self.compute, self.download = ((_new_event(), _new_event()) for _ in range(3))

    def wait_ms(self, with_transfers: bool) -> float:
        """Wait for the batch in flight. Returns its latency: the parts' sum, without the time it queued."""
        parts = (self.upload, self.compute, self.download) if with_transfers else (self.compute,)
        parts[-1][1].synchronize()
        return float(sum(start.elapsed_time(end) for start, end in parts))


def _used_bytes(device: torch.device) -> int:
    """Memory of a GPU that is in use, without what PyTorch only keeps for later."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # of torch's stubs


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # of torch's stubs


def _output_shape(context: Any, shapes: ShapeSpec, batch_size: int) -> tuple[int, ...]:
    """Shape of the output for so many images. The context computes it: an engine may leave more than batches open."""
    context.set_input_shape(shapes.input_name, shapes.input_shape(batch_size))
    return tuple(context.get_tensor_shape(shapes.output_name))


def _check_engine(engine: Any, plan_path: Path, shapes: ShapeSpec) -> None:
    """Compare an engine's tensors and batch range with what it is going to be used for."""
    names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    if names != {shapes.input_name, shapes.output_name}:
        raise UserError(
            f"the plan {plan_path} has the tensors {sorted(names)}, expected {shapes.input_name!r} and "
            f"{shapes.output_name!r}: name the model's own in its shapes",
            code="wrong-tensors",
        )
    low, _, high = (tuple(shape) for shape in engine.get_tensor_profile_shape(shapes.input_name, 0))
    if low[0] > shapes.min_batch or high != shapes.input_shape(high[0]) or high[0] < shapes.max_batch:
        raise UserError(
            f"the plan {plan_path} takes inputs from {low} to {high}, expected {shapes.input_shape(shapes.min_batch)} "
            f"to {shapes.input_shape(shapes.max_batch)}: export again with these shapes",
            code="wrong-batches",
        )


def torch_dtype(trt: ModuleType, dtype: Any) -> torch.dtype:
    """An engine's images and answers are FP32 in every bundle of ours; a user's own typed model may have FP16 ones."""
    return torch.from_numpy(np.empty(0, trt.nptype(dtype))).dtype
