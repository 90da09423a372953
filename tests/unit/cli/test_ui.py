"""`enginery ui`: what is refused before MLflow starts, and what MLflow is started with."""

import os
import socket

import pytest

from tests.pipelines.servers import free_port
from tests.unit.registered import enginery, refuses


def test_a_port_or_address_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("MLflow is started"))
    assert enginery("ui", "--port", "70000").exit_code == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for options in (["--port", str(taken.getsockname()[1])], ["--host", "no.such.host.invalid"], ["--host", ""]):
            with refuses("cannot-listen"):
                enginery("ui", *options)


def test_a_password_is_on_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_BACKEND_STORE_URI", "")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri := "postgresql://user:secret@host/mlflow")
    started: list[str] = []
    monkeypatch.setattr(os, "execv", lambda _, command: started.extend(command))
    assert "secret" not in enginery("ui", "--port", str(free_port())).output
    assert ("ui" in started, "secret" in " ".join(started)) == (True, False)
    assert os.environ["MLFLOW_BACKEND_STORE_URI"] == uri
