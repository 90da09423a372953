"""A cluster with Kubeflow Trainer, small: Kubernetes' API over HTTP, and pods that are processes of this machine.

Answers are built from the models of Kubernetes' client. A TrainJob is checked against the models of Kubeflow Trainer's
API, and then really runs: its command and arguments, with the variables that the Trainer's torch runtime sets.
"""

import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from components.train.train_job import INDEX_LABEL, JOBSET_LABEL
from tests.kubernetes_api import write_kubeconfig
from tests.pipelines.servers import free_port
from tests.processes import ROOT
from tests.serving import Served

NAMESPACE, POD = "team-vision", "resnet50-x7k2p-system-container-impl-42"
_JOBS = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{NAMESPACE}/trainjobs"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"


def parse_train_job(body: dict[str, Any]) -> Any:
    from kubeflow_trainer_api import models  # which takes a second to import

    return models.TrainerV1alpha1TrainJob.from_dict(body)


def check_train_job(body: dict[str, Any]) -> None:
    """True if the Trainer's API has every field, of the type that it is given."""
    parsed = parse_train_job(body)
    assert parsed.to_dict() == body  # what the models do not know would be gone


def refusal(code: int, message: str) -> tuple[int, Any]:
    return code, {"apiVersion": "v1", "kind": "Status", "code": code, "message": message, "status": "Failure"}


@dataclass
class Node:
    """A pod of a TrainJob, whose container starts again where it fails."""

    start: Callable[[], "subprocess.Popen[bytes]"]
    log: Path
    num_restarts: int = 0
    code_before: int | None = None

    def __post_init__(self) -> None:
        self.process = self.start()

    @property
    def code(self) -> int | None:
        return self.process.poll()

    @property
    def log_before(self) -> Path:
        return self.log.with_suffix(".before")

    def restart(self) -> None:
        self.code_before, self.num_restarts = self.code, self.num_restarts + 1
        self.log.rename(self.log_before)
        self.process = self.start()


@dataclass
class TrainerCluster(Served):
    """State of the cluster, and the requests to it."""

    folder: Path
    refuse: tuple[int, str] | None = None  # of new jobs
    is_old: bool = False  # drops runtimePatches
    is_stuck: bool = False  # pods can't be scheduled
    backoff_limit: int = 6  # Kubernetes' own, of restarts of a job's pods; JobSet's pods have restartPolicy OnFailure
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    nodes: dict[str, list[Node]] = field(default_factory=dict)
    stopping_s: float = math.inf  # what the nodes took to end when their job was deleted
    env: list[Any] = field(default_factory=list)  # of the step's own pod
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def kubeconfig(self) -> Path:
        return write_kubeconfig(self.folder, self.endpoint, namespace=NAMESPACE)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path == _JOBS and method == "POST":
            return self._create(body)
        if match := re.fullmatch(rf"{_JOBS}/([a-z0-9-]+)", parts.path):
            with self._lock:
                return self._of_job(method, match[1])
        if parts.path == f"{_PODS}/{POD}":
            spec = {"containers": [{"name": "main", "env": self.env}]}
            return 200, {"metadata": {"name": POD, "namespace": NAMESPACE, "uid": "uid-of-the-pod"}, "spec": spec}
        if parts.path == _PODS:
            name = query["labelSelector"].removeprefix(f"{JOBSET_LABEL}=")
            number = int(name in self.jobs) if self.is_stuck else len(self.nodes.get(name, ()))
            return 200, {"items": [self._pod(name, rank) for rank in range(number)]}
        if match := re.fullmatch(rf"{_PODS}/(.+)-node-0-([0-9]+)/log", parts.path):
            return 200, self._log(self.nodes[match[1]][int(match[2])], query)
        return refusal(404, f"no {parts.path}")

    def _create(self, body: dict[str, Any]) -> tuple[int, Any]:
        check_train_job(body)
        name = body["metadata"]["name"]
        if self.refuse is not None:
            return refusal(*self.refuse)
        if name in self.jobs:
            return refusal(409, f"{name} already exists")
        if self.is_old:
            body["spec"].pop("runtimePatches")
        self.jobs[name] = body
        if not self.is_stuck and not self.is_old:
            self.nodes[name] = self._run(body["spec"]["trainer"])
        return 201, body

    def _run(self, spec: dict[str, Any]) -> list[Node]:
        """A process per node, as the torch runtime has it (Kubeflow Trainer, pkg/runtime/framework/plugins/torch)."""
        torch_variables = {
            "PET_NNODES": str(spec["numNodes"]),
            "PET_NPROC_PER_NODE": str(spec["numProcPerNode"]),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(free_port()),
        }
        own = {entry["name"]: entry["value"] for entry in spec["env"] if "value" in entry}
        basic = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        basic |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_GLOO_LAZY_INIT": "0"}
        python = spec["command"].index("python")
        nodes = []
        for rank in range(spec["numNodes"]):
            log = self.folder / f"node-{rank}.log"
            command = [sys.executable, *spec["command"][python + 1 :], *spec["args"]]
            env = {**basic, **own, **torch_variables, "PET_NODE_RANK": str(rank)}
            nodes.append(Node(partial(self._start, command, env, log), log))
        return nodes

    def _start(self, command: list[str], env: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
        with log.open("wb") as file:
            return subprocess.Popen(command, env=env, cwd=self.folder, stdout=file, stderr=subprocess.STDOUT)

    def _of_job(self, method: str, name: str) -> tuple[int, Any]:
        if name not in self.jobs:
            return refusal(404, f"no {name}")
        nodes = self.nodes.get(name, [])
        for node in nodes if method == "GET" else ():
            if node.code and sum(one.num_restarts for one in nodes) < self.backoff_limit:
                node.restart()
        codes = [node.code for node in nodes]
        if method == "DELETE":
            began = time.monotonic()
            for node in self.nodes.pop(name, ()):
                with suppress(ProcessLookupError):
                    node.process.terminate()
                node.process.wait(timeout=600)
            self.stopping_s = time.monotonic() - began
            return 200, self.jobs.pop(name)
        if codes and all(code == 0 for code in codes):
            self._set(name, "Complete", "JobsCompleted", "jobset completed successfully")
        elif any(codes):
            self._set(name, "Failed", "FailedJobs", "jobset failed due to one or more job failures")
        return 200, self.jobs[name]

    def _set(self, name: str, kind: str, reason: str, message: str) -> None:
        condition = {"type": kind, "status": "True", "reason": reason, "message": message}
        condition["lastTransitionTime"] = "2026-11-22T00:00:00Z"
        self.jobs[name]["status"] = {"conditions": [condition]}
        assert parse_train_job(self.jobs[name])

    def _pod(self, job: str, rank: int) -> dict[str, Any]:
        metadata = {"name": f"{job}-node-0-{rank}", "labels": {JOBSET_LABEL: job, INDEX_LABEL: str(rank)}}
        if self.is_stuck:
            message = "0/9 nodes: 9 Insufficient nvidia.com/gpu"
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
            return {"metadata": metadata, "status": {"phase": "Pending", "conditions": [condition]}}
        node = self.nodes[job][rank]
        code, before = node.code, node.code_before
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code, "reason": "Error"}}
        container = {"name": "node", "state": state, "image": "i", "imageID": "i", "ready": True}
        container["restartCount"] = node.num_restarts
        if before is not None:
            container["lastState"] = {"terminated": {"exitCode": before, "reason": "Error"}}
        phase = "Running" if code is None else "Failed" if code else "Succeeded"
        return {"metadata": metadata, "status": {"phase": phase, "containerStatuses": [container]}}

    @staticmethod
    def _log(node: Node, query: dict[str, str]) -> bytes:
        if query.get("follow"):
            node.process.wait(timeout=240)
        log = node.log_before if query.get("previous") == "True" else node.log
        lines = log.read_bytes().splitlines(keepends=True)
        return b"".join(lines[-int(query.get("tailLines", 10**6)) :])

    def end(self) -> None:
        for nodes in self.nodes.values():
            for node in nodes:
                node.process.kill()
                node.process.wait()
