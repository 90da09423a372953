"""A KFP server, `enginery submit` and the beginning of `enginery run` in this process."""

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
from tests.pipelines.kfp_api import Cluster
from tests.pipelines.submission import REPOSITORY, Done, Submit, load_once
from tests.serving import serving

OpenRecord = Callable[..., RunRecord]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with serving(Cluster()) as state:
        yield state


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Submit:
    """`submit(endpoint, *options, name, **environment)` in this process."""
    from kfp.client import Client

    from enginery.cli.main import main

    monkeypatch.setattr("enginery.cli.submit.load_pipeline", load_once)
    monkeypatch.setattr(Client, "_LOCAL_KFP_CONTEXT", str(tmp_path / "no-context.json"))
    for variable in ("KF_PIPELINES_ENDPOINT", "KFP_COOKIE", "KF_PIPELINES_SA_TOKEN_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))

    def submitted(endpoint: str, *options: str, name: str = "resnet50", watch: str = "", **variables: str) -> Done:
        command = ["watch", watch] if watch else ["submit", str(REPOSITORY / f"pipelines/{name}.py")]
        with monkeypatch.context() as patch:
            for variable, value in variables.items():
                patch.setenv(variable, value)
            before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            with pytest.raises(SystemExit) as left:
                main([*command, "--endpoint", endpoint, *options])
            for number, handler in before.items():
                signal.signal(number, handler)  # the tests go on in this process
        captured = capsys.readouterr()
        return Done(int(left.value.code or 0), captured.out, captured.err)

    return submitted


@pytest.fixture
def open_record(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenRecord]:
    """`open_record(home, uri)`: what a run does before its first step, up to its entry in MLflow."""
    pipeline: Any = SimpleNamespace(name="resnet50")

    def opened(home: Path, uri: str = "") -> RunRecord:
        monkeypatch.setenv("ENGINERY_HOME", str(home))
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        file = PipelineFile(path=REPOSITORY / "pipelines/resnet50.py", pipeline=pipeline)
        record = RunRecord.open(StateDirectory.current(), file, {}, file.name, Console(width=200))
        wait([record.opening])  # MLflow notes the store in the environment, which is the next test's
        return record

    yield opened
    mlflow.set_tracking_uri(None)
