"""A step that Argo Workflows starts as docs/submit.md has it: which ends are tried again, and where training resumes.

Beside KUBECONFIG it needs Argo Workflows, a default storage class, and the image `train`, named by REGISTRY and TAG.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from components.common.contracts.environment import KFP_RUN_VARIABLE
from components.train.train_job import VOLUME_VARIABLE
from tests.cluster.test_pods import NEEDS_IMAGES, RESTRICTED, image, run_in_pod, wait_for
from tests.cluster.test_train_jobs import RUNNER, runner  # noqa: F401
from tests.cluster.test_training import KILL, LONG, SHARED, Step, limit_disk, step  # noqa: F401
from tests.unit.train.conftest import SETTINGS, tiny_dataset  # noqa: F401

pytestmark = NEEDS_IMAGES
ARGO = ("argoproj.io", "v1alpha1")
PAGE = Path(__file__).resolve().parents[2] / "docs/submit.md"


def defaults_of_the_page() -> dict[str, Any]:
    """The workflowDefaults that it names."""
    (block,) = re.findall(r"```yaml\n(data:\n  workflowDefaults: .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return dict(yaml.safe_load(yaml.safe_load(block)["data"]["workflowDefaults"])["spec"])


class Retried:
    """The train step as a workflow of one pod."""

    def __init__(self, step: Step, **settings: Any) -> None:  # noqa: F811
        self.step = step
        unset = {"pod-security.kubernetes.io/enforce": None}  # Argo's own containers are restricted where it is told so
        step.core.patch_namespace(step.namespace, {"metadata": {"labels": unset}})
        rule = client.V1PolicyRule(api_groups=[ARGO[0]], resources=["workflowtaskresults"], verbs=["create", "patch"])
        rights = client.RbacAuthorizationV1Api(step.core.api_client)
        role = rights.read_namespaced_role(RUNNER, step.namespace)
        rights.patch_namespaced_role(RUNNER, step.namespace, {"rules": [*role.rules, rule]})
        config = {**SETTINGS, "architecture": "squeezenet1_1", "image_sizes": [], **settings}
        step.run(f'read -r settings; echo "$settings" > {SHARED}/config.yaml', json.dumps(config))
        variables = {VOLUME_VARIABLE: SHARED, KFP_RUN_VARIABLE: "run", "OMP_NUM_THREADS": "1"}
        command = f"python -m components.train --dataset {SHARED}/dataset --output /tmp/out --config"
        container = {
            "image": image("train"),
            "command": [*command.split(), f"{SHARED}/config.yaml"],
            "env": [{"name": name, "value": value} for name, value in variables.items()],
            "volumeMounts": [{"name": "shared", "mountPath": SHARED}],
            "securityContext": RESTRICTED,
        }
        seccomp = {"type": "RuntimeDefault"}
        spec = {
            **defaults_of_the_page(),
            "entrypoint": "train",
            "serviceAccountName": RUNNER,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 0, "seccompProfile": seccomp},
            "volumes": [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}],
            "templates": [{"name": "train", "container": container}],
        }
        body = {"apiVersion": "/".join(ARGO), "kind": "Workflow", "metadata": {"name": "train"}, "spec": spec}
        step.jobs.create_namespaced_custom_object(*ARGO, step.namespace, "workflows", body)

    def status(self) -> dict[str, Any]:
        found = self.step.jobs.get_namespaced_custom_object(*ARGO, self.step.namespace, "workflows", "train")
        return dict(found.get("status") or {})

    def wait(self) -> tuple[str, list[str]]:
        """Phase at the end, and what each try's pod said."""
        wait_for(lambda: self.status().get("phase") in ("Succeeded", "Failed", "Error"), "the workflow ends", 400)
        return self.status()["phase"], [self.log(pod) for pod in self.pods()]

    def pods(self) -> list[str]:
        """Names, in the order in which they began."""
        label = "workflows.argoproj.io/workflow=train"
        found = self.step.core.list_namespaced_pod(self.step.namespace, label_selector=label).items
        return [pod.metadata.name for pod in sorted(found, key=lambda pod: pod.metadata.creation_timestamp)]

    def log(self, pod: str) -> str:
        try:
            return str(self.step.core.read_namespaced_pod_log(pod, self.step.namespace, container="main"))
        except client.ApiException:  # of an evicted pod
            return ""


def in_main(retried: Retried, pod: str, command: str) -> tuple[int, str]:
    """Exit code and output of a shell's command in the step's container."""
    core, namespace = retried.step.core, retried.step.namespace
    return run_in_pod(core, namespace, pod, ["sh", "-c", command], "", 60, container="main")


def kill(retried: Retried, pod: str) -> None:
    """The step's process, which is the child of Argo's in that container."""
    code, said = in_main(retried, pod, KILL)
    assert code == 0, said


def terminate(retried: Retried, pod: str) -> None:
    """So that it saves, and ends with 75."""
    code, said = in_main(retried, pod, KILL.replace("-9", "-TERM"))
    assert code == 0, said


def evict(retried: Retried, pod: str) -> None:
    """As the kubelet does: the pod writes more than its limit."""
    in_main(retried, pod, "head -c 200M /dev/zero > /tmp/fill; sleep 1")


@pytest.mark.parametrize(
    ("lose", "epochs"),
    [(kill, LONG), (terminate, LONG), (evict, 5 * LONG)],  # the kubelet looks each ten seconds
)
def test_a_lost_pod_is_tried_again_and_resumes(
    step: Step,  # noqa: F811
    lose: Callable[[Retried, str], None],
    epochs: int,
) -> None:
    limit_disk(step)
    retried = Retried(step, epochs=epochs)
    wait_for(step.has_checkpoint, "a checkpoint")
    lose(retried, retried.pods()[0])
    phase, said = retried.wait()
    assert (phase, len(said)) == ("Succeeded", 2), (phase, said, retried.status())
    assert "resuming after step" in said[1]


def test_a_user_s_error_is_not_tried_again(step: Step) -> None:  # noqa: F811
    phase, said = Retried(step, freeze_backbone=True).wait()
    assert (phase, len(said)) == ("Failed", 1), said
    assert "train.freeze_backbone keeps all layers" in said[0]
