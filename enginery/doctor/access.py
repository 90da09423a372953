"""Access to a cluster for its checks: Kubernetes' API, asked once per question and with a limit of time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client
from kubernetes.config import ConfigException

from components.common.contracts.errors import shortened
from components.train.train_job import kubernetes_api
from enginery.cluster.server import KFP_NAMESPACE, Login
from enginery.cluster.settings import ClusterSettings
from enginery.doctor.checks import Finding, absent, warning

LIMIT_S = 10  # whole seconds: the client of Kubernetes ignores any other limit


@dataclass(frozen=True)
class ClusterAccess:
    """A cluster, as the settings of a run see it."""

    settings: ClusterSettings
    endpoint: str  # of KFP; "" where nobody said
    login: Login
    ca_file: Path | None = None

    @property
    def namespace(self) -> str:
        """The namespace of runs."""
        return self.settings.namespace or KFP_NAMESPACE

    @cached_property
    def api(self) -> Any:
        """Kubernetes' API, with one try per question."""
        return kubernetes_api(urllib3.Retry(0))

    @cached_property
    def core(self) -> Any:
        """The core of Kubernetes' API."""
        return client.CoreV1Api(self.api)

    def get(self, path: str) -> Any:
        """Any path of the API, as JSON."""
        return self.api.call_api(
            path, "GET", auth_settings=["BearerToken"], response_type="object", _request_timeout=LIMIT_S
        )[0]

    def find(self, read: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a method that reads one object; None where there is no such object."""
        try:
            return read(*arguments, **options)
        except client.ApiException as error:
            if error.status != 404:
                raise
            return None

    @cached_property
    def nodes(self) -> list[Any]:
        """Nodes that take pods: neither cordoned nor broken."""
        found = self.core.list_node(_request_timeout=LIMIT_S).items
        return [node for node in found if not node.spec.unschedulable and _is_ready(node)]

    @cached_property
    def unreachable(self) -> str:
        """The reason why the API does not answer; "" where it does."""
        try:
            self.get("/version")
        except (ConfigException, OSError, urllib3.exceptions.HTTPError, client.ApiException) as error:
            reason = getattr(error, "reason", None) or error
            return shortened(f"{getattr(error, 'status', '')} {reason}")
        return ""

    def guard(self, subject: str, find: Callable[[], Finding]) -> Finding:
        """Run a check that needs the API. A right that is missing here says nothing of the run's."""
        if self.unreachable:
            return absent("needs Kubernetes' API")
        try:
            return find()
        except client.ApiException as error:
            if error.status not in (401, 403):
                raise
            return warning(
                f"you may not read {subject} ({error.status} {error.reason})",
                "ask who may; what a run may do is another question",
            )


def _is_ready(node: Any) -> bool:
    conditions = (node.status.conditions or ()) if node.status else ()
    return all(condition.status == "True" for condition in conditions if condition.type == "Ready")
