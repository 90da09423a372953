"""A TrainJob of Kubeflow Trainer (v1alpha1, from Trainer 2.0): its specification, and its life in a cluster."""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.config import ConfigException
from pydantic import Field

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.records import Record

JOB_VARIABLE = "ENGINERY_TRAIN_JOB"  # a TrainJobRequest as JSON: the step starts a job instead of training itself
VOLUME_VARIABLE = "ENGINERY_TRAIN_VOLUME"  # a folder that outlives the pod, for checkpoints of one node
POD_VARIABLE = "ENGINERY_POD_NAME"
NAMESPACE_VARIABLE = "ENGINERY_POD_NAMESPACE"
GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
RUN_LABEL = "enginery.io/kfp-run"
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"  # of the job's pods; the Trainer names the JobSet as the TrainJob
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"  # of the pods: number of the node
CONTAINER = "node"  # which the Trainer's torch runtimes call the job that trains, too
GRACE_S = 120  # for a step of training and its checkpoint, when pods are asked to go; Trainer 2.2 leaves it at 30
_TORCHRUN_GRACE_S = GRACE_S - 10  # which torchrun itself gives its processes; it says 30 unless told
# SIGTERM does nothing to a container's first process that does not handle it, as torchrun until all nodes have met.
_SIGNALLED = ("timeout", "--foreground", "0")


class TrainJobRequest(Record):
    """The settings of a cluster for training on several nodes."""

    num_nodes: int = Field(ge=2, description="Pods, each on a node.")
    num_gpus: int = Field(ge=0, description="GPUs of each; 0 trains on CPUs, one process per node.")
    gpu_resource: str = Field(description="Kubernetes' name of them.")
    image: str = Field(description="Image of train.")
    runtime: str = Field(description="Name of the ClusterTrainingRuntime.")
    cpu: str = Field("", description="Processors of each node; empty for no limit.")
    memory: str = Field("", description="Memory of each node; empty for no limit.")
    shm: str = Field("", description="Size of /dev/shm; empty for the container runtime's 64 MB.")
    node_selector: dict[str, str] = Field({}, description="Labels that nodes must have.")
    tolerations: tuple[dict[str, str], ...] = Field((), description="As in a pod.")
    env: dict[str, str] = Field({}, description="Environment variables.")
    secrets: dict[str, tuple[str, str]] = Field({}, description="Environment variable: (Secret, key in it).")
    volumes: tuple[tuple[str, str, str], ...] = Field(description="(claim, folder in the pods, folder in the volume).")
    shared: str = Field(description="Which of these folders all nodes write.")
    image_pull_secrets: tuple[str, ...] = Field((), description="Names of Secrets.")
    service_account: str = Field("", description="Of the pods; empty for the runtime's.")
    timeout_s: int = Field(0, ge=0, description="Seconds after which the job is ended; 0 for no limit.")


def train_job(
    request: TrainJobRequest,
    *,
    name: str,
    arguments: Sequence[str],
    env: Sequence[Mapping[str, Any]],
    owner: Mapping[str, Any],
    run_id: str,
) -> dict[str, Any]:
    """Return the TrainJob, as the API takes it.

    Args:
        request: from the settings.
        name: of the job, up to 40 characters, from which those of its pods are made.
        arguments: of `python -m components.train`.
        env: entries of the container's environment beside the request's.
        owner: ownerReference: with the pod of the step goes the job.
        run_id: of the KFP run.
    """
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "TrainJob",
        "metadata": {
            "name": name,
            "labels": {RUN_LABEL: run_id, "app.kubernetes.io/managed-by": "enginery"},
            "ownerReferences": [dict(owner)],
        },
        "spec": {
            "runtimeRef": {"apiGroup": GROUP, "kind": "ClusterTrainingRuntime", "name": request.runtime},
            "trainer": _trainer(request, arguments, env),
            "runtimePatches": [_patch(request)],
            **({"activeDeadlineSeconds": request.timeout_s} if request.timeout_s else {}),
        },
    }


def _trainer(request: TrainJobRequest, arguments: Sequence[str], env: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    shutdown = {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(_TORCHRUN_GRACE_S)}
    entries = {str(entry["name"]): dict(entry) for entry in (shutdown, *env)}
    entries |= {name: {"name": name, "value": value} for name, value in request.env.items()}
    for name, (secret, key) in request.secrets.items():
        entries[name] = {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
    amounts = {"cpu": request.cpu, "memory": request.memory}
    amounts[request.gpu_resource] = str(request.num_gpus or "")
    limits = {name: amount for name, amount in amounts.items() if amount}
    return {
        "image": request.image,
        # The runtime says in PET_* variables how many nodes there are, which one this is, and where they meet.
        "command": [*_SIGNALLED, "python", "-m", "torch.distributed.run", "--max-restarts=0", "-m", "components.train"],
        "args": list(arguments),
        "env": list(entries.values()),
        "numNodes": request.num_nodes,
        "numProcPerNode": max(1, request.num_gpus),
        **({"resourcesPerNode": {"limits": limits, "requests": limits}} if limits else {}),
    }


def _patch(request: TrainJobRequest) -> dict[str, Any]:
    """Return what the pods get beside what their runtime gives them."""
    # The API takes a volume's name once among the mounts of a container: a claim that is mounted twice is two volumes.
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    for number, (claim, path, sub_path) in enumerate(request.volumes):
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"claim-{number}", "mountPath": path, **({"subPath": sub_path} if sub_path else {})})
    if request.shm:
        volumes.append({"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": request.shm}})
        mounts.append({"name": "dshm", "mountPath": "/dev/shm"})
    container = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    pod: dict[str, Any] = {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "volumes": volumes,
        "containers": [{"name": CONTAINER, "volumeMounts": mounts, "securityContext": container}],
        "terminationGracePeriodSeconds": GRACE_S,
        "nodeSelector": dict(request.node_selector),
        "tolerations": [dict(toleration) for toleration in request.tolerations],
        "imagePullSecrets": [{"name": name} for name in request.image_pull_secrets],
        "serviceAccountName": request.service_account,
    }
    pod = {name: value for name, value in pod.items() if value}
    # A sidecar of Istio would take the connections between the nodes.
    template = {"metadata": {"labels": {"sidecar.istio.io/inject": "false"}}, "spec": pod}
    job = {"name": CONTAINER, "template": {"spec": {"template": template}}}
    return {"manager": "enginery.io/train", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}


_LAST_LINES = 20  # of a pod that failed
_LAST_LINES_S = 3.0  # for what a pod has just printed
_REQUEST_S = 20  # whole seconds: the client of Kubernetes ignores any other limit
_NO_PODS_S = 60.0  # after which it is said that there are none: a quota or a policy may refuse them
_MAX_LOST = 30  # questions in a row without an answer, before the API server counts as gone
_UNREACHABLE = (urllib3.exceptions.HTTPError, OSError)


@dataclass(frozen=True, kw_only=True)
class Pod:
    """This process's own pod."""

    name: str
    namespace: str
    uid: str
    env: tuple[dict[str, Any], ...]  # of its container, as Kubernetes' API has it

    @property
    def reference(self) -> dict[str, Any]:
        """An ownerReference: its owner is deleted with this pod."""
        return {"apiVersion": "v1", "kind": "Pod", "name": self.name, "uid": self.uid}


def kubernetes_api(retries: urllib3.Retry) -> Any:
    """Kubernetes' API, from inside a pod or by a KUBECONFIG.

    Raises:
        kubernetes.config.ConfigException: there is neither.
    """
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except ConfigException:
        config.load_kube_config(client_configuration=configuration)
    configuration.retries = retries
    return client.ApiClient(configuration)


def connect() -> Any:
    """Kubernetes' API for this pod.

    Raises:
        UserError: there is none.
    """
    try:
        return kubernetes_api(urllib3.Retry(2, backoff_factor=0.5))
    except (ConfigException, OSError) as error:
        raise UserError(
            f"training on several nodes needs Kubernetes' API, and this is no pod with a service account ({error}). "
            "Let the pod mount its service account's token (automountServiceAccountToken)",
            code="no-kubernetes",
        ) from None


@contextmanager
def translate_errors(action: str, namespace: str) -> Iterator[None]:
    """Turn a refusal of the API server into one message."""
    try:
        yield
    except client.ApiException as error:
        message = _message_of(error)
        if error.status == 403:
            raise UserError(
                f"this pod may not {action} in the namespace {namespace}: {message}. Bind the Role of the chart "
                "(trainjobs: create, get, delete; pods: get, list; pods/log: get) to its service account",
                code="forbidden",
            ) from None
        text = f"can't {action} in the namespace {namespace}: {error.status} {message}"
        raise EngineryError(text, code="api-error") from None
    except _UNREACHABLE as error:
        raise EngineryError(f"can't {action}: Kubernetes' API does not answer: {error}", code="api-error") from None


def _message_of(error: Any) -> str:
    try:
        return str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)


def this_pod(api: Any) -> Pod:
    """Return the pod that this runs in.

    Raises:
        UserError: it is not known, or may not be read.
    """
    name, namespace = os.environ.get(POD_VARIABLE), os.environ.get(NAMESPACE_VARIABLE)
    if not name or not namespace:
        raise UserError(
            f"{POD_VARIABLE} and {NAMESPACE_VARIABLE} are not set; compile the pipeline with `enginery compile "
            "--settings`, which sets them",
            code="no-pod-name",
        )
    with translate_errors("read its own pod", namespace):
        raw = client.CoreV1Api(api).read_namespaced_pod(name, namespace, _request_timeout=_REQUEST_S)
    pod = api.sanitize_for_serialization(raw)
    env = [entry for container in pod["spec"]["containers"] for entry in container.get("env") or ()]
    return Pod(name=name, namespace=namespace, uid=pod["metadata"]["uid"], env=tuple(env))


@dataclass
class Job:
    """One TrainJob."""

    api: Any
    namespace: str
    name: str
    may_exist: bool = False  # from before it is asked for, until the API server refuses it
    _follower: threading.Thread | None = None
    _tail: "deque[str]" = field(default_factory=lambda: deque(maxlen=_LAST_LINES))  # of node 0
    _last_words: dict[tuple[int, str, int], str] = field(default_factory=dict)  # by node, pod and number of the try
    _ended: threading.Event = field(default_factory=threading.Event)

    def create(self, body: dict[str, Any]) -> bool:
        """Start it. Returns False if there is one of this name, which an earlier try of the same step left.

        Raises:
            UserError: the cluster has no Kubeflow Trainer, one that is too old, or refuses the job.
        """
        self.may_exist = True
        try:
            made = self._ask("create", body)
        except _UNREACHABLE:
            with translate_errors("create TrainJobs", self.namespace):
                raise
        except client.ApiException as error:
            self.may_exist = error.status == 409 or error.status >= 500
            if error.status == 409:
                return False
            if error.status == 404:
                raise UserError(
                    f"this cluster knows no TrainJob ({GROUP}/{VERSION}): install Kubeflow Trainer 2.2 or newer, or "
                    "train on one node (--num-nodes 1)",
                    code="no-trainer",
                ) from None
            if error.status in (400, 422):
                text = f"Kubeflow Trainer refuses the TrainJob: {_message_of(error)}"
                raise UserError(text, code="train-job-refused") from None
            with translate_errors("create TrainJobs", self.namespace):
                raise
        if "runtimePatches" not in made["spec"]:  # the API server drops what it does not know
            self.delete(0)
            raise UserError(
                "this cluster's Kubeflow Trainer is older than 2.2: it does not know runtimePatches, so the pods would "
                "have no volume. Update it, or train on one node (--num-nodes 1)",
                code="old-trainer",
            )
        return True

    def _ask(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """Do something with TrainJobs, such as "get" with the name of one."""
        method = getattr(client.CustomObjectsApi(self.api), f"{verb}_namespaced_custom_object")
        return method(GROUP, VERSION, self.namespace, PLURAL, *arguments, _request_timeout=_REQUEST_S, **options)

    def wait(
        self,
        say: Callable[[str], None],
        show: Callable[[str], None],
        poll_s: float,
        is_final: Callable[[], bool] = lambda: False,
    ) -> None:
        """Until it is complete.

        Args:
            say: takes notes for a person.
            show: takes each line that node 0 prints.
            poll_s: seconds between two looks.
            is_final: True if the training has failed so that pods which start again, as JobSet has them do six times
                and for ten minutes, would fail as before.

        Raises:
            EngineryError: it failed, was deleted, or the API server is gone.
        """
        lost, said, began = 0, "", time.monotonic()
        try:
            while True:
                try:
                    job = self._ask("get", self.name)
                    pods = self.pods()
                    lost = 0
                except (client.ApiException, *_UNREACHABLE) as error:
                    if getattr(error, "status", 0) == 404:
                        text = f"somebody deleted the TrainJob {self.name} while it was at work"
                        raise EngineryError(text, code="train-job-deleted") from None
                    lost += 1
                    if lost >= _MAX_LOST or getattr(error, "status", 0) == 403:
                        with translate_errors("look at TrainJobs and pods", self.namespace):
                            raise
                else:
                    self._note_ends(pods, say)
                    if self._is_complete(job):
                        return
                    if is_final():
                        raise self.failed("its pods would fail again")
                    self._follow(pods, show)
                    troubles = {index_of(pod): trouble_of(pod) for pod in pods}
                    trouble = "; ".join(f"node {index}: {text}" for index, text in troubles.items() if text)
                    if not pods and time.monotonic() - began > _NO_PODS_S:
                        trouble = f"there are none; kubectl -n {self.namespace} describe jobset,job says why"
                    if trouble not in ("", said):
                        say(f"waiting for pods: {trouble}")
                    said = trouble
                time.sleep(poll_s)
        except KeyboardInterrupt:
            self._ended.set()  # nothing comes before the job's removal: who started this may end it within a second
            raise
        finally:
            if self._follower is not None and not self._ended.is_set():
                self._follower.join(timeout=_LAST_LINES_S)
            self._ended.set()

    def _is_complete(self, job: dict[str, Any]) -> bool:
        conditions = {entry["type"]: entry for entry in (job.get("status") or {}).get("conditions") or ()}
        if conditions.get("Complete", {}).get("status") == "True":
            return True
        failed = conditions.get("Failed", {})
        if failed.get("status") != "True":
            return False
        why = ": ".join(filter(None, (failed.get("reason"), failed.get("message")))) or "it does not say why"
        raise self.failed(why)

    def failed(self, why: str) -> "JobFailed":
        """Return the error, with the last lines of each node's last end; of node 0 if no end was seen."""
        newest = {index: text for (index, _, _), text in self._last_words.items()}
        text = "\n".join(newest[index] for index in sorted(newest))
        if not text and self._tail:
            text = "node 0:\n" + "\n".join(self._tail)
        return JobFailed(f"the TrainJob {self.name} failed ({why})", text)

    def pods(self) -> list[Any]:
        """Its pods, by the number of their node."""
        selector = f"{JOBSET_LABEL}={self.name}"
        core = client.CoreV1Api(self.api)
        found = core.list_namespaced_pod(self.namespace, label_selector=selector, _request_timeout=_REQUEST_S)
        return sorted(found.items, key=lambda pod: (index_of(pod), pod.metadata.name))

    def _note_ends(self, pods: list[Any], say: Callable[[str], None]) -> None:
        """Keep the last lines of containers that failed: they go when one starts again, or the job removes its pods."""
        for pod in pods:
            for status in _statuses(pod):
                ended, before = (state and state.terminated for state in (status.state, status.last_state))
                end = ended or before
                key = (index_of(pod), pod.metadata.name, status.restart_count - (0 if ended else 1))
                if not end or end.exit_code == 0 or key in self._last_words:
                    continue
                lines = ""
                with suppress(client.ApiException, *_UNREACHABLE):
                    lines = self._log(
                        pod.metadata.name, previous=not ended, tail_lines=_LAST_LINES, _request_timeout=_REQUEST_S
                    )
                why = f"node {key[0]}, {end.reason} (exit code {end.exit_code})"
                self._last_words[key] = f"{why}:\n{lines.strip()}"
                say(f"a pod ended: {why}")

    def _log(self, pod: str, **options: Any) -> Any:
        return client.CoreV1Api(self.api).read_namespaced_pod_log(pod, self.namespace, container=CONTAINER, **options)

    def _follow(self, pods: list[Any], show: Callable[[str], None]) -> None:
        """Pass on what node 0 prints, from when its container has begun."""
        if self._follower is not None and self._follower.is_alive():
            return
        running = (pod for pod in pods if any(status.state and status.state.running for status in _statuses(pod)))
        first = next((pod for pod in running if index_of(pod) == 0), None)
        if first is None:
            return
        arguments = (first.metadata.name, show, len(self._tail) > 0)
        self._follower = threading.Thread(target=self._read, args=arguments, name="log-of-node-0", daemon=True)
        self._follower.start()

    def _read(self, pod: str, show: Callable[[str], None], again: bool) -> None:
        since = {"since_seconds": 10} if again else {}  # of a connection that broke some lines may be shown twice
        with suppress(client.ApiException, *_UNREACHABLE):
            for raw in self._log(pod, follow=True, _preload_content=False, **since):
                line = raw.decode(errors="replace").rstrip("\n")
                self._tail.append(line)
                show(line)
                if self._ended.is_set():
                    return

    def delete(self, patience_s: float) -> bool:
        """Remove it with all that it has made, and wait for its pods to go. Returns whether they have."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                self._ask("delete", self.name, propagation_policy="Foreground")
            except client.ApiException as error:
                if error.status not in (404, 409):
                    with translate_errors("delete TrainJobs", self.namespace):
                        raise
                with translate_errors("look at pods", self.namespace):
                    if error.status == 404 and not self.pods():
                        return True
            except _UNREACHABLE:
                pass  # tried again
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.5)


class JobFailed(EngineryError):
    """The TrainJob failed. `last_words` is what its pods wrote last."""

    def __init__(self, message: str, last_words: str) -> None:
        super().__init__(message, code="train-job-failed")
        self.last_words = last_words


def _statuses(pod: Any) -> list[Any]:
    """Return the status of a pod's container that trains, once there is one."""
    return [status for status in pod.status.container_statuses or () if status.name == CONTAINER]


def index_of(pod: Any) -> int:
    """Return the number of a pod's node."""
    labels, annotations = pod.metadata.labels or {}, pod.metadata.annotations or {}
    return int(labels.get(INDEX_LABEL) or annotations.get(INDEX_LABEL) or 0)


def trouble_of(pod: Any) -> str:
    """Return why a pod does not begin; "" if it does or has."""
    for status in pod.status.container_statuses or ():
        waiting = status.state.waiting if status.state else None
        if waiting and waiting.reason not in ("ContainerCreating", "PodInitializing"):
            return f"{waiting.reason} {' '.join((waiting.message or '').split())}".strip()
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"{condition.reason} {' '.join((condition.message or '').split())}".strip()
    return ""
