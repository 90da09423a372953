"""Pods of a run as `--wait` and `watch` show them, read from Kubernetes' API."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import parse_qs, urlsplit

import pytest
import urllib3
import yaml
from kubernetes import client as k8s

from components.common.contracts.errors import EngineryError
from enginery.cluster import watch
from enginery.cluster.server import KfpServer
from enginery.cluster.watch import PodLogs, RunFollower, core_api, step_of, steps_of
from tests.kubernetes_api import answer
from tests.pipelines.running import ROOT
from tests.serving import Served, serving
from tests.unit.cluster.kfp_api import RUN_ID

NAMESPACE = "team-vision"


def pod(name: str, node: str, began: bool = True) -> Any:
    """As Argo makes it for a node of a workflow."""
    running = k8s.V1ContainerState(running=k8s.V1ContainerStateRunning())
    waiting = k8s.V1ContainerState(waiting=k8s.V1ContainerStateWaiting(reason="PodInitializing"))
    statuses = [
        k8s.V1ContainerStatus(name=name, state=state, image="i", image_id="i", ready=began, restart_count=0)
        for name, state in (("wait", running), ("main", running if began else waiting))
    ]
    metadata = k8s.V1ObjectMeta(name=name, annotations={"workflows.argoproj.io/node-name": node})
    return k8s.V1Pod(metadata=metadata, status=k8s.V1PodStatus(phase="Running", container_statuses=statuses))


@dataclass
class Pods(Served):
    pods: list[Any] = field(default_factory=list)
    lines: dict[str, list[str]] = field(default_factory=dict)
    breaks: int = 0  # connections that end before the last line
    status: int = 200

    def answer(self, method: str, path: str, body: Any) -> tuple[Any, ...]:
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if self.status != 200:
            return self.status, {"kind": "Status", "message": "pods is forbidden"}
        if match := re.fullmatch(rf"/api/v1/namespaces/{NAMESPACE}/pods/(.+)/log", parts.path):
            assert (query["container"], query["follow"], query["timestamps"]) == ("main", "True", "True")
            lines = self.lines[match[1]]
            if self.breaks:
                self.breaks -= 1
                return 200, "".join(lines[:1]).encode(), {"Content-Length": "9999"}
            return 200, "".join(lines).encode()
        assert query["labelSelector"] == f"pipeline/runid={RUN_ID}"
        return 200, answer(k8s.V1PodList(items=self.pods))


@pytest.fixture
def pods() -> Iterator[Pods]:
    with serving(Pods(), with_query=True) as state:
        yield state


@pytest.fixture
def logs(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> PodLogs:
    monkeypatch.setattr(watch, "_TIDYING_S", 60.0)  # on a machine that has much to do
    monkeypatch.setattr(watch, "_RECONNECT_S", 0.01)
    configuration = k8s.Configuration(host=pods.endpoint)
    configuration.retries = urllib3.Retry(0)
    return PodLogs(NAMESPACE, RUN_ID, lambda: k8s.CoreV1Api(k8s.ApiClient(configuration)))


def test_the_steps_lines_are_shown_behind_their_names(pods: Pods, logs: PodLogs, capsys) -> None:
    pods.pods = [
        pod("r-driver-1", "resnet50-x7k2p.root.train-driver"),
        pod("r-impl-1", "resnet50-x7k2p.root.train.executor(0)"),
        pod("r-impl-2", "resnet50-x7k2p.root.gate.executor", began=False),
    ]
    pods.breaks = 1
    pods.lines = {"r-impl-1": ["2026-11-22T08:00:01.1Z train: epoch 1\n", "2026-11-22T08:00:02.1Z done\n"]}
    logs.read_new_pods({"train", "gate"})
    logs.finish()
    assert capsys.readouterr().out.splitlines() == ["train       | train: epoch 1", "train       | done"]
    assert not any("driver" in path or "impl-2" in path for _, path, _ in pods.requests)


def test_a_pod_that_takes_the_place_of_a_lost_one_is_read_too(pods: Pods, logs: PodLogs, capsys) -> None:
    for uid in ("a", "b"):
        pods.pods = [pod("r-impl-1", "resnet50-x7k2p.root.train.executor(0)")]
        pods.pods[0].metadata.uid = uid
        pods.lines = {"r-impl-1": [f"2026-11-25T02:15:39Z train: {uid}\n"]}
        logs.read_new_pods({"train"})
        for thread in logs._threads.values():
            thread.join()
    assert capsys.readouterr().out.splitlines() == ["train       | train: a", "train       | train: b"]


def test_only_the_steps_own_lines_are_shown(pods: Pods, logs: PodLogs, capsys: pytest.CaptureFixture[str]) -> None:
    """As Argo 4.0.5 and KFP 2.17.0 write them on a cluster."""
    own = ["gate: INT8 loses 2.1 points", "gate: {", "}", "E1125 01:44:36.6 15 launcher_v2.go:449] Component failed"]
    lines = [
        'time=2026-11-25T01:44:29.224Z level=INFO msg="capturing logs" argo=true',
        "I1125 01:44:29.252512      15 main.go:67] Setting log level to: '1'",
        "[KFP Executor 2026-11-25 01:44:29,342 INFO]: Got executor_input:",
        "{",
        '    "inputs": {',
        "    }",
        "}",
        *own,
        "I1125 01:44:36.427116      15 launcher_v2.go:1230] ExecutorOutput: {",
        '  "artifacts": {}',
        "}",
        'time=2026-11-25T01:44:37.228Z level=INFO msg="sub-process exited" argo=true error=<nil>',
    ]
    pods.pods = [pod("r-impl-1", "resnet50-x7k2p.root.gate.executor(0)")]
    pods.lines = {"r-impl-1": [f"2026-11-25T01:44:{number:02}Z {line}\n" for number, line in enumerate(lines)]}
    logs.read_new_pods({"gate"})
    logs.finish()
    assert capsys.readouterr().out.splitlines() == [f"gate        | {line}" for line in own]


def test_a_pod_that_can_not_begin_is_explained_once(pods: Pods, logs: PodLogs, capsys) -> None:
    unplaced = pod("r-impl-1", "resnet50-x7k2p.root.train.executor(0)", began=False)
    message = "0/1 nodes are available: 1 Insufficient cpu."
    condition = k8s.V1PodCondition(type="PodScheduled", status="False", reason="Unschedulable", message=message)
    unplaced.status = k8s.V1PodStatus(phase="Pending", conditions=[condition])
    driver = pod("r-driver-7", "resnet50-x7k2p.root-driver", began=False)
    text = "container has runAsNonRoot and image will run as root"
    waiting = k8s.V1ContainerStateWaiting(reason="CreateContainerConfigError", message=text)
    driver.status.container_statuses[1].state = k8s.V1ContainerState(waiting=waiting)
    pods.pods = [unplaced, driver]
    for _ in range(2):
        logs.read_new_pods({"train"})
    assert capsys.readouterr().out.splitlines() == [
        f"waiting     train            Unschedulable {message}",
        f"waiting     r-driver-7       CreateContainerConfigError {text}",
    ]


def test_a_pod_that_the_cluster_ended_is_explained_once(pods: Pods, logs: PodLogs, capsys) -> None:
    killed = pod("r-impl-1", "resnet50-x7k2p.root.train.executor(0)", began=False)
    ended = k8s.V1ContainerStateTerminated(reason="OOMKilled", exit_code=1)
    killed.status.container_statuses[1].state = k8s.V1ContainerState(terminated=ended)
    resources = k8s.V1ResourceRequirements(limits={"memory": "500Mi"})
    killed.spec = k8s.V1PodSpec(containers=[k8s.V1Container(name="main", resources=resources)])
    evicted = pod("r-impl-2", "resnet50-x7k2p.root.export.executor(0)", began=False)
    message = 'Container main exceeded its local ephemeral storage limit "600Mi". '
    evicted.status = k8s.V1PodStatus(phase="Failed", reason="Evicted", message=message)
    pods.pods, pods.lines = [killed, evicted], {"r-impl-1": []}
    for _ in range(2):
        logs.read_new_pods({"train", "export"})
    assert capsys.readouterr().out.splitlines() == [
        "lost        train            OOMKilled: it needs more memory than 500Mi",
        f"lost        export           Evicted {message.strip()}",
    ]


def test_a_cluster_that_does_not_answer_costs_a_line(pods: Pods, logs: PodLogs, tmp_path, monkeypatch, capsys) -> None:
    pods.status = 403
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    for asked in (logs, PodLogs(NAMESPACE, RUN_ID, core_api)):
        for _ in range(3):
            asked.read_new_pods(None)
        asked.finish()
        (line,) = capsys.readouterr().out.splitlines()
        assert line.startswith("logs        not shown: Kubernetes can't be asked for pods in team-vision (")
        assert "They need a KUBECONFIG" in line
    assert len(pods.requests) == 1


def test_a_server_that_is_gone_leaves_the_run_and_the_way_back(tmp_path: Path, monkeypatch, capsys) -> None:
    """After the run has begun this is no mistake of the command: 1, and not 2."""
    monkeypatch.setattr(watch, "_LOST_S", 0.2)
    monkeypatch.setattr(watch, "_SHORTEST_POLL_S", 0.01)
    endpoint = "http://127.0.0.1:1"
    client = Mock(**{"get_run.side_effect": urllib3.exceptions.HTTPError("refused")})
    (token := tmp_path / "my token").write_text("abc")
    server = KfpServer.find(endpoint, token, None, None)
    with pytest.raises(EngineryError) as caught:
        RunFollower(server, client, RUN_ID, namespace="mine").follow()
    assert client.get_run.call_count > 3
    assert (caught.value.exit_code, caught.value.code) == (1, "kfp-lost")
    assert capsys.readouterr().out == f"{endpoint} does not answer; it is asked again for 0 s\n"
    way = f"enginery watch {RUN_ID} --endpoint {endpoint} --token-file '{token}' --namespace mine"
    assert str(caught.value).endswith(way)


@pytest.mark.parametrize(
    ("node", "steps", "step"),
    [
        ("w.root.train.executor", {"train"}, "train"),
        ("w.root.train.executor(1)", {"train"}, "train"),
        ("w.root.parts.iteration-item(0:0).preprocess-part.executor", {"preprocess-part"}, "preprocess-part"),
        ("w.root.parts.iteration-item(0:0).preprocess-part.executor", None, "preprocess-part"),
        ("w.root.train-driver", {"train"}, ""),
        ("w.root-driver", None, ""),
        ("", {"train"}, ""),
    ],
)
def test_the_step_of_a_pod(node: str, steps: set[str] | None, step: str) -> None:
    assert step_of(pod("p", node), steps) == step


def test_the_steps_of_a_run_are_in_the_order_of_its_graph() -> None:
    golden = ROOT / "tests/pipelines/golden/resnet50_parts.yaml"
    spec, platform = yaml.safe_load_all(golden.read_text())

    class Run:
        pipeline_spec = {"pipeline_spec": spec, "platform_spec": platform}  # noqa: RUF012

    order = ["list-parts", "preprocess-part", "merge", "train", "export", "validate", "gate", "promote"]
    assert steps_of(Run()) == order
    twice = {name: {"componentRef": {"name": "itself"}} for name in "ab"}
    Run.pipeline_spec = {"components": {"itself": {"dag": {"tasks": twice}}}, "root": {"dag": {"tasks": twice}}}
    assert steps_of(Run()) == []
