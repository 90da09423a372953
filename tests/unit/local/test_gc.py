"""gc: what goes by which rule, and what stays whatever a rule says."""

import fcntl
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
from mlflow import MlflowClient

from components.common.contracts.errors import UserError
from enginery.local import gc
from enginery.local.gc import InUse, Rules, delete, in_use, leftovers, parse_age, parse_size, plan, remove
from enginery.local.runs import PastRun, past_runs
from enginery.local.state import MLFLOW_RUN_ID, StateDirectory
from enginery.local.summary import StepSummary
from tests.unit.registered import enginery, refuses
from tests.unit.runs import write_run

NOTHING = InUse()


def make_run(
    state: Path, days: float, *, reused: str = "", size_kb: int = 100, finished: bool = True, **values: str
) -> Path:
    """A run directory as `enginery run` leaves it, begun `days` ago."""
    stamp = (datetime.now() - timedelta(days=days)).strftime("%Y%m%d-%H%M%S")
    path = state / "runs" / f"digits-{stamp}-{len(list((state / 'runs').glob('*'))):04x}"
    (path / "artifacts").mkdir(parents=True)
    (path / ".lock").touch()
    (path / "artifacts" / "weights").write_bytes(os.urandom(size_kb * 1024))
    if finished:
        step = StepSummary(name="train", status="reused", outcome=f"reused from {reused}", seconds_total=0)
        write_run(path, steps=[step] if reused else [], **{"tracking_uri": "", "mlflow_run_id": "", **values})
    elif values:
        (path / MLFLOW_RUN_ID).write_text(values["mlflow_run_id"])
    return path


def decide(state: Path, needed: InUse = NOTHING, **rules: float) -> tuple[set[str], dict[str, str]]:
    """Names of the runs that would go, and of those kept with the reason."""
    decided = plan(past_runs(state / "runs"), Rules(**rules), needed, time.time())
    return {run.name for run, _ in decided.remove}, {run.name: reason for run, reason in decided.keep}


@contextmanager
def locked(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """The lock of a run, held by another process."""
    script = (
        f"import fcntl, sys; f = open({str(path / '.lock')!r}, 'r+'); fcntl.flock(f, {kind}); "
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        yield


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> tuple[Path, dict[str, str]]:
    """A real MLflow on SQLite: version 1 without an alias, version 2 @candidate. Parent run names and ids."""
    home = tmp_path_factory.mktemp("home")
    shutil.copy(empty_store, home / "mlflow.db")
    state = StateDirectory(path=home)
    client = MlflowClient(state.default_tracking_uri)
    experiment = client.create_experiment("digits", artifact_location=(state.path / "mlartifacts").as_uri())
    client.create_registered_model("digits")
    ids = {}
    for name in ("old", "promoted"):
        parent = client.create_run(experiment, run_name=name).info.run_id
        step = client.create_run(experiment, run_name="promote", tags={"mlflow.parentRunId": parent}).info.run_id
        client.create_model_version("digits", f"{home}/{name}", run_id=step)
        client.set_tag(parent, "mlflow.parentRunId", step)  # as anybody may, who can edit the run
        ids[name] = parent
    client.set_registered_model_alias("digits", "candidate", "2")
    return home, ids


def test_each_rule_and_any_of_them(tmp_path: Path) -> None:
    runs = {days: make_run(tmp_path, days).name for days in (1, 10, 40, 100)}
    assert decide(tmp_path, older_than_s=30 * 86400)[0] == {runs[40], runs[100]}
    assert decide(tmp_path, keep=1)[0] == {runs[10], runs[40], runs[100]}
    assert decide(tmp_path, keep=3, older_than_s=30 * 86400)[0] == {runs[40], runs[100]}
    assert decide(tmp_path, keep=0)[0] == set(runs.values())
    assert decide(tmp_path, max_size_bytes=250_000)[0] == {runs[40], runs[100]}
    assert decide(tmp_path, max_size_bytes=10**9)[0] == set()


def test_no_rule_and_bad_values_are_refused() -> None:
    for make, setting in ((Rules, ""), (lambda: Rules(keep=-1), "--keep")):
        with pytest.raises(UserError) as caught:
            make()
        assert caught.value.setting == setting
    assert [parse_age(text) for text in ("30d", "1.5h", "90min")] == [2592000, 5400, 5400]
    sizes = {"50GB": 50 * 10**9, "1TiB": 2**40, "0": 0, "2.5 mb": 2_500_000}
    assert {text: parse_size(text) for text in sizes} == sizes
    bad = [(parse_age, text) for text in ("30", "d", "-3d", "3 years")]
    for parse, text in (*bad, *((parse_size, text) for text in ("50", "GB", "-1GB", "many"))):
        with refuses("invalid-rule"):
            parse(text)


def test_run_that_an_alias_points_to_survives(registry: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    home, ids = registry
    needed = in_use(StateDirectory(path=home))
    uri = f"sqlite:///{home}/mlflow.db"
    old = make_run(tmp_path, 50, mlflow_run_id=ids["old"], registered="digits/1", tracking_uri=uri)
    promoted = make_run(tmp_path, 60, mlflow_run_id=ids["promoted"], registered="digits/2", tracking_uri=uri)
    killed, killed_old = (make_run(tmp_path, 70, mlflow_run_id=ids[it], finished=False) for it in ("promoted", "old"))
    removed, kept = decide(tmp_path, needed, keep=0, older_than_s=1, max_size_bytes=0)
    assert removed == {old.name, killed_old.name}
    assert kept == dict.fromkeys((promoted.name, killed.name), "digits@candidate (version 2) points to it")


def test_runs_whose_steps_a_promoted_run_took_over_survive(tmp_path: Path) -> None:
    source = make_run(tmp_path, 70)
    promoted = make_run(tmp_path, 60, mlflow_run_id="p", reused=source.name)
    removed, kept = decide(tmp_path, InUse({"p": "digits@candidate (version 2)"}), keep=0)
    assert (removed, set(kept)) == (set(), {source.name, promoted.name})


def test_run_registered_in_a_store_that_was_not_asked_survives(tmp_path: Path) -> None:
    make_run(tmp_path, 60, registered="digits/7", tracking_uri="http://mlflow.example")
    removed, kept = decide(tmp_path, InUse(stores=frozenset({"sqlite:///other.db"})), keep=0)
    assert removed == set()
    assert "http://mlflow.example; set MLFLOW_TRACKING_URI" in next(iter(kept.values()))


def test_run_registered_in_a_database_that_is_gone_survives(tmp_path: Path) -> None:
    """As on a disk that is not mounted."""
    state = StateDirectory(path=tmp_path)
    run = make_run(tmp_path, 60, registered="digits/7", tracking_uri=state.default_tracking_uri)
    assert set(decide(tmp_path, in_use(state, past_runs(tmp_path / "runs")), keep=0)[1]) == {run.name}


def test_moved_state_directory_and_database_of_another_one(
    registry: tuple[Path, dict[str, str]], tmp_path, monkeypatch
) -> None:
    home, ids = registry
    moved = make_run(tmp_path, 60, mlflow_run_id=ids["old"], registered="digits/1", tracking_uri="sqlite:////moved.db")
    needed = in_use(StateDirectory(path=home), past_runs(tmp_path / "runs"))
    assert decide(tmp_path, needed, keep=0) == ({moved.name}, {})
    uri = f"sqlite:///{home}/mlflow.db"
    other = make_run(tmp_path, 61, mlflow_run_id=ids["promoted"], registered="digits/2", tracking_uri=uri)
    needed = in_use(StateDirectory(path=tmp_path), past_runs(tmp_path / "runs"))  # a state without a database
    assert set(decide(tmp_path, needed, keep=0)[1]) == {other.name}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{uri}?timeout=30")
    assert ids["promoted"] in in_use(StateDirectory(path=tmp_path)).runs


def test_unreachable_store_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with refuses("tracking-unreachable", "MLFLOW_TRACKING_URI"):
        in_use(StateDirectory(path=tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    in_use(StateDirectory(path=tmp_path))
    assert not (tmp_path / "mlflow.db").exists()  # a question makes no database


def test_run_that_is_going_survives_and_so_do_the_steps_it_may_read(tmp_path: Path) -> None:
    going, read, other = (make_run(tmp_path, days, finished=days > 51) for days in (50, 60, 70))
    (read / "cache").mkdir()
    (read / "cache" / "key.digest").write_text("sha256:aa")
    with locked(going):
        removed, kept = decide(tmp_path, keep=0)
    assert removed == {other.name}
    assert kept[going.name] == "it is still going"
    assert "may read" in kept[read.name]
    assert decide(tmp_path, keep=0)[0] == {going.name, read.name, other.name}  # its process ended: a killed run
    began = make_run(tmp_path, 0, finished=False)  # just now
    (began / ".lock").unlink()
    assert decide(tmp_path, keep=0)[1][began.name] == "it is still going"


@pytest.mark.parametrize("kind", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_lock_taken_after_the_plan_stops_the_removal(tmp_path: Path, kind: int) -> None:
    path = make_run(tmp_path, 50)
    reasons: list[str] = []
    with locked(path, kind):
        assert remove(PastRun(path), lambda run, reason: reasons.append(reason)) is False
    assert (reasons, (path / "summary.json").exists()) == (["it is in use"], True)
    assert remove(PastRun(path), lambda run, reason: reasons.append(reason)) is True
    assert list((tmp_path / "runs").iterdir()) == []


def test_killed_gc_leaves_no_half_run_and_the_next_one_clears_up(tmp_path: Path, monkeypatch) -> None:
    path = make_run(tmp_path, 50)
    monkeypatch.setattr(gc, "delete", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        remove(PastRun(path), lambda run, reason: None)
    assert past_runs(tmp_path / "runs") == []
    (left,) = leftovers(tmp_path / "runs")
    delete(left)
    assert leftovers(tmp_path / "runs") == []


def test_what_is_no_run_stays(tmp_path: Path) -> None:
    outside = tmp_path / "precious"
    outside.mkdir()
    (tmp_path / "runs" / "my-notes").mkdir(parents=True)
    (tmp_path / "runs" / "digits-20200101-000000-abcd").symlink_to(outside)
    assert decide(tmp_path, keep=0) == (set(), {})


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path))
    new, old = make_run(tmp_path, 1), make_run(tmp_path, 50, size_kb=1000)
    shown = enginery("gc", "--keep", 1, "--dry-run", columns=80).output
    assert old.name in shown
    assert "beyond the newest 1" in shown
    with refuses("no-terminal"):
        enginery("gc", "--keep", 1, stdin=b"")
    assert old.exists()
    (tmp_path / "runs" / ".trash-left-1").mkdir()
    done = enginery("gc", "--keep", 1, "--yes")
    assert (old.exists(), new.exists()) == (False, True)
    assert "1.0 MB freed" in done.output
    assert leftovers(tmp_path / "runs") == []
    with pytest.raises(UserError):
        enginery("gc")
