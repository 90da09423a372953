"""The MLflow image on a real PostgreSQL: killed in the middle of a run and of an upload, and restored from a backup."""

import functools
import hashlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import requests
from mlflow import MlflowClient

from tests.containers.conftest import HARDENED, UID, docker, image, mount, open_folder
from tests.pipelines.servers import _postgresql, free_port, postgresql

PASSWORD = "a-long-password-of-the-test"


class Server:
    """The image with its databases on PostgreSQL and its artifacts in a folder."""

    def __init__(self, database: str, files: Path) -> None:
        self.port, self.name = free_port(), f"enginery-tracking-{os.getpid()}-{time.time_ns()}"
        variables = {
            "MLFLOW_BACKEND_STORE_URI": database,
            "MLFLOW_AUTH_DATABASE_URI": database,
            "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD,
            "MLFLOW_FLASK_SERVER_SECRET_KEY": "a-secret-key-of-the-test",
            "MLFLOW_ARTIFACTS_DESTINATION": str(files),
            "MLFLOW_SERVER_ALLOWED_HOSTS": f"127.0.0.1:{self.port}",
        }
        given = [part for name, value in variables.items() for part in ("--env", f"{name}={value}")]
        options = [*HARDENED, "--network", "host", "--user", f"{UID}:{UID}", *mount(files, read_only=False), *given]
        arguments = ["--port", str(self.port), "--workers", "1"]
        docker("run", "--detach", "--name", self.name, *options, image("mlflow"), *arguments)

    def wait(self) -> None:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            with suppress(requests.RequestException):
                if requests.get(f"http://127.0.0.1:{self.port}/health", timeout=5).ok:
                    return
            time.sleep(0.5)
        raise AssertionError(docker("logs", self.name).stderr[-3000:])

    def kill(self) -> None:
        docker("kill", "--signal", "KILL", self.name)

    def start_again(self) -> None:
        docker("start", self.name)
        self.wait()

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(tracking_uri=f"http://127.0.0.1:{self.port}")


@contextmanager
def serving(database: str, files: Path) -> Iterator[Server]:
    made = Server(database, files)
    try:
        made.wait()
        yield made
    finally:
        docker("rm", "--force", made.name)


@pytest.fixture
def as_admin(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
    for name, value in {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": PASSWORD, **limits}.items():
        monkeypatch.setenv(name, value)


def until_it_fails(act: Callable[[int], None], answered: list[int]) -> None:
    """Repeat something until the server is gone, and note what it has answered."""
    with suppress(Exception):  # of the request that the kill meets
        while True:
            act(len(answered))
            answered.append(len(answered))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_killed_in_a_run_and_in_an_upload_then_restored(as_admin: None, tmp_path: Path) -> None:
    for parent in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        parent.chmod(0o755)
    files, large = open_folder(tmp_path / "files"), tmp_path / "weights.bin"
    large.write_bytes(os.urandom(1 << 20) * 200)
    with postgresql() as database:
        with serving(database, files) as server:
            run_id = server.client.create_run("0").info.run_id
            answered: list[int] = []
            act = functools.partial(_log_loss, server.client, run_id)
            log = threading.Thread(target=until_it_fails, args=(act, answered))
            log.start()
            deadline = time.monotonic() + 120
            while len(answered) < 20 and log.is_alive() and time.monotonic() < deadline:
                time.sleep(0.05)
            server.kill()
            log.join()
            server.start_again()
            kept = {metric.step for metric in server.client.get_metric_history(run_id, "loss")}
            assert len(answered) >= 20
            assert set(answered) <= kept  # whatever was answered is there

            upload = threading.Thread(target=lambda: _try(lambda: server.client.log_artifact(run_id, str(large))))
            upload.start()
            time.sleep(0.15)
            server.kill()
            upload.join()
            server.start_again()
            server.client.log_artifact(run_id, str(large))
            back = server.client.download_artifacts(run_id, large.name, str(tmp_path))
            assert digest(Path(back)) == digest(large)
            server.client.set_terminated(run_id)

        backup = subprocess.run([_postgresql("pg_dump"), "--dbname", database], capture_output=True, check=True).stdout
        restored = database.rpartition("/")[0] + "/restored"
        psql = [_postgresql("psql"), "--quiet", "--set", "ON_ERROR_STOP=1", "--dbname"]
        subprocess.run([*psql, database, "--command", "CREATE DATABASE restored"], check=True)
        subprocess.run([*psql, restored], input=backup, check=True, stdout=subprocess.DEVNULL)
        with serving(restored, files) as server:
            assert server.client.get_run(run_id).info.status == "FINISHED"
            assert {metric.step for metric in server.client.get_metric_history(run_id, "loss")} == kept


def _log_loss(client: MlflowClient, run_id: str, step: int) -> None:
    client.log_metric(run_id, "loss", step, step=step)


def _try(act: Callable[[], None]) -> None:
    with suppress(Exception):  # the server is killed meanwhile
        act()
