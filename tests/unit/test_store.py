"""The tracking store's address, a SQLite store that is made whole or not at all, and a database that is not there."""

import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import mlflow
import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE

from components.common.contracts.errors import EngineryError
from components.common.registry.model_registry import Registry, patiently
from components.common.registry.store import (
    beside_database,
    database_is_gone,
    prepare_sqlite,
    without_credentials,
    without_folders,
)
from components.common.registry.tracking import is_unreachable, step_run


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://mlflow:5000", "http://mlflow:5000"),
        ("http://user:secret@mlflow:5000/a", "http://***@mlflow:5000/a"),
        ("postgresql+psycopg2://user:s@cret@db/mlflow?x=1", "postgresql+psycopg2://***@db/mlflow?***"),
        ("postgresql://db/mlflow?user=u&password=secret", "postgresql://db/mlflow?***"),
        ("https://mlflow:5000/?token=secret", "https://mlflow:5000/?***"),
        ("http://user:se/c#r?t@mlflow", "http://***@mlflow"),  # not quoted as it should be
        ("sqlite:////home/me@work/mlflow.db", "sqlite:////home/me@work/mlflow.db"),
        ("databricks", "databricks"),
    ],
)
def test_what_is_shown_of_an_address(uri: str, shown: str) -> None:
    assert without_credentials(uri) == shown
    assert without_credentials(shown) == shown


def test_what_leaves_the_machine_names_no_folder() -> None:
    assert without_folders("sqlite:////home/me/mlflow.db?timeout=3") == "sqlite:///mlflow.db"
    assert without_folders("http://mlflow:5000") == "http://mlflow:5000"


def test_files_go_beside_a_database_and_wherever_a_server_says(tmp_path: Path) -> None:
    assert beside_database(f"sqlite:///{tmp_path}/mlflow.db") == (tmp_path / "mlartifacts").as_uri()
    assert beside_database("http://mlflow:5000") is None


def test_a_store_that_could_not_be_made_leaves_nothing_in_its_place(tmp_path: Path) -> None:
    file = tmp_path / "new/mlflow.db"

    def fails(uri: str) -> None:
        with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as connection:
            connection.execute("CREATE TABLE half (a)")
        raise OSError("killed")

    def makes(uri: str) -> None:
        with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as connection:
            connection.execute("CREATE TABLE whole (a)")

    with pytest.raises(OSError, match="killed"):
        prepare_sqlite(f"sqlite:///{file}", fails)
    assert not file.exists()
    prepare_sqlite(f"sqlite:///{file}", makes)
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("whole",)]
    prepare_sqlite(f"sqlite:///{file}", fails)  # there already: nothing to make
    assert [path.name for path in file.parent.iterdir()] == ["mlflow.db"]


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("text " * 1000)
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        prepare_sqlite(f"sqlite:///{tmp_path / 'mlflow.db'}", lambda _: None)


@pytest.fixture
def _tracking() -> Iterator[None]:
    """What a command sets goes back."""
    yield
    mlflow.set_tracking_uri(None)  # what was there before would stay in the environment of every process from now on


def nothing_there() -> str:
    """A PostgreSQL URI that leads nowhere."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        return f"postgresql://me:secret@127.0.0.1:{taken.getsockname()[1]}/mlflow"


@pytest.mark.usefixtures("_tracking")
def test_a_database_that_is_not_there_is_told_soon_in_one_line() -> None:
    uri = nothing_there()
    with pytest.raises(EngineryError, match=r"Connection refused\. Start the server") as told:
        Registry.open(uri)
    with pytest.raises(EngineryError, match=r"Connection refused\. Start the server"), step_run("promote"):
        pass
    assert "\n" not in str(told.value)
    assert "sqlalche" not in str(told.value)
    assert "secret" not in str(told.value)


@pytest.mark.usefixtures("_tracking")
def test_a_database_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.common.registry.store._CONNECT_S", 2)
    with closing(socket.create_server(("127.0.0.1", 0))) as deaf:
        uri = f"postgresql://127.0.0.1:{deaf.getsockname()[1]}/mlflow"
        with pytest.raises(EngineryError, match=r"can't be used: connection .*Start the server") as told:
            Registry.open(uri)
    assert "\n" not in str(told.value)


@pytest.mark.usefixtures("_tracking")
def test_a_driver_that_is_not_there() -> None:
    with pytest.raises(EngineryError, match=r"No module named 'psycopg2'\. Install the driver"):
        Registry.open("postgresql+psycopg2://127.0.0.1/mlflow")


def test_a_database_that_went_away_is_no_busy_one() -> None:
    gone = "(psycopg.OperationalError) connection failed: Connection refused\n(Background on this error at: x)"
    busy = "(psycopg.errors.DeadlockDetected) deadlock detected"
    assert is_unreachable(MlflowException(gone))
    assert not is_unreachable(MlflowException(busy))
    assert not database_is_gone(MlflowException("(sqlite3.OperationalError) database is locked"))
    calls = []

    def fail() -> None:
        calls.append(1)
        raise MlflowException(gone, error_code=TEMPORARILY_UNAVAILABLE)

    with pytest.raises(MlflowException):
        patiently(fail)
    assert len(calls) == 1


def test_files_go_through_the_tracking_server_unless_asked() -> None:
    names = [f"MLFLOW_ENABLE_PROXY_MULTIPART_{way}" for way in ("UPLOAD", "DOWNLOAD")]
    code = "import importlib, os; from components.common.registry import store; "
    code += "from mlflow import environment_variables as e; "
    code += f"print([getattr(e, name).get() for name in {names}]); os.environ.update(dict.fromkeys({names}, 'true')); "
    code += f"importlib.reload(store); print([getattr(e, name).get() for name in {names}])"
    environment = {name: value for name, value in os.environ.items() if name not in names}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines() == [str([False] * 2), str([True] * 2)]
