"""TensorRT as a runner, on TensorRT 8.6, 10 and 11, and the probe that says why it can't be used here."""

import functools
import importlib
import itertools
import logging
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from components.common.artifacts import EngineEntry
from components.common.errors import EngineryError, RuntimeUnavailable, UserError
from components.common.runners import Timing
from components.common.shapes import ShapeSpec

_log = logging.getLogger(__name__)

_INSTALL = "run `pip install 'enginery[tensorrt]'` (in a checkout: `make install-tensorrt`)"


def why_no_tensorrt() -> str | None:
    """None when TensorRT imports and a CUDA GPU is usable; else one sentence that says what is missing and the fix."""
    if not torch.cuda.is_available():
        return (
            f"no CUDA GPU is usable here (torch {torch.__version__} finds none): TensorRT needs an NVIDIA GPU, its "
            "driver, and a CUDA_VISIBLE_DEVICES that does not hide it; use the OpenVINO runtime on machines without one"
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
        RuntimeUnavailable: TensorRT can't be used here; the message is that of `why_no_tensorrt`.
    """
    missing = why_no_tensorrt()
    if missing is not None:
        raise RuntimeUnavailable(missing)
    return importlib.import_module("tensorrt")


def plan_mismatches(entry: EngineEntry) -> list[str]:
    """How this machine differs from the one that a plan was built on, a phrase each; empty where the plan fits.

    TensorRT itself says no more of a plan that does not fit than that it can't be read. A newer driver is no mismatch.

    Raises:
        RuntimeUnavailable: TensorRT can't be used here.
    """
    trt = load_tensorrt()
    facts = (
        ("TensorRT", entry.tensorrt_version, trt.__version__),
        ("GPU", entry.gpu_name, torch.cuda.get_device_name()),
        ("compute capability", entry.compute_capability, "{}.{}".format(*torch.cuda.get_device_capability())),
    )
    return [f"{what} {built} there, {here} here" for what, built, here in facts if built != here]


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


class TensorRTRunner:
    """An engine on the current CUDA device. Buffers for the largest batch are allocated once, two sets of them.

    One execution context serves all batch sizes, one after the other: on TensorRT 8.6 a second context on the same
    optimization profile fails to enqueue.
    """

    runtime = "tensorrt"

    def __init__(self, plan_path: Path, shapes: ShapeSpec) -> None:
        """Load a plan.

        Raises:
            RuntimeUnavailable: TensorRT can't be used here.
            UserError: the plan was built for another GPU or TensorRT version, or for smaller batches.
        """
        trt = load_tensorrt()
        logger = tensorrt_logger()
        self._shapes = shapes
        self._cuda = torch.device("cuda", torch.cuda.current_device())
        self.device = torch.cuda.get_device_name(self._cuda)
        logger.take_errors()
        runtime = trt.Runtime(logger)
        engine = runtime.deserialize_cuda_engine(plan_path.read_bytes())
        if engine is None:
            raise UserError(
                f"TensorRT {trt.__version__} on {self.device} can't load the plan {plan_path}: {logger.take_errors()}. "
                "A plan runs only on the TensorRT version and GPU model it was built with: export again on this machine"
            )
        _check_engine(engine, plan_path, shapes)
        context = engine.create_execution_context()
        if context is None:
            raise EngineryError(f"no execution context for {plan_path} on {self.device}: {logger.take_errors()}")
        self._runtime, self._engine, self._context = runtime, engine, context
        classes = tuple(engine.get_tensor_shape(shapes.output_name))[1]
        dtypes = [_torch_dtype(trt, engine.get_tensor_dtype(n)) for n in (shapes.input_name, shapes.output_name)]
        self._compute, self._upload, self._download = (_new_stream(self._cuda) for _ in range(3))
        self._slots = [_Slot(self._cuda, shapes, classes, dtypes) for _ in range(2)]
        torch.cuda.synchronize(self._cuda)  # the buffers were zeroed on another stream than those that will use them

    def infer(self, images: np.ndarray) -> np.ndarray:
        """Logits of a batch of any size; more than `max_batch` images are run in several batches.

        Args:
            images: [B, channels, height, width] float32, normalized.

        Returns:
            [B, classes] float32.
        """
        self._check_open()
        expected = self._shapes.input_shape(len(images))
        if images.shape != expected:
            raise UserError(f"the engine takes images of shape [batch, {expected[1:]}], got {images.shape}")
        logits = np.empty((len(images), self._slots[0].device_out.shape[1]), np.float32)
        with torch.cuda.device(self._cuda):
            for start in range(0, len(images), self._shapes.max_batch):
                chunk = np.require(images[start : start + self._shapes.max_batch], np.float32, ["C", "W"])
                logits[start : start + len(chunk)] = self._infer_batch(torch.from_numpy(chunk))
        return logits

    def _check_open(self) -> None:
        if self._context is None:
            raise EngineryError("this TensorRT runner was closed; load the plan again")

    def _infer_batch(self, images: torch.Tensor) -> np.ndarray:
        # A batch under the profile's minimum is filled up with what the buffer holds: images don't affect each other.
        slot, batch = self._slots[0], max(len(images), self._shapes.min_batch)
        slot.host_in[: len(images)].copy_(images)
        with torch.cuda.stream(self._compute):
            slot.device_in[:batch].copy_(slot.host_in[:batch], non_blocking=True)
            self._enqueue(slot, batch)
            slot.host_out[:batch].copy_(slot.device_out[:batch], non_blocking=True)
        self._compute.synchronize()
        return slot.host_out[: len(images)].float().numpy()

    def _enqueue(self, slot: "_Slot", batch: int) -> None:
        """Put the computation of one batch, device buffer to device buffer, on the compute stream."""
        context = self._context
        context.set_input_shape(self._shapes.input_name, self._shapes.input_shape(batch))
        context.set_tensor_address(self._shapes.input_name, slot.device_in.data_ptr())
        context.set_tensor_address(self._shapes.output_name, slot.device_out.data_ptr())
        if not context.execute_async_v3(self._compute.cuda_stream):
            raise EngineryError(f"TensorRT failed to enqueue a batch of {batch}: {tensorrt_logger().take_errors()}")

    def measure(
        self, batch_size: int, *, warmup_s: float, duration_s: float, min_iterations: int, with_transfers: bool = True
    ) -> Timing:
        """Time random batches on trtexec's terms: one batch enqueued ahead, as CUDA graph where that can be captured.

        A latency is host-to-device copy + GPU computation + device-to-host copy of one batch, by CUDA events. The
        copies of one batch overlap the computation of the other, as in trtexec. `with_transfers=False` leaves the
        copies out, the default of trtexec from TensorRT 11 on.
        """
        self._check_open()
        if not self._shapes.min_batch <= batch_size <= self._shapes.max_batch:
            raise UserError(
                f"the engine takes batches of {self._shapes.min_batch} to {self._shapes.max_batch}, got {batch_size}"
            )
        with torch.cuda.device(self._cuda):
            for slot in self._slots:
                self._prepare(slot, batch_size)
            return self._time_steadily(batch_size, warmup_s, duration_s, min_iterations, with_transfers)

    def _prepare(self, slot: "_Slot", batch: int) -> None:
        """Fill a slot with random numbers (zeros save power and run faster) and capture its computation."""
        slot.host_in[:batch].copy_(torch.randn(self._shapes.input_shape(batch)))
        with torch.cuda.stream(self._compute):
            slot.device_in[:batch].copy_(slot.host_in[:batch], non_blocking=True)
            self._enqueue(slot, batch)  # TensorRT wants one run at a new shape before it can be captured
        self._compute.synchronize()
        slot.graph = self._capture(slot, batch)

    def _capture(self, slot: "_Slot", batch: int) -> torch.cuda.CUDAGraph | None:
        """A CUDA graph of one computation; None where this engine can't be captured (it is then enqueued each time)."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._compute, capture_error_mode="thread_local"):
                self._enqueue(slot, batch)
            slot.device_out.zero_()
            torch.cuda.synchronize(self._cuda)
            graph.replay()
            torch.cuda.synchronize(self._cuda)
        except (RuntimeError, EngineryError) as error:
            _log.warning("no CUDA graph of a batch of %d, its kernels are launched one by one: %s", batch, error)
            return None
        if not slot.device_out[:batch].any():  # nothing was recorded: the work went to a stream of the engine's own
            _log.warning("the CUDA graph of a batch of %d is empty, its kernels are launched one by one", batch)
            return None
        return graph

    def _submit(self, slot: "_Slot", batch: int, with_transfers: bool) -> None:
        """Enqueue copy, computation and copy of one batch on their three streams. Returns at once."""
        if with_transfers:
            with torch.cuda.stream(self._upload):
                slot.upload[0].record(self._upload)
                slot.device_in[:batch].copy_(slot.host_in[:batch], non_blocking=True)
                slot.upload[1].record(self._upload)
            self._compute.wait_event(slot.upload[1])
        with torch.cuda.stream(self._compute):
            slot.compute[0].record(self._compute)
            if slot.graph is not None:
                slot.graph.replay()
            else:
                self._enqueue(slot, batch)
            slot.compute[1].record(self._compute)
        if with_transfers:
            self._download.wait_event(slot.compute[1])
            with torch.cuda.stream(self._download):
                slot.download[0].record(self._download)
                slot.host_out[:batch].copy_(slot.device_out[:batch], non_blocking=True)
                slot.download[1].record(self._download)

    def _time_steadily(
        self, batch: int, warmup_s: float, duration_s: float, min_iterations: int, with_transfers: bool
    ) -> Timing:
        first, second = self._slots
        turns = itertools.cycle([(first, second), (second, first)])

        def finish_one() -> float:
            behind, ahead = next(turns)
            self._submit(ahead, batch, with_transfers)
            return behind.wait_ms(with_transfers)

        # The clock starts and stops just after a batch has ended with one more in flight, so it counts exactly the
        # batches that ended in between.
        self._submit(first, batch, with_transfers)
        warm = time.perf_counter() + warmup_s
        finish_one()
        while time.perf_counter() < warm:
            finish_one()
        latencies_ms: list[float] = []
        started = now = time.perf_counter()
        while now - started < duration_s or len(latencies_ms) < min_iterations:
            latencies_ms.append(finish_one())
            now = time.perf_counter()
        torch.cuda.synchronize(self._cuda)
        return Timing(batch_size=batch, latencies_ms=np.asarray(latencies_ms), wall_s=now - started)

    def close(self) -> None:
        """Free the engine's memory."""
        torch.cuda.synchronize(self._cuda)
        self._slots.clear()
        self._context = self._engine = self._runtime = None  # in this order: each needs the next while it lives


class _Slot:
    """Buffers for one batch of the largest size, and the events and CUDA graph of a measurement."""

    def __init__(self, device: torch.device, shapes: ShapeSpec, classes: int, dtypes: list[torch.dtype]) -> None:
        # [max_batch, channels, height, width] and [max_batch, classes]; pinned: else copies block.
        image_shape, logit_shape = shapes.input_shape(shapes.max_batch), (shapes.max_batch, classes)
        self.host_in = torch.zeros(image_shape, dtype=dtypes[0], pin_memory=True)
        self.host_out = torch.zeros(logit_shape, dtype=dtypes[1], pin_memory=True)
        self.device_in = torch.zeros(image_shape, dtype=dtypes[0], device=device)
        self.device_out = torch.zeros(logit_shape, dtype=dtypes[1], device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.upload, self.compute, self.download = ((_new_event(), _new_event()) for _ in range(3))

    def wait_ms(self, with_transfers: bool) -> float:
        """Wait for the batch in flight. Returns its latency: the parts' sum, without the time it queued."""
        parts = (self.upload, self.compute, self.download) if with_transfers else (self.compute,)
        parts[-1][1].synchronize()
        return float(sum(start.elapsed_time(end) for start, end in parts))


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # of torch's stubs


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # of torch's stubs


def _check_engine(engine: Any, plan_path: Path, shapes: ShapeSpec) -> None:
    """Compare an engine's tensors and batch range with what it is going to be used for."""
    names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    if names != {shapes.input_name, shapes.output_name}:
        raise UserError(
            f"the plan {plan_path} has the tensors {sorted(names)}, expected {shapes.input_name!r} and "
            f"{shapes.output_name!r}: name the model's own in its shapes"
        )
    low, _, high = (tuple(shape) for shape in engine.get_tensor_profile_shape(shapes.input_name, 0))
    if low[0] > shapes.min_batch or high != shapes.input_shape(high[0]) or high[0] < shapes.max_batch:
        raise UserError(
            f"the plan {plan_path} takes inputs from {low} to {high}, expected {shapes.input_shape(shapes.min_batch)} "
            f"to {shapes.input_shape(shapes.max_batch)}: export again with these shapes"
        )


def _torch_dtype(trt: ModuleType, dtype: Any) -> torch.dtype:
    """An engine's inputs and outputs are FP32 in every bundle of ours; a user's own typed model may have FP16 ones."""
    return torch.from_numpy(np.empty(0, trt.nptype(dtype))).dtype
