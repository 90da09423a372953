"""Kill the chain at random times, in every way a process can be killed: nothing is lost or wrongly accepted.

make test-faults            # 200 kills, about an hour on two cores
make test-faults KILLS=20
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from components.common.contracts.digests import digest_file
from components.common.contracts.manifests import MANIFEST
from tests.pipelines.running import ROOT, SETTINGS

NUM_KILLS = int(os.environ.get("KILLS", "200"))


def start(home: Path, data: Path, seed: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "enginery.cli.main", "run", "pipelines/resnet50.py", "--data", str(data)]
    log = (home / "console.log").open("ab")
    return subprocess.Popen(
        [*command, "--seed", str(seed), *SETTINGS, "--set", "export.num_ranking_images=8"],
        cwd=ROOT,
        env={**os.environ, "ENGINERY_HOME": str(home), "OMP_NUM_THREADS": "2"},
        stdout=log,
        stderr=log,
        start_new_session=True,
    )


def descendants(process: subprocess.Popen) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def kill(process: subprocess.Popen, how: str) -> str:
    """Kill in one of four ways, and see that nothing survives. Returns what was killed in the end."""
    family = descendants(process)
    steps = [child for child in family if "python" in child.name()]
    if how == "SIGKILL the step" and not steps:
        how = "SIGKILL the run"  # it is between two steps
    if how == "SIGKILL the step":
        with contextlib.suppress(psutil.NoSuchProcess):
            steps[0].kill()
    elif how == "SIGKILL the run":
        process.kill()
    elif how == "SIGTERM the run":
        process.terminate()
    else:
        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C in a terminal does
    process.wait(timeout=60)
    alive = psutil.wait_procs(family, timeout=15)[1]
    assert not alive, f"{how}: still running: {alive}"
    return how


def check_artifacts(directories: Iterable[Path]) -> set[str]:
    """Everything that has a manifest is whole, to the last byte. Returns the steps that are finished."""
    finished = set()
    for manifest in (found for directory in directories for found in directory.glob(f"artifacts/**/{MANIFEST}")):
        for name, entry in json.loads(manifest.read_text())["files"].items():
            file = manifest.parent / name
            assert file.stat().st_size == entry["size_bytes"], file
            assert digest_file(file) == entry["digest"], file
        finished.add(manifest.parent.parent.name)
    return finished


def check_mlflow(home: Path) -> None:
    """The store opens, and nothing that is dead is still RUNNING."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id], max_results=5000):
            assert run.info.status != "RUNNING", run.info.run_name


def test_random_kills(few_digits: Path, tmp_path: Path) -> None:
    """One chain after the other on one state directory, each killed and continued until it is through."""
    rng = random.Random(0)
    ways = ["SIGKILL the run", "SIGKILL the step", "SIGTERM the run", "Ctrl-C"]
    began = time.monotonic()
    first = start(tmp_path, few_digits, 0)
    assert first.wait(timeout=300) == 0, console(tmp_path)
    (summary,) = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/summary.json")]
    seconds = {step["name"]: step["seconds_total"] for step in summary["steps"]}
    start_s = time.monotonic() - began - sum(seconds.values())
    number, seed, seen = 0, 1, dict.fromkeys(ways, 0)
    before, checked, finished = run_directories(tmp_path), run_directories(tmp_path), set[str]()
    while number < NUM_KILLS:
        process = start(tmp_path, few_digits, seed)
        # Steps that are taken over take no time, so a kill falls into what is left.
        left_s = sum(seconds[step] for step in seconds if step not in finished)
        deadline = time.monotonic() + rng.uniform(0, start_s + left_s)
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        if process.poll() is None:
            how = kill(process, rng.choice(ways))
            number, seen[how] = number + 1, seen[how] + 1
            print(f"kill {number}/{NUM_KILLS} at {time.monotonic() - began:.0f} s: {how}", flush=True)
        else:
            assert process.returncode == 0, console(tmp_path)
        finished |= check_artifacts(run_directories(tmp_path) - checked) - {"promote"}  # which is never taken over
        checked = run_directories(tmp_path)
        if process.returncode == 0:  # through, perhaps in spite of a signal at the very end
            summaries = [json.loads(path.read_text()) for run in checked - before for path in run.glob("summary.json")]
            # More than one where a kill came after the run had said that it was done.
            assert [summary["status"] for summary in summaries].count("done") >= 1
            seed, before, finished = seed + 1, checked, set()
    assert all(seen.values()) or NUM_KILLS < 20, seen
    process = start(tmp_path, few_digits, seed)
    assert process.wait(timeout=300) == 0, console(tmp_path)
    assert len(check_artifacts(run_directories(tmp_path))) == 6
    check_mlflow(tmp_path)


def run_directories(home: Path) -> set[Path]:
    return set(home.glob("runs/*"))


def console(home: Path) -> str:
    return (home / "console.log").read_text()[-2000:]
