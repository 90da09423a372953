"""Ctrl-C in a terminal: everything that the run started ends, and its records say so."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
from mlflow import MlflowClient

from .running import finish, hold_in, start


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


def test_ctrl_c_ends_everything(tmp_path: Path, few_digits: Path, empty_store: Path) -> None:
    (home := tmp_path / "home").mkdir()
    shutil.copy(empty_store, home / "mlflow.db")
    process = start(home, few_digits)
    try:
        worker = hold_in(process, home, "preprocess")
        assert len(alive(process.pid)) >= 2
        os.killpg(process.pid, signal.SIGINT)
        worker.resume()
        text = finish(process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, text
    assert "interrupted; nothing was promoted" in text
    deadline = time.monotonic() + 60
    while alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(process.pid) == []

    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    statuses = {run.info.run_name: run.info.status for run in runs}
    (parent,) = [name for name in statuses if name.startswith("resnet50-")]
    assert statuses == {parent: "KILLED", "preprocess": "KILLED"}
    (summary,) = home.glob("runs/*/summary.json")
    record = json.loads(summary.read_text())
    assert (record["status"], record["exit_code"]) == ("killed", 130)
