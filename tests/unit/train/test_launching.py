"""Several processes: the one error when some of them fail, and what is checked before they start."""

import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
import yaml

from components.common.contracts.errors import EngineryError, Preempted
from components.common.contracts.manifests import CheckpointManifest, load
from components.common.contracts.settings import resolve
from components.common.process.steplog import StepLog
from components.train import distributed
from components.train.batches import plan_batches
from components.train.config import TrainConfig
from components.train.distributed import World, describe_links, diagnose, find_world
from components.train.launching import RankEnd, _failure, _Group, launch, num_processes
from components.train.run import run
from tests.conftest import Dataset
from tests.processes import run_python
from tests.unit.refusals import refuses

from .conftest import SETTINGS, Log, Train, as_rank_0_of_two, config


def test_an_external_torchrun(tiny_dataset: Dataset, tmp_path: Path, monkeypatch, capfd) -> None:
    """As on several machines: every process is the step itself. Rank 0 alone, which is this one, writes and speaks."""
    small = {**SETTINGS, "epochs": 1, "global_batch_size": 48, "architecture": "squeezenet1_1"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(small))
    command = [sys.executable, "-m", "components.train", "--dataset", str(tiny_dataset.path)]
    command += ["--output", str(tmp_path / "out"), "--config", str(tmp_path / "config.yaml")]
    with as_rank_0_of_two(monkeypatch, command) as other:
        run(resolve(TrainConfig, "train", small), StepLog("train"), dataset=tiny_dataset.path, output=tmp_path / "out")
        assert other.wait(300) == 0
    said = capfd.readouterr().err
    assert said.count("2 processes, 24 images each, 1 times a step") == 1
    assert "squeezenet1_1 at" not in said  # what the step's own process says at its end: rank 1 says nothing
    assert len(load(tmp_path / "out", CheckpointManifest).manifest.history) == 1


LOSING = """
import atexit, os
from components.train import run
from components.train.__main__ import STEP

def train(config, log, **folders):
    atexit.register(print, "an exit handler")
    raise RuntimeError(os.environ["SAID"])

run.train = train
STEP.command()()
"""


WATCHDOG = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("[pair.cc:547] Connection closed by peer", r"has ended.* Connection closed.*\[process-lost\]"),
        ("Timed out waiting 10000ms for recv operation to complete", r"did not answer.*\[process-stuck\]"),
        (WATCHDOG, r"did not answer in time: .*train.collective_timeout_s.*\[process-stuck\]"),
    ],
)
def test_a_process_of_an_external_torchrun_that_loses_another_one_ends_at_once(
    said: str, text: str, tiny_dataset: Dataset, tmp_path: Path
) -> None:
    folders = ["--dataset", str(tiny_dataset.path), "--output", str(tmp_path / "out")]
    ended = run_python("-c", LOSING, *folders, RANK="0", WORLD_SIZE="2", SAID=said)
    assert (ended.returncode, ended.stdout) == (1, "")  # those of libraries may wait for the process that is gone
    assert re.search(f"another of the 2 training processes {text}", ended.stderr)


def end(kind: Any, time: float, message: str = "x", exit_code: int = 1) -> RankEnd:
    code = "no-image" if kind == "reported" else ""
    return RankEnd(kind=kind, time=time, message=message, exit_code=exit_code, code=code)


# As torchrun writes it: the root cause is the process that it saw to fail first, here because the other one was gone.
REPORT = """RuntimeError: Read error [127.0.0.1]:2468: Connection reset by peer
E1122 01:45:36.182000 12707 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 12771)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 12770)
"""
FIRST = "Root Cause (first observed failure):\n[0]:\n  rank      : 2 (local_rank: 2)\n  exitcode  : -9 (pid: 3)"
LOST = end("unknown", 1, "rank 0: RuntimeError: Connection reset by peer")
STUCK = end("unknown", 1, "rank 0: RuntimeError: Timed out waiting 8000ms for recv operation to complete")


@pytest.mark.parametrize(
    ("ends", "number", "written", "code", "text"),
    [
        # The first error that was raised to be read counts.
        ([end("unknown", 1, "closed by peer"), end("reported", 2, "none such", 2)], 2, "", "no-image", "none such"),
        # torchrun ends the others by SIGTERM when one was killed or has failed, which is no pre-emption.
        ([end("preempted", 1)], 3, "last words", "process-killed", r"rank 1, 2 ended(.|\n)*last words"),
        ([], 3, FIRST, "process-killed", "of 3 training processes, rank 2, the first to go, ended without a word"),
        ([LOST], 2, REPORT.format(code=-9), "process-killed", "rank 1 .* killed by SIGKILL, most often because memory"),
        ([LOST], 2, REPORT.format(code=-11), "process-killed", r"killed by SIGSEGV\. What they wrote last:\nRuntimeEr"),
        ([end("preempted", 2, "early", 75), end("unknown", 1, "rank 1: x")], 2, "", "", "rank 1: x"),
        # torchrun kills one that is stuck when another one has given up, and nobody's memory ran out.
        ([STUCK], 2, "", "process-stuck", "because rank 1 of them is stuck"),
        ([end("unknown", 1)], 2, WATCHDOG, "process-stuck", "because rank 1 of them is stuck"),
    ],
)
def test_one_error_for_several_processes(ends: list[RankEnd], number: int, written: str, code: str, text: str) -> None:
    error = _failure(dict(enumerate(ends)), number, asked=False, written=written)
    assert isinstance(error, EngineryError)
    assert error.code == code
    assert re.search(text, str(error))


def test_sigterm_is_a_preemption() -> None:
    saved = {0: end("preempted", 2, "after step 7"), 1: end("unknown", 3)}
    assert isinstance(error := _failure(saved, 2, asked=True, written=""), Preempted)
    assert str(error) == "after step 7"
    assert isinstance(_failure({}, 2, asked=True, written=""), Preempted)
    assert isinstance(_failure(saved, 2, asked=False, written=""), Preempted)  # somebody signalled the processes


@pytest.mark.parametrize(
    ("tries", "num_starts", "code"),
    [
        ([[RankEnd(time=1.0, outcome="trained"), RankEnd(time=1.0)]], 1, ""),  # torchrun alone was killed
        ([[LOST], [], [RankEnd(time=1.0, outcome="trained"), RankEnd(time=1.0)]], 3, ""),
        ([[LOST]] * 4, 4, "process-killed"),
        ([[end("reported", 1), LOST]], 1, "no-image"),
    ],
)
def test_a_kill_restarts_all(
    monkeypatch, tmp_path: Path, tries: list[list[RankEnd]], num_starts: int, code: str
) -> None:
    left, log = iter(tries), Log()

    def start(number: int, folder: Path, errors: Any) -> _Group:
        for rank, found in enumerate(next(left)):
            found.write(folder, rank)
        return _Group(subprocess.Popen(["sh", "-c", "kill -9 $$"], stdout=subprocess.PIPE))

    monkeypatch.setattr(_Group, "start", start)
    with refuses(code) if code else nullcontext():
        assert launch(config(), log, 2, dataset=tmp_path, output=tmp_path / "out") == "trained"
    again = [re.findall(r"All start again .* \(restart (.) of 3\)", text) for text in log.said]
    assert again == [["1"], ["2"], ["3"]][: num_starts - 1]


def test_torchrun_starts_a_process_that_resumes(train: Train, tiny_dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(Preempted):
        train(Log(sigterm_after=8))
    log, output = Log(), tmp_path / "out"
    outcome = launch(config(architecture="squeezenet1_1"), log, 1, dataset=tiny_dataset.path, output=output)
    assert outcome.startswith("squeezenet1_1 at ")
    assert "resuming after step 8 of 18, where an earlier run stopped" in log.said
    assert (len(log.epochs), len(load(output, CheckpointManifest).manifest.history)) == (2, 3)


@pytest.mark.parametrize(("num_gpus", "expected"), [(0, [1, 1, 3]), (4, [4, 1, 3])])
def test_as_many_processes_as_gpus(monkeypatch: pytest.MonkeyPatch, num_gpus: int, expected: list[int]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert [num_processes(config(num_processes=number)) for number in (0, 1, 3)] == expected
    if num_gpus:
        with refuses("too-few-gpus", "train.num_processes"):
            num_processes(config(num_processes=5))


def test_a_step_of_several_nodes_without_torchrun(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NNODES", "2")
    with refuses("no-torchrun"):
        train()


@pytest.mark.parametrize(
    ("world_size", "global_size", "per_gpu", "expected"),
    [(1, 256, 0, (256, 1)), (4, 256, 0, (64, 1)), (4, 256, 16, (16, 4)), (1, 96, 32, (32, 3))],
)
def test_batches(world_size: int, global_size: int, per_gpu: int, expected: tuple[int, int]) -> None:
    wanted = config(global_batch_size=global_size, per_gpu_batch_size=per_gpu)
    plan = plan_batches(wanted, world_size, num_train_images=1000, num_val_images=10)
    assert (plan.per_gpu_batch_size, plan.num_accumulated) == expected


@pytest.mark.parametrize(
    ("world_size", "settings", "code", "setting", "fix"),
    [
        (1, {"global_batch_size": 1001}, "batch-too-large", "global_batch_size", "to 1000"),
        (3, {}, "batch-not-divisible", "global_batch_size", "255 or 258"),
        (1, {"per_gpu_batch_size": 100}, "batch-not-divisible", "global_batch_size", "200 or 300.*to 64"),
        (4, {"global_batch_size": 8, "per_gpu_batch_size": 8}, "batch-not-divisible", "global_batch_size", "to 32"),
        (1, {"per_gpu_batch_size": 64, "compile": "reduce-overhead"}, "no-accumulation", "compile", "to 256"),
        (2, {"per_gpu_batch_size": 32, "static_graph": True}, "no-accumulation", "static_graph", "to 128"),
    ],
)
def test_batches_that_do_not_fit(world_size: int, settings: dict[str, Any], code: str, setting: str, fix: str) -> None:
    wanted = config(**{"global_batch_size": 256, **settings})
    with refuses(code, f"train.{setting}") as caught:
        plan_batches(wanted, world_size, num_train_images=1000, num_val_images=10)
    assert re.search(fix, str(caught.value))


def test_the_world_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_world().world_size == 1
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    with refuses("no-torchrun"):
        find_world()
    for name, value in {"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    world = find_world()
    assert (world.rank, world.local_rank, world.world_size, world.local_world_size) == (5, 1, 8, 4)
    assert not world.is_main
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for local_rank, code in (("1", "too-few-gpus"), ("five", "no-torchrun")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        with refuses(code):
            find_world()


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", "process per GPU"),
        ("unhandled system error\nError while creating shared memory segment /dev/shm/nccl-x (size 9637)", "shm-size"),
        ("Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"),
        ("the first all-reduce did not end within 600 seconds", "a process is missing or stuck"),
        ("Failed to bind NVLink SHARP (NVLS) Multicast memory", "NCCL_NVLS_ENABLE=0"),
        ("something new", "NCCL_DEBUG=INFO"),
    ],
)
def test_trouble_is_diagnosed(said: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    text = diagnose(said, 0, 4)
    assert all(part in text for part in (advice, "the 4 training processes can't", "NCCL_IB_DISABLE=1"))
    assert "\n" not in text


def refused(*_: Any) -> int:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.mark.parametrize(
    ("status", "links"),
    [
        (lambda *_: pynvml.NVML_P2P_STATUS_OK, ", connected by NVLink (3 pairs)"),
        (
            lambda first, second, _: int((first, second) != ("GPU-0", "GPU-1")),
            ", connected by PCIe and the link between NUMA nodes (2 pairs), NVLink (1 pair)",
        ),
        (refused, ""),
    ],
)
def test_links_between_gpus(monkeypatch: pytest.MonkeyPatch, status: Callable[..., int], links: str) -> None:
    own = {name: getattr(pynvml, name) for name in dir(pynvml) if name.startswith(("NVML_", "NVMLError"))}
    answers = SimpleNamespace(
        **own,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetP2PStatus=status,
        nvmlDeviceGetTopologyCommonAncestor=lambda *_: pynvml.NVML_TOPOLOGY_SYSTEM,
    )
    monkeypatch.setattr(distributed, "pynvml", answers)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="NVIDIA H200", uuid=str(index))
    )
    world = World(world_size=3, local_world_size=3, device=torch.device("cuda", 0))
    assert describe_links(world) == f"; NVIDIA H200{links}"
