"""Power, clock, temperature, utilization and memory of a GPU while something else is timed, through NVML."""

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import pynvml
import torch

_INTERVAL_S = 0.02  # between two samples; the driver itself counts energy some ten times a second
# A step is seen late by up to an interval: a span of this length is off by 8 % at most, and speeds are the median of
# several spans. Of a shorter one the power would be wrong.
_MIN_SPAN_S = 0.25
_SAMPLES_PER_STATE = 5  # all but the energy is asked for every so many samples
_STATE: dict[str, Callable[[Any], int]] = {
    "sm_clock_mhz": lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
    "temperature_c": lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
    "utilization_pct": lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
    "memory_bytes": lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used,
}


@dataclass(frozen=True, kw_only=True)
class GpuReading:
    """A GPU while it was watched. None where NVML does not know it of this GPU, or of a part of one (MIG)."""

    power_w: float | None = None  # of the whole board, mean; None also of spans too short to tell
    sm_clock_mhz: int | None = None  # median
    temperature_c: int | None = None  # median
    utilization_pct: float | None = None  # share of the time with a kernel running, mean
    memory_bytes: int | None = None  # in use at most, by all processes


@dataclass
class _Span:
    """The samples between `start` and `stop`."""

    energy: list[tuple[float, int]] = field(default_factory=list)  # (seconds, millijoules), whenever it has changed
    state: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in _STATE})


class GpuMonitor:
    """Watches one GPU between `start` and `stop`, from a thread of its own. A `PowerMonitor` for runners."""

    def __init__(self, handle: Any, *, interval_s: float = _INTERVAL_S) -> None:
        """`handle` is NVML's of the GPU; it is asked every `interval_s` seconds."""
        self._handle = handle
        self._interval_s = interval_s
        self._span = _Span()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin a new span. One that was not stopped is dropped."""
        self._end()
        self._span, self._stop = _Span(), threading.Event()
        self._sample(self._span, with_state=True)
        arguments = (self._span, self._stop)
        self._thread = threading.Thread(target=self._watch, args=arguments, name="gpu-monitor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the span, while the load is still on."""
        if self._thread is not None:
            self._end()
            self._sample(self._span, with_state=True)

    def reading(self, last_s: float | None = None) -> GpuReading:
        """Return what was measured in the last span, or in its last seconds."""
        state, energy = self._span.state, self._span.energy
        if last_s is not None:
            number = max(1, round(last_s / (self._interval_s * _SAMPLES_PER_STATE)))
            state = {name: values[-number:] for name, values in state.items()}
            energy = [entry for entry in energy if entry[0] >= time.perf_counter() - last_s]
        return GpuReading(
            power_w=_power_w(energy),
            sm_clock_mhz=round(median(state["sm_clock_mhz"])) if state["sm_clock_mhz"] else None,
            temperature_c=round(median(state["temperature_c"])) if state["temperature_c"] else None,
            utilization_pct=mean(state["utilization_pct"]) if state["utilization_pct"] else None,
            memory_bytes=max(state["memory_bytes"], default=None),
        )

    def _end(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self, span: _Span, stop: threading.Event) -> None:
        for number in itertools.count(1):
            if stop.wait(self._interval_s):
                return
            self._sample(span, with_state=number % _SAMPLES_PER_STATE == 0)

    def _sample(self, span: _Span, *, with_state: bool) -> None:
        with suppress(pynvml.NVMLError):
            energy_mj = int(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
            if not span.energy or energy_mj != span.energy[-1][1]:
                span.energy.append((time.perf_counter(), energy_mj))
        for name, ask in _STATE.items() if with_state else ():
            with suppress(pynvml.NVMLError):
                span.state[name].append(int(ask(self._handle)))


def monitor_of(device: torch.device, *, interval_s: float = _INTERVAL_S) -> GpuMonitor | None:
    """Return a monitor of a CUDA device that asks every `interval_s` seconds.

    None where NVML can't be reached, as in some sandboxes, or does not know the GPU. The GPU is found by its UUID:
    CUDA and NVML number GPUs each in their own way.
    """
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None
    return GpuMonitor(handle, interval_s=interval_s)


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
