"""The GPU monitor against a small NVML: an energy counter that goes up in steps, and questions that are refused."""

import time
from types import SimpleNamespace

import pynvml
import pytest
import torch

from components.common.process import gpu_monitor
from components.common.process.gpu_monitor import GpuMonitor, GpuReading, monitor_of

POWER_W = 350.0
STEP_S = 0.05


class Nvml:
    """A GPU that draws POWER_W and whose energy counter is brought up to date every STEP_S."""

    NVMLError = pynvml.NVMLError
    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.asked: list[object] = []

    def _answer(self, name: str, value: int) -> int:
        if name in self.refused:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value

    def nvmlInit(self) -> None:
        self._answer("init", 0)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._answer("handle", 0)
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int:
        self.asked.append(handle)
        steps = int(time.perf_counter() / STEP_S)
        return self._answer("energy", round(steps * STEP_S * POWER_W * 1e3))

    def nvmlDeviceGetClockInfo(self, handle: object, kind: int) -> int:
        assert kind == pynvml.NVML_CLOCK_SM
        return self._answer("clock", 1980)

    def nvmlDeviceGetTemperature(self, handle: object, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._answer("temperature", 47)

    def nvmlDeviceGetUtilizationRates(self, handle: object) -> SimpleNamespace:
        return SimpleNamespace(gpu=self._answer("utilization", 93))

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> SimpleNamespace:
        return SimpleNamespace(used=self._answer("memory", 41 << 30))


def watch(nvml: Nvml, monkeypatch: pytest.MonkeyPatch, seconds: float) -> GpuReading:
    monkeypatch.setattr(gpu_monitor, "pynvml", nvml)
    monitor = GpuMonitor("handle")
    monitor.start()
    time.sleep(seconds)
    monitor.stop()
    asked = len(nvml.asked)
    time.sleep(0.05)
    assert len(nvml.asked) == asked  # nobody watches any more
    return monitor.reading()


def test_power_is_that_between_the_steps_of_the_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = watch(Nvml(), monkeypatch, 1.0)
    assert reading.power_w == pytest.approx(POWER_W, rel=0.15)  # a busy machine looks late
    assert (reading.sm_clock_mhz, reading.temperature_c) == (1980, 47)
    assert (reading.utilization_pct, reading.memory_bytes) == (93, 41 << 30)


def test_power_of_known_steps() -> None:
    # The first value was read at some time after its step, so 100 W are those of the steps at 1.0 s and 3.0 s.
    assert gpu_monitor._power_w([(0.9, 500), (1.0, 1_000), (2.0, 150_000), (3.0, 201_000)]) == pytest.approx(100)
    assert gpu_monitor._power_w([(1.0, 1_000), (2.0, 51_000)]) == pytest.approx(50)
    assert gpu_monitor._power_w([(1.0, 1_000)]) is None
    # The second step was seen late and the third at once: 1,000 W, where both took 0.1 s of 350 W.
    assert gpu_monitor._power_w([(0.9, 0), (1.065, 35_000), (1.1, 70_000)]) is None
    assert gpu_monitor._power_w([]) is None


def test_what_nvml_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = watch(Nvml("energy", "clock", "temperature", "utilization", "memory"), monkeypatch, 0.1)
    assert reading == GpuReading(power_w=None, sm_clock_mhz=None, temperature_c=None)
    assert watch(Nvml("energy"), monkeypatch, 0.1).sm_clock_mhz == 1980


def test_spans_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setattr(gpu_monitor, "pynvml", nvml)
    monitor = GpuMonitor("handle")
    monitor.stop()  # nothing was started
    monitor.start()
    monitor.start()  # what came before was not stopped, since its measurement failed
    monitor.stop()
    monitor.stop()
    assert monitor.reading().temperature_c == 47


def test_a_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setattr(gpu_monitor, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    monitor = monitor_of(torch.device("cuda", 0))
    assert monitor is not None
    monitor.start()
    monitor.stop()
    assert set(nvml.asked) == {"GPU-12-34"}
    for refused in ("init", "handle"):
        monkeypatch.setattr(gpu_monitor, "pynvml", Nvml(refused))
        assert monitor_of(torch.device("cuda", 0)) is None
