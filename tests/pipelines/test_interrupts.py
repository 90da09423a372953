"""Ctrl-C in a terminal: everything that the run started ends, and its records say so."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from mlflow import MlflowClient

REPOSITORY = Path(__file__).resolve().parents[2]
LONG_TRAINING = [
    *("--architecture", "resnet18", "--image-size", "32", "--epochs", "500", "--global-batch-size", "32"),
    *("--learning-rate", "0.4", "--set", "train.resize_ratio=1.0", "--set", "gate.confident=false"),
]


def alive(session_id: int) -> list[str]:
    """Command lines of what still runs in a session. A zombie has ended, whoever is to collect it."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def test_ctrl_c_ends_everything(tmp_path: Path, few_digits: Path) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-m", "pipelines.cli", "run", "pipelines/resnet50.py", "--data", str(few_digits)]
    process = subprocess.Popen(
        [*command, *LONG_TRAINING],
        cwd=REPOSITORY,
        env={**os.environ, "ENGINERY_HOME": str(home), "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        seen = next((line for line in process.stdout if "train training" in line), "it ended")
        assert "/500, loss" in seen
        assert len(alive(process.pid)) >= 2
        os.killpg(process.pid, signal.SIGINT)
        text = process.communicate(timeout=600)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, text
    assert "interrupted; nothing was promoted" in text
    assert "Traceback" not in text
    deadline = time.monotonic() + 60
    while alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(process.pid) == []

    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    statuses = {run.info.run_name: run.info.status for run in runs}
    (parent,) = [name for name in statuses if name.startswith("resnet50-")]
    assert statuses == {parent: "KILLED", "preprocess": "FINISHED", "train": "KILLED"}
    (summary,) = home.glob("runs/*/summary.json")
    record = json.loads(summary.read_text())
    assert (record["status"], record["exit_code"]) == ("killed", 130)
