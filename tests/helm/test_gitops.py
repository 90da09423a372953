"""Argo CD and Flux install the chart of this repository with the values that `enginery deploy` writes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from enginery.release.deploy import set_values
from tests.helm.rendering import CHART, REPOSITORY, named, pods, render_files, resources
from tests.helm.test_security import violations

HELM = REPOSITORY / "helm"
ENVIRONMENTS = ("dev", "prod", "staging")
DIGEST = "sha256:" + "3b" * 32


def documents(file: Path) -> list[dict[str, Any]]:
    return [found for found in yaml.safe_load_all(file.read_text(encoding="utf-8")) if found]


def values(name: str) -> str:
    return (HELM / f"environments/{name}/values.yaml").read_text(encoding="utf-8")


def objects(text: str) -> list[dict[str, Any]]:
    return resources(render_files(yaml.safe_load(text)))


def test_the_environments() -> None:
    assert sorted(path.parent.name for path in (HELM / "environments").glob("*/values.yaml")) == list(ENVIRONMENTS)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_environment_before_and_after_its_first_deployment(name: str) -> None:
    text = values(name)
    assert not [entry for entry in objects(text) if entry["kind"] == "Rollout"]
    deployed = {"name": "classifier", "version": "7", "digest": DIGEST, "repositoryDigest": DIGEST}
    text = set_values(text, {("serve", "model", key): value for key, value in deployed.items()}, name)
    text = set_values(text, {("serve", "enabled"): True, ("images", "digests", "serve"): DIGEST}, name)
    serve = named(render_files(yaml.safe_load(text)), "Deployment", "serve")["spec"]["template"]["spec"]
    assert [triton["image"] for triton in serve["containers"]] == [f"ghcr.io/enginery/serve@{DIGEST}"]
    assert all(violations(pod) == [] for _, pod in pods(objects(text)))


def test_argo_cd_has_an_application_for_each_environment() -> None:
    (applications,) = documents(HELM / "argocd/applications.yaml")
    elements = applications["spec"]["generators"][0]["list"]["elements"]
    assert sorted(element["env"] for element in elements) == list(ENVIRONMENTS)
    assert [element["env"] for element in elements if not element["automatic"]] == ["prod"]
    template = applications["spec"]["template"]["spec"]
    assert (REPOSITORY / template["source"]["path"] / "Chart.yaml").is_file()
    (file,) = template["source"]["helm"]["valueFiles"]
    for name in ENVIRONMENTS:
        assert (CHART / file.replace("{{ .env }}", name)).resolve() == HELM / f"environments/{name}/values.yaml"
    (project,) = documents(HELM / "argocd/project.yaml")
    assert template["project"] == project["metadata"]["name"]
    assert template["source"]["repoURL"] in project["spec"]["sourceRepos"]
    allowed = {entry["namespace"] for entry in project["spec"]["destinations"]}
    assert {template["destination"]["namespace"].replace("{{ .env }}", name) for name in ENVIRONMENTS} <= allowed
    cluster_wide = {(entry["group"], entry["kind"]) for entry in project["spec"]["clusterResourceWhitelist"]}
    made = [entry for name in ENVIRONMENTS for entry in objects(values(name))]
    kinds = {entry["kind"] for entry in made if "namespace" not in entry["metadata"]}
    assert {("rbac.authorization.k8s.io", kind) for kind in kinds} <= cluster_wide
    assert {entry["metadata"].get("namespace") for entry in made} <= {*allowed, None, "team-vision"}


def test_flux_reads_the_same_files() -> None:
    source, kustomization = documents(HELM / "flux/source.yaml")
    assert (REPOSITORY / kustomization["spec"]["path"] / "kustomization.yaml").is_file()
    (listed,) = documents(HELM / "flux/releases/kustomization.yaml")
    assert sorted(listed["resources"]) == [f"{name}.yaml" for name in ENVIRONMENTS]
    (applications,) = documents(HELM / "argocd/applications.yaml")
    assert source["spec"]["url"] == applications["spec"]["template"]["spec"]["source"]["repoURL"]
    for name in ENVIRONMENTS:
        namespace, release = documents(HELM / f"flux/releases/{name}.yaml")
        chart = release["spec"]["chart"]["spec"]
        assert chart["valuesFiles"][-1] == f"helm/environments/{name}/values.yaml"
        assert all((REPOSITORY / file).is_file() for file in chart["valuesFiles"])
        assert (REPOSITORY / chart["chart"] / "Chart.yaml").is_file()
        assert chart["sourceRef"]["name"] == source["metadata"]["name"]
        assert chart["reconcileStrategy"] == "Revision"
        assert release["metadata"]["namespace"] == namespace["metadata"]["name"]
        assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
