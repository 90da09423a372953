"""What a GPU draws and how it runs while something else is timed, through NVML: energy, clock, use and the like."""

import threading
import time
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import pynvml
import torch

_INTERVAL_S = 0.02  # between two looks; the driver itself counts energy some ten times a second
# A step is seen late by up to an interval: a span of this length is off by 8 % at most, and speeds are the median of
# several spans. Of a shorter one the power would be a guess.
_MIN_SPAN_S = 0.25
_LOOKS_PER_STATE = 5  # all but the energy is asked for every so many looks


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """A GPU while it was watched. None where NVML does not know it of this GPU, or of a part of one (MIG)."""

    power_w: float | None = None  # of the whole board, mean; None also of spans too short to tell
    sm_clock_mhz: int | None = None  # median
    temperature_c: int | None = None  # median
    utilization_pct: float | None = None  # share of the time with a kernel running, mean
    memory_bytes: int | None = None  # in use at most, by all processes


@dataclass
class _Seen:
    """What the looks of one span saw."""

    energy: list[tuple[float, int]] = field(default_factory=list)  # (seconds, millijoules), whenever it has changed
    clocks_mhz: list[int] = field(default_factory=list)
    temperatures_c: list[int] = field(default_factory=list)
    utilizations_pct: list[int] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)


class GpuMonitor:
    """Watches one GPU between `start` and `stop`, from a thread of its own. A `Meter` for runners."""

    def __init__(self, handle: Any, *, interval_s: float = _INTERVAL_S) -> None:
        """`handle` is NVML's of the GPU; it is looked at every `interval_s` seconds."""
        self._handle = handle
        self._interval_s = interval_s
        self._seen = _Seen()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin a new span. One that was not stopped is dropped."""
        self._end()
        self._seen, self._stop = _Seen(), threading.Event()
        self._look(self._seen, with_state=True)
        arguments = (self._seen, self._stop)
        self._thread = threading.Thread(target=self._watch, args=arguments, name="gpu-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the span, while the load is still on."""
        if self._thread is not None:
            self._end()
            self._look(self._seen, with_state=True)

    def reading(self) -> GpuReading:
        """What the last span saw."""
        seen = self._seen
        return GpuReading(
            power_w=_power_w(seen.energy),
            sm_clock_mhz=round(median(seen.clocks_mhz)) if seen.clocks_mhz else None,
            temperature_c=round(median(seen.temperatures_c)) if seen.temperatures_c else None,
            utilization_pct=mean(seen.utilizations_pct) if seen.utilizations_pct else None,
            memory_bytes=max(seen.memory_bytes, default=None),
        )

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self, seen: _Seen, stop: threading.Event) -> None:
        looks = 0
        while not stop.wait(self._interval_s):
            looks += 1
            self._look(seen, with_state=looks % _LOOKS_PER_STATE == 0)

    def _look(self, seen: _Seen, *, with_state: bool) -> None:
        energy_mj = _ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, self._handle)
        if energy_mj is not None and (not seen.energy or energy_mj != seen.energy[-1][1]):
            seen.energy.append((time.perf_counter(), energy_mj))
        if with_state:
            clock_mhz = _ask(pynvml.nvmlDeviceGetClockInfo, self._handle, pynvml.NVML_CLOCK_SM)
            temperature_c = _ask(pynvml.nvmlDeviceGetTemperature, self._handle, pynvml.NVML_TEMPERATURE_GPU)
            seen.clocks_mhz += [] if clock_mhz is None else [clock_mhz]
            seen.temperatures_c += [] if temperature_c is None else [temperature_c]
            busy_pct = _ask(lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu, self._handle)
            seen.utilizations_pct += [] if busy_pct is None else [busy_pct]
            used_bytes = _ask(lambda handle: pynvml.nvmlDeviceGetMemoryInfo(handle).used, self._handle)
            seen.memory_bytes += [] if used_bytes is None else [used_bytes]


def monitor_of(device: torch.device, *, interval_s: float = _INTERVAL_S) -> GpuMonitor | None:
    """A monitor of a CUDA device that looks every `interval_s` seconds.

    None where NVML can't be reached, as in some sandboxes, or does not know the GPU. The GPU is found by its UUID:
    CUDA and NVML number GPUs each in their own way.
    """
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None
    return GpuMonitor(handle, interval_s=interval_s)


def _ask(question: Any, *arguments: Any) -> int | None:
    try:
        return int(question(*arguments))
    except pynvml.NVMLError:
        return None


def _power_w(energy: list[tuple[float, int]]) -> float | None:
    """Mean power in W between the first and the last change of the energy counter that was seen.

    The counter goes up in steps, so a span is only known from one step to another. The first value was read somewhere
    between two steps: it does not count where there are enough others. None where too little time was seen.
    """
    steps = energy[1:] if len(energy) > 2 else energy
    if len(steps) < 2:
        return None
    (first_s, first_mj), (last_s, last_mj) = steps[0], steps[-1]
    if last_s - first_s < _MIN_SPAN_S:
        return None
    return (last_mj - first_mj) / 1e3 / (last_s - first_s)
