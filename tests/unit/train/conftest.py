"""A dataset that trains in a second, the settings for it, and a log that keeps what it gets."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from components.common.contracts.manifests import Artifact, CheckpointManifest, DatasetManifest, load
from components.common.contracts.settings import resolve
from components.common.process.steplog import StepLog
from components.train.config import TrainConfig
from components.train.run import run
from tests.conftest import Dataset, Preprocess, Shared, copy_digits
from tests.pipelines.servers import free_port
from tests.processes import ROOT

# Of a training with 6 steps in each of 3 epochs.
SETTINGS: dict[str, Any] = {
    "architecture": "resnet18",
    "image_size": 32,
    "resize_ratio": 1.0,
    "epochs": 3,
    "global_batch_size": 16,
    "learning_rate": 0.4,
    "deterministic": True,
    "augmentation": {"min_area": 0.8, "max_aspect_ratio": 1.1, "flip_probability": 0.0},
}


@pytest.fixture(scope="session")
def tiny_dataset(all_digits: Path, run_preprocess: Preprocess, shared: Shared) -> Dataset:
    """12 digits of each class: 96 to train, 24 to validate."""

    def build(folder: Path) -> None:
        copy_digits(all_digits, folder / "data", 12)
        run_preprocess(folder / "data", folder / "dataset")

    return load(shared("tiny_dataset", build) / "dataset", DatasetManifest)


class Log(StepLog):
    """Keeps what it gets, and sends this process SIGTERM after a step."""

    def __init__(self, sigterm_after: int = 0) -> None:
        super().__init__("train")
        self.said: list[str] = []
        self.epochs: list[dict[str, float]] = []
        self.now: dict[int, dict[str, float]] = {}  # live metrics by step
        self.details: list[str] = []
        self.sigterm_after = sigterm_after

    def _track(self, call: str, *arguments: Any, **options: Any) -> None:
        if call == "log_metrics":
            values, position = arguments
            assert position >= len(self.epochs)
            self.epochs.append(values)
        elif call == "log_live":
            self.now[arguments[1]] = arguments[0]

    def progress(self, phase: str, done: int, total: int, detail: str = "", *, unit: str = "") -> None:
        self.details.append(detail)
        if done == self.sigterm_after:
            os.kill(os.getpid(), signal.SIGTERM)

    def _say(self, kind: str, text: str) -> None:
        self.said.append(text)


def config(**changed: Any) -> TrainConfig:
    """SETTINGS with other values."""
    return resolve(TrainConfig, "train", SETTINGS, changed)


# `train(log, output="out", **changed)`: the whole step on the tiny dataset.
Train = Callable[..., Artifact[CheckpointManifest]]


@pytest.fixture
def train(tiny_dataset: Dataset, tmp_path: Path) -> Train:
    def trained(log: StepLog | None = None, output: str = "out", **changed: Any) -> Artifact[CheckpointManifest]:
        small = config(**{"architecture": "squeezenet1_1", **changed})
        run(small, log or Log(), dataset=tiny_dataset.path, output=tmp_path / output)
        return load(tmp_path / output, CheckpointManifest)

    return trained


@contextmanager
def as_rank_0_of_two(monkeypatch, command: Sequence[str], **variables: str) -> Iterator["subprocess.Popen[bytes]"]:
    """This process is rank 0 meanwhile, in the environment that torchrun makes, and `command` is rank 1."""
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    world |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    own = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PATH": "", **variables}
    with monkeypatch.context() as patch:
        for name, value in {**world, "RANK": "0", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        other = subprocess.Popen(command, env={**os.environ, **world, **own, "RANK": "1", "LOCAL_RANK": "1"})
        try:
            yield other
        finally:
            other.kill()
            other.wait()
            if dist.is_initialized():  # training failed, which is no reason for the next test to fail
                dist.destroy_process_group()
