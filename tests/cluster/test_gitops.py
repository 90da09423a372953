"""`enginery deploy`, a push, and Flux: the serving pods change their model while clients ask for labels.

Beside KUBECONFIG it needs Flux's controllers, a default storage class, the images `cli` and `serve` where the nodes
find them (REGISTRY, TAG), and GIT_URL: a git repository that this machine pushes a branch to and Flux reads.
"""

import json
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from tests.processes import ROOT
from tests.unit.conftest import promoted, proved, store  # noqa: F401
from tests.unit.registered import NAME, checkout, deploy, enginery, exported, git, make_chain, promote_chain  # noqa: F401

from .test_pods import known_image, run_in_pod, start_pod, store_repositories, wait_for  # noqa: F401

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("GIT_URL"), reason="GIT_URL names no git repository that Flux reads"),
]
ENVIRONMENTS = ("staging", "prod")
# In a pod: four threads ask until /tmp/end is there, at least once. Prints the number of each label or error.
ASK = """
import base64, collections, json, os, struct, sys, threading, urllib.request
url, image = json.loads(sys.stdin.readline())
image = base64.b64decode(image)
tensor = {"name": "IMAGE", "shape": [1, 1], "datatype": "BYTES", "parameters": {"binary_data_size": len(image) + 4}}
outputs = [{"name": "LABELS", "parameters": {"binary_data": False}}]
header = json.dumps({"inputs": [tensor], "outputs": outputs}).encode()
headers = {"Inference-Header-Content-Length": str(len(header)), "Content-Type": "application/octet-stream"}
body, found = header + struct.pack("<I", len(image)) + image, []
def ask():
    ended = False
    while not ended:
        ended = os.path.exists("/tmp/end")
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as answer:
                found.append(json.load(answer)["outputs"][0]["data"][0])
        except Exception as error:
            found.append(repr(error))
threads = [threading.Thread(target=ask) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("ANSWERS", json.dumps(collections.Counter(found)))
"""


class Flux:
    """The environments of a branch in git, as Flux brings them to the cluster."""

    def __init__(self, api: Any, branch: str) -> None:
        self.api, self.branch = client.CustomObjectsApi(api), branch
        self.apps, self.core = client.AppsV1Api(api), client.CoreV1Api(api)

    def push(self) -> None:
        git("push", "--quiet", os.environ["GIT_URL"], f"HEAD:refs/heads/{self.branch}")

    def wait(self, environment: str, digest: str) -> None:
        """Until the environment's only pod serves the repository of this digest, and is ready."""

        def serves() -> bool:
            with suppress(client.ApiException):  # not there yet
                found = self.apps.read_namespaced_deployment("enginery-serve", f"enginery-{environment}")
                (fetch,) = found.spec.template.spec.init_containers
                newest = found.status.observed_generation == found.metadata.generation
                counts = {found.status.replicas, found.status.updated_replicas, found.status.ready_replicas}
                return f"sha256:{digest}" in fetch.args and newest and counts == {1}
            return False

        wait_for(serves, f"{environment} serves {digest}")

    def has_account(self, environment: str) -> bool:
        """True if its namespace is there, and pods can be made in it."""
        with suppress(client.ApiException):
            return bool(self.core.read_namespaced_service_account("default", f"enginery-{environment}"))
        return False

    def is_gone(self, group: str, plural: str, name: str) -> bool:
        with suppress(client.ApiException):
            return not self.api.get_namespaced_custom_object(group, "v1", "flux-system", plural, name)
        return True

    def refusals(self, environment: str) -> list[str]:
        """Pods that tried a second time to fetch their repository."""
        found = self.core.list_namespaced_pod(
            f"enginery-{environment}", label_selector="app.kubernetes.io/component=serve"
        )
        states = [(pod, state) for pod in found.items for state in pod.status.init_container_statuses or ()]
        return [pod.metadata.name for pod, state in states if state.restart_count]

    def ask(self, environment: str, image: str) -> "Clients":
        return Clients(self.core, environment, image)


class Clients:
    """A pod that asks for the label of an image all the time."""

    def __init__(self, core: client.CoreV1Api, environment: str, image: str) -> None:
        self.core, self.namespace = core, f"enginery-{environment}"
        url = f"http://enginery-serve:8000/v2/models/{NAME}/infer"
        self.said: list[tuple[int, str]] = []
        arguments = (["python", "-c", ASK], json.dumps([url, image]), 1800)
        self.thread = threading.Thread(target=lambda: self.said.append(self.run(*arguments)), daemon=True)
        self.thread.start()

    def run(self, command: list[str], line: str = "", timeout_s: float = 60) -> tuple[int, str]:
        return run_in_pod(self.core, self.namespace, "client", command, line, timeout_s)

    def end(self) -> dict[str, int]:
        """Number of each answer."""
        self.run(["touch", "/tmp/end"])
        self.thread.join(120)
        self.run(["rm", "/tmp/end"])
        ((code, said),) = self.said
        assert code == 0, said
        print(said)
        return dict(json.loads(said.partition("ANSWERS ")[2]))


@pytest.fixture
def flux(api: Any, checkout: Path) -> Iterator[Flux]:  # noqa: F811
    """The checkout with chart and releases of ours, on a branch of the git server that Flux follows."""
    made = Flux(api, f"enginery-test-{uuid.uuid4().hex[:8]}")
    for folder in ("enginery", "flux"):
        shutil.copytree(ROOT / "helm" / folder, checkout / "helm" / folder)
    for name in ENVIRONMENTS:
        file = checkout / f"helm/environments/{name}/values.yaml"
        values = yaml.safe_load(file.read_text())
        values["images"] |= {"registry": os.environ["REGISTRY"], "tag": os.environ["TAG"]}
        del values["serve"]["model"]["uri"]
        values["serve"]["model"]["existingClaim"] = "models"
        values["serve"] |= {"gpu": {"count": 0}, "monitoring": {"enabled": False}, "replicas": 1}
        values["serve"]["resources"] = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "4Gi"}}
        values["mlflow"] = {"enabled": False}
        file.write_text(yaml.safe_dump(values))
    releases = checkout / "helm/flux/releases/kustomization.yaml"
    releases.write_text(releases.read_text().replace("dev.yaml, ", ""))
    for release in releases.parent.glob("*.yaml"):  # nothing is removed while a controller waits for refused pods
        release.write_text(release.read_text().replace("timeout: 20m", "timeout: 2m"))
    git("add", "--all")
    git("commit", "--quiet", "--message", "The chart, and values of this cluster")
    made.push()
    source, kustomization = yaml.safe_load_all((ROOT / "helm/flux/source.yaml").read_text())
    source["spec"] |= {"url": os.environ["GIT_URL"], "ref": {"branch": made.branch}, "interval": "5s"}
    kustomization["spec"]["timeout"] = "2m"
    kinds = (
        ("source.toolkit.fluxcd.io", "gitrepositories", source),
        ("kustomize.toolkit.fluxcd.io", "kustomizations", kustomization),
    )
    for group, plural, body in kinds:
        made.api.create_namespaced_custom_object(group, "v1", "flux-system", plural, body)
    try:
        yield made
    finally:  # with the kustomization its releases and namespaces go
        for group, plural, body in reversed(kinds):
            name = body["metadata"]["name"]
            made.api.delete_namespaced_custom_object(group, "v1", "flux-system", plural, name)
            wait_for(lambda at=(group, plural, name): made.is_gone(*at), f"{name} of {plural} is gone", 300)
        git("push", "--quiet", os.environ["GIT_URL"], f":refs/heads/{made.branch}")


@pytest.mark.usefixtures("promoted")
def test_environments_follow_deploy(
    flux: Flux,
    store: str,  # noqa: F811
    proved: Any,  # noqa: F811
    known_image: tuple[str, str],  # noqa: F811
    tmp_path: Path,
) -> None:
    image, label = known_image
    # Version 2 says another class, whatever it sees, so that answers tell which version gave them.
    classes = proved.dataset.manifest.classes
    other = classes[(classes.index(label) + 1) % len(classes)]
    chain = make_chain(tmp_path / "other", 90, data=proved.dataset, favourite=classes.index(other))
    promote_chain(store, chain, tmp_path / "other/promotion", NAME, allow_other_model=True)
    repositories = [exported(f"{NAME}/{number}") for number in (1, 2)]
    for name in ENVIRONMENTS:
        wait_for(lambda name=name: flux.has_account(name), f"the namespace of {name}")
        first, second = store_repositories(flux.core, f"enginery-{name}", *repositories)
        start_pod(flux.core, f"enginery-{name}", "client")

    deploy("staging", f"{NAME}/1")
    flux.push()
    flux.wait("staging", first)
    clients = flux.ask("staging", image)
    deploy("staging", f"{NAME}/2")
    flux.push()
    flux.wait("staging", second)
    answers = clients.end()
    assert set(answers) == {label, other}, answers  # none failed

    clients = flux.ask("staging", image)
    enginery("deploy", "--env", "prod", "--from", "staging")
    flux.push()
    flux.wait("prod", second)
    assert set(clients.end()) == {other}
    clients = flux.ask("prod", image)
    assert set(clients.end()) == {other}

    clients = flux.ask("staging", image)
    enginery("deploy", "--env", "staging", "--rollback")
    flux.push()
    flux.wait("staging", first)
    answers = clients.end()
    assert set(answers) == {label, other}, answers
    clients = flux.ask("staging", image)
    assert set(clients.end()) == {label}

    # Somebody changes version 2 in the store: its pod never begins, and version 1 answers on.
    change = f"open('/store/{second}/manifest.json', 'a').write(' ')"
    assert run_in_pod(flux.core, "enginery-staging", "fill", ["python", "-c", change], "", 60)[0] == 0
    clients = flux.ask("staging", image)
    deploy("staging", f"{NAME}/2")
    flux.push()
    wait_for(lambda: flux.refusals("staging"), "the new pod refuses its repository")
    assert set(clients.end()) == {label}
