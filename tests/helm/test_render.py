"""The chart over a matrix of values: Helm's linter, strict schemas of Kubernetes and of operators, golden files.

What is in the golden files has no other test, but for what files of other folders say, too. The operators' schemas are
not in this repository: CRDS names a folder with a YAML file for each of their CustomResourceDefinitions. PROMTOOL names
Prometheus' program that tests alerts: see `make test-alerts`.
"""

import functools
import itertools
import json
import os
import subprocess
import tomllib
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml

from enginery.doctor.cluster_nodes import RIGHTS
from tests.helm.rendering import (
    CASES,
    CHART,
    NAMESPACE,
    NOTES,
    RELEASE,
    REPOSITORY,
    case,
    named,
    render_files,
    rendered_case,
    resources,
)

VERSIONS = ("1.30", "1.37")
# Objects of operators that Kubernetes itself has no schema of.
FOREIGN = ("argoproj.io/", "gateway.networking.k8s.io/", "monitoring.coreos.com/", "serving.kserve.io/")
GOLDEN = Path(__file__).parent / "golden"

# It reads the same 1.5 MB of definitions for every object.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


@pytest.mark.parametrize("name", CASES)
def test_lint(name: str) -> None:
    for version in VERSIONS:
        report = helm_python.lint(CHART, case(name), strict=True, kube_version=f"v{version}.0")
        assert report["errors"] == []
        assert [message["error"] for message in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize(("name", "version"), itertools.product(CASES, VERSIONS))
def test_strict_schemas(name: str, version: str) -> None:
    checked = 0
    for entry in resources(rendered_case(name)):
        if not entry["apiVersion"].startswith(FOREIGN):
            kubernetes_validate.validate(entry, version, strict=True)
            checked += 1
    assert checked >= 2


def test_the_schemas_are_strict() -> None:
    entry = named(rendered_case("minimal"), "Deployment")
    entry["spec"]["template"]["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="resource"):
        kubernetes_validate.validate(entry, VERSIONS[0], strict=True)


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, request: pytest.FixtureRequest) -> None:
    files = rendered_case(name)
    text = "".join(f"# {file.removeprefix('enginery/')}\n{body.strip()}\n" for file, body in files.items())
    path = GOLDEN / f"{name}.yaml"
    if request.config.getoption("--update-golden"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), (
        f"the chart renders {name} in another way; `make golden`, then read the diff"
    )


@pytest.mark.parametrize("name", CASES)
def test_every_object_is_found_by_its_labels(name: str) -> None:
    files = rendered_case(name)
    seen = set()
    for entry in resources(files):
        labels = entry["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "demo"
        assert labels["app.kubernetes.io/part-of"] == "enginery"
        key = (entry["kind"], entry["metadata"].get("namespace"), entry["metadata"]["name"])
        assert key not in seen
        seen.add(key)
    for service in (entry for entry in resources(files) if entry["kind"] == "Service"):
        wanted = service["spec"]["selector"].items()
        owners = [
            entry
            for entry in resources(files)
            if "template" in entry.get("spec", {}) and wanted <= entry["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert len(owners) == 1, service["metadata"]["name"]
        ports = {port["name"] for port in owners[0]["spec"]["template"]["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}


def test_mlflow_is_set_as_the_compose_file_sets_it() -> None:
    services = yaml.safe_load((CHART.parents[1] / "mlflow/compose.yaml").read_text(encoding="utf-8"))["services"]
    (container,) = named(rendered_case("external"), "Deployment")["spec"]["template"]["spec"]["containers"]
    # A cluster's bucket is there before the chart is.
    assert set(services["mlflow"]["environment"]) - {"ENGINERY_MAKE_BUCKET"} <= set(environment(container))


def test_long_names_fit_what_is_made_of_them() -> None:
    for values in ({"fullnameOverride": "a" * 41}, {"nameOverride": "b" * 41}):
        for entry in resources(render_files({**case("full"), **values})):
            assert len(entry["metadata"]["name"]) <= 63, entry["metadata"]["name"]


def test_notes_say_that_the_ingress_controller_is_not_let_in() -> None:
    values = case("external")
    assert "does not let the Ingress controller in" not in rendered_case("external")[NOTES]
    values["networkPolicy"]["clientNamespaces"] = []
    assert "does not let the Ingress controller in" in render_files(values)[NOTES]


@pytest.mark.parametrize(("name", "behind_a_store"), [("restricted", False), ("external", True)])
def test_notes_keep_files_on_the_way_through_the_server(name: str, behind_a_store: bool) -> None:
    """MLflow's clients would ask for addresses of the store, which are made for the pods alone."""
    assert ("MLFLOW_ENABLE_PROXY_MULTIPART_DOWNLOAD=false" in rendered_case(name)[NOTES]) is behind_a_store


def test_callers_from_outside_are_named_by_their_addresses() -> None:
    values = case("minimal")
    values["networkPolicy"] = {"clientCidrs": ["10.0.0.0/8"]}
    values["mlflow"]["service"] = {"type": "LoadBalancer"}
    files = render_files(values)
    assert named(files, "Service")["spec"]["type"] == "LoadBalancer"
    sources = named(files, "NetworkPolicy", "mlflow")["spec"]["ingress"][0]["from"]
    assert {"ipBlock": {"cidr": "10.0.0.0/8"}} in sources


def namespace(name: str) -> dict[str, Any]:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}


def reaches(rules: list[dict[str, Any]], address: str, port: int) -> bool:
    """True if a policy lets a pod out to an address that is no pod's."""
    for rule in rules:
        if "ports" in rule and port not in {entry["port"] for entry in rule["ports"]}:
            continue
        blocks = [peer["ipBlock"] for peer in rule.get("to", [{"ipBlock": {"cidr": "0.0.0.0/0"}}]) if "ipBlock" in peer]
        for block in blocks:
            nets = [ip_network(text) for text in (block["cidr"], *block.get("except", ()))]
            if ip_address(address) in nets[0] and not any(ip_address(address) in net for net in nets[1:]):
                return True
    return False


@pytest.mark.parametrize("name", CASES)
def test_no_pod_reaches_the_clouds_credentials_or_any_machine_around(name: str) -> None:
    policies = [entry for entry in resources(rendered_case(name)) if entry["kind"] == "NetworkPolicy"]
    for policy in policies:
        rules = policy["spec"]["egress"]
        assert all(rule.get("to") for rule in rules), policy["metadata"]["name"]
        mapped = ("64:ff9b::a9fe:a9fe", "64:ff9b:1::a9fe:a9fe", "2002:a9fe:a9fe::1")
        inner = ("169.254.169.254", "::1", "10.0.0.7", *mapped)
        for address, port in (("169.254.169.254", 80), *((address, 443) for address in inner)):
            assert not reaches(rules, address, port), (policy["metadata"]["name"], address, port)


def test_where_pods_reach() -> None:
    def egress(part: str, **changed: Any) -> list[dict[str, Any]]:
        values = case("full")
        values["objectStore"] = {"endpointUrl": changed.pop("store", "")}
        values["networkPolicy"] = {**values["networkPolicy"], **changed}
        found: list[dict[str, Any]] = named(render_files(values), "NetworkPolicy", part)["spec"]["egress"]
        return found

    assert reaches(egress("serve"), "142.250.1.1", 443)
    assert not reaches(egress("serve"), "142.250.1.1", 5432)
    assert reaches(egress("mlflow"), "10.20.3.4", 5432)
    assert not reaches(egress("mlflow"), "10.21.3.4", 5432)
    assert reaches(egress("mlflow", egressCidrs=[], egressNamespaces=[]), "10.21.3.4", 5432)  # nobody said where
    assert namespace("storage") in egress("serve", store="http://seaweedfs.storage:8333")[1]["to"]
    assert namespace("storage") in egress("serve", store="http://minio.storage.svc.cluster.local")[1]["to"]
    assert egress("serve", store="http://minio:9000")[1]["to"] == [{"podSelector": {}}]
    assert egress("serve", store="http://10.1.2.3:9000")[1]["to"] == [{"ipBlock": {"cidr": "10.1.2.3/32"}}]
    for store in ("https://s3.example.org", "https://minio.storage.example", "http://a.b.c.d:9000"):
        rule = egress("serve", store=store, egressCidrs=[], egressNamespaces=[])[1:2]
        reached = [reaches(rule, address, 443) for address in ("142.250.1.1", "10.20.3.4", "192.168.1.5")]
        assert reached == [True, False, False]
        assert reaches(egress("serve", store=store)[1:2], "10.20.3.4", 443)
    for named_ones in ({}, {"egressCidrs": [], "egressNamespaces": []}):
        inside = egress("serve", store="https://minio.storage.example", publicEgress=False, **named_ones)
        assert not reaches(inside, "142.250.1.1", 443)
        assert reaches(inside, "10.20.3.4", 443) is not bool(named_ones)
        assert all(rule["to"] for rule in inside)  # an empty list would be everywhere
    claim = case("full")
    claim["serve"]["model"] = {**claim["serve"]["model"], "uri": "", "existingClaim": "models"}
    assert named(render_files(claim), "NetworkPolicy", "serve")["spec"]["egress"] == []


def test_the_identity_that_fetches_is_not_that_of_triton() -> None:
    values = case("full")
    role = "arn:aws:iam::123456789012:role/models"
    values["serve"]["identity"] = {"audience": "sts.amazonaws.com", "awsRoleArn": role}
    pod = named(render_files(values), "Deployment", "serve")["spec"]["template"]["spec"]
    (fetch,), (triton,) = pod["initContainers"], pod["containers"]
    assert environment(fetch)["AWS_ROLE_ARN"] == role
    assert environment(fetch)["AWS_WEB_IDENTITY_TOKEN_FILE"] == "/var/run/secrets/enginery/token"
    assert "identity" in {mount["name"] for mount in fetch["volumeMounts"]}
    assert "env" not in triton
    assert not {"identity", "gcs"} & {mount["name"] for mount in triton["volumeMounts"]}
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "identity")
    token = {"audience": "sts.amazonaws.com", "path": "token"}
    assert volume["projected"] == {"sources": [{"serviceAccountToken": token}]}
    values["serve"]["identity"].pop("audience")
    with pytest.raises(Exception, match=r"serve\.identity\.audience is empty"):
        render_files(values)


def test_the_trust_policy_is_where_the_document_has_it() -> None:
    pod = named(rendered_case("full"), "Deployment", "serve")["spec"]["template"]["spec"]
    (trust,) = (mount for mount in pod["initContainers"][0]["volumeMounts"] if mount["name"] == "trust")
    assert f"sigstore: {trust['mountPath']}/" in (REPOSITORY / "docs/security.md").read_text()


def test_steps_may_make_trainjobs_where_they_run() -> None:
    objects = resources(rendered_case("full"))
    assert not [entry for entry in objects if entry["kind"].startswith("ClusterRole")]
    roles = [entry for entry in objects if entry["kind"] == "Role"]
    assert {role["metadata"]["namespace"] for role in roles} == {"kubeflow", "team-vision"}
    for role in roles:
        rule = next(rule for rule in role["rules"] if rule["resources"] == ["trainjobs"])
        assert rule["verbs"] == ["create", "get", "delete"]
        given = {
            (group, resource.partition("/")[0], resource.partition("/")[2], verb)
            for rule in role["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        # What the step does, which `enginery doctor --cluster` asks for, and nothing else.
        assert given == {(*what, verb) for *what, verbs in RIGHTS for verb in verbs}


def test_releases_of_two_environments_do_not_meet() -> None:
    """Of one name, as with GitOps: what they have in a third namespace must not be the same object."""

    def made(namespace: str) -> set[tuple[str, str, str]]:
        with helm_python.Chart.load(CHART) as chart:
            files = chart.render(case("full"), name=RELEASE, namespace=namespace)
        found = [entry for name, text in files.items() if name != NOTES for entry in yaml.safe_load_all(text) if entry]
        return {(entry["kind"], entry["metadata"]["namespace"], entry["metadata"]["name"]) for entry in found}

    dev, prod = made("enginery-dev"), made("enginery-prod")
    assert {kind for kind, namespace, _ in dev if namespace == "kubeflow"} == {"Role", "RoleBinding"}
    assert dev & prod == set()


def test_a_packaged_chart_renders_the_same(tmp_path: Path) -> None:
    archive = Path(helm_python.package(CHART, destination=tmp_path))
    assert archive.name == "enginery-0.2.0.tgz"
    with helm_python.Chart.load(archive) as chart:
        files = chart.render(case("minimal"), name="demo", namespace="team-vision")
        packed = {entry["name"] for entry in chart.files}
    assert {name: text for name, text in files.items() if name in rendered_case("minimal")} == rendered_case("minimal")
    assert {"files/test_mlflow.py", "files/test_serve.py", "README.md"} <= packed


def test_the_chart_has_the_version_of_the_project() -> None:
    project = tomllib.loads((CHART.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == project["version"]


@functools.cache
def definitions() -> dict[tuple[str, str], dict[str, Any]]:
    """Schemas of operators by version and kind."""
    found = {}
    for file in sorted(Path(os.environ["CRDS"]).glob("*.yaml")):
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
    if isinstance(changed.get("pattern"), str):
        changed["pattern"] = changed["pattern"].replace("^(?i)", "(?i)^")  # as Python writes it
    if schema.get("x-kubernetes-int-or-string"):
        changed = {key: value for key, value in changed.items() if key not in ("type", "anyOf", "pattern")}
    # A property may itself be called "properties": then no type stands beside it.
    elif schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        changed.setdefault("additionalProperties", bool(schema.get("x-kubernetes-preserve-unknown-fields")))
    return changed


def check(entry: dict[str, Any]) -> None:
    schema = definitions()[entry["apiVersion"], entry["kind"]]
    known = {"apiVersion", "kind", "metadata"}
    properties = {key: value for key, value in schema["properties"].items() if key not in known}
    required = [key for key in schema.get("required", ()) if key not in known]
    body = {key: value for key, value in entry.items() if key not in known}
    jsonschema.validate(body, {**schema, "properties": properties, "required": required})


@pytest.mark.skipif("CRDS" not in os.environ, reason="CRDS names no folder with CustomResourceDefinitions")
def test_objects_of_operators() -> None:
    cases = {"Rollout": "rollout", "InferenceService": "kserve", "ServiceMonitor": "full", "PrometheusRule": "full"}
    for kind, name in cases.items():
        (entry,) = (entry for entry in resources(rendered_case(name)) if entry["kind"] == kind)
        check(entry)
        entry["spec"]["unheardOf"] = 1
        with pytest.raises(jsonschema.ValidationError, match="unheardOf"):
            check(entry)
    for file in ("argocd/project.yaml", "argocd/applications.yaml", "flux/source.yaml", "flux/releases/prod.yaml"):
        for entry in yaml.safe_load_all((REPOSITORY / "helm" / file).read_text(encoding="utf-8")):
            if entry["kind"] != "Namespace":
                check(entry)


@pytest.mark.skipif("PROMTOOL" not in os.environ, reason="`make test-alerts` installs promtool and runs this test")
def test_alerts(tmp_path: Path) -> None:
    """The sample alerts by their own tests; the chart's by those of drift, for its service and for no other."""

    def promtool(*command: str) -> None:
        done = subprocess.run([os.environ["PROMTOOL"], *command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    for file in (REPOSITORY / "containers/serve").glob("alerts*.yaml"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    promtool("check", "rules", "--lint=all", "--lint-fatal", "alerts.yaml")
    promtool("test", "rules", "alerts_test.yaml")
    (tmp_path / "chart.yaml").write_text(json.dumps(named(rendered_case("full"), "PrometheusRule")["spec"]))
    promtool("check", "rules", "--lint=all", "--lint-fatal", "chart.yaml")
    tests = yaml.safe_load((tmp_path / "alerts_test.yaml").read_text(encoding="utf-8"))["tests"]
    (drift,) = (test for test in tests if test["alert_rule_test"][0]["alertname"] == "ModelInputsDrifted")
    service = f"{RELEASE}-enginery-serve"
    for namespace in (NAMESPACE, "another"):
        labels = f"namespace='{namespace}', service='{service}'"
        test = json.loads(json.dumps(drift).replace("{model=", f"{{{labels}, model="))
        for at in test["alert_rule_test"]:
            expected = at.get("exp_alerts", []) if namespace == NAMESPACE else []
            at["exp_alerts"] = [
                {**alert, "exp_labels": {**alert["exp_labels"], "namespace": namespace, "service": service}}
                for alert in expected
            ]
        (tmp_path / "chart_test.yaml").write_text(json.dumps({"rule_files": ["chart.yaml"], "tests": [test]}))
        promtool("test", "rules", "chart_test.yaml")
