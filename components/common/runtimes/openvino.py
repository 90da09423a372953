"""OpenVINO: INT8 in integer arithmetic, and FP32 as FP32, on CPUs."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Unpack

import numpy as np

from components.common.contracts.environment import cpu_name, num_cores
from components.common.contracts.errors import RuntimeUnavailable, shortened
from components.common.contracts.instruction_sets import instruction_set
from components.common.contracts.manifests import Artifact, BundleManifest
from components.common.contracts.records import Precision
from components.common.contracts.transforms import ShapeSpec
from components.common.runtimes.runner import BenchmarkOptions, Images, OpenModel, Timing, measure_host, to_numpy
from components.common.runtimes.selection import fit_model

try:
    import openvino as ov
    from openvino import properties as props
except ModuleNotFoundError as error:
    raise RuntimeUnavailable(
        "OpenVINO runs models on CPUs and is not installed: pip install openvino", code="library-missing"
    ) from error

LATENCY = {props.hint.performance_mode: props.hint.PerformanceMode.LATENCY}  # of one batch at a time
_NO_REASONS = ("Exception from", "Check '", "To facilitate")  # begins of lines in OpenVINO's errors
_PROFILE_S, _MIN_PROFILED = 1.0, 3  # seconds and batches of a profile


def open_model(bundle: Artifact[BundleManifest], precision: Precision) -> OpenModel:
    """The model of a precision: INT8 in the file that is fit for this CPU.

    Raises:
        RuntimeUnavailable: no INT8 file is.
    """
    file, notes = bundle.manifest.models[precision], []
    if precision == "int8":
        model = fit_model(bundle.manifest.cpu_models)
        arithmetic = (
            model.arithmetic if bundle.manifest.num_quantized_layers else "no layer in INT8, all compute in FP32"
        )
        file, notes = model.file, [f"{arithmetic}, on {instruction_set()}"]
    runner = OpenVINORunner(bundle.file(file), bundle.manifest.image_shapes)
    return OpenModel(file=bundle.file(file), runner=runner, notes=tuple(notes))


@cache
def _core() -> ov.Core:
    """The only one of this process, which is never let go.

    Where OpenVINO uses AMX, a Core brings a stack for signal handlers along and frees it when it goes, though it may
    be in use again by then, put back by another Core that went: the next signal, such as Ctrl-C, would end the process.
    """
    return ov.Core()


@contextmanager
def named_refusal() -> Iterator[None]:
    """Name what the CPU lacks where OpenVINO has no code for it, which shows with the first images.

    Raises:
        RuntimeUnavailable: it has none.
    """
    try:
        yield
    except RuntimeError as error:
        if "bad combination" not in str(error):
            raise
        raise RuntimeUnavailable(
            f"OpenVINO can't run layer normalization on a CPU without AVX, as this is with {instruction_set()}: take "
            "another CPU, or a network with BatchNorm alone, such as resnet50",
            code="cpu-without-avx",
        ) from error


def profile_layers(onnx_path: Path, shapes: ShapeSpec, batch_size: int) -> list[tuple[str, tuple[str, ...], float]]:
    """Measure the layers of a compiled file, in the order in which they run: name, nodes of the file, milliseconds.

    The shortest of some runs counts: what else the machine does only adds to a time.
    """
    compiled = compile_file(onnx_path, {**LATENCY, props.enable_profiling: True})
    nodes = {}
    for operation in compiled.get_runtime_model().get_ordered_ops():
        names = operation.get_rt_info()["originalLayersNames"].astype(str)
        nodes[operation.get_friendly_name()] = tuple(filter(None, names.split(",")))
    request = compiled.create_infer_request()
    images = np.random.default_rng(0).standard_normal(shapes.input_shape(batch_size), dtype=np.float32)
    request.infer([images], share_inputs=True)  # prepares for this size of a batch
    times: dict[str, float] = {}
    ends, num_runs = time.perf_counter() + _PROFILE_S, 0
    while num_runs < _MIN_PROFILED or time.perf_counter() < ends:
        request.infer([images], share_inputs=True)
        num_runs += 1
        for layer in request.get_profiling_info():
            milliseconds = 1e3 * layer.real_time.total_seconds()
            times[layer.node_name] = min(milliseconds, times.get(layer.node_name, milliseconds))
    return [(name, nodes.get(name, ()), milliseconds) for name, milliseconds in times.items()]


class OpenVINORunner:
    """One ONNX file compiled for the CPU."""

    runtime = "openvino"
    memory_bytes = None

    def __init__(self, onnx_path: Path, shapes: ShapeSpec) -> None:
        """Compile. The precision is what the file says: the hint keeps OpenVINO from running FP32 in BF16."""
        self._shapes = shapes
        self.device = f"{cpu_name()}, {num_cores()} cores"
        self._onnx_path = onnx_path
        self._compiled = compile_file(onnx_path, LATENCY)
        self._request = self._compiled.create_infer_request()
        self._queues: dict[int, ov.AsyncInferQueue] = {}  # by the number of streams

    def infer(self, images: Images) -> np.ndarray:
        """See Runner."""
        with named_refusal():
            result = self._request.infer([to_numpy(images)], share_inputs=True)
        return np.array(result[0], dtype=np.float32)

    def measure(self, batch_size: int, **how: Unpack[BenchmarkOptions]) -> Timing:
        """See Runner. On a CPU there is no transfer, so latency is the call.

        Several streams are as many infer requests of a model compiled for throughput, which share the cores. A latency
        is then from a request's start to its end.
        """
        if (num_streams := how.get("num_streams", 1)) > 1:
            if num_streams not in self._queues:
                hints = {
                    props.hint.performance_mode: props.hint.PerformanceMode.THROUGHPUT,
                    props.hint.num_requests: num_streams,
                    props.num_streams: num_streams,
                }
                self._queues[num_streams] = ov.AsyncInferQueue(compile_file(self._onnx_path, hints), num_streams)
            queue = self._queues[num_streams]
            images = np.random.default_rng(0).standard_normal(self._shapes.input_shape(batch_size), dtype=np.float32)
            return _time_queue(queue, images, num_streams, how)
        infer = partial(self._request.infer, share_inputs=True, share_outputs=True)
        return measure_host(lambda images: infer([images]), self._shapes, batch_size, how)

    def close(self) -> None:
        """See Runner."""
        self._queues.clear()
        del self._request, self._compiled


def compile_file(onnx_path: Path, hints: Mapping[str, object]) -> ov.CompiledModel:
    """An ONNX file compiled for the CPU, by OpenVINO's properties.

    Raises:
        RuntimeUnavailable: OpenVINO can't compile it here.
    """
    content = onnx_path.read_bytes()  # once: what was looked at can't be swapped any more
    # The server's image has no onnx: what it opens was read when it was written, and is held against its digest.
    if find_spec("onnx") is not None:
        from components.common.runtimes.onnx_files import parse_onnx

        parse_onnx(content, onnx_path)  # refuses weights in other files
    core = _core()
    settings = {props.hint.inference_precision: ov.Type.f32, props.inference_num_threads: num_cores(), **hints}
    try:
        with named_refusal():
            return core.compile_model(core.read_model(content), "CPU", settings)
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip() and not line.startswith(_NO_REASONS)]
        reason = shortened(" ".join(lines[-1:]))
        raise RuntimeUnavailable(
            f"OpenVINO {ov.__version__} can't compile {onnx_path.name}: {reason}. Take another runtime; to export INT8 "
            "without measuring it here, set export.num_selection_images to 0",
            code="openvino-refused",
        ) from error


def _time_queue(queue: ov.AsyncInferQueue, images: np.ndarray, num_streams: int, how: BenchmarkOptions) -> Timing:
    """Keep every request of a queue busy. images: [B, C, H, W] float32, the same each time."""
    monitor = how.get("monitor")
    ended: list[tuple[float, float]] = []  # of each batch: the time of its end, its latency in milliseconds

    def note_end(request: ov.InferRequest, started: float) -> None:
        now = time.perf_counter()
        ended.append((now, (now - started) * 1e3))

    def submit() -> None:
        queue.get_idle_request_id()  # waits for one, so that the latency holds no queueing
        queue.start_async([images], userdata=time.perf_counter(), share_inputs=True)

    queue.set_callback(note_end)
    warm = time.perf_counter() + how["warmup_s"]
    while time.perf_counter() < warm or len(ended) < num_streams:
        submit()
    if monitor is not None:
        monitor.start()
    # The clock starts and stops at the end of a batch, with all streams busy: what drains afterwards is not counted.
    first = len(ended)
    while len(ended) < first + how["min_iterations"] or ended[-1][0] - ended[first - 1][0] < how["duration_s"]:
        submit()
    last = len(ended)
    if monitor is not None:
        monitor.stop()
    queue.wait_all()
    counted = ended[first:last]
    return Timing(
        batch_size=len(images),
        latencies_ms=np.array([latency_ms for _, latency_ms in counted]),
        wall_s=counted[-1][0] - ended[first - 1][0],
    )
