"""The image of the tracking server: healthy, guarded, and ended by SIGTERM."""

import time

from tests.containers.conftest import HARDENED, HARDENED_ALONE, UID, docker, image, running, state, wait_for_health

ASK = (
    "import sys, urllib.request, urllib.error\n"
    "request = urllib.request.Request('http://127.0.0.1:5000' + sys.argv[1], headers={'Host': sys.argv[2]})\n"
    "try:\n    print(urllib.request.urlopen(request, timeout=10).status)\n"
    "except urllib.error.HTTPError as error:\n    print(error.code)\n"
)


def as_options(variables: dict[str, str]) -> list[str]:
    return [part for name, value in variables.items() for part in ("--env", f"{name}={value}")]


def test_healthy_guarded_and_ended() -> None:
    def ask(host: str = "localhost:5000") -> str:
        experiment = "/api/2.0/mlflow/experiments/get?experiment_id=0"
        return docker("exec", server, "python", "-c", ASK, experiment, host, check=False).stdout.strip()

    variables = {
        "MLFLOW_BACKEND_STORE_URI": "sqlite:////tmp/mlflow.db",
        "MLFLOW_AUTH_DATABASE_URI": "sqlite:////tmp/auth.db",
        "MLFLOW_AUTH_ADMIN_USERNAME": "admin",
        "MLFLOW_AUTH_ADMIN_PASSWORD": "a-long-password-of-the-test",
        "MLFLOW_FLASK_SERVER_SECRET_KEY": "a-secret-key-of-the-test",
        "MLFLOW_ARTIFACTS_DESTINATION": "/tmp/artifacts",
        "MLFLOW_SERVER_ALLOWED_HOSTS": "tracking.example:5000,localhost:5000",
    }
    with running("mlflow", *HARDENED, "--user", f"{UID}:{UID}", *as_options(variables)) as server:
        wait_for_health(server)
        assert ask() == "401"  # no password
        assert ask(host="elsewhere.example") == "403"
        started = time.monotonic()
        docker("stop", "--time", "60", server)
        assert time.monotonic() - started < 45
        assert state(server)["ExitCode"] in (0, 143)


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
    done = docker("run", "--rm", *HARDENED_ALONE, *as_options(variables), image("mlflow"), check=False)
    assert done.returncode == 1
    assert "the store http://127.0.0.1:8333 gives no bucket 'mlflow'" in done.stderr
    assert "a-secret-of-the-test" not in done.stdout + done.stderr
