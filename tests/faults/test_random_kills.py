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
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from tests.pipelines.running import check_artifacts, finish, query, start

NUM_KILLS = int(os.environ.get("KILLS", "200"))
WAYS = ("SIGKILL the run", "SIGKILL the step", "SIGTERM the run", "Ctrl-C")
SETTINGS = ("--set", "export.num_ranking_images=8")


def kill(process: "subprocess.Popen[str]", how: str) -> str:
    """Kill in one of four ways, and see that nothing survives. Returns what was killed in the end."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
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
    finish(process, 60)
    alive = psutil.wait_procs(family, timeout=15)[1]
    assert not alive, f"{how}: still running: {alive}"
    return how


def summaries(runs: Iterable[Path]) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for run in runs for path in run.glob("summary.json")]


def run_to_the_end(home: Path, data: Path, seed: int) -> None:
    process = start(home, data, "--seed", str(seed), *SETTINGS, OMP_NUM_THREADS="2")
    text = finish(process, 300)
    assert process.returncode == 0, text


def test_random_kills(few_digits: Path, tmp_path: Path) -> None:
    """One chain after the other on one state directory, each killed and resumed until it is through."""
    rng = random.Random(0)
    began = time.monotonic()
    run_to_the_end(tmp_path, few_digits, 0)
    (summary,) = summaries(tmp_path.glob("runs/*"))
    seconds = {step["name"]: step["seconds_total"] for step in summary["steps"]}
    start_s = time.monotonic() - began - sum(seconds.values())
    number, seed, seen = 0, 1, dict.fromkeys(WAYS, 0)
    before = checked = set(tmp_path.glob("runs/*"))
    finished: set[str] = set()
    while number < NUM_KILLS:
        process = start(tmp_path, few_digits, "--seed", str(seed), *SETTINGS, OMP_NUM_THREADS="2")
        # Steps that are reused take no time, so a kill falls into what is left.
        left_s = sum(seconds[step] for step in seconds if step not in finished)
        deadline = time.monotonic() + rng.uniform(0, start_s + left_s)
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
        if process.poll() is None:
            how = kill(process, rng.choice(WAYS))
            number, seen[how] = number + 1, seen[how] + 1
            print(f"kill {number}/{NUM_KILLS} at {time.monotonic() - began:.0f} s: {how}", flush=True)
        else:
            text = finish(process)
            assert process.returncode == 0, text
        runs = set(tmp_path.glob("runs/*"))
        finished |= check_artifacts(runs - checked) - {"promote"}  # which is never reused
        checked = runs
        if process.returncode == 0:  # through, perhaps in spite of a signal at the very end
            # More than one where a kill came after the run had said that it was done.
            assert "done" in [found["status"] for found in summaries(runs - before)]
            seed, before, finished = seed + 1, runs, set()
    assert all(seen.values()) or NUM_KILLS < 20, seen
    run_to_the_end(tmp_path, few_digits, seed)
    assert len(check_artifacts(tmp_path.glob("runs/*"))) == 6
    assert query(tmp_path, "select name from runs where status = 'RUNNING'") == []  # nothing that is dead
