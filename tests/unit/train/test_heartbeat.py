"""A training that nobody waits for any more saves and stops."""

import time
from pathlib import Path

import pytest

from components.common.process.steplog import StepLog
from components.train.distributed import StopRequest
from components.train.nodes import VARIABLE, beating, stop_when_silent


def test_silence_stops_and_a_beat_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "heartbeat"
    monkeypatch.setenv(VARIABLE, str(file))
    with StopRequest() as stop:
        stop.has_work = True
        with beating(file, every_s=0.05):
            stop_when_silent(StepLog("train"), silence_s=2.0)
            time.sleep(3.0)
            assert not stop.requested
        ended = time.monotonic()
        while not stop.requested:
            assert time.monotonic() - ended < 60
            time.sleep(0.02)
        assert time.monotonic() - ended > 1.5
    assert f"nobody waits for this training any more: {file} was not touched" in capsys.readouterr().err


def test_a_file_that_is_gone_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "removed/heartbeat"))
    with StopRequest() as stop:
        stop.has_work = True
        stop_when_silent(StepLog("train"), silence_s=0.1)
        deadline = time.monotonic() + 600
        while not stop.requested:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_without_a_file_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with StopRequest() as stop:
        stop.has_work = True
        stop_when_silent(StepLog("train"), silence_s=0.05)
        time.sleep(0.5)
        assert not stop.requested
