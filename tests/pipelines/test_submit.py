"""`enginery submit` and `enginery watch` against a server that answers in the models of KFP's OpenAPI."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.kfp_api import RUN_ID, SCHEDULE_ID, Cluster
from tests.pipelines.submission import CLUSTER_YAML, REPOSITORY, Done, Submit, compiled, one_message


def submit_in_a_process(endpoint: str, *options: str, home: Path, **variables: str) -> Done:
    command = [sys.executable, "-m", "enginery.cli.main", "submit", "pipelines/resnet50.py", "--endpoint", endpoint]
    # Another HOME, because KFP's client reads ~/.config/kfp.
    environment = {**os.environ, "HOME": str(home), **variables}
    done = subprocess.run(
        [*command, *options], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600
    )
    return Done(done.returncode, done.stdout, done.stderr)


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


def test_a_password_in_the_url_is_not_shown(submit: Submit) -> None:
    message = one_message(submit("https://me:s3cret@kfp.example.org", "--data", "d"), 2)
    assert "has a user or a password in it" in message
    assert "s3cret" not in message


def test_a_token_that_is_missing_or_wrong(cluster: Cluster, submit: Submit) -> None:
    cluster.wanted_token = "right"
    message = one_message(submit(cluster.endpoint, "--data", "d"), 2)
    assert (
        "refuses this request (401 Unauthorized): nothing was sent. A bearer token is taken from KFP_TOKEN" in message
    )
    message = one_message(submit(cluster.endpoint, "--data", "d", KFP_TOKEN="wrong"), 2)
    assert "the token in KFP_TOKEN was refused" in message
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


def test_a_token_from_a_file_is_read_again_for_each_request(cluster: Cluster, submit: Submit, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    cluster.wanted_token = "first"
    cluster.states = ["RUNNING", "RUNNING", "SUCCEEDED"]
    answered = cluster.answer

    def renew(method: str, path: str, body: Any) -> tuple[int, Any]:
        if path.endswith(RUN_ID):  # the token ends while the run is followed, as a pod's does
            token.write_text("second\n")
            cluster.wanted_token = "second"
        return answered(method, path, body)

    cluster.answer = renew  # type: ignore[method-assign]
    done = submit(cluster.endpoint, "--data", "d", "--token-file", str(token), "--wait", "--no-logs")
    assert (done.returncode, done.stderr) == (0, "")
    assert cluster.tokens == {"Bearer first", "Bearer second"}
    assert "first" not in done.stdout


def test_the_token_of_a_pod(cluster: Cluster, submit: Submit, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("of-the-pod")
    cluster.wanted_token = "of-the-pod"
    assert submit(cluster.endpoint, "--data", "d", KF_PIPELINES_SA_TOKEN_PATH=str(token)).returncode == 0


def test_a_cookie_of_a_login_page(cluster: Cluster, submit: Submit, tmp_path: Path) -> None:
    cluster.wanted_cookie = "oauth2_proxy_kubeflow=abc"
    message = one_message(submit(cluster.endpoint, "--data", "d"), 2)
    assert "refuses this request (302 Found): nothing was sent" in message
    assert "a login page's cookie from KFP_COOKIE or --cookie-file" in message
    cookie = tmp_path / "cookie"
    cookie.write_text("oauth2_proxy_kubeflow=abc\n")
    assert submit(cluster.endpoint, "--data", "d", "--cookie-file", str(cookie)).returncode == 0
    assert submit(cluster.endpoint, "--data", "d", KFP_COOKIE="oauth2_proxy_kubeflow=abc").returncode == 0
    message = one_message(submit(cluster.endpoint, "--data", "d", KFP_COOKIE="oauth2_proxy_kubeflow=old"), 2)
    assert "the cookie in KFP_COOKIE was refused" in message
    assert "=old" not in message


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "can't be read: No such file or directory"), ("", "must hold one line"), ("a\nb", "must hold one line")],
)
def test_token_files_that_are_none(
    cluster: Cluster, submit: Submit, tmp_path: Path, content: str | None, told: str
) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    message = one_message(submit(cluster.endpoint, "--data", "d", "--token-file", str(file)), 2)
    assert f"--token-file {file} {told}" in message


def test_wait_shows_the_steps(cluster: Cluster, submit: Submit) -> None:
    begun = [("resnet50-x7k2p", "RUNNING"), ("root-driver", "SUCCEEDED"), ("preprocess", "RUNNING")]
    later = [("preprocess", "SUCCEEDED"), ("executor", "SUCCEEDED"), ("train-driver", "SUCCEEDED"), ("train", "FAILED")]
    cluster.states, cluster.tasks = ["RUNNING", "RUNNING", "FAILED"], [begun, later, later]
    cluster.error = "the run failed"
    done = submit(cluster.endpoint, "--data", "d", "--wait", "--no-logs")
    assert done.returncode == 1
    lines = [line.split() for line in done.stdout.splitlines()]
    steps = [words[1:] for words in lines if words[0] == "step"]
    assert steps == [["preprocess", "running"], ["preprocess", "succeeded"], ["train", "failed"]]
    assert ["failed", "train;", "its", "log:"] in [words[:4] for words in lines]


def test_a_failed_gate_has_its_own_exit_code(cluster: Cluster, submit: Submit) -> None:
    cluster.states, cluster.tasks = ["FAILED"], [[("validate", "SUCCEEDED"), ("gate", "FAILED")]]
    assert submit(cluster.endpoint, "--data", "d", "--wait", "--no-logs").returncode == 3
    cluster.tasks = [[("validate", "FAILED"), ("gate", "SKIPPED")]]
    assert submit(cluster.endpoint, "--data", "d", "--wait", "--no-logs").returncode == 1


def test_parts_are_counted(cluster: Cluster, submit: Submit) -> None:
    parts = [("preprocess-part", "SUCCEEDED"), ("preprocess-part", "RUNNING"), ("preprocess-part", "PENDING")]
    cluster.states, cluster.tasks = ["RUNNING", "SUCCEEDED"], [parts, [("preprocess-part", "SUCCEEDED")] * 3]
    done = submit(cluster.endpoint, "--data", "d", "--wait", "--no-logs", name="resnet50_parts")
    assert "preprocess-part  running, 1 of 3 succeeded" in done.stdout
    assert "preprocess-part  succeeded" in done.stdout


def test_watch_comes_back_to_a_run(cluster: Cluster, submit: Submit) -> None:
    cluster.states, cluster.tasks = ["RUNNING", "FAILED"], [[("gate", "RUNNING")], [("gate", "FAILED")]]
    done = submit(cluster.endpoint, "--no-logs", watch=RUN_ID)
    assert done.returncode == 3
    assert "gate             failed" in done.stdout
    message = one_message(submit(cluster.endpoint, "--no-logs", watch="another"), 2)
    assert "does not have this (404 Not Found): no /runs/another" in message


def test_ctrl_c_leaves_the_run_and_says_how_to_come_back(cluster: Cluster, tmp_path: Path) -> None:
    cluster.states = ["RUNNING"]
    command = [sys.executable, "-m", "enginery.cli.main", "submit", "pipelines/resnet50.py", "--data", "d", "--wait"]
    process = subprocess.Popen(
        [*command, "--endpoint", cluster.endpoint, "--no-logs", "--namespace", "mine"],
        cwd=REPOSITORY,
        env={**os.environ, "HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 600
    while not any(path.endswith(RUN_ID) for _, path, _ in cluster.requests) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (130, "")
    assert (
        f"run {RUN_ID} goes on. To come back: enginery watch {RUN_ID} --endpoint {cluster.endpoint} --namespace mine"
        in shown
    )
    assert {method for method, _, _ in cluster.requests} == {"GET", "POST"}  # nothing was stopped or removed


def test_a_recurring_run(cluster: Cluster, submit: Submit) -> None:
    done = submit(cluster.endpoint, "--data", "d", "--cron", "0 3 * * 1", "--settings", CLUSTER_YAML)
    assert (done.returncode, done.stderr) == (0, "")
    body = cluster.body_of("POST", "/apis/v2beta1/recurringruns")
    assert body["trigger"] == {"cron_schedule": {"cron": "0 0 3 * * 1"}}
    assert (body["display_name"], body["mode"], body["max_concurrency"]) == ("resnet50", "ENABLE", 1)
    assert (body["no_catchup"], body["service_account"]) == (True, "pipeline-runner")
    assert body["runtime_config"]["parameters"]["data"] == "d"
    assert body["pipeline_spec"]["platform_spec"]["platforms"]["kubernetes"]
    assert f"kfp --endpoint {cluster.endpoint} recurring-run disable {SCHEDULE_ID}" in done.stdout
    message = one_message(submit(cluster.endpoint, "--data", "d", "--every", "6h"), 2)
    assert f"has a recurring run 'resnet50' already: {SCHEDULE_ID}" in message
    done = submit(cluster.endpoint, "--data", "d", "--every", "6h", "--run-name", "other")
    assert done.returncode == 0, done.stderr
    bodies = [body for method, path, body in cluster.requests if (method, path[-14:]) == ("POST", "/recurringruns")]
    assert bodies[1]["trigger"] == {"periodic_schedule": {"interval_second": 21600}}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--cron", "3 o'clock"), "--cron takes five fields"),
        (("--every", "0h"), "--every takes a number and s, m, h or d"),
        (("--cron", "0 3 * * 1", "--every", "1d"), "--cron and --every can't be had together"),
        (("--every", "1d", "--wait"), "--wait follows one run"),
    ],
)
def test_times_that_can_not_be(cluster: Cluster, submit: Submit, options: tuple[str, ...], told: str) -> None:
    assert told in one_message(submit(cluster.endpoint, "--data", "d", *options), 2)
    assert cluster.requests == []
