"""What `enginery doctor --cluster` looks at: whether a cluster can run the pipelines as a settings file asks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client, config  # type: ignore[import-untyped]
from kubernetes.config import ConfigException  # type: ignore[import-untyped]

from components.common.contracts.errors import EXIT_FAILURE, EngineryError
from enginery.cluster.server import Login, Server
from enginery.cluster.settings import ClusterSettings
from enginery.doctor.checks import Check, Finding, Planned, absent, missing, ok, run_check, warning
from enginery.doctor.report import Diagnosis

KFP_NAMESPACE = "kubeflow"
_LIMIT_S = 10.0


@dataclass(frozen=True)
class View:
    """A cluster, as the settings of a run see it."""

    settings: ClusterSettings
    endpoint: str  # of KFP; "" where nobody said
    login: Login
    ca_file: Path | None = None

    @property
    def namespace(self) -> str:
        """Where runs are."""
        return self.settings.namespace or KFP_NAMESPACE

    @cached_property
    def api(self) -> Any:
        """Kubernetes' API, with one try per question."""
        configuration = client.Configuration()
        try:
            config.load_incluster_config(client_configuration=configuration)
        except ConfigException:
            config.load_kube_config(client_configuration=configuration)
        configuration.retries = urllib3.Retry(0)
        return client.ApiClient(configuration)

    @cached_property
    def core(self) -> Any:
        """Its core."""
        return client.CoreV1Api(self.api)

    def get(self, path: str) -> Any:
        """What any path of the API answers, as JSON."""
        return self.api.call_api(
            path, "GET", auth_settings=["BearerToken"], response_type="object", _request_timeout=_LIMIT_S
        )[0]

    @cached_property
    def nodes(self) -> list[Any]:
        """Nodes that take pods: neither cordoned nor broken."""
        found = self.core.list_node(_request_timeout=_LIMIT_S).items
        return [node for node in found if not node.spec.unschedulable and _is_ready(node)]

    @cached_property
    def trouble(self) -> str:
        """Why the API does not answer; "" where it does."""
        try:
            self.get("/version")
        except (ConfigException, OSError, urllib3.exceptions.HTTPError, client.ApiException) as error:
            reason = getattr(error, "reason", None) or error
            return " ".join(f"{getattr(error, 'status', '')} {reason}".split())[:300]
        return ""

    def asking(self, what: str, look: Callable[[], Finding]) -> Callable[[], Finding]:
        """A check that needs the API. A right that is missing here says nothing of the run's."""

        def looked() -> Finding:
            if self.trouble:
                return absent("needs Kubernetes' API")
            try:
                return look()
            except client.ApiException as error:
                if error.status in (401, 403):
                    return warning(
                        f"you may not read {what} ({error.status} {error.reason})",
                        "ask who may; what a run may do is another question",
                    )
                raise

        return looked


def _is_ready(node: Any) -> bool:
    conditions = (node.status.conditions or ()) if node.status else ()
    return all(condition.status == "True" for condition in conditions if condition.type == "Ready")


def diagnose_cluster(view: View) -> Diagnosis:
    """Run all checks. A check that breaks is a line of its own; the others still run."""
    return conclude([run_check(planned) for planned in all_checks(view)])


def all_checks(view: View) -> list[Planned]:
    """Every check of a cluster."""
    from enginery.doctor.cluster_images import ImageChecks
    from enginery.doctor.cluster_nodes import JobChecks, NodeChecks, StorageChecks

    nodes, storage, images, jobs = NodeChecks(view), StorageChecks(view), ImageChecks(view), JobChecks(view)

    def check(group: str, name: str, what: str, look: Callable[[], Finding]) -> Planned:
        return Planned(group, name, view.asking(what, look), required=True)

    return [
        Planned("cluster", "Kubernetes API", lambda: kubernetes_api(view), required=True),
        check("cluster", "namespace", "namespaces", lambda: namespace(view)),
        Planned("services", "Kubeflow Pipelines", lambda: pipelines_server(view), required=True),
        Planned("services", "MLflow", storage.tracking, required=True),
        check("GPUs", "GPU nodes", "nodes", nodes.gpu_nodes),
        check("GPUs", "GPU drivers", "nodes", nodes.drivers),
        check("GPUs", "shared memory", "nodes and limit ranges", nodes.shared_memory),
        check("GPUs", "GPU quota", "resource quotas", nodes.quota),
        check("storage", "storage classes", "storage classes", storage.classes),
        check("storage", "volumes", "persistent volume claims", storage.volumes),
        check("storage", "secrets", "secrets", storage.secrets),
        check("images", "pull secrets", "secrets", images.pull_secrets),
        Planned("images", "image pull", images.pull, required=True),
        check("several nodes", "Kubeflow Trainer", "the Trainer's kinds", jobs.trainer),
        check("several nodes", "rights of the step", "rights of service accounts", jobs.rights),
    ]


def conclude(checks: Sequence[Check]) -> Diagnosis:
    """Say what follows."""
    broken = [check.name for check in checks if check.status == "missing"]
    if broken:
        text = f"A run would not work here before this is mended: {', '.join(broken)}."
        return Diagnosis(checks=tuple(checks), conclusion=text, exit_code=EXIT_FAILURE)
    unknown = [check.name for check in checks if check.status == "warning"]
    text = "Nothing is in the way of a run here"
    text += f", as far as could be seen; look at: {', '.join(unknown)}." if unknown else "."
    return Diagnosis(checks=tuple(checks), conclusion=text, exit_code=0)


def kubernetes_api(view: View) -> Finding:
    """Whether the API server answers."""
    if view.trouble:
        return missing(
            f"Kubernetes' API does not answer: {view.trouble}",
            "name a working cluster in KUBECONFIG or choose one (kubectl config use-context NAME), and log in to it",
        )
    version = view.get("/version")
    return ok(f"{version['gitVersion']} at {view.api.configuration.host}")


def namespace(view: View) -> Finding:
    """Whether the namespace of runs is there."""
    try:
        found = view.core.read_namespace(view.namespace, _request_timeout=_LIMIT_S)
    except client.ApiException as error:
        if error.status != 404:
            raise
        return missing(
            f"there is no namespace {view.namespace}",
            "set `namespace` in the settings to yours, or install Kubeflow Pipelines",
        )
    if found.metadata.deletion_timestamp:
        return missing(f"the namespace {view.namespace} is being deleted", "wait for that, and make it anew")
    return ok(view.namespace)


def pipelines_server(view: View) -> Finding:
    """Whether KFP answers where the user says it does, or else is installed."""
    if view.endpoint:
        try:
            Server(endpoint=view.endpoint, login=view.login, ca_file=view.ca_file).client()
        except EngineryError as error:
            text, _, fix = str(error).partition(". ")
            return missing(text, fix or "see Kubeflow Pipelines' own log (kubectl -n kubeflow logs deploy/ml-pipeline)")
        return ok(f"{view.endpoint} answers" + (f" to {view.login.told}" if view.login.told else ""))
    if view.trouble:
        return absent("needs --endpoint or Kubernetes' API")
    return view.asking("services", lambda: _service_of_kfp(view))()


def _service_of_kfp(view: View) -> Finding:
    for place in dict.fromkeys((view.namespace, KFP_NAMESPACE)):
        try:
            view.core.read_namespaced_service("ml-pipeline", place, _request_timeout=_LIMIT_S)
        except client.ApiException as error:
            if error.status != 404:
                raise
        else:
            return warning(
                f"the service ml-pipeline is in {place}; whether it answers was not asked",
                "name it with --endpoint; from outside, kubectl port-forward -n kubeflow svc/ml-pipeline-ui 8080:80",
            )
    return missing(
        f"there is no service ml-pipeline in {KFP_NAMESPACE}",
        "install Kubeflow Pipelines (https://www.kubeflow.org/docs/components/pipelines/), or name it with --endpoint",
    )
