"""Checks of what a cluster gives the steps: nodes, quotas, Kubeflow Trainer, volumes, secrets, tracking."""

import re
from typing import Any
from urllib.parse import urlsplit

from kubernetes import client  # type: ignore[import-untyped]

from components.common.contracts.container_images import IMAGE_OF
from components.train.train_job import CONTAINER, GROUP, PLURAL, VERSION
from enginery.cluster.resources import selector_of, tolerations_of
from enginery.cluster.settings import GPU_STEPS, GpuPlacement, Placement, Toleration, TrainPlacement, Volume, size_bytes
from enginery.doctor.checks import Finding, absent, missing, ok, warning
from enginery.doctor.cluster import KFP_NAMESPACE, View
from enginery.doctor.gpu import OLDEST_DRIVER, driver_number
from enginery.doctor.machine import server
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


class NodeChecks:
    """The checks share the list of nodes."""

    def __init__(self, view: View) -> None:
        self._view = view

    def _gpu_steps(self) -> dict[str, GpuPlacement]:
        """Steps that ask for GPUs."""
        placed = {step: self._view.settings.of(step) for step in GPU_STEPS}
        return {step: one for step, one in placed.items() if isinstance(one, GpuPlacement) and one.gpu.count}

    def gpu_nodes(self) -> Finding:
        """Whether each GPU step fits a node."""
        steps = self._gpu_steps()
        if not steps:
            return absent("no step asks for a GPU")
        with_gpus = [node for node in self._view.nodes if any(_gpus(node, one.gpu.resource) for one in steps.values())]
        if not with_gpus:
            resources = ", ".join(sorted({one.gpu.resource for one in steps.values()}))
            return missing(
                f"of {len(self._view.nodes)} nodes none offers {resources}",
                f"{_OPERATOR}, or set gpu.count: 0 for {', '.join(steps)} to work on CPUs",
            )
        for step, placed in steps.items():
            wanted = placed.num_nodes if isinstance(placed, TrainPlacement) else 1
            if len(_fitting(with_gpus, placed)) < wanted:
                return _why_none(step, placed, with_gpus, wanted)
        kinds = {_product(node) for node in with_gpus}
        counts = "; ".join(
            f"{sum(_gpus(node, 'nvidia.com/gpu') for node in with_gpus if _product(node) == kind)} x {kind}"
            for kind in sorted(kinds)
        )
        return ok(f"{len(with_gpus)} nodes with {counts}; {', '.join(steps)} fit")

    def drivers(self) -> Finding:
        """Whether the drivers of the nodes that GPU steps may run on can run the images' CUDA."""
        steps = self._gpu_steps()
        nodes = {node.metadata.name: node for one in steps.values() for node in _fitting(self._view.nodes, one)}
        if not nodes:
            return absent("needs nodes that GPU steps fit")
        drivers = {name: _driver(node) for name, node in nodes.items()}
        oldest = OLDEST_DRIVER[_CUDA]
        old = {name: text for name, text in drivers.items() if text and driver_number(text) < driver_number(oldest)}
        if old:
            told = ", ".join(f"{name} has {text}" for name, text in sorted(old.items()))
            return missing(
                f"the images' CUDA {_CUDA} needs driver {oldest} or newer: {told}",
                "update the driver (GPU operator: driver.version), or keep steps off these nodes with node_selector",
            )
        if unknown := sorted(name for name, text in drivers.items() if not text):
            return warning(
                f"no label says which driver {', '.join(unknown)} has; CUDA {_CUDA} needs {oldest}", _OPERATOR
            )
        return ok(f"{', '.join(sorted(set(drivers.values())))} (CUDA {_CUDA} needs {oldest})")

    def shared_memory(self) -> Finding:
        """Whether /dev/shm fits into the memory that a GPU step has: its own, the namespace's default, or a node's."""
        steps = {step: one for step, one in self._gpu_steps().items() if one.shm}
        if not steps:
            return absent("no step asks for shared memory")
        default = self._default_memory()
        for step, placed in steps.items():
            shm = size_bytes(placed.shm)
            if not placed.memory and default and size_bytes(default) <= shm:
                return missing(
                    f"a limit range of {self._view.namespace} gives containers {default} of memory, and {step} has "
                    f"{placed.shm} of /dev/shm, which counts as memory",
                    f"set {step}.memory to more than that in the settings",
                )
            sizes = [size_bytes(node.status.allocatable["memory"]) for node in _fitting(self._view.nodes, placed)]
            if sizes and max(sizes) <= shm:
                return missing(
                    f"{step} has {placed.shm} of /dev/shm, and its largest node {size_text(int(max(sizes)))} of memory",
                    f"set {step}.shm to less",
                )
        return ok(", ".join(f"{step} {one.shm}" for step, one in steps.items()) + ", in memory")

    def quota(self) -> Finding:
        """Whether the namespace may have as many GPUs."""
        quotas = self._view.core.list_namespaced_resource_quota(self._view.namespace).items
        for step, placed in self._gpu_steps().items():
            number = placed.gpu.count * (placed.num_nodes if isinstance(placed, TrainPlacement) else 1)
            key = f"requests.{placed.gpu.resource}"
            for quota in quotas:
                hard = (quota.status.hard or {}) if quota.status else {}
                if key in hard and int(hard[key]) < number:
                    return missing(
                        f"the quota {quota.metadata.name} of {self._view.namespace} allows {hard[key]} of "
                        f"{placed.gpu.resource}, and {step} asks for {number}",
                        f"have the quota raised, or lower {step}.gpu.count",
                    )
        return ok(f"{len(quotas)} quotas in {self._view.namespace}, none too small")

    def _default_memory(self) -> str:
        """What a container gets that does not say; "" for no limit."""
        ranges = self._view.core.list_namespaced_limit_range(self._view.namespace).items
        for limit in (limit for entry in ranges for limit in entry.spec.limits if limit.type == "Container"):
            if memory := (limit.default or {}).get("memory"):
                return str(memory)
        return ""


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


def _why_none(step: str, placed: GpuPlacement, nodes: list[Any], wanted: int) -> Finding:
    """Say what keeps a step off the GPU nodes, from what is chosen to what is there."""
    need = f"{step} needs {wanted} nodes" if wanted > 1 else f"{step} needs a node"
    matching = [node for node in nodes if _matches(node, placed)]
    if len(matching) < wanted:
        kinds = ", ".join(sorted({_product(node) for node in nodes}))
        chosen = ", ".join(f"{name}={value}" for name, value in selector_of(placed).items()) or "any labels"
        return missing(
            f"{need} with {chosen}, and {len(matching)} of {len(nodes)} GPU nodes have them (GPUs here: {kinds})",
            f"mend {step}.gpu.product or {step}.node_selector in the settings; kubectl get nodes --show-labels",
        )
    allowed = [node for node in matching if not _repelling(node, placed)]
    if len(allowed) < wanted:
        taints = sorted({f"{t.key}={t.value or ''}:{t.effect}" for node in matching for t in _repelling(node, placed)})
        return missing(
            f"{need}, and taints keep it off: {', '.join(taints)}",
            f"add them to {step}.tolerations in the settings",
        )
    largest = max(_gpus(node, placed.gpu.resource) for node in allowed)
    asked = ", ".join(filter(None, (f"{placed.gpu.count} GPUs", placed.cpu and f"{placed.cpu} CPUs", placed.memory)))
    return missing(
        f"{need} with {asked}, and too few of the {len(allowed)} that it may use are that large (most GPUs of one: "
        f"{largest})",
        f"lower {step}.gpu.count, cpu or memory in the settings",
    )


# What components/train/train_job.py does: (group, resource, subresource, verbs).
RIGHTS = (
    (GROUP, PLURAL, "", ("create", "get", "delete")),
    ("", "pods", "", ("get", "list")),
    ("", "pods", "log", ("get",)),
)
_INSTALL = "install Kubeflow Trainer 2.2 or newer (https://www.kubeflow.org/docs/components/trainer/)"


class JobChecks:
    """Where the settings train on one node nothing of this is needed."""

    def __init__(self, view: View) -> None:
        self._view = view

    @property
    def _num_nodes(self) -> int:
        return self._view.settings.train.num_nodes

    @property
    def service_account(self) -> str:
        """Of the run, as KFP chooses it where the settings do not."""
        usual = "pipeline-runner" if self._view.namespace == KFP_NAMESPACE else "default-editor"
        return self._view.settings.service_account or usual

    def trainer(self) -> Finding:
        """Whether the Trainer is there, new enough, and has the runtime."""
        try:
            kinds = self._view.get(f"/apis/{GROUP}/{VERSION}")["resources"]
        except client.ApiException as error:
            if error.status != 404:
                raise
            return self._lacking(f"this cluster has no Kubeflow Trainer ({GROUP}/{VERSION})", _INSTALL)
        if PLURAL not in {kind["name"] for kind in kinds}:
            return self._lacking(f"{GROUP}/{VERSION} has no {PLURAL}", _INSTALL)
        if (finding := self._definition()) is not None:
            return finding
        name = self._view.settings.train_job.runtime
        try:
            runtime = self._view.get(f"/apis/{GROUP}/{VERSION}/clustertrainingruntimes/{name}")
        except client.ApiException as error:
            if error.status != 404:
                raise
            return self._lacking(
                f"there is no ClusterTrainingRuntime {name}",
                "install the Trainer's runtimes, or name another in train_job.runtime",
            )
        jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
        if CONTAINER not in {job["name"] for job in jobs if CONTAINER in _containers(job)}:
            return self._lacking(
                f"the runtime {name} has no job with a container, both named {CONTAINER}",
                "name one of PyTorch's runtimes in train_job.runtime",
            )
        return ok(f"runtime {name}")

    def _lacking(self, found: str, fix: str) -> Finding:
        if self._num_nodes < 2:
            return absent(f"{found}; training on one node does not need it")
        return missing(found, fix)

    def _definition(self) -> Finding | None:
        """What is wrong with the TrainJob's definition, or None; an older one drops the volumes in silence."""
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURAL}.{GROUP}"
        try:
            versions = self._view.get(path)["spec"]["versions"]
        except client.ApiException as error:
            if error.status == 403:
                return None  # the job itself finds out
            raise
        schema: dict[str, Any] = next(
            (entry["schema"]["openAPIV3Schema"] for entry in versions if entry["name"] == VERSION), {}
        )
        spec = schema.get("properties", {}).get("spec", {}).get("properties", {})
        if "runtimePatches" in spec:
            return None
        return self._lacking(
            "this cluster's Kubeflow Trainer is older than 2.2: TrainJobs know no runtimePatches", _INSTALL
        )

    def rights(self) -> Finding:
        """Whether the run's service account may do what the train step does."""
        place, account = self._view.namespace, self.service_account
        if not self._is_there(account):
            return missing(
                f"there is no service account {account} in {place}", "set service_account in the settings to yours"
            )
        if self._num_nodes < 2:
            return absent("training on one node needs none")
        of_pods = self._view.settings.train_job.service_account
        if of_pods and not self._is_there(of_pods):
            return missing(
                f"there is no service account {of_pods} in {place}, so no pod of a TrainJob is made",
                f"kubectl -n {place} create serviceaccount {of_pods}, or mend train_job.service_account",
            )
        user = f"system:serviceaccount:{place}:{account}"
        try:
            lacking = [right for right in _each() if not self._may(user, *right)]
        except client.ApiException as error:
            if error.status != 403:
                raise
            return self._own_rights(user)
        if lacking:
            told = ", ".join(f"{verb} {_resource(*rest)}" for verb, *rest in lacking)
            return missing(
                f"{account} may not {told} in {place}",
                "bind the chart's Role for TrainJobs to it (trainJobs.namespaces and trainJobs.serviceAccount in "
                "the chart's values)",
            )
        return ok(f"{account} may start, follow and remove TrainJobs in {place}")

    def _is_there(self, account: str) -> bool:
        try:
            self._view.core.read_namespaced_service_account(account, self._view.namespace)
        except client.ApiException as error:
            if error.status != 404:
                raise
            return False
        return True

    def _may(self, user: str, verb: str, group: str, resource: str, subresource: str) -> bool:
        spec = client.V1SubjectAccessReviewSpec(
            user=user,
            groups=["system:serviceaccounts", f"system:serviceaccounts:{self._view.namespace}", "system:authenticated"],
            resource_attributes=self._attributes(verb, group, resource, subresource),
        )
        api = client.AuthorizationV1Api(self._view.api)
        return bool(api.create_subject_access_review(client.V1SubjectAccessReview(spec=spec)).status.allowed)

    def _own_rights(self, user: str) -> Finding:
        """You may not ask for others; what you may yourself says whether anybody could be given it by you."""
        api = client.AuthorizationV1Api(self._view.api)
        refused = []
        for right in _each():
            spec = client.V1SelfSubjectAccessReviewSpec(resource_attributes=self._attributes(*right))
            review = client.V1SelfSubjectAccessReview(spec=spec)
            if not api.create_self_subject_access_review(review).status.allowed:
                refused.append(f"{right[0]} {_resource(*right[1:])}")
        own = f"you may not {', '.join(refused)} yourself" if refused else "you may all of it yourself"
        return warning(
            f"you may not ask what {user} may; {own}",
            f"an administrator can: kubectl -n {self._view.namespace} auth can-i create {PLURAL}.{GROUP} --as={user}",
        )

    def _attributes(self, verb: str, group: str, resource: str, subresource: str) -> Any:
        return client.V1ResourceAttributes(
            namespace=self._view.namespace,
            verb=verb,
            group=group,
            resource=resource,
            subresource=subresource or None,
        )


def _each() -> list[tuple[str, str, str, str]]:
    return [(verb, group, resource, sub) for group, resource, sub, verbs in RIGHTS for verb in verbs]


def _resource(group: str, resource: str, subresource: str) -> str:
    return resource + (f"/{subresource}" if subresource else "") + (f".{group}" if group else "")


def _containers(job: dict[str, Any]) -> set[str]:
    containers = job["template"]["spec"]["template"]["spec"].get("containers") or ()
    return {container["name"] for container in containers}


_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_TRACKING = "MLFLOW_TRACKING_URI"


class StorageChecks:
    """Checks by the names that the settings give."""

    def __init__(self, view: View) -> None:
        self._view = view

    def tracking(self) -> Finding:
        """Whether the tracking server answers: from here, or, if only the cluster can resolve its name, from there."""
        uri = self._view.settings.of("promote").env.get(_TRACKING, "")
        if not uri:
            return warning(
                f"the settings name no {_TRACKING}, without which promote can't register",
                f"set every_step.env.{_TRACKING}, or switch on KFP's MLflow plugin with injectUserEnvVars",
            )
        parts = urlsplit(uri)
        if parts.scheme not in ("http", "https"):
            return missing(
                f"{_TRACKING} is {parts.scheme or 'no URL'}, and steps in different pods need a server",
                "name an MLflow server, such as http://enginery-mlflow.mlflow:5000",
            )
        service = self._service_of(parts.hostname or "")
        if service is None:
            return server(uri)
        if self._view.trouble:
            return absent(f"{uri} is a name of the cluster's; needs Kubernetes' API")
        name, place = service
        port = parts.port or (443 if parts.scheme == "https" else 80)
        look = self._view.asking("services through the API (services/proxy)", lambda: self._ask(uri, name, place, port))
        return look()

    def _service_of(self, host: str) -> tuple[str, str] | None:
        """(service, namespace) of a name that only the cluster resolves."""
        match = re.fullmatch(r"([a-z0-9-]+)(?:\.([a-z0-9-]+))?(?:\.svc(?:\.cluster\.local)?)?", host)
        if match is None or host == "localhost":
            return None
        return match[1], match[2] or self._view.namespace

    def _ask(self, uri: str, name: str, place: str, port: int) -> Finding:
        try:
            self._view.core.read_namespaced_service(name, place)
            self._view.core.connect_get_namespaced_service_proxy_with_path(
                f"{name}:{port}", place, "health", _preload_content=False, _request_timeout=10.0
            )
        except client.ApiException as error:
            if error.status == 404:
                if (elsewhere := server(uri)).status == "ok":  # a short name of the world's
                    return elsewhere
                return missing(
                    f"{uri}: there is no service {name} in {place}", "install the chart, or mend the address"
                )
            if error.status in (502, 503, 504):
                return missing(f"{uri}: nothing answers behind it", f"kubectl -n {place} get endpoints,pods")
            raise
        return ok(f"{uri} answers in the cluster")

    def classes(self) -> Finding:
        """Whether claims without a class get a volume."""
        found = client.StorageV1Api(self._view.api).list_storage_class().items
        names = [entry.metadata.name for entry in found]
        default = [e.metadata.name for e in found if (e.metadata.annotations or {}).get(_DEFAULT_CLASS) == "true"]
        if default:
            return ok(f"{', '.join(names)}; {default[0]} is the default")
        return warning(
            f"no default among {', '.join(names) or 'no storage classes'}",
            f"kubectl annotate storageclass NAME {_DEFAULT_CLASS}=true, or name a class in each claim",
        )

    def _volumes(self) -> dict[Volume, bool]:
        """Volumes of the settings, and whether several nodes write to them at once."""
        settings = self._view.settings
        found = dict.fromkeys((volume for step in IMAGE_OF for volume in settings.of(step).volumes), False)
        if settings.train_job.volume is not None:
            found[settings.train_job.volume] = True
        return found

    def volumes(self) -> Finding:
        """Whether the claims are there, bound, and as shareable as they must be."""
        volumes = self._volumes()
        if not volumes:
            return absent("the settings name no volumes")
        pending = []
        for volume, is_shared in volumes.items():
            where = f"the claim {volume.claim} in {self._view.namespace}"
            try:
                claim = self._view.core.read_namespaced_persistent_volume_claim(volume.claim, self._view.namespace)
            except client.ApiException as error:
                if error.status != 404:
                    raise
                return missing(f"there is no {where.removeprefix('the ')}", "make it (the chart can), or mend its name")
            if is_shared and "ReadWriteMany" not in (claim.spec.access_modes or ()):
                modes = ", ".join(claim.spec.access_modes or ())
                return missing(
                    f"{where} is {modes}, and several nodes write to it",
                    "make it of a class that can ReadWriteMany (NFS, CephFS, FSx, Filestore)",
                )
            if claim.status.phase == "Lost":
                return missing(f"{where} has lost its volume", "restore the volume, or make the claim anew")
            if claim.status.phase != "Bound":
                pending.append(volume.claim)
        if pending:
            return warning(
                f"not bound yet: {', '.join(pending)}",
                "nothing, if its class waits for the first pod; else kubectl describe pvc says why",
            )
        return ok(", ".join(sorted({volume.claim for volume in volumes})) + " are bound")

    def secrets(self) -> Finding:
        """Whether the Secrets have the keys that steps take."""
        settings = self._view.settings
        wanted: dict[str, set[str]] = {}
        for secret in (secret for step in IMAGE_OF for secret in settings.of(step).secrets):
            wanted.setdefault(secret.name, set()).update(secret.env.values())
        if not wanted:
            return absent("the settings name no secrets")
        for name, keys in wanted.items():
            found: Any
            try:
                found = self._view.core.read_namespaced_secret(name, self._view.namespace)
            except client.ApiException as error:
                if error.status != 404:
                    raise
                return missing(
                    f"there is no secret {name} in {self._view.namespace}",
                    f"kubectl -n {self._view.namespace} create secret generic {name} --from-literal=KEY=VALUE",
                )
            if lacking := sorted(keys - set(found.data or ())):
                return missing(
                    f"the secret {name} has no {', '.join(lacking)}; it has {', '.join(sorted(found.data or ()))}",
                    "mend the key in the settings, or add it to the secret",
                )
        return ok(", ".join(sorted(wanted)))
