"""What a person sees when the machine, not the model, is in trouble."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from components.common.errors import UserError
from pipelines.commands import cli

from .submission import load_once

ROOT = Path(__file__).resolve().parents[2]
POINT = ("--set", "gate.confident=false")  # 120 validation images prove little


def start(home: Path, *arguments: str, **variables: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "pipelines.cli", "run", "pipelines/resnet50.py", "--image-size", "32"]
    command += [*POINT, *arguments]
    environment = {**os.environ, "ENGINERY_HOME": str(home), **variables}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen, seconds: float = 600) -> str:
    text, _ = process.communicate(timeout=seconds)
    assert "Traceback" not in text
    return text


def test_two_first_runs_at_once(tmp_path: Path, few_digits: Path) -> None:
    """On a state directory that does not exist yet, where both would create the tracking store."""
    shutil.copytree(few_digits, data := tmp_path / "images")
    next(path for path in data.glob("*/*") if path.is_file()).write_bytes(b"damaged")
    (temporary := tmp_path / "tmp").mkdir()
    options = ("--data", str(data), "--set", "preprocess.on_bad=fail")
    processes = [start(tmp_path / "home", *options, "--seed", str(seed), TMPDIR=str(temporary)) for seed in (1, 2)]
    texts = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert all("1 of 600 files are no usable image" in text for text in texts)
    assert list(temporary.iterdir()) == []
    summaries = [json.loads(path.read_text()) for path in (tmp_path / "home/runs").glob("*/summary.json")]
    assert [summary["exit_code"] for summary in summaries] == [2, 2]
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'home/mlflow.db'}")
    (experiment,) = [entry for entry in client.search_experiments() if entry.name == "resnet50"]
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.status for run in runs] == ["FAILED"] * 4
    assert all("1 of 600 files are no usable image" in run.data.tags["enginery.message"] for run in runs)


def test_a_killed_step_is_explained(tmp_path: Path, few_digits: Path) -> None:
    process = start(tmp_path / "home", "--data", str(few_digits), "--image-size", "32")
    deadline = time.monotonic() + 600
    steps: list[psutil.Process] = []
    while not steps and time.monotonic() < deadline:
        family = psutil.Process(process.pid).children(recursive=True)
        steps = [child for child in family if "python" in child.name() and child.num_threads() > 1]
        time.sleep(0.05)
    time.sleep(0.3)
    steps[0].kill()
    text = finish(process)
    assert process.returncode == 1
    assert "killed, most often because memory ran out" in text
    (summary,) = [json.loads(path.read_text()) for path in (tmp_path / "home/runs").glob("*/summary.json")]
    assert summary["steps"][-1]["status"] == "failed"
    assert "\x1b" not in summary["message"]


def test_unreachable_tracking_server(tmp_path: Path, few_digits: Path) -> None:
    process = start(tmp_path / "home", "--data", str(few_digits), MLFLOW_TRACKING_URI="http://user:secret@127.0.0.1:9")
    text = finish(process)
    assert process.returncode == 1
    assert "MLflow at http://***@127.0.0.1:9 can't be used" in text
    assert "secret" not in text
    assert "unset MLFLOW_TRACKING_URI" in text


@pytest.mark.parametrize("obstacle", ["home is a file", "runs is a file"])
def test_state_directory_that_cannot_be_used(
    tmp_path: Path, few_digits: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    home = tmp_path / "home"
    if obstacle == "home is a file":
        home.write_text("")
    else:
        home.mkdir()
        (home / "runs").write_text("")
    monkeypatch.setenv("ENGINERY_HOME", str(home))
    monkeypatch.setattr("pipelines.commands.run.load_pipeline", load_once)
    with pytest.raises(UserError, match=rf"{home}.*set ENGINERY_HOME"):
        cli(
            ["run", str(ROOT / "pipelines/resnet50.py"), "--data", str(few_digits), "--set", "gate.confident=false"],
            standalone_mode=False,
        )
