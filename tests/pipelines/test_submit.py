"""`enginery submit` against an HTTP server that answers as Kubeflow Pipelines does."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from pipelines.commands.compile import compile as compile_command

REPOSITORY = Path(__file__).resolve().parents[2]
RUN_ID = "0f5c4a1e-run"


@dataclass
class Cluster:
    """What the server was asked, and how it is to answer."""

    requests: list[tuple[str, str, Any]] = field(default_factory=list)  # method, path without query, body
    tokens: set[str | None] = field(default_factory=set)
    experiments: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=lambda: ["SUCCEEDED"])  # of the run, one per question
    error: str = ""  # of the run
    wanted_token: str | None = None
    refuse_run: str = ""  # why no run is created
    lose: int = 0  # questions about the run that get no answer
    endpoint: str = ""

    def body_of(self, method: str, path: str) -> Any:
        (body,) = [entry[2] for entry in self.requests if entry[:2] == (method, path)]
        return body

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        path = path.removeprefix("/apis/v2beta1")
        if path == "/healthz":
            return 200, {"multi_user": False}
        if path == "/experiments" and method == "GET":
            return 200, {"experiments": [experiment(name) for name in self.experiments]}
        if path == "/experiments" and method == "POST":
            self.experiments.append(body["display_name"])
            return 200, experiment(body["display_name"])
        if path == "/runs" and method == "POST":
            if self.refuse_run:
                return 400, {"error": "bad", "code": 3, "message": self.refuse_run}
            return 200, {"run_id": RUN_ID, "display_name": body["display_name"]}
        if path == f"/runs/{RUN_ID}":
            if self.lose > 0:
                self.lose -= 1
                return 503, {"message": "starting"}
            state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
            error = {"code": 9, "message": self.error} if self.error and state == "FAILED" else None
            return 200, {"run_id": RUN_ID, "state": state, "error": error}
        return 404, {"message": f"no {path}"}


def experiment(name: str) -> dict[str, str]:
    return {"experiment_id": f"id-of-{name}", "display_name": name}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    state = Cluster()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            path = self.path.split("?")[0]
            token = self.headers.get("authorization")
            state.tokens.add(token)
            state.requests.append((self.command, path, body))
            if state.wanted_token is not None and token != f"Bearer {state.wanted_token}":
                self.reply(401, b'{"message": "who are you?"}')
                return
            status, answer = state.answer(self.command, path, body)
            self.reply(status, json.dumps(answer).encode())

        do_GET = do_POST = handle_any

        def reply(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    state.endpoint = f"http://127.0.0.1:{server.server_port}"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


Submit = Callable[..., Done]


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Submit:
    """`submit(endpoint, *options, name, **environment)` in this process."""
    from kfp.client import Client

    from pipelines.cli import main

    monkeypatch.setattr(Client, "_LOCAL_KFP_CONTEXT", str(tmp_path / "no-context.json"))
    monkeypatch.delenv("KF_PIPELINES_ENDPOINT", raising=False)

    def submitted(endpoint: str, *options: str, name: str = "resnet50", **variables: str) -> Done:
        file = str(REPOSITORY / f"pipelines/{name}.py")
        with monkeypatch.context() as patch:
            for variable, value in variables.items():
                patch.setenv(variable, value)
            before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
            with pytest.raises(SystemExit) as left:
                main(["submit", file, "--endpoint", endpoint, *options])
            for number, handler in before.items():
                signal.signal(number, handler)  # the tests go on in this process
        captured = capsys.readouterr()
        return Done(int(left.value.code or 0), captured.out, captured.err)

    return submitted


def submit_in_a_process(endpoint: str, *options: str, home: Path, **variables: str) -> Done:
    command = [sys.executable, "-m", "pipelines.cli", "submit", "pipelines/resnet50.py", "--endpoint", endpoint]
    # Another HOME, because KFP's client reads ~/.config/kfp.
    environment = {**os.environ, "HOME": str(home), **variables}
    done = subprocess.run(
        [*command, *options], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60
    )
    return Done(done.returncode, done.stdout, done.stderr)


def compiled(name: str, folder: Path) -> list[dict[str, Any]]:
    output = folder / "compiled.yaml"
    arguments = [str(REPOSITORY / f"pipelines/{name}.py"), "--output", str(output)]
    assert CliRunner().invoke(compile_command, arguments).exit_code == 0
    return list(yaml.safe_load_all(output.read_text()))


def test_the_compiled_pipeline_and_typed_arguments_arrive(cluster: Cluster, tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("epochs: 7\ntrain:\n  momentum: 0.8\n")
    arguments = ("--data", "images/train", "--config", str(config), "--learning-rate", "0.1")
    done = submit_in_a_process(
        cluster.endpoint + "/", *arguments, "--set", "gate.min_speedup=2", home=tmp_path, KFP_TOKEN="secret-token"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert RUN_ID in done.stdout
    assert f"{cluster.endpoint}/#/runs/details/{RUN_ID}" in done.stdout
    assert "secret-token" not in done.stdout

    body = cluster.body_of("POST", "/apis/v2beta1/runs")
    spec, platform = compiled("resnet50", tmp_path)
    assert body["pipeline_spec"]["pipeline_spec"] == spec
    assert body["pipeline_spec"]["platform_spec"] == platform
    assert body["experiment_id"] == "id-of-resnet50"
    assert body["display_name"].startswith("resnet50 20")
    parameters = body["runtime_config"]["parameters"]
    assert parameters["data"] == "images/train"  # the cluster's, not this machine's
    assert (parameters["epochs"], parameters["learning_rate"], parameters["global_batch_size"]) == (7, 0.1, 256)
    assert {name: type(parameters[name]) for name in ("epochs", "learning_rate", "architecture", "train")} == {
        "epochs": int,
        "learning_rate": float,
        "architecture": str,
        "train": dict,
    }
    assert (parameters["train"], parameters["gate"]) == ({"momentum": 0.8}, {"min_speedup": 2.0})
    assert set(parameters) == set(spec["root"]["inputDefinitions"]["parameters"])
    assert cluster.tokens == {"Bearer secret-token"}


def test_names_can_be_given_and_an_experiment_is_used_again(cluster: Cluster, submit: Submit) -> None:
    cluster.experiments.append("mine")
    names = ("--experiment", "mine", "--run-name", "third try")
    model = ("--model", "/mnt/models/m.onnx", "--data", "s3://bucket/images")
    done = submit(cluster.endpoint, *names, *model, name="quantize")
    assert done.returncode == 0, done.stderr
    assert ("POST", "/apis/v2beta1/experiments") not in {entry[:2] for entry in cluster.requests}
    body = cluster.body_of("POST", "/apis/v2beta1/runs")
    assert (body["experiment_id"], body["display_name"]) == ("id-of-mine", "third try")
    assert body["runtime_config"]["parameters"]["model"] == "/mnt/models/m.onnx"
    assert body["runtime_config"]["parameters"]["data"] == "s3://bucket/images"
    assert cluster.tokens == {None}


@pytest.mark.parametrize(
    ("states", "code", "shown"),
    [
        (["PENDING", "RUNNING", "RUNNING", "SUCCEEDED"], 0, ["pending", "running", "succeeded"]),
        (["RUNNING", "FAILED"], 1, ["running", "failed"]),
        (["CANCELING", "CANCELED"], 1, ["canceling", "canceled"]),
    ],
)
def test_wait_follows_to_the_end(
    cluster: Cluster, submit: Submit, states: list[str], code: int, shown: list[str]
) -> None:
    cluster.states, cluster.error, cluster.lose = states, "task gate failed", 1
    done = submit(cluster.endpoint, "--data", "d", "--wait")
    assert (done.returncode, done.stderr) == (code, "")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [words[1] for words in lines if words[0] == "state"] == shown
    assert ("task gate failed" in done.stdout) == (states[-1] == "FAILED")


def one_message(done: Done, code: int) -> str:
    """The error. Checks the exit code, and that a person sees this one line alone."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        message = one_message(submit_in_a_process(endpoint, "--data", "d", home=tmp_path), 2)
    assert f"can't reach Kubeflow Pipelines at {endpoint}: " in message
    assert "Connection refused" in message
    assert "kubectl port-forward" in message


def test_a_host_that_does_not_exist(submit: Submit) -> None:
    message = one_message(submit("http://absent.invalid", "--data", "d"), 2)
    assert "can't reach Kubeflow Pipelines at http://absent.invalid" in message


@pytest.mark.parametrize("endpoint", ["localhost:8080", "kfp.example.org", "ftp://host", "http://"])
def test_what_is_no_url(submit: Submit, endpoint: str) -> None:
    message = one_message(submit(endpoint, "--data", "d"), 2)
    assert f"--endpoint must be a URL such as http://localhost:8080 or https://kfp.example.org/pipeline, got '{endpoint}'" in message  # noqa: E501  # fmt: skip


def test_a_token_that_is_missing_or_wrong(cluster: Cluster, submit: Submit) -> None:
    cluster.wanted_token = "right"
    message = one_message(submit(cluster.endpoint, "--data", "d"), 2)
    assert "refuses this request (401 Unauthorized). A bearer token is taken from KFP_TOKEN; it is not set" in message
    message = one_message(submit(cluster.endpoint, "--data", "d", KFP_TOKEN="wrong"), 2)
    assert "the token in it was refused" in message
    assert "wrong" not in message
    assert submit(cluster.endpoint, "--data", "d", KFP_TOKEN="right").returncode == 0


def test_a_server_that_is_something_else(cluster: Cluster, submit: Submit) -> None:
    message = one_message(submit(f"{cluster.endpoint}/elsewhere", "--data", "d"), 2)
    assert "serves no KFP API (404 Not Found)" in message


def test_a_run_that_the_server_refuses(cluster: Cluster, submit: Submit) -> None:
    cluster.refuse_run = "invalid namespace"
    message = one_message(submit(cluster.endpoint, "--data", "d"), 1)
    assert "answers 400 Bad Request: invalid namespace" in message


def test_arguments_are_checked_before_anything_is_sent(cluster: Cluster, submit: Submit) -> None:
    message = one_message(submit(cluster.endpoint, "--data", "d", "--epochs", "0"), 2)
    assert "train.epochs: got '0', needs an integer of at least 1" in message
    message = one_message(submit(cluster.endpoint), 2)
    assert "--data is required" in message
    assert cluster.requests == []
