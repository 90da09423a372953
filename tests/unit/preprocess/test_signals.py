"""Signals to a step that was typed by hand: its workers end with it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@contextmanager
def packing(data: Path, output: Path) -> Iterator[tuple["subprocess.Popen[str]", list[psutil.Process]]]:
    """preprocess as a person starts it, with its processes, once its workers write."""
    command = [sys.executable, "-m", "components.preprocess", "--data", str(data), "--output", str(output)]
    step = subprocess.Popen([*command, "--num-workers", "2"], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    processes: list[psutil.Process] = []
    try:
        while len(list(output.glob("*.tar"))) < 2:
            assert step.poll() is None, "the step ended before it packed"
            time.sleep(0.01)
        processes += psutil.Process(step.pid).children(recursive=True)
        yield step, processes
    finally:
        step.kill()
        for process in processes:  # which keep its output open
            with suppress(psutil.NoSuchProcess):
                process.kill()
        step.communicate()


def still_running(processes: list[psutil.Process]) -> list[str]:
    """Those that go on with their work for seconds; they are killed."""
    deadline = time.monotonic() + 5
    while (left := [process for process in processes if is_running(process)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in left:
        process.kill()
    return [str(process) for process in left]


def is_running(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)  # which nobody may collect in a container
    return False


@pytest.fixture(scope="module")
def large_images(tmp_path_factory: pytest.TempPathFactory, write_tree: Callable[..., Any]) -> Path:
    """Seconds of work for each worker."""
    root: Path = write_tree(tmp_path_factory.mktemp("large"), {"a": 2, "b": 2}, height=1500, width=1500)
    for folder in ("a", "b"):
        for number in range(60):
            os.link(root / folder / "000.png", root / folder / f"more{number}.png")
    return root


def test_workers_end_with_a_step_that_is_killed(tmp_path: Path, large_images: Path) -> None:
    with packing(large_images, tmp_path / "out") as (step, workers):
        assert len(workers) >= 2
        step.send_signal(signal.SIGKILL)
        step.wait()
        assert still_running(workers) == []


def test_a_terminal_that_closes_interrupts_a_step(tmp_path: Path, large_images: Path) -> None:
    with packing(large_images, tmp_path / "out") as (step, workers):
        step.send_signal(signal.SIGHUP)
        _, text = step.communicate(timeout=10)  # the shards that are being written take longer
        assert step.returncode == 130
        assert text.endswith("preprocess: interrupted\n")
        assert still_running(workers) == []


def test_a_worker_that_is_killed_is_told_with_the_fix(tmp_path: Path, large_images: Path) -> None:
    with packing(large_images, tmp_path / "out") as (step, processes):
        workers = [process for process in processes if "spawn_main" in " ".join(process.cmdline())]
        workers[0].send_signal(signal.SIGKILL)  # as the kernel does where memory runs out
        _, text = step.communicate(timeout=600)
        assert step.returncode == 1
        assert "preprocess: a process that packs images was killed, most often because memory ran out" in text
        assert "--set preprocess.num_workers=1 (python -m components.preprocess: --num-workers 1)" in text
