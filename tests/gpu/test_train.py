"""Training on GPUs: arithmetic, all GPUs of the machine by NCCL, pre-emption and memory. Fails, never skips."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from components.common.contracts.errors import EXIT_PREEMPTED, EXIT_USER_ERROR
from components.common.contracts.manifests import PARTIAL_OUTPUT, Artifact, CheckpointManifest, DatasetManifest, load
from components.common.contracts.records import EpochRecord
from enginery.datasets.textures import write_textures
from tests.processes import start_python
from tests.waiting import wait_until

TIMEOUT_S = 240
SETTINGS: dict[str, Any] = {
    "architecture": "resnet18",
    "image_size": 64,
    "epochs": 3,
    "global_batch_size": 128,
    "learning_rate": 0.2,
    "compile": "off",
}

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module", autouse=True)
def num_gpus() -> int:
    assert torch.cuda.is_available(), "these tests need a GPU"
    return torch.cuda.device_count()


@pytest.fixture(scope="module")
def dataset(
    tmp_path_factory: pytest.TempPathFactory, run_preprocess: Callable[..., Artifact[DatasetManifest]]
) -> Artifact[DatasetManifest]:
    """1,024 textures of 50 classes to train, 128 to validate."""
    root = tmp_path_factory.mktemp("textures")
    write_textures(root / "images", num_train=1024, num_val=128, seed=0, num_workers=8)
    return run_preprocess(root / "images", root / "dataset", num_workers=8)


@pytest.fixture
def start(dataset: Artifact[DatasetManifest], tmp_path: Path) -> Start:
    """The step as its own process, with these settings, on all GPUs unless they say otherwise."""

    def begin(**settings: Any) -> "subprocess.Popen[str]":
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump({**SETTINGS, **settings}))
        words = ("-m", "components.train", "--dataset", dataset.path, "--output", tmp_path / "out", "--config", config)
        variables = {"PYTHONFAULTHANDLER": "1"}  # see `said_by`
        return start_python(*words, env=variables, stdout=subprocess.DEVNULL, start_new_session=True)

    return begin


def said_by(process: "subprocess.Popen[str]") -> str:
    """Output of a process until it ends. Of one that does not end in time: where each of its threads is."""
    try:
        return process.communicate(timeout=TIMEOUT_S)[1]
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        pytest.fail(f"it did not end within {TIMEOUT_S} s:\n{process.communicate()[1]}")


def history(process: "subprocess.Popen[str]", output: Path) -> tuple[EpochRecord, ...]:
    """Of a training that ends well."""
    said = said_by(process)
    assert process.returncode == 0, said
    return load(output, CheckpointManifest).manifest.history


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "fp32"},
        {"precision": "fp32", "tf32": False, "optimizer": "adamw", "learning_rate": 0.002},
        {"precision": "fp16", "compile": "default"},
        {"precision": "bf16", "compile": "reduce-overhead"},
        {"precision": "fp16", "per_gpu_batch_size": 32, "ema_decay": 0.9, "augmentation": {"mixup_alpha": 0.2}},
    ],
    ids=lambda settings: "-".join(f"{value}" for value in settings.values() if not isinstance(value, dict)),
)
def test_arithmetic(start: Start, tmp_path: Path, settings: dict[str, Any]) -> None:
    epochs = history(start(num_processes=1, **settings), tmp_path / "out")
    losses = [epoch.train_loss for epoch in epochs]
    assert losses[-1] < losses[0]
    last = epochs[-1].model_dump()
    assert all(last[name] > 0 for name in ("train_images_per_s", "gpu_memory_bytes", "tflops_per_s"))
    assert last["gpu_power_w"] is None or 50 < last["gpu_power_w"] < 1500  # None where an epoch is too short to tell
    assert 0 <= last["data_wait_pct"] <= 100


def test_all_gpus_train_together(start: Start, tmp_path: Path, num_gpus: int) -> None:
    process = start()
    epochs = history(process, tmp_path / "out")
    assert epochs[-1].train_loss < epochs[0].train_loss
    lines = (tmp_path / "out" / "mllog.txt").read_text().splitlines()
    assert any('"global_batch_size"' in line and "128" in line for line in lines)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert len(manifest["environment"]["gpus"]) == num_gpus


def test_a_preempted_training_goes_on(start: Start, tmp_path: Path) -> None:
    settings = {"epochs": 40, "checkpoint_minutes": 0.01}
    process = start(**settings)
    saved = (tmp_path / "out").glob
    wait_until(lambda: list(saved(f"{PARTIAL_OUTPUT}/*/step-*.safetensors")), process=process, seconds=TIMEOUT_S)
    os.kill(process.pid, signal.SIGTERM)
    said = said_by(process)
    assert process.returncode == EXIT_PREEMPTED, said
    again = start(**settings)
    said = said_by(again)
    assert again.returncode == 0, said
    assert "resuming after step" in said
    assert len(load(tmp_path / "out", CheckpointManifest).manifest.history) == 40


def test_memory_that_runs_out_names_a_batch_that_fits(start: Start) -> None:
    """1,024 images of 224 px take 44 GB (benchmarks/results/h200/train_resnet50.json), so of 512 px over 200 GB."""
    too_much = {"architecture": "resnet50", "image_size": 512, "global_batch_size": 1024, "num_processes": 1}
    process = start(**too_much)
    said = said_by(process)
    assert process.returncode == EXIT_USER_ERROR, said
    assert "memory ran out with batches of 1024 images" in said
    fits = re.search(r"(\d+) were tried here and fit: set train\.per_gpu_batch_size to \1", said)
    assert fits is not None, said
    assert 16 <= int(fits[1]) < 1024
