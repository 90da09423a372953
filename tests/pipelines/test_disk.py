"""A disk that fills up or can't be written, for real: a small file system in memory."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from components.common.contracts.errors import EngineryError
from components.common.contracts.manifests import MANIFEST
from components.common.process.disk import explain
from enginery.local.rendering import EventStream, RunLog
from tests.unit.refusals import refuses

from .conftest import OpenRecord
from .running import STEPS, check_artifacts, finish, hold_in, query, start


@contextmanager
def file_system(place: Path) -> Iterator[Path]:
    """One in memory, mounted at `place`."""
    options = ["-t", "tmpfs", "-o", "size=400m", "enginery-test", str(place)]
    mounted = subprocess.run(["mount", *options], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"a file system can't be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with file_system(tmp_path_factory.mktemp("disk")) as place:
        yield place


def fill(disk: Path) -> Path:
    """Take all that is left."""
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * (1 << 16))
    with filler.open("ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"\0" * 512)
    return filler


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_the_disk_fills_up_while_a_step_is_at_work(disk: Path, few_digits: Path, step: str) -> None:
    home = disk / "home"
    before = set(home.glob("runs/*"))
    process = start(home, few_digits, held=step)
    worker = hold_in(process, home, step)
    filler = fill(disk)
    worker.send_signal(signal.SIGCONT)
    text = finish(process)
    filler.unlink()

    assert process.returncode == 1
    assert text.count("no space left on") == 1, text
    message = rf"{step} failed .*no space left on {disk}: \d+\.\d MB free; .*set ENGINERY_HOME.*are kept\)"
    assert re.search(message, text), text
    for finished in STEPS[: STEPS.index(step)]:
        assert re.search(rf"^ *{finished} (reused|done) ", text, re.MULTILINE), text
    (directory,) = set(home.glob("runs/*")) - before
    assert not list(directory.glob(f"artifacts/*/{step}/*/{MANIFEST}"))
    summary = json.loads((directory / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 1)
    assert "no space left" in summary["message"]
    ((run_id, status),) = query(home, f"select run_uuid, status from runs where name = '{directory.name}'")
    assert status == "FAILED"
    message = query(home, f"select value from tags where run_uuid = '{run_id}' and key = 'enginery.message'")
    assert "no space left" in (message or [[""]])[0][0]
    assert not query(home, "select name, status from runs where status = 'RUNNING'")


@pytest.mark.slow
def test_with_room_again_the_run_goes_on(disk: Path, few_digits: Path) -> None:
    process = start(disk / "home", few_digits)
    text = finish(process)
    assert process.returncode == 0, text
    for step in STEPS[:-1]:
        assert re.search(rf"^ *{step} reused ", text, re.MULTILINE), text
    check_artifacts(disk.glob("home/runs/*"))


@pytest.mark.parametrize("state", ["no state yet", "with a store", "a little room"])
def test_a_run_on_a_full_disk_does_not_begin(
    disk: Path, empty_store: Path, open_record: OpenRecord, state: str
) -> None:
    home = disk / state.replace(" ", "-")
    if state == "with a store":
        home.mkdir()
        shutil.copy(empty_store, home / "mlflow.db")
    filler = fill(disk)
    if state == "a little room":  # for a directory, not for a database
        os.truncate(filler, filler.stat().st_size - (1 << 20) - (100 << 10))
    with pytest.raises(EngineryError, match=rf"no space left on {disk}.*set ENGINERY_HOME"):
        open_record(home)
    filler.unlink()
    assert not list(home.glob("runs/*"))
    if state != "a little room":  # a database cut short: MLflow keeps that open in this process
        open_record(home)  # what a run that could not begin left must not be in the way


def test_a_state_directory_that_is_read_only(tmp_path: Path, open_record: OpenRecord) -> None:
    with file_system(tmp_path):
        (home := tmp_path / "home").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with refuses("state-directory-unusable", "ENGINERY_HOME"):
            open_record(home)


def test_a_log_that_takes_nothing_disturbs_nobody() -> None:
    events = []
    with RunLog(Path("/dev/full")) as log:
        stream = EventStream(log, events.append)
        print("a line", file=stream)
        print('@enginery {"event": "note"}', file=stream)
        print('@enginery {"event": "cut sh', file=stream, flush=True)
    assert events == [{"event": "note"}]


def test_a_full_disk_is_known_by_what_libraries_say(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as full:
        Path("/dev/full").write_bytes(b"x")
    wrapped = RuntimeError("export failed")
    wrapped.__cause__ = full.value
    rust = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    sqlite = RuntimeError("(sqlite3.OperationalError) database or disk is full")
    for error in (full.value, wrapped, rust, sqlite):
        assert str(explain(error, tmp_path)).startswith("no space left on /")
    assert explain(ValueError("too large"), tmp_path) is None
    refused = PermissionError(13, "Permission denied", "/data/x")
    explained = explain(refused, tmp_path)
    assert (explained.exit_code, explained.code) == (2, "permission-denied")


def test_a_copy_onto_a_full_disk_names_that_disk(disk: Path, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(1 << 20))
    filler = fill(disk)
    try:
        with pytest.raises(OSError, match="No space left") as caught:
            shutil.copyfile(tmp_path / "source", disk / "target")
        assert str(explain(caught.value, tmp_path)).startswith(f"no space left on {disk}: 0.0 MB free")
    finally:
        filler.unlink()
        (disk / "target").unlink()
