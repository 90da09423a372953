"""How a run's progress reads where the output is no terminal, and on one."""

import io

import pytest
from rich.console import Console

from components.common.process import steplog
from components.common.process.steplog import EVENTS_VARIABLE, StepLog
from enginery.local.rendering import Renderer


class Clock:
    """Seconds that pass when a test says so."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(steplog, "time", clock := Clock())
    return clock


def progress(phase: str, done: int, total: int, unit: str = "", detail: str = "") -> dict[str, object]:
    return {
        "event": "progress",
        "step": "export",
        "phase": phase,
        "done": done,
        "total": total,
        "unit": unit,
        "detail": detail,
    }


def test_lines_have_units_and_a_counter_that_was_shown_reaches_its_end(clock: Clock) -> None:
    shown = io.StringIO()
    with Renderer(Console(file=shown, force_terminal=False, width=120)) as renderer:
        for done in range(1, 257):
            renderer.handle(progress("calibrating", done, 256, "images"))
        for done in range(1, 9):  # too quick to be shown
            renderer.handle(progress("writing ONNX", done, 8, "", "int8.onnx"))
    assert shown.getvalue().split("\n") == [
        "    export calibrating 1/256 images",
        "    export calibrating 256/256 images",
        "",
    ]


def test_a_phase_that_takes_long_is_told_at_growing_intervals(clock: Clock) -> None:
    shown = io.StringIO()
    with Renderer(Console(file=shown, force_terminal=False, width=120)) as renderer:
        for _ in range(3600):
            renderer.handle(progress("training", 26, 88, "steps", "epoch 1/2"))
            clock.now += 1
    lines = shown.getvalue().splitlines()
    assert set(lines) == {"    export training 26/88 steps, epoch 1/2"}
    assert 20 < len(lines) < 40


def test_a_bar_has_the_unit_too_and_a_phase_of_one_piece_no_count(clock: Clock) -> None:
    shown = io.StringIO()
    renderer = Renderer(Console(file=shown, force_terminal=True, width=120))
    with renderer:
        renderer.handle(progress("calibrating", 2, 256, "images"))
        assert "calibrating 2/256 images" in _bar(renderer)
        renderer.handle(progress("uploading", 0, 1, "", "25 MB"))
        assert "uploading" in _bar(renderer)
        assert "0/1" not in _bar(renderer)


def _bar(renderer: Renderer) -> str:
    plain = Console(file=io.StringIO(), width=120)
    with plain.capture() as taken:
        plain.print(renderer._progress.get_renderable())
    return taken.get()


def test_a_step_without_a_parent_says_the_same(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(EVENTS_VARIABLE, raising=False)
    log = StepLog("export")
    for done in range(256):
        log.progress("calibrating", done + 1, 256, unit="images")
    assert capsys.readouterr().err.splitlines() == [
        "export: calibrating 1/256 images",
        "export: calibrating 256/256 images",
    ]
