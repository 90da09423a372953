"""values.yaml, values.schema.json and README.md fit together, and wrong values are refused with a reason."""

import json
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
import yaml

from tests.helm.rendering import CASES, CHART, NOTES, case, render_files
from tests.processes import run_python

SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
# Whose keys are the user's own: labels and the like.
OPEN = {"stringMap", "quantities", "affinity", "removed"}
REMOVED = {name for name, value in SCHEMA["properties"].items() if value.get("$ref") == "#/$defs/removed"}


def levels(schema: dict[str, Any], values: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Every object of the chart's own in the schema, with the default values there."""
    if schema.get("type") != "object" or path in OPEN:
        return
    yield path, schema, values
    for name, child in schema["properties"].items():
        if name not in {"global", *REMOVED}:
            yield from levels(child, values.get(name, {}), f"{path}/{name}")


def test_every_key_is_in_the_schema_and_no_other() -> None:
    found = list(levels(SCHEMA, VALUES))
    assert len(found) > 25
    for path, schema, values in found:
        assert schema["additionalProperties"] is False, path
        assert set(values) == set(schema["properties"]) - {"global"} - REMOVED, path
    for name, definition in SCHEMA["$defs"].items():
        if definition.get("type") == "object" and name not in OPEN:
            assert definition["additionalProperties"] is False or "propertyNames" in definition, name


def changed(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of values with one changed."""
    copy = json.loads(json.dumps(values))
    *parents, last = path.split(".")
    level = copy
    for parent in parents:
        level = level.setdefault(parent, {})
    level[last] = value
    return copy


@pytest.mark.parametrize("path", [place.strip("/").replace("/", ".") for place, _, _ in levels(SCHEMA, VALUES)])
def test_a_misspelled_key_is_refused_at_every_level(path: str) -> None:
    values = changed(case("full"), f"{path}.replcas".lstrip("."), 1)
    with pytest.raises(helm_python.HelmValuesError, match="replcas"):
        render_files(values)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("images.tag", "latest"),
        ("images.digests.serve", "sha256:123"),
        ("security.runAsUser", 0),
        ("images.registry", "https://registry.example.com/team"),
        ("objectStore.endpointUrl", "seaweedfs:8333"),
        ("mlflow.resources.requests.cpu", "two"),
        ("serve.model.digest", "3b3b"),
        ("serve.model.uri", "/models"),
        ("serve.model.uri", "oci://registry/models:latest"),
        ("serve.gpu.resource", "gpu"),
        ("serve.test.image", "not base64"),
        ("serve.extraEnv", [{"name": "A B", "value": "c"}]),
        ("mlflow.route.hostnames", ["https://tracking.example.com"]),
        ("mlflow.ingress.host", "https://tracking.example.com"),
        ("serve.topologySpreadConstraints", [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "Never"}]),
        ("networkPolicy.clientCidrs", ["example.com"]),
        ("commonLabels", {"app.kubernetes.io/part-of": "platform"}),  # twice the same key in the objects
        ("commonLabels", {"team": "computer vision"}),
        ("serve.monitoring.labels", {"app.kubernetes.io/name": "triton"}),
        ("serve.monitoring.driftAlert.for", "a while"),
        ("fullnameOverride", "a" * 42),
    ],
)
def test_a_wrong_value_is_refused(path: str, value: Any) -> None:
    with pytest.raises(helm_python.HelmValuesError, match=f"{path.split('.')[0]}|propertyName"):
        render_files(changed(case("full"), path, value))


@pytest.mark.parametrize(
    ("base", "path", "value", "words"),
    [
        ("minimal", "mlflow.auth.existingSecret", "", "mlflow.auth.existingSecret is empty. Name a Secret"),
        ("minimal", "mlflow.database.existingSecret", "", "mlflow.database.existingSecret is empty. Name a Secret"),
        ("minimal", "postgresql.enabled", True, "Dump the database of the old release"),
        ("minimal", "submit.enabled", True, "`enginery submit` does"),
        ("minimal", "claims.images.size", "2Ti", "those that it made stay"),
        ("minimal", "mlflow.replicas", 2, "Set it to ReadWriteMany, or use s3 or gcs"),
        ("external", "mlflow.artifacts.uri", "gs://bucket", "With mlflow.artifacts.type s3 it must begin with s3://"),
        ("external", "mlflow.ingress.host", "", "mlflow.ingress.host is empty"),
        ("full", "serve.model.digest", "", "Let `enginery deploy --env ENV NAME@champion --repository DIR` write them"),
        ("full", "serve.model.repositoryDigest", "", "serve.model.repositoryDigest say what is served"),
        ("full", "serve.model.uri", "", "are both empty. Name the store"),
        ("full", "serve.model.registrySecret", "registry", "serve.model.registrySecret is for an OCI registry"),
        ("full", "serve.model.existingClaim", "models", "are both set"),
        ("full", "serve.ingress.host", "", "serve.ingress.host is empty"),
        ("full", "serve.test.label", "", "Say which label the model must answer"),
        ("full", "serve.autoscaling.maxReplicas", 1, "serve.autoscaling.minReplicas is 2 and maxReplicas 1"),
        ("full", "serve.route.hostnames", [], "serve.route.parentRefs and serve.route.hostnames say which gateway"),
        ("kserve", "serve.route.enabled", True, "serve.route is for the kinds Deployment and Rollout"),
        ("kserve", "serve.autoscaling.enabled", True, "KServe scales an InferenceService itself"),
        ("kserve", "serve.monitoring", {"enabled": True}, "serve.monitoring is for the kinds Deployment and Rollout"),
        ("kserve", "serve.test", {"image": "aGVq", "label": "7"}, "serve.test is for the kinds Deployment and Rollout"),
        ("full", "mlflow.service", {"type": "LoadBalancer"}, "mlflow.service.type is LoadBalancer, and the network"),
        ("full", "serve.service", {"type": "NodePort"}, "Name who may call in networkPolicy.clientCidrs"),
        ("gpus", "serve.sharedMemory", "32768Mi", "Shared memory counts as the pod's: give it more"),
        ("full", "serve.resources", {"requests": {"cpu": None, "memory": "1Gi"}}, "a share of the requested CPU"),
        ("full", "networkPolicy.dns", {"namespaces": [], "cidrs": []}, "Name where the cluster's name servers are"),
        ("full", "mlflow.extraEnv", [{"name": "MLFLOW_SERVER_ALLOWED_HOSTS", "value": "*"}], "HOSTS is there twice"),
        ("full", "serve.extraEnv", [{"name": "A", "value": "b"}, {"name": "A"}], "serve.extraEnv: A is there twice"),
        ("full", "analyze.extraEnv", [{"name": "POD_NAME", "value": "a"}], "analyze.extraEnv: POD_NAME is there twice"),
        ("full", "analyze.sources", ["/data/a", "rtsp://a:b@camera/x"], "Put it into a Secret"),
        ("full", "serve.monitoring.enabled", False, "serve.monitoring.driftAlert is of metrics that nobody reads"),
        ("kserve", "serve.ingress", {"enabled": True, "host": "a.example"}, "KServe makes the route"),
    ],
)
def test_values_that_contradict_each_other_are_refused_with_the_way_out(
    base: str, path: str, value: Any, words: str
) -> None:
    with pytest.raises(helm_python.HelmError) as caught:
        render_files(changed(case(base), path, value))
    assert words in str(caught.value).replace('\\"', '"')


def leaves(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict) and values:
        for name, value in values.items():
            yield from leaves(value, f"{path}.{name}".lstrip("."))
    else:
        yield path, values


def test_null_means_none_or_is_refused_by_name() -> None:
    parts = [path.split(".") for path, _ in leaves(VALUES)]
    for path in sorted({".".join(part[: end + 1]) for part in parts for end in range(len(part))}):
        try:
            found = "".join(render_files(changed(case("full"), path, None)).values())
        except helm_python.HelmError as error:
            found = str(error)
        assert not any(words in found for words in ("nil pointer", "wrong type", "%!")), (path, found)


@pytest.mark.parametrize("release", ["2024-models", "vision.prod"])
def test_a_release_whose_name_no_service_can_have_is_refused(release: str) -> None:
    with helm_python.Chart.load(CHART) as chart:
        with pytest.raises(helm_python.HelmError, match="set fullnameOverride"):
            chart.render(case("minimal"), name=release, namespace="team")
        assert chart.render(changed(case("minimal"), "fullnameOverride", "vision"), name=release, namespace="team")


def others(value: Any) -> list[Any]:
    """Values of the same kind; the schema sorts out those that do not fit."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1]
    if isinstance(value, list):
        lists = ["x"], ["10.0.0.0/8"], ["https://x.example"], ["--x"], [1234], [{"setWeight": 3}], [{"name": "x"}]
        spread = {"maxSkew": 1, "topologyKey": "x", "whenUnsatisfiable": "DoNotSchedule"}
        return [*map(list, lists), [{"key": "x", "operator": "Exists"}], [{"type": "Pods"}], [spread]]
    if isinstance(value, dict):
        return [{"x": "y"}, {"nodeAffinity": {}}, {"cpu": "9"}]
    if value is None:
        return [5]
    words = ["x", "x.example", "https://x.example:1234", "s3://x/y", "gs://x/y", "42", f"sha256:{'ab' * 32}", "5Gi"]
    words += ["17s", "MANAGE", "ReadWriteMany", "NodePort", "Always", "x.io/y", "aGVq"]
    words += ["arn:aws:iam::123456789012:role/x"]
    return [*words, "s3", "Rollout"]


def rendered(values: dict[str, Any]) -> dict[str, str]:
    return {name: text for name, text in render_files(values).items() if name != NOTES}


@pytest.mark.slow
def test_every_value_changes_something() -> None:
    """A value that no template reads is documented and does nothing."""
    cases = [case(name) for name in CASES]
    cases.append(changed(case("full"), "networkPolicy.enabled", False))
    cases.append(changed(case("full"), "serve.identity.audience", "sts.amazonaws.com"))
    before = [rendered(values) for values in cases]

    def has_effect(path: str, value: Any) -> bool:
        for other in (*others(value), value):
            for values, text in zip(cases, before, strict=True):
                try:
                    if rendered(changed(values, path, other)) != text:
                        return True
                except helm_python.HelmValuesError:
                    break  # no case takes it
                except helm_python.HelmError:
                    pass  # it contradicts another value of this one
        return False

    found = dict(leaves(VALUES))
    assert len(found) > 100
    # NOTES.txt alone names the bundle.
    assert {path for path, value in found.items() if not has_effect(path, value)} == {"serve.model.digest"}


def test_the_default_values_want_secrets_and_nothing_else() -> None:
    with pytest.raises(helm_python.HelmError, match=r"mlflow\.auth\.existingSecret is empty"):
        render_files({})


def test_readme_is_made_from_the_values(request: pytest.FixtureRequest) -> None:
    done = run_python("helm/document_values.py", CHART)
    assert done.returncode == 0, done.stderr
    path = CHART / "README.md"
    if request.config.getoption("--update-golden"):
        path.write_text(done.stdout, encoding="utf-8")
    assert done.stdout == path.read_text(encoding="utf-8"), "`make golden` writes helm/enginery/README.md again"


def test_a_value_without_a_comment_is_found(tmp_path: Any) -> None:
    (tmp_path / "Chart.yaml").write_text((CHART / "Chart.yaml").read_text())
    (tmp_path / "values.yaml").write_text("# -- Said.\nsaid: 1\npart:\n  unsaid: 2\n")
    done = run_python("helm/document_values.py", tmp_path)
    assert (done.returncode, "part.unsaid" in done.stderr) == (1, True)
