"""A data set that trains in a second, and the settings for it."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from components.common.contracts.manifests import Artifact, DatasetManifest, load
from tests.conftest import Preprocess, Shared, copy_digits
from tests.pipelines.servers import free_port

REPOSITORY = Path(__file__).resolve().parents[3]

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
def settings() -> dict[str, Any]:
    """Of a training with 6 steps in each of 3 epochs."""
    return SETTINGS


@pytest.fixture(scope="session")
def tiny_dataset(all_digits: Path, run_preprocess: Preprocess, shared: Shared) -> Artifact[DatasetManifest]:
    """12 digits of each class: 96 to train, 24 to validate."""

    def build(folder: Path) -> None:
        copy_digits(all_digits, folder / "data", 12)
        run_preprocess(folder / "data", folder / "dataset")

    return load(shared("tiny_dataset", build) / "dataset", DatasetManifest)


@contextmanager
def as_rank_0_of_two(
    monkeypatch: pytest.MonkeyPatch, command: Sequence[str], **variables: str
) -> Iterator["subprocess.Popen[bytes]"]:
    """This process is rank 0 meanwhile, in the environment that torchrun makes, and `command` is rank 1."""
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    world |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    own = {"PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "", "PATH": "", **variables}
    with monkeypatch.context() as patch:
        for name, value in {**world, "RANK": "0", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, value)
        other = subprocess.Popen(command, env={**os.environ, **world, **own, "RANK": "1", "LOCAL_RANK": "1"})
        try:
            yield other
        finally:
            other.kill()
            other.wait()
