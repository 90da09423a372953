"""`enginery submit` and `enginery watch` against a server that answers in the models of KFP's OpenAPI."""

import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import kfp_server_api as kfp
import pytest

from enginery.cluster import server
from tests.pipelines.running import CLUSTER_YAML, compiled
from tests.processes import start_python
from tests.unit.cluster.conftest import Submit
from tests.unit.cluster.kfp_api import RUN_ID, SCHEDULE_ID, Cluster

DATA = ("--data", "d")
FOLLOWED = (*DATA, "--wait", "--no-logs")


def test_the_compiled_pipeline_and_typed_arguments_arrive(cluster: Cluster, submit: Submit, tmp_path: Path) -> None:
    config = tmp_path / "settings.yaml"
    config.write_text("epochs: 7\ntrain:\n  momentum: 0.8\n")
    options = ("--data", "images/train", "--config", str(config), "--learning-rate", "0.1")
    done = submit(cluster.endpoint + "/", *options, "--set", "gate.min_speedup=2", KFP_TOKEN="secret-token")
    assert done.exit_code == 0
    assert f"{cluster.endpoint}/#/runs/details/{RUN_ID}" in done.text
    assert "secret-token" not in done.text

    body = cluster.body_of("POST", "/apis/v2beta1/runs")
    spec, platform = compiled("resnet50", tmp_path)
    assert body["pipeline_spec"] == {"pipeline_spec": spec, "platform_spec": platform}
    assert body["experiment_id"] == "id-of-resnet50"
    assert body["display_name"].startswith("resnet50 20")
    parameters = body["runtime_config"]["parameters"]
    expected = {"epochs": 7, "learning_rate": 0.1, "architecture": "resnet50", "global_batch_size": 256}
    # The path is the cluster's, not this machine's.
    expected |= {"data": "images/train", "train": {"momentum": 0.8}, "gate": {"min_speedup": 2.0}}
    assert {name: parameters[name] for name in expected} == expected
    assert type(parameters["epochs"]) is int
    assert set(parameters) == set(spec["root"]["inputDefinitions"]["parameters"])
    assert cluster.tokens == {"Bearer secret-token"}


def test_names_can_be_given_and_an_experiment_is_used_again(cluster: Cluster, submit: Submit) -> None:
    cluster.experiments.append("mine")
    names = ("--experiment", "mine", "--run-name", "third try")
    model = ("--model", "/mnt/models/m.onnx", "--data", "s3://bucket/images")
    assert submit(cluster.endpoint, *names, *model, name="quantize").exit_code == 0
    assert ("POST", "/apis/v2beta1/experiments") not in {entry[:2] for entry in cluster.requests}
    body = cluster.body_of("POST", "/apis/v2beta1/runs")
    assert (body["experiment_id"], body["display_name"]) == ("id-of-mine", "third try")
    parameters = body["runtime_config"]["parameters"]
    assert (parameters["model"], parameters["data"]) == ("/mnt/models/m.onnx", "s3://bucket/images")
    assert cluster.tokens == {None}


def test_settings_of_the_cluster_arrive(cluster: Cluster, submit: Submit, tmp_path: Path) -> None:
    options = ("--settings", CLUSTER_YAML, "--num-nodes", "2")
    assert submit(cluster.endpoint, "--data", "/mnt/images", *options).exit_code == 0
    body = cluster.body_of("POST", "/apis/v2beta1/runs")
    spec, platform = compiled("resnet50", tmp_path, *options)
    assert body["pipeline_spec"] == {"pipeline_spec": spec, "platform_spec": platform}
    assert "ENGINERY_TRAIN_JOB" in str(spec)
    assert body["service_account"] == "pipeline-runner"
    assert body["runtime_config"]["pipeline_root"] == "s3://kfp-artifacts/team-vision"
    assert cluster.body_of("POST", "/apis/v2beta1/experiments")["namespace"] == "team-vision"


MODEL = ("--model", "/mnt/model.pth", "--data", "d")
NODES = ("--architecture", "resnet50", "--num-nodes", "2")


@pytest.mark.parametrize(
    ("options", "code", "setting"),
    [
        ((*DATA, "--epochs", "0"), "invalid-setting", "train.epochs"),
        ((), "missing-input", "--data"),
        ((*DATA, "--cron", "3 o'clock"), "bad-schedule", "--cron"),
        ((*DATA, "--every", "0h"), "bad-schedule", "--every"),
        ((*DATA, "--cron", "0 3 * * 1", "--every", "1d"), "two-schedules", "--every"),
        ((*DATA, "--every", "1d", "--wait"), "schedule-with-wait", "--wait"),
        ((*DATA, "--ca-file", "/absent"), "ca-file-unreadable", "--ca-file"),
        ((*DATA, "--ca-file", "{tmp}/empty"), "ca-file-unreadable", "--ca-file"),
        (MODEL, "weights-without-architecture", "--architecture"),
        ((*MODEL, *NODES, "--settings", CLUSTER_YAML), "pipeline-does-not-train", "--num-nodes"),
        ((*DATA, "--endpoint", "localhost:8080"), "endpoint-not-url", "--endpoint"),
        ((*DATA, "--endpoint", "kfp.example.org"), "endpoint-not-url", "--endpoint"),
        ((*DATA, "--endpoint", "ftp://host"), "endpoint-not-url", "--endpoint"),
        ((*DATA, "--endpoint", "http://"), "endpoint-not-url", "--endpoint"),
        ((*DATA, "--endpoint", "https://me:s3cret@kfp.example.org"), "endpoint-holds-secret", "--endpoint"),
        ((*DATA, "--endpoint", "http://absent.invalid"), "kfp-unreachable", "--endpoint"),
        ((*DATA, "--endpoint", "http://127.0.0.1:1"), "kfp-unreachable", "--endpoint"),  # nobody listens
        ((*DATA, "--token-file", "{tmp}/absent"), "login-file-unreadable", "--token-file"),
        ((*DATA, "--token-file", "{tmp}/empty"), "login-not-one-line", "--token-file"),
        ((*DATA, "--token-file", "{tmp}/two lines"), "login-not-one-line", "--token-file"),
    ],
)
def test_what_is_refused_before_anything_is_sent(
    cluster: Cluster, submit: Submit, tmp_path: Path, options: tuple[str, ...], code: str, setting: str
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "two lines").write_text("a\nb")
    name = "quantize" if "--model" in options else "resnet50"
    done = submit(cluster.endpoint, *(word.format(tmp=tmp_path) for word in options), name=name)
    assert done.fault == (1 if code == "kfp-unreachable" else 2, code, setting)
    assert "s3cret" not in str(done.error)
    assert cluster.requests == []


def test_servers_that_are_something_else_or_refuse(cluster: Cluster, submit: Submit) -> None:
    assert submit(f"{cluster.endpoint}/elsewhere", *DATA).fault == (2, "no-kfp-api", "--endpoint")
    assert submit(cluster.endpoint, "--no-logs", watch="another").fault == (2, "kfp-not-found", "")
    answered = cluster.answer
    page = b"<html>Log in</html>"  # of a proxy that lets the health through
    cluster.answer = lambda method, path, body: answered(method, path, body) if "healthz" in path else (200, page)
    assert submit(cluster.endpoint, *DATA).fault == (2, "no-kfp-api", "--endpoint")
    assert submit(cluster.endpoint, "--no-logs", watch="another").fault == (2, "kfp-lost", "--endpoint")
    cluster.answer = answered
    cluster.refuse_run = "invalid namespace"
    done = submit(cluster.endpoint, *DATA)
    assert done.fault == (1, "kfp-error", "")
    assert "answers 400 Bad Request: invalid namespace" in str(done.error)


def test_a_server_that_never_answers_is_given_up(cluster: Cluster, submit: Submit, monkeypatch) -> None:
    monkeypatch.setattr(server, "_HEALTH_S", server._HEALTH_S // 10)
    monkeypatch.setattr(server, "_ANSWER_S", server._ANSWER_S // 30)
    monkeypatch.setattr("enginery.cluster.watch._LOST_S", 0)
    answered, end = cluster.answer, threading.Event()

    def wait(silent: str) -> None:
        def answer(method: str, path: str, body: Any) -> tuple[int, Any]:
            if silent in path:
                end.wait(20)
            return answered(method, path, body)

        cluster.answer = answer

    try:
        wait("healthz")
        assert submit(cluster.endpoint, "--no-logs", watch=RUN_ID).fault == (1, "kfp-unreachable", "--endpoint")
        wait("/runs/")
        assert submit(cluster.endpoint, "--no-logs", watch=RUN_ID).fault == (1, "kfp-lost", "--endpoint")
    finally:
        end.set()


def test_tokens_and_cookies(cluster: Cluster, submit: Submit, tmp_path: Path) -> None:
    cluster.wanted_token = "right"
    (file := tmp_path / "token").write_text("right\n")
    assert "nothing was sent" in str(submit(cluster.endpoint, *DATA).error)
    done = submit(cluster.endpoint, *DATA, KFP_TOKEN="wrong")
    assert done.fault == (2, "kfp-refuses", "")
    assert "the token in KFP_TOKEN was refused" in str(done.error)
    assert "wrong" not in str(done.error)
    for variables in ({"KFP_TOKEN": "right"}, {"KF_PIPELINES_SA_TOKEN_PATH": str(file)}):
        assert submit(cluster.endpoint, *DATA, **variables).exit_code == 0
    cluster.wanted_token, cluster.wanted_cookie = None, "oauth2_proxy_kubeflow=abc"
    file.write_text("oauth2_proxy_kubeflow=abc\n")
    assert submit(cluster.endpoint, *DATA).fault == (2, "kfp-refuses", "")  # a redirection to a login page
    assert submit(cluster.endpoint, *DATA, "--cookie-file", str(file)).exit_code == 0
    done = submit(cluster.endpoint, *DATA, KFP_COOKIE="oauth2_proxy_kubeflow=old")
    assert "the cookie in KFP_COOKIE was refused" in str(done.error)
    assert "=old" not in str(done.error)
    for value in ("two\nlines", "çok=gizli"):
        assert submit(cluster.endpoint, *DATA, KFP_TOKEN=value).fault == (2, "login-not-one-line", "KFP_TOKEN")
        assert submit(cluster.endpoint, *DATA, KFP_COOKIE=value).fault == (2, "login-not-one-line", "KFP_COOKIE")
    both = ("--token-file", str(file), "--cookie-file", str(file))
    assert submit(cluster.endpoint, *DATA, *both).fault == (2, "two-logins", "--cookie-file")


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

    cluster.answer = renew
    assert submit(cluster.endpoint, *FOLLOWED, "--token-file", str(token)).exit_code == 0
    assert cluster.tokens == {"Bearer first", "Bearer second"}


@pytest.mark.parametrize(
    ("states", "code", "shown"),
    [
        (["PENDING", "RUNNING", "RUNNING", "SUCCEEDED"], 0, ["pending", "running", "succeeded"]),
        (["RUNNING", "FAILED"], 1, ["running", "failed"]),
        (["CANCELING", "CANCELED"], 1, ["canceling", "canceled"]),
    ],
)
def test_wait_sees_the_end(cluster: Cluster, submit: Submit, states: list[str], code: int, shown: list[str]) -> None:
    cluster.states, cluster.error, cluster.lose = states, "task gate failed", 1
    done = submit(cluster.endpoint, *FOLLOWED)
    assert done.exit_code == code
    lines = [line.split() for line in done.text.splitlines()]
    assert [words[1] for words in lines if words[0] == "state"] == shown
    assert ("task gate failed" in done.text) == (states[-1] == "FAILED")


def test_wait_shows_the_steps_and_counts_parts(cluster: Cluster, submit: Submit) -> None:
    begun = [("resnet50-x7k2p", "RUNNING"), ("root-driver", "SUCCEEDED"), ("preprocess", "RUNNING")]
    later = [("preprocess", "SUCCEEDED"), ("executor", "SUCCEEDED"), ("train-driver", "SUCCEEDED"), ("train", "FAILED")]
    cluster.states, cluster.tasks = ["RUNNING", "RUNNING", "FAILED"], [begun, later, later]
    done = submit(cluster.endpoint, *FOLLOWED)
    assert done.exit_code == 1
    lines = [line.split() for line in done.text.splitlines()]
    steps = [words[1:] for words in lines if words[0] == "step"]
    assert steps == [["preprocess", "running"], ["preprocess", "succeeded"], ["train", "failed"]]
    assert ["failed", "train;", "its", "log:"] in [words[:4] for words in lines]
    parts = [("preprocess-part", "SUCCEEDED"), ("preprocess-part", "RUNNING"), ("preprocess-part", "PENDING")]
    cluster.states, cluster.tasks = ["RUNNING", "SUCCEEDED"], [parts, [("preprocess-part", "SUCCEEDED")] * 3]
    done = submit(cluster.endpoint, *FOLLOWED, name="resnet50_parts")
    assert "preprocess-part  running, 1 of 3 succeeded" in done.text
    assert "preprocess-part  succeeded" in done.text


@pytest.mark.parametrize(
    ("tasks", "code"),
    [([("validate", "SUCCEEDED"), ("gate", "FAILED")], 3), ([("validate", "FAILED"), ("gate", "SKIPPED")], 1)],
)
def test_exit_codes_of_failed_gates(cluster: Cluster, submit: Submit, tasks: list[tuple[str, str]], code: int) -> None:
    cluster.states, cluster.tasks = ["RUNNING", "FAILED"], [[("gate", "RUNNING")], tasks]
    assert submit(cluster.endpoint, "--no-logs", watch=RUN_ID).exit_code == code


def test_ctrl_c_leaves_the_run_and_says_how_to_come_back(cluster: Cluster, tmp_path: Path) -> None:
    cluster.states = ["RUNNING"]
    words = ("submit", "resnet50", "--endpoint", cluster.endpoint, *FOLLOWED, "--namespace", "mine")
    written = {"stdout": subprocess.PIPE, "stderr": None}
    environment = {"HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with start_python("-m", "enginery.cli.main", *words, env=environment, **written) as process:
        for line in process.stdout:
            if line.startswith("state       running"):
                process.send_signal(signal.SIGINT)
                break
        said = process.stdout.read()
    assert process.returncode == 130
    assert f"To come back: enginery watch {RUN_ID} --endpoint {cluster.endpoint} --namespace mine" in said
    assert {method for method, _, _ in cluster.requests} == {"GET", "POST"}  # nothing was stopped or removed


def test_once_takes_a_run_of_the_same_name_unless_it_failed(cluster: Cluster, submit: Submit) -> None:
    """So that neither another try of a Job nor a newer image of it submits the same again."""
    options = (*DATA, "--once", "--run-name", "release-1a2b")
    for state, posts in (("FAILED", 1), ("RUNNING", 1), ("SUCCEEDED", 1)):
        cluster.runs = [kfp.V2beta1Run(run_id="earlier\x1b[2J", state=state)]
        done = submit(cluster.endpoint, *options)
        assert done.exit_code == 0
        assert ("earlier\\x1b[2J, which was there before" in done.text) == (state != "FAILED")
        assert [entry[:2] for entry in cluster.requests].count(("POST", "/apis/v2beta1/runs")) == posts
    assert submit(cluster.endpoint, *DATA, "--once").fault == (2, "once-without-name", "--run-name")


def test_a_recurring_run(cluster: Cluster, submit: Submit) -> None:
    done = submit(cluster.endpoint, *DATA, "--cron", "0 3 * * 1", "--settings", CLUSTER_YAML)
    assert done.exit_code == 0
    body = cluster.body_of("POST", "/apis/v2beta1/recurringruns")
    assert body["trigger"] == {"cron_schedule": {"cron": "0 0 3 * * 1"}}
    assert (body["display_name"], body["mode"], body["max_concurrency"]) == ("resnet50", "ENABLE", 1)
    assert (body["no_catchup"], body["service_account"]) == (True, "pipeline-runner")
    assert body["runtime_config"]["parameters"]["data"] == "d"
    assert body["pipeline_spec"]["platform_spec"]["platforms"]["kubernetes"]
    assert f"kfp --endpoint {cluster.endpoint} recurring-run disable {SCHEDULE_ID}" in done.text
    again = submit(cluster.endpoint, *DATA, "--every", "6h")
    assert again.fault == (2, "recurring-run-exists", "--run-name")
    assert submit(cluster.endpoint, *DATA, "--every", "6h", "--run-name", "other").exit_code == 0
    bodies = [body for method, path, body in cluster.requests if (method, path[-14:]) == ("POST", "/recurringruns")]
    assert bodies[1]["trigger"] == {"periodic_schedule": {"interval_second": 21600}}
