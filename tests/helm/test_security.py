"""Every pod of every case is what the PodSecurity standard "restricted" lets in, and more."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.helm.rendering import CASES, NOTES, REPOSITORY, containers, named, pods, rendered_case, resources

TRIVY = REPOSITORY / ".linters/bin/trivy"
# https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def violations(pod: dict[str, Any]) -> list[str]:
    """Settings of a pod that "restricted" refuses."""
    found = [key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    for volume in pod.get("volumes", ()):
        found += [f"volume {kind}" for kind in volume if kind not in VOLUMES | {"name"}]
    security = pod.get("securityContext", {})
    for container in containers(pod):
        own = container.get("securityContext", {})
        name = container["name"]
        found += [f"{name}: hostPort" for port in container.get("ports", ()) if "hostPort" in port]
        if own.get("runAsNonRoot", security.get("runAsNonRoot")) is not True:
            found.append(f"{name}: runAsNonRoot")
        if own.get("runAsUser", security.get("runAsUser")) == 0:
            found.append(f"{name}: runAsUser")
        if own.get("seccompProfile", security.get("seccompProfile")) != {"type": "RuntimeDefault"}:
            found.append(f"{name}: seccompProfile")
        if own.get("allowPrivilegeEscalation") is not False:
            found.append(f"{name}: allowPrivilegeEscalation")
        if own.get("privileged"):
            found.append(f"{name}: privileged")
        if own.get("capabilities") != {"drop": ["ALL"]}:
            found.append(f"{name}: capabilities")
    return found


@pytest.mark.parametrize("name", CASES)
def test_restricted(name: str) -> None:
    found = dict(pods(resources(rendered_case(name))))
    assert len(found) >= 1
    for label, pod in found.items():
        assert violations(pod) == [], label
        for container in containers(pod):
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, label


def test_the_check_sees_what_restricted_refuses() -> None:
    pod = named(rendered_case("minimal"), "Deployment")["spec"]["template"]["spec"]
    pod["volumes"].append({"name": "host", "hostPath": {"path": "/"}})
    pod["containers"][0]["securityContext"]["capabilities"] = {"add": ["NET_ADMIN"], "drop": ["ALL"]}
    del pod["securityContext"]["runAsNonRoot"], pod["containers"][0]["securityContext"]["runAsNonRoot"]
    assert violations(pod) == ["volume hostPath", "mlflow: runAsNonRoot", "mlflow: capabilities"]


@pytest.mark.parametrize("name", CASES)
def test_resources_and_probes_on_every_pod(name: str) -> None:
    for entry in resources(rendered_case(name)):
        for label, pod in pods([entry]):
            for container in containers(pod):
                told = container["resources"]
                assert {"cpu", "memory"} <= set(told["requests"]), label
                assert "memory" in told["limits"], label
            if entry["kind"] in ("Deployment", "StatefulSet", "Rollout", "InferenceService"):
                for container in pod["containers"]:
                    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container), label
            else:
                assert pod.get("activeDeadlineSeconds") or entry["kind"] != "Pod", label


@pytest.mark.parametrize("name", CASES)
def test_no_token_of_the_api_and_no_secret_in_the_clear(name: str) -> None:
    for entry in resources(rendered_case(name)):
        assert entry["kind"] != "Secret", "secrets by reference only"
        for label, pod in pods([entry]):
            assert pod["automountServiceAccountToken"] is False, label
            for container in containers(pod):
                for variable in container.get("env", ()):
                    if any(word in variable["name"] for word in ("PASSWORD", "SECRET", "ACCESS_KEY")):
                        assert "secretKeyRef" in variable["valueFrom"], variable


@pytest.mark.parametrize("name", CASES)
def test_a_policy_for_every_pod_that_stays(name: str) -> None:
    objects = resources(rendered_case(name))
    policies = [entry["spec"]["podSelector"] for entry in objects if entry["kind"] == "NetworkPolicy"]
    for entry in objects:
        if entry["kind"] not in ("Deployment", "StatefulSet", "Rollout", "CronJob", "Job"):
            continue
        spec = entry["spec"]["jobTemplate"]["spec"] if entry["kind"] == "CronJob" else entry["spec"]
        labels = spec["template"]["metadata"]["labels"]
        assert any(selects(policy, labels) for policy in policies), entry["metadata"]["name"]


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", ())
    )


@pytest.mark.skipif(not TRIVY.exists(), reason="`make lint-chart` installs trivy and runs this scan, too")
def test_the_scanner_finds_nothing(tmp_path: Path) -> None:
    for name in CASES:
        for file, text in rendered_case(name).items():
            if file != NOTES:
                path = tmp_path / name / file.replace("/", "-")
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
    scan = [TRIVY, "config", "--quiet", "--skip-check-update", "--severity", "MEDIUM,HIGH,CRITICAL", "--exit-code", "1"]
    done = subprocess.run([*scan, tmp_path], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
