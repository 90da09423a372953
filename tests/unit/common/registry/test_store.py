"""The tracking store's address, a SQLite store that is made whole or not at all, and a database that is not there."""

import runpy
import socket
import sqlite3
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import pytest
from google.protobuf.json_format import ParseError
from mlflow import MlflowClient
from mlflow.entities import DatasetInput
from mlflow.environment_variables import MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD, MLFLOW_ENABLE_PROXY_MULTIPART_UPLOAD
from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE

from components.common.contracts.errors import EngineryError
from components.common.registry import model_registry, store
from components.common.registry.model_registry import RegisteredVersion, Registry, patiently
from components.common.registry.store import (
    beside_database,
    database_is_gone,
    prepare_sqlite,
    without_credentials,
    without_folders,
)
from components.common.registry.tracking import StepRun, check_credentials, is_unreachable, step_run
from enginery.release.fetch import fetch
from tests.serving import Served, serving
from tests.unit.registered import refuses
from tests.waiting import wait_until


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


def test_files_go_beside_a_database_whose_folder_is_not_told(tmp_path: Path) -> None:
    assert beside_database(f"sqlite:///{tmp_path}/mlflow.db") == (tmp_path / "mlartifacts").as_uri()
    assert beside_database("http://mlflow:5000") is None
    assert without_folders("sqlite:////home/me/mlflow.db?timeout=3") == "sqlite:///mlflow.db"
    assert without_folders("http://mlflow:5000") == "http://mlflow:5000"


def test_a_store_that_could_not_be_made_leaves_nothing_in_its_place(tmp_path: Path) -> None:
    file = tmp_path / "new/mlflow.db"
    uri = f"sqlite:///{file}"

    def makes(uri: str, table: str = "whole") -> None:
        with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as connection:
            connection.execute(f"CREATE TABLE {table} (a)")

    def fails(uri: str) -> None:
        makes(uri, "half")
        raise OSError("killed")

    with pytest.raises(OSError, match="killed"):
        prepare_sqlite(uri, fails)
    assert not file.exists()
    prepare_sqlite(uri, makes)
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("whole",)]
    prepare_sqlite(uri, fails)  # there already: nothing to make
    assert [path.name for path in file.parent.iterdir()] == ["mlflow.db"]
    file.write_text("text " * 1000)
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        prepare_sqlite(uri, makes)


def test_a_database_that_is_not_there_is_reported_soon_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.common.registry.store._CONNECT_S", 2)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        gone = f"postgresql://me:secret@127.0.0.1:{taken.getsockname()[1]}/mlflow"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", gone)
    with refuses("store-unusable"), step_run("promote"):
        pass
    said = []
    with closing(socket.create_server(("127.0.0.1", 0))) as deaf:
        for uri in (gone, f"postgresql://127.0.0.1:{deaf.getsockname()[1]}/mlflow", "postgresql+psycopg2://x/mlflow"):
            with refuses("store-unusable", "MLFLOW_TRACKING_URI") as caught:
                Registry.open(uri)
            said.append(str(caught.value))
    assert not any(word in text for text in said for word in ("\n", "sqlalche", "secret"))
    assert "Connection refused. Start the server" in said[0]
    assert "No module named 'psycopg2'. Install the driver" in said[2]


def test_a_database_that_went_away_is_no_busy_one() -> None:
    gone = "(psycopg.OperationalError) connection failed: Connection refused\n(Background on this error at: x)"
    busy = "(psycopg.errors.DeadlockDetected) deadlock detected"
    assert is_unreachable(MlflowException(gone))
    assert is_unreachable(ParseError("repeated field registered_models must be in [] which is x"))  # no MLflow's answer
    assert not is_unreachable(MlflowException(busy))
    assert not database_is_gone(MlflowException("(sqlite3.OperationalError) database is locked"))
    errors = iter([busy, busy, gone])

    def fail() -> None:
        raise MlflowException(next(errors), error_code=TEMPORARILY_UNAVAILABLE)

    with pytest.raises(MlflowException, match="connection failed"):
        patiently(fail)


class TrackingServer(Served):
    """It names where a version's files are, and says of them what `listing` and `file` are."""

    root = "mlflow-artifacts:/m"
    listing: tuple[Any, ...] = (200, {"files": [{"path": "verdict.dsse.json", "is_dir": False, "file_size": 5}]})
    file: tuple[Any, ...] = (200, b"{}")
    run: Mapping[str, Any] = {}

    def answer(self, method: str, path: str, body: Any) -> tuple[Any, ...]:
        if path.endswith("/get-download-uri"):
            return 200, {"artifact_uri": self.root}
        if path.endswith("/experiments/get-by-name"):
            return 200, {"experiment": {"experiment_id": "1", "lifecycle_stage": "active"}}
        if path.endswith("/experiments/get"):
            return 200, {"experiment": {"experiment_id": "1", "artifact_location": self.run["info"]["artifact_uri"]}}
        if path.endswith(("/runs/get", "/runs/create")):
            return 200, {"run": self.run}
        if path.endswith("/artifacts"):
            return self.listing
        return self.file if "/mlflow-artifacts/artifacts/" in path else (200, {})


VERSION = RegisteredVersion(name="m", number="1", aliases=(), created=0, run_id="", source="")


@pytest.fixture
def tracking(monkeypatch: pytest.MonkeyPatch) -> Iterator[TrackingServer]:
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "of-the-tracking-server")
    with serving(TrackingServer()) as state:
        yield state


def registry_of(state: TrackingServer) -> Registry:
    return Registry(MlflowClient(tracking_uri=state.endpoint, registry_uri=state.endpoint))


@pytest.mark.parametrize("redirects", ["listing", "file"])
def test_a_redirect_of_a_download_does_not_get_the_token(tracking: TrackingServer, redirects: str) -> None:
    with serving(TrackingServer()) as thief:
        setattr(tracking, redirects, (307, {}, {"Location": f"{thief.endpoint}/elsewhere"}))
        registry = registry_of(tracking)
        with suppress(EngineryError, MlflowException):
            registry.statements(VERSION)
        with suppress(EngineryError, MlflowException), registry.files(VERSION, "bundle", "manifest.json"):
            pass
        assert any("/mlflow-artifacts/artifacts" in path for _, path, _ in tracking.requests)
        assert thief.requests == []


@pytest.mark.parametrize(
    "root",
    [
        "{thief}/m",
        "mlflow-artifacts://{thief_host}/m",
        "{thief}\\@{host}/m",  # as requests reads it, of the first host; as urllib does, of the second
        "runs:/r/m",
        "ftp://{thief_host}/m",
        "sftp://{host}/m",
        "hdfs://{host}/m",  # which may be the server's own store, and may be anybody's
    ],
)
def test_another_server_that_a_version_names_is_not_asked(tracking: TrackingServer, root: str) -> None:
    with serving(TrackingServer()) as thief:
        hosts = {name: of.endpoint.removeprefix("http://") for name, of in (("host", tracking), ("thief_host", thief))}
        tracking.root = root.format(thief=thief.endpoint, **hosts)
        tracking.run = {"info": {"run_id": "r", "artifact_uri": thief.endpoint}}
        registry = registry_of(tracking)
        with refuses("other-server", "MLFLOW_TRACKING_URI", says="--serve-artifacts"):
            registry.statements(VERSION)
        with refuses("other-server", "MLFLOW_TRACKING_URI"), registry.files(VERSION, "bundle", "manifest.json"):
            pass
        with refuses("other-server", "MLFLOW_TRACKING_URI"):
            registry.add_statement(VERSION, "approval-prod.dsse.json", b"{}")
        assert thief.requests == []
    tracking.root = f"{tracking.endpoint}/api/2.0/mlflow-artifacts/artifacts/m"
    assert list(registry.statements(VERSION)) == ["verdict.dsse.json"]
    assert tracking.tokens == {"Bearer of-the-tracking-server"}


@pytest.mark.parametrize("adopted", [False, True])
def test_steps_upload_nothing_to_another_server_that_their_experiment_names(
    tracking: TrackingServer, monkeypatch: pytest.MonkeyPatch, adopted: bool
) -> None:
    """Whoever makes the experiment first chooses where its runs upload to."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.endpoint)
    monkeypatch.setattr(mlflow, "get_tracking_uri", lambda: tracking.endpoint)
    if adopted:
        monkeypatch.setenv("MLFLOW_RUN_ID", "r")
    with serving(TrackingServer()) as thief:
        tracking.run = {"info": {"run_id": "r", "artifact_uri": f"{thief.endpoint}/r"}}
        with refuses("other-server", "MLFLOW_TRACKING_URI"), step_run("validate") as run:
            run.log_artifact(Path(__file__))
        assert thief.requests == []
        assert not any(path.endswith("/runs/create") for _, path, _ in tracking.requests)
        monkeypatch.setenv("ENGINERY_ARTIFACT_SERVER", thief.endpoint.removeprefix("http://"))
        check_credentials(f"{thief.endpoint}/r")


def test_statements_are_written_to_a_version_and_not_to_its_run(tracking: TrackingServer) -> None:
    with serving(TrackingServer()) as thief:
        tracking.run = {"info": {"run_id": "r", "artifact_uri": thief.endpoint}}
        registry_of(tracking).add_statement(replace(VERSION, run_id="r"), "approval-prod.dsse.json", b"{}")
        assert thief.requests == []
    method, path, body = tracking.requests[-1]
    assert (method, path.rpartition("/artifacts/")[2], body) == ("PUT", "m/approval-prod.dsse.json", {})


@pytest.mark.parametrize("file", ["", "manifest.json"])
@pytest.mark.parametrize(
    "entry",
    [
        {"path": "manifest.json", "is_dir": False, "file_size": 1 << 60},
        {"path": "manifest.json", "is_dir": True},  # which holds one of its kind, and so on
    ],
)
def test_endless_files_are_not_brought(tracking: TrackingServer, monkeypatch, entry: dict[str, Any], file: str) -> None:
    monkeypatch.setattr(model_registry, "_MAX_ENTRIES", 20)
    registry = registry_of(tracking)
    tracking.listing = (200, {"files": [entry]})
    with refuses("no-space"), registry.files(VERSION, "bundle", file):
        pass
    tracking.listing = (200, {"files": [{"path": "verdict.dsse.json", "is_dir": False, "file_size": 1 << 60}]})
    with refuses("statements-too-large"):
        registry.statements(VERSION)
    tracking.listing = (200, {"files": [{"path": "verdict.dsse.json", "is_dir": True}]})
    assert registry.statements(VERSION) == {}
    assert not any("/mlflow-artifacts/artifacts/" in path for _, path, _ in tracking.requests)


@pytest.mark.parametrize(
    ("name", "value"),
    [("root", "http://[/m"), ("root", "nothing-knows:/m"), ("listing", (200, b"<html>log in</html>"))],
)
def test_files_that_can_not_be_read(tracking: TrackingServer, name: str, value: Any) -> None:
    setattr(tracking, name, value)
    with refuses("files-missing"):
        registry_of(tracking).statements(VERSION)
    with refuses("files-missing"), registry_of(tracking).files(VERSION, "bundle", "manifest.json"):
        pass


def test_files_of_a_store_whose_client_is_not_installed(tracking: TrackingServer, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "botocore", None)
    monkeypatch.setitem(sys.modules, "botocore.client", None)
    tracking.root = "s3://bucket/m"
    with refuses("no-store-client"), registry_of(tracking).files(VERSION, "bundle"):
        pass
    with refuses("no-store-client"):
        fetch("s3://bucket/m", tmp_path / "m", "sha256:" + "0" * 64)


@pytest.mark.parametrize("asked", [False, True])
def test_files_go_through_the_tracking_server_unless_asked(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    for way in ("UPLOAD", "DOWNLOAD"):
        monkeypatch.setenv(f"MLFLOW_ENABLE_PROXY_MULTIPART_{way}", "true")
        if not asked:
            monkeypatch.delenv(f"MLFLOW_ENABLE_PROXY_MULTIPART_{way}")
    runpy.run_path(store.__file__)  # what its import does
    for variable in (MLFLOW_ENABLE_PROXY_MULTIPART_UPLOAD, MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD):
        assert variable.get() is asked


def test_two_log_the_same_dataset_at_the_same_moment(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow asks whether it knows a dataset and then adds it; of two, one meets the database's constraint."""
    client = registry.client
    experiment = client.create_experiment("both")
    first, second = (StepRun(client, client.create_run(experiment).info.run_id, experiment) for _ in range(2))
    log_inputs, refused = client.log_inputs, []

    def meet(run_id: str, datasets: list[DatasetInput]) -> None:
        log_inputs(run_id, datasets=datasets)
        if run_id == second.run_id and not refused:
            refused.append(run_id)
            raise MlflowException('duplicate key value violates unique constraint "dataset_pk"')

    monkeypatch.setattr(client, "log_inputs", meet)
    for run in (first, second):
        run.log_dataset("val", "sha256:1", 100, "validation")
        assert len(client.get_run(run.run_id).inputs.dataset_inputs) == 1
    assert refused


def test_nobody_waits_for_live_metrics(tmp_path: Path) -> None:
    """A server that never answers gets one request, and holds up no step; one that does has the values."""
    with closing(socket.create_server(("127.0.0.1", 0))) as deaf:
        run = StepRun(MlflowClient(f"http://127.0.0.1:{deaf.getsockname()[1]}"), "r", "0")
        began = time.monotonic()
        for position in range(100):
            run.log_live({"live/loss": 1.0}, position)
        assert time.monotonic() - began < 5
        deaf.settimeout(20)
        deaf.accept()[0].close()
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    info = client.create_run("0").info
    run = StepRun(client, info.run_id, "0")
    run.log_live({"live/loss": 2.0}, 7)
    wait_until(lambda: client.get_metric_history(info.run_id, "live/loss"), seconds=20)
    assert [(e.value, e.step) for e in client.get_metric_history(info.run_id, "live/loss")] == [(2.0, 7)]
