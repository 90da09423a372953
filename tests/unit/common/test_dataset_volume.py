"""Datasets in a volume that pods share: steps as processes, as Kubeflow Pipelines runs them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from components.common.contracts.environment import KFP_RUN_VARIABLE
from components.common.contracts.manifests import ALL_FILES, MANIFEST, DatasetManifest, load
from components.common.process.dataset_volume import VARIABLE, find_dataset
from tests.unit.refusals import refuses


def step(name: str, output: Path, volume: Path, *options: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, VARIABLE: str(volume), KFP_RUN_VARIABLE: "run"}
    command = [sys.executable, "-m", f"components.{name}", "--output", str(output), *options]
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    (tmp_path / "volume").mkdir()
    return tmp_path / "volume"


def test_a_part_and_the_whole_lie_in_the_volume_and_outputs_are_manifests(
    few_digits: Path, tmp_path: Path, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "part"
    done = step("preprocess", part, volume, "--data", str(few_digits), "--part", "1/1")
    assert done.returncode == 0, done.stderr
    done = step("merge", tmp_path / "dataset", volume, "--parts", json.dumps([str(part)]))
    assert done.returncode == 0, done.stderr
    assert os.listdir(part) == os.listdir(tmp_path / "dataset") == [MANIFEST]
    assert len(list((volume / "enginery/datasets").iterdir())) == 2
    assert not list((volume / "enginery/begun").iterdir())

    monkeypatch.setenv(VARIABLE, str(volume))
    found = load(find_dataset(tmp_path / "dataset"), DatasetManifest, verify=ALL_FILES)
    assert found.path.is_relative_to(volume)
    # The same once more, by another run, is the same folder.
    done = step("merge", tmp_path / "again", volume, "--parts", json.dumps([str(part)]))
    assert done.returncode == 0, done.stderr
    assert find_dataset(tmp_path / "again") == found.path
    # Another dataset under this one's name is not taken, nor is one that was removed.
    for damage in (lambda: shutil.copy(part / MANIFEST, found.path), lambda: shutil.rmtree(found.path)):
        damage()
        with refuses("dataset-not-in-volume"):
            find_dataset(tmp_path / "dataset")
    done = step("train", tmp_path / "checkpoint", volume, "--dataset", str(tmp_path / "dataset"))
    assert done.returncode == 1
    assert "Run preprocess again, without KFP's cache" in done.stderr


def test_a_volume_that_is_not_there(few_digits: Path, tmp_path: Path) -> None:
    done = step("preprocess", tmp_path / "dataset", tmp_path / "volume", "--data", str(few_digits))
    assert done.returncode == 2
    assert json.loads((tmp_path / "dataset/failure.json").read_text())["code"] == "no-volume"
    assert "the volume of dataset_volume is not there" in done.stderr


@pytest.mark.slow
def test_a_dataset_of_the_volume_is_trained_on(few_digits: Path, tmp_path: Path, volume: Path) -> None:
    done = step("preprocess", tmp_path / "dataset", volume, "--data", str(few_digits))
    assert done.returncode == 0, done.stderr
    options = ["--architecture", "resnet18", "--image-size", "32", "--epochs", "1", "--global-batch-size", "16"]
    done = step("train", tmp_path / "checkpoint", volume, "--dataset", str(tmp_path / "dataset"), *options)
    assert done.returncode == 0, done.stderr
