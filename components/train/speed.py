"""How fast an epoch went, what it waited for, and how busy the GPUs were."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from components.common.gpu_monitor import monitor_of
from components.common.loader import Batch
from components.train.distributed import World, to_main
from components.train.flops import flops_per_image, peak_tflops

_LOOK_S = 0.05  # between two looks at the GPU


@dataclass(frozen=True, kw_only=True)
class EpochSpeed:
    """What an epoch of training took. None is what can't be told here. Over all processes, on rank 0."""

    train_images_per_s: float
    data_wait_pct: float  # of the time, mean
    gpu_utilization_pct: float | None = None  # mean
    gpu_memory_bytes: int | None = None  # in use at most, by whatever runs there, on the GPU with the most
    gpu_power_w: float | None = None  # sum; of all GPUs or of none
    tflops_per_s: float | None = None  # sum
    peak_pct: float | None = None  # share of what the GPUs' data sheets say

    def load_text(self) -> str:
        """How busy data and GPUs were, on one line for a person."""
        parts = [f"{self.data_wait_pct:.1f} % waiting for data"]
        if self.gpu_utilization_pct is not None:
            parts.append(f"GPU {self.gpu_utilization_pct:.0f} % busy")
        if self.gpu_memory_bytes is not None:
            parts.append(f"{self.gpu_memory_bytes / 1e9:.1f} GB")
        if self.gpu_power_w is not None:
            parts.append(f"{self.gpu_power_w:,.0f} W")
        if self.tflops_per_s is not None and self.peak_pct is not None:
            parts.append(f"{self.tflops_per_s:,.0f} TFLOP/s ({self.peak_pct:.0f} % of peak)")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class _Own:
    """What one process tells the others of its epoch."""

    wait_share: float
    utilization_pct: float | None
    memory_bytes: int | None
    power_w: float | None


class Waits:
    """Time that a process's steps wait for batches: on a GPU, between its last work and the batch's arrival there.

    A CPU that waits while the GPU has work to do costs nothing, so it is the GPU's time that counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def next(self, batches: Iterator[Batch]) -> Batch:
        """The next batch."""
        if not self._on_gpu:
            before = time.perf_counter()
            batch = next(batches)
            self._seconds += time.perf_counter() - before
            return batch
        first, last = _event(), _event()
        first.record()
        batch = next(batches)
        last.record()
        self._pending.append((first, last))
        while self._pending and self._pending[0][1].query():  # type: ignore[no-untyped-call]
            self._add_oldest()
        return batch

    def take_seconds(self) -> float:
        """Since the last call. The GPU must have finished what it was given."""
        while self._pending:
            self._add_oldest()
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _add_oldest(self) -> None:
        first, last = self._pending.popleft()
        last.synchronize()
        self._seconds += first.elapsed_time(last) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class SpeedMeter:
    """Measures epochs of one process, and what all of them make together."""

    def __init__(self, model: nn.Module, world: World, dtype: torch.dtype, *, tf32: bool) -> None:
        """`model` computes in `dtype` on the world's device."""
        self._model, self._world = model, world
        on_gpu = world.device.type == "cuda"
        self._monitor = monitor_of(world.device, interval_s=_LOOK_S) if on_gpu else None
        name = torch.cuda.get_device_name(world.device) if on_gpu else ""
        self._peak = peak_tflops(name, dtype, tf32=tf32)
        self._waits = Waits(world.device)
        self._flops: dict[tuple[int, int], float | None] = {}  # per image, by height and width
        self._size = (0, 0)
        self._num_images = 0
        self._began = time.perf_counter()

    def begin(self) -> None:
        """An epoch, or what is left of one, begins."""
        self._waits.take_seconds()
        self._num_images = 0
        self._began = time.perf_counter()
        if self._monitor is not None:
            self._monitor.start()

    def next(self, batches: Iterator[Batch]) -> Batch:
        """The next batch, and note how long it took."""
        batch = self._waits.next(batches)
        self._num_images += len(batch.images)
        self._size = (batch.images.shape[2], batch.images.shape[3])
        return batch

    def rate(self) -> float:
        """Images per second since `begin`, of all processes, for a person to see meanwhile."""
        return self._world.world_size * self._num_images / (time.perf_counter() - self._began)

    def stop(self) -> None:
        """The epoch was left: nobody looks at the GPU any more."""
        if self._monitor is not None:
            self._monitor.stop()

    def end(self, num_images: int, seconds: float) -> EpochSpeed:
        """The epoch is over, and the GPU has finished. By all processes.

        Args:
            num_images: of the whole epoch, over all processes.
            seconds: that it took, with what an earlier process had done of it.
        """
        wait_share = self._waits.take_seconds() / max(1e-9, time.perf_counter() - self._began)
        self.stop()
        seen = self._monitor.reading() if self._monitor is not None else None
        own = _Own(
            wait_share=wait_share,
            utilization_pct=seen.utilization_pct if seen else None,
            memory_bytes=seen.memory_bytes if seen else None,
            power_w=seen.power_w if seen else None,
        )
        every = to_main(own, self._world) or [own]
        images_per_s = num_images / seconds
        flops = self._flops_per_image()
        tflops = None if flops is None else flops * images_per_s / 1e12
        peak = None if tflops is None or self._peak is None else 100 * tflops / self._peak / self._world.world_size
        utilizations = [one.utilization_pct for one in every if one.utilization_pct is not None]
        powers = [one.power_w for one in every if one.power_w is not None]
        return EpochSpeed(
            train_images_per_s=images_per_s,
            data_wait_pct=100 * sum(one.wait_share for one in every) / len(every),
            gpu_utilization_pct=sum(utilizations) / len(utilizations) if utilizations else None,
            gpu_memory_bytes=max((one.memory_bytes for one in every if one.memory_bytes is not None), default=None),
            gpu_power_w=sum(powers) if len(powers) == len(every) else None,
            tflops_per_s=tflops,
            peak_pct=peak,
        )

    def _flops_per_image(self) -> float | None:
        if self._size == (0, 0):  # nothing was left of the epoch
            return None
        if self._size not in self._flops:
            self._flops[self._size] = flops_per_image(self._model, *self._size)
        return self._flops[self._size]
