"""The scripts of `helm test`, and the start of the tracking server as the chart asks for it, in real processes."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.helm.rendering import CHART, REPOSITORY
from tests.pipelines.servers import answers, free_port
from tests.serving import Served, serving
from tests.waiting import wait_until

START = REPOSITORY / "containers/mlflow/start"


def run(script: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", (CHART / "files" / script).read_text(encoding="utf-8")]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=400)


def start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    """As the image does, with the interpreter of the tests."""
    (folder / "python").unlink(missing_ok=True)
    (folder / "python").symlink_to(sys.executable)
    variables = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "MLFLOW_ARTIFACTS_DESTINATION": str(folder / "artifacts"),
    }
    return subprocess.Popen(
        ["/bin/sh", str(START), *arguments],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The server on a database that was migrated before it: its address and folder."""
    folder = tmp_path_factory.mktemp("tracking")
    migration = start(folder, "migrate")
    text, _ = migration.communicate(timeout=120)
    assert migration.returncode == 0, text
    with sqlite3.connect(folder / "mlflow.db") as database:
        (revision,) = database.execute("SELECT version_num FROM alembic_version").fetchone()
    assert revision
    port = free_port()
    server = start(folder, "serve", "--workers", "1", "--host", "127.0.0.1", "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: answers(f"{url}/health"), process=server, seconds=90)
        yield url, folder
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        said, _ = server.communicate(timeout=60)
    assert "Updating database tables" not in said, "`start serve` must leave the schema alone"


@pytest.mark.slow
def test_the_tracking_server_is_really_asked(tracking: tuple[str, Path]) -> None:
    url, folder = tracking
    for _ in range(2):  # once more after an upgrade: the experiment is there already
        done = run("test_mlflow.py", MLFLOW_TRACKING_URI=url)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("ok ") == 4
    user = {"MLFLOW_TRACKING_USERNAME": "admin", "MLFLOW_TRACKING_PASSWORD": "p"}
    done = run("test_mlflow.py", MLFLOW_TRACKING_URI=url, **user)  # the server asks for none
    assert (done.returncode, "nobody is let in without a password: got 200, wanted 401" in done.stderr) == (1, True)
    artifacts = folder / "artifacts"
    assert len(list(artifacts.rglob("artifact.bin"))) == 2
    artifacts.rename(folder / "gone")
    artifacts.write_text("a volume that takes no files")
    try:
        done = run("test_mlflow.py", MLFLOW_TRACKING_URI=url, MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    finally:
        artifacts.unlink()
        (folder / "gone").rename(artifacts)
    assert done.returncode == 1, done.stdout


def test_a_password_with_an_escape_reaches_mlflow(tmp_path: Path) -> None:
    """A database's URI has what is special in its password as %40 and so on."""
    uri = "postgresql://mlflow:p%40ss%25@database/mlflow"
    # As mlflow.server.auth.config reads it, whose import wants packages of the image.
    reader = "import configparser, os; found = configparser.ConfigParser(); "
    reader += 'found.read(os.environ["MLFLOW_AUTH_CONFIG_PATH"]); print(found["mlflow"]["database_uri"])'
    (tmp_path / "python").write_text(f"#!/bin/sh\nexec {sys.executable} -c '{reader}'\n")
    (tmp_path / "python").chmod(0o755)  # in the place of the server
    variables = {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_AUTH_DATABASE_URI": uri}
    variables |= {"MLFLOW_FLASK_SERVER_SECRET_KEY": "k", "TMPDIR": str(tmp_path)}
    variables = {**os.environ, **variables, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["/bin/sh", str(START), "serve"], env=variables, capture_output=True, text=True)
    assert done.stdout.strip() == uri, done.stderr


@dataclass
class Triton(Served):
    """Answers as the KServe protocol says: metadata, and a label for the bytes that came as a tensor."""

    outputs: dict[str, str] = field(default_factory=lambda: {"probability": "FP32", "label": "BYTES"})

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if path == "/v2/models/classifier/ready":
            return 200, {}
        if path == "/v2/models/classifier":
            inputs = [{"name": "image", "datatype": "BYTES", "shape": [-1, 1]}]
            outputs = [{"name": name, "datatype": kind, "shape": [-1, 5]} for name, kind in self.outputs.items()]
            return 200, {"name": "classifier", "inputs": inputs, "outputs": outputs}
        if path != "/v2/models/classifier/infer":
            return 400, {"error": "unknown model"}
        header, end = json.JSONDecoder().raw_decode(body.decode("latin-1"))
        ((tensor,), data) = header["inputs"], body[end:]
        assert tensor["shape"] == [1, 1]
        assert tensor["parameters"]["binary_data_size"] == len(data)
        assert int.from_bytes(data[:4], "little") == len(data) - 4
        label = "7" if data[4:] == b"the known image" else "0"
        return 200, {"outputs": [{"name": "label", "datatype": "BYTES", "shape": [1, 5], "data": [label, "3"]}]}


@pytest.fixture
def triton() -> Iterator[Triton]:
    with serving(Triton()) as state:
        yield state


def ask(
    url: str, image: bytes = b"the known image", label: str = "7", model: str = "classifier", wait_s: str = "0"
) -> tuple[int, str]:
    variables = {"MODEL": model, "IMAGE": b64encode(image).decode(), "LABEL": label, "WAIT_S": wait_s}
    done = run("test_serve.py", TRITON_URL=url, **variables)
    return done.returncode, done.stdout + done.stderr


def test_the_known_image_must_get_its_label(triton: Triton) -> None:
    assert ask(triton.endpoint) == (0, "ok classifier says '7'\n")
    code, text = ask(triton.endpoint, b"another image")
    assert (code, "the known image is '7', and the model says '0'" in text) == (1, True)


def test_a_pod_that_is_not_let_in_yet_asks_again() -> None:
    """Until the network plugin knows the address of a new pod, a refusal is all that it gets."""
    port, done = free_port(), threading.Event()

    def let_in() -> None:
        time.sleep(1.5)
        with serving(Triton(), port=port):
            done.wait(60)

    thread = threading.Thread(target=let_in)
    thread.start()
    try:
        assert ask(f"http://127.0.0.1:{port}", wait_s="50") == (0, "ok classifier says '7'\n")
    finally:
        done.set()
        thread.join()


def test_what_triton_may_answer_besides(triton: Triton) -> None:
    code, text = ask(triton.endpoint, model="lost")
    assert (code, "/v2/models/lost/ready answers 400" in text) == (1, True)
    code, text = ask("http://127.0.0.1:1")
    assert (code, "refused" in text) == (1, True)
    del triton.outputs["label"]
    code, text = ask(triton.endpoint)
    assert (code, "outputs of type BYTES: []; exactly one is needed" in text) == (1, True)
