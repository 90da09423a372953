"""Check that the tracking server takes a run with a file, and gives the same back. Leaves nothing but a deleted run.

With a password: that it lets nobody in without one.
"""

import os
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path

import mlflow
from mlflow import MlflowClient

EXPERIMENT = "enginery-helm-test"
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
# As clients do that don't reach the store behind the server.
for way in ("UPLOAD", "DOWNLOAD"):
    os.environ[f"MLFLOW_ENABLE_PROXY_MULTIPART_{way}"] = "false"


def check(what: str, seen: object, wanted: object) -> None:
    if seen != wanted:
        sys.exit(f"FAILED {what}: got {seen!r}, wanted {wanted!r}")
    print(f"ok {what}", flush=True)


def experiment(client: MlflowClient) -> str:
    found = client.get_experiment_by_name(EXPERIMENT)
    if found is None:
        return client.create_experiment(EXPERIMENT)
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return found.experiment_id


def wait_to_be_let_in(uri: str) -> None:
    """Network plugins take seconds to let a new pod's address through a policy; until then they refuse it."""
    deadline = time.monotonic() + float(os.environ.get("WAIT_S", "60"))
    while True:
        try:
            urllib.request.urlopen(f"{uri}/health", timeout=30).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                sys.exit(f"FAILED {uri}: {error}")
            time.sleep(1)


def status_without_password(uri: str) -> int:
    try:
        with urllib.request.urlopen(f"{uri}/api/2.0/mlflow/experiments/get?experiment_id=0", timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def main() -> None:
    uri = os.environ["MLFLOW_TRACKING_URI"]
    wait_to_be_let_in(uri)
    if os.environ.get("MLFLOW_TRACKING_PASSWORD"):
        check("nobody is let in without a password", status_without_password(uri), 401)
    client = MlflowClient()
    run_id = client.create_run(experiment(client)).info.run_id
    try:
        value, data = uuid.uuid4().hex, os.urandom(1 << 20)
        client.log_param(run_id, "value", value)
        client.log_metric(run_id, "score_pct", 98.6, timestamp=int(1000 * time.time()))
        run = client.get_run(run_id)
        check("a parameter is read as it was written", run.data.params.get("value"), value)
        check("a metric is read as it was written", run.data.metrics.get("score_pct"), 98.6)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "artifact.bin")
            file.write_bytes(data)
            client.log_artifact(run_id, str(file))
            artifact = f"{client.get_run(run_id).info.artifact_uri}/artifact.bin"
            check("artifacts go through the server", artifact.split(":", 1)[0], "mlflow-artifacts")
            back = Path(mlflow.artifacts.download_artifacts(artifact_uri=artifact, dst_path=folder + "/back"))
            check("an uploaded file of 1 MiB comes back", back.read_bytes() == data, True)
        client.set_terminated(run_id)
    finally:
        client.delete_run(run_id)


main()
