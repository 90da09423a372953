"""Real signals in every step: nothing is left running, nothing half-written is accepted, and the next run resumes."""

import json
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from components.common.contracts.manifests import MANIFEST, PARTIAL_OUTPUT
from enginery.local.run import _GRACE_S
from tests.processes import run_python
from tests.waiting import wait_until

from .running import STEPS, check_artifacts, finish, hold_in, query, start, worker_of

pytestmark = pytest.mark.slow


@dataclass
class Home:
    """A state directory, and what its last run left to check."""

    path: Path
    data: Path
    finished: list[str] = field(default_factory=list)  # steps that the next run must not repeat
    pending: dict[str, str] = field(default_factory=dict)  # local run -> status that the next run gives it in MLflow

    def start(self, seed: int = 0, *more: str, held: str = "") -> "Run":
        before = set(self.path.glob("runs/*"))
        process = start(self.path, self.data, "--seed", str(seed), *more, held=held, OMP_NUM_THREADS="2")
        return Run(self, process, before)

    def statuses(self, run: str) -> dict[str, str]:
        """Status in MLflow of a pipeline's run, under its own name, and of the steps below it."""
        ((run_id, status),) = query(self.path, f"select run_uuid, status from runs where name = '{run}'") or []
        nested = query(
            self.path,
            "select name, status from runs join tags on tags.run_uuid = runs.run_uuid "
            f"where tags.key = 'mlflow.parentRunId' and tags.value = '{run_id}'",
        )
        return {run: status, **dict(nested or [])}


@dataclass
class Run:
    home: Home
    process: subprocess.Popen[str]
    before: set[Path]

    @property
    def directory(self) -> Path:
        (found,) = set(self.home.path.glob("runs/*")) - self.before
        return found

    @property
    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def hold_in(self, step: str) -> psutil.Process:
        return hold_in(self.process, self.home.path, step)

    def wait_for_any(self, pattern: str) -> None:
        """Wait for a new file below the runs."""
        seen = set(self.home.path.glob(f"runs/*/{pattern}"))
        wait_until(lambda: set(self.home.path.glob(f"runs/*/{pattern}")) - seen, process=self.process)

    def end(self, seconds: float = 120) -> str:
        return finish(self.process, seconds)


@pytest.fixture(scope="module")
def home(few_digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Home:
    """One for all kills, so that finished steps serve the next ones."""
    return Home(tmp_path_factory.mktemp("kills") / "home", few_digits)


def kill(run: Run, worker: psutil.Process, how: str) -> None:
    if how == "SIGKILL the run":
        run.process.kill()
    elif how == "SIGKILL the step":
        worker.kill()
    elif how == "SIGTERM":
        run.process.terminate()
    else:
        os.killpg(run.process.pid, signal.SIGINT)  # what Ctrl-C in a terminal does
    if worker.is_running():
        worker.resume()


@pytest.mark.parametrize("how", ["SIGKILL the run", "SIGKILL the step", "SIGTERM", "Ctrl-C"])
@pytest.mark.parametrize("step", STEPS)
def test_killed(home: Home, step: str, how: str) -> None:
    run = home.start(held=step)
    worker = run.hold_in(step)
    name, family = run.directory.name, run.family
    for killed, status in home.pending.items():  # this run has said it for the one that could not
        assert set(home.statuses(killed).values()) <= {status, "FINISHED"}
        assert home.statuses(killed)[killed] == status
    home.pending.clear()

    sealed = list(run.directory.glob(f"artifacts/*/{step}/*/{MANIFEST}"))
    kill(run, worker, how)
    text = run.end()
    assert not psutil.wait_procs(family, timeout=10)[1]
    for reused in home.finished:
        assert re.search(rf"^ *{reused} reused ", text, re.MULTILINE), text
    assert not re.search(rf"^ *{step} (reused|done)", text, re.MULTILINE), text
    check_artifacts(home.path.glob("runs/*"))
    if how == "SIGKILL the step":  # else it has a moment left, in which the gate may seal a verdict that is whole
        assert list(run.directory.glob(f"artifacts/*/{step}/*/{MANIFEST}")) == sealed
    home.finished = STEPS[: STEPS.index(step)]

    if how == "SIGKILL the run":
        assert run.process.returncode == -signal.SIGKILL
        assert not (run.directory / "summary.json").exists()
        home.pending[name] = "KILLED"
        return
    summary = json.loads((run.directory / "summary.json").read_text())
    statuses = home.statuses(name)
    if how == "SIGKILL the step":
        assert run.process.returncode == summary["exit_code"] == 1
        assert "ended without a word, so it was killed" in text
        assert (statuses[name], statuses[step]) == ("FAILED", "FAILED")
        assert summary["steps"][-1]["name"] == step
    else:
        assert run.process.returncode == summary["exit_code"] == 130
        assert "interrupted; nothing was promoted" in text
        assert (statuses[name], statuses[step]) == ("KILLED", "KILLED")


def test_after_all_that_the_run_ends_well(home: Home) -> None:
    run = home.start()
    text = run.end(300)
    assert run.process.returncode == 0, text
    for reused in home.finished:
        assert re.search(rf"^ *{reused} reused ", text, re.MULTILINE), text
    assert set(home.statuses(run.directory.name).values()) == {"FINISHED"}
    assert query(home.path, "select name, status from runs where status = 'RUNNING'") == []
    for killed, status in home.pending.items():
        assert home.statuses(killed)[killed] == status
    home.finished = STEPS[:-1]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
def test_killed_while_the_end_is_recorded(home: Home, how: str) -> None:
    """MLflow ends up with what the summary says: the signal waits, or the next run tells it."""
    run = home.start()
    run.wait_for_any("summary.json")
    run.process.send_signal(getattr(signal, how))
    text = run.end()
    name = run.directory.name
    assert json.loads((run.directory / "summary.json").read_text())["status"] == "done"
    if how == "SIGTERM":
        assert run.process.returncode == 0, text
    else:
        following = home.start()
        following.end()
        assert following.process.returncode == 0
    assert set(home.statuses(name).values()) == {"FINISHED"}


def test_a_second_interrupt_ends_a_step_that_does_not_listen(home: Home) -> None:
    run = home.start(seed=1, held="preprocess")
    worker = run.hold_in("preprocess")  # and held it stays: the first interrupt can't end it
    family, name = run.family, run.directory.name
    started = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    time.sleep(1)
    for _ in range(3):
        run.process.send_signal(signal.SIGINT)
        time.sleep(0.1)
    text = run.end()
    assert run.process.returncode == 130, text
    assert time.monotonic() - started < _GRACE_S  # which a step gets after the first
    assert not worker.is_running()
    assert not psutil.wait_procs(family, timeout=5)[1]
    assert "stopping the running step" in text
    statuses = home.statuses(name)
    assert (statuses[name], statuses["preprocess"]) == ("KILLED", "KILLED")


@pytest.mark.parametrize("seeds", [(2, 3), (4, 4)])
def test_two_runs_at_once(home: Home, seeds: tuple[int, int]) -> None:
    """On one state directory: with different seeds, and with the same, where both make everything for themselves."""
    runs = [home.start(seed) for seed in seeds]
    texts = [run.end(600) for run in runs]
    assert [run.process.returncode for run in runs] == [0, 0], "\n".join(texts)
    summaries = []
    for run in runs:
        directories = set(home.path.glob("runs/*")) - run.before
        summaries += [json.loads((path / "summary.json").read_text()) for path in directories]
    found = {summary["run_id"]: summary for summary in summaries}
    assert sorted(summary["arguments"]["seed"] for summary in found.values()) == sorted(seeds)
    for name, summary in found.items():
        assert [step["status"] for step in summary["steps"]] == ["done"] * 6
        assert set(home.statuses(name).values()) == {"FINISHED"}
    assert len({summary["registered"] for summary in found.values()}) == 2
    assert len({summary["bundle_digest"] for summary in found.values()}) == 2
    check_artifacts(home.path.glob("runs/*"))
    again = home.start(seeds[0])  # reuses what goes together
    assert again.end(600)
    assert again.process.returncode == 0


def killed_in_packing(home: Home, how: str, seed: int, settings: list[str]) -> Path:
    """End a run once its preprocess has finished a shard. Returns the partial output."""
    run = home.start(seed, *settings)
    pattern = f"artifacts/*/preprocess/*/{PARTIAL_OUTPUT}"
    run.wait_for_any(f"{pattern}/train-*.json")
    worker = worker_of(run.process, "preprocess")
    worker.suspend()
    (partial,) = run.directory.glob(pattern)
    kill(run, worker, how)
    text = run.end()
    assert "resuming where" not in text
    assert list(partial.glob("*-*.json")), text
    return partial.parent


@pytest.mark.parametrize("how", ["SIGKILL the run", "SIGKILL the step", "Ctrl-C"])
def test_the_next_run_resumes_the_packing_of_a_killed_one(all_digits: Path, tmp_path: Path, how: str) -> None:
    home = Home(tmp_path / "home", all_digits)
    packing = ["--set", "preprocess.shard_bytes=1000000", "--set", "preprocess.num_workers=1"]
    other = killed_in_packing(home, "SIGKILL the run", 1, packing)  # another split, so other shards
    killed = killed_in_packing(home, how, 0, packing)
    done = {path.stem for path in killed.glob(f"{PARTIAL_OUTPUT}/*-*.json")}
    before = {name: (killed / f"{name}.tar").stat().st_mtime_ns for name in done}
    run = home.start(0, *packing)
    run.wait_for_any(f"artifacts/*/preprocess/*/{MANIFEST}")
    (dataset,) = (path.parent for path in run.directory.glob(f"artifacts/*/preprocess/*/{MANIFEST}"))
    run.process.send_signal(signal.SIGINT)  # the other steps are of no interest here
    assert f"resuming where an earlier run stopped, finished shards: {len(done)}" in run.end()
    assert {name: (dataset / f"{name}.tar").stat().st_mtime_ns for name in done} == before
    unbroken = tmp_path / "unbroken"
    words = ("-m", "components.preprocess", "--data", all_digits, "--output", unbroken, "--shard-bytes", "1000000")
    assert run_python(*words).returncode == 0
    files = [json.loads((folder / MANIFEST).read_text())["files"] for folder in (dataset, unbroken)]
    assert files[0] == files[1]
    assert (other / PARTIAL_OUTPUT).exists()
    assert not list(killed.glob("*.tar"))


@pytest.mark.parametrize("how", ["SIGKILL the run", "SIGKILL the step"])
def test_the_next_run_resumes_the_training_of_a_killed_one(all_digits: Path, tmp_path: Path, how: str) -> None:
    home, settings = Home(tmp_path / "home", all_digits), ["--epochs", "3"]
    run = home.start(0, *settings)
    pattern = f"artifacts/*/train/*/{PARTIAL_OUTPUT}/*/step-*.safetensors"
    run.wait_for_any(pattern)
    worker = worker_of(run.process, "train")
    worker.suspend()
    kill(run, worker, how)
    assert "resuming after" not in run.end()
    checkpoints = list(run.directory.glob(pattern))
    again = home.start(0, *settings)
    again.wait_for_any(f"artifacts/*/train/*/{MANIFEST}")
    again.process.send_signal(signal.SIGINT)  # the other steps are of no interest here
    done = max(int(path.stem.removeprefix("step-")) for path in checkpoints)
    assert f"resuming after step {done} of" in again.end()
    assert not any(path.exists() for path in checkpoints)
