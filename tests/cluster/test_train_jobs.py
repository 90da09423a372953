"""TrainJobs on a real API server: taken, waited for, explained and removed, with the rights that the step needs."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from components.common.contracts.errors import EngineryError, UserError
from components.common.contracts.manifests import Artifact, CheckpointManifest, DatasetManifest, load
from components.common.process.steplog import StepLog
from components.train.nodes import train_on_nodes
from components.train.train_job import (
    GROUP,
    INDEX_LABEL,
    JOBSET_LABEL,
    NAMESPACE_VARIABLE,
    PLURAL,
    POD_VARIABLE,
    VERSION,
    Job,
    JobFailed,
    this_pod,
    train_job,
)
from enginery.doctor.cluster_nodes import RIGHTS
from tests.unit.train.conftest import config, tiny_dataset  # noqa: F401
from tests.unit.train.test_nodes import FULL, request_for
from tests.unit.train.trainer_cluster import TrainerCluster

pytestmark = pytest.mark.cluster
RUNNER = "runner"
NO_SCHEDULER = "none"  # pods that only the tests give a state, on clusters with nodes, too


@pytest.fixture
def runner(api: Any, namespace: str) -> Any:
    """The API as the step's service account has it: the rights that the doctor asks for, and no others."""
    labels = client.V1ObjectMeta(name=RUNNER)
    client.CoreV1Api(api).create_namespaced_service_account(namespace, client.V1ServiceAccount(metadata=labels))
    rights = client.RbacAuthorizationV1Api(api)
    rules = [
        client.V1PolicyRule(api_groups=[group], resources=[f"{name}/{sub}" if sub else name], verbs=list(verbs))
        for group, name, sub, verbs in RIGHTS
    ]
    rights.create_namespaced_role(namespace, client.V1Role(metadata=labels, rules=rules))
    reference = client.V1RoleRef(api_group="rbac.authorization.k8s.io", kind="Role", name=RUNNER)
    subject = client.RbacV1Subject(kind="ServiceAccount", name=RUNNER, namespace=namespace)
    binding = client.V1RoleBinding(metadata=labels, role_ref=reference, subjects=[subject])
    rights.create_namespaced_role_binding(namespace, binding)
    return _as(api, namespace, RUNNER)


def _as(api: Any, namespace: str, account: str) -> Any:
    other = client.ApiClient(api.configuration)
    other.set_default_header("Impersonate-User", f"system:serviceaccount:{namespace}:{account}")
    return other


@pytest.fixture
def own_pod(api: Any, namespace: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The step's."""
    env = [client.V1EnvVar(name="MLFLOW_TRACKING_URI", value="http://mlflow:5000")]
    container = client.V1Container(name="main", image="train", env=env)
    pod = client.V1Pod(
        metadata=client.V1ObjectMeta(name="step"),
        spec=client.V1PodSpec(containers=[container], restart_policy="Never", scheduler_name=NO_SCHEDULER),
    )
    client.CoreV1Api(api).create_namespaced_pod(namespace, pod)
    monkeypatch.setenv(POD_VARIABLE, "step")
    monkeypatch.setenv(NAMESPACE_VARIABLE, namespace)
    return "step"


@pytest.fixture
def garbage_collector(api: Any, namespace: str) -> Iterator[None]:
    """Kubernetes' own, where no controllers run: what is deleted in the foreground goes after what belongs to it."""
    ended = threading.Event()

    def collect() -> None:
        objects = client.CustomObjectsApi(api)
        while not ended.wait(0.1):
            with suppress(client.ApiException):
                for job in objects.list_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL)["items"]:
                    if "foregroundDeletion" in (job["metadata"].get("finalizers") or ()):
                        name, body = job["metadata"]["name"], {"metadata": {"finalizers": None}}
                        objects.patch_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name, body)

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    yield
    ended.set()
    thread.join()


@pytest.fixture
def job(runner: Any, namespace: str, own_pod: str, has_real_trainer: bool, garbage_collector: None) -> Job:
    return Job(runner, namespace, "enginery-train-0123456789")


def unmanaged(*arguments: Any, **options: Any) -> dict[str, Any]:
    """A TrainJob that the Trainer's controller leaves to others, where one runs: here to the tests."""
    body = train_job(*arguments, **options)
    body["spec"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    return body


def body_for(job: Job) -> dict[str, Any]:
    pod = this_pod(job.api)
    return unmanaged(
        FULL, name=job.name, arguments=["--dataset", "d"], env=pod.env, owner=pod.reference, run_id="0f5c4a1e"
    )


def set_condition(api: Any, job: Job, kind: str, message: str) -> None:
    """As the Trainer's controller does."""
    entry = {"type": kind, "status": "True", "reason": f"Jobs{kind}", "message": message}
    status = {"status": {"conditions": [{**entry, "lastTransitionTime": "2026-11-22T00:00:00Z"}]}}
    client.CustomObjectsApi(api).patch_namespaced_custom_object_status(
        GROUP, VERSION, job.namespace, PLURAL, job.name, status
    )


def add_pod(api: Any, job: Job, rank: int, phase: str, **state: Any) -> None:
    """A pod of the job, in some state."""
    labels = {JOBSET_LABEL: job.name, INDEX_LABEL: str(rank)}
    name = f"{job.name}-node-0-{rank}"
    container = client.V1Container(name="node", image="train")
    core = client.CoreV1Api(api)
    core.create_namespaced_pod(
        job.namespace,
        client.V1Pod(
            metadata=client.V1ObjectMeta(name=name, labels=labels),
            spec=client.V1PodSpec(containers=[container], scheduler_name=NO_SCHEDULER),
        ),
    )
    status = client.V1ContainerStatus(
        name="node", image="train", image_id="", ready=False, restart_count=0, state=client.V1ContainerState(**state)
    )
    patch = client.V1Pod(status=client.V1PodStatus(phase=phase, container_statuses=[status]))
    core.patch_namespaced_pod_status(name, job.namespace, patch)


def later(action: Callable[[], Any], seconds: float = 1.0) -> None:
    threading.Timer(seconds, action).start()


def test_the_server_takes_the_job_whole(api: Any, job: Job, has_real_trainer: bool) -> None:
    body = body_for(job)
    objects = client.CustomObjectsApi(api)
    assert job.create(body) is True
    made = objects.get_namespaced_custom_object(GROUP, VERSION, job.namespace, PLURAL, job.name)
    made["spec"]["runtimePatches"][0].pop("time", None)  # which the Trainer adds
    assert {key: made["spec"][key] for key in body["spec"]} == body["spec"]  # nothing was dropped
    assert made["metadata"]["ownerReferences"][0]["uid"] == this_pod(api).uid
    assert job.create(body) is False  # it is there
    if has_real_trainer:
        wrong = {**body, "spec": {**body["spec"], "trainer": {**body["spec"]["trainer"], "numNodes": "four"}}}
        wrong["metadata"] = {**body["metadata"], "name": "wrong"}
        with pytest.raises(UserError, match="refuses the TrainJob"):
            Job(job.api, job.namespace, "wrong").create(wrong)


def test_a_complete_job_is_waited_for_and_removed(api: Any, job: Job) -> None:
    job.create(body_for(job))
    later(lambda: set_condition(api, job, "Complete", "done"))
    job.wait(print, print, 0.2)
    assert job.delete(30) is True
    with pytest.raises(client.ApiException) as gone:
        client.CustomObjectsApi(api).get_namespaced_custom_object(GROUP, VERSION, job.namespace, PLURAL, job.name)
    assert gone.value.status == 404


def test_a_failed_job_is_explained(api: Any, job: Job) -> None:
    job.create(body_for(job))
    ended = client.V1ContainerStateTerminated(exit_code=137, reason="OOMKilled")
    add_pod(api, job, 0, "Running", running=client.V1ContainerStateRunning())
    add_pod(api, job, 1, "Failed", terminated=ended)
    later(lambda: set_condition(api, job, "Failed", "jobset failed"))
    with pytest.raises(JobFailed, match=r"failed \(JobsFailed: jobset failed\)") as failed:
        job.wait(print, print, 0.2)
    assert "node 1, OOMKilled (exit code 137)" in failed.value.last_words
    assert "node 0" not in failed.value.last_words


def test_pods_that_do_not_begin(api: Any, job: Job) -> None:
    job.create(body_for(job))
    waiting = client.V1ContainerStateWaiting(reason="ImagePullBackOff", message="no such image")
    add_pod(api, job, 0, "Pending", waiting=waiting)
    said: list[str] = []
    later(lambda: set_condition(api, job, "Complete", "after all"))
    job.wait(said.append, print, 0.2)
    assert said == ["waiting for pods: node 0: ImagePullBackOff no such image"]


def test_a_job_that_somebody_deleted(api: Any, job: Job) -> None:
    job.create(body_for(job))
    delete = client.CustomObjectsApi(api).delete_namespaced_custom_object
    later(lambda: delete(GROUP, VERSION, job.namespace, PLURAL, job.name))
    with pytest.raises(EngineryError, match="somebody deleted the TrainJob"):
        job.wait(print, print, 0.2)


def test_without_the_role_nothing_is_started(api: Any, job: Job) -> None:
    client.CoreV1Api(api).create_namespaced_service_account(
        job.namespace, client.V1ServiceAccount(metadata=client.V1ObjectMeta(name="stranger"))
    )
    stranger = _as(api, job.namespace, "stranger")
    with pytest.raises(UserError, match="may not read its own pod in the namespace"):
        this_pod(stranger)
    with pytest.raises(UserError, match="may not create TrainJobs"):
        Job(stranger, job.namespace, job.name).create(body_for(job))


@pytest.mark.slow
def test_two_nodes_train(
    api: Any,
    job: Job,
    tiny_dataset: Artifact[DatasetManifest],  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole step, with a controller that starts a process for each node of the job that the server has taken."""
    (tmp_path / "shared").mkdir()
    nodes = TrainerCluster(tmp_path)
    monkeypatch.setattr("components.train.nodes.connect", lambda: job.api)
    monkeypatch.setattr("components.train.nodes.train_job", unmanaged)
    monkeypatch.setenv("ENGINERY_KFP_RUN_ID", "0f5c4a1e")

    def control() -> None:
        objects = client.CustomObjectsApi(api)
        while not (found := objects.list_namespaced_custom_object(GROUP, VERSION, job.namespace, PLURAL)["items"]):
            time.sleep(0.2)
        started = nodes._run(found[0]["spec"]["trainer"])
        codes = [node.process.wait() for node in started]
        made = Job(api, job.namespace, found[0]["metadata"]["name"])
        set_condition(api, made, "Failed" if any(codes) else "Complete", str(codes))

    threading.Thread(target=control, daemon=True).start()
    small = config(epochs=1, architecture="squeezenet1_1")
    train_on_nodes(request_for(tmp_path), small, StepLog("train"), tiny_dataset.path, tmp_path / "out", poll_s=0.5)
    assert len(load(tmp_path / "out", CheckpointManifest, verify=("",)).manifest.history) == 1
    left = client.CustomObjectsApi(api).list_namespaced_custom_object(GROUP, VERSION, job.namespace, PLURAL)["items"]
    assert left == []
