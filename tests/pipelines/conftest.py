"""The beginning of `enginery run` in this process."""

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlflow
import pytest
from rich.console import Console

from enginery.local.parameters import PipelineFile
from enginery.local.record import RunRecord
from enginery.local.state import StateDirectory
from tests.pipelines.running import ROOT, STARTED

OpenRecord = Callable[..., RunRecord]


@pytest.fixture(autouse=True)
def _nothing_left_running() -> Iterator[None]:
    """A test that failed would else disturb the next ones."""
    yield
    while STARTED:
        if (process := STARTED.pop()).poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.fixture
def open_record(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenRecord]:
    """`open_record(home, uri)`: what a run does before its first step, up to its entry in MLflow."""
    pipeline: Any = SimpleNamespace(name="resnet50")

    def opened(home: Path, uri: str = "") -> RunRecord:
        monkeypatch.setenv("ENGINERY_HOME", str(home))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        file = PipelineFile(path=ROOT / "pipelines/resnet50.py", pipeline=pipeline)
        record = RunRecord.open(StateDirectory.current(), file, {}, file.name, Console(width=200))
        wait([record.opening])  # MLflow notes the store in the environment, which is the next test's
        return record

    yield opened
    mlflow.set_tracking_uri(None)
