"""A step's process: its progress as lines and bars, its age, and the GPU monitor against a small NVML."""

import io
import os
import re
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest
import torch
from rich.console import Console

from components.common.contracts.errors import EXIT_USER_ERROR
from components.common.process import gpu_monitor, lifetime, steplog
from components.common.process.gpu_monitor import GpuMonitor, GpuReading, monitor_of
from components.common.process.partial_output import lock_output
from components.common.process.steplog import EVENTS_VARIABLE, StepLog
from enginery.local.rendering import Renderer
from tests.processes import run_python

POWER_W = 350.0
STEP_S = 0.05


class Clock:
    """Seconds that pass when a test says so."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(steplog, "time", clock := Clock())
    return clock


def progress(phase: str, done: int, total: int, unit: str = "", detail: str = "") -> dict[str, object]:
    what = {"phase": phase, "done": done, "total": total, "unit": unit, "detail": detail}
    return {"event": "progress", "step": "export", **what}


def rendered(*events: dict[str, object], clock: Clock, seconds: float = 0) -> list[str]:
    """The lines of a run without a terminal, with the seconds between two events."""
    shown = io.StringIO()
    with Renderer(Console(file=shown, force_terminal=False, width=120)) as renderer:
        for event in events:
            renderer.handle(event)
            clock.now += seconds
    return shown.getvalue().splitlines()


def test_lines_have_units_and_a_counter_that_was_shown_reaches_its_end(clock: Clock) -> None:
    images = [progress("calibrating", done, 256, "images") for done in range(1, 257)]
    quick = [progress("writing ONNX", done, 8, "", "int8.onnx") for done in range(1, 9)]  # too quick to be shown
    lines = rendered(*images, *quick, clock=clock)
    assert lines == ["    export calibrating 1/256 images", "    export calibrating 256/256 images"]


def test_a_long_phase_is_shown_at_growing_intervals(clock: Clock) -> None:
    lines = rendered(*[progress("training", 26, 88, "steps", "epoch 1/2")] * 3600, clock=clock, seconds=1)
    assert set(lines) == {"    export training 26/88 steps, epoch 1/2"}
    assert 20 < len(lines) < 40


def test_a_bar_has_the_unit_too_and_a_phase_of_one_piece_no_count() -> None:
    def bar() -> str:
        plain = Console(file=io.StringIO(), width=120)
        with plain.capture() as taken:
            plain.print(renderer._progress.get_renderable())
        return taken.get()

    with Renderer(Console(file=io.StringIO(), force_terminal=True, width=120)) as renderer:
        renderer.handle(progress("calibrating", 2, 256, "images"))
        assert "calibrating 2/256 images" in bar()
        renderer.handle(progress("uploading", 0, 1, "", "25 MB"))
        assert "uploading" in bar()
        assert "0/1" not in bar()


def test_a_failed_step_is_shown_with_its_code(clock: Clock) -> None:
    event = {"event": "failed", "step": "train", "time": time.time(), "message": "no [network] x"}
    known, unknown = (" ".join(rendered({**event, **code}, clock=clock)) for code in ({"code": "no-network"}, {}))
    assert known.endswith("s  no [network] x [no-network]")
    assert unknown.endswith("s  no [network] x")


def test_a_step_without_a_parent_prints_the_same(clock: Clock, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv(EVENTS_VARIABLE, raising=False)
    log = StepLog("export")
    for done in range(256):
        log.progress("calibrating", done + 1, 256, unit="images")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["export: calibrating 1/256 images", "export: calibrating 256/256 images"]
    for _ in range(3600):  # `enginery watch` shows these lines: they stay fresh, however long a phase is
        log.progress("training", 26, 88, unit="steps")
        clock.now += 1
    assert 700 < len(capsys.readouterr().err.splitlines()) <= 720


def test_work_that_tells_nothing_shows_its_time(clock: Clock, monkeypatch, capsys) -> None:
    monkeypatch.delenv(EVENTS_VARIABLE, raising=False)
    monkeypatch.setattr(steplog, "_HEARTBEAT_INTERVAL_S", 0.01)
    shown, num_threads = "", threading.active_count()
    with StepLog("export").heartbeat("building engines", 0, 3, "fp16"):
        while "so far" not in shown:
            clock.now += 60
            shown += capsys.readouterr().err
            time.sleep(0.01)
    first, second = shown.splitlines()[:2]
    assert first == "export: building engines 0/3, fp16"
    assert re.fullmatch(r"export: building engines 0/3, fp16, for \d+ min so far", second)
    assert threading.active_count() == num_threads


def test_a_process_knows_its_age() -> None:
    load = "from components.common.process.lifetime import process_age_s"
    code = f"import time; {load}; time.sleep(0.5); print(process_age_s())"
    before = time.monotonic()
    age_s = float(run_python("-c", code).stdout)
    assert 0.5 <= age_s <= time.monotonic() - before + 0.02


def test_a_worker_that_has_ended_meanwhile_keeps_no_other_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []

    def process(name: str, *children: SimpleNamespace) -> SimpleNamespace:
        def kill() -> None:
            if name == "ended":
                raise psutil.NoSuchProcess(1)
            killed.append(name)

        return SimpleNamespace(name=lambda: name, kill=kill, children=lambda recursive=False: list(children))

    run = process("run", process("orphan", process("ended"), process("worker")))
    monkeypatch.setattr(psutil, "Process", lambda: run)
    monkeypatch.setattr(lifetime, "_TIDYING_S", 0.0)
    with subprocess.Popen(["true"]) as step:
        lifetime._clear_after(os.pidfd_open(step.pid))
    assert killed == ["worker", "orphan"]


def test_a_failed_step_says_so_in_one_line(tmp_path: Path) -> None:
    typed = ("--dataset", str(tmp_path), "--output", str(tmp_path / "output"))
    done = run_python("-m", "components.train", *typed)
    assert done.returncode == EXIT_USER_ERROR
    (line,) = done.stderr.splitlines()  # nothing of what libraries say at the end of a process
    assert line.endswith("[no-manifest]")


def test_two_steps_do_not_write_into_one_output(tmp_path: Path) -> None:
    lock_output(tmp_path / "output")
    typed = ("--report", str(tmp_path), "--output", str(tmp_path / "output"))
    done = run_python("-m", "components.gate", *typed)
    assert done.returncode == EXIT_USER_ERROR
    assert done.stderr.endswith("[output-in-use]\n")
    assert not os.listdir(tmp_path / "output")  # no note of the failure either: the other step's work is whole


class Nvml:
    """A GPU that draws POWER_W, whose energy counter is updated every STEP_S; some questions are refused."""

    NVMLError = pynvml.NVMLError
    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.asked: list[object] = []
        self.nvmlInit = lambda: self._answer("init", 0)
        self.nvmlDeviceGetHandleByUUID = lambda uuid: self._answer("handle", uuid)
        self.nvmlDeviceGetClockInfo = lambda handle, kind: self._answer("clock", 1980)
        self.nvmlDeviceGetTemperature = lambda handle, sensor: self._answer("temperature", 47)
        self.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=self._answer("utilization", 93))
        self.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=self._answer("memory", 41 << 30))

    def _answer(self, name: str, value: Any) -> Any:
        if name in self.refused:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: object) -> int:
        self.asked.append(handle)
        steps = int(time.perf_counter() / STEP_S)
        return self._answer("energy", round(steps * STEP_S * POWER_W * 1e3))


def watch(nvml: Nvml, monkeypatch: pytest.MonkeyPatch, seconds: float) -> GpuReading:
    monkeypatch.setattr(gpu_monitor, "pynvml", nvml)
    monitor = GpuMonitor("handle")
    monitor.stop()  # nothing was started
    monitor.start()
    monitor.start()  # what came before was not stopped, since its measurement failed
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


@pytest.mark.parametrize(
    ("energy", "power_w"),
    [
        # The first value was read at some time after its step, so 100 W are those of the steps at 1.0 s and 3.0 s.
        ([(0.9, 500), (1.0, 1_000), (2.0, 150_000), (3.0, 201_000)], 100),
        ([(1.0, 1_000), (2.0, 51_000)], 50),
        ([(1.0, 1_000)], None),
        # The second step was seen late and the third at once: 1,000 W, where both took 0.1 s of 350 W.
        ([(0.9, 0), (1.065, 35_000), (1.1, 70_000)], None),
        ([], None),
    ],
)
def test_power_of_known_steps(energy: list[tuple[float, int]], power_w: float | None) -> None:
    assert gpu_monitor._power_w(energy) == (None if power_w is None else pytest.approx(power_w))


def test_a_reading_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_monitor.time, "perf_counter", lambda: 20.0)
    monitor = GpuMonitor("handle", interval_s=0.1)  # two states a second
    monitor._span.energy = [(s, 100_000 * s + 200_000 * max(0, s - 14)) for s in range(20)]  # 100 W, then 300
    for values in monitor._span.state.values():
        values += [10] * 30 + [50] * 10
    assert (monitor.reading(5.0).power_w, monitor.reading(5.0).utilization_pct) == (300, 50)
    assert monitor.reading().utilization_pct == 20
    assert monitor.reading().power_w == pytest.approx(155.6, abs=0.1)


def test_what_nvml_refuses_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = ("energy", "clock", "temperature", "utilization", "memory")
    assert watch(Nvml(*refused), monkeypatch, 0.1) == GpuReading()
    assert watch(Nvml("energy"), monkeypatch, 0.1).sm_clock_mhz == 1980


def test_a_gpu_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_monitor, "pynvml", nvml := Nvml())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="12-34"))
    monitor = monitor_of(torch.device("cuda", 0))
    monitor.start()
    monitor.stop()
    assert set(nvml.asked) == {"GPU-12-34"}
    for refused in ("init", "handle"):
        monkeypatch.setattr(gpu_monitor, "pynvml", Nvml(refused))
        assert monitor_of(torch.device("cuda", 0)) is None
