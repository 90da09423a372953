"""The whole pipeline through the images, started as a person does: `enginery run --in-containers`."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.containers.conftest import docker
from tests.processes import start_python
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
RUN = ("-m", "enginery.cli.main", "run", "pipelines/resnet50.py", "--in-containers")
SETTINGS = ["--config", "pipelines/configs/digits.yaml"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("ENGINERY_IMAGE_REGISTRY", os.environ["REGISTRY"])
    monkeypatch.setenv("ENGINERY_IMAGE_TAG", os.environ["TAG"])
    return tmp_path / "home"


def containers_of(run: Path) -> list[str]:
    found = docker("ps", "--quiet", "--filter", f"label=enginery.run={run.name}").stdout
    return found.split()


def test_digits_from_images_to_a_registered_version(home: Path, digits: Path, tmp_path: Path) -> None:
    summary = tmp_path / "summary.json"
    quick = ["--architecture", "resnet18", "--epochs", "1", "--num-calibration-images", "64"]
    quick += ["--set", "validate.benchmark_seconds=0.2", "--set", "validate.benchmark_repeats=1"]
    # Trained so briefly it may lose more than a point; what it loses is not what is tested here.
    quick += ["--max-drop-points", "30"]
    words = (*RUN, *SETTINGS, *quick, "--data", digits, "--summary", summary)
    process = start_python(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 0, said[-6000:]
    result = json.loads(summary.read_text())
    assert [step["name"] for step in result["steps"]] == [
        "preprocess",
        "train",
        "export",
        "validate",
        "gate",
        "promote",
    ]
    assert result["registered"] == "digits-resnet50/1"
    (row,) = (row for row in result["rows"] if row["precision"] == "int8")
    assert row["verdict"] == "pass"
    run = Path(result["run_directory"])
    assert {path.stat().st_uid for path in run.rglob("*")} == {os.getuid()}
    assert containers_of(run) == []
    manifests = list(run.glob("artifacts/*/*/*/manifest.json"))
    assert len(manifests) == 6


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_container_outlives_its_run(number: signal.Signals, home: Path, digits: Path) -> None:
    words = (*RUN, *SETTINGS, "--epochs", "500", "--data", digits)
    with start_python(*words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + 240
        runs: list[Path] = []
        while time.monotonic() < deadline:
            runs = list((home / "runs").glob("*"))
            if runs and containers_of(runs[0]) and "training" in (runs[0] / "run.log").read_text():
                break
            if runs and list(runs[0].glob("artifacts/*/preprocess/*/manifest.json")):
                break
            time.sleep(0.5)
        assert containers_of(runs[0]) or process.poll() is None
        process.send_signal(number)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130), said
    wait_until(lambda: not containers_of(runs[0]), seconds=60)
