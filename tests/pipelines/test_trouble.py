"""Runs that the machine or a person ends, not the model."""

import json
import os
import shutil
import signal
import tarfile
import time
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from components.common.contracts.errors import UserError
from enginery.local.preflight import _MAX_UNPACKED_BYTES

from .conftest import OpenRecord
from .running import finish, hold_in, start


@pytest.mark.slow  # test_two_first_runs_make_one_store in test_tracking.py has what both do before their first step
def test_two_first_runs_at_once(tmp_path: Path, few_digits: Path) -> None:
    """On a state directory that does not exist yet, where both would create the tracking store."""
    shutil.copytree(few_digits, data := tmp_path / "images")
    next(path for path in data.glob("*/*") if path.is_file()).write_bytes(b"damaged")
    (temporary := tmp_path / "tmp").mkdir()
    options = ("--set", "preprocess.on_bad=fail")
    processes = [
        start(tmp_path / "home", data, *options, "--seed", str(seed), TMPDIR=str(temporary)) for seed in (1, 2)
    ]
    texts = [finish(process) for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert all("1 of 600 files are no usable image" in text for text in texts)
    assert list(temporary.iterdir()) == []
    summaries = [json.loads(path.read_text()) for path in (tmp_path / "home/runs").glob("*/summary.json")]
    assert [summary["exit_code"] for summary in summaries] == [2, 2]
    client = MlflowClient(f"sqlite:///{tmp_path / 'home/mlflow.db'}")
    (experiment,) = [entry for entry in client.search_experiments() if entry.name == "resnet50"]
    runs = client.search_runs([experiment.experiment_id])
    assert [run.info.status for run in runs] == ["FAILED"] * 4
    assert all("1 of 600 files are no usable image" in run.data.tags["enginery.message"] for run in runs)


def test_a_killed_step_is_explained(tmp_path: Path, empty_store: Path) -> None:
    (home := tmp_path / "home").mkdir()
    shutil.copy(empty_store, home / "mlflow.db")
    process = start(home, tmp_path / "leaking", held="preprocess")
    hold_in(process, home, "preprocess").kill()
    text = finish(process)
    assert process.returncode == 1
    assert "killed, most often because memory ran out" in text
    (summary,) = [json.loads(path.read_text()) for path in home.glob("runs/*/summary.json")]
    assert summary["steps"][-1]["status"] == "failed"
    assert "\x1b" not in summary["message"]


@pytest.mark.parametrize("obstacle", ["home is a file", "runs is a file"])
def test_state_directory_that_cannot_be_used(tmp_path: Path, open_record: OpenRecord, obstacle: str) -> None:
    home = tmp_path / "home"
    if obstacle == "home is a file":
        home.write_text("")
    else:
        home.mkdir()
        (home / "runs").write_text("")
    with pytest.raises(UserError) as caught:
        open_record(home)
    assert (caught.value.code, caught.value.setting) == ("state-directory-unusable", "ENGINERY_HOME")


def test_too_few_validation_images_that_could_not_be_counted_before(
    tmp_path: Path, few_digits: Path, empty_store: Path
) -> None:
    """An archive that is too large to be unpacked for a look: preprocess counts, and nothing is trained."""
    (home := tmp_path / "home").mkdir()
    shutil.copy(empty_store, home / "mlflow.db")
    (tmp_path / "padding").write_bytes(os.urandom(_MAX_UNPACKED_BYTES))
    with tarfile.open(tmp_path / "digits.tar.gz", "w:gz", compresslevel=0) as archive:
        archive.add(few_digits, "digits")
        archive.add(tmp_path / "padding", "digits/.padding")
    process = start(home, tmp_path / "digits.tar.gz", "--set", "gate.min_validation_images=1000")
    text = finish(process)
    assert process.returncode == 2, text
    assert "is checked after preprocess" in text
    assert "120 of the 600 images validate, and at least 1,000 are needed" in text
    (summary,) = [json.loads(path.read_text()) for path in home.glob("runs/*/summary.json")]
    assert "train" not in {step["name"] for step in summary["steps"]}


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
    process = start(home, few_digits, held="preprocess")
    worker = hold_in(process, home, "preprocess")
    assert len(alive(process.pid)) >= 2
    os.killpg(process.pid, signal.SIGINT)
    worker.resume()
    text = finish(process)
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
