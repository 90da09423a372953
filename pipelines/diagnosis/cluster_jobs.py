"""Checks of what training on several nodes needs: Kubeflow Trainer, and rights of the step's service account."""

from typing import Any

from kubernetes import client  # type: ignore[import-untyped]

from components.train.train_job import CONTAINER, GROUP, PLURAL, VERSION
from pipelines.diagnosis.checks import Finding, absent, missing, ok, warning
from pipelines.diagnosis.cluster import KFP_NAMESPACE, View

# What components/train/kubernetes_job.py does: (group, resource, subresource, verbs).
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
