"""Kill the chain at random times, in every way a process can be killed: nothing is lost or wrongly accepted.

make test-faults            # 200 kills, over half an hour on two cores
make test-faults KILLS=20
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from components.common.artifacts import MANIFEST
from components.common.digests import digest_file

ROOT = Path(__file__).resolve().parents[2]
NUM_KILLS = int(os.environ.get("KILLS", "200"))
SETTINGS = ["--architecture", "mobilenet_v3_small", "--image-size", "32", "--epochs", "1", "--global-batch-size", "32"]
SETTINGS += ["--num-calibration-images", "16", "--max-top1-drop-points", "100", "--set", "gate.min_relative_top1_pct=0"]
SETTINGS += ["--set", "validate.benchmark_seconds=0.1", "--set", "train.warmup_fraction=0"]


def start(home: Path, data: Path, seed: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "pipelines.cli", "run", "pipelines/resnet50.py", "--data", str(data)]
    log = (home / "console.log").open("ab")
    return subprocess.Popen(
        [*command, "--seed", str(seed), *SETTINGS],
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


def kill(process: subprocess.Popen, how: str) -> list[psutil.Process]:
    """Kill in one of four ways. Returns the processes that were below the run."""
    family = descendants(process)
    if how == "SIGKILL the parent":
        process.kill()
    elif how == "SIGKILL the step":
        steps = [child for child in family if "python" in child.name()]
        for step in steps[:1]:
            step.kill()
    elif how == "SIGTERM the parent":
        process.terminate()
    else:
        os.killpg(process.pid, signal.SIGINT)  # what Ctrl-C in a terminal does
    return family


def check_artifacts(home: Path) -> int:
    """Everything that has a manifest is whole, to the last byte. Returns how many there are."""
    manifests = list(home.glob(f"runs/*/artifacts/**/{MANIFEST}"))
    for manifest in manifests:
        for name, entry in json.loads(manifest.read_text())["files"].items():
            file = manifest.parent / name
            assert file.stat().st_size == entry["size_bytes"], file
            assert digest_file(file) == entry["digest"], file
    return len(manifests)


def check_mlflow(home: Path) -> None:
    """The store opens, and nothing that is dead is still RUNNING."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{home / 'mlflow.db'}")
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id], max_results=5000):
            assert run.info.status != "RUNNING", run.info.run_name


def test_random_kills(few_digits: Path, tmp_path: Path) -> None:
    rng = random.Random(0)
    ways = ["SIGKILL the parent", "SIGKILL the step", "SIGTERM the parent", "Ctrl-C"]
    seconds_whole, seed, num_done, seen = 30.0, 0, 0, dict.fromkeys(ways, 0)
    for number in range(NUM_KILLS):
        how = rng.choice(ways)
        process = start(tmp_path, few_digits, seed)
        started = time.monotonic()
        deadline = rng.uniform(0, seconds_whole)
        while time.monotonic() - started < deadline and process.poll() is None:
            time.sleep(0.05)
        if process.poll() is not None:
            assert process.returncode == 0, (tmp_path / "console.log").read_text()[-2000:]
            seconds_whole = max(10.0, time.monotonic() - started)  # reuse makes continued runs short
            seed, num_done = seed + 1, num_done + 1  # all steps are finished: take another chain
            continue
        family = kill(process, how)
        seen[how] += 1
        process.wait(timeout=900)  # a kill that found no step lets the run go on to its end
        alive = psutil.wait_procs(family, timeout=15)[1]
        assert not alive, f"kill {number} ({how}): still running: {alive}"
        check_artifacts(tmp_path)
        print(f"kill {number + 1}/{NUM_KILLS} after {deadline:.1f} s: {how}", flush=True)
    assert all(seen.values()) or NUM_KILLS < 20, seen
    process = start(tmp_path, few_digits, seed)
    assert process.wait(timeout=600) == 0, (tmp_path / "console.log").read_text()[-2000:]
    summaries = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/summary.json")]
    # A kill can also come after the last step, or find no step to kill: such runs are done, too.
    assert sum(summary["status"] == "done" for summary in summaries) >= num_done + 1
    assert check_artifacts(tmp_path) >= 6
    check_mlflow(tmp_path)
