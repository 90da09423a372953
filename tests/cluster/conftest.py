"""Shared by the tests on a real API server: a namespace of their own, Kubeflow Trainer's kinds, and nothing else.

They need KUBECONFIG alone, with the rights of an administrator. Where no kubelet and no controllers run, the tests do
what those would. TRAINER_CRDS names a folder with Kubeflow Trainer's CRDs (manifests/base/crds of its repository) to
install where the cluster has no Trainer; without it a definition that takes any TrainJob stands in.
"""

import os
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config

from components.train.train_job import GROUP, PLURAL, VERSION

_DEFINITION = f"{PLURAL}.{GROUP}"


@pytest.fixture(scope="session")
def api() -> Any:
    """The cluster of KUBECONFIG."""
    assert os.environ.get("KUBECONFIG"), "KUBECONFIG is not set: name the file of a cluster to test on"
    configuration = client.Configuration()
    config.load_kube_config(os.environ["KUBECONFIG"], client_configuration=configuration)
    return client.ApiClient(configuration)


@pytest.fixture(scope="session")
def has_real_trainer(api: Any) -> bool:
    """Installs the definition of TrainJobs where there is none. Returns whether it is the Trainer's own."""
    extensions = client.ApiextensionsV1Api(api)
    with suppress(client.ApiException):
        found = extensions.read_custom_resource_definition(_DEFINITION)
        return not (found.metadata.labels or {}).get("enginery.io/stand-in")
    folder = os.environ.get("TRAINER_CRDS", "")
    definitions = [yaml.safe_load(path.read_text()) for path in sorted(Path(folder).glob(f"{GROUP}_*.yaml"))]
    for definition in definitions if folder else [_stand_in()]:
        extensions.create_custom_resource_definition(definition)
    for _ in range(100):
        with suppress(client.ApiException):
            client.CustomObjectsApi(api).list_cluster_custom_object(GROUP, VERSION, PLURAL)
            break
    return bool(folder)


def _stand_in() -> dict[str, Any]:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": VERSION, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"plural": PLURAL, "singular": "trainjob", "kind": "TrainJob", "listKind": "TrainJobList"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": _DEFINITION, "labels": {"enginery.io/stand-in": "true"}},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": names,
            "versions": [{**version, "subresources": {"status": {}}}],
        },
    }


@pytest.fixture
def namespace(api: Any) -> Iterator[str]:
    """One of the test's own, which goes with it."""
    name = f"enginery-test-{uuid.uuid4().hex[:8]}"
    core = client.CoreV1Api(api)
    core.create_namespace(client.V1Namespace(metadata=client.V1ObjectMeta(name=name)))
    with suppress(client.ApiException):  # a controller's work, where one runs
        core.create_namespaced_service_account(
            name, client.V1ServiceAccount(metadata=client.V1ObjectMeta(name="default"))
        )
    yield name
    core.delete_collection_namespaced_pod(name, grace_period_seconds=0)  # no kubelet ends them
    core.delete_namespace(name)
