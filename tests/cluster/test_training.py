"""Training on nodes by Kubeflow Trainer and JobSet: its result, and what it does when something is lost or wrong.

Beside KUBECONFIG it needs Kubeflow Trainer, a default storage class whose volumes all pods may write, and the image
`train` where the nodes find it, named by REGISTRY and TAG.
"""

import json
import re
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from kubernetes import client

from components.common.contracts.manifests import Artifact, DatasetManifest
from components.train.train_job import (
    GROUP,
    INDEX_LABEL,
    JOB_VARIABLE,
    JOBSET_LABEL,
    NAMESPACE_VARIABLE,
    PLURAL,
    POD_VARIABLE,
    VERSION,
    TrainJobRequest,
)
from tests.cluster.test_pods import NEEDS_IMAGES, image, make_claim, run_in_pod, start_pod, unpack, wait_for
from tests.cluster.test_train_jobs import RUNNER, runner  # noqa: F401
from tests.unit.train.conftest import SETTINGS, tiny_dataset  # noqa: F401

pytestmark = NEEDS_IMAGES
SHARED = "/mnt/shared"
STEP = "step"
PATH = "/opt/enginery/code:/opt/enginery/own:/opt/enginery/common"  # the image's
# sitecustomize.py, which Python imports before anything else.
BLIND = (
    f"import os, sys; sys.argv = [word.replace('{SHARED}/dataset', '/nowhere') for word in sys.argv] "
    "if os.environ.get('JOB_COMPLETION_INDEX') == '1' else sys.argv"
)
# torchrun is the child of the container's first process.
KILL = "kill -9 $(cat /proc/1/task/*/children)"
LONG = 60  # epochs, in which there is time for something to happen


class Step:
    """The step's own pod, in which it is started as often as a test likes."""

    def __init__(self, api: Any, namespace: str) -> None:
        self.core, self.jobs, self.namespace = client.CoreV1Api(api), client.CustomObjectsApi(api), namespace

    def run(self, command: str, line: str = "") -> tuple[int, str]:
        """Exit code and output of a shell's command."""
        return run_in_pod(self.core, self.namespace, STEP, ["sh", "-c", command], line, 900)

    def train(self, output: str, nodes: int, env: Mapping[str, str] | None = None, **settings: Any) -> tuple[int, str]:
        """Train in this pod, or on nodes with further variables."""
        request = TrainJobRequest(
            num_nodes=max(2, nodes),
            num_gpus=0,
            gpu_resource="nvidia.com/gpu",
            image=image("train"),
            runtime="torch-distributed",
            env={"OMP_NUM_THREADS": "1", **(env or {})},
            volumes=(("shared", SHARED, ""),),
            shared=SHARED,
        )
        config = {**SETTINGS, "architecture": "squeezenet1_1", "image_sizes": [], **settings}
        variable = f"{JOB_VARIABLE}={shlex.quote(request.model_dump_json())}" if nodes > 1 else ""
        command = f"python -m components.train --dataset {SHARED}/dataset --output /tmp/{output}"
        return self.run(
            f'read -r settings; echo "$settings" > /tmp/{output}.yaml; echo $$ > /tmp/{output}.pid; '
            f"export OMP_NUM_THREADS=1 {variable}; exec {command} --config /tmp/{output}.yaml < /dev/null",
            json.dumps(config),
        )

    def jobs_left(self) -> list[str]:
        """Names of TrainJobs."""
        found = self.jobs.list_namespaced_custom_object(GROUP, VERSION, self.namespace, PLURAL)["items"]
        return [job["metadata"]["name"] for job in found]

    def history(self, output: str) -> list[dict[str, float]]:
        """Of the epochs."""
        code, text = self.run(f"cat /tmp/{output}/manifest.json")
        assert code == 0, text
        return list(json.loads(text)["history"])

    def pods_left(self) -> list[str]:
        """Names of the nodes' pods."""
        found = self.core.list_namespaced_pod(self.namespace, label_selector=JOBSET_LABEL)
        return [pod.metadata.name for pod in found.items]

    def has_checkpoint(self) -> bool:
        """True once a training has written one."""
        return "step-" in self.run(f"find {SHARED}/enginery/runs -name 'step-*'")[1]

    def pod_of(self, node: int) -> str:
        """Name of a node's running pod; "" if there is none."""
        found = self.core.list_namespaced_pod(
            self.namespace, label_selector=f"{JOBSET_LABEL},{INDEX_LABEL}={node}", field_selector="status.phase=Running"
        )
        return str(found.items[0].metadata.name) if found.items else ""


@pytest.fixture
def step(api: Any, namespace: str, runner: Any, tiny_dataset: Artifact[DatasetManifest]) -> Step:  # noqa: F811
    made = Step(api, namespace)
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    made.core.patch_namespace(namespace, {"metadata": {"labels": label}})
    make_claim(made.core, namespace, "shared")
    env = {POD_VARIABLE: STEP, NAMESPACE_VARIABLE: namespace}
    given: dict[str, Any] = {"step": "train", "place": SHARED, "user": {}, "env": env, "serviceAccountName": RUNNER}
    start_pod(made.core, namespace, STEP, "shared", **given)
    unpack(made.core, namespace, STEP, {"dataset": tiny_dataset.path}, SHARED)
    return made


def test_nodes_train_as_one_does(step: Step) -> None:
    """With all images in each step, and nothing at random but the first weights."""
    whole = {"architecture": "timm/convnext_atto", "global_batch_size": 100, "learning_rate": 0.05}
    whole["augmentation"] = {"min_area": 1.0, "max_aspect_ratio": 1.0, "flip_probability": 0.0}
    for output, nodes in (("alone", 1), ("two", 2)):
        code, said = step.train(output, nodes, **whole)
        assert code == 0, said
    assert "2 processes on 2 machines, 50 images each" in said
    assert "after epoch 3 on 2 nodes" in said
    alone = [epoch["val_loss"] for epoch in step.history("alone")]
    two = [epoch["val_loss"] for epoch in step.history("two")]
    assert two == pytest.approx(alone, rel=1e-4)
    wait_for(lambda: step.jobs_left() == [], "the job is gone", 60)
    code, runs = step.run(f"ls {SHARED}/enginery/runs")
    assert runs.strip() == ""


def delete(step: Step, pod: str) -> None:
    step.core.delete_namespaced_pod(pod, step.namespace, grace_period_seconds=0)


def kill(step: Step, pod: str) -> None:
    """As the kernel does where memory is short: torchrun itself."""
    code, said = run_in_pod(step.core, step.namespace, pod, ["sh", "-c", KILL], "", 60)
    assert code == 0, said


def evict(step: Step, pod: str) -> None:
    """As the kubelet does: the pod writes more than its limit."""
    fill = ["sh", "-c", "head -c 200M /dev/zero > /tmp/fill; sleep 1"]
    run_in_pod(step.core, step.namespace, pod, fill, "", 60)


def limit_disk(step: Step) -> None:
    """Of containers that name no limit of their own."""
    limit = {"type": "Container", "default": {"ephemeral-storage": "100Mi"}}
    step.core.create_namespaced_limit_range(step.namespace, {"metadata": {"name": "disk"}, "spec": {"limits": [limit]}})


@pytest.mark.parametrize(
    ("lose", "node", "why"),
    [
        (delete, 0, ""),
        (delete, 1, ""),
        (kill, 0, "node 0, Error (exit code 137)"),
        (kill, 1, "node 1, Error (exit code 137)"),
        (evict, 1, ""),
    ],
)
def test_a_pod_is_lost(step: Step, lose: Callable[[Step, str], None], node: int, why: str) -> None:
    limit_disk(step)
    lost: list[str] = []

    def do() -> None:
        wait_for(step.has_checkpoint, "a checkpoint")
        pod = step.pod_of(node)
        lose(step, pod)
        lost.append(pod)

    threading.Thread(target=do, daemon=True).start()
    code, said = step.train("lost", 2, epochs=LONG)
    assert code == 0, said
    assert lost
    assert why in said
    assert "resuming after step" in said
    assert len(step.history("lost")) == LONG


def test_an_error_of_another_node_ends_the_job(step: Step) -> None:
    """Node 1 does not see the dataset, as where a volume is not shared."""
    step.run(f'read -r line; echo "$line" > {SHARED}/sitecustomize.py', BLIND)
    began = time.monotonic()
    code, said = step.train("blind", 2, env={"PYTHONPATH": f"{PATH}:{SHARED}"})
    assert code == 2, said
    assert re.search(r"nowhere.* \(on node 1\)(.|\n)*would fail again", said), said
    assert time.monotonic() - began < 120
    assert step.jobs_left() == []
    wait_for(lambda: step.pods_left() == [], "the pods are gone", 100)


def test_sigterm_leaves_nothing_and_another_try_resumes(step: Step) -> None:
    def terminate(once: Callable[[], bool]) -> None:
        wait_for(once, "a moment to stop")
        step.run("kill -TERM $(cat /tmp/stopped.pid)")

    def resumed() -> bool:
        pod = step.pod_of(0)
        return bool(pod) and "resuming after step" in step.core.read_namespaced_pod_log(pod, step.namespace)

    for once in (step.has_checkpoint, resumed):
        threading.Thread(target=terminate, args=(once,), daemon=True).start()
        code, said = step.train("stopped", 2, epochs=1000)
        assert code == 75, said
        wait_for(lambda: step.jobs_left() == [] and step.pods_left() == [], "job and pods are gone", 100)


def test_settings_that_can_not_be_are_refused_once(step: Step) -> None:
    code, said = step.train("refused", 2, freeze_backbone=True)
    assert code == 2, said
    assert "train.freeze_backbone keeps all layers" in said
    assert "would fail again" in said
    wait_for(lambda: step.jobs_left() == [], "the job is gone", 60)
