"""The chart's pods on nodes: they become ready and pass `helm test`, and no data is lost with a pod or a release.

Beside KUBECONFIG they need a default storage class, and the images `cli`, `mlflow` and `serve` where the nodes find
them: REGISTRY and TAG name those, and POSTGRESQL another PostgreSQL than the official one.
"""

import base64
import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml
from kubernetes import client, utils
from kubernetes.stream import stream

from enginery.release.verify import load_chain
from enginery.serving.repository import RepositoryConfig, write_repository
from enginery.serving.sources import of_chain
from tests.helm.rendering import CHART
from tests.unit.conftest import proved  # noqa: F401
from tests.waiting import wait_until

NEEDS_IMAGES = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("REGISTRY"), reason="REGISTRY names no images for the nodes"),
]
pytestmark = NEEDS_IMAGES
RELEASE = "t"
MODEL = "digits"
PASSWORD = "0123456789abcdef"
# In MLflow's pod, as the administrator.
CLIENT = """
import os, mlflow
os.environ["MLFLOW_TRACKING_USERNAME"] = "admin"
os.environ["MLFLOW_TRACKING_PASSWORD"] = os.environ["MLFLOW_AUTH_ADMIN_PASSWORD"]
mlflow.set_tracking_uri("http://127.0.0.1:5000")
client = mlflow.MlflowClient()
"""
WRITE = """
run = client.create_run(client.create_experiment("kept")).info.run_id
client.log_metric(run, "score_pct", 98.6)
client.log_text(run, "an artifact", "note.txt")
"""
READ = """
(run,) = client.search_runs([client.get_experiment_by_name("kept").experiment_id])
text = mlflow.artifacts.load_text(run.info.artifact_uri + "/note.txt")
print("READ", run.data.metrics["score_pct"], text)
"""
UNPACK = "import base64, io, sys, tarfile; data = io.BytesIO(base64.b64decode(sys.stdin.readline())); "
UNPACK += "tarfile.open(fileobj=data).extractall(sys.argv[1]); print('unpacked')"
USER = {"runAsUser": 10001, "fsGroup": 10001}
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def image(name: str) -> str:
    return f"{os.environ['REGISTRY']}/{name}:{os.environ['TAG']}"


def wait_for(reached: Callable[[], bool], what: str, timeout_s: float = 600) -> None:
    wait_until(reached, lambda: f"{what}: not within {timeout_s:.0f} s", seconds=timeout_s, every_s=1.0)


@pytest.fixture
def restricted(api: Any, namespace: str) -> str:
    """The namespace, where the server lets in restricted pods alone, with the secrets that the chart names."""
    core = client.CoreV1Api(api)
    core.patch_namespace(namespace, {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}})
    for name, data in (
        ("mlflow-auth", {"adminPassword": PASSWORD, "secretKey": PASSWORD}),
        ("postgresql", {"password": PASSWORD, "uri": f"postgresql://mlflow:{PASSWORD}@database/mlflow"}),
    ):
        core.create_namespaced_secret(namespace, {"metadata": {"name": name}, "stringData": data})
    database = list(yaml.safe_load_all((Path(__file__).parent / "database.yaml").read_text(encoding="utf-8")))
    (container,) = database[-1]["spec"]["template"]["spec"]["containers"]
    container["image"] = os.environ.get("POSTGRESQL", container["image"])
    utils.create_from_yaml(api, yaml_objects=database, namespace=namespace)
    wait_for(lambda: Cluster(api, namespace).ready("postgresql", "stateful_set"), "PostgreSQL is ready")
    return namespace


def run_in_pod(
    core: client.CoreV1Api, namespace: str, pod: str, command: list[str], line: str, timeout_s: float, **options: str
) -> tuple[int, str]:
    """Exit code and output of a command, which gets a line of text."""
    own = client.ApiClient(core.api_client.configuration)  # `stream` changes it for a moment
    connection = stream(
        client.CoreV1Api(own).connect_get_namespaced_pod_exec,
        pod,
        namespace,
        command=command,
        stdin=True,
        stdout=True,
        stderr=True,
        _preload_content=False,
        **options,
    )
    for start in range(0, len(line), 1 << 16):
        connection.write_stdin(line[start : start + (1 << 16)])
    connection.write_stdin("\n")
    connection.run_forever(timeout=timeout_s)
    code = connection.returncode  # before the rest is read, which drops it
    return code, connection.read_all()


class Cluster:
    """The release, and what its pods say."""

    def __init__(self, api: Any, namespace: str) -> None:
        self.apps, self.core, self.namespace = client.AppsV1Api(api), client.CoreV1Api(api), namespace

    def ready(self, name: str, kind: str = "deployment") -> bool:
        """True if all pods are of the newest revision and ready."""
        found = getattr(self.apps, f"read_namespaced_{kind}")(f"{RELEASE}-enginery-{name}", self.namespace)
        status = found.status
        newest = status.observed_generation == found.metadata.generation and status.updated_replicas == 1
        return bool(newest and status.ready_replicas == 1 and status.replicas == 1)

    def wait(self) -> None:
        wait_for(lambda: self.ready("postgresql", "stateful_set"), "PostgreSQL is ready")
        for name in ("mlflow", "serve"):
            wait_for(lambda name=name: self.ready(name), f"{name} is ready")

    def pods(self, component: str) -> list[Any]:
        selector = f"app.kubernetes.io/instance={RELEASE},app.kubernetes.io/component={component}"
        return self.core.list_namespaced_pod(self.namespace, label_selector=selector).items

    def run(self, pod: str, code: str, line: str = "", container: str | None = None) -> str:
        """Output of Python code in a pod, which gets a line of text."""
        options = {"container": container} if container else {}
        exit_code, said = run_in_pod(self.core, self.namespace, pod, ["python", "-c", code], line, 120, **options)
        assert exit_code == 0, said
        return said

    def in_mlflow(self, code: str) -> str:
        (pod,) = self.pods("mlflow")
        return self.run(pod.metadata.name, CLIENT + code)

    def kill(self, component: str) -> None:
        """Take a pod away without notice, as a lost node does."""
        (pod,) = self.pods(component)
        self.core.delete_namespaced_pod(pod.metadata.name, self.namespace, grace_period_seconds=0)


@pytest.fixture
def repository(proved, tmp_path: Path) -> Path:  # noqa: F811
    source = of_chain(load_chain(*proved.parts.values()), MODEL, "1", "int8", {})
    return write_repository(source, tmp_path / "models", RepositoryConfig(max_wait_s=60)).path


@pytest.fixture
def known_image(proved) -> tuple[str, str]:  # noqa: F811
    """An image of the validation split in base64, and its label."""
    shard = proved.dataset.manifest.splits["val"].shards[0]
    with tarfile.open(proved.dataset.file(shard)) as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}
    name = next(name for name in members if not name.endswith(".cls"))
    label = proved.dataset.manifest.classes[int(members[f"{Path(name).stem}.cls"])]
    return base64.b64encode(members[name]).decode(), label


@pytest.fixture
def cluster(api: Any, restricted: str) -> Cluster:
    return Cluster(api, restricted)


def start_pod(
    core: client.CoreV1Api,
    namespace: str,
    name: str,
    claim: str = "",
    *,
    step: str = "cli",
    place: str = "/store",
    user: Mapping[str, int] = USER,
    env: Mapping[str, str] = {},
    **more: Any,
) -> None:
    """One of a step's image, in which commands run, with a claim in a folder. `more` is further fields of its spec."""
    container = {
        "name": "main",
        "image": image(step),
        "command": ["sleep", "7200"],
        "securityContext": RESTRICTED,
        "env": [{"name": variable, "value": value} for variable, value in env.items()],
        "volumeMounts": [{"name": "store", "mountPath": place}] if claim else [],
    }
    spec = {
        "containers": [container],
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **user},
        "volumes": [{"name": "store", "persistentVolumeClaim": {"claimName": claim}}] if claim else [],
        "terminationGracePeriodSeconds": 1,
        **more,
    }
    core.create_namespaced_pod(namespace, {"metadata": {"name": name}, "spec": spec})
    wait_for(lambda: core.read_namespaced_pod(name, namespace).status.phase == "Running", f"the pod {name} runs")


def make_claim(core: client.CoreV1Api, namespace: str, name: str, mode: str = "ReadWriteMany") -> None:
    claim = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
    core.create_namespaced_persistent_volume_claim(namespace, {"metadata": {"name": name}, "spec": claim})


def unpack(
    core: client.CoreV1Api, namespace: str, pod: str, folders: Mapping[str, Path], place: str = "/store"
) -> None:
    """Put folders into one of a pod's, by the names that they get there."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, folder in folders.items():
            tar.add(folder, arcname=name)
    packed = base64.b64encode(buffer.getvalue()).decode()
    code, said = run_in_pod(core, namespace, pod, ["python", "-c", UNPACK, place], packed, 300)
    assert (code, "unpacked" in said) == (0, True), said


def store_repositories(core: client.CoreV1Api, namespace: str, *repositories: Path) -> list[str]:
    """Put model repositories into a new claim `models`, which the pod `fill` has at /store. Returns their digests."""
    make_claim(core, namespace, "models", "ReadWriteOnce")
    start_pod(core, namespace, "fill", "models")
    digests = [sha256((folder / "manifest.json").read_bytes()).hexdigest() for folder in repositories]
    unpack(core, namespace, "fill", dict(zip(digests, repositories, strict=True)))
    return digests


@pytest.fixture
def values(cluster: Cluster, repository: Path, known_image: tuple[str, str]) -> dict[str, Any]:
    """Of a release whose model repository is in a claim."""
    (digest,) = store_repositories(cluster.core, cluster.namespace, repository)
    cluster.core.delete_namespaced_pod("fill", cluster.namespace, grace_period_seconds=0)
    manifest = json.loads((repository / "manifest.json").read_text())
    small = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "4Gi"}}
    return {
        "images": {"registry": os.environ["REGISTRY"], "tag": os.environ["TAG"]},
        "mlflow": {
            "auth": {"existingSecret": "mlflow-auth"},
            "database": {"existingSecret": "postgresql"},
            "artifacts": {"pvc": {"size": "1Gi"}},
            "resources": small,
        },
        "serve": {
            "enabled": True,
            "gpu": {"count": 0},
            "resources": small,
            "model": {
                "name": manifest["name"],
                "version": "1",
                "digest": "sha256:" + 64 * "0",
                "repositoryDigest": f"sha256:{digest}",
                "existingClaim": "models",
            },
            "test": {"image": known_image[0], "label": known_image[1]},
        },
    }


def test_pods_are_ready_and_nothing_is_lost(cluster: Cluster, values: dict[str, Any]) -> None:
    with helm_python.Config(namespace=cluster.namespace) as helm:
        helm.install(CHART, RELEASE, values)
        cluster.wait()
        helm.test(RELEASE, timeout=600)
        cluster.in_mlflow(WRITE)
        kept = cluster.in_mlflow(READ)
        assert "READ 98.6 an artifact" in kept

        for component in ("postgresql", "mlflow", "serve"):
            cluster.kill(component)
        cluster.wait()
        assert "READ 98.6 an artifact" in cluster.in_mlflow(READ)

        # A repository that is not there: its pod never begins, and the old one still answers.
        (old,) = cluster.pods("serve")
        wrong = {**values["serve"]["model"], "repositoryDigest": "sha256:" + 64 * "f"}
        helm.upgrade(CHART, RELEASE, {**values, "serve": {**values["serve"], "model": wrong}})

        def refused() -> bool:
            new = [pod for pod in cluster.pods("serve") if pod.metadata.name != old.metadata.name]
            return any(state.restart_count for pod in new for state in pod.status.init_container_statuses or ())

        wait_for(refused, "the new pod's repository is refused")
        helm.test(RELEASE, timeout=600)
        assert old.metadata.name in [pod.metadata.name for pod in cluster.pods("serve")]
        helm.rollback(RELEASE, version=1)
        cluster.wait()
        left = [old.metadata.name]
        wait_for(lambda: [pod.metadata.name for pod in cluster.pods("serve")] == left, "the old pod is alone")

        helm.uninstall(RELEASE)
        wait_for(lambda: not cluster.pods("mlflow"), "the pods are gone")
        helm.install(CHART, RELEASE, values)
        cluster.wait()
        assert "READ 98.6 an artifact" in cluster.in_mlflow(READ)
