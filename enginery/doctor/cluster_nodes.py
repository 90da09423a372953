"""Checks of what a cluster gives the steps that compute: GPU nodes, their quota, and Kubeflow Trainer."""

import json
from typing import Any

from kubernetes import client

from components.train.train_job import CONTAINER, GROUP, PLURAL, VERSION
from enginery.cluster.resources import selector_of, tolerations_of
from enginery.cluster.server import KFP_NAMESPACE
from enginery.cluster.settings import (
    GPU_STEPS,
    SHARED_MEMORY,
    GpuPlacement,
    Placement,
    Toleration,
    TrainPlacement,
    size_bytes,
)
from enginery.doctor.access import ClusterAccess
from enginery.doctor.checks import Finding, absent, missing, ok, warning
from enginery.doctor.gpu import OLDEST_DRIVER, driver_number
from enginery.doctor.machine import MIN_SHM_BYTES
from enginery.formats import size_text

_CUDA = 13  # of the images: containers/versions.hcl
# Labels that NVIDIA's GPU feature discovery gives to nodes, now and before.
_DRIVER_LABELS = (
    ("nvidia.com/cuda.driver-version.full",),
    *(
        tuple(f"nvidia.com/cuda.{prefix}.{part}" for part in parts)
        for prefix, parts in (("driver-version", ("major", "minor", "revision")), ("driver", ("major", "minor", "rev")))
    ),
)
_OPERATOR = (
    "install NVIDIA's GPU operator, or its device plugin and GPU feature discovery (docs.nvidia.com/datacenter/"
    "cloud-native/gpu-operator)"
)


def _gpu_steps(cluster: ClusterAccess) -> dict[str, GpuPlacement]:
    """Steps that ask for GPUs."""
    placed = {step: cluster.settings.of(step) for step in GPU_STEPS}
    return {step: one for step, one in placed.items() if isinstance(one, GpuPlacement) and one.gpu.count}


def _num_nodes(placed: Placement) -> int:
    return placed.num_nodes if isinstance(placed, TrainPlacement) else 1


def gpu_nodes(cluster: ClusterAccess) -> Finding:
    """Nodes that each GPU step fits, as many as it asks for."""
    steps = _gpu_steps(cluster)
    if not steps:
        return absent("no step asks for a GPU")
    with_gpus = [node for node in cluster.nodes if any(_gpus(node, one.gpu.resource) for one in steps.values())]
    if not with_gpus:
        resources = ", ".join(sorted({one.gpu.resource for one in steps.values()}))
        return missing(
            f"of {len(cluster.nodes)} nodes none offers {resources}",
            f"{_OPERATOR}, or set gpu.count: 0 for {', '.join(steps)} to work on CPUs",
        )
    for step, placed in steps.items():
        if len(_fitting(with_gpus, placed)) < _num_nodes(placed):
            return _why_none(step, placed, with_gpus)
    kinds = sorted({_product(node) for node in with_gpus})
    counts = "; ".join(
        f"{sum(_gpus(node, 'nvidia.com/gpu') for node in with_gpus if _product(node) == kind)} x {kind}"
        for kind in kinds
    )
    return ok(f"{len(with_gpus)} nodes with {counts}; {', '.join(steps)} fit")


def drivers(cluster: ClusterAccess) -> Finding:
    """The drivers of the nodes that GPU steps may run on, against the images' CUDA."""
    nodes = {node.metadata.name: node for one in _gpu_steps(cluster).values() for node in _fitting(cluster.nodes, one)}
    if not nodes:
        return absent("needs nodes that GPU steps fit")
    found = {name: _driver(node) for name, node in nodes.items()}
    oldest = OLDEST_DRIVER[_CUDA]
    old = [
        f"{n} has {text}" for n, text in sorted(found.items()) if text and driver_number(text) < driver_number(oldest)
    ]
    if old:
        return missing(
            f"the images' CUDA {_CUDA} needs driver {oldest} or newer: {', '.join(old)}",
            "update the driver (GPU operator: driver.version), or keep steps off these nodes with node_selector",
        )
    if unknown := sorted(name for name, text in found.items() if not text):
        return warning(f"no label says which driver {', '.join(unknown)} has; CUDA {_CUDA} needs {oldest}", _OPERATOR)
    return ok(f"{', '.join(sorted(set(found.values())))} (CUDA {_CUDA} needs {oldest})")


def shared_memory(cluster: ClusterAccess) -> Finding:
    """/dev/shm against the memory that a GPU step has: its own, the namespace's default, or a node's."""
    steps = {step: one for step, one in _gpu_steps(cluster).items() if one.shm}
    if not steps:
        return absent("no step asks for shared memory")
    ranges = cluster.core.list_namespaced_limit_range(cluster.namespace).items
    limits = [limit for entry in ranges for limit in entry.spec.limits if limit.type == "Container"]
    default = next((memory for limit in limits if (memory := (limit.default or {}).get("memory"))), "")
    for step, placed in steps.items():
        shm = size_bytes(placed.shm)
        if not placed.memory and default and size_bytes(default) <= shm:
            return missing(
                f"a limit range of {cluster.namespace} gives containers {default} of memory, and {step} has "
                f"{placed.shm} of /dev/shm, which counts as memory",
                f"set {step}.memory to more than that in the settings",
            )
        sizes = [size_bytes(node.status.allocatable["memory"]) for node in _fitting(cluster.nodes, placed)]
        if sizes and max(sizes) <= shm:
            return missing(
                f"{step} has {placed.shm} of /dev/shm, and its largest node {size_text(int(max(sizes)))} of memory",
                f"set {step}.shm to less",
            )
    if small := [step for step, placed in steps.items() if size_bytes(placed.shm) < MIN_SHM_BYTES]:
        return warning(
            f"{', '.join(f'{step} {steps[step].shm}' for step in small)}: under {size_text(MIN_SHM_BYTES)} training "
            "on several GPUs ends in bus errors",
            f"set {small[0]}.shm to {SHARED_MEMORY}",
        )
    return ok(", ".join(f"{step} {one.shm}" for step, one in steps.items()) + ", in memory")


def quota(cluster: ClusterAccess) -> Finding:
    """GPUs that the namespace may have, against what each step asks for."""
    quotas = cluster.core.list_namespaced_resource_quota(cluster.namespace).items
    for step, placed in _gpu_steps(cluster).items():
        number, key = placed.gpu.count * _num_nodes(placed), f"requests.{placed.gpu.resource}"
        for entry in quotas:
            hard = (entry.status.hard or {}) if entry.status else {}
            if key in hard and int(hard[key]) < number:
                return missing(
                    f"the quota {entry.metadata.name} of {cluster.namespace} allows {hard[key]} of "
                    f"{placed.gpu.resource}, and {step} asks for {number}",
                    f"have the quota raised, or lower {step}.gpu.count",
                )
    return ok(f"{len(quotas)} quotas in {cluster.namespace}, none too small")


def _gpus(node: Any, resource: str) -> int:
    return int((node.status.allocatable or {}).get(resource, 0))


def _product(node: Any) -> str:
    return str((node.metadata.labels or {}).get("nvidia.com/gpu.product", "GPU of unknown type"))


def _driver(node: Any) -> str:
    """A node's driver, such as "580.95.05"; "" where no label says."""
    labels = node.metadata.labels or {}
    for names in _DRIVER_LABELS:
        if all(name in labels for name in names):
            return ".".join(str(labels[name]) for name in names)
    return ""


def _fitting(nodes: list[Any], placed: GpuPlacement) -> list[Any]:
    """Nodes that a step may run on and that are large enough when nothing else runs there."""
    return [
        node
        for node in nodes
        if _matches(node, placed)
        and not _repelling(node, placed)
        and _gpus(node, placed.gpu.resource) >= placed.gpu.count
        and (not placed.memory or size_bytes(node.status.allocatable["memory"]) >= size_bytes(placed.memory))
        and (not placed.cpu or _cores(node.status.allocatable["cpu"]) >= _cores(placed.cpu))
    ]


def _cores(quantity: str) -> float:
    return float(quantity[:-1]) / 1000 if quantity.endswith("m") else float(quantity)


def _matches(node: Any, placed: Placement) -> bool:
    labels = node.metadata.labels or {}
    return all(labels.get(name) == value for name, value in selector_of(placed).items())


def _repelling(node: Any, placed: Placement) -> list[Any]:
    """A node's taints that a step does not tolerate."""
    taints = [taint for taint in node.spec.taints or () if taint.effect != "PreferNoSchedule"]
    return [taint for taint in taints if not any(_tolerates(one, taint) for one in tolerations_of(placed))]


def _tolerates(toleration: Toleration, taint: Any) -> bool:
    return (
        toleration.key in ("", taint.key)
        and toleration.effect in ("", taint.effect)
        and (toleration.operator == "Exists" or toleration.value == (taint.value or ""))
    )


def _why_none(step: str, placed: GpuPlacement, nodes: list[Any]) -> Finding:
    """Say what keeps a step off the GPU nodes, from what is chosen to what is there."""
    wanted = _num_nodes(placed)
    need = f"{step} needs {wanted} nodes" if wanted > 1 else f"{step} needs a node"
    matching = [node for node in nodes if _matches(node, placed)]
    if len(matching) < wanted:
        kinds = ", ".join(sorted({_product(node) for node in nodes}))
        chosen = ", ".join(f"{name}={value}" for name, value in selector_of(placed).items()) or "any labels"
        return missing(
            f"{need} with {chosen}, and {len(matching)} of {len(nodes)} GPU nodes have them (GPUs here: {kinds})",
            f"fix {step}.gpu.product or {step}.node_selector in the settings; kubectl get nodes --show-labels",
        )
    allowed = [node for node in matching if not _repelling(node, placed)]
    if len(allowed) < wanted:
        taints = sorted({f"{t.key}={t.value or ''}:{t.effect}" for node in matching for t in _repelling(node, placed)})
        return missing(
            f"{need}, and taints keep it off: {', '.join(taints)}", f"add them to {step}.tolerations in the settings"
        )
    largest = max(_gpus(node, placed.gpu.resource) for node in allowed)
    asked = ", ".join(filter(None, (f"{placed.gpu.count} GPUs", placed.cpu and f"{placed.cpu} CPUs", placed.memory)))
    return missing(
        f"{need} with {asked}, and too few of the {len(allowed)} that it may use are that large (most GPUs of one: "
        f"{largest})",
        f"lower {step}.gpu.count, cpu or memory in the settings",
    )


# Rights that components/train/train_job.py uses: (group, resource, subresource, verbs).
RIGHTS = (
    (GROUP, PLURAL, "", ("create", "get", "delete")),
    ("", "pods", "", ("get", "list")),
    ("", "pods", "log", ("get",)),
)
_GRACE = "terminationGracePeriodSeconds"
_INSTALL = "install Kubeflow Trainer 2.2 or newer (https://www.kubeflow.org/docs/components/trainer/)"


def trainer(cluster: ClusterAccess) -> Finding:
    """The Trainer, which must be new enough and have the runtime where training runs on several nodes."""
    fields = _patched_fields(cluster)
    found, fix = _trainer(cluster, fields)
    if not fix:
        if cluster.settings.train.num_nodes > 1 and fields is not None and _GRACE not in json.dumps(fields):
            return warning(
                f"this cluster's Kubeflow Trainer is older than 2.3 and drops {_GRACE}: a pod that is asked to go has "
                "30 seconds to save a checkpoint",
                "update it, or set train.checkpoint_minutes",
            )
        return ok(found)
    if cluster.settings.train.num_nodes < 2:
        return absent(f"{found}; training on one node does not need it")
    return missing(found, fix)


def _trainer(cluster: ClusterAccess, fields: Any) -> tuple[str, str]:
    """The finding, and the fix; "" where the Trainer is well."""
    kinds = cluster.find(cluster.get, f"/apis/{GROUP}/{VERSION}")
    if kinds is None:
        return f"this cluster has no Kubeflow Trainer ({GROUP}/{VERSION})", _INSTALL
    if PLURAL not in {kind["name"] for kind in kinds["resources"]}:
        return f"{GROUP}/{VERSION} has no {PLURAL}", _INSTALL
    if fields == {}:  # such a Trainer drops the volumes in silence
        return "this cluster's Kubeflow Trainer is older than 2.2: TrainJobs know no runtimePatches", _INSTALL
    name = cluster.settings.train_job.runtime
    runtime = cluster.find(cluster.get, f"/apis/{GROUP}/{VERSION}/clustertrainingruntimes/{name}")
    if runtime is None:
        fix = "install the Trainer's runtimes, or name another in train_job.runtime"
        return f"there is no ClusterTrainingRuntime {name}", fix
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    if CONTAINER not in {job["name"] for job in jobs if CONTAINER in _containers(job)}:
        fix = "name one of PyTorch's runtimes in train_job.runtime"
        return f"the runtime {name} has no job with a container, both named {CONTAINER}", fix
    return f"runtime {name}", ""


def _patched_fields(cluster: ClusterAccess) -> Any:
    """Schema of a TrainJob's runtimePatches; empty where there are none, None where it can't be read."""
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURAL}.{GROUP}"
    try:
        definition = cluster.find(cluster.get, path)
    except client.ApiException as error:
        if error.status == 403:
            return None  # the job itself finds out
        raise
    if definition is None:
        return None
    schemas = {one["name"]: one["schema"]["openAPIV3Schema"] for one in definition["spec"]["versions"]}
    spec = schemas.get(VERSION, {}).get("properties", {}).get("spec", {})
    return spec.get("properties", {}).get("runtimePatches", {})


def rights(cluster: ClusterAccess) -> Finding:
    """Rights of the run's service account to do what the train step does on several nodes."""
    namespace, read = cluster.namespace, cluster.core.read_namespaced_service_account
    # As KFP chooses it where the settings do not.
    usual = "pipeline-runner" if namespace == KFP_NAMESPACE else "default-editor"
    account = cluster.settings.service_account or usual
    if cluster.find(read, account, namespace) is None:
        return missing(
            f"there is no service account {account} in {namespace}", "set service_account in the settings to yours"
        )
    if cluster.settings.train.num_nodes < 2:
        return absent("training on one node needs none")
    of_pods = cluster.settings.train_job.service_account
    if of_pods and cluster.find(read, of_pods, namespace) is None:
        return missing(
            f"there is no service account {of_pods} in {namespace}, so no pod of a TrainJob is made",
            f"kubectl -n {namespace} create serviceaccount {of_pods}, or fix train_job.service_account",
        )
    user = f"system:serviceaccount:{namespace}:{account}"
    try:
        lacking = _lacking(cluster, user)
    except client.ApiException as error:
        if error.status != 403:
            raise
        # You may not ask for others; what you may yourself says whether anybody could be given it by you.
        lacking = _lacking(cluster, None)
        own = f"you may not {', '.join(lacking)} yourself" if lacking else "you may all of it yourself"
        return warning(
            f"you may not ask what {user} may; {own}",
            f"an administrator can: kubectl -n {namespace} auth can-i create {PLURAL}.{GROUP} --as={user}",
        )
    if lacking:
        return missing(
            f"{account} may not {', '.join(lacking)} in {namespace}",
            "bind the chart's Role for TrainJobs to it (trainJobs.namespaces and trainJobs.serviceAccount in "
            "the chart's values)",
        )
    return ok(f"{account} may start, follow and remove TrainJobs in {namespace}")


def _lacking(cluster: ClusterAccess, user: str | None) -> list[str]:
    """Rights that a service account has not, or that you have not where `user` is None."""
    api, lacking = client.AuthorizationV1Api(cluster.api), []
    for group, resource, subresource, verbs in RIGHTS:
        for verb in verbs:
            right = client.V1ResourceAttributes(
                namespace=cluster.namespace, verb=verb, group=group, resource=resource, subresource=subresource or None
            )
            if user is None:
                own = client.V1SelfSubjectAccessReviewSpec(resource_attributes=right)
                review = api.create_self_subject_access_review(client.V1SelfSubjectAccessReview(spec=own))
            else:
                groups = ["system:serviceaccounts", f"system:serviceaccounts:{cluster.namespace}"]
                spec = client.V1SubjectAccessReviewSpec(
                    user=user, groups=[*groups, "system:authenticated"], resource_attributes=right
                )
                review = api.create_subject_access_review(client.V1SubjectAccessReview(spec=spec))
            if not review.status.allowed:
                name = resource + (f"/{subresource}" if subresource else "") + (f".{group}" if group else "")
                lacking.append(f"{verb} {name}")
    return lacking


def _containers(job: dict[str, Any]) -> set[str]:
    containers = job["template"]["spec"]["template"]["spec"].get("containers") or ()
    return {container["name"] for container in containers}
