"""An MLflow server that hangs, is slow, or dies in the middle of a run."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient

from components.common.tracking import PipelineRun
from pipelines.state import StateDirectory

from .leaking import MESSAGE, write_leaking
from .servers import door, free_port, server, stop

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ["--architecture", "mobilenet_v3_small", "--image-size", "32", "--epochs", "1", "--global-batch-size", "32"]
SETTINGS += [
    "--num-calibration-images",
    "16",
    "--max-top1-drop-points",
    "100",
    "--set",
    "gate.min_relative_top1_pct=0",
    "--set",
    "gate.require_above_chance=false",
]
SETTINGS += ["--set", "validate.benchmark_seconds=0.1", "--set", "train.warmup_fraction=0"]
SETTINGS += ["--set", "gate.min_validation_images=0"]


def start(home: Path, data: Path, uri: str, **variables: str) -> subprocess.Popen[str]:
    if not data.exists():
        write_leaking(data)  # ends the run in its first step
    command = [sys.executable, "-m", "pipelines.cli", "run", "pipelines/resnet50.py", "--data", str(data), *SETTINGS]
    environment = {**os.environ, "ENGINERY_HOME": str(home), "COLUMNS": "200", **variables}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**environment, "MLFLOW_TRACKING_URI": uri},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 600) -> str:
    text = process.communicate(timeout=seconds)[0]
    assert "Traceback" not in text
    return text


def test_a_server_that_never_answers(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as deaf:
        uri = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        process = start(tmp_path / "home", tmp_path / "leaking", uri, MLFLOW_HTTP_REQUEST_TIMEOUT="4")
        text = finish(process)
    assert process.returncode == 1
    assert f"waiting for MLflow at {uri}" in text
    assert f"MLflow at {uri} can't be used: it did not answer within 4 s (MLFLOW_HTTP_REQUEST_TIMEOUT)" in text
    assert "unset MLFLOW_TRACKING_URI" in text
    assert not list((tmp_path / "home/runs").iterdir())


def test_an_interrupt_while_waiting_for_a_server(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as deaf:
        process = start(tmp_path / "home", tmp_path / "leaking", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        assert process.stdout is not None
        assert "waiting for MLflow" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        text = finish(process)
    assert process.returncode == 130
    assert "interrupted before the first step" in text


def test_a_store_that_is_no_database(tmp_path: Path) -> None:
    file = tmp_path / "store.db"
    file.write_text("something else, and more of it than a header has")
    process = start(tmp_path / "home", tmp_path / "leaking", f"sqlite:///{file}")
    text = finish(process)
    assert process.returncode == 1
    assert f"MLflow at sqlite:///{file} can't be used: file is not a database" in text


@pytest.mark.slow  # test_two_first_runs_at_once makes a store twice at once
def test_a_store_whose_making_was_cut_short(tmp_path: Path) -> None:
    """A run killed while it makes the database leaves nothing that the next one stumbles over."""
    home = tmp_path / "home"
    for _ in range(40):
        process = start(home, tmp_path / "leaking", "")
        while process.poll() is None and not list(home.glob(".mlflow.db.new*")):
            time.sleep(0.002)
        process.kill()
        process.wait()
        if list(home.glob(".mlflow.db.new*")):
            break
    assert not (home / "mlflow.db").exists()
    process = start(home, tmp_path / "leaking", "")
    assert MESSAGE in finish(process)
    assert process.returncode == 2
    assert not list(home.glob(".mlflow.db.new*"))


def test_runs_are_closed_where_they_are_tracked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run killed under another tracking URI stays noted until that one is used again."""
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    home, leaking = tmp_path / "home", tmp_path / "leaking"
    elsewhere, here = f"sqlite:///{tmp_path / 'elsewhere.db'}", f"sqlite:///{tmp_path / 'here.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", elsewhere)
    state = StateDirectory.current()
    held = state.new_run("resnet50")
    PipelineRun(elsewhere, "e", held.path.name, source="x", params={}, place=home)
    os.close(held.lock)  # as the kernel does for a process that is killed

    def status() -> str:
        client = MlflowClient(elsewhere)
        experiments = [entry.experiment_id for entry in client.search_experiments()]
        (run,) = client.search_runs(experiments, f"tags.`enginery.run` = '{held.path.name}'")
        return str(run.info.status)

    finish(start(home, leaking, here))
    assert status() == "RUNNING"
    assert [run.name for run in state.abandoned_runs()] == [held.path.name]
    finish(start(home, leaking, elsewhere))
    assert status() == "KILLED"
    assert not list(state.abandoned_runs())


@pytest.mark.slow
def test_a_slow_server_is_waited_for(tmp_path: Path) -> None:
    port = free_port()
    # Less than the 5 s after which uvicorn closes an idle connection, which the client could then meet.
    with server(tmp_path, port), door(port, lambda number: None, lambda: time.sleep(3.0)) as slow:
        uri = f"http://127.0.0.1:{slow}"
        process = start(tmp_path / "home", tmp_path / "leaking", uri)
        text = finish(process)
        assert process.returncode == 2, text
        assert f"waiting for MLflow at {uri}" in text
        assert MESSAGE in text
        client = MlflowClient(f"http://127.0.0.1:{port}")
        experiment = client.get_experiment_by_name("resnet50")
        assert experiment is not None
        runs = client.search_runs([experiment.experiment_id])
        assert [run.info.status for run in runs] == ["FAILED", "FAILED"]


@pytest.mark.slow
def test_a_server_that_dies_in_the_middle(tmp_path: Path, few_digits: Path) -> None:
    """The steps do their work, only the registration fails; with the server back, the next run does what is missing."""
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    home = tmp_path / "home"
    with server(tmp_path, port) as process:
        run = start(home, few_digits, uri)
        client = MlflowClient(uri)
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            experiment = client.get_experiment_by_name("resnet50")
            if experiment and any(r.info.run_name == "train" for r in client.search_runs([experiment.experiment_id])):
                break
            time.sleep(0.05)
        stop(process)
        text = finish(run)
    assert run.returncode == 1, text
    for step in ("preprocess", "train", "export", "validate", "gate"):
        assert re.search(rf"^ *{step} done ", text, re.MULTILINE), text
    assert f"train warning: MLflow at {uri} can't be reached any more: the step goes on" in text
    assert re.search(r"promote failed .*resnet50 is not registered: MLflow at .* can't be reached any more", text)
    (directory,) = home.glob("runs/*")
    assert json.loads((directory / "summary.json").read_text())["status"] == "failed"

    with server(tmp_path, port):
        again = start(home, few_digits, uri)
        text = finish(again)
        assert again.returncode == 0, text
        assert text.count(" reused ") == 5
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name("resnet50")
        assert experiment is not None
        statuses = {entry.info.run_name: entry.info.status for entry in client.search_runs([experiment.experiment_id])}
    assert statuses[directory.name] == "FAILED"
    assert "RUNNING" not in statuses.values()
