"""`enginery doctor --cluster`: what is in the way of a run is said with its fix, and nothing else is."""

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client as k8s

from enginery.cluster.server import Login
from enginery.cluster.settings import load_settings
from enginery.doctor.access import ClusterAccess
from enginery.doctor.checks import Check
from enginery.doctor.cluster import all_checks, conclude, diagnose_cluster, image_address
from tests.serving import Served, serving
from tests.unit import registered
from tests.unit.doctor.cluster_api import NAMESPACE, ClusterApi, claim, cpu_node, gpu_node, login, secret

EXAMPLE = registered.ROOT / "pipelines/configs/cluster.yaml"
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
    values["images"] = {"registry": f"{api.host}/vision", "tag": "0.2.0"}
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
    assert found["GPU nodes"] == "2 nodes with 16 x NVIDIA-H200; train, export, validate, analyze fit"
    assert found["MLflow"] == "http://enginery-mlflow.mlflow:5000 answers in the cluster"


def limit_range(memory: str) -> Any:
    item = k8s.V1LimitRangeItem(type="Container", default={"memory": memory})
    return k8s.V1LimitRange(metadata=k8s.V1ObjectMeta(name="l"), spec=k8s.V1LimitRangeSpec(limits=[item]))


def quota(gpus: str) -> Any:
    status = k8s.V1ResourceQuotaStatus(hard={"requests.nvidia.com/gpu": gpus})
    return k8s.V1ResourceQuota(metadata=k8s.V1ObjectMeta(name="gpus"), status=status)


def nothing(api: ClusterApi) -> None:
    """Leave the cluster as it is."""


def break_nodes(api: ClusterApi) -> None:
    """One whose kubelet is gone, and one that is cordoned."""
    api.nodes[0].status.conditions = [k8s.V1NodeCondition(type="Ready", status="Unknown")]
    api.nodes[1].spec.unschedulable = True


TAINT = k8s.V1Taint(key="dedicated", value="llm", effect="NoSchedule")
OLDER_LABELS = {
    f"nvidia.com/cuda.driver.{part}": value for part, value in (("major", "570"), ("minor", "86"), ("rev", "9"))
}
CORE = f"/api/v1/namespaces/{NAMESPACE}"
NO_MEMORY = {"export": {"memory": ""}}


def change(**attributes: Any) -> Change:
    """Set attributes of the cluster."""
    return lambda api: [setattr(api, name, value) for name, value in attributes.items()]


def lacks(path: str) -> Change:
    return lambda api: api.absent.add(path)


def refuses(path: str) -> Change:
    return lambda api: api.refused.add(path)


def has_secret(name: str, made: Any) -> Change:
    return lambda api: api.secrets.update({name: made})


def has_claim(name: str, **options: str) -> Change:
    return lambda api: api.claims.update({name: claim(name, **options)})


def answers(repository: str, status: int) -> Change:
    return lambda api: api.images.update({repository: status})


def adds_node(**options: Any) -> Change:
    return lambda api: api.nodes.append(gpu_node("gpu-3", **options))


FORBIDDEN = {("create", "trainjobs"): True, ("get", "pods/log"): True}
TAINTED = [gpu_node(name, taints=[TAINT]) for name in "ab"]
TESLA = [gpu_node(**{"nvidia.com/gpu.product": "Tesla-T4"})]
NO_LOGIN = secret("registry-login", ("x",))
SQLITE = {"every_step": {"env": {"MLFLOW_TRACKING_URI": "sqlite:///mlflow.db"}}}
MISSING: list[tuple[Any, ...]] = [
    ("namespace", lacks(f"/api/v1/namespaces/{NAMESPACE}"), "there is no namespace"),
    ("Kubeflow Pipelines", change(kfp_is_well=False), "not as Kubeflow"),
    ("Kubeflow Pipelines", lacks("/api/v1/namespaces/kubeflow/services/ml-pipeline"), "no service", {"endpoint": ""}),
    ("MLflow", lacks("/api/v1/namespaces/mlflow/services/enginery-mlflow"), "no service enginery-mlflow in mlflow"),
    ("MLflow", nothing, "steps in different pods need a server", SQLITE),
    ("MLflow", change(mlflow_hosts="other.example,enginery-mlflow"), "answers 403: MLFLOW_SERVER_ALLOWED_HOSTS is"),
    ("GPU nodes", change(nodes=[cpu_node()]), "none offers nvidia.com/gpu"),
    ("GPU nodes", break_nodes, "of 1 nodes none offers nvidia.com/gpu"),
    ("GPU nodes", lambda api: api.nodes.pop(0), "train needs 2 nodes with"),
    ("GPU nodes", change(nodes=TESLA), "0 of 1 GPU nodes have them (GPUs here: Tesla-T4)"),
    ("GPU nodes", change(nodes=TAINTED), "taints keep it off: dedicated=llm:NoSchedule"),
    ("GPU nodes", change(nodes=[gpu_node(name, gpus=2) for name in "ab"]), "too few of the 2 that it may use"),
    ("GPU drivers", adds_node(driver="535.183.01"), "needs driver 580.65.06 or newer: gpu-3 has 535.183.01"),
    ("GPU drivers", adds_node(driver="", **OLDER_LABELS), "gpu-3 has 570.86.9"),
    ("GPU quota", change(quotas=[quota("4")]), "allows 4 of nvidia.com/gpu, and train asks for 8"),
    ("shared memory", change(limits=[limit_range("8Gi")]), "gives containers 8Gi", NO_MEMORY),
    ("volumes", lambda api: api.claims.pop("images"), "there is no claim images"),
    ("volumes", has_claim("shared", mode="ReadWriteOnce"), "is ReadWriteOnce, and several nodes write to it"),
    ("volumes", has_claim("images", phase="Lost"), "has lost its volume"),
    ("secrets", lambda api: api.secrets.pop("s3-login"), "there is no secret s3-login"),
    ("secrets", has_secret("s3-login", secret("s3-login", ("accesskey",))), "has no secretkey; it has accesskey"),
    ("pull secrets", lambda api: api.secrets.pop("registry-login"), "there is no secret registry-login"),
    ("pull secrets", has_secret("registry-login", NO_LOGIN), "is of type Opaque, and must be kubernetes.io/docker"),
    ("pull secrets", has_secret("registry-login", login("registry-login", "quay.io")), "none of registry-login is for"),
    ("image pull", answers("vision/train", 403), "does not let the pull secret pull"),
    ("image pull", change(wants_login=True, token_status=401), "does not let the pull secret pull"),
    ("image pull", answers("vision/train", 401), "does not let anybody pull", {"image_pull_secrets": []}),
    ("image pull", answers("vision/export", 404), "has no 127.0.0.1"),
    ("Kubeflow Trainer", change(has_trainer=False), "has no Kubeflow Trainer"),
    ("Kubeflow Trainer", change(is_old=True), "older than 2.2"),
    ("Kubeflow Trainer", change(runtimes=()), "no ClusterTrainingRuntime torch-dist"),
    ("rights of the step", change(forbidden=FORBIDDEN), "create trainjobs.trainer.kubeflow.org, get pods/log in team"),
    ("rights of the step", lacks(f"{CORE}/serviceaccounts/pipeline-runner"), "no service account pipeline-runner"),
    ("rights of the step", nothing, "no service account trainer", {"train_job": {"service_account": "trainer"}}),
]


WARNINGS: list[tuple[Any, ...]] = [
    ("shared memory", nothing, "train 64Mi: under 1.0 GB", {"train": {"shm": "64Mi"}}),
    ("GPU drivers", adds_node(driver=""), "no label says which driver gpu-3 has"),
    ("retries", change(retry_strategy="{limit: '2', retryPolicy: OnError}"), "a step that is stopped, evicted or"),
    ("retries", change(retry_strategy="{}"), "OnFailure, so a step whose pod or node is lost is not tried again"),
    ("retries", lacks("/api/v1/namespaces/kubeflow/configmaps/workflow-controller-configmap"), "OnFailure"),
    ("retries", nothing, "train begins at its first epoch", {"num_nodes": 1, "train_job": {"volume": None}}),
    ("Kubeflow Trainer", change(patched="nodeSelector"), "older than 2.3 and drops terminationGracePeriodSeconds"),
    ("storage classes", change(default_class=False), "no default among fast"),
    ("volumes", has_claim("images", phase="Pending"), "not bound yet: images"),
    ("artifacts", lacks(f"{CORE}/configmaps/kfp-launcher"), "has no providers.s3, so each step uploads to s3://kfp-a"),
    ("artifacts", nothing, "has no providers.gs", {"pipeline_root": "gs://bucket"}),
    ("GPU nodes", refuses("/api/v1/nodes"), "you may not read nodes (403 Forbidden)"),
    ("secrets", refuses(f"{CORE}/secrets/s3-login"), "you may not read secrets"),
    ("rights of the step", refuses("/apis/authorization.k8s.io/v1/subjectaccessreviews"), "you may all of it yourself"),
    ("MLflow", nothing, "the settings name no MLFLOW_TRACKING_URI", {"every_step": {"env": {}}}),
    ("Kubeflow Pipelines", nothing, "the service ml-pipeline is in kubeflow", {"endpoint": ""}),
]


@pytest.mark.parametrize("case", MISSING + WARNINGS, ids=lambda case: case[0])
def test_what_is_in_the_way_and_what_is_doubtful(api: ClusterApi, case: tuple[Any, ...]) -> None:
    """The first ends with 1, and the second stops nothing."""
    name, change, found, *settings = case
    change(api)
    check = check_of(api, name, **dict(*settings))
    assert check.status == ("missing" if case in MISSING else "warning"), check
    assert found in check.found
    assert check.fix
    conclusion = conclude([check])
    assert (conclusion.exit_code, name in conclusion.conclusion) == (case in MISSING, True)


@pytest.mark.parametrize(
    ("name", "change", "num_nodes", "status"),
    [
        ("Kubeflow Trainer", change(has_trainer=False), 1, "absent"),
        ("Kubeflow Trainer", change(patched="nodeSelector"), 1, "ok"),
        ("rights of the step", change(forbidden={("create", "trainjobs"): True}), 1, "absent"),
        ("shared memory", change(limits=[limit_range("64Gi")]), 2, "ok"),
        ("retries", change(retry_strategy='{limit: "2", expression: "true"}'), 1, "ok"),
        ("volumes", has_claim("shared", mode="ReadWriteOnce"), 1, "ok"),
        ("MLflow", change(mlflow_hosts="*"), 1, "ok"),
        ("MLflow", refuses("/api/v1/namespaces/mlflow/pods"), 1, "ok"),
    ],
)
def test_what_does_not_matter(api: ClusterApi, name: str, change: Change, num_nodes: int, status: str) -> None:
    change(api)
    assert check_of(api, name, num_nodes=num_nodes, export={"memory": ""}).status == status


def test_no_cluster_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    result = registered.enginery("doctor", "--cluster", "--json", "--settings", EXAMPLE)
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["conclusion"].endswith("is fixed: Kubernetes API.")
    assert "KUBECONFIG" in report["checks"][0]["fix"]


def test_the_table(api: ClusterApi) -> None:
    file = api.folder / "s.yaml"
    settings = {"namespace": NAMESPACE, "service_account": "pipeline-runner", "images": {"registry": f"{api.host}/v"}}
    file.write_text(yaml.safe_dump(settings))
    result = registered.enginery("doctor", "--cluster", "--settings", file, "--endpoint", api.endpoint)
    shown = " ".join(result.stdout.split())
    assert result.exit_code == 0, shown
    assert "Nothing is in the way of a run here, as far as could be seen; look at: MLflow." in shown
    assert "fix: set every_step.env.MLFLOW_TRACKING_URI" in shown


def test_a_registry_that_asks_for_a_login(api: ClusterApi) -> None:
    api.wants_login = True
    assert check_of(api, "image pull").found.startswith("6 images of 127.0.0.1")
    basic = base64.b64encode(b"puller:right").decode()
    assert f"Basic {basic}" in api.tokens  # to the one who gives tokens
    assert "Bearer of-the-registry" in api.tokens


@pytest.mark.parametrize("way", ["realm", "redirects"])
@pytest.mark.parametrize("at", ["http://{}", "http://127.0.0.1:1@{}", "http://{}\\\\@127.0.0.1:1"])
def test_a_registry_that_wants_the_login_sent_elsewhere(api: ClusterApi, way: str, at: str) -> None:
    with serving(Served(answers=lambda *_: (200, {"token": "of-the-registry"}))) as thief:
        api.wants_login = True
        setattr(api, way, at.format(thief.endpoint.removeprefix("http://")) + "/token")
        found = check_of(api, "image pull")
        assert found.status == "warning", found
        assert thief.requests == []
        check_of(api, "image pull", image_pull_secrets=[])
        assert thief.requests == [], "without a login, too: it may be in an inner network"


def test_options_are_checked_before_anything_is_asked(api: ClusterApi) -> None:
    with registered.refuses("endpoint-not-url"):
        registered.enginery("doctor", "--cluster", "--endpoint", "localhost:8080")
    with registered.refuses("needs-cluster"):
        registered.enginery("doctor", "--num-nodes", "2")
    with registered.refuses("needs-machine"):
        registered.enginery("doctor", "--cluster", "--bundle", ".")
    with registered.refuses("no-manifest"):
        registered.enginery("doctor", "--bundle", "no-such-folder")
    assert api.requests == []


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("ghcr.io/enginery/train:0.2.0", ("ghcr.io", "enginery/train", "0.2.0", "")),
        ("localhost:5000/train", ("localhost:5000", "train", "latest", "")),
        ("r.example.com:5000/a/b@sha256:12", ("r.example.com:5000", "a/b", "latest", "sha256:12")),
        ("team/train:1", ("registry-1.docker.io", "team/train", "1", "")),
        ("alpine", ("registry-1.docker.io", "library/alpine", "latest", "")),
    ],
)
def test_names_of_images(reference: str, parts: tuple[str, ...]) -> None:
    assert astuple(image_address(reference)) == parts
