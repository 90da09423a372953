"""Datasets in a volume that pods share: steps as processes, as Kubeflow Pipelines runs them."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from components.common.contracts.environment import KFP_RUN_VARIABLE
from components.common.contracts.manifests import ALL_FILES, MANIFEST, DatasetManifest, load
from components.common.process.dataset_volume import VARIABLE, find_dataset
from components.common.process.steplog import StepLog
from components.merge.__main__ import STEP as MERGE
from components.preprocess import packing
from components.preprocess.__main__ import STEP as PREPROCESS
from components.train.__main__ import STEP as TRAIN
from tests.conftest import ThisProcess
from tests.processes import run_python
from tests.unit.refusals import refuses


def step(name: str, output: Path, volume: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = ["-m", f"components.{name}", "--output", output, *options]
    return run_python(*words, **{VARIABLE: str(volume), KFP_RUN_VARIABLE: "run"})


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    (tmp_path / "volume").mkdir()
    return tmp_path / "volume"


def test_parts_lie_in_the_volume_and_outputs_are_manifests(
    few_digits: Path, tmp_path: Path, volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, parts = tmp_path / "part", json.dumps([str(tmp_path / "part")])
    data = shutil.copytree(few_digits, tmp_path / "data")
    (data / "0/broken.png").write_bytes(b"no image")
    monkeypatch.setenv(VARIABLE, str(volume))
    monkeypatch.setenv(KFP_RUN_VARIABLE, "run")
    monkeypatch.setattr(packing, "ProcessPoolExecutor", ThisProcess)
    PREPROCESS._execute(StepLog("preprocess"), {"data": str(data), "part": "1/1", "num_workers": 1}, part, {})
    done = step("merge", tmp_path / "dataset", volume, "--parts", parts)
    assert done.returncode == 0, done.stderr
    assert "rejected.jsonl lists all" in done.stderr
    assert "begun" not in done.stderr
    assert os.listdir(part) == os.listdir(tmp_path / "dataset") == [MANIFEST]
    assert len(list((volume / "enginery/datasets").iterdir())) == 2
    assert not list((volume / "enginery/begun").iterdir())

    found = load(find_dataset(tmp_path / "dataset"), DatasetManifest, verify=ALL_FILES)
    assert found.path.is_relative_to(volume)
    # The same once more, by another run, is the same folder.
    MERGE._execute(StepLog("merge"), {"parts": [str(part)]}, tmp_path / "again", {})
    assert find_dataset(tmp_path / "again") == found.path
    # Another dataset under this one's name is not taken, nor is one that was removed.
    for damage in (lambda: shutil.copy(part / MANIFEST, found.path), lambda: shutil.rmtree(found.path)):
        damage()
        with refuses("dataset-not-in-volume"):
            find_dataset(tmp_path / "dataset")
    with refuses("dataset-not-in-volume", says="Run preprocess again, without KFP's cache"):
        TRAIN._execute(StepLog("train"), {}, tmp_path / "checkpoint", {"dataset": tmp_path / "dataset"})


def test_a_volume_that_is_not_there(few_digits: Path, tmp_path: Path) -> None:
    done = step("preprocess", tmp_path / "dataset", tmp_path / "volume", "--data", str(few_digits))
    assert done.returncode == 2
    assert json.loads((tmp_path / "dataset/failure.json").read_text())["code"] == "no-volume"
    assert "the volume of dataset_volume is not there" in done.stderr
