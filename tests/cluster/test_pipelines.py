"""A pipeline on Kubeflow Pipelines' own server: its dataset stays in a volume, and training outlives its pods.

Beside KUBECONFIG it needs the server at KF_PIPELINES_ENDPOINT, which runs its pods in the namespace `kubeflow`, Argo
with the retries of docs/submit.md, a default storage class whose volumes all pods may write, and the images
`preprocess`, `train`, `export`, `validate` and `promote`, named by REGISTRY and TAG.
"""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import kfp
import pytest
import yaml
from kubernetes import client

from components.common.contracts.errors import EXIT_GATE_FAILED
from enginery.cluster.server import KFP_NAMESPACE
from enginery.cluster.watch import RUN_LABEL, step_of
from tests.cluster.test_pods import make_claim, run_in_pod, start_pod, unpack, wait_for
from tests.cluster.test_training import KILL, LONG, SHARED
from tests.conftest import copy_digits

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (os.environ.get("REGISTRY") and os.environ.get("KF_PIPELINES_ENDPOINT")),
        reason="REGISTRY or KF_PIPELINES_ENDPOINT names no images or no server",
    ),
]
CPU = {"gpu": {"count": 0}, "shm": "64Mi"}
SMALL = ["--architecture", "resnet18", "--image-size", "32", "--global-batch-size", "16", "--set"]
SMALL += ["train.resize_ratio=1.0", "--set", "train.checkpoint_epochs=1", "--set", "validate.benchmark_seconds=0.2"]


class Volume:
    """A claim with digits, and a pod that sees it."""

    def __init__(self, api: Any, name: str) -> None:
        self.core, self.name = client.CoreV1Api(api), name

    @contextmanager
    def limited_disk(self) -> Iterator[None]:
        """Containers of pods that begin now are evicted when they write more. Others of the namespace, too."""
        limit = {"type": "Container", "default": {"ephemeral-storage": "500Mi"}}
        body = {"metadata": {"name": self.name}, "spec": {"limits": [limit]}}
        self.core.create_namespaced_limit_range(KFP_NAMESPACE, body)
        try:
            yield
        finally:
            self.core.delete_namespaced_limit_range(self.name, KFP_NAMESPACE)

    def run(self, command: str, line: str = "") -> str:
        code, said = run_in_pod(self.core, KFP_NAMESPACE, self.name, ["sh", "-c", command], line, 300)
        assert code == 0, said
        return said


@pytest.fixture
def volume(api: Any, all_digits: Path, tmp_path: Path) -> Iterator[Volume]:
    made = Volume(api, f"enginery-test-{uuid.uuid4().hex[:8]}")
    make_claim(made.core, KFP_NAMESPACE, made.name)
    try:
        start_pod(made.core, KFP_NAMESPACE, made.name, made.name, step="preprocess", place=SHARED, user={})
        copy_digits(all_digits, tmp_path / "digits", 12)
        unpack(made.core, KFP_NAMESPACE, made.name, {"digits": tmp_path / "digits"}, SHARED)
        yield made
    finally:
        with suppress(client.ApiException):  # where it could not start
            made.core.delete_namespaced_pod(made.name, KFP_NAMESPACE)
        made.core.delete_namespaced_persistent_volume_claim(made.name, KFP_NAMESPACE)


class Run:
    """A run that `enginery submit --wait` follows."""

    def __init__(self, volume: Volume, folder: Path, *options: str) -> None:
        shared = {"claim": volume.name, "mount_path": SHARED}
        settings = {
            "images": {"registry": os.environ["REGISTRY"], "tag": os.environ["TAG"]},
            "dataset_volume": shared,
            "train_job": {"volume": shared},
            "every_step": {"env": {"OMP_NUM_THREADS": "1"}},
            "preprocess": {"volumes": [shared]},
            "train": {**CPU, "retries": {"times": 2, "wait_s": 1}},
            "export": CPU,
            "validate": CPU,
        }
        (folder / "cluster.yaml").write_text(yaml.safe_dump(settings))
        words = ["submit", "resnet50", "--settings", str(folder / "cluster.yaml"), "--wait", *SMALL, *options]
        self._log = folder / "log"
        with self._log.open("w") as log:
            command = [sys.executable, "-m", "enginery.cli.main", *words, "--data", f"{SHARED}/digits"]
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        self._volume = volume
        wait_for(lambda: "\nstate " in self.said(), "the server has the run", 60)
        self.id = next(line.split()[1] for line in self.said().splitlines() if line.startswith("run "))

    def said(self) -> str:
        return self._log.read_text()

    def pods(self) -> list[str]:
        """Of the train step, in the order in which they began."""
        found = self._volume.core.list_namespaced_pod(KFP_NAMESPACE, label_selector=f"{RUN_LABEL}={self.id}").items
        mine = [pod for pod in found if step_of(pod, {"train"})]
        return [pod.metadata.name for pod in sorted(mine, key=lambda pod: pod.metadata.creation_timestamp)]

    def resumes(self, times: int) -> str:
        """Wait until training has begun again so often, and has a checkpoint. Returns the pod it is in."""
        trained = f"find {SHARED} -name 'step-*'"
        wait_for(lambda: self.said().count("resuming after step") == times, f"it resumes {times} times", 300)
        wait_for(lambda: bool(self.pods()) and "step-" in self._volume.run(trained), "a checkpoint", 300)
        return self.pods()[-1]

    def shell(self, pod: str, command: str) -> None:
        """A command in a step's container."""
        run_in_pod(self._volume.core, KFP_NAMESPACE, pod, ["sh", "-c", command], "", 60, container="main")

    def end(self) -> int:
        return self._process.wait(900)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            kfp.Client(host=os.environ["KF_PIPELINES_ENDPOINT"]).terminate_run(self.id)


def test_a_step_that_is_killed_and_evicted_resumes_and_its_dataset_stays_in_the_volume(
    volume: Volume, tmp_path: Path
) -> None:
    with closing(Run(volume, tmp_path, "--epochs", str(LONG))) as run:
        first = run.resumes(0)
        with volume.limited_disk():
            run.shell(first, KILL)
            second = run.resumes(1)
        run.shell(second, "head -c 900M /dev/zero > /tmp/fill; sleep 1")
        assert run.end() == EXIT_GATE_FAILED, run.said()  # of so few images
        assert run.said().count("resuming after step") == 2
        assert "lost        train            Evicted " in run.said()
        assert len(run.pods()) == 3
        (dataset,) = volume.run(f"ls {SHARED}/enginery/datasets").split()
        assert "manifest.json" in volume.run(f"ls {SHARED}/enginery/datasets/{dataset}")
        assert volume.run(f"ls -A {SHARED}/enginery/runs {SHARED}/enginery/begun | grep -v : || true").strip() == ""
