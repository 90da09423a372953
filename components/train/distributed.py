"""Processes that train together: topology, process group, collectives, SIGTERM, and the causes of NCCL's failures."""

import os
import re
import shutil
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from types import FrameType
from typing import Any, TypeVar

import pynvml
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from components.common.contracts.environment import torchrun_rank
from components.common.contracts.errors import EngineryError, Preempted, UserError, shortened

# NVML's levels of the topology -> words, as `nvidia-smi topo -m` explains them.
_PATHS = {
    "NVML_TOPOLOGY_INTERNAL": "one board",
    "NVML_TOPOLOGY_SINGLE": "one PCIe switch",
    "NVML_TOPOLOGY_MULTIPLE": "several PCIe switches",
    "NVML_TOPOLOGY_HOSTBRIDGE": "a PCIe host bridge",
    "NVML_TOPOLOGY_NODE": "PCIe inside a NUMA node",
    "NVML_TOPOLOGY_SYSTEM": "PCIe and the link between NUMA nodes",
}


def describe_links(world: "World") -> str:
    """Return the GPUs here and how each pair is connected, such as "; NVIDIA H200, connected by NVLink (6 pairs)".

    Empty for fewer than two; without the connections where NVML can't tell them.
    """
    if world.device.type != "cuda" or world.local_world_size == 1:
        return ""
    properties = [torch.cuda.get_device_properties(index) for index in range(world.local_world_size)]
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{one.uuid}") for one in properties]
        paths = Counter(_path(first, second) for first, second in combinations(handles, 2))
    except pynvml.NVMLError:
        return f"; {properties[0].name}"
    links = ", ".join(f"{path} ({number} pair{'s' if number > 1 else ''})" for path, number in paths.most_common())
    return f"; {properties[0].name}, connected by {links}"


def _path(first: Any, second: Any) -> str:
    status = pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if status == pynvml.NVML_P2P_STATUS_OK:
        return "NVLink"
    level = pynvml.nvmlDeviceGetTopologyCommonAncestor(first, second)
    return next((words for name, words in _PATHS.items() if getattr(pynvml, name) == level), f"level {level}")


# Signs in the message -> what is wrong and what to do. The first that fits counts.
_KNOWN = (
    (
        r"Duplicate GPU detected",
        "two processes use one GPU: start one process per GPU, told apart by LOCAL_RANK or CUDA_VISIBLE_DEVICES",
    ),
    (
        r"No space left on device|/dev/shm|shared memory|shmget|Error while creating shared memory",
        "the shared memory of this container is too small: docker run --shm-size=8g or --ipc=host, in Kubernetes an "
        "emptyDir of medium Memory at /dev/shm",
    ),
    (
        r"address already in use|EADDRINUSE",
        "the port is taken, perhaps by an earlier run: end it, or choose another port (torchrun --master-port)",
    ),
    (
        r"getaddrinfo|gai error|Name or service not known|could not resolve|hostname",
        "a host name is unknown: MASTER_ADDR must be a name or address that every machine can reach",
    ),
    (
        r"no (socket )?interface|Bootstrap|socketStartConnect|Connection refused|No route|unable to find address",
        "the network between the processes does not work: name the right interface (NCCL_SOCKET_IFNAME, "
        "GLOO_SOCKET_IFNAME; ip addr lists them) and open the ports between the machines",
    ),
    (
        r"peer access|P2P|cudaIpc|invalid device function",
        "the GPUs can't reach each other's memory: try NCCL_P2P_DISABLE=1; if that helps, PCIe access control (ACS) or "
        "the virtual machine is in the way",
    ),
    (r"nvls|multicast", "NVLink multicast does not work here: set NCCL_NVLS_ENABLE=0"),
    (r"out of memory", "a GPU has no memory left: nvidia-smi shows what else uses it"),
    (
        r"driver version|CUDA driver|no kernel image",
        "the NVIDIA driver does not fit this CUDA: enginery doctor shows both versions",
    ),
    (
        r"timed? ?out|did not end within|Connection closed|Connection reset|not all .* joined|DistStoreError",
        "a process is missing or stuck: see whether all have started, and its own output for an error; "
        "NCCL_DEBUG=INFO tells where NCCL waits",
    ),
)
_SMALL_BYTES = 128 << 20  # Docker's default is 64 MiB


def diagnose(message: str, rank: int, world_size: int) -> str:
    """Return what the user should read when an all-reduce between the processes failed: the cause, if known, and a fix.

    With what of this machine is known to make trouble.
    """
    text = " ".join(message.split())
    advice = next((advice for signs, advice in _KNOWN if re.search(signs, text, re.IGNORECASE)), "")
    if not advice:
        advice = "set NCCL_DEBUG=INFO and run again: the lines before the error name what failed"
    facts: list[str] = []
    try:
        shared_bytes = shutil.disk_usage("/dev/shm").total
        if shared_bytes < _SMALL_BYTES:
            facts.append(f"/dev/shm has only {shared_bytes / 1e6:.0f} MB")
    except OSError:
        facts.append("there is no /dev/shm")
    facts += [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "GLOO_"))]
    here = f" Here {', '.join(facts)}." if facts else ""
    return (
        f"the {world_size} training processes can't work together (rank {rank} of them says so): {advice}.{here} "
        f"The library says: {shortened(text)}"
    )


class StopRequest:
    """While it is entered, SIGTERM ends the work in order: at once where there is nothing to save, else on request."""

    def __init__(self, *, waits: bool = False) -> None:
        """Nobody has asked yet, and there is nothing to save.

        Args:
            waits: the first step needs processes of other machines, and nobody asks how this one ended. While it waits
                for them in a library no handler of Python's runs, so SIGTERM has none until there is something to save.
        """
        self.requested = False
        self.has_work = False  # there is something to save, and the loop looks at `requested`
        self._waits = waits
        self._before: object = None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, signal.SIG_DFL if self._waits else self._on_signal)
        return self

    def begin(self) -> None:
        """There is something to save from now on, and the loop looks at `requested`."""
        if not self.has_work and self._before is not None:
            signal.signal(signal.SIGTERM, self._on_signal)
        self.has_work = True

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if not self.has_work:
            raise Preempted("stopped by SIGTERM before the first step; nothing is lost, run the same command again")


Value = TypeVar("Value")
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_POLL_S = 0.01  # between two questions after the first all-reduce


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among those that train together. Alone, it is rank 0 of 1."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    device: torch.device

    @property
    def is_main(self) -> bool:
        """True for rank 0, the process that writes, logs and tracks."""
        return self.rank == 0

    @property
    def device_id(self) -> int | None:
        """Number of its GPU; None on a CPU."""
        return self.device.index if self.device.type == "cuda" else None


def find_world() -> World:
    """Return this process's ranks, from the environment that torchrun sets; alone without one.

    Raises:
        UserError: the environment is not whole, or there are more processes than GPUs.
    """
    if torchrun_rank() is None:
        return World(device=torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    given = {name: os.environ.get(name) for name in _TORCHRUN}
    if missing := [name for name, value in given.items() if value is None]:
        raise UserError(
            f"the environment names a rank, but not {', '.join(missing)}; start the processes with torchrun, or unset "
            "RANK and WORLD_SIZE to train without others",
            code="no-torchrun",
        )
    try:
        numbers = {name: int(str(given[name])) for name in _TORCHRUN if name != "MASTER_ADDR"}
    except ValueError:
        found = ", ".join(f"{name}={value}" for name, value in given.items())
        message = f"torchrun's variables must be numbers, found {found}; start the processes with torchrun"
        raise UserError(message, code="no-torchrun") from None
    local_rank, num_gpus = numbers["LOCAL_RANK"], torch.cuda.device_count()
    if 0 < num_gpus <= local_rank:
        raise UserError(
            f"process {local_rank} of this machine has no GPU: torch sees {num_gpus}. Start at most {num_gpus} "
            "processes per machine (torchrun --nproc-per-node), or show this container more GPUs",
            code="too-few-gpus",
        )
    device = torch.device("cuda", local_rank) if num_gpus else torch.device("cpu")
    return World(
        rank=numbers["RANK"],
        local_rank=local_rank,
        world_size=numbers["WORLD_SIZE"],
        local_world_size=numbers["LOCAL_WORLD_SIZE"],
        device=device,
    )


@contextmanager
def process_group(world: World, timeout_s: float) -> Iterator[None]:
    """Join the other processes: NCCL between GPUs, gloo between CPUs, and in both cases for objects.

    Raises:
        EngineryError: they can't be reached or can't add numbers together, with what to do about it.
    """
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    if world.world_size == 1:
        yield
        return
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=_store_of_this_start(world, timeout_s),
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        _add_ranks(world, timeout_s)
    except (RuntimeError, ValueError) as error:
        text = diagnose(str(error), world.rank, world.world_size)
        raise EngineryError(text, code="process-group-failed") from error
    yield
    # Not after an error: others may still be waiting, and NCCL would wait for them.
    dist.destroy_process_group()


def _store_of_this_start(world: World, timeout_s: float) -> Store:
    """Return a part of torchrun's store that no earlier process has written to.

    Its agent keeps one store over all restarts, with the addresses of processes that are gone, which torch would take
    for those of the others. Nothing that all processes know tells one start from the next (TORCHELASTIC_RESTART_COUNT
    differs between machines), so rank 0 sends its name for this one to every process that has just asked for it.
    """
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    name = uuid.uuid4().hex
    if not world.is_main:
        store.set(f"enginery/question/{world.rank}", name)
        start = store.get(f"enginery/answer/{name}").decode()
        store.set(f"enginery/arrival/{start}/{world.rank}", "")
        return PrefixStore(start, store)
    missing, deadline = set(range(1, world.world_size)), time.monotonic() + timeout_s
    while missing:
        for rank in sorted(missing):
            if store.check([question := f"enginery/question/{rank}"]):  # which may be of a process that is gone
                store.set(f"enginery/answer/{store.get(question).decode()}", name)
        missing = {rank for rank in missing if not store.check([f"enginery/arrival/{name}/{rank}"])}
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all processes have joined within {timeout_s:g} seconds: no rank {min(missing)}")
        time.sleep(_POLL_S)
    return PrefixStore(name, store)


def _add_ranks(world: World, timeout_s: float) -> None:
    """Try an all-reduce as training does them, of numbers whose sum is known."""
    expected = world.world_size * (world.world_size + 1) / 2
    ranks = torch.full((1024,), world.rank + 1.0, device=world.device)
    work = dist.all_reduce(ranks, async_op=True)
    deadline = time.monotonic() + timeout_s
    # NCCL never returns where a connection is only half there, so its own wait is of no use.
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the first all-reduce did not end within {timeout_s:g} seconds")
        time.sleep(_POLL_S)
    work.wait()
    if not bool((ranks == expected).all()):
        raise RuntimeError(f"the first all-reduce gave {ranks[0].item():g} instead of {expected:g}")


def all_reduce_sum(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """Return the sum of a tensor over all processes, in place."""
    if world.world_size > 1:
        dist.all_reduce(tensor)
    return tensor


def broadcast(value: Value, world: World) -> Value:
    """Return the value of rank 0; those of the others do not matter."""
    if world.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, device=torch.device("cpu"))
    return box[0]


def gather(value: Value, world: World) -> list[Value]:
    """Return the values of all processes in the order of ranks, on rank 0; empty elsewhere."""
    if world.world_size == 1:
        return [value]
    found: list[Any] = [None] * world.world_size
    dist.all_gather_object(found, value)
    return found if world.is_main else []


def broadcast_buffers(model: torch.nn.Module, world: World) -> None:
    """Give all processes rank 0's buffers, such as BatchNorm's statistics, which each collects of its own images."""
    if world.world_size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


class Consensus:
    """Makes all processes do what one of them needs, and at the same step.

    They ask each other after every step and act on the answer one step later. So nobody waits for an answer, and a
    GPU's queue never runs empty for it: it goes from CPU to CPU.
    """

    def __init__(self, world: World) -> None:
        """Nothing is asked yet of the processes of `world`."""
        self._alone = world.world_size == 1
        self._asked: tuple[Any, torch.Tensor] | None = None

    def reach(self, wanted: int) -> int:
        """Tell the others what this process wants; returns the largest of all processes, of the step before."""
        if self._alone:
            return wanted
        agreed = 0
        if self._asked is not None:
            work, answer = self._asked
            work.wait()
            agreed = int(answer)
        answer = torch.tensor(wanted)
        self._asked = (dist.all_reduce(answer, dist.ReduceOp.MAX, async_op=True), answer)
        return agreed
