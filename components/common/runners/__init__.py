"""One Protocol over the inference runtimes. Each runtime is a module of its own, imported only when asked for."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from components.common.errors import UserError
from components.common.shapes import ShapeSpec


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What a benchmark of one runner at one batch size saw, on trtexec's terms.

    Throughput counts whole batches over host wall time; latency is one batch from input to output.
    """

    batch_size: int
    latencies_ms: np.ndarray  # [iterations] float64
    wall_s: float

    @property
    def mean_ms(self) -> float:
        """Mean latency in milliseconds."""
        return float(self.latencies_ms.mean())

    @property
    def images_per_s(self) -> float:
        """Images per second of host wall time."""
        return self.batch_size * len(self.latencies_ms) / self.wall_s

    def percentile_ms(self, percent: float) -> float:
        """Latency in milliseconds below which `percent` per cent of the iterations lie."""
        return float(np.percentile(self.latencies_ms, percent))


class Meter(Protocol):
    """Something that watches the hardware while a runner is timed, such as a GPU's power."""

    def start(self) -> None:
        """The load is on and the clock is about to start."""
        ...

    def stop(self) -> None:
        """The clock has stopped. Not called where the measurement failed; `start` then begins anew."""
        ...


class Runner(Protocol):
    """A loaded model that turns normalized images into logits."""

    runtime: str  # "tensorrt", "openvino", "onnxruntime" or "torch"
    device: str  # what it runs on, as a person would name it: "NVIDIA H200", "Intel(R) Xeon(R) ..."

    def infer(self, images: np.ndarray) -> np.ndarray:
        """Logits of a batch. images: [B, 3, H, W] float32, normalized. Returns [B, classes] float32."""
        ...

    @property
    def memory_bytes(self) -> int | None:
        """GPU memory that the engine, its contexts and buffers take by now; None where nothing tells (CPUs)."""
        ...

    def measure(
        self,
        batch_size: int,
        *,
        warmup_s: float,
        duration_s: float,
        min_iterations: int,
        with_transfers: bool = True,
        num_streams: int = 1,
        meter: Meter | None = None,
    ) -> Timing:
        """Time inference of random batches, on trtexec's terms.

        Args:
            batch_size: Images per batch.
            warmup_s: Not measured, in seconds.
            duration_s: Least time measured, in seconds.
            min_iterations: Fewest batches measured.
            with_transfers: False leaves the copies to and from a GPU out. Without effect where there are none.
            num_streams: Batches that run at the same time.
            meter: Started and stopped with the clock.

        Raises:
            UserError: this runtime can't run so many batches at the same time.
        """
        ...

    def close(self) -> None:
        """Free the runtime's memory. The runner can't be used afterwards."""
        ...


def measure_host(
    infer: Callable[[np.ndarray], object],
    shapes: ShapeSpec,
    batch_size: int,
    *,
    warmup_s: float,
    duration_s: float,
    min_iterations: int,
    num_streams: int = 1,
    meter: Meter | None = None,
) -> Timing:
    """Time a blocking call on the host clock: the way for every runtime whose call returns when the result is there.

    Args:
        infer: called with the same random images each time, as `Runner.infer` takes them.
        shapes: of these images.
        batch_size: how many they are.
        warmup_s: seconds before the clock starts.
        duration_s: see `Runner.measure`.
        min_iterations: see `Runner.measure`.
        num_streams: only 1, since the call blocks.
        meter: see `Runner.measure`.

    Raises:
        UserError: more than one stream.
    """
    if num_streams != 1:
        raise UserError(f"this runtime runs one batch at a time, got num_streams {num_streams}; set it to 1")
    # images: [B, C, H, W] float32, of the spread of normalized ones
    images = np.random.default_rng(0).standard_normal(shapes.input_shape(batch_size), dtype=np.float32)
    started = time.perf_counter()
    while time.perf_counter() - started < warmup_s:
        infer(images)
    if meter is not None:
        meter.start()
    latencies_ms: list[float] = []
    started = previous = time.perf_counter()
    while previous - started < duration_s or len(latencies_ms) < min_iterations:
        infer(images)
        now = time.perf_counter()
        latencies_ms.append((now - previous) * 1e3)
        previous = now
    if meter is not None:
        meter.stop()
    return Timing(batch_size=batch_size, latencies_ms=np.asarray(latencies_ms), wall_s=previous - started)
