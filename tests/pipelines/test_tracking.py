"""An MLflow server that hangs, is slow, or dies in the middle of a run."""

import json
import os
import re
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient

from enginery.local import record
from enginery.local.state import StateDirectory
from tests.unit.refusals import refuses
from tests.waiting import wait_until

from .conftest import OpenRecord
from .running import MESSAGE, finish, start
from .servers import door, free_port, server, stop


def test_a_server_that_does_not_answer_or_is_not_there(
    tmp_path: Path, open_record: OpenRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setattr(record, "_PATIENCE_S", 0.1)
    file = tmp_path / "store.db"
    file.write_text("something else, and more of it than a header has")
    with closing(socket.create_server(("127.0.0.1", 0))) as deaf:
        silent = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        for uri, said in (
            (silent, f"MLflow at {silent} can't be used: it did not answer within 1 s (MLFLOW_HTTP_REQUEST_TIMEOUT)"),
            ("http://user:secret@127.0.0.1:9", "MLflow at http://***@127.0.0.1:9 can't be used"),
            (f"sqlite:///{file}", f"MLflow at sqlite:///{file} can't be used: file is not a database"),
        ):
            with refuses("store-unusable", "MLFLOW_TRACKING_URI") as caught:
                open_record(tmp_path / "home", uri)
            assert said in str(caught.value)
            assert "secret" not in str(caught.value)
    assert f"waiting for MLflow at {silent}" in capsys.readouterr().out
    assert not list((tmp_path / "home/runs").iterdir())


def test_an_interrupt_while_waiting_for_a_server(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as deaf:
        uri = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        process = start(tmp_path / "home", tmp_path / "leaking", MLFLOW_TRACKING_URI=uri)
        assert "waiting for MLflow" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        text = finish(process)
    assert process.returncode == 130
    assert "interrupted before the first step" in text
    assert list((tmp_path / "home/runs").iterdir()) == []


def test_two_first_runs_make_one_store(tmp_path: Path, open_record: OpenRecord) -> None:
    """At once, on a state directory that does not exist yet, beside what a process left that was killed at it."""
    home = tmp_path / "home"
    home.mkdir()
    (home / ".mlflow.db.new").write_bytes(b"cut short")
    with ThreadPoolExecutor(2) as both:
        records = list(both.map(lambda _: open_record(home), range(2)))
    opened = {record.tracked.run_id for record in records}
    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    (experiment,) = [entry for entry in client.search_experiments() if entry.name == "resnet50"]
    runs = client.search_runs([experiment.experiment_id])
    assert {run.info.run_id for run in runs} == opened
    assert len(runs) == 2
    assert not list(home.glob(".mlflow.db.new*"))


def test_runs_are_closed_where_they_are_tracked(tmp_path: Path, open_record: OpenRecord, empty_store: Path) -> None:
    """A run killed under another tracking URI stays noted until that one is used again."""
    home = tmp_path / "home"
    elsewhere, here = (f"sqlite:///{shutil.copy(empty_store, tmp_path / name)}" for name in ("elsewhere.db", "here.db"))
    killed = open_record(home, elsewhere)
    os.close(killed.held.lock)  # as the kernel does for a process that is killed

    def status() -> str:
        return str(MlflowClient(elsewhere).get_run(killed.tracked.run_id).info.status)

    open_record(home, here)
    assert status() == "RUNNING"
    open_record(home, elsewhere).worker.shutdown()
    assert status() == "KILLED"
    assert not list(StateDirectory.current().abandoned_runs())


@pytest.mark.slow
def test_a_slow_server_is_waited_for(tmp_path: Path) -> None:
    port = free_port()
    with server(tmp_path, port), door(port, lambda number: None, lambda: time.sleep(3.0)) as slow:
        uri = f"http://127.0.0.1:{slow}"
        process = start(tmp_path / "home", tmp_path / "leaking", MLFLOW_TRACKING_URI=uri)
        text = finish(process)
        assert process.returncode == 2, text
        assert f"waiting for MLflow at {uri}" in text
        assert MESSAGE in text
        client = MlflowClient(f"http://127.0.0.1:{port}")
        experiment = client.get_experiment_by_name("resnet50")
        runs = client.search_runs([experiment.experiment_id])
        assert [run.info.status for run in runs] == ["FAILED", "FAILED"]


@pytest.mark.slow
def test_a_server_that_dies_in_the_middle(tmp_path: Path, few_digits: Path) -> None:
    """The steps do their work, only the registration fails; with the server back, the next run does what is missing."""
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    home = tmp_path / "home"
    with server(tmp_path, port) as process:
        run = start(home, few_digits, MLFLOW_TRACKING_URI=uri)
        client = MlflowClient(uri)

        def trains() -> bool:
            experiment = client.get_experiment_by_name("resnet50")
            runs = client.search_runs([experiment.experiment_id]) if experiment else []
            return any(found.info.run_name == "train" for found in runs)

        wait_until(trains)
        stop(process)
        text = finish(run)
    assert run.returncode == 1, text
    for step in ("preprocess", "train", "export", "validate", "gate"):
        assert re.search(rf"^ *{step} done ", text, re.MULTILINE), text
    assert f"train warning: MLflow at {uri} can't be reached any more: the step continues" in text
    assert re.search(rf"promote failed .*mobilenet_v3_small is not registered: MLflow at {uri} can't be reached", text)
    (directory,) = home.glob("runs/*")
    assert json.loads((directory / "summary.json").read_text())["status"] == "failed"

    with server(tmp_path, port):
        again = start(home, few_digits, MLFLOW_TRACKING_URI=uri)
        text = finish(again)
        assert again.returncode == 0, text
        assert text.count(" reused ") == 5
        client = MlflowClient(uri)
        experiment = client.get_experiment_by_name("resnet50")
        statuses = {entry.info.run_name: entry.info.status for entry in client.search_runs([experiment.experiment_id])}
    assert statuses[directory.name] == "FAILED"
    assert "RUNNING" not in statuses.values()
