"""The chart on an API server: install, upgrade, rollback, uninstall. They need a KUBECONFIG alone: `make test-cluster`.

They make namespaces of their own and wait for no pod, so an API server without nodes will do; what it does not offer
(autoscaling/v2, policy/v1 before 1.25) is switched off as values.yaml says.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from kubernetes import client, config, dynamic

from tests.helm.rendering import CASES, CHART, case, containers, pods, rendered_case, resources

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not os.environ.get("KUBECONFIG"), reason="KUBECONFIG names no cluster to test on"),
]
RELEASE = "t"
# What KServe has beside the pod in one map, and classes of runtime and priority, which are the cluster's.
NO_POD = (
    "minReplicas",
    "maxReplicas",
    "labels",
    "annotations",
    "canaryTrafficPercent",
    "runtimeClassName",
    "priorityClassName",
)
DIGESTS = ["sha256:" + two * 32 for two in ("3b", "c4")]


@pytest.fixture(scope="module")
def api() -> client.ApiClient:
    config.load_kube_config()
    return client.ApiClient()


@pytest.fixture(scope="module")
def cluster(api: client.ApiClient) -> dynamic.DynamicClient:
    return dynamic.DynamicClient(api)


@pytest.fixture(scope="module")
def offered(cluster: dynamic.DynamicClient) -> set[tuple[str, str]]:
    """Version and kind of all that the server knows."""
    return {(found.group_version, found.kind) for found in cluster.resources.search() if found.kind}


@pytest.fixture
def namespace(api: client.ApiClient) -> Iterator[str]:
    """A namespace that lets in restricted pods alone."""
    name = f"enginery-test-{uuid.uuid4().hex[:8]}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    core = client.CoreV1Api(api)
    core.create_namespace({"metadata": {"name": name, "labels": labels}})
    try:
        yield name
    finally:
        core.delete_namespace(name)


@pytest.fixture
def values(offered: set[tuple[str, str]], namespace: str) -> dict[str, Any]:
    """Every part, as far as the server knows its kinds."""
    found = case("full")
    found["mlflow"]["artifacts"] = {"type": "pvc"}
    found["trainJobs"]["namespaces"] = [namespace]
    serve = found["serve"]
    serve["model"]["repositoryDigest"] = DIGESTS[0]
    serve["autoscaling"]["enabled"] = ("autoscaling/v2", "HorizontalPodAutoscaler") in offered
    serve["disruptionBudget"]["enabled"] = ("policy/v1", "PodDisruptionBudget") in offered
    for part in (found["mlflow"], serve):
        part["route"]["enabled"] = ("gateway.networking.k8s.io/v1", "HTTPRoute") in offered
    serve["monitoring"]["enabled"] = ("monitoring.coreos.com/v1", "ServiceMonitor") in offered
    return found


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """Without the hook that migrates a database: it would want a node."""
    return shutil.copytree(CHART, tmp_path / CHART.name, ignore=shutil.ignore_patterns("migration.yaml"))


@pytest.fixture
def helm(namespace: str) -> Iterator[helm_python.Config]:
    with helm_python.Config(namespace=namespace) as found:
        yield found


def objects(helm: helm_python.Config, cluster: dynamic.DynamicClient, namespace: str) -> dict[tuple[str, str], Any]:
    """Objects of the release on the server, by kind and name."""
    found = {}
    for entry in yaml.safe_load_all(helm.get_all(RELEASE)["summary"]["manifest"]):
        kind, name = entry["kind"], entry["metadata"]["name"]
        resource = cluster.resources.get(api_version=entry["apiVersion"], kind=kind)
        where = {"namespace": entry["metadata"].get("namespace", namespace)} if resource.namespaced else {}
        found[kind, name] = cluster.get(resource, name=name, **where).to_dict()
    return found


def served(found: dict[tuple[str, str], Any]) -> str:
    deployment = found["Deployment", f"{RELEASE}-enginery-serve"]
    arguments = deployment["spec"]["template"]["spec"]["initContainers"][0]["args"]
    return arguments[arguments.index("--digest") + 1]


def may_make_trainjobs(api: client.ApiClient, namespace: str, account: str) -> bool:
    """True if the server lets a service account make TrainJobs."""
    asked = {"group": "trainer.kubeflow.org", "resource": "trainjobs", "verb": "create", "namespace": namespace}
    review = {"spec": {"user": f"system:serviceaccount:{namespace}:{account}", "resourceAttributes": asked}}
    return bool(client.AuthorizationV1Api(api).create_subject_access_review(review).status.allowed)


def test_install_upgrade_rollback_uninstall(
    helm: helm_python.Config,
    cluster: dynamic.DynamicClient,
    api: client.ApiClient,
    chart: Path,
    namespace: str,
    values: dict[str, Any],
) -> None:
    assert not may_make_trainjobs(api, namespace, "pipeline-runner")
    release = helm.install(chart, RELEASE, values)
    assert (release["revision"], release["status"]) == (1, "deployed")
    first = objects(helm, cluster, namespace)
    kinds = {kind for kind, _ in first}
    assert {"Deployment", "Service", "Ingress", "NetworkPolicy", "PersistentVolumeClaim", "Role"} <= kinds
    assert served(first) == DIGESTS[0]
    assert may_make_trainjobs(api, namespace, "pipeline-runner")
    assert not may_make_trainjobs(api, namespace, "default")

    helm.upgrade(chart, RELEASE, values)
    again = objects(helm, cluster, namespace)
    assert changed(first, again) == set(), "the same values once more change nothing"

    values["serve"]["model"]["repositoryDigest"] = DIGESTS[1]
    assert helm.upgrade(chart, RELEASE, values)["revision"] == 3
    upgraded = objects(helm, cluster, namespace)
    assert served(upgraded) == DIGESTS[1]
    assert changed(first, upgraded) == {("Deployment", f"{RELEASE}-enginery-serve")}, "MLflow is not restarted"

    helm.rollback(RELEASE, version=1)
    back = objects(helm, cluster, namespace)
    assert served(back) == DIGESTS[0]
    assert [entry["status"] for entry in helm.history(RELEASE)][-1] == "deployed"

    helm.uninstall(RELEASE)
    left = set()
    for kind, name in first:
        resource = cluster.resources.get(api_version=first[kind, name]["apiVersion"], kind=kind)
        where = {"namespace": first[kind, name]["metadata"]["namespace"]} if resource.namespaced else {}
        found = cluster.get(resource, field_selector=f"metadata.name={name}", **where).items
        left |= {kind for entry in found if not entry.metadata.deletionTimestamp}
    assert left == {"PersistentVolumeClaim"}, "data stays"
    assert not may_make_trainjobs(api, namespace, "pipeline-runner")


def changed(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> set[tuple[str, str]]:
    """Objects whose wanted state is another one."""
    assert set(before) == set(after)
    ignored = ("managedFields", "resourceVersion", "generation", "annotations")

    def wanted(entry: dict[str, Any]) -> dict[str, Any]:
        metadata = {key: value for key, value in entry["metadata"].items() if key not in ignored}
        spec = {key: value for key, value in entry.get("spec", {}).items() if key != "volumeName"}  # of a bound claim
        return {**entry, "metadata": metadata, "spec": spec, "status": None}

    return {key for key in before if wanted(before[key]) != wanted(after[key])}


def test_wrong_values_make_nothing(helm: helm_python.Config, namespace: str, values: dict[str, Any]) -> None:
    values["serve"]["model"]["repositoryDigest"] = "sha256:3b"
    with pytest.raises(helm_python.HelmError, match="repositoryDigest"):
        helm.install(CHART, RELEASE, values)
    assert helm.list() == []


@pytest.mark.parametrize("name", CASES)
def test_the_server_takes_every_object(
    cluster: dynamic.DynamicClient, api: client.ApiClient, offered: set[tuple[str, str]], namespace: str, name: str
) -> None:
    taken = 0
    for entry in resources(rendered_case(name)):
        if (entry["apiVersion"], entry["kind"]) not in offered:
            continue
        resource = cluster.resources.get(api_version=entry["apiVersion"], kind=entry["kind"])
        if resource.namespaced:
            entry["metadata"]["namespace"] = namespace
        where = {"namespace": namespace} if resource.namespaced else {}
        cluster.server_side_apply(
            resource, body=entry, name=entry["metadata"]["name"], field_manager="test", dry_run="All", **where
        )
        taken += 1
    assert taken >= 2


@pytest.mark.parametrize("name", CASES)
def test_every_pod_may_enter_a_restricted_namespace(api: client.ApiClient, namespace: str, name: str) -> None:
    core = client.CoreV1Api(api)
    for number, (_, pod) in enumerate(pods(resources(rendered_case(name)))):
        spec = {key: value for key, value in pod.items() if key not in NO_POD}
        spec |= {"serviceAccountName": "default", "restartPolicy": "Never"}
        mounted = {mount["name"] for container in containers(spec) for mount in container["volumeMounts"]}
        spec["volumes"] += [
            {"name": mount, "emptyDir": {}} for mount in mounted - {volume["name"] for volume in spec["volumes"]}
        ]
        body = {"metadata": {"name": f"pod-{number}"}, "spec": spec}
        core.create_namespaced_pod(namespace, body, dry_run="All")
