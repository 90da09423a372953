"""Runs that the machine or a person ends, not the model."""

import json
import os
import shutil
import signal
import tarfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from enginery.datasets.phrases import write_phrases
from enginery.local.preflight import _MAX_UNPACKED_BYTES
from tests.processes import run_python
from tests.unit.refusals import refuses
from tests.waiting import wait_until

from .conftest import OpenRecord
from .running import finish, hold_in, query, start


@pytest.fixture
def home(tmp_path: Path, empty_store: Path) -> Path:
    """A state folder with a store, which takes seconds to make."""
    (folder := tmp_path / "home").mkdir()
    shutil.copy(empty_store, folder / "mlflow.db")
    return folder


def summary_of(home: Path) -> dict[str, Any]:
    """Of its one run."""
    (file,) = home.glob("runs/*/summary.json")
    return dict(json.loads(file.read_text()))


def test_a_killed_step_is_explained(home: Path, tmp_path: Path) -> None:
    process = start(home, tmp_path / "leaking", held="preprocess")
    hold_in(process, home, "preprocess").kill()
    text = finish(process)
    assert process.returncode == 1
    assert "killed, most often because memory ran out" in text
    summary = summary_of(home)
    assert [(step["name"], step["status"]) for step in summary["steps"]] == [("preprocess", "failed")]
    assert (summary["status"], summary["exit_code"], summary["registered"]) == ("failed", 1, "")
    assert {status for (status,) in query(home, "select status from runs") or []} == {"FAILED"}
    assert "\x1b" not in summary["message"]


@pytest.mark.parametrize("obstacle", ["home is a file", "runs is a file"])
def test_state_directory_that_cannot_be_used(tmp_path: Path, open_record: OpenRecord, obstacle: str) -> None:
    home = tmp_path / "home"
    if obstacle == "home is a file":
        home.write_text("")
    else:
        home.mkdir()
        (home / "runs").write_text("")
    with refuses("state-directory-unusable", "ENGINERY_HOME"):
        open_record(home)


def test_too_few_validation_images_that_could_not_be_counted_before(
    home: Path, tmp_path: Path, few_digits: Path
) -> None:
    """An archive that is too large to be unpacked for a look: preprocess counts, and nothing is trained."""
    (tmp_path / "padding").write_bytes(os.urandom(_MAX_UNPACKED_BYTES))
    with tarfile.open(tmp_path / "digits.tar.gz", "w:gz", compresslevel=0) as archive:
        archive.add(few_digits, "digits")
        archive.add(tmp_path / "padding", "digits/.padding")
    (temporary := tmp_path / "tmp").mkdir()
    more = ("--set", "gate.min_validation_images=1000")
    # torch puts a cache there, too, where it is not told another place.
    folders = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    process = start(home, tmp_path / "digits.tar.gz", *more, **folders)
    text = finish(process)
    assert process.returncode == 2, text
    assert list(temporary.iterdir()) == []
    assert "is checked after preprocess" in text
    assert "120 of the 600 images validate, and at least 1,000 are needed" in text
    summary = summary_of(home)
    assert "train" not in {step["name"] for step in summary["steps"]}


def test_too_few_validation_sentences_end_a_run_before_its_training(home: Path, tmp_path: Path) -> None:
    write_phrases(tmp_path / "data", num_pairs=300)
    options = ("--data", tmp_path / "data", "--architecture", "translation/lstm_small")
    done = run_python("-m", "enginery.cli.main", "run", "translation", *options, ENGINERY_HOME=str(home))
    assert done.returncode == 2
    assert "60 of the 300 sentences validate, and at least 300 are needed" in done.stdout + done.stderr
    summary = summary_of(home)
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


def test_ctrl_c_ends_everything(home: Path, few_digits: Path) -> None:
    process = start(home, few_digits, held="preprocess")
    worker = hold_in(process, home, "preprocess")
    assert len(alive(process.pid)) >= 2
    os.killpg(process.pid, signal.SIGINT)
    worker.resume()
    text = finish(process)
    assert process.returncode == 130, text
    assert "interrupted; nothing was promoted" in text
    wait_until(lambda: not alive(process.pid), lambda: alive(process.pid), seconds=60)

    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    statuses = {run.info.run_name: run.info.status for run in runs}
    (parent,) = [name for name in statuses if name.startswith("resnet50-")]
    assert statuses == {parent: "KILLED", "preprocess": "KILLED"}
    summary = summary_of(home)
    assert (summary["status"], summary["exit_code"]) == ("killed", 130)
