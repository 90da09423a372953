"""Real processes, really killed: the next one resumes, and the weights are those of an unbroken run, to the bit."""

import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from components.common.contracts.errors import EXIT_PREEMPTED
from components.common.contracts.manifests import FAILURE, MANIFEST, PARTIAL_OUTPUT, CheckpointManifest, load
from components.train.checkpointing import WEIGHTS
from tests.conftest import Dataset
from tests.pipelines.servers import free_port
from tests.processes import start_python
from tests.waiting import wait_until

from .conftest import SETTINGS

TIMEOUT_S = 180
TORCHRUN_VARIABLES = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


class Place:
    """A folder in which one training happens, process after process."""

    def __init__(self, folder: Path, dataset: Path, settings: dict[str, Any]) -> None:
        folder.mkdir()
        self.output, self.config, self.dataset = folder / "out", folder / "config.yaml", dataset
        # A checkpoint about every fifth of a second, so that kills fall between, into and right behind them.
        self.config.write_text(yaml.safe_dump({**settings, "checkpoint_minutes": 0.003}))

    def start(self, *torchrun: str, stdout: int = subprocess.DEVNULL, **variables: str) -> subprocess.Popen[str]:
        options = {"env": {"CUDA_VISIBLE_DEVICES": "", **variables}, "stdout": stdout, "start_new_session": True}
        words = ("--dataset", self.dataset, "--output", self.output, "--config", self.config)
        return start_python(*torchrun, "-m", "components.train", *words, **options)

    def finish(self) -> str:
        process = self.start()
        _, said = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, said
        assert not (self.output / PARTIAL_OUTPUT).exists()
        return said

    def steps(self) -> list[int]:
        return sorted(int(one.stem.split("-")[1]) for one in self.output.glob(f"{PARTIAL_OUTPUT}/*/step-*.safetensors"))

    def wait_for_step(self, process: subprocess.Popen[str], number: int) -> None:
        wait_until(lambda: max(self.steps(), default=0) >= number, lambda: process.communicate()[1], process=process)

    def weights(self) -> str:
        manifest = load(self.output, CheckpointManifest, verify=(WEIGHTS,)).manifest
        assert set(manifest.files) == {WEIGHTS, "mllog.txt"}
        assert len(manifest.history) == manifest.config["epochs"]
        return manifest.files[WEIGHTS].digest


# With all that has a state: momentum, average, mixing, sizes, accumulation, dropped layers.
EVERYTHING: dict[str, Any] = {
    **SETTINGS,
    "per_gpu_batch_size": 8,
    "ema_decay": 0.9,
    "image_sizes": [24, 32],
    "augmentation": {**SETTINGS["augmentation"], "mixup_alpha": 0.2, "cutmix_alpha": 1.0, "brightness": 0.2},
}


@pytest.fixture(scope="module")
def unbroken(tiny_dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> str:
    place = Place(tmp_path_factory.mktemp("unbroken") / "place", tiny_dataset.path, EVERYTHING)
    place.finish()
    return place.weights()


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_same_bits(tiny_dataset: Dataset, unbroken: str, tmp_path) -> None:
    """By SIGKILL, and in the end by SIGTERM, which saves first and has an exit code of its own."""
    place = Place(tmp_path / "place", tiny_dataset.path, EVERYTHING)
    chance = random.Random(1)
    for number in (1, 5, 12):  # of 18 steps: in the first epoch, near its end, at the end of the second
        process = place.start()
        place.wait_for_step(process, number)
        time.sleep(chance.uniform(0, 0.3))
        os.killpg(process.pid, signal.SIGTERM if number == 12 else signal.SIGKILL)
        _, said = process.communicate(timeout=TIMEOUT_S)
        assert not (place.output / MANIFEST).exists()
    last = place.steps()[-1]
    assert process.returncode == EXIT_PREEMPTED == 75
    assert f"stopped by SIGTERM after step {last} of 18, and saved; the same command resumes" in said
    assert "Traceback" not in said
    assert json.loads((place.output / FAILURE).read_text())["exit_code"] == 75
    assert f"resuming after step {last} of 18, where an earlier run stopped" in place.finish()
    assert place.weights() == unbroken


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sigterm_while_it_starts_up(tiny_dataset: Dataset, tmp_path, num_processes: int) -> None:
    place = Place(tmp_path / "place", tiny_dataset.path, {**SETTINGS, "num_processes": num_processes})
    process = place.start(stdout=subprocess.PIPE, ENGINERY_EVENTS="1")
    assert '"started"' in process.stdout.readline()  # nothing is imported yet
    process.terminate()
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == EXIT_PREEMPTED, said
    assert "train: stopped by SIGTERM; the same command resumes" in said


@pytest.mark.slow
def test_two_processes_are_stopped_and_resume(tiny_dataset: Dataset, tmp_path: Path) -> None:
    """SIGTERM to the step reaches both; SIGKILL of the step ends both. Two ranks add the same bits in any order."""
    settings = {**SETTINGS, "num_processes": 2, "epochs": 2}
    whole, broken = (Place(tmp_path / name, tiny_dataset.path, settings) for name in ("whole", "broken"))
    whole.finish()
    process = broken.start()
    broken.wait_for_step(process, 2)
    process.terminate()
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == EXIT_PREEMPTED, said
    stopped = broken.steps()[-1]
    assert f"stopped by SIGTERM after step {stopped} of 12" in said
    assert "Traceback" not in said
    process = broken.start()
    broken.wait_for_step(process, stopped + 2)
    process.kill()
    process.communicate()
    assert "resuming after step" in broken.finish()
    assert broken.weights() == whole.weights()


@pytest.mark.slow
def test_under_torchrun_a_killed_process_is_replaced(tiny_dataset: Dataset, tmp_path: Path) -> None:
    """Twice, and the bits are those of an unbroken run. torchrun's store has the addresses of processes gone."""
    whole, broken = (Place(tmp_path / name, tiny_dataset.path, SETTINGS) for name in ("whole", "broken"))
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=2"]
    torchrun += [f"--master-port={free_port()}", "--local-addr=127.0.0.1"]
    for place in (whole, broken):
        process = place.start(*torchrun, **TORCHRUN_VARIABLES)
        for number in (3, 8) if place is broken else ():
            place.wait_for_step(process, number)
            workers = psutil.Process(process.pid).children()
            next(worker for worker in workers if worker.environ()["RANK"] == "1").kill()
        _, said = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, said
    assert len(re.findall(r"resuming after step \d+ of 18, where an earlier run stopped\n", said)) == 2
    assert said.count("[process-lost]") == 2
    assert broken.weights() == whole.weights()


@pytest.mark.slow
def test_under_torchrun_the_world_shrinks_when_a_machine_is_gone(tiny_dataset: Dataset, tmp_path: Path) -> None:
    """Two agents of torchrun, as on two machines. One is killed with its process; the other one trains on alone."""
    place = Place(tmp_path / "place", tiny_dataset.path, {**SETTINGS, "epochs": 5})
    torchrun = ["-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"]
    torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    torchrun += ["--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"]
    first = place.start(*torchrun, **TORCHRUN_VARIABLES)
    time.sleep(2)  # it holds the meeting
    second = place.start(*torchrun, **TORCHRUN_VARIABLES)
    place.wait_for_step(first, 7)
    for process in (*psutil.Process(second.pid).children(recursive=True), second):
        process.kill()
    _, said = first.communicate(timeout=TIMEOUT_S)
    second.communicate()
    assert first.returncode == 0, said
    assert "2 processes on 2 machines, 8 images each, 1 times a step" in said
    assert re.search(r"resuming after step \d+ of 30, .*, with 1 process instead of 2", said)
    assert place.weights()
