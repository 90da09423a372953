"""Objects of operators against the operators' own schemas, which are not in this repository: CRDS names a folder.

mkdir crds    # one YAML file for each CustomResourceDefinition, as the operators publish them
CRDS=crds make lint-chart
"""

import functools
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.helm.rendering import REPOSITORY, rendered_case, resources

CRDS = os.environ.get("CRDS", "")
pytestmark = pytest.mark.skipif(not CRDS, reason="CRDS names no folder with CustomResourceDefinitions of the operators")
FILES = ("argocd/project.yaml", "argocd/applications.yaml", "flux/source.yaml", "flux/releases/prod.yaml")


@functools.cache
def definitions() -> dict[tuple[str, str], dict[str, Any]]:
    """Schema by version and kind."""
    found = {}
    for file in sorted(Path(CRDS).glob("*.yaml")):
        for crd in yaml.load_all(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader):
            if crd and crd["kind"] == "CustomResourceDefinition":
                spec = crd["spec"]
                for version in spec["versions"]:
                    key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                    found[key] = strict(version["schema"]["openAPIV3Schema"])
    return found


def strict(schema: Any) -> Any:
    """The same schema, which refuses what the API server would drop."""
    if isinstance(schema, list):
        return [strict(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: strict(value) for key, value in schema.items() if key not in ("default", "format")}
    if schema.get("x-kubernetes-int-or-string"):
        changed = {key: value for key, value in changed.items() if key not in ("type", "anyOf", "pattern")}
    # A property may itself be called "properties": then no type stands beside it.
    elif schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        changed.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
    return changed


def check(entry: dict[str, Any]) -> None:
    schema = definitions()[entry["apiVersion"], entry["kind"]]
    known = {"apiVersion", "kind", "metadata"}
    body = {key: value for key, value in entry.items() if key not in known}
    properties = {key: value for key, value in schema["properties"].items() if key not in known}
    required = [key for key in schema.get("required", ()) if key not in known]
    jsonschema.validate(body, {**schema, "properties": properties, "required": required})


@pytest.mark.parametrize(
    ("name", "kind"), [("rollout", "Rollout"), ("kserve", "InferenceService"), ("full", "ServiceMonitor")]
)
def test_rendered_objects(name: str, kind: str) -> None:
    (entry,) = (entry for entry in resources(rendered_case(name)) if entry["kind"] == kind)
    check(entry)
    entry["spec"]["unheardOf"] = 1
    with pytest.raises(jsonschema.ValidationError, match="unheardOf"):
        check(entry)


@pytest.mark.parametrize("file", FILES)
def test_files_of_argo_cd_and_flux(file: str) -> None:
    for entry in yaml.safe_load_all((REPOSITORY / "helm" / file).read_text(encoding="utf-8")):
        if entry["kind"] != "Namespace":
            check(entry)
