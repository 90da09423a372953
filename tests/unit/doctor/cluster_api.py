"""Kubernetes' API and an image registry over HTTP, answering in the models of Kubernetes' client."""

import base64
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from kubernetes import client as k8s

from tests.kubernetes_api import answer, write_kubeconfig
from tests.serving import Served

NAMESPACE = "team-vision"
_CORE = f"/api/v1/namespaces/{NAMESPACE}"
_TRAINER = "/apis/trainer.kubeflow.org/v1alpha1"
_REVIEWS = "/apis/authorization.k8s.io/v1"
_CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainjobs.trainer.kubeflow.org"


def meta(name: str, **more: Any) -> Any:
    return k8s.V1ObjectMeta(name=name, **more)


def gpu_node(name: str = "gpu-1", *, gpus: int = 8, driver: str = "580.95.05", taints: Any = (), **more: str) -> Any:
    """A node as NVIDIA's GPU operator labels it."""
    labels = {"kubernetes.io/arch": "amd64", "nvidia.com/gpu.product": "NVIDIA-H200", **more}
    if driver:
        labels["nvidia.com/cuda.driver-version.full"] = driver
    amounts = {"cpu": "96", "memory": "1056763392Ki", "nvidia.com/gpu": str(gpus), "pods": "110"}
    taint = k8s.V1Taint(key="nvidia.com/gpu", value="present", effect="NoSchedule")
    return k8s.V1Node(
        metadata=meta(name, labels=labels),
        spec=k8s.V1NodeSpec(taints=[taint, *taints]),
        status=k8s.V1NodeStatus(allocatable=amounts, capacity=amounts),
    )


def cpu_node() -> Any:
    status = k8s.V1NodeStatus(allocatable={"cpu": "32", "memory": "131072Mi"})
    return k8s.V1Node(
        metadata=meta("cpu-1", labels={"kubernetes.io/arch": "amd64"}), spec=k8s.V1NodeSpec(), status=status
    )


def claim(name: str, mode: str = "ReadWriteMany", phase: str = "Bound") -> Any:
    return k8s.V1PersistentVolumeClaim(
        metadata=meta(name),
        spec=k8s.V1PersistentVolumeClaimSpec(access_modes=[mode]),
        status=k8s.V1PersistentVolumeClaimStatus(phase=phase),
    )


def secret(name: str, keys: tuple[str, ...]) -> Any:
    return k8s.V1Secret(metadata=meta(name), type="Opaque", data=dict.fromkeys(keys, "eA=="))


def login(name: str, registry: str, user: str = "puller", password: str = "right") -> Any:
    auth = base64.b64encode(f"{user}:{password}".encode()).decode()
    data = base64.b64encode(json.dumps({"auths": {registry: {"auth": auth}}}).encode()).decode()
    return k8s.V1Secret(metadata=meta(name), type="kubernetes.io/dockerconfigjson", data={".dockerconfigjson": data})


@dataclass
class ClusterApi(Served):
    """A cluster where everything is well, until a test changes something."""

    folder: Path
    nodes: list[Any] = field(default_factory=lambda: [gpu_node(), gpu_node("gpu-2"), cpu_node()])
    claims: dict[str, Any] = field(default_factory=lambda: {"images": claim("images"), "shared": claim("shared")})
    secrets: dict[str, Any] = field(default_factory=dict)
    limits: list[Any] = field(default_factory=list)
    quotas: list[Any] = field(default_factory=list)
    default_class: bool = True
    mlflow_hosts: str = "localhost,enginery-mlflow.mlflow:*"
    retry_strategy: str = "{limit: '2', retryPolicy: Always}"  # Argo's default
    runtimes: tuple[str, ...] = ("torch-distributed",)
    has_trainer: bool = True
    is_old: bool = False  # the Trainer
    patched: str = "terminationGracePeriodSeconds"  # a field of pods that it knows
    forbidden: dict[tuple[str, str], bool] = field(default_factory=dict)  # (verb, resource) of the service account
    refused: set[str] = field(default_factory=set)  # paths that nobody may read
    absent: set[str] = field(default_factory=set)  # paths that are not there
    images: dict[str, int] = field(default_factory=dict)  # repository: status
    kfp_is_well: bool = True
    wants_login: bool = False  # the registry
    token_status: int = 200  # of who gives tokens
    realm: str = ""  # that it names for tokens; empty for its own
    redirects: str = ""  # where the realm leads

    @property
    def host(self) -> str:
        return urlsplit(self.endpoint).netloc

    def ready(self) -> None:
        """Answers that need the server's address."""
        self.secrets = {
            "registry-login": login("registry-login", self.host),
            "mlflow-login": secret("mlflow-login", ("username", "password")),
            "s3-login": secret("s3-login", ("accesskey", "secretkey")),
        }
        write_kubeconfig(self.folder, self.endpoint)

    def answer(self, method: str, path: str, body: Any) -> tuple[Any, ...]:
        path = unquote(path)
        if path in self.refused:
            return self._status(403, "Forbidden")
        if path in self.absent:
            return self._status(404, "NotFound")
        if path.startswith("/v2/"):
            return self._registry(path)
        if path == "/registry-token" and self.redirects:
            return 307, {}, {"Location": self.redirects}
        if path == "/registry-token":
            return self.token_status, {"token": "of-the-registry"}
        if path == "/apis/v2beta1/healthz":
            return (200, {"multi_user": True}) if self.kfp_is_well else (200, b"<html>log in</html>")
        if method == "POST" and path.startswith(_REVIEWS):
            return 201, self._review(body)
        found = self._objects().get(path)
        if found is None:
            return self._status(404, "NotFound")
        return 200, answer(found)

    @staticmethod
    def _status(code: int, reason: str) -> tuple[int, Any]:
        return code, answer(k8s.V1Status(code=code, reason=reason, status="Failure", kind="Status", api_version="v1"))

    def _objects(self) -> dict[str, Any]:
        annotations = {"storageclass.kubernetes.io/is-default-class": str(self.default_class).lower()}
        storage = k8s.V1StorageClass(metadata=meta("fast", annotations=annotations), provisioner="p")
        found: dict[str, Any] = {
            "/version": {"gitVersion": "v1.33.1", "major": "1", "minor": "33"},
            "/api/v1/nodes": k8s.V1NodeList(items=self.nodes),
            _CORE: k8s.V1Namespace(metadata=meta(NAMESPACE)),
            f"{_CORE}/configmaps/kfp-launcher": k8s.V1ConfigMap(data={"providers": "s3: {default: {endpoint: s3}}"}),
            f"{_CORE}/limitranges": k8s.V1LimitRangeList(items=self.limits),
            f"{_CORE}/resourcequotas": k8s.V1ResourceQuotaList(items=self.quotas),
            f"{_CORE}/serviceaccounts/pipeline-runner": k8s.V1ServiceAccount(metadata=meta("pipeline-runner")),
            "/api/v1/namespaces/kubeflow/services/ml-pipeline": k8s.V1Service(metadata=meta("ml-pipeline")),
            "/api/v1/namespaces/kubeflow/configmaps/workflow-controller-configmap": k8s.V1ConfigMap(
                data={"workflowDefaults": f"spec: {{templateDefaults: {{retryStrategy: {self.retry_strategy}}}}}"}
            ),
            "/api/v1/namespaces/mlflow/services/enginery-mlflow": k8s.V1Service(
                metadata=meta("enginery-mlflow"), spec=k8s.V1ServiceSpec(selector={"app": "mlflow"})
            ),
            "/api/v1/namespaces/mlflow/pods": k8s.V1PodList(items=[self._mlflow()]),
            "/api/v1/namespaces/mlflow/services/enginery-mlflow:5000/proxy/health": "OK",
            "/apis/storage.k8s.io/v1/storageclasses": k8s.V1StorageClassList(items=[storage]),
        }
        found |= {f"{_CORE}/persistentvolumeclaims/{name}": one for name, one in self.claims.items()}
        found |= {f"{_CORE}/secrets/{name}": one for name, one in self.secrets.items()}
        return found | (self._trainer() if self.has_trainer else {})

    def _mlflow(self) -> Any:
        hosts = k8s.V1EnvVar(name="MLFLOW_SERVER_ALLOWED_HOSTS", value=self.mlflow_hosts)
        container = k8s.V1Container(name="mlflow", env=[hosts])
        return k8s.V1Pod(metadata=meta("mlflow-1"), spec=k8s.V1PodSpec(containers=[container]))

    def _trainer(self) -> dict[str, Any]:
        resource = k8s.V1APIResource(
            name="trainjobs", kind="TrainJob", namespaced=True, singular_name="", verbs=["get"]
        )
        fields = {"podSpecOverrides" if self.is_old else "runtimePatches": {self.patched: {}}}
        spec = {"type": "object", "properties": fields}
        schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
        job = {"name": "node", "template": {"spec": {"template": {"spec": {"containers": [{"name": "node"}]}}}}}
        runtime = {"spec": {"template": {"spec": {"replicatedJobs": [job]}}}}
        return {
            _TRAINER: k8s.V1APIResourceList(group_version="trainer.kubeflow.org/v1alpha1", resources=[resource]),
            _CRD: {"spec": {"versions": [{"name": "v1alpha1", "schema": schema}]}},
            **{f"{_TRAINER}/clustertrainingruntimes/{name}": runtime for name in self.runtimes},
        }

    def _review(self, body: Any) -> Any:
        asked = body["spec"]["resourceAttributes"]
        resource = asked["resource"] + (f"/{asked['subresource']}" if asked.get("subresource") else "")
        status = k8s.V1SubjectAccessReviewStatus(allowed=not self.forbidden.get((asked["verb"], resource), False))
        return answer(k8s.V1SubjectAccessReview(spec=body["spec"], status=status))

    def _registry(self, path: str) -> tuple[Any, ...]:
        """As registries ask for a token: by naming who gives it."""
        repository = path.removeprefix("/v2/").split("/manifests/")[0]
        if self.wants_login and "Bearer of-the-registry" not in self.tokens:
            realm = f'Bearer realm="{self.realm or f"{self.endpoint}/registry-token"}",service="registry"'
            return 401, {}, {"WWW-Authenticate": realm}
        return self.images.get(repository, 200), {}
