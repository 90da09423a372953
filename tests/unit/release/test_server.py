"""A registry behind a real MLflow server: files come over HTTP, and so do images."""

import base64
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import mlflow
import pytest
import requests
from mlflow import MlflowClient

from components.common.contracts.errors import EngineryError, UserError
from enginery.cli.commands import cli

from .making import NAME, promote_parts
from .test_release import enginery

ROOT = Path(__file__).resolve().parents[3]


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(url: str, path: str, *words: str) -> Iterator[None]:
    """MLflow's own command, until the context ends; then it is killed with all its workers."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},  # where uvicorn is
    )
    try:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline and process.poll() is None:
            with suppress(requests.RequestException):
                if requests.get(url + path, timeout=2).ok:
                    break
            time.sleep(0.2)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def registry(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that keeps the files itself."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    place = ["--backend-store-uri", store, "--artifacts-destination", str(tmp_path / "kept")]
    with serving(url, "/health", "server", "--port", str(port), "--workers", "1", *place):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        mlflow.set_tracking_uri(url)
        yield url


@pytest.mark.slow
def test_a_server_keeps_the_files(registry: str, proved, tmp_path: Path, few_digits: Path) -> None:
    promote_parts(proved.parts, proved.dataset.path, tmp_path / "promotion")
    enginery("release", tmp_path / "out", f"{NAME}@candidate")
    assert f"{NAME} version 1 @candidate @champion" in enginery("verify", tmp_path / "out")
    files = sorted((few_digits / "7").iterdir())[:3]
    model = mlflow.pyfunc.load_model(f"models:/{NAME}@candidate")
    expected = model.predict(files)
    assert len(expected) == 3

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ["models", "serve", "-m", f"models:/{NAME}@candidate", "--env-manager", "local", "--port", str(port)]
    with serving(url, "/ping", *words):
        sent = {"dataframe_records": [{"image": base64.b64encode(file.read_bytes()).decode()} for file in files]}
        answer = requests.post(f"{url}/invocations", json={**sent, "params": {"top_k": 2}}, timeout=600)
        assert answer.ok, answer.text
        assert [row["label"] for row in answer.json()["predictions"]] == expected["label"].tolist()
        answer = requests.post(f"{url}/invocations", json={"inputs": ["/etc/passwd!"]}, timeout=600)
        assert answer.status_code == 400
        assert "which is not base64" in answer.text


@pytest.mark.slow
def test_files_that_are_gone_from_a_server(registry: str, proved, tmp_path: Path) -> None:
    promote_parts(proved.parts, proved.dataset.path, tmp_path / "promotion")
    version = MlflowClient().get_model_version_by_alias(NAME, "candidate")
    (bundle,) = (tmp_path / "kept").rglob(f"{version.source.removeprefix('models:/')}/artifacts/bundle")
    (bundle / "int8.onnx").unlink()
    with pytest.raises(EngineryError, match=r"int8\.onnx is missing"):
        enginery("release", tmp_path / "out", f"{NAME}@candidate")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_mlflow_says_nothing_in_between(registry: str, proved, tmp_path: Path) -> None:
    """No addresses of runs, no bar for each file that is fetched, no log of MLflow's."""
    words = [f"--{part}={path}" for part, path in proved.parts.items()]
    words += [f"--dataset={proved.dataset.path}", f"--registered-model={NAME}"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_ENABLE")}
    environment["PYTHONPATH"] = str(ROOT)

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", *command]
        return subprocess.run(line, check=True, capture_output=True, text=True, env=environment)

    for number in (1, 2):
        done = run("components.promote", *words, f"--output={tmp_path / str(number)}")
        assert not done.stdout
        assert all(line.startswith("promote: ") for line in done.stderr.splitlines()), done.stderr
    done = run("enginery.cli.main", "rollback", NAME)
    assert done.stdout == f"{NAME}@champion: version 2 -> 1\nentry 3 of the audit log (enginery audit {NAME})\n"
    assert done.stderr.startswith("digits version 1: nobody vouches for it")
    assert len(done.stderr.splitlines()) == 1


def test_a_server_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    before = mlflow.get_tracking_uri()
    try:
        with pytest.raises(EngineryError, match=f"MLflow at {url} can't be used: Connection refused. Start the server"):
            cli(args=["release", str(tmp_path / "out"), f"{NAME}@candidate"], standalone_mode=False)
    finally:
        mlflow.set_tracking_uri(before)


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    with pytest.raises(UserError, match=r"there is no MLflow store at sqlite:.* yet: nothing was ever"):
        enginery("release", tmp_path / "out", f"{NAME}@candidate")
    assert not (tmp_path / "home/mlflow.db").exists()
