"""The processes that train together: who they are, how they meet, and what they tell each other."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from components.common.environment import torchrun_rank
from components.common.errors import EngineryError, UserError
from components.train.diagnosis import diagnose

Value = TypeVar("Value")
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOOK_S = 0.01  # between two looks at the first all-reduce


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
        """Whether this process writes, logs and tracks: rank 0."""
        return self.rank == 0

    @property
    def device_id(self) -> int | None:
        """Number of its GPU; None on a CPU."""
        return self.device.index if self.device.type == "cuda" else None


def find_world() -> World:
    """This process's place, from the environment that torchrun sets; alone without one.

    Raises:
        UserError: the environment is not whole, or there are more processes than GPUs.
    """
    given = {name: os.environ.get(name) for name in _TORCHRUN}
    if torchrun_rank() is None:
        return World(device=torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    if missing := [name for name, value in given.items() if value is None]:
        raise UserError(
            f"the environment names a rank, but not {', '.join(missing)}; start the processes with torchrun, or unset "
            "RANK and WORLD_SIZE to train without others"
        )
    try:
        numbers = {name: int(str(given[name])) for name in _TORCHRUN if name != "MASTER_ADDR"}
    except ValueError:
        told = ", ".join(f"{name}={value}" for name, value in given.items())
        raise UserError(
            f"torchrun's variables must be numbers, found {told}; start the processes with torchrun"
        ) from None
    local_rank, num_gpus = numbers["LOCAL_RANK"], torch.cuda.device_count()
    if 0 < num_gpus <= local_rank:
        raise UserError(
            f"process {local_rank} of this machine has no GPU: torch sees {num_gpus}. Start at most {num_gpus} "
            "processes per machine (torchrun --nproc-per-node), or show this container more GPUs"
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
def joined(world: World, timeout_s: float) -> Iterator[None]:
    """Meet the other processes: NCCL between GPUs, gloo between CPUs, and for what CPUs tell each other in both cases.

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
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        _add_ranks(world, timeout_s)
    except (RuntimeError, ValueError) as error:
        raise EngineryError(diagnose(str(error), world.rank, world.world_size)) from error
    yield
    # Not after an error: others may still be waiting, and NCCL would wait for them.
    dist.destroy_process_group()


def _add_ranks(world: World, timeout_s: float) -> None:
    """One all-reduce as training does them, of numbers whose sum is known."""
    expected = world.world_size * (world.world_size + 1) / 2
    ranks = torch.full((1024,), world.rank + 1.0, device=world.device)
    work = dist.all_reduce(ranks, async_op=True)
    deadline = time.monotonic() + timeout_s
    # NCCL never returns where a connection is only half there, so its own wait is of no use.
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError(f"the first all-reduce did not end within {timeout_s:g} seconds")
        time.sleep(_LOOK_S)
    work.wait()
    if not bool((ranks == expected).all()):
        raise RuntimeError(f"the first all-reduce gave {ranks[0].item():g} instead of {expected:g}")


def add_up(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """The sum of a tensor over all processes, in place."""
    if world.world_size > 1:
        dist.all_reduce(tensor)
    return tensor


def from_main(value: Value, world: World) -> Value:
    """What rank 0 has; of the others the argument does not matter."""
    if world.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, device=torch.device("cpu"))
    return box[0]


def to_main(value: Value, world: World) -> list[Value]:
    """On rank 0 what each process has, in the order of ranks; empty elsewhere."""
    if world.world_size == 1:
        return [value]
    found: list[Any] = [None] * world.world_size
    dist.all_gather_object(found, value)
    return found if world.is_main else []


def same_buffers(model: torch.nn.Module, world: World) -> None:
    """Give all processes rank 0's buffers, such as BatchNorm's statistics, which each collects of its own images."""
    if world.world_size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


class Agreement:
    """What one process wants, all do, and at the same step.

    They ask each other after every step and act on the answer one step later. So nobody waits for an answer, and a
    GPU's queue never runs empty for it: it goes from CPU to CPU.
    """

    def __init__(self, world: World) -> None:
        """For the processes of `world`."""
        self._alone = world.world_size == 1
        self._asked: tuple[Any, torch.Tensor] | None = None

    def reach(self, wish: int) -> int:
        """Tell the others this process's wish; returns the largest of all processes, of the step before."""
        if self._alone:
            return wish
        agreed = 0
        if self._asked is not None:
            work, answer = self._asked
            work.wait()
            agreed = int(answer)
        answer = torch.tensor(wish)
        self._asked = (dist.all_reduce(answer, dist.ReduceOp.MAX, async_op=True), answer)
        return agreed
