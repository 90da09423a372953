"""The Protocol of a loaded model, and how one whose call blocks is timed."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, Protocol, TypeAlias, TypedDict, Unpack

import numpy as np

from components.common.contracts.errors import UserError
from components.common.contracts.transforms import ShapeSpec

if TYPE_CHECKING:  # torch takes a second to import, which not every runtime needs
    import torch

Images: TypeAlias = "np.ndarray | torch.Tensor"


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The measurement of one runner at one batch size, on trtexec's terms.

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


class PowerMonitor(Protocol):
    """Something that watches the hardware while a runner is timed, such as a GPU's power."""

    def start(self) -> None:
        """The load is on and the clock is about to start."""
        ...

    def stop(self) -> None:
        """The clock has stopped. Not called where the measurement failed; `start` then begins again."""
        ...


class BenchmarkOptions(TypedDict):
    """The way in which a runner is timed."""

    warmup_s: float  # before the clock starts
    duration_s: float  # least time measured
    min_iterations: int  # fewest batches measured
    # False leaves the copies to and from a GPU out; without effect where there are none. True without it.
    with_transfers: NotRequired[bool]
    num_streams: NotRequired[int]  # batches that run at the same time; 1 without it
    monitor: NotRequired[PowerMonitor | None]  # started and stopped with the clock, while the load is on


class Timed(Protocol):
    """A loaded model whose speed can be measured."""

    @property
    def runtime(self) -> str:
        """One of RUNTIMES."""
        ...

    @property
    def memory_bytes(self) -> int | None:
        """GPU memory that the engine, its contexts and buffers take by now; None where nothing tells (CPUs)."""
        ...

    def measure(self, batch_size: int, **how: Unpack[BenchmarkOptions]) -> Timing:
        """Time inference of random batches, on trtexec's terms.

        Args:
            batch_size: Images per batch.
            how: see `BenchmarkOptions`.

        Raises:
            UserError: this runtime can't run so many batches at the same time.
        """
        ...


class Runner(Timed, Protocol):
    """A loaded model that turns normalized images into logits."""

    device: str  # what it runs on, as a person would name it: "NVIDIA H200", "Intel(R) Xeon(R) ..."

    def infer(self, images: Images) -> np.ndarray:
        """Logits of a batch.

        Args:
            images: [B, 3, H, W] float32, normalized. A runner on the GPU that holds them takes them from there.

        Returns:
            [B, classes] float32.
        """
        ...

    def close(self) -> None:
        """Free the runtime's memory. The runner can't be used afterwards."""
        ...


@dataclass(frozen=True, kw_only=True)
class OpenModel:
    """A model that a runtime has loaded, as `open_model` returns it."""

    file: Path
    runner: Runner
    notes: tuple[str, ...] = ()  # what a reader of its numbers must know


def to_numpy(images: Images) -> np.ndarray:
    """A batch for a runtime on the CPU: [B, 3, H, W] float32, C-contiguous, on the host. Copies only what must be."""
    return images if isinstance(images, np.ndarray) else images.cpu().contiguous().numpy()


def measure_host(
    infer: Callable[[np.ndarray], object], shapes: ShapeSpec, batch_size: int, how: BenchmarkOptions
) -> Timing:
    """Time a blocking call on the host clock: the way for every runtime whose call returns when the result is there.

    Args:
        infer: called with the same random images each time, as `Runner.infer` takes them.
        shapes: of these images.
        batch_size: how many they are.
        how: one stream only, since the call blocks.

    Raises:
        UserError: more than one stream.
    """
    # images: [B, C, H, W] float32, of the spread of normalized ones
    images = np.random.default_rng(0).standard_normal(shapes.input_shape(batch_size), dtype=np.float32)
    return time_calls(lambda _: infer(images), 1, batch_size, how)


def time_calls(call: Callable[[int], object], num_calls: int, batch_size: int, how: BenchmarkOptions) -> Timing:
    """Time blocking calls on the host clock: all of them, in order, over and over, each of them as often.

    Args:
        call: gets numbers from 0 to `num_calls` - 1.
        num_calls: of different calls.
        batch_size: of each.
        how: one stream only, since a call blocks.

    Raises:
        UserError: more than one stream.
    """
    num_streams, monitor = how.get("num_streams", 1), how.get("monitor")
    if num_streams != 1:
        raise UserError(
            f"this runtime runs one batch at a time, got num_streams {num_streams}; set it to 1", code="one-stream-only"
        )
    started, index = time.perf_counter(), 0
    while time.perf_counter() - started < how["warmup_s"]:
        call(index % num_calls)
        index += 1
    if monitor is not None:
        monitor.start()
    latencies_ms: list[float] = []
    started = previous = time.perf_counter()
    while (
        previous - started < how["duration_s"]
        or len(latencies_ms) < how["min_iterations"]
        or len(latencies_ms) % num_calls
    ):
        call(len(latencies_ms) % num_calls)
        now = time.perf_counter()
        latencies_ms.append((now - previous) * 1e3)
        previous = now
    if monitor is not None:
        monitor.stop()
    return Timing(batch_size=batch_size, latencies_ms=np.asarray(latencies_ms), wall_s=previous - started)
