"""Several processes: what is told when one of them fails, and what is asked before they start."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
import yaml

from components.common.contracts.errors import EngineryError, Preempted, UserError
from components.common.contracts.manifests import Artifact, CheckpointManifest, DatasetManifest, load
from components.common.contracts.settings import resolve
from components.common.process.steplog import StepLog
from components.train import distributed
from components.train.batches import plan_batches
from components.train.config import TrainConfig
from components.train.distributed import describe_links, diagnose, find_world
from components.train.launching import _failure, _Group, launch, num_processes
from components.train.ranks import RankEnd
from components.train.run import run

from .conftest import as_rank_0_of_two


def config(**settings: Any) -> TrainConfig:
    return resolve(TrainConfig, "train", settings)


def test_the_error_of_two_processes_is_one_line(
    tiny_dataset: Artifact[DatasetManifest], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # torchrun is found without it
    wrong = resolve(TrainConfig, "train", settings, {"architecture": "resnet51", "num_processes": 2})
    with pytest.raises(EngineryError) as caught:
        run(wrong, StepLog("train"), dataset=tiny_dataset.path, output=tmp_path / "out")
    assert str(caught.value).startswith("no model 'resnet51'; did you mean")
    assert caught.value.exit_code == 2


def test_a_torchrun_from_outside(
    tiny_dataset: Artifact[DatasetManifest],
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As on several machines: every process is the step itself. Rank 0 alone, which is this one, writes and speaks."""
    small = {**settings, "epochs": 1, "global_batch_size": 48, "architecture": "squeezenet1_1"}
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


def end(kind: Any, time: float, message: str = "x", exit_code: int = 1) -> RankEnd:
    return RankEnd(kind=kind, time=time, message=message, exit_code=exit_code)


def test_the_first_error_that_was_raised_to_be_read_counts() -> None:
    ends = {0: end("unknown", 1, "Connection closed by peer"), 1: end("told", 2, "no such image", 2)}
    error = _failure(ends, 2, asked=False, written="")
    assert isinstance(error, EngineryError)
    assert (str(error), error.exit_code) == ("no such image", 2)


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


def test_a_process_that_was_killed_is_named() -> None:
    """torchrun ends the others by SIGTERM then, which is no pre-emption."""
    error = _failure({0: end("preempted", 1, exit_code=75)}, 3, asked=False, written="last words")
    assert isinstance(error, EngineryError)
    assert "of 3 training processes, rank 1, 2 ended without a word" in str(error)
    assert "last words" in str(error)
    named = _failure(
        {}, 3, asked=False, written="Root Cause (first observed failure):\n[0]:\n  rank      : 2 (local_rank: 2)\n"
        "  exitcode  : -9 (pid: 3)"
    )  # fmt: skip
    assert "of 3 training processes, rank 2, the first to go, ended without a word" in str(named)
    lost = end("unknown", 1, "rank 0: RuntimeError: Connection reset by peer")
    killed = str(_failure({0: lost}, 2, asked=False, written=REPORT.format(code=-9)))
    assert "of 2 training processes, rank 1 ended without a word, so it was killed by SIGKILL, most often" in killed
    assert killed.endswith("What they wrote last:\nRuntimeError: Read error [127.0.0.1]:2468: Connection reset by peer")
    crashed = str(_failure({0: lost}, 2, asked=False, written=REPORT.format(code=-11)))
    assert "rank 1 ended without a word, so it was killed by SIGSEGV. What they wrote last" in crashed


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("rank 0: RuntimeError: Timed out waiting 8000ms for recv operation to complete", ""),
        ("rank 0: x", "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)"),
    ],
)
def test_a_process_that_is_stuck_is_named(said: str, written: str) -> None:
    """torchrun kills it when another one has given up, and nobody's memory ran out."""
    told = str(_failure({0: end("unknown", 1, said)}, 2, asked=False, written=written))
    assert "longer than train.collective_timeout_s, because rank 1 of them is stuck" in told
    assert "memory" not in told


def test_sigterm_is_told_as_such() -> None:
    saved = {0: end("preempted", 2, "after step 7"), 1: end("unknown", 3)}
    assert isinstance(error := _failure(saved, 2, asked=True, written=""), Preempted)
    assert str(error) == "after step 7"
    assert isinstance(_failure({}, 2, asked=True, written=""), Preempted)
    assert isinstance(_failure(saved, 2, asked=False, written=""), Preempted)  # somebody signalled the processes


def test_the_error_that_made_torchrun_stop_the_others_is_no_preemption() -> None:
    ends = {0: end("preempted", 2, "before the first step", 75), 1: end("unknown", 1, "rank 1: ValueError: x")}
    error = _failure(ends, 2, asked=False, written="")
    assert not isinstance(error, Preempted)
    assert str(error) == "rank 1: ValueError: x"


def test_what_counts_is_how_the_processes_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torchrun alone was killed; they went on and have finished."""

    def start(number: int, folder: Path, errors: Any) -> _Group:
        for rank in range(number):
            RankEnd(time=1.0, outcome="trained" if rank == 0 else "").write(folder, rank)
        return _Group(subprocess.Popen(["sh", "-c", "kill -9 $$"], stdout=subprocess.PIPE))

    monkeypatch.setattr(_Group, "start", start)
    assert launch(config(), StepLog("train"), 2, dataset=tmp_path, output=tmp_path / "out") == "trained"


def test_as_many_processes_as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert [num_processes(config(num_processes=number)) for number in (0, 1, 3)] == [1, 1, 3]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert [num_processes(config(num_processes=number)) for number in (0, 1, 3)] == [4, 1, 3]
    with pytest.raises(UserError, match=r"num_processes is 5, and torch sees 4 GPUs; set it to 4 or less, or to 0"):
        num_processes(config(num_processes=5))


@pytest.mark.parametrize(
    ("world_size", "global_size", "per_gpu", "expected"),
    [(1, 256, 0, (256, 1)), (4, 256, 0, (64, 1)), (4, 256, 16, (16, 4)), (1, 96, 32, (32, 3))],
)
def test_batches(world_size: int, global_size: int, per_gpu: int, expected: tuple[int, int]) -> None:
    wanted = config(global_batch_size=global_size, per_gpu_batch_size=per_gpu)
    plan = plan_batches(wanted, world_size, num_train_images=1000, num_val_images=10)
    assert (plan.per_gpu_batch_size, plan.num_accumulated) == expected


@pytest.mark.parametrize(
    ("world_size", "settings", "told"),
    [
        (3, {"global_batch_size": 256}, r"is 256, which 3 processes can't share evenly; .*to 255 or 258"),
        (
            1,
            {"global_batch_size": 256, "per_gpu_batch_size": 100},
            r"one process with train\.per_gpu.* 200 or 300, or per_gpu_.*to 64",
        ),
        (4, {"global_batch_size": 8, "per_gpu_batch_size": 8}, r"set global_batch_size to 32"),
        (
            1,
            {"global_batch_size": 256, "per_gpu_batch_size": 64, "compile": "reduce-overhead"},
            r"CUDA graphs.* 4 batches of 64 .*set compile to default, or per_gpu_batch_size to 256",
        ),
        (
            2,
            {"global_batch_size": 256, "per_gpu_batch_size": 32, "static_graph": True},
            r"static_graph .* 4 batches of 32 .*set static_graph to false, or per_gpu_batch_size to 128",
        ),
    ],
)
def test_batches_that_do_not_fit(world_size: int, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        plan_batches(config(**settings), world_size, num_train_images=1000, num_val_images=10)


def test_the_world_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_world().world_size == 1
    for name, value in {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="not LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; start the processes with tor"):
        find_world()
    for name, value in {"LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    world = find_world()
    assert (world.rank, world.local_rank, world.world_size, world.local_world_size) == (5, 1, 8, 4)
    assert not world.is_main
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="process 1 of this machine has no GPU: torch sees 1"):
        find_world()
    monkeypatch.setenv("LOCAL_RANK", "five")
    with pytest.raises(UserError, match="must be numbers, found RANK=5, LOCAL_RANK=five"):
        find_world()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",
            "one process per GPU",
        ),
        (
            "unhandled system error\nError while creating shared memory segment /dev/shm/nccl-x (size 9637888)",
            "shm-size",
        ),
        ("Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME"),
        ("the first all-reduce did not end within 600 seconds", "a process is missing or stuck"),
        ("Failed to bind NVLink SHARP (NVLS) Multicast memory", "NCCL_NVLS_ENABLE=0"),
        ("something new", "NCCL_DEBUG=INFO"),
    ],
)
def test_trouble_is_diagnosed(said: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    text = diagnose(said, 0, 4)
    assert told in text
    assert "the 4 training processes can't work together" in text
    assert "NCCL_IB_DISABLE=1" in text
    assert "\n" not in text


def test_links_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def answers(status: Callable[[str, str], int], level: int = pynvml.NVML_TOPOLOGY_SYSTEM) -> SimpleNamespace:
        own = {name: getattr(pynvml, name) for name in dir(pynvml) if name.startswith(("NVML_", "NVMLError"))}
        return SimpleNamespace(
            **own,
            nvmlInit=lambda: None,
            nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
            nvmlDeviceGetP2PStatus=lambda first, second, _: status(first, second),
            nvmlDeviceGetTopologyCommonAncestor=lambda *_: level,
        )

    uuids = ["GPU-a", "GPU-b", "GPU-c"]
    monkeypatch.setattr(distributed, "pynvml", answers(lambda *_: pynvml.NVML_P2P_STATUS_OK))
    assert describe_links(uuids) == "NVLink (3 pairs)"
    monkeypatch.setattr(
        distributed, "pynvml", answers(lambda first, second: 0 if (first, second) == ("GPU-a", "GPU-b") else 1)
    )
    assert describe_links(uuids) == "PCIe and the link between NUMA nodes (2 pairs), NVLink (1 pair)"

    def refused(*_: Any) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(distributed, "pynvml", answers(refused))
    assert describe_links(uuids) == ""
