"""Training on several nodes as a TrainJob of Kubeflow Trainer (trainer.kubeflow.org/v1alpha1, from Trainer 2.2 on)."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

JOB_VARIABLE = "ENGINERY_TRAIN_JOB"  # a TrainJobRequest as JSON: the step starts a job instead of training itself
POD_VARIABLE = "ENGINERY_POD_NAME"
NAMESPACE_VARIABLE = "ENGINERY_POD_NAMESPACE"
GROUP, VERSION, PLURAL = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
RUN_LABEL = "enginery.io/kfp-run"
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"  # of the job's pods; the Trainer names the JobSet as the TrainJob
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"  # of the pods: number of the node
CONTAINER = "node"  # which the Trainer's torch runtimes call the job that trains, too
GRACE_S = 120  # for a step of training and its checkpoint, when pods are asked to go


class TrainJobRequest(BaseModel):
    """What the settings of a cluster say of training on several nodes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    """The TrainJob, as the API takes it.

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
    entries = {str(entry["name"]): dict(entry) for entry in env}
    entries |= {name: {"name": name, "value": value} for name, value in request.env.items()}
    for name, (secret, key) in request.secrets.items():
        entries[name] = {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
    amounts = {"cpu": request.cpu, "memory": request.memory}
    amounts[request.gpu_resource] = str(request.num_gpus or "")
    limits = {name: amount for name, amount in amounts.items() if amount}
    return {
        "image": request.image,
        # The runtime says in PET_* variables how many nodes there are, which one this is, and where they meet.
        "command": ["python", "-m", "torch.distributed.run", "--max-restarts=0", "-m", "components.train"],
        "args": list(arguments),
        "env": list(entries.values()),
        "numNodes": request.num_nodes,
        "numProcPerNode": max(1, request.num_gpus),
        **({"resourcesPerNode": {"limits": limits, "requests": limits}} if limits else {}),
    }


def _patch(request: TrainJobRequest) -> dict[str, Any]:
    """What the runtime's pods get beside what their runtime gives them."""
    claims = {claim: f"claim-{number}" for number, claim in enumerate(dict.fromkeys(v[0] for v in request.volumes))}
    volumes: list[dict[str, Any]] = [
        {"name": name, "persistentVolumeClaim": {"claimName": claim}} for claim, name in claims.items()
    ]
    mounts = [
        {"name": claims[claim], "mountPath": path, **({"subPath": sub_path} if sub_path else {})}
        for claim, path, sub_path in request.volumes
    ]
    if request.shm:
        volumes.append({"name": "dshm", "emptyDir": {"medium": "Memory", "sizeLimit": request.shm}})
        mounts.append({"name": "dshm", "mountPath": "/dev/shm"})
    pod: dict[str, Any] = {
        "volumes": volumes,
        "containers": [{"name": CONTAINER, "volumeMounts": mounts}],
        "terminationGracePeriodSeconds": GRACE_S,
        "nodeSelector": dict(request.node_selector),
        "tolerations": [dict(toleration) for toleration in request.tolerations],
        "imagePullSecrets": [{"name": name} for name in request.image_pull_secrets],
        "serviceAccountName": request.service_account,
    }
    pod = {name: value for name, value in pod.items() if value}
    job = {"name": CONTAINER, "template": {"spec": {"template": {"spec": pod}}}}
    return {"manager": "enginery.io/train", "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
