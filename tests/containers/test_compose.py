"""mlflow/compose.yaml as it is, with stand-ins for the images of PostgreSQL and the store: up, killed, restored."""

import json
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from components.common.contracts.digests import digest_file
from components.common.registry import store as _store  # noqa: F401  # as every process of ours that uses MLflow
from tests.containers.conftest import REPOSITORY, docker
from tests.pipelines.servers import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
STAND_INS = REPOSITORY / "containers/stand-in"
EXPERIMENT = "/api/2.0/mlflow/experiments/get?experiment_id=0"
LARGE_MB = 300
RESTART_S = 900  # on a machine with much else to do


class Stack:
    """`docker compose -f mlflow/compose.yaml` with a project, a port and passwords of its own."""

    def __init__(self, images: dict[str, str]) -> None:
        self.port, self.name = free_port(), f"enginery-test-{os.getpid()}"
        self.password = secrets.token_hex(16)
        self.variables = {
            "POSTGRES_PASSWORD": secrets.token_hex(24),
            "MLFLOW_ADMIN_PASSWORD": self.password,
            "MLFLOW_SECRET_KEY": secrets.token_hex(24),
            "S3_ACCESS_KEY": "enginery",
            "S3_SECRET_KEY": secrets.token_hex(24),
            "MLFLOW_LISTEN": f"127.0.0.1:{self.port}",
            "MLFLOW_WORKERS": "1",
            "MLFLOW_ALLOWED_HOSTS": f"127.0.0.1:{self.port}",
            "ENGINERY_IMAGE_REGISTRY": os.environ["REGISTRY"],
            "ENGINERY_IMAGE_TAG": os.environ["TAG"],
            **images,
        }

    def compose(self, *arguments: str, text: bytes = b"") -> bytes:
        command = ["docker", "compose", "--project-name", self.name, "--file", "mlflow/compose.yaml", *arguments]
        environment = {**os.environ, **self.variables}
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, input=text, capture_output=True, timeout=400)
        assert done.returncode == 0, done.stderr.decode()[-3000:] + self.logs()
        return done.stdout

    def logs(self) -> str:
        found = docker("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={self.name}").stdout
        logs = (docker("logs", "--tail", "30", container, check=False) for container in found.split())
        return "".join(one.stdout[-2000:] + one.stderr[-2000:] for one in logs)

    def up(self, *services: str) -> None:
        self.compose("up", "--detach", "--wait", *services)

    def container(self, service: str) -> str:
        return self.compose("ps", "--all", "--quiet", service).decode().strip()

    def crash(self, service: str) -> int:
        """Kill what runs in a container, as the kernel does when memory runs out; `docker kill` would be a stop.

        Returns how often the engine had started it again before.
        """
        state = json.loads(docker("inspect", "--format", "{{json .}}", self.container(service)).stdout)
        os.kill(state["State"]["Pid"], signal.SIGKILL)
        return int(state["RestartCount"])

    @contextmanager
    def paused(self, service: str) -> Iterator[None]:
        """It neither answers nor hangs up."""
        docker("pause", self.container(service))
        try:
            yield
        finally:
            docker("unpause", self.container(service))

    def wait_for_restart(self, service: str, before: int) -> None:
        def is_back() -> bool:
            state = json.loads(docker("inspect", "--format", "{{json .}}", self.container(service)).stdout)
            return state["RestartCount"] > before and state["State"]["Health"]["Status"] == "healthy"

        wait_until(is_back, self.logs, seconds=RESTART_S)

    def ask(self, *, password: str | None = None, host: str | None = None) -> int:
        credentials = ("admin", password) if password else None
        headers = {"Host": host} if host else {}
        address = f"http://127.0.0.1:{self.port}{EXPERIMENT}"
        return requests.get(address, auth=credentials, headers=headers, timeout=30).status_code

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(tracking_uri=f"http://127.0.0.1:{self.port}")

    def uploaded_mb(self) -> int:
        """Bytes of an upload that have reached the server, before it is passed on to the store."""
        done = docker("exec", self.container("mlflow"), "du", "--summarize", "-m", "/var/tmp/uploads", check=False)
        return int(done.stdout.split()[0]) if done.returncode == 0 else 0


@pytest.fixture(scope="module")
def images() -> dict[str, str]:
    """The two images that a registry would give, made of Debian's PostgreSQL and moto."""
    made = {}
    for variable, folder in (("POSTGRES_IMAGE", "postgresql"), ("S3_IMAGE", "store")):
        made[variable] = f"enginery-stand-in/{folder}:test"
        build = [REPOSITORY / "containers/build", "-f", STAND_INS / folder / "Dockerfile", "-t", made[variable]]
        subprocess.run([*build, "--build-arg", f"SLIM={os.environ['SLIM']}", "."], cwd=REPOSITORY, check=True)
    return made


@pytest.fixture(scope="module")
def stack(images: dict[str, str]) -> Iterator[Stack]:
    made = Stack(images)
    try:
        made.up()
        yield made
    finally:
        made.compose("down", "--volumes", "--timeout", "20")


@pytest.fixture(autouse=True)
def as_admin(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", stack.password)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)  # clients need no keys of the store
    assert os.environ["MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD"] == "false"  # as what uses MLflow of ours sets it


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("upload") / "weights.bin"
    path.write_bytes(os.urandom(1 << 20) * LARGE_MB)
    return path


def test_passwords_and_hosts(stack: Stack) -> None:
    assert stack.ask() == 401
    assert stack.ask(password="wrong") == 401
    assert stack.ask(password=stack.password) == 200
    assert stack.ask(password=stack.password, host="elsewhere.example") == 403


@pytest.mark.parametrize("service", ["mlflow", "postgresql"])
def test_crashed_in_a_run_it_comes_back_and_has_what_it_answered(stack: Stack, service: str) -> None:
    run_id, answered = stack.client.create_run("0").info.run_id, list[int]()

    def log_until_it_fails() -> None:
        with suppress(Exception):  # of the request that the kill meets
            while True:
                stack.client.log_metric(run_id, "loss", len(answered), step=len(answered))
                answered.append(len(answered))

    log = threading.Thread(target=log_until_it_fails)
    log.start()
    wait_until(lambda: len(answered) >= 20 or not log.is_alive(), seconds=120)
    before = stack.crash(service)
    log.join()
    stack.wait_for_restart(service, before)
    assert len(answered) >= 20
    assert set(answered) <= {metric.step for metric in _patiently(stack.client.get_metric_history, run_id, "loss")}


@pytest.mark.parametrize("from_mb", [20, LARGE_MB])
def test_crashed_in_an_upload_nothing_half_is_left(stack: Stack, large: Path, tmp_path: Path, from_mb: int) -> None:
    """While the file reaches the server, and when all of it has and the server passes it on to the store."""
    run_id, failures = stack.client.create_run("0").info.run_id, list[Exception]()
    upload = threading.Thread(target=_note, args=(lambda: stack.client.log_artifact(run_id, str(large)), failures))
    with stack.paused("store"):  # or else a fast machine is done before the kill
        upload.start()
        deadline = time.monotonic() + 120
        while (seen_mb := stack.uploaded_mb()) < from_mb and upload.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)
        before = stack.crash("mlflow")
        upload.join()
    stack.wait_for_restart("mlflow", before)
    assert failures, f"the upload was over before the kill, which came at {seen_mb} MB"
    files = stack.client.list_artifacts(run_id)
    assert [(file.path, file.file_size) for file in files] in ([], [(large.name, large.stat().st_size)])
    assert stack.uploaded_mb() <= 1  # what the killed server had got is not kept for ever
    stack.client.log_artifact(run_id, str(large))
    back = Path(stack.client.download_artifacts(run_id, large.name, str(tmp_path)))
    assert digest_file(back) == digest_file(large)


def test_restored_from_a_backup_of_the_database(stack: Stack, tmp_path: Path) -> None:
    """The commands of docs/tracking.md, into a new volume. The store keeps its objects."""
    client, note = stack.client, tmp_path / "note.txt"
    note.write_text("kept")
    run_id = client.create_run("0").info.run_id
    client.log_metric(run_id, "loss", 0.5)
    client.log_artifact(run_id, str(note))
    client.set_terminated(run_id)
    backup = stack.compose("exec", "-T", "postgresql", "pg_dump", "--username", "mlflow", "mlflow")
    stack.compose("rm", "--stop", "--force", "mlflow", "postgresql")
    docker("volume", "rm", f"{stack.name}_database")
    stack.up("postgresql")
    restore = ("psql", "--username", "mlflow", "--set", "ON_ERROR_STOP=1", "mlflow")
    stack.compose("exec", "-T", "postgresql", *restore, text=backup)
    stack.up()
    back = stack.client.get_run(run_id)
    assert back.info.status == "FINISHED"
    assert back.data.metrics == {"loss": 0.5}
    assert Path(stack.client.download_artifacts(run_id, note.name, str(tmp_path))).read_text() == "kept"
    assert stack.ask(password=stack.password) == 200  # users and permissions are in the same database


def test_without_its_secrets_nothing_starts(stack: Stack) -> None:
    command = ["docker", "compose", "--project-name", "none", "--file", "mlflow/compose.yaml", "config", "--quiet"]
    for name in ("POSTGRES_PASSWORD", "MLFLOW_ADMIN_PASSWORD", "MLFLOW_SECRET_KEY", "S3_ACCESS_KEY", "S3_SECRET_KEY"):
        environment = {**os.environ, **{key: value for key, value in stack.variables.items() if key != name}}
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
        assert done.returncode != 0
        assert name in done.stderr


def _note(act: Callable[[], object], failures: list[Exception]) -> None:
    try:
        act()
    except Exception as error:  # of a client whose server is killed
        failures.append(error)


def _patiently(ask: Callable[..., list[Any]], *arguments: str) -> list[Any]:
    """A pool of connections to a database that was killed finds out at the first request."""
    for _ in range(10):
        with suppress(MlflowException):
            return ask(*arguments)
        time.sleep(1)
    return ask(*arguments)
