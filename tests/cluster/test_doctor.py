"""`enginery doctor --cluster` on a real API server, with nodes that exist as objects only."""

import base64
import json
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from enginery.cluster.server import Login
from enginery.cluster.settings import load_settings
from enginery.doctor.access import ClusterAccess
from enginery.doctor.checks import Diagnosis
from enginery.doctor.cluster import diagnose_cluster
from enginery.doctor.cluster_nodes import RIGHTS
from tests.unit.doctor.cluster_api import claim, gpu_node

pytestmark = pytest.mark.cluster
RUNNER = "pipeline-runner"


@pytest.fixture
def product(api: Any) -> Iterator[str]:
    """A GPU that two nodes have and nothing else of this cluster."""
    kind = f"TEST-{uuid.uuid4().hex[:8]}"
    core = client.CoreV1Api(api)
    names = [f"{kind.lower()}-{number}" for number in range(2)]
    try:
        for name in names:
            node = gpu_node(name, **{"nvidia.com/gpu.product": kind})
            core.create_node(node)
            # A new node counts as not ready until its kubelet says otherwise. A patch: controllers write to it, too.
            taints = [taint.to_dict() for taint in node.spec.taints]
            core.patch_node(name, {"spec": {"taints": taints}})
            ready = {"type": "Ready", "status": "True", "reason": "Test", "message": ""}
            amounts = {"allocatable": node.status.allocatable, "capacity": node.status.capacity}
            core.patch_node_status(name, {"status": {**amounts, "conditions": [ready]}})
        yield kind
    finally:  # no pod of the cluster may be given to them
        for name in names:
            with suppress(client.ApiException):
                core.delete_node(name)


def diagnose(namespace: str, product: str, folder: Path) -> Diagnosis:
    settings = {
        "namespace": namespace,
        "service_account": RUNNER,
        "image_pull_secrets": ["registry-login"],
        "images": {"registry": "registry.invalid/vision"},
        "every_step": {"secrets": [{"name": "s3", "env": {"AWS_ACCESS_KEY_ID": "accesskey"}}]},
        "train_job": {"volume": {"claim": "shared", "mount_path": "/mnt/shared"}, "runtime": "of-no-cluster"},
        **{step: {"gpu": {"product": product}} for step in ("train", "export", "validate")},
    }
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(settings))
    return diagnose_cluster(ClusterAccess(load_settings(file, num_nodes=2), "", Login(source="")))


def test_a_cluster_is_fixed_by_what_the_doctor_says(api: Any, namespace: str, product: str, tmp_path: Path) -> None:
    core, rights = client.CoreV1Api(api), client.RbacAuthorizationV1Api(api)

    def statuses() -> dict[str, str]:
        return {check.name: check.status for check in diagnose(namespace, product, tmp_path).checks}

    before = statuses()
    broken = ("volumes", "secrets", "pull secrets", "rights of the step")
    assert {name: before[name] for name in broken} == dict.fromkeys(broken, "missing")
    well = ("Kubernetes API", "namespace", "GPU nodes", "GPU drivers", "GPU quota")
    assert {name: before[name] for name in well} == dict.fromkeys(well, "ok")
    assert before["Kubeflow Trainer"] == "missing"  # its runtime, or all of it

    shared = claim("shared")
    shared.spec.resources = client.V1ResourceRequirements(requests={"storage": "1Gi"})
    core.create_namespaced_persistent_volume_claim(namespace, shared)
    auths = json.dumps({"auths": {"registry.invalid": {"auth": base64.b64encode(b"a:b").decode()}}}).encode()
    for name, kind, data in (
        ("s3", "Opaque", {"accesskey": "eA=="}),
        ("registry-login", "kubernetes.io/dockerconfigjson", {".dockerconfigjson": base64.b64encode(auths).decode()}),
    ):
        metadata = client.V1ObjectMeta(name=name)
        core.create_namespaced_secret(namespace, client.V1Secret(metadata=metadata, type=kind, data=data))
    metadata = client.V1ObjectMeta(name=RUNNER)
    core.create_namespaced_service_account(namespace, client.V1ServiceAccount(metadata=metadata))
    rules = [
        client.V1PolicyRule(api_groups=[group], resources=[f"{kind}/{sub}" if sub else kind], verbs=list(verbs))
        for group, kind, sub, verbs in RIGHTS
    ]
    assert statuses()["rights of the step"] == "missing"
    rights.create_namespaced_role(namespace, client.V1Role(metadata=metadata, rules=rules))
    reference = client.V1RoleRef(api_group="rbac.authorization.k8s.io", kind="Role", name=RUNNER)
    subject = client.RbacV1Subject(kind="ServiceAccount", name=RUNNER, namespace=namespace)
    binding = client.V1RoleBinding(metadata=metadata, role_ref=reference, subjects=[subject])
    rights.create_namespaced_role_binding(namespace, binding)

    after = statuses()
    fixed = ("secrets", "pull secrets", "rights of the step")
    assert {name: after[name] for name in fixed} == dict.fromkeys(fixed, "ok")
    assert after["volumes"] in ("ok", "warning")  # where nothing binds it, it is pending
