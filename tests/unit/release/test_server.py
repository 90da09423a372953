"""A registry behind a real MLflow server: files come over HTTP, and so do images."""

import base64
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mlflow
import pytest
import requests
from mlflow import MlflowClient

from tests.pipelines.servers import free_port, server, started
from tests.processes import run_python
from tests.unit.registered import NAME, enginery, promote_chain, refuses


@pytest.fixture
def uri(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server that keeps the files itself."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with server(tmp_path, port, store):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        mlflow.set_tracking_uri(url)
        yield url


@pytest.mark.slow
def test_a_server_keeps_the_files(uri: str, proved, tmp_path: Path, few_digits: Path) -> None:
    promote_chain(uri, {**proved.parts, "dataset": proved.dataset.path}, tmp_path / "promotion", NAME)
    enginery("release", tmp_path / "out", f"{NAME}@candidate")
    assert f"{NAME} version 1 @candidate @champion" in enginery("verify", tmp_path / "out").output
    images = sorted((few_digits / "7").iterdir())[:3]
    expected = mlflow.pyfunc.load_model(f"models:/{NAME}@candidate").predict(images)
    assert len(expected) == 3

    url = f"http://127.0.0.1:{(port := free_port())}"
    words = ["models", "serve", "-m", f"models:/{NAME}@candidate", "--env-manager", "local", "--port", str(port)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where uvicorn is
    command, environment = [sys.executable, "-m", "mlflow", *words], {**os.environ, "PATH": path}
    with started(command, f"{url}/ping", stderr=subprocess.DEVNULL, env=environment):
        sent = {"dataframe_records": [{"image": base64.b64encode(file.read_bytes()).decode()} for file in images]}
        answer = requests.post(f"{url}/invocations", json={**sent, "params": {"top_k": 2}}, timeout=600)
        assert answer.ok, answer.text
        assert [row["label"] for row in answer.json()["predictions"]] == expected["label"].tolist()
        answer = requests.post(f"{url}/invocations", json={"inputs": ["/etc/passwd!"]}, timeout=600)
        assert answer.status_code == 400
        assert "which is not base64" in answer.text

    version = MlflowClient().get_model_version_by_alias(NAME, "candidate")
    (bundle,) = (tmp_path / "files").rglob(f"{version.source.removeprefix('models:/')}/artifacts/bundle")
    (bundle / "int8.onnx").unlink()
    with pytest.raises(Exception, match=r"int8\.onnx is missing"):
        enginery("release", tmp_path / "again", f"{NAME}@candidate")
    assert not (tmp_path / "again").exists()


@pytest.mark.slow
def test_mlflow_says_nothing_in_between(uri: str, proved, tmp_path: Path, monkeypatch) -> None:
    """No addresses of runs, no bar for each file that is fetched, no log of MLflow's."""
    words = [f"--{part}={path}" for part, path in proved.parts.items()]
    words += [f"--dataset={proved.dataset.path}", f"--registered-model={NAME}"]
    for name in [name for name in os.environ if name.startswith("MLFLOW_ENABLE")]:
        monkeypatch.delenv(name)
    for number in (1, 2):
        done = run_python("-m", "components.promote", *words, f"--output={tmp_path / str(number)}")
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        assert all(line.startswith("promote: ") for line in done.stderr.splitlines()), done.stderr
    done = run_python("-m", "enginery.cli.main", "rollback", NAME)
    assert done.stdout == f"{NAME}@champion: version 2 -> 1\nentry 3 of the audit log (enginery audit {NAME})\n"
    assert done.stderr.startswith("digits version 1: nobody vouches for it")
    assert len(done.stderr.splitlines()) == 1


def test_a_store_or_server_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    for command in (("models",), ("release", tmp_path / "out", f"{NAME}@candidate")):
        with refuses("no-store", "MLFLOW_TRACKING_URI"):
            enginery(*command)
    assert not list(tmp_path.rglob("mlflow.db"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    with refuses("store-unusable", "MLFLOW_TRACKING_URI"):
        enginery("release", tmp_path / "out", f"{NAME}@candidate")
