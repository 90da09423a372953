"""The image of the tracking server: healthy, guarded, and ended by SIGTERM."""

import json
import os
import time
from collections.abc import Iterator

import pytest

from tests.containers.conftest import HARDENED, HARDENED_ALONE, UID, docker, image

NAME = f"enginery-mlflow-{os.getpid()}"
ASK = (
    "import sys, urllib.request, urllib.error\n"
    "request = urllib.request.Request('http://127.0.0.1:5000' + sys.argv[1], headers={'Host': sys.argv[2]})\n"
    "try:\n    print(urllib.request.urlopen(request, timeout=10).status)\n"
    "except urllib.error.HTTPError as error:\n    print(error.code)\n"
)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    variables = {
        "MLFLOW_BACKEND_STORE_URI": "sqlite:////tmp/mlflow.db",
        "MLFLOW_AUTH_DATABASE_URI": "sqlite:////tmp/auth.db",
        "MLFLOW_AUTH_ADMIN_USERNAME": "admin",
        "MLFLOW_AUTH_ADMIN_PASSWORD": "a-long-password-of-the-test",
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "a-secret-key-of-the-test",
        "MLFLOW_ARTIFACTS_DESTINATION": "/tmp/artifacts",
        "MLFLOW_SERVER_ALLOWED_HOSTS": "tracking.example:5000,localhost:5000",
    }
    given = [part for name, value in variables.items() for part in ("--env", f"{name}={value}")]
    docker("run", "--detach", "--name", NAME, *HARDENED, "--user", f"{UID}:{UID}", *given, image("mlflow"))
    try:
        yield NAME
    finally:
        docker("rm", "--force", NAME)


def state() -> dict[str, object]:
    return json.loads(docker("inspect", "--format", "{{json .State}}", NAME).stdout)


def ask(path: str, host: str = "localhost:5000") -> str:
    return docker("exec", NAME, "python", "-c", ASK, path, host, check=False).stdout.strip()


def test_healthy_guarded_and_ended(server: str) -> None:
    deadline = time.monotonic() + 240
    while (health := state()["Health"]["Status"]) == "starting" and time.monotonic() < deadline:  # type: ignore[index]
        time.sleep(1)
    assert health == "healthy", docker("logs", server).stderr[-3000:]
    experiment = "/api/2.0/mlflow/experiments/get?experiment_id=0"
    assert ask(experiment) == "401"  # no password
    assert ask(experiment, host="elsewhere.example") == "403"
    started = time.monotonic()
    docker("stop", "--time", "60", server)
    assert time.monotonic() - started < 45
    assert state()["ExitCode"] in (0, 143)


def test_a_store_that_is_not_there_is_named() -> None:
    """Instead of a server that starts and loses the first upload."""
    variables = {
        "MLFLOW_BACKEND_STORE_URI": "sqlite:////tmp/mlflow.db",
        "MLFLOW_ARTIFACTS_DESTINATION": "s3://mlflow/artifacts",
        "MLFLOW_S3_ENDPOINT_URL": "http://127.0.0.1:8333",
        "AWS_ACCESS_KEY_ID": "a-key",
        "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-test",
        "ENGINERY_MAKE_BUCKET": "true",
        "ENGINERY_STORE_PATIENCE_S": "1",
    }
    given = [part for name, value in variables.items() for part in ("--env", f"{name}={value}")]
    done = docker("run", "--rm", *HARDENED_ALONE, *given, image("mlflow"), check=False)
    assert done.returncode == 1
    assert "the store http://127.0.0.1:8333 gives no bucket 'mlflow'" in done.stderr
    assert "a-secret-of-the-test" not in done.stdout + done.stderr
