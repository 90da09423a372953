"""`enginery doctor --cluster`: what is in the way of a run is said with its fix, and nothing else is."""

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from kubernetes import client as k8s

from enginery.cli.doctor import doctor
from enginery.cluster.server import Login
from enginery.cluster.settings import load_settings
from enginery.doctor.access import ClusterAccess
from enginery.doctor.checks import Check
from enginery.doctor.cluster import ImageName, all_checks, conclude, diagnose_cluster
from tests.serving import serving
from tests.unit.doctor.cluster_api import NAMESPACE, ClusterApi, claim, cpu_node, gpu_node, login, secret

REPOSITORY = Path(__file__).resolve().parents[3]
EXAMPLE = REPOSITORY / "pipelines/configs/cluster.yaml"
Change = Callable[[ClusterApi], Any]


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterApi]:
    with serving(ClusterApi(tmp_path)) as state:
        state.ready()
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
        for variable in ("KFP_TOKEN", "KFP_COOKIE", "KF_PIPELINES_ENDPOINT"):
            monkeypatch.delenv(variable, raising=False)
        yield state


def access(api: ClusterApi, num_nodes: int = 2, endpoint: str = "here", **changes: Any) -> ClusterAccess:
    """By the example settings, with the images in the test's registry."""
    values = yaml.safe_load(EXAMPLE.read_text())
    values["images"] = {"registry": f"{api.host}/vision", "tag": "0.1.0"}
    for key, value in changes.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    file = api.folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(values))
    settings = load_settings(file, num_nodes=num_nodes)
    return ClusterAccess(settings, api.endpoint if endpoint == "here" else endpoint, Login(source=""))


def check_of(api: ClusterApi, name: str, **changes: Any) -> Check:
    """Run one check alone."""
    (planned,) = [planned for planned in all_checks(access(api, **changes)) if planned.name == name]
    return planned.run()


def test_a_cluster_where_all_is_well(api: ClusterApi) -> None:
    diagnosis = diagnose_cluster(access(api))
    assert {check.name: (check.status, check.found) for check in diagnosis.checks if check.status != "ok"} == {}
    assert (diagnosis.conclusion, diagnosis.exit_code) == ("Nothing is in the way of a run here.", 0)
    found = {check.name: check.found for check in diagnosis.checks}
    assert found["GPU nodes"] == "2 nodes with 16 x NVIDIA-H200; train, export, validate fit"
    assert found["MLflow"] == "http://enginery-mlflow.mlflow:5000 answers in the cluster"


def limit_range(memory: str) -> Any:
    item = k8s.V1LimitRangeItem(type="Container", default={"memory": memory})
    return k8s.V1LimitRange(metadata=k8s.V1ObjectMeta(name="l"), spec=k8s.V1LimitRangeSpec(limits=[item]))


def quota(gpus: str) -> Any:
    status = k8s.V1ResourceQuotaStatus(hard={"requests.nvidia.com/gpu": gpus})
    return k8s.V1ResourceQuota(metadata=k8s.V1ObjectMeta(name="gpus"), status=status)


def break_nodes(api: ClusterApi) -> None:
    """One whose kubelet is gone, and one that is cordoned."""
    api.nodes[0].status.conditions = [k8s.V1NodeCondition(type="Ready", status="Unknown")]
    api.nodes[1].spec.unschedulable = True


TAINT = k8s.V1Taint(key="dedicated", value="llm", effect="NoSchedule")
OLDER_LABELS = {
    f"nvidia.com/cuda.driver.{part}": value for part, value in (("major", "570"), ("minor", "86"), ("rev", "9"))
}
SECRETS = f"/api/v1/namespaces/{NAMESPACE}/secrets"


@pytest.mark.parametrize(
    "case",
    [
        (
            "namespace",
            lambda a: a.absent.add(f"/api/v1/namespaces/{NAMESPACE}"),
            "there is no namespace",
            "namespace",
        ),
        ("Kubeflow Pipelines", lambda a: setattr(a, "kfp_is_well", False), "not as Kubeflow", "Give the URL"),
        (
            "MLflow",
            lambda a: a.absent.add("/api/v1/namespaces/mlflow/services/enginery-mlflow"),
            "there is no service enginery-mlflow in mlflow",
            "install the chart",
        ),
        ("GPU nodes", lambda a: setattr(a, "nodes", [cpu_node()]), "none offers nvidia.com/gpu", "GPU operator"),
        ("GPU nodes", lambda a: a.nodes.pop(0), "train needs 2 nodes with", "train.gpu.product"),
        (
            "GPU nodes",
            lambda a: setattr(a, "nodes", [gpu_node(**{"nvidia.com/gpu.product": "Tesla-T4"})]),
            "0 of 1 GPU nodes have them (GPUs here: Tesla-T4)",
            "train.gpu.product",
        ),
        (
            "GPU nodes",
            lambda a: setattr(a, "nodes", [gpu_node("a", taints=[TAINT]), gpu_node("b", taints=[TAINT])]),
            "taints keep it off: dedicated=llm:NoSchedule",
            "add them to train.tolerations",
        ),
        (
            "GPU nodes",
            lambda a: setattr(a, "nodes", [gpu_node("a", gpus=2), gpu_node("b", gpus=2)]),
            "with 4 GPUs, 32 CPUs, 256Gi, and too few of the 2 that it may use are that large (most GPUs of one: 2)",
            "lower train.gpu.count",
        ),
        (
            "GPU drivers",
            lambda a: a.nodes.append(gpu_node("gpu-3", driver="535.183.01")),
            "CUDA 13 needs driver 580.65.06 or newer: gpu-3 has 535.183.01",
            "update the driver",
        ),
        (
            "GPU quota",
            lambda a: a.quotas.append(quota("4")),
            "allows 4 of nvidia.com/gpu, and train asks for 8",
            "quota",
        ),
        ("volumes", lambda a: a.claims.pop("images"), "there is no claim images", "make it"),
        (
            "volumes",
            lambda a: a.claims.update(shared=claim("shared", "ReadWriteOnce")),
            "the claim shared in team-vision is ReadWriteOnce, and several nodes write to it",
            "ReadWriteMany",
        ),
        (
            "volumes",
            lambda a: a.claims.update(images=claim("images", phase="Lost")),
            "has lost its volume",
            "restore",
        ),
        ("secrets", lambda a: a.secrets.pop("s3-login"), "there is no secret s3-login", "create secret generic"),
        (
            "secrets",
            lambda a: a.secrets.update({"s3-login": secret("s3-login", ("accesskey",))}),
            "the secret s3-login has no secretkey; it has accesskey",
            "fix the key",
        ),
        (
            "pull secrets",
            lambda a: a.secrets.pop("registry-login"),
            "there is no secret registry-login",
            "docker-reg",
        ),
        (
            "pull secrets",
            lambda a: a.secrets.update({"registry-login": secret("registry-login", ("x",))}),
            "is of type Opaque, and must be kubernetes.io/dockerconfigjson",
            "create secret docker-registry",
        ),
        (
            "pull secrets",
            lambda a: a.secrets.update({"registry-login": login("registry-login", "quay.io")}),
            "none of registry-login is for 127.0.0.1",
            "--docker-server=127.0.0.1",
        ),
        (
            "image pull",
            lambda a: a.images.update({"vision/train": 403}),
            "does not let the pull secret pull",
            "login",
        ),
        ("image pull", lambda a: a.images.update({"vision/export": 404}), "has no 127.0.0.1", "push it"),
        (
            "Kubeflow Trainer",
            lambda a: setattr(a, "has_trainer", False),
            "has no Kubeflow Trainer",
            "install Kubeflow",
        ),
        ("Kubeflow Trainer", lambda a: setattr(a, "is_old", True), "older than 2.2", "2.2 or newer"),
        (
            "Kubeflow Trainer",
            lambda a: setattr(a, "runtimes", ()),
            "no ClusterTrainingRuntime torch-dist",
            "runtime",
        ),
        (
            "rights of the step",
            lambda a: a.forbidden.update({("create", "trainjobs"): True, ("get", "pods/log"): True}),
            "pipeline-runner may not create trainjobs.trainer.kubeflow.org, get pods/log in team-vision",
            "bind the chart's Role",
        ),
        (
            "rights of the step",
            lambda a: a.absent.add(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/pipeline-runner"),
            "there is no service account pipeline-runner",
            "service_account",
        ),
        (
            "rights of the step",
            lambda a: None,
            "there is no service account trainer in team-vision",
            "create serviceaccount trainer",
            {"train_job": {"service_account": "trainer"}},
        ),
        (
            "shared memory",
            lambda a: a.limits.append(limit_range("8Gi")),
            "gives containers 8Gi of memory, and export has 8Gi of /dev/shm, which counts as memory",
            "set export.memory",
            {"export": {"memory": ""}},
        ),
        ("GPU nodes", break_nodes, "of 1 nodes none offers nvidia.com/gpu", "GPU operator"),
        (
            "image pull",
            lambda a: a.images.update({"vision/train": 401}),
            "does not let anybody pull",
            "image_pull_secrets",
            {"image_pull_secrets": []},
        ),
        (
            "GPU drivers",
            lambda a: a.nodes.append(gpu_node("gpu-3", driver="", **OLDER_LABELS)),
            "gpu-3 has 570.86.9",
            "update the driver",
        ),
        (
            "MLflow",
            lambda a: None,
            "steps in different pods need a server",
            "name an MLflow server",
            {"every_step": {"env": {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}}},
        ),
        (
            "Kubeflow Pipelines",
            lambda a: a.absent.add("/api/v1/namespaces/kubeflow/services/ml-pipeline"),
            "there is no service ml-pipeline",
            "--endpoint",
            {"endpoint": ""},
        ),
    ],
    ids=lambda case: case[0],
)
def test_what_is_in_the_way(api: ClusterApi, case: tuple[Any, ...]) -> None:
    name, change, found, fix, *settings = case
    change(api)
    check = check_of(api, name, **dict(*settings))
    assert check.status == "missing", check
    assert found in check.found
    assert fix in check.fix
    conclusion = conclude([check])
    assert conclusion.exit_code == 1
    assert name in conclusion.conclusion


@pytest.mark.parametrize(
    "case",
    [
        (
            "GPU drivers",
            lambda a: a.nodes.append(gpu_node("gpu-3", driver="")),
            "no label says which driver gpu-3 has",
        ),
        ("storage classes", lambda a: setattr(a, "default_class", False), "no default among fast"),
        ("volumes", lambda a: a.claims.update(images=claim("images", phase="Pending")), "not bound yet: images"),
        ("GPU nodes", lambda a: a.refused.add("/api/v1/nodes"), "you may not read nodes (403 Forbidden)"),
        ("secrets", lambda a: a.refused.add(f"{SECRETS}/s3-login"), "you may not read secrets"),
        (
            "rights of the step",
            lambda a: a.refused.add("/apis/authorization.k8s.io/v1/subjectaccessreviews"),
            "you may not ask what system:serviceaccount:team-vision:pipeline-runner may; you may all of it yourself",
        ),
        ("MLflow", lambda a: None, "the settings name no MLFLOW_TRACKING_URI", {"every_step": {"env": {}}}),
        ("Kubeflow Pipelines", lambda a: None, "the service ml-pipeline is in kubeflow", {"endpoint": ""}),
    ],
    ids=lambda case: case[0],
)
def test_what_is_doubtful_stops_nothing(api: ClusterApi, case: tuple[Any, ...]) -> None:
    name, change, found, *settings = case
    change(api)
    check = check_of(api, name, **dict(*settings))
    assert check.status == "warning", check
    assert found in check.found
    assert check.fix
    conclusion = conclude([check])
    assert (conclusion.exit_code, name in conclusion.conclusion) == (0, True)


@pytest.mark.parametrize(
    ("name", "change", "num_nodes", "status"),
    [
        ("Kubeflow Trainer", lambda a: setattr(a, "has_trainer", False), 1, "absent"),
        ("rights of the step", lambda a: a.forbidden.update({("create", "trainjobs"): True}), 1, "absent"),
        ("shared memory", lambda a: a.limits.append(limit_range("64Gi")), 2, "ok"),
    ],
)
def test_what_does_not_matter(api: ClusterApi, name: str, change: Change, num_nodes: int, status: str) -> None:
    change(api)
    assert check_of(api, name, num_nodes=num_nodes, export={"memory": ""}).status == status


def test_no_cluster_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    result = CliRunner().invoke(doctor, ["--cluster", "--json", "--settings", str(EXAMPLE)])
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["conclusion"].endswith("is fixed: Kubernetes API.")
    assert "KUBECONFIG" in report["checks"][0]["fix"]


def test_the_table(api: ClusterApi) -> None:
    file = api.folder / "s.yaml"
    settings = {"namespace": NAMESPACE, "service_account": "pipeline-runner", "images": {"registry": f"{api.host}/v"}}
    file.write_text(yaml.safe_dump(settings))
    result = CliRunner().invoke(doctor, ["--cluster", "--settings", str(file), "--endpoint", api.endpoint])
    shown = " ".join(result.stdout.split())
    assert result.exit_code == 0, shown
    assert "Nothing is in the way of a run here, as far as could be seen; look at: MLflow." in shown
    assert "fix: set every_step.env.MLFLOW_TRACKING_URI" in shown


def test_a_registry_that_asks_for_a_login(api: ClusterApi) -> None:
    api.wants_login = True
    assert check_of(api, "image pull").found.startswith("5 images of 127.0.0.1")
    basic = base64.b64encode(b"puller:right").decode()
    assert f"Basic {basic}" in api.tokens  # to the one who gives tokens
    assert "Bearer of-the-registry" in api.tokens


@pytest.mark.parametrize(
    ("options", "code"),
    [(("--cluster", "--endpoint", "localhost:8080"), "endpoint-not-url"), (("--num-nodes", "2"), "needs-cluster")],
)
def test_options_are_checked_before_anything_is_asked(api: ClusterApi, options: tuple[str, ...], code: str) -> None:
    error = CliRunner().invoke(doctor, options).exception
    assert getattr(error, "code", "") == code
    assert api.requests == []


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("ghcr.io/enginery/train:0.1.0", ("ghcr.io", "enginery/train", "0.1.0")),
        ("localhost:5000/train", ("localhost:5000", "train", "latest")),
        ("r.example.com:5000/a/b@sha256:12", ("r.example.com:5000", "a/b", "sha256:12")),
        ("team/train:1", ("registry-1.docker.io", "team/train", "1")),
        ("alpine", ("registry-1.docker.io", "library/alpine", "latest")),
    ],
)
def test_names_of_images(reference: str, parts: tuple[str, str, str]) -> None:
    assert ImageName.parse(reference) == ImageName(*parts)
