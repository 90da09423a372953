"""Training on several nodes: a TrainJob is made, followed and removed. Its pods are real processes here.

And a training that nobody waits for any more saves and stops.
"""

import json
import os
import signal
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.errors import EngineryError, Preempted, UserError
from components.common.contracts.manifests import FAILURE, CheckpointManifest, load
from components.common.process.steplog import StepLog
from components.train import nodes
from components.train import train_job as jobs
from components.train.distributed import StopRequest
from components.train.nodes import VARIABLE as HEARTBEAT
from components.train.nodes import abandoned, beating, stop_when_silent, train_on_nodes
from components.train.train_job import (
    JOB_VARIABLE,
    NAMESPACE_VARIABLE,
    POD_VARIABLE,
    TrainJobRequest,
    connect,
    this_pod,
    train_job,
)
from tests.conftest import Dataset
from tests.helm.test_security import violations
from tests.processes import run_python, start_python
from tests.serving import serving
from tests.unit.refusals import refuses
from tests.unit.train.trainer_cluster import NAMESPACE, POD, Node, TrainerCluster, check_train_job
from tests.waiting import wait_until

from .conftest import config

RUN_ID = "0f5c4a1e-0000"
OWNER = {"apiVersion": "v1", "kind": "Pod", "name": POD, "uid": "u"}
FULL = TrainJobRequest(
    num_nodes=4,
    num_gpus=8,
    gpu_resource="nvidia.com/gpu",
    image="registry.example.com/train@sha256:11",
    runtime="torch-distributed",
    cpu="96",
    memory="512Gi",
    shm="64Gi",
    node_selector={"nvidia.com/gpu.product": "NVIDIA-H200"},
    tolerations=({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},),
    env={"NCCL_DEBUG": "WARN"},
    secrets={"AWS_ACCESS_KEY_ID": ("s3", "id"), "AWS_SECRET_ACCESS_KEY": ("s3", "id")},
    volumes=(("shared", "/mnt/shared", ""), ("images", "/mnt/images", "incoming"), ("shared", "/mnt/other", "b")),
    shared="/mnt/shared",
    image_pull_secrets=("registry-login",),
    service_account="trainer",
    timeout_s=3600,
)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerCluster]:
    with serving(TrainerCluster(tmp_path), with_query=True) as state:
        monkeypatch.setenv("KUBECONFIG", str(state.kubeconfig()))
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(state.kubeconfig()))
        monkeypatch.setenv(POD_VARIABLE, POD)
        monkeypatch.setenv(NAMESPACE_VARIABLE, NAMESPACE)
        monkeypatch.setenv("ENGINERY_KFP_RUN_ID", RUN_ID)
        (tmp_path / "shared").mkdir()
        yield state
        state.end()


def request_for(folder: Path, **changes: Any) -> TrainJobRequest:
    values = {"num_gpus": 0, "num_nodes": 2, "shared": str(folder / "shared"), "secrets": {}, "env": {}, **changes}
    return FULL.model_copy(update=values)


Train = Callable[..., str]


@pytest.fixture
def train(cluster: TrainerCluster, tiny_dataset: Dataset, tmp_path: Path) -> Train:
    def run(request: dict[str, Any] | None = None, **changes: Any) -> str:
        small = config(**{"epochs": 1, "architecture": "squeezenet1_1", **changes})
        asked = request_for(tmp_path, **(request or {}))
        return train_on_nodes(
            asked, small, StepLog("train"), tiny_dataset.path, tmp_path / "kfp/checkpoint", poll_s=0.3
        )

    return run


def test_the_job_is_what_the_trainers_api_takes() -> None:
    env = [{"name": "MLFLOW_RUN_ID", "value": "r"}, {"name": "NCCL_DEBUG", "value": "replaced by the request's"}]
    body = train_job(FULL, name="enginery-train-1", arguments=["--dataset", "d"], env=env, owner=OWNER, run_id=RUN_ID)
    check_train_job(body)
    trainer = body["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 8)
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": "96", "memory": "512Gi", "nvidia.com/gpu": "8"}
    assert {entry["name"]: entry.get("value") for entry in trainer["env"]} == {
        "MLFLOW_RUN_ID": "r",
        "NCCL_DEBUG": "WARN",
        "AWS_ACCESS_KEY_ID": None,
        "AWS_SECRET_ACCESS_KEY": None,
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "110",  # within the pods' grace period
    }
    spec = body["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    template = spec["replicatedJobs"][0]["template"]["spec"]["template"]
    pod = template["spec"]
    assert template["metadata"]["labels"] == {"sidecar.istio.io/inject": "false"}
    (container,) = pod["containers"]
    assert violations({**pod, "containers": [{**container, "image": FULL.image}]}) == []
    assert [volume["name"] for volume in pod["volumes"]] == ["claim-0", "claim-1", "claim-2", "dshm"]
    assert pod["volumes"][3]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    mounts = container["volumeMounts"]
    assert {"name": "claim-2", "mountPath": "/mnt/other", "subPath": "b"} in mounts
    assert len({mount["name"] for mount in mounts}) == len(mounts)  # the Trainer's API refuses a name twice
    assert "env" not in pod["containers"][0]  # the Trainer refuses patches of it
    assert pod["serviceAccountName"] == "trainer"


@pytest.mark.slow
def test_two_nodes_train_and_log_into_the_steps_run(cluster: TrainerCluster, tiny_dataset: Dataset, tmp_path) -> None:
    """The step as KFP starts it: by its command, with the request in its environment."""
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    cluster.env = [{"name": "MLFLOW_TRACKING_URI", "value": store}, {"name": "OTHER", "value": "x"}]
    variables = {JOB_VARIABLE: request_for(tmp_path).model_dump_json(), "MLFLOW_TRACKING_URI": store}
    words = ["-m", "components.train", "--dataset", tiny_dataset.path, "--output", tmp_path / "out"]
    words += ["--architecture", "squeezenet1_1", "--epochs", "1", "--image-size", "32"]
    words += ["--global-batch-size", "16", "--warmup-fraction", "0"]
    done = run_python(*words, CUDA_VISIBLE_DEVICES="", **variables)
    assert done.returncode == 0, done.stderr
    assert "2 processes on 2 machines, 8 images each" in done.stderr  # what node 0 printed
    assert "after epoch 1 on 2 nodes" in done.stderr
    checkpoint = load(tmp_path / "out", CheckpointManifest, verify=("",))
    assert len(checkpoint.manifest.history) == 1
    assert cluster.jobs == {}  # deleted
    assert list((tmp_path / "shared/enginery/runs").iterdir()) == []
    assert len(list((tmp_path / "shared/enginery/datasets").iterdir())) == 1
    (created,) = [body for method, _, body in cluster.requests if method == "POST"]
    assert created["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Pod", "name": POD, "uid": "uid-of-the-pod"}
    ]
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        runs = database.execute("select name, status from runs order by name").fetchall()
        assert runs == [(f"enginery {RUN_ID[:8]}", "RUNNING"), ("train", "FINISHED")]  # the pipeline's goes on
        params = dict(database.execute("select key, value from params").fetchall())
        metrics = {key for (key,) in database.execute("select key from metrics").fetchall()}
    assert (params["world_size"], params["architecture"]) == ("2", "squeezenet1_1")
    assert "val_score_pct" in metrics


@pytest.mark.slow
def test_a_failure_is_rank_0s_error(cluster: TrainerCluster, train: Train, tmp_path: Path) -> None:
    with pytest.raises(EngineryError, match=r"^train\.freeze_backbone (.|\n)*would fail again") as caught:
        train(freeze_backbone=True)
    assert (caught.value.exit_code, caught.value.code) == (2, "no-pretrained-weights")
    assert caught.value.setting == "train.pretrained"
    assert cluster.jobs == {}
    # Another try resumes what is left; an answer of this one does not count for it.
    cluster.refuse = (403, "no more jobs")
    with pytest.raises(UserError):
        train(freeze_backbone=True)
    assert list((tmp_path / "shared/enginery/runs").glob(f"*/checkpoint/{FAILURE}")) == []


@pytest.mark.slow
def test_lasting_errors_of_other_nodes_end_the_job(
    cluster: TrainerCluster, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 1 does not see the dataset, as where a volume is not shared."""
    start, started = cluster._start, []

    def start_blind(command: list[str], env: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
        started.append(env["PET_NODE_RANK"])
        if started[-1] == "1":
            command = [*command, "--dataset", str(tmp_path / "nowhere")]
        return start(command, env, log)

    monkeypatch.setattr(cluster, "_start", start_blind)
    with pytest.raises(EngineryError, match=r"nowhere.* \(on node 1\) (.|\n)*would fail again") as caught:
        train()
    assert caught.value.exit_code == 2
    assert started.count("1") <= 2
    assert cluster.stopping_s < 10  # node 0 waits for node 1, and does not stop for that


def test_a_job_that_ends_without_a_checkpoint(cluster: TrainerCluster, train: Train, tmp_path, monkeypatch) -> None:
    """Its nodes did not see the heartbeat: their containers start again, and have nothing to do."""
    (tmp_path / "log").touch()
    monkeypatch.setattr(cluster, "_run", lambda spec: [Node(partial(subprocess.Popen, ["true"]), tmp_path / "log")])
    with pytest.raises(EngineryError, match=r"did not see .*/heartbeat change for 10 minutes; another try") as caught:
        train()
    assert caught.value.exit_code == 1


def kill_a_node(cluster: TrainerCluster, once: Callable[[], bool]) -> None:
    """Kill the last node once something is true."""

    def kill() -> None:
        wait_until(once)
        node = next(iter(cluster.nodes.values()))[-1]
        subprocess.run(["pkill", "-KILL", "-P", str(node.process.pid)], check=False)
        node.process.send_signal(signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


@pytest.mark.slow
def test_a_killed_node_starts_again_and_resumes(cluster: TrainerCluster, train: Train, tmp_path: Path, capfd) -> None:
    kill_a_node(cluster, lambda: any((tmp_path / "shared").rglob("step-*.safetensors")))
    train(epochs=20, collective_timeout_s=60)
    said = capfd.readouterr().err
    assert "a pod ended: node 1, Error (exit code -9)" in said
    assert "resuming after step" in said
    history = load(tmp_path / "kfp/checkpoint", CheckpointManifest, verify=("",)).manifest.history
    assert len(history) == 20


@pytest.mark.slow
def test_the_error_of_a_killed_node_has_its_last_lines(cluster: TrainerCluster, train: Train, tmp_path: Path) -> None:
    cluster.backoff_limit = 0
    log = tmp_path / "node-0.log"
    kill_a_node(cluster, lambda: log.exists() and "2 processes on 2 machines" in log.read_text())
    with refuses("train-job-failed") as caught:
        train(epochs=500, collective_timeout_s=20)
    assert "What the pods wrote last:\nnode " in str(caught.value)
    assert "exit code -9" in str(caught.value)
    assert cluster.jobs == {}


def test_an_earlier_trys_job_goes_first(cluster: TrainerCluster, train: Train, capsys) -> None:
    cluster.is_stuck = True
    created = cluster._create

    def left_by_a_killed_pod(body: dict[str, Any]) -> tuple[int, Any]:
        cluster.jobs[body["metadata"]["name"]] = body
        cluster._create = then
        return created(body)

    def then(body: dict[str, Any]) -> tuple[int, Any]:
        cluster.refuse = (422, "this is the new one")
        return created(body)

    cluster._create = left_by_a_killed_pod
    with refuses("train-job-refused"):
        train()
    assert "an earlier try of this step left the TrainJob enginery-train-" in capsys.readouterr().err
    methods = [method for method, path, _ in cluster.requests if "trainjobs" in path]
    assert methods == ["POST", "DELETE", "DELETE", "POST"]  # gone is what is not found
    assert cluster.jobs == {}


def test_sigterm_removes_the_job_and_ends_with_75(cluster: TrainerCluster, tiny_dataset: Dataset, tmp_path) -> None:
    cluster.is_stuck = True
    variables = {JOB_VARIABLE: request_for(tmp_path).model_dump_json(), "CUDA_VISIBLE_DEVICES": ""}
    words = ("-m", "components.train", "--dataset", tiny_dataset.path, "--output", tmp_path / "out")
    process = start_python(*words, env=variables)
    too_late = threading.Timer(120, process.kill)
    too_late.start()
    said = ""
    while line := process.stderr.readline():
        said += line
        if "waiting for pods: node 0: Unschedulable 0/9 nodes: 9 Insufficient nvidia.com/gpu" in line:
            process.send_signal(signal.SIGTERM)
    too_late.cancel()
    assert process.wait(timeout=600) == 75, said
    assert cluster.jobs == {}
    assert "waiting for pods" in said
    assert json.loads((tmp_path / "out" / FAILURE).read_text())["exit_code"] == 75


@pytest.fixture
def preempted() -> Iterator[None]:
    """SIGTERM as the step takes it."""

    def preempt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Preempted("stopped by SIGTERM")

    before = signal.signal(signal.SIGTERM, preempt)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("preempted")
def test_sigterm_while_the_job_is_made_removes_it(cluster: TrainerCluster, train: Train) -> None:
    created = cluster._create
    answered = threading.Event()

    heartbeats = []

    def slowly(body: dict[str, Any]) -> tuple[int, Any]:
        made = created(body)
        env = {entry["name"]: entry.get("value") for entry in body["spec"]["trainer"]["env"]}
        heartbeats.append(Path(env[HEARTBEAT]).is_file())
        os.kill(os.getpid(), signal.SIGTERM)
        answered.wait(10)  # the step hears of the signal before it hears of the job
        return made

    cluster._create = slowly
    cluster.is_stuck = True
    try:
        with pytest.raises(Preempted):
            train()
    finally:
        answered.set()
    assert cluster.jobs == {}
    assert heartbeats == [True]


@pytest.mark.usefixtures("preempted")
def test_sigterm_removes_the_job_first(cluster: TrainerCluster, train: Train, tmp_path: Path, monkeypatch) -> None:
    """KFP's launcher dies of the signal at once, and the container with it: there is no time for a last line."""
    monkeypatch.setattr(jobs, "_LAST_LINES_S", 300.0)
    sleep = partial(subprocess.Popen, ["sleep", "300"])
    monkeypatch.setattr(cluster, "_run", lambda spec: [Node(sleep, tmp_path / "log")])
    (tmp_path / "log").write_text("at work\n")

    def stop_when_followed() -> None:
        wait_until(lambda: any("follow" in path for _, path, _ in cluster.requests))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_followed, daemon=True).start()
    started = time.monotonic()
    with pytest.raises(Preempted):
        train()
    assert cluster.jobs == {}
    assert time.monotonic() - started < 200  # it did not wait for the log of the pod


def test_pods_that_are_never_made(cluster: TrainerCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a quota or PodSecurity: the JobSet's controller is refused, and the TrainJob has no condition."""
    monkeypatch.setattr(jobs, "_NO_PODS_S", 0.0)
    monkeypatch.setattr(cluster, "_run", lambda spec: [])
    job = jobs.Job(connect(), NAMESPACE, "enginery-train-1")
    assert job.create(train_job(FULL, name=job.name, arguments=[], env=[], owner=OWNER, run_id=RUN_ID))
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        cluster._set(job.name, "Complete", "JobsCompleted", "jobset completed successfully")

    job.wait(say, print, 0.01)
    assert said == [f"waiting for pods: there are none; kubectl -n {NAMESPACE} describe jobset,job says why"]


@pytest.mark.parametrize(
    ("refuse", "is_old", "code", "methods"),
    [
        ((404, "the server could not find the requested resource"), False, "no-trainer", ["POST"]),
        ((403, "trainjobs is forbidden"), False, "forbidden", ["POST"]),
        ((422, "specified clusterTrainingRuntime must be created"), False, "train-job-refused", ["POST"]),
        ((503, "etcd is gone"), False, "api-error", ["POST", "DELETE"]),  # the job may have been made
        (None, True, "old-trainer", ["POST", "DELETE"]),
    ],
)
def test_refusals_of_a_cluster(
    cluster: TrainerCluster, train: Train, refuse: tuple[int, str] | None, is_old: bool, code: str, methods: list[str]
) -> None:
    cluster.refuse, cluster.is_old = refuse, is_old
    with refuses(code):
        train()
    assert cluster.jobs == {}
    assert list(dict.fromkeys(method for method, path, _ in cluster.requests if "trainjobs" in path)) == methods


def test_a_volume_that_is_not_there(train: Train) -> None:
    with refuses("no-volume"):
        train(request={"shared": "/nonexistent"})


def test_a_dataset_is_copied_once(cluster: TrainerCluster, train: Train, tmp_path: Path) -> None:
    cluster.refuse = (422, "not now")
    times = set()
    for _ in range(2):
        with refuses("train-job-refused"):
            train()
        (copy,) = (tmp_path / "shared/enginery/datasets").iterdir()
        times.add(next(copy.rglob("*.tar")).stat().st_mtime_ns)
    assert len(times) == 1
    assert not list((tmp_path / "shared/enginery/runs").glob("*/dataset"))


def test_the_pods_log_in_as_this_one_does_without_seeing_its_secrets(cluster: TrainerCluster) -> None:
    password = {
        "name": "MLFLOW_TRACKING_PASSWORD",
        "valueFrom": {"secretKeyRef": {"name": "mlflow", "key": "password"}},
    }
    run_id = {"name": "MLFLOW_RUN_ID", "value": "of-the-plugin"}
    cluster.env = [password, run_id, {"name": "AWS_SECRET_ACCESS_KEY", "value": "not passed on unasked"}]
    assert nodes._tracking(this_pod(connect()), StepLog("train")) == [password, run_id]


def test_silence_stops_and_a_beat_does_not(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "heartbeat"
    monkeypatch.setenv(HEARTBEAT, str(file))
    with StopRequest() as stop:
        stop.has_work = True
        with beating(file, every_s=0.05):
            assert abandoned() == ""
            stop_when_silent(StepLog("train"), silence_s=1.0)
            time.sleep(1.5)
            assert not stop.requested
        ended = time.monotonic()
        wait_until(lambda: stop.requested)
        assert time.monotonic() - ended > 0.7
    assert f"nobody waits for this training any more: {file} was not touched" in capsys.readouterr().err
    assert abandoned(patience_s=0.1)  # the container that starts in this one's place


def test_a_file_that_is_gone_is_silent_and_no_file_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HEARTBEAT, raising=False)
    with StopRequest() as stop:
        stop.has_work = True
        stop_when_silent(StepLog("train"), silence_s=0.05)
        assert abandoned() == ""
        time.sleep(0.5)
        assert not stop.requested
        monkeypatch.setenv(HEARTBEAT, str(tmp_path / "removed/heartbeat"))
        stop_when_silent(StepLog("train"), silence_s=0.1)
        wait_until(lambda: stop.requested)
